"""A mixture of experts: each rank has some tokens and some experts, and tokens travel to the expert of their choice.

An expert takes at most CAPACITY tokens from each rank, the first ones; the others pass as zeros. So all messages have a
fixed size, and the two journeys are one all_to_all each.
"""

from __future__ import annotations

import torch
from against_dense import Values, ranks, report
from torch import Tensor

import fcoll
from fcoll import P
from fcoll.groups import GroupLike

TOKENS, WIDTH, HIDDEN, EXPERTS, CAPACITY = 12, 3, 5, 2, 2  # of tokens and experts: per rank
SPECS = {"x": P("ep"), "target": P("ep"), "router": P(), "w1": P("ep"), "w2": P("ep")}


def inputs(n: int) -> Values:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "x": (n * TOKENS, WIDTH), "target": (n * TOKENS, WIDTH), "router": (WIDTH, n * EXPERTS),
        "w1": (n * EXPERTS, WIDTH, HIDDEN), "w2": (n * EXPERTS, HIDDEN, WIDTH),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def output(values: Values, ep: GroupLike) -> Tensor:
    """One rank: route its tokens, serve those that arrive, and put the answers together."""
    x = values["x"]
    gate, chosen = (x @ values["router"]).softmax(-1).max(-1)
    choice = (chosen[:, None] == torch.arange(values["router"].shape[1])).long()  # token, expert
    place = ((choice.cumsum(0) - 1) * choice).sum(-1)  # of the token among those for its expert
    slot = (place[:, None] == torch.arange(CAPACITY)).to(x.dtype)  # all zero for a token too many
    dispatch = choice.to(x.dtype)[:, :, None] * slot[:, None, :]  # token, expert, slot

    outbox = torch.einsum("tes,td->esd", dispatch, x)  # all experts, this rank's tokens
    inbox = fcoll.all_to_all(outbox, ep, split_axis=0, concat_axis=1)  # this rank's experts, all tokens
    served = torch.tanh(inbox @ values["w1"]) @ values["w2"]
    answers = fcoll.all_to_all(served, ep, split_axis=1, concat_axis=0)
    return gate[:, None] * torch.einsum("tes,esd->td", dispatch, answers)


def program(values: Values, ep: GroupLike = "ep") -> Tensor:
    """One rank: the error of its tokens, then the mean over all."""
    return fcoll.all_reduce((output(values, ep) - values["target"]).square().mean(), ep, "mean")


def dense(values: Values, n: int) -> Tensor:
    """Every expert serves every token; then each token keeps the answer of its expert, if it was in time."""
    x = values["x"]
    gate, chosen = (x @ values["router"]).softmax(-1).max(-1)
    answers = torch.tanh(x @ values["w1"]) @ values["w2"]  # expert, token, width
    before = (chosen.view(n, 1, TOKENS) == chosen.view(n, TOKENS, 1)).tril(-1).sum(-1)  # same rank, same choice
    kept = gate * (before.flatten() < CAPACITY)
    output = kept[:, None] * answers[chosen, torch.arange(len(x))]
    return (output - values["target"]).square().mean()


def main() -> None:
    n = ranks()
    mapped = fcoll.shard_map(program, fcoll.mesh(ep=n), in_specs=(SPECS,), out_specs=P())
    report("mixture of experts", mapped, lambda values: dense(values, n), inputs(n))


if __name__ == "__main__":
    main()
