"""Meshes of named axes: of processes (torch's DeviceMesh), or virtual, where one process emulates all ranks."""

from __future__ import annotations

import ast
import functools
import itertools
import math
import os
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fcoll import _torch, axes, layouts
from fcoll.engine import SIMULATED, make_group, order_of
from fcoll.errors import fail
from fcoll.svg import Picture


@dataclass(frozen=True)
class VirtualMesh:
    """Named axes without processes: `shard_map` emulates its ranks in this one. It answers as a DeviceMesh does.

    Attributes:
        mesh_dim_names: the axis names, major first.
        shape: the number of ranks along each.

    Example:
        >>> fcoll.virtual_mesh(dp=2, tp=4)
        VirtualMesh(dp=2, tp=4)
        >>> fcoll.virtual_mesh(dp=2, tp=4).size()
        8
    """

    mesh_dim_names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def size(self, mesh_dim: int | None = None) -> int:
        """The number of ranks, of all or along one axis."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def draw(self) -> Picture:
        """Draw which rank is where.

        Raises:
            ValueError: more than 64 ranks.

        Example:
            >>> fcoll.virtual_mesh(dp=2, tp=3).draw()
            VirtualMesh(dp=2, tp=3)
            <BLANKLINE>
               0  1  2
            0  0  1  2
            1  3  4  5
        """
        return layouts.mesh(self.mesh_dim_names, self.shape)

    def _repr_html_(self) -> str:
        return self.draw()._repr_html_() if self.size() <= layouts.RANKS else f"<code>{self!r}</code>"

    def __repr__(self) -> str:
        return f"VirtualMesh({_spelled(dict(zip(self.mesh_dim_names, self.shape, strict=True)))})"


Mesh: TypeAlias = "VirtualMesh | DeviceMesh"


def virtual_mesh(**sizes: int) -> VirtualMesh:
    """A mesh of emulated ranks, whatever launched this process.

    Args:
        sizes: the number of ranks per axis name, major first.

    Raises:
        ValueError: no axis, or a size below 1.
        TypeError: a size that is no integer.

    Example:
        >>> fcoll.virtual_mesh(i=4)
        VirtualMesh(i=4)
    """
    _check(sizes, "virtual_mesh")
    return VirtualMesh(tuple(sizes), tuple(sizes.values()))


def mesh(**sizes: int) -> Mesh:
    """The mesh for this program: of processes under a launcher, virtual otherwise.

    Under a launcher (RANK and WORLD_SIZE are set, as torchrun does, or torch.distributed is initialised) it is a
    DeviceMesh over all ranks, on CUDA devices where there are any, unless torch.distributed is initialised with gloo;
    it is initialised if need be, and ends with `torch.distributed.destroy_process_group`, as always. Every rank calls
    it, with the same arguments.

    Args:
        sizes: the number of ranks per axis name, major first; under a launcher their product is the world's size.

    Raises:
        ValueError: a mesh whose size is not the world's, no axis, or a size below 1.
        TypeError: a size that is no integer.

    Example:
        >>> fcoll.mesh(dp=2, tp=2)
        VirtualMesh(dp=2, tp=2)
    """
    _check(sizes, "mesh")
    launched = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    if not launched and not (dist.is_available() and dist.is_initialized()):
        return virtual_mesh(**sizes)
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    size = math.prod(sizes.values())
    if size != world:
        fail("value", "mesh: {} makes {} ranks, but {} are running; change the sizes or the launch",
             f"mesh({_spelled(sizes)})", size, world)  # fmt: skip
    by_gloo = dist.is_initialized() and "cuda:gloo" in dist.get_backend_config()  # as launch does with too few devices
    device = "cuda" if torch.cuda.is_available() and not by_gloo else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _check(sizes: dict[str, int], function: str) -> None:
    if not sizes:
        fail("value", "{}: give at least one axis, as in {}(dp=2)", function, function)
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            fail("type", "{}: the size of {!r} is an integer, got {}", function, name, type(size).__name__)
        if size < 1:
            fail("value", "{}: the size of {!r} is at least 1, got {}", function, name, size)


def _spelled(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


# A mesh in scope is known by a key, a plain string: Dynamo guards on it and can ask for the mesh's groups by it.

# DeviceMeshes are not kept: a process may abort at its end if one of them outlives torch.distributed.

_registered: dict[str, VirtualMesh | weakref.ref[DeviceMesh]] = {}
_keys: dict[int, str] = {}  # by id, of DeviceMeshes that are alive
_numbers = itertools.count()
_groups: dict[tuple[str, tuple[str, ...]], tuple[str, int, tuple[int, ...]]] = {}


class Shape(NamedTuple):
    """What the traced side knows of a mesh."""

    key: str
    axis_names: tuple[str, ...]
    sizes: tuple[int, ...]
    processes: bool


@_torch.assume_constant_result
def register(mesh: Any) -> tuple[str, tuple[str, ...], tuple[int, ...], bool] | str:
    """The fields of a mesh's `Shape`, or what is wrong with the mesh."""
    mesh = _torch.unwrap_opaque(mesh)
    if isinstance(mesh, VirtualMesh):
        key = repr(mesh)
        _registered[key] = mesh
        return key, mesh.mesh_dim_names, mesh.shape, False
    if not isinstance(mesh, DeviceMesh):
        return (
            f"a mesh is what fcoll.mesh, fcoll.virtual_mesh or torch's init_device_mesh make, got {type(mesh).__name__}"
        )
    names = mesh.mesh_dim_names
    if not names:
        return "the axes of the DeviceMesh have no names; make it with mesh_dim_names=(...)"
    if mesh.get_coordinate() is None:
        return f"this rank is not in {mesh}"
    return _key_of(mesh), tuple(names), tuple(mesh.shape), True


def _key_of(mesh: DeviceMesh) -> str:
    """One that no other mesh has or had, since graphs are guarded by it."""
    key = _keys.get(id(mesh))
    if key is None:
        key = _keys[id(mesh)] = f"mesh {next(_numbers)}"
        _registered[key] = weakref.ref(mesh)
        weakref.finalize(mesh, _keys.pop, id(mesh)).atexit = False
    return key


def _mesh_of(key: str) -> Mesh:
    found = _registered[key.removeprefix(SIMULATED)]
    mesh = found() if isinstance(found, weakref.ref) else found
    if mesh is None:
        raise RuntimeError("a DeviceMesh was used after its end; keep it as long as what is bound to it")
    return mesh


@_torch.assume_constant_result
def same(key: str, mesh: Any) -> bool:
    """Whether a mesh of processes is, or equals, the registered one."""
    return bool(_mesh_of(key) == _torch.unwrap_opaque(mesh))


def shape_of(function: str, mesh: Any) -> Shape:
    """The Shape of any mesh."""
    shape = register(mesh)
    if isinstance(shape, str):
        fail("type", "{}: {}", function, shape)
    return Shape(*shape)


def ranks_of(mesh: Any) -> list[int]:
    """The ranks of a mesh, in row-major order."""
    return list(range(mesh.size())) if isinstance(mesh, VirtualMesh) else mesh.mesh.flatten().tolist()


@_torch.assume_constant_result
def process_along(key: str, names: tuple[str, ...]) -> tuple[str, int, tuple[int, ...]]:
    """Name, size and order of the process group along some axes of a mesh, major first, through this rank.

    In traces it is a simulated group: it has a size, and this rank is its first.
    """
    found = _groups.get((key, names))
    if found is None:
        mesh = _mesh_of(key)
        if key.startswith(SIMULATED) or isinstance(mesh, VirtualMesh):
            assert mesh.mesh_dim_names is not None
            n = math.prod(mesh.shape[mesh.mesh_dim_names.index(name)] for name in names)
            heard = "" if key.startswith(SIMULATED) else _UNHEARD
            found = f"{SIMULATED}{key.removeprefix(SIMULATED)}:{','.join(names)}{heard}", n, ()
        else:
            with _torch.plain():
                found = _group_along(mesh, names)
        _groups[key, names] = found
    return found


@_torch.assume_constant_result
def ranks_along(key: str, names: tuple[str, ...]) -> tuple[int, ...]:
    """The ranks of the world along some axes of a mesh of processes, through this rank. In traces, the mesh is the
    world, and this rank its first.
    """
    mesh: Any = _mesh_of(key)
    with _torch.plain():
        if key.startswith(SIMULATED):
            return _rows(mesh, names)[0]
        return _listed_along(mesh, names)


_UNHEARD = "?"  # of groups whose messages are not part of the program


def simulated(group: str) -> tuple[str, str, str] | None:
    """Of a simulated group whose messages are part of the program: the mesh's key, the axes, and the subgroups."""
    found = re.fullmatch(rf"{SIMULATED}(.*):([^:()?]*)(\(.*\))?", group)
    return (found[1], found[2], found[3] or "") if found else None


def simulated_groups(
    key: str, groups: Sequence[str | tuple[int, ...]]
) -> tuple[int, dict[str | tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """The size of a mesh that is taken for the world; and for groups that are simulated, or ranks along some of its
    axes, those that stand for them on all ranks.
    """
    mesh = _mesh_of(key)
    assert mesh.mesh_dim_names is not None
    found: dict[str | tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
    for group in groups:
        told = simulated(group) if isinstance(group, str) else None
        if told and told[0] == key:
            rows = _rows(mesh, tuple(told[1].split(",")) if told[1] else ())
            parts = ast.literal_eval(told[2]) if told[2] else (range(len(rows[0])),)
            found[group] = tuple(tuple(row[i] for i in part) for row in rows for part in parts)
    for count in range(len(mesh.mesh_dim_names) + 1):
        for names in itertools.combinations(mesh.mesh_dim_names, count):  # marks list ranks in the order of the mesh
            rows = _rows(mesh, names)
            if rows[0] in groups:
                found[rows[0]] = rows
    return mesh.size(), found


def _rows(mesh: Mesh, names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The places in the mesh along some axes: one tuple per place along the others."""
    assert mesh.mesh_dim_names is not None
    sizes = tuple(mesh.shape)
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    dims = [mesh.mesh_dim_names.index(name) for name in names]

    def offsets(dims: Sequence[int]) -> list[int]:
        places = itertools.product(*[range(sizes[dim]) for dim in dims])
        return [sum(at * strides[dim] for at, dim in zip(place, dims, strict=True)) for place in places]

    along = offsets(dims)
    starts = offsets([dim for dim in range(len(sizes)) if dim not in dims])
    return tuple(tuple(start + offset for offset in along) for start in starts)


def _group_along(mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[str, int, tuple[int, ...]]:
    listed = _listed_along(mesh, names)
    group = mesh.get_group(names[0]) if len(names) == 1 else make_group(listed)
    return group.group_name, len(listed), order_of(listed)


def _listed_along(mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[int, ...]:
    assert mesh.mesh_dim_names is not None
    dims = [mesh.mesh_dim_names.index(name) for name in names]
    here = mesh.get_coordinate()
    assert here is not None
    others = [dim for dim in range(mesh.ndim) if dim not in dims]
    ranks = mesh.mesh.permute(*others, *dims)
    for dim in others:
        ranks = ranks[here[dim]]
    return tuple(ranks.flatten().tolist())


Function = TypeVar("Function", bound=Callable[..., Any])


class bind:
    """Make the axis names of a DeviceMesh usable as groups, for values that are this rank's own.

    A context manager, and a decorator. Names resolve innermost first, so bindings nest.

    Args:
        device_mesh: a DeviceMesh whose axes have names.

    Raises:
        TypeError: a VirtualMesh, which has no rank of this process's own (use `shard_map`), or no mesh at all.

    Example:
        >>> with fcoll.bind(fcoll.mesh(dp=2)):  # under a launcher: fine
        ...     pass
        Traceback (most recent call last):
        fcoll.errors.CollectiveTypeError: bind: VirtualMesh(dp=2) has no values of this rank's own; use fcoll.shard_map
    """

    def __init__(self, device_mesh: Mesh) -> None:
        shape = shape_of("bind", device_mesh)
        if not shape.processes:
            fail("type", "bind: {} has no values of this rank's own; use fcoll.shard_map", shape.key)
        self._mesh = device_mesh
        self._shape = shape
        self._bound: list[axes.bound] = []

    def __enter__(self) -> None:
        bound = axes.bound(named(self._shape))
        bound.__enter__()
        self._bound.append(bound)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bound.pop().__exit__(kind, error, tb)

    def __call__(self, f: Function) -> Function:
        """f, run with the names bound."""
        entries = named(self._shape)

        @functools.wraps(f)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with axes.bound(entries):
                return f(*args, **kwargs)

        wrapped.device_mesh = self._mesh  # type: ignore[attr-defined]  # lives as long
        return wrapped  # type: ignore[return-value]


def named(shape: Shape, outside: int = -1) -> list[axes.Named]:
    """The axes of a mesh of processes, for the scope."""
    return [
        axes.Named(name, size, None, shape.key, outside)
        for name, size in zip(shape.axis_names, shape.sizes, strict=True)
    ]
