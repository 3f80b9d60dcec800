"""This rank's part of the collectives that read the same on all ranks while a graph is rewritten: see `engine.moving`.

What a permute, a gather or a scatter is made of differs between sender, receiver and onlooker. Until all rewriting is
done, a graph holds it as `fcoll::move`, which is then replaced by what the engine does without marks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fcoll import _torch, marks
from fcoll.engine import MOVE, moving
from fcoll.invariance import WAIT
from fcoll.rewrites import aten, emit


def settle(graph: Graph) -> None:
    """Put this rank's part into the place of every move: the message where it starts, the rest where it is awaited."""
    for node in graph.find_nodes(op="call_function", target=MOVE):
        x, how = node.args[0], node.args[1:]
        sent = _inlined(node, partial(_sent, how), x)
        for wait in [user for user in node.users if user.target == WAIT] or [node]:
            arrived = emit(wait, WAIT, sent)
            y = _inlined(wait, partial(_finished, how), x, arrived)
            if y.meta["val"].stride() != node.meta["val"].stride():
                y = emit(wait, aten.clone.default, y, memory_format=torch.contiguous_format)
            wait.replace_all_uses_with(y)
            if wait is not node:
                graph.erase_node(wait)
        graph.erase_node(node)


def _sent(how: Any, x: Tensor) -> Tensor:
    return moving(x, *how).buffer


def _finished(how: Any, x: Tensor, arrived: Tensor) -> Tensor:
    return moving(x, *how).finish(arrived)


def _inlined(before: Node, f: Callable[..., Any], *args: Any) -> Node:
    """The operations of f in front of a node; those that its result needs."""
    with marks.unmarked():
        made = _torch.fake_result(before.meta["val"], make_fx(f), [arg.meta["val"] for arg in args], {})
    traced = made.graph
    (result,) = traced.output_node().args
    needed = {result}
    for node in reversed(traced.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    new: dict[Node, Node] = dict(zip(traced.find_nodes(op="placeholder"), args, strict=True))
    for node in traced.nodes:
        if node in needed and node not in new:
            new[node] = emit(before, node.target, *torch.fx.map_arg(node.args, new.__getitem__), **node.kwargs)
    return new[result]
