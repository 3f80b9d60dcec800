"""One step of a transformer on a 2 x 2 mesh: heads and hidden units are cut over tp, the batch over dp.

    python examples/transformer.py                                      # 4 emulated ranks
    python examples/transformer.py --launch                             # 4 local processes
    torchrun --standalone --nproc-per-node 4 examples/transformer.py    # a program of torchrun

Each compares the gradients of all parameters with those of the network on one rank. `--compile` compiles the step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fcoll
from fcoll import P

WORDS, LENGTH, WIDTH, HEAD, HIDDEN, BATCH = 50, 12, 32, 8, 64, 8
TOLERANCE = 1e-5

Params = dict[str, Tensor]

# Not one matrix of 3 * WIDTH columns for queries, keys and values: cut in two, its halves have other heads.
PARAMETERS = {
    "token": ((WORDS, WIDTH), P()),
    "place": ((LENGTH, WIDTH), P()),
    "query": ((WIDTH, WIDTH), P(None, "tp")),
    "key": ((WIDTH, WIDTH), P(None, "tp")),
    "value": ((WIDTH, WIDTH), P(None, "tp")),
    "out": ((WIDTH, WIDTH), P("tp")),
    "up": ((WIDTH, HIDDEN), P(None, "tp")),
    "up_bias": ((HIDDEN,), P("tp")),
    "down": ((HIDDEN, WIDTH), P("tp")),
    "down_bias": ((WIDTH,), P()),
    "head": ((WIDTH, WORDS), P()),
}
SPECS = {name: spec for name, (_, spec) in PARAMETERS.items()}


def attention(x: Tensor, p: Params) -> Tensor:
    """Of the heads whose weights these are: all of them, or those of one rank."""
    q, k, v = ((x @ p[name]).unflatten(-1, (-1, HEAD)).transpose(1, 2) for name in ("query", "key", "value"))
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    weights = (q @ k.mT / HEAD**0.5).masked_fill(later, -torch.inf).softmax(-1)
    y: Tensor = (weights @ v).transpose(1, 2).flatten(-2)
    return y @ p["out"]


def loss(p: Params, tokens: Tensor, targets: Tensor, total: Callable[[Tensor], Tensor] = lambda y: y) -> Tensor:
    """`total` adds up what each rank's heads and hidden units contribute. On one rank there is nothing to add."""
    x = p["token"][tokens] + p["place"]
    x = x + total(attention(x, p))
    x = x + total(F.gelu(x @ p["up"] + p["up_bias"]) @ p["down"]) + p["down_bias"]
    return F.cross_entropy((x @ p["head"]).flatten(0, 1), targets.flatten())


def rank_loss(p: Params, tokens: Tensor, targets: Tensor) -> Tensor:
    """The program of one rank, which has some heads, some hidden units and some rows of the batch."""
    value = loss(p, tokens, targets, total=lambda y: fcoll.all_reduce(y, "tp"))
    return fcoll.all_reduce(value, "dp", "mean")


def gradients(compile: bool, p: Params, tokens: Tensor, targets: Tensor) -> tuple[str, Params]:
    """The kind of mesh that there is here, and the gradients on it."""
    mesh = fcoll.mesh(dp=2, tp=2)  # made here: of processes where there are ranks, virtual elsewhere
    sharded = fcoll.shard_map(rank_loss, mesh, (SPECS, P("dp"), P("dp")), P())
    step = torch.func.grad(sharded)
    return type(mesh).__name__, (fcoll.compile(step) if compile else step)(p, tokens, targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", action="store_true", help="start four processes")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    p = {n: torch.randn(s, generator=generator) / s[0] ** 0.5 for n, (s, _) in PARAMETERS.items()}
    tokens, targets = torch.randint(WORDS, (2, BATCH, LENGTH), generator=generator)
    args = (options.compile, p, tokens, targets)

    results = fcoll.launch(gradients, 4, *args) if options.launch else [gradients(*args)]
    dense = torch.func.grad(loss)(p, tokens, targets)
    first = not dist.is_initialized() or dist.get_rank() == 0
    for mesh, sharded in results:
        difference = {name: float((sharded[name] - dense[name]).abs().max()) for name in dense}
        worst = max(difference, key=difference.__getitem__)
        if difference[worst] > TOLERANCE:
            raise SystemExit(f"{mesh}: the gradient of {worst} differs by {difference[worst]:.1e}")
        if first:
            print(f"{mesh}: the gradients of {len(dense)} parameters match, to {difference[worst]:.1e}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
