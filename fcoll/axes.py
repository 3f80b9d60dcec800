"""The named axes that are in scope on this thread: the only ambient state of fcoll.

A tuple in a `threading.local`: Dynamo traces it and guards on it. Only the resolution of a group reads it; what a
derivative needs later is taken along (`groups.Axis`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import torch


class Named(NamedTuple):
    """An axis of n ranks: one level of a vmap in this process, or one dimension of a mesh of processes."""

    name: str
    n: int
    token: torch.Tensor | None = None  # emulated: each rank's index, batched by the vmap
    mesh: str = ""  # of processes: the key of the mesh (`meshes.register`)
    outside: int = -1  # see groups.Layout


class _Scope(threading.local):
    def __init__(self) -> None:  # an attribute of the object from the start: Dynamo guards on where it was found
        self.stack: tuple[Named, ...] = ()


_scope = _Scope()


class bound:
    """Put more axes in scope, the last one innermost."""

    def __init__(self, axes: Sequence[Named]) -> None:
        self.axes = tuple(axes)

    def __enter__(self) -> None:
        _scope.stack = _scope.stack + self.axes

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _scope.stack = _scope.stack[: len(_scope.stack) - len(self.axes)]


def find(name: str) -> Named | None:
    """The innermost axis of that name."""
    for axis in reversed(_scope.stack):
        if axis.name == name:
            return axis
    return None


def names() -> list[str]:
    """The names in scope, innermost first."""
    return [axis.name for axis in reversed(_scope.stack)]


def sizes() -> tuple[tuple[str, int, str], ...]:
    """Name, size and mesh of what is in scope, outermost first."""
    return tuple((axis.name, axis.n, axis.mesh) for axis in _scope.stack)
