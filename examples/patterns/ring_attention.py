"""Ring attention with a causal mask: the sequence is cut, and keys and values travel round the ring.

Each rank keeps its queries and sees one block of keys and values at a time. The softmax is computed online: a running
maximum, a running sum and a running output, rescaled whenever the maximum grows.
"""

from __future__ import annotations

import math

import torch
from against_dense import Values, ranks, report
from torch import Tensor

import fcoll
from fcoll import P
from fcoll.groups import GroupLike

HEADS, WIDTH = 2, 4
SPECS = dict.fromkeys(("q", "k", "v", "target"), P(None, "sp", None))  # heads, sequence, width


def inputs(n: int) -> Values:
    generator = torch.Generator().manual_seed(0)
    shape = (HEADS, 3 * n, WIDTH)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in SPECS}


def attention(q: Tensor, k: Tensor, v: Tensor, sp: GroupLike) -> Tensor:
    """This rank's rows of softmax(q kᵀ / √width, causal) v."""
    n, index = fcoll.axis_size(sp), fcoll.axis_index(sp)
    length = q.shape[-2]
    here = torch.arange(length)
    maximum = q.new_full(q.shape[:-1], -math.inf)
    total, output = q.new_zeros(q.shape[:-1]), torch.zeros_like(q)
    for step in range(n):
        source = (index - step) % n  # whose keys and values are here; the first are the rank's own
        masked = source * length + here > (index * length + here)[:, None]
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(masked, -math.inf)
        larger = torch.maximum(maximum, scores.amax(-1)).detach()  # any constant would do: the result cancels it
        weights = torch.exp(scores - larger[..., None])
        shrink = torch.exp(maximum - larger)
        total = total * shrink + weights.sum(-1)
        output = output * shrink[..., None] + weights @ v
        maximum = larger
        if step + 1 < n:
            k, v = fcoll.shift((k, v), sp)
    return output / total[..., None]


def program(values: Values, sp: GroupLike = "sp") -> Tensor:
    """One rank: the error of its rows, then the mean over all."""
    output = attention(values["q"], values["k"], values["v"], sp)
    return fcoll.all_reduce((output - values["target"]).square().mean(), sp, "mean")


def dense(values: Values, n: int) -> Tensor:
    q, k, v = values["q"], values["k"], values["v"]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    masked = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    output = scores.masked_fill(masked, -math.inf).softmax(-1) @ v
    return (output - values["target"]).square().mean()


def main() -> None:
    n = ranks()
    mapped = fcoll.shard_map(program, fcoll.mesh(sp=n), in_specs=(SPECS,), out_specs=P())
    report("ring attention", mapped, lambda values: dense(values, n), inputs(n))


if __name__ == "__main__":
    main()
