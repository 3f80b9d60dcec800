"""A transformer block with Megatron's sequence parallelism: heads and hidden units are cut, elsewhere the sequence.

Where a layer needs all positions, they are gathered; where its partial results are summed, each rank keeps the sum for
its own positions only. An all_reduce would send as many bytes as the two together, and would leave every rank to
normalise the whole sequence.
"""

from __future__ import annotations

import torch
from against_dense import Values, ranks, report
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

import fcoll
from fcoll import P
from fcoll.groups import GroupLike

HEAD, TOKENS = 3, 2  # the width of a head, and the positions per rank
COLUMNS, ROWS = P(None, "tp"), P("tp", None)
SPECS = {
    "x": P("tp"), "target": P("tp"), "norm1": P(), "norm2": P(),
    "wq": COLUMNS, "wk": COLUMNS, "wv": COLUMNS, "wo": ROWS, "w1": COLUMNS, "w2": ROWS,
}  # fmt: skip


def inputs(n: int) -> Values:
    generator = torch.Generator().manual_seed(0)
    width = 2 * n * HEAD  # two heads per rank
    shapes = dict.fromkeys(("x", "target"), (n * TOKENS, width)) | dict.fromkeys(("norm1", "norm2"), (width,))
    shapes |= dict.fromkeys(("wq", "wk", "wv", "wo"), (width, width)) | {"w1": (width, 4 * n), "w2": (4 * n, width)}
    values = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: value / width**0.5 if name.startswith("w") else value for name, value in values.items()}


def attention(x: Tensor, values: Values) -> Tensor:
    """Of the heads whose weights these are: on one rank its own, and then the sum over the ranks is still to come."""
    q, k, v = ((x @ values[name]).unflatten(-1, (-1, HEAD)).transpose(0, 1) for name in ("wq", "wk", "wv"))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(-2) @ values["wo"]


def feed_forward(x: Tensor, values: Values) -> Tensor:
    """Of the hidden units whose weights these are."""
    return gelu(x @ values["w1"]) @ values["w2"]


def normalise(x: Tensor, weight: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], weight)


def program(values: Values, tp: GroupLike = "tp") -> Tensor:
    """One rank: x is its part of the sequence throughout."""
    x = values["x"]
    gathered = fcoll.all_gather(normalise(x, values["norm1"]), tp)
    x = x + fcoll.reduce_scatter(attention(gathered, values), tp)
    gathered = fcoll.all_gather(normalise(x, values["norm2"]), tp)
    x = x + fcoll.reduce_scatter(feed_forward(gathered, values), tp)
    return fcoll.all_reduce((x - values["target"]).square().mean(), tp, "mean")


def dense(values: Values, n: int) -> Tensor:
    x = values["x"]
    x = x + attention(normalise(x, values["norm1"]), values)
    x = x + feed_forward(normalise(x, values["norm2"]), values)
    return (x - values["target"]).square().mean()


def main() -> None:
    n = ranks()
    mapped = fcoll.shard_map(program, fcoll.mesh(tp=n), in_specs=(SPECS,), out_specs=P())
    report("Megatron block", mapped, lambda values: dense(values, n), inputs(n))


if __name__ == "__main__":
    main()
