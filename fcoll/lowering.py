"""Which way a collective takes: one table per backend, for tensors in the memory of the host.

The operation of the backend itself is the default, and all that NCCL and backends unknown here get. Each line stands
for rows that `benchmarks/run.py --only lowerings` prints, with 2 and 4 ranks; it holds for up to 8 if it does not say.
Everything that decides is the same on all ranks of a group: they must agree.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


class Line(NamedTuple):
    """A way for messages of `least` to `most` bytes (what one rank has or gets), among `fewest` to `ranks` ranks."""

    how: str
    most: int = 1 << 62
    least: int = 0
    ranks: int = 8
    fewest: int = 2


KIB, MIB = 1 << 10, 1 << 20

TABLE: dict[str, dict[str, tuple[Line, ...]]] = {
    "gloo": {
        # sends everything to everybody, and reduces here: one step instead of gloo's many
        "all_reduce": (Line("gather, reduce", most=64 * KIB),),
        # of floats: gloo's own loses NaN, or gives it to some ranks only
        "extremum": (
            Line("gather, reduce", most=64 * KIB),
            Line("exchange, reduce, gather", ranks=1 << 62),
        ),
        "all_gather": (
            Line("exchange", most=64 * KIB),
            Line("direct", least=4 * MIB),
        ),
        "reduce_scatter": (Line("exchange, reduce", ranks=1 << 62),),
        "broadcast": (Line("direct", least=64 * KIB, ranks=4),),
        "reduce": (Line("gather, reduce"),),
        "gather": (Line("direct", ranks=1 << 62),),
        "scatter": (Line("direct", ranks=1 << 62),),
        # only where no two ranks send to each other: gloo is slow at that
        "permute": (Line("direct", ranks=1 << 62, fewest=3),),
    },
}


def choose(kind: str, x: Tensor, n: int, group: dist.ProcessGroup, size: int = -1) -> str:
    """How this message travels; "" for the backend's own operation. `size` in bytes, where x is not what is sent."""
    if not x.is_cpu:
        return ""
    lines = _table(dist.get_backend_config(group)).get(kind, ())
    if lines and size < 0:
        size = x.nbytes
    for how, most, least, ranks, fewest in lines:
        if least <= size <= most and fewest <= n <= ranks and size:
            return how
    return ""


@functools.cache
def _table(config: str) -> dict[str, tuple[Line, ...]]:
    """The table for the backend that takes tensors of the host; `config` is as in "cpu:gloo,cuda:nccl"."""
    backends = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return TABLE.get(backends.get("cpu", config), {})
