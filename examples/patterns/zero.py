"""ZeRO: parameters, gradients and the optimiser's state are cut among the data-parallel ranks.

A layer gathers its weight just before it uses it. The gradient arrives cut, and summed over the ranks, without a line
for it: the transpose of all_gather is reduce_scatter.
"""

from __future__ import annotations

import torch
from against_dense import Values, ranks, report
from torch import Tensor

import fcoll
from fcoll import P
from fcoll.groups import GroupLike

SPECS = {"w1": P("dp"), "w2": P("dp"), "x": P("dp"), "y": P("dp")}
STEPS, RATE, MOMENTUM = 3, 0.1, 0.9


def inputs(n: int) -> Values:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (n, 2 * n), "w2": (2 * n, 3), "x": (2 * n, n), "y": (2 * n, 3)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def error(parts: Values, x: Tensor, y: Tensor, dp: GroupLike) -> Tensor:
    """Of this rank's examples."""
    hidden = torch.tanh(x @ fcoll.all_gather(parts["w1"], dp))
    return (hidden @ fcoll.all_gather(parts["w2"], dp) - y).square().mean()


def program(values: Values, dp: GroupLike = "dp") -> Tensor:
    """One rank: a few steps on its part of the parameters, then the loss over all examples."""
    parts, x, y = {name: values[name] for name in ("w1", "w2")}, values["x"], values["y"]
    momentum = {name: torch.zeros_like(part) for name, part in parts.items()}
    for _ in range(STEPS):
        gradients = torch.func.grad(error)(parts, x, y, dp)  # of the sum over the ranks, where the loss is the mean
        momentum = {name: MOMENTUM * momentum[name] + g / fcoll.axis_size(dp) for name, g in gradients.items()}
        parts = {name: part - RATE * momentum[name] for name, part in parts.items()}
    return fcoll.all_reduce(error(parts, x, y, dp), dp, "mean")


def dense_error(params: Values, x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(x @ params["w1"]) @ params["w2"] - y).square().mean()


def dense(values: Values, n: int) -> Tensor:
    params, x, y = {name: values[name] for name in ("w1", "w2")}, values["x"], values["y"]
    momentum = {name: torch.zeros_like(param) for name, param in params.items()}
    for _ in range(STEPS):
        gradients = torch.func.grad(dense_error)(params, x, y)
        momentum = {name: MOMENTUM * momentum[name] + g for name, g in gradients.items()}
        params = {name: param - RATE * momentum[name] for name, param in params.items()}
    return dense_error(params, x, y)


def main() -> None:
    n = ranks()
    mapped = fcoll.shard_map(program, fcoll.mesh(dp=n), in_specs=(SPECS,), out_specs=P())
    report("ZeRO", mapped, lambda values: dense(values, n), inputs(n))


if __name__ == "__main__":
    main()
