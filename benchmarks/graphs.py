"""What a compiler is given: the graphs of a function, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import GraphModule


def graphs_of(f: Callable[..., Tensor], *args: Tensor) -> list[GraphModule]:
    """The graphs after AOTAutograd; the backward's too where an argument requires a gradient."""
    found: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(graph)
        boxed: Callable[..., Any] = make_boxed_func(graph.forward)
        return boxed

    torch._dynamo.reset()
    y = torch.compile(f, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(*args)
    if isinstance(y, Tensor) and y.requires_grad:
        y.backward(torch.ones_like(y))
        for x in args:
            x.grad = None
    return found


def nodes(graph: GraphModule) -> int:
    """How many operations a graph has."""
    return sum(node.op == "call_function" for node in graph.graph.nodes)


def communications(graph: GraphModule) -> int:
    """How many of them communicate."""
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return sum(name.startswith("_c10d_functional.") and "wait_tensor" not in name for name in names)
