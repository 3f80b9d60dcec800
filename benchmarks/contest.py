"""How everything is timed: contestants take turns, round by round, and their times are compared within a round.

What slows a machine down for a while then slows all contestants down, and cancels in the ratio.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
Contestants = Mapping[str, Callable[[], object]]
Samples = dict[str, list[float]]
"""Seconds per call, per contestant and round."""

OURS = "fcoll"


@dataclass(frozen=True)
class Settings:
    """How long to measure."""

    rounds: int = 21
    seconds: float = 0.01  # of one contestant in one round
    quick: bool = False  # only to see that everything runs


QUICK = Settings(rounds=2, seconds=0.0, quick=True)


@dataclass(frozen=True)
class Row:
    """One line of the table: fcoll beside a peer, and the ratio of the two, where less is better."""

    what: str
    peer: str
    ours: float | None = None  # seconds, bytes or a count
    theirs: float | None = None
    ratio: float | None = None
    low: float | None = None  # the quartiles of the ratio over the rounds
    high: float | None = None
    bar: float | None = None  # what the ratio should not exceed
    unit: str = "s"
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the bar is met, None where there is none or nothing was measured."""
        return None if self.bar is None or self.ratio is None else self.ratio <= self.bar


def compare(what: str, samples: Samples, peer: str, bar: float | None = None, note: str = "") -> Row:
    """The row of fcoll against one peer of the same contest."""
    ours, theirs = samples[OURS], samples[peer]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Row(what, peer, statistics.median(ours), statistics.median(theirs), middle, low, high, bar, note=note)


def against_fastest(what: str, samples: Samples, bar: float | None = None, note: str = "") -> Row:
    """The row of fcoll against the fastest of its peers."""
    peers = [name for name in samples if name != OURS]
    return compare(what, samples, min(peers, key=lambda name: statistics.median(samples[name])), bar, note)


def counted(what: str, peer: str, ours: float, theirs: float, unit: str, bar: float | None = None) -> Row:
    """The row of two numbers that do not vary."""
    ratio = ours / theirs if theirs else math.inf if ours else 1.0
    return Row(what, peer, ours, theirs, ratio, ratio, ratio, bar, unit)


def missing(what: str, peer: str, note: str = "not installed") -> Row:
    """The row of a peer that cannot be measured here."""
    return Row(what, peer, note=note)


def contest(contestants: Contestants, settings: Settings) -> Samples:
    """Time the contestants in this process; on ranks of a world, all of them call it, each with its own part."""
    ranks = dist.is_initialized() and dist.get_backend() != "fake"
    with _quiet():
        counts = {name: _count(f, settings) for name, f in contestants.items()}
        if ranks:  # all ranks make the same calls
            common = torch.tensor(list(counts.values()))
            dist.broadcast(common, 0)
            counts = dict(zip(counts, common.tolist(), strict=True))
        samples: Samples = {name: [] for name in contestants}
        order = list(contestants)
        for _ in range(settings.rounds):
            for name in order:
                if ranks:
                    dist.barrier()
                samples[name].append(_time(contestants[name], counts[name]))
            order.append(order.pop(0))
    return samples


def slowest(results: list[Samples]) -> Samples:
    """Of the ranks' samples those of the rank that took longest: that is when a collective has ended."""
    return {name: [max(times) for times in zip(*(r[name] for r in results), strict=True)] for name in results[0]}


def _count(f: Callable[[], object], settings: Settings) -> int:
    """How many calls take `settings.seconds`."""
    if settings.quick:
        f()
        return 1
    for _ in range(3):
        f()
    return min(max(1, round(settings.seconds / _time(f, 3))), 10_000)


def _time(f: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        f()
    return (time.perf_counter() - start) / count


@contextmanager
def _quiet() -> Iterator[None]:
    """Without garbage collection: a collection in one contestant's time pays for all."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def apart(f: Callable[..., T], *args: Any) -> T:
    """`f(*args)` in a process of its own, so that no topic changes what another one measures."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(f, *args).result()


def fake_world(n: int) -> None:
    """Make this process rank 0 of n, on torch's backend that communicates nothing: what remains is overhead."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
