"""Compiled forward and backward on a process group, against the same written by hand with torch's functional ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fcoll
from benchmarks import peers
from benchmarks.contest import OURS, Row, Samples, Settings, apart, compare, contest, counted, fake_world
from benchmarks.graphs import communications, graphs_of

N = 2
HAND = "funcol by hand"
NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "permute", "Megatron MLP")


def rows(settings: Settings) -> list[Row]:
    """Times on the backend that communicates nothing, and the number of communication nodes."""
    result = []
    for name in NAMES[:1] if settings.quick else NAMES:
        samples, ours, theirs = apart(_measure, name, settings)
        what = f"{name}, compiled, and .backward()"
        result += [compare(what, samples, HAND, 1.02), counted(what, HAND, ours, theirs, "messages", 1.0)]
    return result


def _measure(name: str, settings: Settings) -> tuple[Samples, int, int]:
    fake_world(N)
    pair = (_mlp(_by_fcoll), _mlp(_by_hand)) if name == "Megatron MLP" else (peers.ours(name, N), _hand(name))
    x = torch.ones(64, 64, requires_grad=True)
    backend = "aot_eager" if settings.quick else "inductor"
    contestants: dict[str, Callable[[], object]] = {}
    messages = []
    for who, f in zip((OURS, HAND), pair, strict=True):
        messages.append(communications(graphs_of(f, x)))
        torch._dynamo.reset()
        contestants[who] = _forward_and_backward(fcoll.compile(f, backend=backend), x)
    for call in contestants.values():
        call()
    return contest(contestants, settings), messages[0], messages[1]


def _forward_and_backward(f: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    cotangent = torch.ones_like(f(x)).contiguous()

    def call() -> None:
        f(x).backward(cotangent)
        x.grad = None

    return call


def _function(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The autograd.Function that one writes for a collective and its transpose."""

    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return forward(x)

        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> Any:
            return backward(cotangent.contiguous())

    apply: Callable[[Tensor], Tensor] = Collective.apply
    return lambda x: apply(x)


def _raw(name: str) -> Callable[[Tensor], Tensor]:
    found = peers.functional(name, N)
    assert found is not None
    return found


def _reduce(x: Tensor) -> Tensor:
    y = _raw("all_reduce")(x)
    return y if dist.get_rank() == 0 else torch.zeros_like(y)


def _hand(name: str) -> Callable[[Tensor], Tensor]:
    group: Any = dist.group.WORLD
    back = [(rank - 1) % N for rank in range(N)]

    def permute_back(x: Tensor) -> Tensor:
        y: Tensor = peers.funcol.wait_tensor(peers.funcol.permute_tensor(x.reshape(-1), back, group))
        return y.view(x.shape)

    pairs = {
        "all_reduce": (_raw("all_reduce"), _raw("all_reduce")),
        "all_gather": (_raw("all_gather"), _raw("reduce_scatter")),
        "reduce_scatter": (_raw("reduce_scatter"), _raw("all_gather")),
        "all_to_all": (_raw("all_to_all"), _raw("all_to_all")),
        "broadcast": (_raw("broadcast"), _reduce),
        "reduce": (_reduce, _raw("broadcast")),
        "permute": (_raw("permute"), permute_back),
    }
    return _function(*pairs[name])


# Megatron's pair: the identity whose transpose is a sum, and the sum whose transpose is the identity.

_Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def _by_fcoll() -> _Pair:
    return lambda x: fcoll.vary(x, fcoll.WORLD), lambda x: fcoll.all_reduce(x, fcoll.WORLD, invariant=True)


def _by_hand() -> _Pair:
    return _function(lambda x: x.view_as(x), _raw("all_reduce")), _function(_raw("all_reduce"), lambda y: y)


def _mlp(pair: Callable[[], _Pair]) -> Callable[[Tensor], Tensor]:
    enter, leave = pair()
    w1, w2 = torch.randn(64, 128) / 8, torch.randn(128, 64) / 11

    def mlp(x: Tensor) -> Tensor:
        return leave(torch.tanh(enter(x) @ w1) @ w2)

    return mlp
