"""Eager calls on an emulated axis of 4 ranks: the least is one identity Function under torch.func.vmap."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fcoll
from benchmarks import peers
from benchmarks.contest import OURS, Row, Samples, Settings, apart, compare, contest

N = 4
CHAIN = 8
PEER = "an identity Function"
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": lambda x: fcoll.all_reduce(x, "i"),
    "all_gather": lambda x: fcoll.all_gather(x, "i"),
    "reduce_scatter": lambda x: fcoll.reduce_scatter(x, "i"),
    "all_to_all": lambda x: fcoll.all_to_all(x, "i"),
    "broadcast": lambda x: fcoll.broadcast(x, "i"),
    "reduce": lambda x: fcoll.reduce(x, "i"),
    "gather": lambda x: fcoll.gather(x, "i"),
    "scatter": lambda x: fcoll.scatter(x, "i"),
    "permute": lambda x: fcoll.permute(x, "i", [(0, 1), (1, 0)]),
    "shift": lambda x: fcoll.shift(x, "i"),
}


def rows(settings: Settings) -> list[Row]:
    """A map with one collective, and what each further one adds."""
    return [compare(what, samples, PEER, 1.3) for what, samples in apart(_measure, settings).items()]


def _measure(settings: Settings) -> dict[str, Samples]:
    torch.set_num_threads(1)
    x = torch.ones(N, 8, 8)

    def named(f: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        mapped = fcoll.vmap(f, axis_name="i")
        return lambda: mapped(x)

    def plain(f: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        mapped = torch.func.vmap(f)
        return lambda: mapped(x)

    def chain(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def repeated(x: Tensor) -> Tensor:
            for _ in range(CHAIN):
                x = f(x)
            return x

        return repeated

    def pair(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]) -> Samples:
        return contest({OURS: named(ours), PEER: plain(theirs)}, settings)

    functions = dict(list(FUNCTIONS.items())[: 1 if settings.quick else None])
    result = {f"{name} under vmap, {N} × 8 × 8": pair(f, peers.identity) for name, f in functions.items()}
    for name in ("all_reduce", "shift"):
        what = f"{CHAIN} × {name} under vmap, {N} × 8 × 8"
        result[what] = pair(chain(FUNCTIONS[name]), chain(peers.identity))
    return result
