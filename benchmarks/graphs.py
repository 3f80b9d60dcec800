"""What a compiler is given: the graphs of a function, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import GraphModule


class Captured(NamedTuple):
    """A graph after AOTAutograd, and the seconds from the call to its delivery."""

    graph: GraphModule
    seconds: float


def graphs_of(f: Callable[..., Tensor], *args: Tensor) -> list[Captured]:
    """The graphs of f; the backward's too where an argument requires a gradient."""
    found: list[Captured] = []

    def keep(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(Captured(graph, time.perf_counter() - start))
        boxed: Callable[..., Any] = make_boxed_func(graph.forward)
        return boxed

    torch._dynamo.reset()
    start = time.perf_counter()
    y = torch.compile(f, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(*args)
    if isinstance(y, Tensor) and y.requires_grad:
        y.backward(torch.ones_like(y))
        for x in args:
            x.grad = None
    return found


def nodes(captured: list[Captured]) -> int:
    """How many operations the graphs have."""
    return len(_targets(captured))


def communications(captured: list[Captured]) -> int:
    """How many of them communicate."""
    return sum(name.startswith("_c10d_functional.") and "wait_tensor" not in name for name in _targets(captured))


def _targets(captured: list[Captured]) -> list[str]:
    graphs = [each.graph.graph for each in captured]
    return [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]
