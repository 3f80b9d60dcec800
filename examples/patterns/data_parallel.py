"""Data parallelism: every rank has its own examples, all have the same parameters.

Each step takes the gradient of the rank's own loss, and the mean of these gradients moves the parameters. The steps are
a pure function, so that even the gradient of the last loss with respect to the first parameters is exact.
"""

from __future__ import annotations

import torch
from against_dense import Values, ranks, report
from torch import Tensor

import fcoll
from fcoll import P
from fcoll.groups import GroupLike

SPECS = {"w": P(), "b": P(), "x": P("dp"), "y": P("dp")}
STEPS, RATE = 3, 0.1


def inputs(n: int) -> Values:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (3,), "b": (), "x": (2 * n, 3), "y": (2 * n,)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def error(params: Values, x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(x @ params["w"] + params["b"]) - y).square().mean()


def program(values: Values, dp: GroupLike = "dp") -> Tensor:
    """One rank: a few steps of gradient descent, then the loss over all examples."""
    params = {"w": values["w"], "b": values["b"]}
    for _ in range(STEPS):
        gradients = torch.func.grad(error)(params, values["x"], values["y"])
        gradients = fcoll.all_reduce(gradients, dp, "mean")
        params = {name: p - RATE * gradients[name] for name, p in params.items()}
    return fcoll.all_reduce(error(params, values["x"], values["y"]), dp, "mean")


def dense(values: Values, n: int) -> Tensor:
    params = {"w": values["w"], "b": values["b"]}
    for _ in range(STEPS):
        gradients = torch.func.grad(error)(params, values["x"], values["y"])
        params = {name: p - RATE * gradients[name] for name, p in params.items()}
    return error(params, values["x"], values["y"])


def main() -> None:
    n = ranks()
    mapped = fcoll.shard_map(program, fcoll.mesh(dp=n), in_specs=(SPECS,), out_specs=P())
    report("data parallelism", mapped, lambda values: dense(values, n), inputs(n))


if __name__ == "__main__":
    main()
