"""Messages of 4 MiB over gloo: every collective against the fastest way to have it from torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import peers
from benchmarks.contest import OURS, Row, Samples, Settings, against_fastest, compare, contest, slowest
from fcoll.testing import Ranks

BYTES = 4 * 2**20
REDUCTIONS = ("all_reduce mean", "all_reduce max", "all_reduce prod", "all_reduce any")
NATIVE = {  # torch's own call, and how much of its time fcoll may take with 4 ranks
    "reduce_scatter": ("dist.reduce_scatter_single", 1 / 1.6),
    "all_gather": ("dist.all_gather_single", 1 / 1.3),
}


def rows(settings: Settings) -> list[Row]:
    """One row per collective and number of ranks; the payload is what each rank has, or gets if that is less."""
    names = ("all_reduce", "all_gather") if settings.quick else (*peers.COLLECTIVES, *REDUCTIONS)
    size = 4096 if settings.quick else BYTES
    result = []
    for n in (2,) if settings.quick else (2, 4):
        with Ranks(n, timeout=300) as ranks:
            for name in names:
                samples = slowest(ranks.run(measure, name, size, settings))
                what = f"{name}, {size_of(size)}, gloo, {n} ranks"
                result.append(against_fastest(what, samples, 1.05))
                if n == 4 and name in NATIVE:
                    result.append(compare(what, samples, *NATIVE[name]))
    return result


def size_of(size: int) -> str:
    """A number of bytes for people."""
    for unit, step in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= step:
            return f"{size / step:g} {unit}"
    return f"{size} B"


def measure(name: str, size: int, settings: Settings) -> Samples:
    """On a rank: all ways to have this collective. They must agree."""
    n = dist.get_world_size()
    whole = name in ("reduce_scatter", "scatter")  # each rank gets `size` bytes, so it has n times that
    x = torch.rand(size // 4 * (n if whole else 1)) + 0.5
    if name == "all_reduce any":
        x = torch.rand(size) > 0.9
    candidates = dict(peers.by_hand(name, n))
    if library := peers.functional(name, n):
        candidates["funcol"] = library
    if library := peers.nn_functional(name, n):
        candidates["torch.distributed.nn"] = library
    if name in ("gather", "scatter", "reduce"):  # they give other things on the other ranks
        candidates.pop("torch.distributed.nn", None)
    if x.numel() % n:  # a single element has no blocks
        candidates.pop("all_to_all, sum, all_gather", None)
    functions = {OURS: peers.ours(name, n), **candidates}

    def call(f: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        return lambda: f(x)

    with torch.no_grad():
        calls = {who: call(f) for who, f in functions.items()}
        results = [f() for f in calls.values()]
        for result in results[1:]:
            torch.testing.assert_close(result, results[0])
        return contest(calls, settings)
