"""Messages of a graph that do not wait for each other travel together, as the leaves of a tree do (`buckets.py`).

Every collective has a level: the largest number of collectives on a path to it. Two of one level never need each
other's result, and a graph in which those of one level are merged is still one without circles. The same goes for those
that no other collective needs, as those of most gradients: they are of one level of their own, after all others.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Any

from torch.fx import Graph, Node

from fcoll import buckets
from fcoll.engine import MOVE
from fcoll.invariance import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVES, REDUCE_SCATTER, WAIT, Invariance
from fcoll.rewrites import aten, emit, even, message


def like(node: Node) -> Any:
    """What those that travel together have in common: the arguments of their message. None for what travels alone."""
    if node.target in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER):
        return node.args[1:]
    if node.target == MOVE and node.args[1] == "permute":
        return node.args[1:]
    if node.target == ALL_TO_ALL and even(node):
        one = [1] * len(node.args[1])  # type: ignore[arg-type]
        return (one, one, node.args[3])
    return None


def rows(node: Node) -> int:
    """How many pieces of a message go to different ranks."""
    args: Any = node.args
    return args[2] if node.target == REDUCE_SCATTER else len(args[1]) if node.target == ALL_TO_ALL else 1


def depths(graph: Graph) -> dict[Node, int]:
    """How many collectives lie before each node, at most. In a graph of forward and backward, what depends on tangents
    counts from a larger number: a forward that waits for its backward would never run.
    """
    found: dict[Node, int] = {}
    backward = len(graph.nodes) + 1
    for node in graph.nodes:
        before = [found[each] + (each.target in COLLECTIVES) for each in node.all_input_nodes]
        tangent = node.op == "placeholder" and node.name.startswith("tangents")
        found[node] = max(before, default=backward if tangent else 0)
    return found


def levels(graph: Graph) -> dict[Node, int]:
    """The level of each collective."""
    found = depths(graph)
    backward = len(graph.nodes) + 1
    needed: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in needed or node.target in COLLECTIVES:
            needed.update(node.all_input_nodes)
    last = 2 * backward
    return {
        node: level if node in needed else last + (level >= backward)
        for node, level in found.items()
        if node.target in COLLECTIVES
    }


def fuse(graph: Graph, known: Invariance) -> list[str]:
    """Let messages of one level, operation, group and kind travel together; returns what was done."""
    at = levels(graph)
    alike: dict[Any, list[tuple[Node, Node]]] = {}
    for node in graph.nodes:
        how = like(node) if node.target in COLLECTIVES else None
        found = message(node, known) if how else None
        if found:
            value = node.meta["val"]
            kind = (at[node], node.target, repr(how), value.dtype, value.device)
            alike.setdefault(kind, []).append((node, found[0]))
    reasons = []
    for members in alike.values():
        for bucket in buckets.plan([node.meta["val"] for node, _ in members]):
            if len(bucket) > 1:
                reasons.append(_together(graph, [members[i] for i in bucket]))
    if reasons:
        sort(graph)
    return reasons


def _together(graph: Graph, members: list[tuple[Node, Node]]) -> str:
    """One message for all; the graph is not in order afterwards."""
    (first, _), (last, _) = members[0], members[-1]
    n = rows(first)
    flat = [emit(last, aten.reshape.default, node.args[0], [n, _numel(node.args[0]) // n]) for node, _ in members]
    sent = emit(last, first.target, emit(last, aten.cat.default, flat, 1), *like(first))
    y = emit(last, WAIT, sent)
    start = 0
    for node, wait in members:
        end = start + _numel(node) // y.meta["val"].shape[0]
        piece = emit(last, aten.clone.default, emit(last, aten.slice.Tensor, y, 1, start, end))  # see buckets.unpack
        wait.replace_all_uses_with(emit(last, aten.reshape.default, piece, list(node.meta["val"].shape)))
        start = end
        graph.erase_node(wait)
        if node is not last:
            graph.erase_node(node)
    graph.erase_node(last)
    return f"{', '.join(node.name for node, _ in members)}: travel together"


def _numel(node: Any) -> int:
    size: int = node.meta["val"].numel()
    return size


def sort(graph: Graph) -> None:
    """Put every node after its inputs, and otherwise leave the order as it is."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    nodes = list(place)
    waiting = {node: len(node.all_input_nodes) for node in nodes}
    ready = [place[node] for node in nodes if not waiting[node]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        ordered.append(node)
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, place[user])
    if len(ordered) != len(nodes):
        raise RuntimeError("fcoll.optimize: merged messages need each other's results")
    for before, node in itertools.pairwise(ordered):
        before.append(node)
