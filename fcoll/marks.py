"""What a traced graph is told about its values: on which ranks one is the same. `invariance.py` reads it there.

Nothing else makes an input of a graph known: what a user passes without `fcoll.shard_map` may differ between all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor

from fcoll import _torch


class _State(threading.local):
    def __init__(self) -> None:  # see axes._Scope
        self.wanted = False


_state = _State()


def wanted() -> bool:
    """Whether something traces that removes the marks again."""
    return _state.wanted


class marked:
    """What is traced inside carries marks, for `fcoll.optimize`, which removes them.

    A context manager around the tracing of a graph: values that enter and leave a `fcoll.shard_map` over processes are
    marked as the same on the ranks along which their specs say so. `fcoll.compile` does it itself.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> with fcoll.marked():
        ...     graph_module = make_fx(torch.sin)(torch.ones(2))
        >>> graph_module = fcoll.optimize(graph_module)  # without processes, there is nothing to drop
    """

    def __init__(self) -> None:
        self.before: list[bool] = []

    def __enter__(self) -> None:
        self.before.append(_state.wanted)
        _state.wanted = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _state.wanted = self.before.pop()


@contextmanager
def unmarked() -> Iterator[None]:
    """What is traced inside carries no marks, whatever is around it."""
    before, _state.wanted = _state.wanted, False
    try:
        yield
    finally:
        _state.wanted = before


@torch.library.custom_op("fcoll::invariant", mutates_args=())
def _invariant(x: Tensor, ranks: list[int]) -> Tensor:
    """x, which is the same on these ranks of the world, this one among them."""
    return x.clone()


@_invariant.register_fake
def _(x: Tensor, ranks: list[int]) -> Tensor:
    return torch.empty_like(x)


@_torch.allow_in_graph  # the caches of whole graphs do not know its name, and a graph from there is not compared
def uncached(x: Tensor) -> Tensor:
    """x, in a graph that is made anew in each process."""
    return x.view_as(x)


@torch.library.custom_op("fcoll::cotangent", mutates_args=())
def _cotangent(x: Tensor, group: str) -> Tensor:
    """x, the cotangent of a value that is the same on the ranks of a process group. It may differ between them, as when
    each has its own labels, and then counts as the mean does.
    """
    return x.clone()


@_cotangent.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


INVARIANT = torch.ops.fcoll.invariant.default
COTANGENT = torch.ops.fcoll.cotangent.default


def mark(x: Tensor, ranks: tuple[int, ...]) -> Tensor:
    """x, said to be the same on these ranks of the world; other ranks may say so of other ones, of theirs."""
    marked: Tensor = torch.ops.fcoll.invariant(x, list(ranks))
    return marked


def cotangent(x: Tensor, group: str) -> Tensor:
    """x, said to be a cotangent for all ranks of a process group."""
    marked: Tensor = torch.ops.fcoll.cotangent(x, group)
    return marked
