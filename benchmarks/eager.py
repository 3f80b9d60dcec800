"""Eager calls on 8 × 8 floats, on the backend that communicates nothing: what is left is the overhead of a call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.contest import OURS, Contestants, Row, Samples, Settings, apart, compare, contest, fake_world, missing

N = 2
BARS = {"torch.distributed.nn": 1.0, "funcol": 0.15}
BARS_BACKWARD = {"torch.distributed.nn": 1.2}


def rows(settings: Settings) -> list[Row]:
    """Forward without a gradient, then forward and backward."""
    names = peers.COLLECTIVES[:2] if settings.quick else peers.COLLECTIVES
    result = []
    for name, samples in apart(_forward, names, settings).items():
        result += _rows(f"{name}, 8 × 8", samples, BARS)
    for name, samples in apart(_backward, names, settings).items():
        result += _rows(f"{name} and .backward(), 8 × 8", samples, BARS_BACKWARD)
    return result


def _rows(what: str, samples: Samples, bars: dict[str, float]) -> list[Row]:
    found = [compare(what, samples, peer, bars.get(peer)) for peer in samples if peer != OURS]
    if "spmd_types" not in samples and what.startswith("all_reduce") and not peers.installed("spmd_types"):
        found.append(missing(what, "spmd_types"))
    return found


def _forward(names: tuple[str, ...], settings: Settings) -> dict[str, Samples]:
    fake_world(N)
    x = torch.ones(8, 8)

    def call(f: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: f(x)

    def contestants(name: str) -> Contestants:
        first, f = next(iter(peers.by_hand(name, N).items()))
        found = {OURS: peers.ours(name, N), first: f}
        others = {
            "torch.distributed.nn": peers.nn_functional(name, N),
            "funcol": peers.functional(name, N),
            "spmd_types": peers.spmd_types(name),
        }
        return {k: call(f) for k, f in (found | {k: f for k, f in others.items() if f}).items()}

    with torch.no_grad():
        return {name: contest(contestants(name), settings) for name in names}


def _backward(names: tuple[str, ...], settings: Settings) -> dict[str, Samples]:
    fake_world(N)
    x = torch.ones(8, 8, requires_grad=True)

    def call(f: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        cotangent = torch.ones_like(f(x))

        def forward_and_backward() -> None:
            f(x).backward(cotangent)
            x.grad = None

        return forward_and_backward

    def contestants(name: str) -> Contestants:
        others = {
            "torch.distributed.nn": peers.nn_functional(name, N),
            "funcol": peers.functional_autograd(name),
            "spmd_types": peers.spmd_types(name),
        }
        return {k: call(f) for k, f in ({OURS: peers.ours(name, N)} | {k: f for k, f in others.items() if f}).items()}

    found = {name: contestants(name) for name in names}
    return {name: contest(each, settings) for name, each in found.items() if len(each) > 1}
