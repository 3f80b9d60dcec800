"""The named axes that are in scope on this thread: the only ambient state of fcoll.

A tuple in a `threading.local`: Dynamo traces it and guards on it. Only the resolution of a group reads it; what a
derivative needs later is taken along (`groups.Axis`).
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import NamedTuple

import torch


class Emulated(NamedTuple):
    """An axis of n ranks inside this process: one level of `fcoll.vmap`."""

    name: str
    n: int
    token: torch.Tensor  # each rank's index, batched by that vmap


class _Scope(threading.local):
    stack: tuple[Emulated, ...] = ()


_scope = _Scope()


class bound:
    """Put one more axis in scope."""

    def __init__(self, axis: Emulated) -> None:
        self.axis = axis

    def __enter__(self) -> None:
        _scope.stack = (*_scope.stack, self.axis)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _scope.stack = _scope.stack[:-1]


def find(name: str) -> Emulated | None:
    """The innermost axis of that name."""
    for axis in reversed(_scope.stack):
        if axis.name == name:
            return axis
    return None


def names() -> list[str]:
    """The names in scope, innermost first."""
    return [axis.name for axis in reversed(_scope.stack)]
