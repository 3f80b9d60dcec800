"""`fcoll.checked`: before each collective on a process group, the ranks compare what they are about to do.

Eager calls are compared with their whole tree, by `whole`; derivatives, and what a compiler traces, one collective at a
time, by `each`. What is called under `checked` is checked in its derivatives too, wherever they run:
`groups.Layout.check` goes along. How the ranks compare is in `agreement.py`.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import _torch, agreement, buckets, recorder
from fcoll.agreement import GRADIENT, Facts, Site
from fcoll.errors import CommunicationError, explained, fail

Function = TypeVar("Function", bound=Callable[..., Any])


class Check(NamedTuple):
    """How calls are compared; travels as a plain tuple, in `groups.Layout.check`."""

    which: str  # "all", or "first": each line once
    timeout: str  # a number, which as a float would be a symbol to compilers
    lines: bool  # whether the ranks must call from the same line
    done: bool = False  # what runs now has been compared


def _from_environment() -> tuple[Any, ...]:
    which = os.environ.get("FCOLL_CHECK", "")
    if which in ("", "0"):
        return ()
    return tuple(
        Check("first" if which == "first" else "all", str(float(os.environ.get("FCOLL_CHECK_TIMEOUT", "30"))), True)
    )


class _State(threading.local):
    def __init__(self) -> None:  # an attribute of the object from the start: Dynamo guards on where it was found
        self.check: tuple[Any, ...] = _from_environment()

    def __reduce__(self) -> str:  # what `checked` decorates goes to other processes, where this is their own
        return "_state"


_state = _State()


def wanted() -> tuple[Any, ...]:
    """How calls that are made here are to be compared, as a `Check`; () if they are not."""
    return _state.check


class checked:
    """Compare the ranks' calls before each collective on a process group: whoever differs is named, nobody hangs.

    Per rank:
        function, parameters, group, tree, shapes, dtypes, kinds of device, requires_grad and the line of the call are
        compared, for forward calls as well as for those of derivatives

    A context manager, and a decorator. It holds for the calls that this thread makes in it, and for their derivatives,
    wherever these run. Emulated axes need no check and are left alone. `FCOLL_CHECK=1` (or `first`) in the environment
    checks the whole process, with the limit `FCOLL_CHECK_TIMEOUT`.

    Off, it costs nothing. On, each call costs every rank one message of some 100 bytes to the world's store, and a few
    round trips there. All ranks of a group must turn it on and off at the same calls.

    Args:
        which: "all", or "first" to compare each line of the program once per group.
        timeout: how many seconds a rank waits for the others.
        lines: whether the ranks must call from the same line of the program.

    Raises:
        DisagreementError: in the checked calls, on every rank of the group: which ranks differ, in what, at which
            lines; or who has not arrived within the limit, and where everyone is.
        CommunicationError: in the checked calls, if the store is gone.
        ValueError: another `which`, or a limit that is not positive.

    Example:
        >>> @fcoll.checked(timeout=10)
        ... def total(x, group):
        ...     return fcoll.all_reduce(x, group)
        >>> fcoll.vmap(lambda x: total(x, "i"), axis_name="i")(torch.tensor([1, 2]))
        tensor([3, 3])
    """

    def __init__(self, which: str = "all", *, timeout: float = 30.0, lines: bool = True) -> None:
        if which not in ("all", "first"):
            fail("value", 'checked: which is "all" or "first", got {!r}', which)
        if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout > 0:
            fail("value", "checked: timeout is a positive number of seconds, got {!r}", timeout)
        self._check: tuple[Any, ...] = (which, str(float(timeout)), bool(lines), False)
        self._before: list[tuple[Any, ...]] = []

    def __enter__(self) -> None:
        self._before.append(_state.check)
        _state.check = self._check

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _state.check = self._before.pop()

    def __call__(self, f: Function) -> Function:
        """f, with its calls checked."""
        check = self._check

        @functools.wraps(f)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before, _state.check = _state.check, check
            try:
                return f(*args, **kwargs)
            finally:
                _state.check = before

        return wrapped  # type: ignore[return-value]


# ---- what is compared


def whole(function: str, leaves: list[Any], spec: Any, layout: Any) -> Any:
    """Compare a call with its whole tree, and return the layout that its collectives go on with.

    While something traces, nothing can be compared: then each collective is, by `each`.
    """
    if torch.compiler.is_compiling() or any(_torch.tracing(leaf) for leaf in leaves):
        return layout
    check, place = Check(*layout.check), recorder.source()
    site = Site(layout.process, layout.order, check.which, float(check.timeout), check.lines, function, place, "")
    given = _arguments(function)
    sizes, varying = _sizes(given, leaves)
    graded = _graded(given, leaves)

    def facts(name: Callable[[int], str]) -> Facts:
        found = {name: _tensor(value) if isinstance(value, Tensor) else repr(value) for name, value in given.items()}
        found |= {"the structure of the tree": str(spec)} if spec is not None else {}
        return found | {name(i): _tensor(leaf, varying, i in graded) for i, leaf in enumerate(leaves)}

    def paths() -> Facts:
        names = ["tree"] if spec is None else [str(accessor.codify("tree")) for accessor in spec.accessors()]
        found = facts(names.__getitem__)
        found.pop("the structure of the tree", None)  # the paths tell
        return found

    agreement.compare(site, sizes, lambda: facts(str), paths)
    return layout._replace(check=tuple(check._replace(done=True)))


def each(name: str, x: Tensor, params: tuple[Any, ...], layout: Any) -> Tensor:
    """Compare one collective of one tensor, and return the tensor; while something traces, the graph will."""
    check = Check(*layout.check)
    if check.done:
        return x
    axes: Sequence[int] = ()
    send: Sequence[int] = ()
    receive: Sequence[int] = ()
    if name == "all_to_all" and len(params) == 4:  # of blocks of different sizes
        *axes, send, receive = params
        params = tuple(axes)
    phase = "backward" if recorder.backward() else ""
    text = f"{name}{params}".replace(",)", ")")
    site = Site(
        layout.process, layout.order, check.which, float(check.timeout), check.lines, text, recorder.source(), phase
    )
    if _torch.tracing(x):
        checked: Tensor = torch.ops.fcoll.check(x, json.dumps(site), list(axes), list(send), list(receive))
        return checked
    _each(x, site, axes, send, receive)
    return x


def _each(x: Tensor, site: Site, axes: Sequence[int], send: Sequence[int], receive: Sequence[int]) -> None:
    facts = {"what is sent": _tensor(x, axes)}
    crossed = bool(axes) and axes[0] == axes[1]
    if axes and not crossed:
        facts |= {"the sizes sent": str(list(send)), "the sizes received": str(list(receive))}
    agreement.compare(site, (list(send), list(receive)) if crossed else None, lambda: facts, lambda: facts)


def plan(reasons: Sequence[str]) -> None:
    """Compare what `fcoll.optimize` has done on each rank of the world."""
    check = Check(*_state.check)
    world = _torch.world()
    site = Site(world.group_name, (), "all", float(check.timeout), check.lines, "optimize", recorder.source(), "")
    facts = {"what was done": "; ".join(reasons) or "nothing"}
    agreement.compare(site, None, lambda: facts, lambda: facts)


@torch.library.custom_op("fcoll::check", mutates_args=())
def _check(x: Tensor, site: str, axes: Sequence[int], send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """x, once the ranks have compared the collective that takes it."""
    _each(x, Site(*json.loads(site)), axes, send, receive)
    return x.clone()


@_check.register_fake
def _(x: Tensor, site: str, axes: Sequence[int], send: Sequence[int], receive: Sequence[int]) -> Tensor:
    return x.clone()


def ended(y: Tensor, layout: Any) -> None:
    """Where a graph is traced: that the collective whose result is y is made here, whether or not y is used."""
    if not layout.check[3] and _torch.tracing(y):
        torch.ops.fcoll.checked(y)


@torch.library.custom_op("fcoll::checked", mutates_args=())
def _ended(y: Tensor) -> None:
    """Nothing, after the collective whose result is y."""


@_ended.register_fake
def _(y: Tensor) -> None:
    pass


# Compilers order independent collectives as they like, for different sizes perhaps differently on each rank, and drop
# those whose results nobody uses. Under check the ranks make them as they stand in the program.
_torch.keep_in_order(_check)
_torch.keep_in_order(_ended)


def derivative_of(layout: Any) -> Any:
    """The layout for the derivatives of a collective, which have not been compared."""
    return layout._replace(check=(*layout.check[:3], False))


def _arguments(function: str) -> dict[str, Any]:
    """The arguments of the public function, which made the `Call` that is checked, perhaps by way of helpers."""
    frame = found = sys._getframe(3)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        found = frame if frame.f_code.co_name == function else found
        frame = frame.f_back
    count = found.f_code.co_argcount + found.f_code.co_kwonlyargcount
    names = found.f_code.co_varnames[1:count]  # what comes first is sent
    return {name: found.f_locals[name] for name in names if name != "group"}


_HERE = os.path.dirname(__file__) + os.sep


def _sizes(given: dict[str, Any], leaves: list[Any]) -> tuple[tuple[list[int], list[int]] | None, list[int]]:
    """Sizes that a rank sends and receives, if it says so, and the axes along which the ranks' leaves may differ."""
    if isinstance(given.get("sizes"), Tensor) and not _torch.in_a_batch(given["sizes"]):  # its values, not its shape
        given["sizes"] = given["sizes"].tolist()
    if given.get("sizes") is not None and "op" not in given:  # of a reduction, all leaves are cut alike
        return None, _axes(given, leaves, "axis")
    if given.get("send_sizes") is None:
        return None, []
    axes = _axes(given, leaves, "split_axis", "concat_axis")
    numbers = [_numbers(given.get(name)) for name in ("send_sizes", "recv_sizes")]
    if len(set(axes)) != 1 or not all(isinstance(size, int) for sizes in numbers for size in sizes):
        return None, axes
    for name, listed in zip(("send_sizes", "recv_sizes"), numbers, strict=True):
        if given[name] is not None:  # what is in it is compared crosswise
            del given[name]
            given[f"number of {name}"] = len(listed)
    return (numbers[0], numbers[1]), axes


def _axes(given: dict[str, Any], leaves: list[Any], *names: str) -> list[int]:
    ndim = max((leaf.ndim for leaf in leaves), default=0)
    axes = [given[name] for name in names]
    return [axis % ndim for axis in axes] if ndim and all(type(axis) is int for axis in axes) else []


def _numbers(sizes: Any) -> list[Any]:
    return sizes.tolist() if isinstance(sizes, Tensor) else list(sizes or ())


def _graded(given: dict[str, Any], leaves: list[Any]) -> set[int]:
    """The leaves whose gradient is sent, alone or with others that travel with them: on all ranks, or on none."""
    silent = given.get("invariant") and given.get("op") not in ("max", "min", "prod")
    if silent or given.get("op") in ("any", "all") or not torch.is_grad_enabled():
        return set()
    size = given.get("bucket_size")
    together = buckets.plan(leaves, size if isinstance(size, int) else buckets.FULL)
    return {i for bucket in together if any(leaves[i].requires_grad for i in bucket) for i in bucket}


def _tensor(x: Tensor, varying: Sequence[int] = (), graded: bool = False) -> str:
    shape = ", ".join("·" if axis in varying else str(int(size)) for axis, size in enumerate(x.shape))
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{dtype}[{shape}] on {x.device.type}" + (GRADIENT if graded else "")


# ---- what the backend reports


def explain(error: RuntimeError, name: str, x: Tensor, layout: Any) -> None:
    """Raise what names the collective and the group, if an error is the backend's, which names neither."""
    if _torch.tracing(x) or not (type(error) is RuntimeError or isinstance(error, dist.DistError)):
        return
    phase = f"the backward pass of {recorder.backward_of()} at " if recorder.backward() else ""
    reason = re.sub(r"^\[\S*\] ", "", str(error))  # without the backend's own file and line
    text = (
        f"{name} over {layout.label} of {layout.sizes[0]} ranks, in {phase}{recorder.source()}, failed: {reason}. "
        "A rank has died, is stuck, or makes other calls than the others; fcoll.checked() tells which"
    )
    raise explained(CommunicationError(text), "A rank that has died, is stuck or is late") from error
