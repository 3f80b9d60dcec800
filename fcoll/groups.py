"""What a `group` argument may be, and what it resolves to: an `Axis`.

an axis name | a tuple of names, major first | ProcessGroup | DeviceMesh, all of it | Group | WORLD
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fcoll import _torch, axes, checks, meshes, recorder
from fcoll.engine import SIMULATED, Process, make_group, order_of
from fcoll.errors import fail

PENDING = -1  # see Layout.at


class Layout(NamedTuple):
    """The static side of an axis, as plain values that a traced graph can hold."""

    sizes: tuple[int, ...]  # of the parts (one per axis name), major first
    at: tuple[int, ...]  # per emulated part: PENDING its vmap level, or which leading axis of x stacks its ranks
    process: str  # the name of the process group, "" where the parts are emulated
    order: tuple[int, ...]  # index in the group → rank of the process group; () where they agree
    partition: tuple[tuple[int, ...], ...]  # subgroups, as indices; () for one group of all
    outside: int  # up to which transform derivatives are those of a whole map (see shard_map); -1 for none
    label: str  # for messages
    subgroups: tuple[int, ...] = ()  # the sizes of all, where the group is one of several
    check: tuple[Any, ...] = ()  # of processes: how the ranks compare their calls (`checks.Check`); () if they do not


class Axis(NamedTuple):
    """A resolved group: all that a collective and its derivatives need, so that they never look at what is in scope."""

    layout: Layout
    tokens: tuple[torch.Tensor, ...]  # one per PENDING part: the ranks' indices, batched by that part's vmap

    @property
    def n(self) -> int:
        """The group's size; of subgroups of unequal size, that of the largest."""
        if self.layout.partition:
            return max(map(len, self.layout.partition))
        return math.prod(self.layout.sizes)

    @property
    def even(self) -> bool:
        """Whether all subgroups have one size."""
        return len(set(self.layout.subgroups)) < 2

    @property
    def label(self) -> str:
        """What the user called the group."""
        return self.layout.label


class Group:
    """A group made by `fcoll.group` or `fcoll.subgroups`; usable wherever a group is asked for."""

    def __init__(
        self,
        parent: str | tuple[str, ...] | None,
        partition: tuple[tuple[int, ...], ...],
        process: Process | None = None,
    ) -> None:
        self.parent = parent
        self._partition, self._process = partition, process
        self._name = process.name if process else ""
        # Dynamo takes numbers that are not the same in all calls for sizes, which it does not know; but not text
        self._spelled = _spelled(partition)
        self._members = _spelled(((process.n,), process.order)) if process else ""

    @property
    def partition(self) -> tuple[tuple[int, ...], ...]:
        """The subgroups, as indices of the parent."""
        return _read(self._spelled) if torch.compiler.is_compiling() else self._partition

    @property
    def process(self) -> Process | None:
        """The process group, if it is one."""
        if not torch.compiler.is_compiling() or not self._name:
            return self._process
        (n,), order = _read(self._members)
        return Process(self._name, n, order)

    def __repr__(self) -> str:
        if self.process is not None:
            return f"fcoll.Group(process group {self.process.name!r} of {self.process.n})"
        return f"fcoll.Group({self.parent!r} in {[list(ranks) for ranks in self.partition]})"


def _spelled(lists: Sequence[Sequence[int]]) -> str:
    return ";".join(" ".join(map(str, ranks)) for ranks in lists)


def _read(text: str) -> tuple[tuple[int, ...], ...]:
    """What `_spelled` was given."""
    return tuple(tuple(int(rank) for rank in ranks.split()) for ranks in text.split(";")) if text else ()


class _World:
    def __reduce__(self) -> str:  # pickled and copied as the one that it is
        return "WORLD"

    def __repr__(self) -> str:
        return "fcoll.WORLD"


WORLD = _World()
"""All ranks of torch.distributed; a group wherever one is asked for."""

GroupLike: TypeAlias = "str | tuple[str, ...] | dist.ProcessGroup | DeviceMesh | Group | _World"


_plain: WeakKeyDictionary[dist.ProcessGroup, Axis] = WeakKeyDictionary()  # looked up once


def resolve(function: str, group: GroupLike) -> Axis:
    """The axis that `group` means here and now; `function` is named in messages."""
    if (group is WORLD or isinstance(group, dist.ProcessGroup)) and not torch.compiler.is_compiling():
        known = _torch.world() if group is WORLD and dist.is_initialized() else group
        axis = _plain.get(known) if isinstance(known, dist.ProcessGroup) else None
        if axis is None or checks.wanted():
            axis = _resolved(function, known)
            if isinstance(known, dist.ProcessGroup) and not axis.layout.check:
                _plain[known] = axis
        return axis
    return _resolved(function, group)


def _resolved(function: str, group: Any) -> Axis:
    if isinstance(group, str):
        return _named(function, (group,))
    if isinstance(group, tuple):
        return _named(function, group)
    if isinstance(group, Group):
        if group.process is not None:
            axis = _of_process(group.process, f"process group {group.process.name!r}")
            return axis._replace(layout=axis.layout._replace(subgroups=tuple(map(len, group.partition))))
        parent = group.parent
        names = (parent,) if isinstance(parent, str) else parent or ()
        axis = _named(function, names)
        members = sorted(rank for ranks in group.partition for rank in ranks)
        sizes = tuple(map(len, group.partition))
        if members != list(range(axis.n)):
            fail(
                "value",
                "{}: subgroups of {} must hold each of its {} ranks exactly once, got {}",
                function, axis.label, axis.n, str(group.partition),
            )  # fmt: skip
        if axis.layout.process:  # the names of a mesh of processes: each subgroup is a process group of its own
            whole = process_of(axis.layout)
            own = Process(*_own_subgroup(whole.name, whole.n, whole.order, group.partition))
            axis = _of_process(own, axis.label, axis.layout.outside)
            return axis._replace(layout=axis.layout._replace(subgroups=sizes))
        return axis._replace(layout=axis.layout._replace(partition=group.partition, subgroups=sizes))
    if group is WORLD and dist.is_initialized():
        group = _torch.world()
    name, n, order, problem = _process(group)
    if problem:
        about = "No process group yet" if problem[1] == _NO_WORLD else ""
        fail(problem[0], "{}: {}", function, problem[1], about=about)
    return _of_process(Process(name, n, order), f"process group {name!r}")


def process_of(layout: Layout) -> Process:
    """The process group of an axis that is one."""
    return Process(layout.process, layout.sizes[0], layout.order)


def axis_index(axis: Axis) -> torch.Tensor:
    """This rank's index in the group, a 0-d int64 tensor."""
    layout = axis.layout
    if layout.process:
        return process_of(layout).index_tensor()
    index = torch.zeros((), dtype=torch.int64)
    for part, (size, token) in enumerate(zip(layout.sizes, axis.tokens, strict=True)):
        index = index * size + token if part else token
    if layout.partition:
        index = _places(layout, index.device).index_select(0, index.view(1)).view(())
    return index


def stacked_index(layout: Layout) -> torch.Tensor:
    """All ranks' indices, in the places where the layout stacks them."""
    index = torch.arange(math.prod(layout.sizes))
    if layout.partition:
        index = _places(layout, index.device)
    return index.view(layout.sizes).permute(from_major(layout))


def from_major(layout: Layout) -> list[int]:
    """The permutation from axes in the order of the parts to the places where they are stacked."""
    return sorted(range(len(layout.sizes)), key=layout.at.__getitem__)


def _places(layout: Layout, device: torch.device) -> torch.Tensor:
    """Per rank, its index in its subgroup."""
    places = [0] * math.prod(layout.sizes)
    for ranks in layout.partition:
        for place, rank in enumerate(ranks):
            places[rank] = place
    return torch.tensor(places, device=device)


def split_parts(axis: Axis) -> list[Axis]:
    """One axis per part, major first."""
    layout = axis.layout
    if layout.process or layout.partition or not layout.sizes:
        return [axis]
    return [
        Axis(Layout((size,), (PENDING,), "", (), (), layout.outside, layout.label), (token,))
        for size, token in zip(layout.sizes, axis.tokens, strict=True)
    ]


def group(ranks: Sequence[int]) -> Group:
    """A group of process ranks, in the order listed: that is the order of gathers, of `src`, `dst` and permutations.

    Every listed rank calls it, and nobody else has to; groups of the same ranks share one process group. Ranks that
    make several groups must make them in the same order.

    Args:
        ranks: ranks of the world.

    Raises:
        ValueError: ranks repeated or outside the world, this rank not among them, or no world at all.
        TypeError: ranks that are no integers.

    Example:
        >>> fcoll.group([1, 1])
        Traceback (most recent call last):
        fcoll.errors.CollectiveValueError: group: ranks must be distinct, got (1, 1)
    """
    if not isinstance(ranks, Sequence):
        fail("type", "group: ranks are a list of integers, got {}", type(ranks).__name__)
    listed = tuple(ranks)
    if not all(type(rank) is int for rank in listed):
        fail("type", "group: ranks must be integers, got {}", str(listed))
    if len(set(listed)) != len(listed):
        fail("value", "group: ranks must be distinct, got {}", str(listed))
    if not dist.is_initialized():
        fail("value", "group: {}", _NO_WORLD, about="No process group yet")
    world = dist.get_world_size()
    if not listed or not all(0 <= rank < world for rank in listed):
        fail("value", "group: ranks must be among 0 to {}, at least one, got {}", world - 1, str(listed))
    if dist.get_rank() not in listed:
        fail("value", "group: rank {} is not among {}; only members make a group", dist.get_rank(), str(listed))
    return _group_of(listed)


def subgroups(group: GroupLike, ranks: Sequence[Sequence[int]]) -> Group:
    """A partition of `group` into subgroups: collectives over the result run within each (JAX's axis_index_groups).

    Each inner list gives indices within `group`, in the order that gathers follow. Of a process group every member
    calls it. Subgroups of an axis name are looked up when they are used.

    Args:
        group: an axis name, a tuple of names, or a process group.
        ranks: lists of indices that together hold every index once. Their sizes may differ for the collectives
            that keep shapes (all_reduce, broadcast, reduce, vary).

    Raises:
        ValueError: lists that overlap or leave ranks out.
        TypeError: ranks that are no integers.

    Example:
        >>> pairs = fcoll.subgroups("i", [[0, 1], [2, 3]])
        >>> fcoll.vmap(lambda x: fcoll.all_reduce(x, pairs), axis_name="i")(torch.arange(4))
        tensor([1, 1, 5, 5])
    """
    if not isinstance(ranks, (list, tuple)) or not all(isinstance(subgroup, (list, tuple)) for subgroup in ranks):
        fail("type", "subgroups: ranks are lists of lists, as in [[0, 1], [2, 3]], got {}", str(ranks))
    partition = tuple(tuple(subgroup) for subgroup in ranks)
    if not all(type(rank) is int for subgroup in partition for rank in subgroup):
        fail("type", "subgroups: the lists must hold integers, got {}", str(partition))
    members = sorted(rank for subgroup in partition for rank in subgroup)
    if not members or members != list(range(len(members))) or not all(partition):
        fail("value", "subgroups: the lists must hold each rank exactly once, got {}", str(partition))
    if isinstance(group, (str, tuple)):
        return Group(group, partition)
    if isinstance(group, Group) and group.process is None:
        fail("type", "subgroups: {} is cut already; cut the axis itself", repr(group))
    process = process_of(resolve("subgroups", group).layout)
    if len(members) != process.n:
        fail("value", "subgroups: the lists must hold each of {} ranks exactly once, got {}", process.n, str(partition))
    return Group(None, partition, Process(*_own_subgroup(process.name, process.n, process.order, partition)))


@_torch.assume_constant_result  # while tracing too, the group is made for good
def _own_subgroup(
    name: str, n: int, order: tuple[int, ...], partition: tuple[tuple[int, ...], ...]
) -> tuple[str, int, tuple[int, ...]]:
    parent = Process(name, n, order)
    if name.startswith(SIMULATED):
        return f"{name}{partition}", len(partition[0]), ()
    of_world = dist.get_process_group_ranks(parent.group())
    own = next(subgroup for subgroup in partition if parent.here() in subgroup)
    ranks = tuple(of_world[parent.rank(rank)] for rank in own)
    return make_group(ranks).group_name, len(ranks), order_of(ranks)


def _group_of(ranks: tuple[int, ...]) -> Group:
    return Group(None, (), Process(make_group(ranks).group_name, len(ranks), order_of(ranks)))


_NO_WORLD = "torch.distributed is not initialised: start it, or name an axis of an enclosing fcoll.vmap"


def _named(function: str, names: tuple[Any, ...]) -> Axis:
    label = repr(names[0] if len(names) == 1 else names)
    found: tuple[axes.Named, ...] = ()
    for name in names:
        if not isinstance(name, str):
            fail("type", "{}: a tuple of groups holds axis names, got {}", function, str(name))
        axis = axes.find(name)
        if axis is None:
            bound = f"bound here: {axes.names()}" if axes.names() else "call it inside fcoll.vmap(..., axis_name=...)"
            about = "An axis name that is not bound"
            fail("name", "{}: axis name {!r} is not bound; {}", function, name, bound, about=about)
        found = (*found, axis)
    if len(set(names)) != len(names):
        fail("value", "{}: axis names must be distinct, got {}", function, label)
    tokens = tuple(axis.token for axis in found if axis.token is not None)
    outside = min([axis.outside for axis in found], default=-1)
    if found and found[0].mesh:
        mesh = found[0].mesh
        if not all(axis.mesh == mesh for axis in found):
            _not_of_one_mesh(function, label)
        if recorder.active():
            mesh = SIMULATED + mesh.removeprefix(SIMULATED)
        return _of_process(Process(*meshes.process_along(mesh, names)), label, outside)
    if len(tokens) != len(found):
        _not_of_one_mesh(function, label)
    sizes = tuple(axis.n for axis in found)
    return Axis(Layout(sizes, (PENDING,) * len(names), "", (), (), outside, label), tokens)


def _not_of_one_mesh(function: str, label: str) -> NoReturn:
    text = "{}: the names {} are not axes of one mesh; call it once for each"
    fail("value", text, function, label, about="Names that are not axes of one mesh")


def _of_process(process: Process, label: str, outside: int = -1) -> Axis:
    layout = Layout((process.n,), (), process.name, process.order, (), outside, label, check=checks.wanted())
    return Axis(layout, ())


@_torch.assume_constant_result  # Dynamo guards on the group, and need not trace torch.distributed
def _process(group: Any) -> tuple[str, int, tuple[int, ...], tuple[str, str] | None]:
    """Name, size and order of the process group behind `group`, or what is wrong with it."""
    group = _torch.unwrap_opaque(group)
    if isinstance(group, dist.ProcessGroup):
        return group.group_name, group.size(), (), None
    if isinstance(group, DeviceMesh):
        if group.get_coordinate() is None:
            return "", 0, (), ("value", f"this rank is not in {group}")
        ranks = tuple(group.mesh.flatten().tolist())
        made = group.get_group() if group.ndim == 1 else make_group(ranks)
        return made.group_name, len(ranks), order_of(ranks), None
    if group is WORLD:
        return "", 0, (), ("value", _NO_WORLD)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return "", 0, (), ("value", "this rank is not in the group")
    kinds = "an axis name, a tuple of names, a ProcessGroup, a DeviceMesh, a fcoll.Group or fcoll.WORLD"
    return "", 0, (), ("type", f"a group is {kinds}, got {type(group).__name__}")
