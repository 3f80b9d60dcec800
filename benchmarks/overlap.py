"""`fcoll.start` and `fcoll.wait` around a matrix product, beside the two one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

import fcoll
from benchmarks.contest import OURS, Row, Samples, Settings, compare, contest, slowest
from fcoll.testing import Ranks

BYTES = 4 * 2**20
PEER = "one after the other"


def rows(settings: Settings) -> list[Row]:
    """Forward alone, then forward and backward; the products take about as long as the message."""
    result = []
    with Ranks(2, timeout=300) as ranks:
        for name in ("all_reduce",) if settings.quick else ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            for backward in (False,) if settings.quick else (False, True):
                samples = slowest(ranks.run(_measure, name, backward, settings))
                what = f"{name} of 4 MiB and a product{', forward and backward' if backward else ''}, gloo, 2 ranks"
                result.append(compare(what, samples, PEER, None if backward else 0.75))
    return result


def _measure(name: str, backward: bool, settings: Settings) -> Samples:
    collective = getattr(fcoll, name)
    x = torch.rand(BYTES // 4, requires_grad=backward)
    w = torch.rand(384, 384, requires_grad=backward)
    times = _ratio(lambda: collective(x.detach(), fcoll.WORLD), lambda: w.detach() @ w.detach())

    def product() -> Tensor:
        y = w
        for _ in range(times):
            y = (w @ y) / 192
        return y

    def together() -> None:
        pending = fcoll.start(collective, x, fcoll.WORLD)
        z = product()
        finish(fcoll.wait(pending), z)

    def apart() -> None:
        y = collective(x, fcoll.WORLD)
        finish(y, product())

    def finish(y: Tensor, z: Tensor) -> None:
        if backward:
            (y.sum() + z.sum()).backward()
            x.grad = w.grad = None

    return contest({OURS: together, PEER: apart}, settings)


def _ratio(communicate: Callable[[], object], compute: Callable[[], object]) -> int:
    """How many of the one take as long as one of the other; the same on all ranks."""
    spent = []
    for f in (communicate, compute):
        f()
        start = time.perf_counter()
        for _ in range(10):
            f()
        spent.append(time.perf_counter() - start)
    ratio = fcoll.all_reduce(torch.tensor(spent[0] / spent[1]), fcoll.WORLD, "mean")
    return max(1, round(float(ratio)))
