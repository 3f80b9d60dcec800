"""Small leaves of a tree travel together: nothing but the number of messages may tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import Pools, close, draw, grad
from torch import Tensor

import fcoll
from fcoll import buckets

Tree = dict[str, Tensor]


def tree_of(rank: int) -> Tree:
    """Leaves of several shapes and dtypes; every first and last axis divides by 4."""
    tree = {f"f{i}": draw((4, i + 1, 4), 10 * rank + i) for i in range(6)}
    tree["strided"] = draw((4, 3, 4), rank).transpose(0, 2)
    tree["empty"] = torch.zeros(4, 0, 4, dtype=torch.float64)
    tree["half"] = draw((4, 1, 4), rank, torch.float32).half()
    tree["count"] = torch.arange(16).view(4, 1, 4) + rank
    tree["large"] = draw((4, buckets.SMALL // 64, 4), rank)
    return tree


CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda t: fcoll.all_reduce(t, fcoll.WORLD),
    "all_reduce max": lambda t: fcoll.all_reduce(t, fcoll.WORLD, "max"),
    "all_reduce any": lambda t: fcoll.all_reduce(t, fcoll.WORLD, "any"),
    "all_gather": lambda t: fcoll.all_gather(t, fcoll.WORLD, 1),
    "all_gather untiled": lambda t: fcoll.all_gather(t, fcoll.WORLD, -1, tiled=False),
    "reduce_scatter": lambda t: fcoll.reduce_scatter(t, fcoll.WORLD, 2),
    "reduce_scatter untiled": lambda t: fcoll.reduce_scatter(t, fcoll.WORLD, 0, tiled=False),
    "all_to_all": lambda t: fcoll.all_to_all(t, fcoll.WORLD, 0, 1),
    "all_to_all untiled": lambda t: fcoll.all_to_all(t, fcoll.WORLD, 0, 2, tiled=False),
    "broadcast": lambda t: fcoll.broadcast(t, fcoll.WORLD, 3),
    "reduce": lambda t: fcoll.reduce(t, fcoll.WORLD, 1),
    "shift": lambda t: fcoll.shift(t, fcoll.WORLD),
    "vary": lambda t: fcoll.vary(t, fcoll.WORLD),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_leaf_by_leaf(ranks: Pools, name: str) -> None:
    call = CALLS[name]

    def f() -> None:
        tree = tree_of(dist.get_rank())
        before = {key: x.clone() for key, x in tree.items()}
        close(call(tree), {key: call(x) for key, x in tree.items()}, name)
        close(tree, before)

        def loss(tree: Tree) -> Tensor:
            return sum(((y * y).sum() for y in call(tree).values()), torch.zeros((), dtype=torch.float64))

        floats = {key: x for key, x in tree.items() if x.dtype == torch.float64}
        if name == "all_reduce any":
            return
        want = {key: grad(lambda x: (call(x) * call(x)).sum())(x) for key, x in floats.items()}
        close(grad(loss)(floats), want, name)
        needy = {key: x.clone().requires_grad_() for key, x in floats.items()}
        loss(needy).backward()
        close({key: x.grad for key, x in needy.items()}, want, name)

    ranks(4).run(f)


def test_results_are_independent(ranks: Pools) -> None:
    def f() -> None:
        for needs in (False, True):
            a, b = fcoll.all_reduce(
                [torch.ones(2, requires_grad=needs), torch.ones(2, requires_grad=needs)], fcoll.WORLD
            )
            kept = (b**2).sum()
            a += torch.ones(2, requires_grad=True)
            close(b, torch.full((2,), 2.0))
            if needs:
                kept.backward()

    ranks(2).run(f)


def test_ranks_may_differ_in_what_needs_a_gradient(ranks: Pools) -> None:
    def f() -> list[tuple[float, bool]]:
        rank = dist.get_rank()
        needs = {0: (0, 1), 1: (0, 2)}[rank]
        leaves = [torch.tensor(10.0 * k + rank, requires_grad=k in needs) for k in range(4)]
        return [(float(y.detach()), y.requires_grad) for y in fcoll.all_reduce(leaves, fcoll.WORLD)]

    zero, one = ranks(2).run(f)
    assert [value for value, _ in zero] == [value for value, _ in one] == [1.0, 21.0, 41.0, 61.0]
    assert [needs for _, needs in zero] == [True, True, False, False]
    assert [needs for _, needs in one] == [True, False, True, False]


def test_one_message_for_all(ranks: Pools) -> None:
    def f() -> int:
        leaves = [torch.ones(3) for _ in range(50)]
        return len(fcoll.trace(lambda t: fcoll.all_reduce(t, fcoll.WORLD))(leaves))

    assert ranks(2).run(f) == [1, 1]


def test_plan() -> None:
    small, large = torch.zeros(10), torch.zeros(buckets.SMALL // 4)
    assert buckets.plan([small, large, small.double(), small]) == [[0, 3], [1], [2]]
    many = [torch.empty(buckets.SMALL // 4 - 1, device="meta") for _ in range(60)]
    sizes = [sum(many[i].numel() * 4 for i in bucket) for bucket in buckets.plan(many)]
    assert len(sizes) == 3
    assert max(sizes) <= buckets.FULL
