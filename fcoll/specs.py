"""PartitionSpecs: along which mesh axes each axis of a global tensor is cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fcoll import layouts, meshes
from fcoll.errors import fail
from fcoll.meshes import Mesh
from fcoll.svg import Picture

Entries: TypeAlias = tuple[tuple[str, ...], ...]
"""Per tensor axis, the names it is cut along, major first."""


class P:
    """A PartitionSpec: how a global tensor is spread over the axes of a mesh.

    One entry per axis of the tensor, from the front: an axis name, a tuple of names (major first), or None. Axes
    without an entry are not cut; the tensor is replicated over the names that do not occur.

    Raises:
        ValueError: a name occurs twice.
        TypeError: an entry is something else.

    Example:
        >>> fcoll.P("dp", None), fcoll.P(("dp", "tp")), fcoll.P()
        (P('dp', None), P(('dp', 'tp')), P())
    """

    __slots__ = ("entries",)

    def __init__(self, *entries: str | tuple[str, ...] | None) -> None:
        self.entries: Entries = tuple(_names(entry) for entry in entries)
        names = self.names
        if len(set(names)) != len(names):
            fail("value", "P: an axis name occurs once, got {}", str(names))

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in order."""
        return tuple(name for entry in self.entries for name in entry)

    def draw(self, shape: Sequence[int], mesh: Mesh) -> Picture:
        """Draw which ranks of a mesh own which block of a tensor.

        Args:
            shape: of the global tensor.
            mesh: a VirtualMesh or a DeviceMesh.

        Raises:
            ValueError: an axis name that the mesh has not, more entries than the tensor has axes, a size that the mesh
                does not divide; more than 64 ranks or blocks.

        Example:
            >>> fcoll.P("dp").draw((8, 4), fcoll.virtual_mesh(dp=2, tp=2))
            P('dp') of shape (8, 4) over dp=2, tp=2
            <BLANKLINE>
                 0:4
            0:4  0,1
            4:8  2,3
        """
        return _draw(self, tuple(shape), mesh)

    def __reduce__(self) -> tuple[Any, ...]:
        return P, self.entries

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash(self.entries)

    def __repr__(self) -> str:
        return spelled(self)


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if not isinstance(entry, tuple) or not all(isinstance(name, str) for name in entry):
        fail("type", "P: an entry is an axis name, a tuple of names or None, got {}", str(entry))
    return entry


def _spelled(entry: tuple[str, ...]) -> str:
    return repr(entry[0] if len(entry) == 1 else entry) if entry else "None"


def spelled(specs: Any) -> str:
    """A tree of specs as Python code, for messages: Dynamo cannot `str` containers."""
    if isinstance(specs, dict):
        return "{" + ", ".join([f"{key!r}: {spelled(value)}" for key, value in specs.items()]) + "}"
    if type(specs) is list:
        return "[" + ", ".join([spelled(value) for value in specs]) + "]"
    if type(specs) is tuple:
        return "(" + ", ".join([spelled(value) for value in specs]) + ("," if len(specs) == 1 else "") + ")"
    if isinstance(specs, P):
        return "P(" + ", ".join([_spelled(entry) for entry in specs.entries]) + ")"
    return "None" if specs is None else f"a {type(specs).__name__}"


def _draw(spec: P, shape: tuple[int, ...], mesh: Mesh) -> Picture:
    _, names, sizes, _ = meshes.shape_of("P.draw", mesh)
    if len(spec) > len(shape):
        fail("value", "P.draw: shape {} has fewer axes than {} has entries", shape, spelled(spec))
    counts = [1] * len(shape)
    for axis, entry in enumerate(spec):
        for name in entry:
            if name not in names:
                fail("value", "P.draw: {} names {!r}, which is no axis of the mesh {}", spelled(spec), name, str(names))
            counts[axis] *= sizes[names.index(name)]
        if shape[axis] % counts[axis]:
            fail("value", "P.draw: size {} of axis {} is not a multiple of the {} ranks that {} cuts it among; pad it",
                 shape[axis], axis, counts[axis], spelled(spec))  # fmt: skip
    blocks = torch.arange(math.prod(counts)).reshape(counts)
    layouts.owners_fit(math.prod(sizes), blocks.numel())
    pieces = to_ranks(blocks, spec.entries, names, sizes)  # of one block each
    held = pieces.reshape([size if name in spec.names else 1 for name, size in zip(names, sizes, strict=True)])
    owners: list[list[int]] = [[] for _ in range(blocks.numel())]
    for rank, block in zip(meshes.ranks_of(mesh), held.expand(sizes).flatten().tolist(), strict=True):
        owners[block].append(rank)
    over = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
    return layouts.tensor(f"{spelled(spec)} of shape {shape} over {over}", shape, counts, owners)


# A leaf between its global shape and the shape that has the ranks in front. Plain operations: exact under autograd.


def to_ranks(x: Tensor, entries: Entries, names: Sequence[str], sizes: Sequence[int]) -> Tensor:
    """The pieces of x on leading axes, one per name that its spec has, in the order of `names`."""
    where: dict[str, int] = {}
    kept: list[int] = []
    for axis, entry in enumerate(entries):
        at = axis + len(where)
        if entry:
            cut = [sizes[names.index(name)] for name in entry]
            n = 1
            for size in cut:
                n *= size
            x = x.unflatten(at, (*cut, x.shape[at] // n))
        for i, name in enumerate(entry):
            where[name] = at + i
        kept.append(at + len(entry))
    kept.extend(range(len(entries) + len(where), x.ndim))
    return x.permute([*[where[name] for name in names if name in where], *kept])


def from_ranks(y: Tensor, entries: Entries, names: Sequence[str]) -> Tensor:
    """The inverse of `to_ranks`."""
    leading = [name for name in names if any(name in entry for entry in entries)]
    order: list[int] = []
    local = y.ndim - len(leading)
    for axis in range(local):
        entry = entries[axis] if axis < len(entries) else ()
        order.extend(leading.index(name) for name in entry)
        order.append(len(leading) + axis)
    y = y.permute(order)
    for axis in range(min(local, len(entries))):
        if entries[axis]:
            y = y.flatten(axis, axis + len(entries[axis]))
    return y
