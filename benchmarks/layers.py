"""Where the time of an eager call goes: the same call entered one layer further down each time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import fcoll
from benchmarks.contest import OURS, Row, Samples, Settings, apart, compare, contest, fake_world
from fcoll import engine, groups
from fcoll.bind import bind
from fcoll.calls import Call

PEER = "the process group's own call on a clone"


def rows(settings: Settings) -> list[Row]:
    """One row per layer, from the top down; what a layer costs is the difference of two rows."""
    return [compare(what, samples, PEER) for what, samples in apart(_measure, settings).items()]


def _measure(settings: Settings) -> dict[str, Samples]:
    fake_world(2)
    group = dist.group.WORLD
    assert group is not None
    x, tree = torch.ones(8, 8), {"x": torch.ones(8, 8)}
    axis = groups.resolve("all_reduce", group)
    process = groups.process_of(axis.layout)

    def own() -> Tensor:
        y = x.clone()
        group.allreduce([y]).wait()
        return y

    layers: dict[str, Callable[[], object]] = {
        "all_reduce of a tree of one leaf": lambda: fcoll.all_reduce(tree, group),
        "all_reduce of a tensor": lambda: fcoll.all_reduce(x, group),
        "below the checks: bind": lambda: bind("all_reduce", x, axis, "sum"),
        "below bind: the engine": lambda: engine.all_reduce(x, "sum", process).wait(),
        "of which finding the group": lambda: groups.resolve("all_reduce", group),
        "of which the group and the checks": lambda: Call("all_reduce", x, group).check_op("sum"),
    }
    with torch.no_grad():
        return {what: contest({OURS: f, PEER: own}, settings) for what, f in layers.items()}
