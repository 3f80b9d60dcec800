"""What is done to a graph before and after the rules: writes that need not be ones, results that nobody uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from fcoll import _torch
from fcoll.invariance import COLLECTIVES
from fcoll.rewrites import emit, shown


def out_of_place(graph: Graph) -> Graph:
    """The graph, in which no operation writes into what an elementwise one has made for it alone: the operation that
    makes a new tensor gives the same.
    """
    for node in list(graph.nodes):
        x = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(x, Node) or len(x.users) != 1 or not _elementwise(x.target) or not shown(node):
            continue
        found = _torch.out_of_place(node.target)
        if found is not None and [each for each in node.all_input_nodes if each is x] and node.args.count(x) == 1:
            new = emit(node, found, *node.args, **node.kwargs)
            if new.meta["val"].dtype == node.meta["val"].dtype:
                node.replace_all_uses_with(new)
                graph.erase_node(node)
            else:
                graph.erase_node(new)
    return graph


def _elementwise(target: Any) -> bool:
    return _torch.is_operator(target) and not _torch.is_mutable(target) and torch.Tag.pointwise in target.tags


def unused(graph: Graph, removable: Callable[[Node], bool]) -> list[str]:
    """Erase what nothing uses, collectives too; returns these."""
    gone = []
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and removable(node):
            if node.target in COLLECTIVES:
                gone.append(f"{node.name}: nothing uses it")
            graph.erase_node(node)
    return gone
