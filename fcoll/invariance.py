"""Which ranks surely hold the same value, for every value of a traced graph.

A value's *classes* give each rank of the world a number: ranks with the same number surely hold the same value. A
literal has one class, and whatever is not known to be alike has as many as there are ranks. An operation that is a
function of its arguments gives equal results for equal arguments; a collective gives rank r what follows from the
values of the members of r's group, in their order, and perhaps from r's place among them. So ranks are alike in the
result if the classes of their groups' members read alike: this holds for groups of any kind, and needs no mesh.

All of this rests on every rank having the same graph, which `optimizing.py` lets the ranks compare.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.fx
from torch import Tensor

from fcoll import _torch
from fcoll.engine import MOVE, RANK
from fcoll.marks import COTANGENT, INVARIANT

Classes = tuple[int, ...]
"""Per rank of the world, the number of its class."""

Family = tuple[tuple[int, ...], ...]
"""The process groups that stand for each other on different ranks: as ranks of the world, in each group's order."""

Families = dict[str | tuple[int, ...], Family]
"""By the name of this rank's group, or its ranks in a mark. A group that is not there is not known."""

c10d = torch.ops._c10d_functional
WAIT = c10d.wait_tensor.default
ALL_REDUCE = c10d.all_reduce.default
ALL_GATHER = c10d.all_gather_into_tensor.default
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
ALL_TO_ALL = c10d.all_to_all_single.default
BROADCAST = c10d.broadcast.default

COLLECTIVES = {ALL_REDUCE: 3, ALL_GATHER: 3, REDUCE_SCATTER: 4, ALL_TO_ALL: 4, BROADCAST: 3, MOVE: 4}
"""The operations that send, with their number of arguments; the group is the last."""


def classes_of(values: Iterable[Hashable]) -> Classes:
    """Equal values, equal numbers: numbered in the order in which they are met."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in values)


@lru_cache(maxsize=4096)
def meet(a: Classes, b: Classes) -> Classes:
    """Alike where both are."""
    return classes_of(zip(a, b, strict=True))


@lru_cache(maxsize=4096)
def join(a: Classes, b: Classes) -> Classes:
    """Alike where one of them is, and what follows from that: both are known of one value."""
    merged = list(a)
    first: dict[int, int] = {}
    for rank, number in enumerate(b):
        old, new = merged[rank], merged[first.setdefault(number, rank)]
        if old != new:
            merged = [new if each == old else each for each in merged]
    return classes_of(merged)


@lru_cache(maxsize=4096)
def gathered(x: Classes, family: Family, placed: bool) -> Classes:
    """Of what follows from the values of all members, and from the rank's own place if `placed`."""
    read: list[Hashable] = [("outside", rank) for rank in range(len(x))]
    for group in family:
        values = tuple(x[rank] for rank in group)
        for place, rank in enumerate(group):
            read[rank] = (values, place if placed else 0)
    return classes_of(read)


def received(x: Classes, family: Family, source: Callable[[int], int | None]) -> Classes:
    """Of the value of the member at the source of a rank's place, or of zeros where there is None."""
    read: list[Hashable] = [("outside", rank) for rank in range(len(x))]
    for group in family:
        for place, rank in enumerate(group):
            at = source(place)
            read[rank] = "zeros" if at is None else x[group[at]] if 0 <= at < len(group) else ("unknown", rank)
    return classes_of(read)


def alike(x: Classes, family: Family) -> bool:
    """Whether the value is the same on all ranks of each group."""
    return all(x[rank] == x[group[0]] for group in family for rank in group)


class Invariance:
    """The classes of the nodes of a graph, over a world of so many ranks."""

    def __init__(self, graph: torch.fx.Graph, world: int, families: Families) -> None:
        self.world, self.families = world, families
        self.varying: Classes = tuple(range(world))
        self.everywhere: Classes = (0,) * world
        self.classes: dict[torch.fx.Node, Classes] = {}
        for node in graph.nodes:
            self[node]

    def __getitem__(self, node: torch.fx.Node) -> Classes:
        """The classes of a node, which may be newer than this."""
        if node not in self.classes:
            self.classes[node] = self._of(node)
        return self.classes[node]

    def family(self, node: torch.fx.Node) -> Family | None:
        """The groups of a collective; None if it is none, or of another form than ours, or of an unknown group."""
        if node.target not in COLLECTIVES or node.kwargs or len(node.args) != COLLECTIVES[node.target]:
            return None
        family = self.families.get(key(node))
        n = {ALL_GATHER: 1, REDUCE_SCATTER: 2}.get(node.target)
        if family is not None and n is not None and any(len(group) != node.args[n] for group in family):
            return None
        return family

    def _of(self, node: torch.fx.Node) -> Classes:
        if node.op == "get_attr":
            return self.everywhere if literal(node) else self.varying
        if node.op != "call_function":
            return self.varying
        value = node.meta.get("val")
        if isinstance(value, Tensor) and any(
            type(size) is int and size == 0 for size in value.shape
        ):  # which has no elements that could differ
            return self.everywhere
        inputs = [self[each] for each in node.all_input_nodes]
        if node.target == INVARIANT:
            family = self.families.get(key(node))
            return join(inputs[0], gathered(self.varying, family, False)) if family is not None else inputs[0]
        if node.target == RANK:
            family = self.families.get(key(node))
            return gathered(self.everywhere, family, True) if family is not None else self.varying
        if node.target in COLLECTIVES:
            return self._of_collective(node, inputs[0])
        if node.target in (WAIT, COTANGENT):
            return inputs[0]
        if node.target in _OF_SHAPE and _static(node):
            inputs = inputs[1:]
        elif not function_of_arguments(node.target):
            return self.varying
        result = self.everywhere
        for each in inputs:
            result = meet(result, each)
        return result

    def _of_collective(self, node: torch.fx.Node, x: Classes) -> Classes:
        family = self.family(node)
        if family is None:
            return self.varying
        if node.target == BROADCAST:
            source: Any = node.args[1]
            return received(x, family, lambda place: source)
        if node.target == MOVE:
            return self._of_move(node, x, family)
        if node.target == ALL_TO_ALL:
            sizes: list[Any] = [*node.args[1], *node.args[2]]  # type: ignore[misc]
            if any(type(size) is not int or size != sizes[0] for size in sizes):
                return self.varying
        return gathered(x, family, node.target in (REDUCE_SCATTER, ALL_TO_ALL))

    def _of_move(self, node: torch.fx.Node, x: Classes, family: Family) -> Classes:
        kind, (_, *ranks) = cast("tuple[str, list[int]]", node.args[1:3])
        if kind == "permute":
            sources = dict(zip(ranks[1::2], ranks[::2], strict=True))
            return received(x, family, sources.get)
        if kind == "scatter":
            return meet(received(x, family, lambda place: ranks[0]), gathered(self.everywhere, family, True))
        at_root = received(self.everywhere, family, lambda place: 0 if place == ranks[0] else None)
        return meet(gathered(x, family, False), at_root)


_OF_SHAPE = {
    operation.default
    for operation in (
        torch.ops.aten.zeros_like, torch.ops.aten.ones_like, torch.ops.aten.full_like, torch.ops.aten.new_zeros,
        torch.ops.aten.new_ones, torch.ops.aten.new_full,
    )
}  # fmt: skip
"""Of the first argument, only the shape matters."""


def _static(node: torch.fx.Node) -> bool:
    """Whether the first argument's shape is a literal of the graph."""
    value = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], torch.fx.Node) else None
    return isinstance(value, Tensor) and all(type(size) is int for size in value.shape)


def key(node: torch.fx.Node) -> str | tuple[int, ...]:
    """What `Families` knows the group of a collective, a rank or a mark by."""
    group: Any = node.args[-1]
    return group if isinstance(group, str) else tuple(group)


def literal(node: torch.fx.Node) -> bool:
    """Whether an attribute of the module is a constant of the traced code, as torch.tensor(2.0) makes one: small, and
    copied before use. Other attributes are the user's tensors, which may change.
    """
    if not node.users or any(user.target != torch.ops.aten.lift_fresh_copy.default for user in node.users):
        return False
    value = constant(node)
    return value is not None and value.numel() <= LITERAL


LITERAL = 4096  # elements: so small that the ranks can compare them


def constant(node: torch.fx.Node) -> Tensor | None:
    """The tensor that a get_attr node stands for."""
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value if type(value) is Tensor else None


@lru_cache(maxsize=4096)
def function_of_arguments(target: Any) -> bool:
    """Whether an operation gives equal results for equal arguments, and does nothing else. Unknown ones do not."""
    if target == operator.getitem or target in _ON_NUMBERS:
        return True
    if not _torch.is_operator(target) or target.namespace not in ("aten", "prims"):
        return False
    if not target._schema.returns or _torch.is_mutable(target) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return not any(word in target._schema.name for word in ("empty", "rand", "dropout", "resize", "rnn", "_lstm"))


_ON_NUMBERS: Sequence[Callable[..., Any]] = (
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, operator.eq, operator.ne,
    operator.lt, operator.le, operator.gt, operator.ge,
)  # fmt: skip
