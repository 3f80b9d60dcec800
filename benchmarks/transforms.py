"""torch.func.grad around one collective: the least is the same around one identity Function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.contest import OURS, Row, Samples, Settings, apart, compare, contest, fake_world

PEER = "an identity Function"


def rows(settings: Settings) -> list[Row]:
    """One row per collective, and the gradient of the gradient."""
    names = peers.COLLECTIVES[:1] if settings.quick else peers.COLLECTIVES
    found = apart(_measure, names, settings)
    return [
        compare(what, samples, PEER, 1.1 if what.startswith("grad of") else None) for what, samples in found.items()
    ]


def _measure(names: tuple[str, ...], settings: Settings) -> dict[str, Samples]:
    fake_world(2)
    x = torch.ones(8, 8)

    def grad(f: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        transformed = torch.func.grad(lambda x: f(x).sum())
        return lambda: transformed(x)

    def grad_of_grad(f: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        inner = torch.func.grad(lambda x: (f(x) ** 2).sum())
        transformed = torch.func.grad(lambda x: inner(x).sum())
        return lambda: transformed(x)

    found = {
        f"grad of {name}, 8 × 8": contest({OURS: grad(peers.ours(name, 2)), PEER: grad(peers.identity)}, settings)
        for name in names
    }
    both = {OURS: grad_of_grad(peers.ours("all_reduce", 2)), PEER: grad_of_grad(peers.identity)}
    return found | {"second grad of all_reduce, 8 × 8": contest(both, settings)}
