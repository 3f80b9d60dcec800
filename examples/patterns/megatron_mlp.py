"""Megatron's two-layer network: the first weight cut by columns, the second by rows, one reduction at the end.

Between the two layers, each rank has some of the hidden units, for all examples.
"""

from __future__ import annotations

import torch
from against_dense import Values, ranks, report
from torch import Tensor

import fcoll
from fcoll import P
from fcoll.groups import GroupLike

SPECS = {"w1": P(None, "tp"), "b1": P("tp"), "w2": P("tp", None), "b2": P(), "x": P(), "target": P()}


def inputs(n: int) -> Values:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (4, 2 * n), "b1": (2 * n,), "w2": (2 * n, 3), "b2": (3,), "x": (5, 4), "target": (5, 3)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def program(values: Values, tp: GroupLike = "tp") -> Tensor:
    """One rank: its hidden units, and their part of the output."""
    hidden = torch.tanh(values["x"] @ values["w1"] + values["b1"])
    output = fcoll.all_reduce(hidden @ values["w2"], tp) + values["b2"]
    return (output - values["target"]).square().mean()


def dense(values: Values, n: int) -> Tensor:
    hidden = torch.tanh(values["x"] @ values["w1"] + values["b1"])
    return (hidden @ values["w2"] + values["b2"] - values["target"]).square().mean()


def main() -> None:
    n = ranks()
    mapped = fcoll.shard_map(program, fcoll.mesh(tp=n), in_specs=(SPECS,), out_specs=P())
    report("Megatron MLP", mapped, lambda values: dense(values, n), inputs(n))


if __name__ == "__main__":
    main()
