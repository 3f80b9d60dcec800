"""A contrastive loss (CLIP's): each rank scores its own images and texts against those of all ranks.

The features are gathered; the gradient flows back to the rank that each came from.
"""

from __future__ import annotations

import torch
from against_dense import Values, ranks, report
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

import fcoll
from fcoll import P
from fcoll.groups import GroupLike

SPECS = {"images": P("dp"), "texts": P("dp"), "w_image": P(), "w_text": P(), "scale": P()}


def inputs(n: int) -> Values:
    generator = torch.Generator().manual_seed(0)
    shapes = {"images": (3 * n, 5), "texts": (3 * n, 4), "w_image": (5, 6), "w_text": (4, 6), "scale": ()}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def features(values: Values) -> tuple[Tensor, Tensor]:
    return normalize(values["images"] @ values["w_image"]), normalize(values["texts"] @ values["w_text"])


def program(values: Values, dp: GroupLike = "dp") -> Tensor:
    """One rank: its rows of both matrices of scores."""
    images, texts = features(values)
    all_images, all_texts = fcoll.all_gather((images, texts), dp)
    labels = fcoll.axis_index(dp) * len(images) + torch.arange(len(images))
    scale = values["scale"].exp()
    by_image = cross_entropy(scale * images @ all_texts.T, labels)
    by_text = cross_entropy(scale * texts @ all_images.T, labels)
    return fcoll.all_reduce((by_image + by_text) / 2, dp, "mean")


def dense(values: Values, n: int) -> Tensor:
    images, texts = features(values)
    scores = values["scale"].exp() * images @ texts.T
    labels = torch.arange(len(images))
    return (cross_entropy(scores, labels) + cross_entropy(scores.T, labels)) / 2


def main() -> None:
    n = ranks()
    mapped = fcoll.shard_map(program, fcoll.mesh(dp=n), in_specs=(SPECS,), out_specs=P())
    report("contrastive loss", mapped, lambda values: dense(values, n), inputs(n))


if __name__ == "__main__":
    main()
