"""Every way that `fcoll/lowering.py` knows for a message on gloo, beside the one that its table chooses.

A line of the table is right where no other way takes clearly less time. All ways carry the same tensor between the same
ranks; the backend's own operation is among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import fcoll
from benchmarks.contest import OURS, Row, Samples, Settings, compare, contest, slowest
from benchmarks.messages import size_of
from fcoll import lowering
from fcoll.testing import Ranks

OWN = "the backend's own"
WAYS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("", "gather, reduce", "exchange, reduce, gather"),
    "extremum": ("", "gather, reduce", "exchange, reduce, gather"),
    "all_gather": ("", "exchange", "direct"),
    "reduce_scatter": ("", "exchange, reduce"),
    "broadcast": ("", "direct"),
    "reduce": ("", "gather, reduce"),
    "gather": ("", "direct"),
    "scatter": ("", "direct"),
    "permute": ("", "direct"),
}
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)


def rows(settings: Settings) -> list[Row]:
    """One row per kind of message, size, number of ranks and other way."""
    result = []
    for n in (2,) if settings.quick else (2, 4):
        with Ranks(n, timeout=600) as ranks:
            for kind in ("all_gather",) if settings.quick else WAYS:
                for size in SIZES[:1] if settings.quick else SIZES:
                    samples = slowest(ranks.run(_measure, kind, size, settings))
                    what = f"{kind}, {size_of(size)}, gloo, {n} ranks"
                    result += [compare(what, samples, way or OWN) for way in ("", *WAYS[kind][1:])]
    return result


def _measure(kind: str, size: int, settings: Settings) -> Samples:
    """On a rank: as the table says, and in each way."""
    n, group = dist.get_world_size(), fcoll.WORLD
    x = torch.rand(size // 4 * (n if kind in ("reduce_scatter", "scatter") else 1))
    functions: dict[str, Callable[[], Tensor]] = {
        "all_reduce": lambda: fcoll.all_reduce(x, group),
        "extremum": lambda: fcoll.all_reduce(x, group, "max"),
        "all_gather": lambda: fcoll.all_gather(x, group),
        "reduce_scatter": lambda: fcoll.reduce_scatter(x, group),
        "broadcast": lambda: fcoll.broadcast(x, group),
        "reduce": lambda: fcoll.reduce(x, group),
        "gather": lambda: fcoll.gather(x, group),
        "scatter": lambda: fcoll.scatter(x, group),
        "permute": lambda: fcoll.shift(x, group),
    }
    f, chosen = functions[kind], lowering.choose

    def by(way: str) -> Callable[[], Tensor]:
        def choose(asked: str, *arguments: Any) -> str:
            return way if asked == kind else chosen(asked, *arguments)

        def call() -> Tensor:
            with mock.patch.object(lowering, "choose", choose):
                return f()

        return call

    def by_table() -> Tensor:
        with mock.patch.object(lowering, "choose", chosen):  # costs the same in each way
            return f()

    contestants = {OURS: by_table, OWN: by("")} | {way: by(way) for way in WAYS[kind][1:]}
    results = [call() for call in contestants.values()]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
    return contest(contestants, settings)
