"""`fcoll.start` and `fcoll.wait`: a collective goes on while something else is computed, in derivatives as well."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import optree
import torch
from torch import Tensor

from fcoll import passage, trees
from fcoll.errors import fail
from fcoll.groups import GroupLike

Tree = TypeVar("Tree")
Params = ParamSpec("Params")
Steps = list[tuple[Any, Callable[[Tensor], None]]]


class Pending(Generic[Tree]):
    """What `fcoll.start` returns: the result of a collective that is on its way.

    It is a tree, whose leaves stand for the messages. `fcoll.wait` gives the result. Whoever drops it loses the result
    and nothing else.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.wait(fcoll.start(fcoll.shift, x, "i")), axis_name="i")(torch.arange(3))
        tensor([2, 0, 1])
    """

    def __init__(
        self, tensors: list[Tensor | None], passages: list[Any], finish: Callable[[list[Tensor]], Any]
    ) -> None:
        self._tensors, self._passages, self._finish = tensors, passages, finish
        self._traced = torch.compiler.is_compiling()
        self._result: list[Any] = []

    def __repr__(self) -> str:
        return f"fcoll.Pending({len(self._passages)} message{'s' * (len(self._passages) != 1)})"


def _children(pending: Pending[Any]) -> tuple[list[Tensor | None], Pending[Any], None]:
    return pending._tensors, pending, None


def _rebuilt(pending: Pending[Any], tensors: Any) -> Pending[Any]:
    made: Pending[Any] = Pending(list(tensors), pending._passages, pending._finish)
    made._traced = pending._traced
    return made


_register: Any = optree.register_pytree_node
_register(Pending, _children, _rebuilt, namespace=trees.NAMESPACE)


class _State(threading.local):
    def __init__(self) -> None:  # an attribute of the object from the start: Dynamo guards on where it was found
        self.starting = False


_state = _State()
STARTABLE = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter",
    "permute", "shift",
)  # fmt: skip


def starting() -> bool:
    """Whether the call that is made is to be started only."""
    return _state.starting


def start(
    f: Callable[Concatenate[Tree, GroupLike, Params], Tree],
    tree: Tree,
    group: GroupLike,
    *args: Params.args,
    **kwargs: Params.kwargs,
) -> Pending[Tree]:
    """Start the collective `f(tree, group, ...)`: what is computed until `fcoll.wait` overlaps with the messages.

    Per rank:
        wait(start(f, tree, group, ...)) = f(tree, group, ...)

    Transpose: that of `wait` starts the transposed collective, and that of `start` waits for it, so that the backward
    pass overlaps as well: with the derivatives of what was computed in between. This is what `async_op=True` and a
    stream for each call are for in other libraries.

    Compiled, the graph holds the start and the wait apart. On an emulated axis, `start` does it all; for max, min and
    prod as well where there are derivatives, whose transpose is no single collective.

    Args:
        f: a collective of fcoll that communicates, with neither `sizes` nor `send_sizes`.
        tree: as for `f`. Whoever changes a tensor of it in place before the wait changes what is sent.
        group: the ranks.
        *args: and **kwargs of `f`.

    Raises:
        TypeError: `f` is something else.
        ValueError: sizes were given; and what `f` raises.

    Example:
        >>> def f(x, w):
        ...     gathered = fcoll.start(fcoll.all_gather, x, "i")
        ...     y = w @ w  # meanwhile
        ...     return fcoll.wait(gathered).sum() + y.sum()
        >>> fcoll.vmap(f, in_dims=(0, None), axis_name="i")(torch.ones(2, 3), torch.eye(2))
        tensor([8., 8.])
    """
    name = getattr(f, "__name__", "")
    if getattr(f, "__module__", "") != "fcoll.functional" or name not in STARTABLE:
        given = name if callable(f) and name else type(f).__name__
        fail("type", "start: f is one of {}, got {}", ", ".join(f"fcoll.{name}" for name in STARTABLE), given)
    for key in ("sizes", "send_sizes", "recv_sizes"):
        if kwargs.get(key) is not None:
            fail("value", "start: {} with {} cannot be started; call it as it is", name, key)
    _state.starting = True
    try:
        pending = f(tree, group, *args, **kwargs)
    finally:
        _state.starting = False
    assert isinstance(pending, Pending)
    return pending


def wait(pending: Pending[Tree]) -> Tree:
    """Wait for what `fcoll.start` has started, and return its result.

    Per rank:
        wait(start(f, tree, group, ...)) = f(tree, group, ...)

    Transpose: starts the transposed collective.

    Waiting again for the same object gives the same result. Where there are derivatives, all ranks wait in the order of
    the starts; without, in any order.

    Args:
        pending: what `fcoll.start` returned.

    Raises:
        TypeError: `pending` is something else.
        ValueError: it was started before another one of the group that has been waited for, and has derivatives; it is
            a copy of one that has been waited for; or it comes out of, or goes into, a compiled function.

    Example:
        >>> fcoll.wait(torch.ones(2))
        Traceback (most recent call last):
        fcoll.errors.CollectiveTypeError: wait: pending is what fcoll.start returned, got Tensor
    """
    if not isinstance(pending, Pending):
        fail("type", "wait: pending is what fcoll.start returned, got {}", type(pending).__name__)
    if pending._traced != torch.compiler.is_compiling():
        text = "wait: start and wait must both be inside, or both outside, of a compiled function"
        fail("value", text, about="Values inside transforms and compiled code")
    if not pending._result:
        arrived = [passage.end(x, way) for x, way in zip(pending._tensors, pending._passages, strict=True)]
        pending._result.append(pending._finish(arrived))
    result: Tree = pending._result[0]
    return result
