"""Ulysses sequence parallelism: the sequence is cut, but attention needs all of it, so there the heads are cut instead.

One all_to_all turns "all heads of some positions" into "some heads of all positions", another turns it back. Any
attention fits in between, as it is.
"""

from __future__ import annotations

import torch
from against_dense import Values, ranks, report
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fcoll
from fcoll import P
from fcoll.groups import GroupLike

WIDTH = 4
SPECS = dict.fromkeys(("q", "k", "v", "target"), P(None, "sp", None))  # heads, sequence, width


def inputs(n: int) -> Values:
    generator = torch.Generator().manual_seed(0)
    shape = (2 * n, 3 * n, WIDTH)  # the number of heads is a multiple of n, too
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in SPECS}


def program(values: Values, sp: GroupLike = "sp") -> Tensor:
    """One rank: the error of its positions, then the mean over all."""
    qkv = values["q"], values["k"], values["v"]
    q, k, v = fcoll.all_to_all(qkv, sp, split_axis=0, concat_axis=1)
    output = scaled_dot_product_attention(q, k, v, is_causal=True)
    output = fcoll.all_to_all(output, sp, split_axis=1, concat_axis=0)
    return fcoll.all_reduce((output - values["target"]).square().mean(), sp, "mean")


def dense(values: Values, n: int) -> Tensor:
    output = scaled_dot_product_attention(values["q"], values["k"], values["v"], is_causal=True)
    return (output - values["target"]).square().mean()


def main() -> None:
    n = ranks()
    mapped = fcoll.shard_map(program, fcoll.mesh(sp=n), in_specs=(SPECS,), out_specs=P())
    report("Ulysses", mapped, lambda values: dense(values, n), inputs(n))


if __name__ == "__main__":
    main()
