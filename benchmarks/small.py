"""all_reduce of a few bytes over gloo: the latency of one message."""

from __future__ import annotations

from benchmarks.contest import Row, Settings, against_fastest, compare, slowest
from benchmarks.messages import measure, size_of
from fcoll.testing import Ranks

BARS = {2: 1 / 2, 4: 1 / 1.2}


def rows(settings: Settings) -> list[Row]:
    """Against dist.all_reduce, and against the fastest way."""
    result = []
    for n in (2,) if settings.quick else (2, 4):
        with Ranks(n, timeout=300) as ranks:
            for size in (64,) if settings.quick else (64, 1024, 4096):
                samples = slowest(ranks.run(measure, "all_reduce", size, settings))
                what = f"all_reduce, {size_of(size)}, gloo, {n} ranks"
                result.append(compare(what, samples, "dist.all_reduce", BARS[n]))
                result.append(against_fastest(what, samples))
    return result
