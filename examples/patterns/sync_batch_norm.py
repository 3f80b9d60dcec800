"""Synchronised batch normalisation: mean and variance are those of the whole batch, not of a rank's part.

Its backward needs two reductions more. Nobody has to write them: they are the transposes of those in the forward.
"""

from __future__ import annotations

import torch
from against_dense import Values, ranks, report
from torch import Tensor
from torch.nn.functional import batch_norm

import fcoll
from fcoll import P
from fcoll.groups import GroupLike

CHANNELS, EPSILON = 3, 1e-5
SPECS = {"x": P("dp"), "target": P("dp"), "scale": P(), "offset": P()}


def inputs(n: int) -> Values:
    generator = torch.Generator().manual_seed(0)
    batch = (2 * n, CHANNELS, 4, 4)
    shapes = {"x": batch, "target": batch, "scale": (CHANNELS,), "offset": (CHANNELS,)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def normalise(x: Tensor, dp: GroupLike) -> Tensor:
    """Over the batch and the pixels, per channel."""
    mean = fcoll.all_reduce(x.mean((0, 2, 3), keepdim=True), dp, "mean")
    variance = fcoll.all_reduce((x - mean).square().mean((0, 2, 3), keepdim=True), dp, "mean")
    return (x - mean) * torch.rsqrt(variance + EPSILON)


def program(values: Values, dp: GroupLike = "dp") -> Tensor:
    """One rank: its images, normalised, and the mean error over all ranks."""
    scale, offset = values["scale"][:, None, None], values["offset"][:, None, None]
    output = torch.tanh(normalise(values["x"], dp) * scale + offset)
    return fcoll.all_reduce((output - values["target"]).square().mean(), dp, "mean")


def dense(values: Values, n: int) -> Tensor:
    output = batch_norm(values["x"], None, None, values["scale"], values["offset"], training=True, eps=EPSILON)
    return (torch.tanh(output) - values["target"]).square().mean()


def main() -> None:
    n = ranks()
    mapped = fcoll.shard_map(program, fcoll.mesh(dp=n), in_specs=(SPECS,), out_specs=P())
    report("synchronised batch norm", mapped, lambda values: dense(values, n), inputs(n))


if __name__ == "__main__":
    main()
