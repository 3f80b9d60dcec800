"""Halo exchange: an image too large for one rank is cut into strips, and convolutions need the neighbours' edge rows.

`shift(wrap=False)` gives zeros at the two ends, which is just the padding that a convolution of the whole image has.
"""

from __future__ import annotations

import torch
from against_dense import Values, ranks, report
from torch import Tensor
from torch.nn.functional import conv2d

import fcoll
from fcoll import P
from fcoll.groups import GroupLike

SPECS = {"image": P(None, None, "rows", None), "target": P(None, None, "rows", None), "w1": P(), "w2": P()}


def inputs(n: int) -> Values:
    generator = torch.Generator().manual_seed(0)
    shapes = {"image": (1, 2, 3 * n, 6), "target": (1, 1, 3 * n, 6), "w1": (4, 2, 3, 3), "w2": (1, 4, 5, 5)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def convolve(strip: Tensor, weight: Tensor, rows: GroupLike) -> Tensor:
    """This rank's rows of the convolution of the whole image, padded with zeros to keep its size."""
    halo = weight.shape[2] // 2
    above = fcoll.shift(strip[:, :, -halo:], rows, 1, wrap=False)  # the last rows of the strip above
    below = fcoll.shift(strip[:, :, :halo], rows, -1, wrap=False)
    return conv2d(torch.cat((above, strip, below), 2), weight, padding=(0, weight.shape[3] // 2))


def program(values: Values, rows: GroupLike = "rows") -> Tensor:
    """One rank: two layers on its strip."""
    output = convolve(torch.tanh(convolve(values["image"], values["w1"], rows)), values["w2"], rows)
    return fcoll.all_reduce((output - values["target"]).square().mean(), rows, "mean")


def dense(values: Values, n: int) -> Tensor:
    hidden = torch.tanh(conv2d(values["image"], values["w1"], padding=1))
    return (conv2d(hidden, values["w2"], padding=2) - values["target"]).square().mean()


def main() -> None:
    n = ranks()
    mapped = fcoll.shard_map(program, fcoll.mesh(rows=n), in_specs=(SPECS,), out_specs=P())
    report("halo exchange", mapped, lambda values: dense(values, n), inputs(n))


if __name__ == "__main__":
    main()
