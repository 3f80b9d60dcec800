"""A pipeline: each rank is one stage, and micro-batches move from stage to stage by `shift`.

In each tick all stages work, each on another micro-batch. The backward pass runs through the pipeline the other way
round, because the transpose of a shift is the opposite shift.
"""

from __future__ import annotations

import torch
from against_dense import Values, ranks, report
from torch import Tensor

import fcoll
from fcoll import P
from fcoll.groups import GroupLike

MICRO_BATCHES, EXAMPLES, WIDTH = 6, 2, 3
SPECS = {"w": P("pp"), "b": P("pp"), "x": P(), "target": P()}


def inputs(n: int) -> Values:
    generator = torch.Generator().manual_seed(0)
    batch = (MICRO_BATCHES, EXAMPLES, WIDTH)
    shapes = {"w": (n, WIDTH, WIDTH), "b": (n, WIDTH), "x": batch, "target": batch}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def stage(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w + b)


def program(values: Values, pp: GroupLike = "pp") -> Tensor:
    """One rank: in tick t, stage r works on micro-batch t - r; where there is none, what it computes is not used."""
    n, index = fcoll.axis_size(pp), fcoll.axis_index(pp)
    (w,), (b,), x = values["w"], values["b"], values["x"]
    arriving = torch.zeros_like(x[0])
    finished = []
    for tick in range(MICRO_BATCHES + n - 1):
        fresh = x[min(tick, MICRO_BATCHES - 1)]
        y = stage(w, b, torch.where(index == 0, fresh, arriving))
        if tick >= n - 1:
            finished.append(y)
        arriving = fcoll.shift(y, pp, wrap=False)
    error = (torch.stack(finished) - values["target"]).square().mean()
    return fcoll.all_reduce(torch.where(index == n - 1, error, 0), pp)  # it is the last stage's


def dense(values: Values, n: int) -> Tensor:
    x = values["x"]
    for w, b in zip(values["w"], values["b"], strict=True):
        x = stage(w, b, x)
    return (x - values["target"]).square().mean()


def main() -> None:
    n = ranks()
    mapped = fcoll.shard_map(program, fcoll.mesh(pp=n), in_specs=(SPECS,), out_specs=P())
    report("pipeline", mapped, lambda values: dense(values, n), inputs(n))


if __name__ == "__main__":
    main()
