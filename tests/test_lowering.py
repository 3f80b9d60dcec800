"""Every way that a message may take gives the same result, whatever the sizes, dtypes and order of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import Pools
from torch import Tensor

import fcoll
from fcoll import lowering
from fcoll.lowering import TABLE, Line, choose

WAYS = {kind: sorted({line.how for line in lines}) for kind, lines in TABLE["gloo"].items()}
CALLS: dict[str, Callable[[Tensor, Any], Any]] = {
    "all_reduce": lambda x, g: [fcoll.all_reduce(x, g), fcoll.all_reduce(x, g, "prod")],
    "extremum": lambda x, g: [fcoll.all_reduce(x, g, "max"), fcoll.all_reduce(x, g, "min")],
    "all_gather": lambda x, g: fcoll.all_gather(x, g, tiled=False),
    "reduce_scatter": lambda x, g: fcoll.reduce_scatter(torch.stack([x + r for r in range(size())]), g, tiled=False),
    "broadcast": lambda x, g: fcoll.broadcast(x, g, size() - 1),
    "reduce": lambda x, g: fcoll.reduce(x, g, size() - 1),
    "gather": lambda x, g: fcoll.gather(x, g, 1, tiled=False),
    "scatter": lambda x, g: fcoll.scatter(torch.stack([x + r for r in range(size())]), g, 1, tiled=False),
    "permute": lambda x, g: [fcoll.shift(x, g), fcoll.permute(x, g, [(0, 1)]), fcoll.permute(x, g, [(1, 1), (0, 0)])],
}


def leaves(tree: Any) -> list[Tensor]:
    return tree if isinstance(tree, list) else [tree]


def size() -> int:
    return dist.get_world_size()


@contextmanager
def by(kind: str, how: str) -> Iterator[list[str]]:
    """Send messages of this kind in this way, on this rank; gives the kinds that were asked for."""
    before, asked = lowering.choose, []

    def chosen(which: str, *arguments: Any) -> str:
        asked.append(which)
        return how if which == kind else before(which, *arguments)

    with mock.patch.object(lowering, "choose", chosen):
        yield asked


def inputs(rank: int) -> list[Tensor]:
    """Of odd sizes, dtypes and layouts, different on every rank."""
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    nan = torch.where(torch.arange(5) == rank, torch.nan, x)
    small = torch.randint(-3, 3, (7,), generator=torch.Generator().manual_seed(rank))
    return [x, x.t(), nan, x[0, 0], x[:0], small, small.to(torch.int8), x.to(torch.bfloat16), x.float()]


def test_each_way(ranks: Pools) -> None:
    assert set(CALLS) == set(TABLE["gloo"])

    def body() -> int:
        rank, n, compared = dist.get_rank(), dist.get_world_size(), 0
        for group in (fcoll.WORLD, fcoll.group(list(reversed(range(n))))):
            for kind, call in CALLS.items():
                for i, x in enumerate(inputs(rank)):
                    with by(kind, "") as asked:
                        want = call(x, group)
                    assert kind in asked or (kind == "extremum" and not x.dtype.is_floating_point)
                    for how in WAYS[kind] if x.numel() else []:
                        with by(kind, how):
                            got = call(x, group)
                        for a, b in zip(leaves(got), leaves(want), strict=True):
                            assert torch.allclose(
                                a, b, equal_nan=True, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-5
                            ), (kind, how, i)
                        compared += 1
        return compared

    for n in (2, 3, 4):
        assert set(ranks(n).run(body)) == {2 * 8 * sum(map(len, WAYS.values()))}


@pytest.mark.parametrize("n", [2, 4])
def test_sums_are_the_same_bits_on_every_rank(ranks: Pools, n: int) -> None:
    def body(count: int) -> list[Tensor]:
        x = torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank())) * 1e3
        return [fcoll.all_reduce(x, fcoll.WORLD, op) for op in ("sum", "mean", "max", "prod")]

    for count in (3, 1000, (1 << 20) + 1):  # gathered; large enough for the backend's own, and for max in two steps
        first, *others = ranks(n).run(body, count)
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert torch.equal(a, b)


def test_choice() -> None:
    """By the size, the number of ranks, the device and the backend that serves it."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=store, rank=0, world_size=4)
    try:
        group = dist.group.WORLD
        assert group is not None
        for kind in TABLE["gloo"]:
            assert choose(kind, torch.ones(1 << 20), 4, group) == ""
    finally:
        dist.destroy_process_group()
    gloo = TABLE["gloo"]
    assert lowering._table("gloo") is lowering._table("cpu:gloo,cuda:nccl") is gloo
    assert lowering._table("cpu:gloo") is gloo
    assert lowering._table("nccl") == lowering._table("cpu:mpi,cuda:nccl") == {}


def test_lines_of_the_table() -> None:
    for kind, lines in TABLE["gloo"].items():
        for line in lines:
            assert isinstance(line, Line)
            assert 0 <= line.least <= line.most, kind
            assert 2 <= line.fewest <= line.ranks, kind
