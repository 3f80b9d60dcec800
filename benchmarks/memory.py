"""The peak memory of one call on a tree, gloo with 2 ranks, from torch's own record of allocations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile

import fcoll
from benchmarks.contest import Row, Settings, counted
from fcoll.testing import Ranks

BUCKET = 25 * 2**20
CASES = {"64 leaves of 1 MiB": (64, 2**18), "4 leaves of 32 MiB": (4, 2**23)}


def rows(settings: Settings) -> list[Row]:
    """What a call holds beyond its input, against its output and one bucket."""
    cases = {"8 leaves of 4 KiB": (8, 1024)} if settings.quick else CASES
    result = []
    with Ranks(2, timeout=300) as ranks:
        for case, (count, size) in cases.items():
            for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
                peak, output = max(ranks.run(_measure, name, count, size))
                what = f"{name} of {case}: peak beyond the input"
                result.append(counted(what, "output + one bucket", peak, output + BUCKET, "bytes", 1.0))
    return result


def _measure(name: str, count: int, size: int) -> tuple[int, int]:
    """The peak, and the size of the result, in bytes."""
    functions: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda tree: fcoll.all_reduce(tree, fcoll.WORLD),
        "all_gather": lambda tree: fcoll.all_gather(tree, fcoll.WORLD),
        "reduce_scatter": lambda tree: fcoll.reduce_scatter(tree, fcoll.WORLD),
        "broadcast": lambda tree: fcoll.broadcast(tree, fcoll.WORLD),
    }
    tree = [torch.ones(size) for _ in range(count)]
    f = functions[name]
    f(tree)
    with profile(profile_memory=True) as record:
        result: list[Tensor] = f(tree)
    held = peak = 0
    profiler: Any = record.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, sum(leaf.nbytes for leaf in result)
