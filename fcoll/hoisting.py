"""Sums over ranks are taken where they are smallest: before or behind linear operations, as a minimum cut says.

An operation is linear in some of its arguments if the others are the same on all ranks of the group; then it maps
sums over the ranks to sums over the ranks, so that all_reduce(f(x)) = f(all_reduce(x)). Above the all_reduces of a
group lies a region of such operations. Every set of values that cuts the region off from what it starts from can be
reduced instead, and the operations behind the cut repeated on the sums. Of these sets, that of the fewest bytes is
taken. What is the same on all ranks anyway has its sum for nothing.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from fcoll import _torch
from fcoll.fusing import depths, sort
from fcoll.invariance import ALL_REDUCE, WAIT, Family, Invariance, alike
from fcoll.marks import INVARIANT
from fcoll.rewrites import aten, emit, message, shown, tame, wide

_FIRST = {  # linear in the first argument (a cat in all of its list), as derivatives are in the cotangent
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.expand.default, aten.clone.default, aten.alias.default, aten.detach.default, aten.slice.Tensor,
    aten.select.int, aten.split.Tensor, aten.unbind.int, aten.diagonal.default, aten.flip.default, aten.repeat.default,
    aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.cumsum.default,
    aten.div.Tensor, aten.div.Scalar, aten.mul.Scalar, aten.index_select.default, aten.gather.default,
    aten.slice_backward.default, aten.select_backward.default, aten.embedding_dense_backward.default,
    aten.tanh_backward.default, aten.sigmoid_backward.default, aten.gelu_backward.default, aten.silu_backward.default,
    aten.threshold_backward.default, aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
    aten.native_layer_norm_backward.default, aten.native_group_norm_backward.default,
    aten.convolution_backward.default, aten.cat.default,
    operator.getitem, INVARIANT,
}  # fmt: skip
_SCALES = {aten.div.Tensor, aten.div.Scalar, aten.mul.Scalar, aten.mul.Tensor}
_SUMS = {aten.add.Tensor, aten.sub.Tensor}  # linear in both arguments together
_PRODUCTS = {aten.mul.Tensor, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default}  # in either alone


def linear(node: Node, known: Invariance, family: Family) -> list[int] | None:
    """The places of the arguments in which a node is linear together, if all else is the same on all ranks of the
    group; None if it is not known to be.
    """
    args: Any = node.args
    if node.target in _FIRST:
        places = [0]
    elif node.target in _SUMS:
        places = [0, 1]
    elif node.target == aten.where.self:
        places = [1, 2]
    elif node.target in _PRODUCTS:
        places = [i for i in (0, 1) if isinstance(args[i], Node) and not alike(known[args[i]], family)]
        if len(places) != 1:
            return None
    else:
        return None
    found = [args[i] for i in places]
    found = list(found[0]) if node.target == aten.cat.default else found
    others = [arg for i, arg in enumerate(args) if i not in places]
    if node.target in _SCALES and not all(isinstance(arg, Node) or tame(arg) for arg in others):
        return None
    if not all(isinstance(arg, Node) and _tensors(arg) for arg in (node, *found)):
        return None
    if not all(alike(known[arg], family) for arg in nodes([others, node.kwargs])):
        return None
    values = [value for each in (node, *found) for value in _tensors(each)]
    return places if all(wide(value) and value.dtype == values[0].dtype for value in values) else None


def nodes(args: Any) -> list[Node]:
    """Those among arguments."""
    found: list[Node] = []
    torch.fx.map_arg(args, found.append)
    return found


def _tensors(node: Node) -> list[Any]:
    value = node.meta.get("val")
    return [each for each in (value if isinstance(value, (list, tuple)) else [value]) if each is not None]


Depth = dict[Node, int]
Sums = dict[Any, Node]
"""By what is reduced."""

Member = tuple[Node, Node, Family]
"""An all_reduce, its wait, its groups."""


def hoist(graph: Graph, known: Invariance) -> list[str]:
    """Reduce other values, where these are smaller; returns what was done."""
    depth = depths(graph)
    kinds: dict[Any, list[Member]] = {}
    for node in graph.nodes:
        found = message(node, known) if node.target == ALL_REDUCE and node.args[1] in ("sum", "avg") else None
        if found and wide(node.meta["val"]) and not alike(known[node.args[0]], found[1]):
            kinds.setdefault(node.args[1:], []).append((node, *found))
    reasons = []
    for members in kinds.values():
        region = Region(members, known, depth)
        for part in region.parts(members):
            reasons += _moved(region, part, known)
        if reasons:  # the others next time, when the new operations have their depth
            sort(graph)
            break
    return reasons


class Region:
    """The values that can be reduced instead of the arguments of some all_reduces, and how they are connected."""

    def __init__(self, members: list[Member], known: Invariance, depth: Depth) -> None:
        _, _, family = members[0]
        self.depth = depth
        self.there: Sums = {node.args[0]: wait for node, wait, _ in members}
        self.inputs: dict[Node, list[Node]] = {}  # what varies, of values that are linear in it
        self.sources: set[Node] = set()
        todo: list[Node] = list(self.there)
        while todo:
            node = todo.pop()
            if node in self.inputs:
                continue
            found = linear(node, known, family)
            together = nodes([node.args[i] for i in found or ()])
            varying = [x for x in together if not (alike(known[x], family) or self.given(x, node))]
            # a cut at the same depth sends as many messages as before, see fusing.py
            if found is None or any(depth[x] != depth[node] for x in varying):
                self.sources.add(node)
                varying = []
            self.inputs[node] = varying
            todo += varying

    def given(self, x: Node, node: Node) -> bool:
        """Whether x is reduced anyway, before a node."""
        return x in self.there and self.depth[x] < self.depth[node]

    def parts(self, members: list[Member]) -> list[list[Member]]:
        """Those that are connected go together; what uses the sums of others comes before these."""
        beside: dict[Node, list[Node]] = {node: list(inputs) for node, inputs in self.inputs.items()}
        for node, inputs in self.inputs.items():
            for x in inputs:
                beside[x].append(node)
        part: dict[Any, int] = {}
        for number, start in enumerate(self.inputs):
            todo = [start]
            while todo:
                node = todo.pop()
                if node not in part:
                    part[node] = number
                    todo += beside[node]
        found: dict[int, list[Member]] = {}
        for member in members:
            found.setdefault(part[member[0].args[0]], []).append(member)
        return sorted(found.values(), key=lambda part: -self.depth[part[0][0]])

    def cut(self, sinks: Iterable[Node]) -> list[Node]:
        """Of the sets of values that separate sources from sinks, the one of the fewest bytes, next to the sinks."""
        # vertices are split: (node, 0) → (node, 1) has the capacity of the node, all else is unlimited
        left: dict[Any, dict[Any, float]] = {"from": {}, "to": {}}

        def edge(a: Any, b: Any, capacity: float) -> None:
            left.setdefault(a, {})[b] = capacity
            left.setdefault(b, {}).setdefault(a, 0)

        above: dict[Node, None] = {}
        todo = list(sinks)
        for node in todo:
            edge((node, 1), "to", math.inf)
        while todo:
            node = todo.pop()
            if node in above:
                continue
            above[node] = None
            edge((node, 0), (node, 1), size(node))
            if node in self.sources:
                edge("from", (node, 0), math.inf)
            for x in self.inputs[node]:
                edge((x, 1), (node, 0), math.inf)
                todo.append(x)
        while path := _path(left):
            amount = min(left[a][b] for a, b in path)
            for a, b in path:
                left[a][b] -= amount
                left[b][a] += amount
        behind: set[Any] = {"to"}
        waiting: deque[Any] = deque(behind)
        while waiting:
            b = waiting.popleft()
            for a in left[b]:
                if a not in behind and left[a][b] > 0:
                    behind.add(a)
                    waiting.append(a)
        return [node for node in above if (node, 1) in behind and (node, 0) not in behind]


def _path(left: dict[Any, dict[Any, float]]) -> list[tuple[Any, Any]]:
    """A shortest way on which something is left."""
    came: dict[Any, Any] = {"from": None}
    todo: deque[Any] = deque(came)
    while todo and "to" not in came:
        a = todo.popleft()
        for b, capacity in left[a].items():
            if capacity > 0 and b not in came:
                came[b] = a
                todo.append(b)
    path, at = [], "to"
    while came.get(at) is not None:
        path.append((came[at], at))
        at = came[at]
    return path


def size(node: Node) -> float:
    """In bytes; what cannot be a message is larger than all that can."""
    value = node.meta["val"]
    return float(value.nbytes) if shown(node) and wide(value) else math.inf


def _moved(region: Region, members: list[Member], known: Invariance) -> list[str]:
    (first, before, family), op = members[0], members[0][0].args[1]
    sinks: dict[Any, None] = dict.fromkeys(node.args[0] for node, _, _ in members)
    cut = region.cut(sinks)
    if len(cut) > len(sinks) or sum(map(size, cut)) >= sum(map(size, sinks)):
        return []
    names = ", ".join(node.name for node, _, _ in members)
    sums: Sums = {x: emit(before, WAIT, emit(before, ALL_REDUCE, x, *first.args[1:])) for x in cut}
    needed, todo = set(), list(sinks)
    while todo:
        node = todo.pop()
        if node not in sums and node not in needed:
            needed.add(node)
            todo += region.inputs[node]
    for node in [node for node in region.depth if node in needed]:  # in order
        places = linear(node, known, family) or ()
        for x in nodes([node.args[i] for i in places]):
            if x not in sums and region.given(x, node):
                sums[x] = region.there[x]
            elif x not in sums:  # the same on all ranks
                sums[x] = emit(before, aten.mul.Tensor, x, len(family[0])) if op == "sum" else x
        args = [torch.fx.map_arg(arg, sums.__getitem__) if i in places else arg for i, arg in enumerate(node.args)]
        sums[node] = sums[args[0]] if node.target == INVARIANT else emit(before, node.target, *args, **node.kwargs)
    own: set[Node] = set()  # results, which share no memory
    for node, wait, _ in members:
        y = sums[node.args[0]]
        y = emit(wait, aten.clone.default, y) if y in own or _torch.is_view(y.target) else y
        own.add(y)
        wait.replace_all_uses_with(y)
        wait.graph.erase_node(wait)
        node.graph.erase_node(node)
    if not cut:
        return [f"{names}: follows from what is reduced anyway, and from what is the same on all ranks of the group"]
    return [f"{names}: reduces {', '.join(node.name for node in cut)} instead, which is smaller"]
