"""prefix_sum, argmax and argmin, beyond their rows of the table."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from common import Pools, grad
from torch import Tensor

import fcoll


def test_a_nan_wins_and_the_first_of_equals(ranks: Pools) -> None:
    nan = float("nan")
    x = torch.tensor([[1.0, 2.0, nan, 0.0], [3.0, 2.0, 1.0, nan], [3.0, 2.0, nan, nan]])
    largest, smallest = [1, 0, 0, 1], [0, 0, 0, 1]

    def f(x: Tensor, group: Any) -> Any:
        return fcoll.argmax(x, group), fcoll.argmin({"x": x, "less": x[:1] < 2, "n": 3}, group)

    emulated = fcoll.vmap(lambda x: f(x, "i"), axis_name="i", out_dims=None)(x)
    for high, low in [emulated, *ranks(3).run(lambda x: f(x, fcoll.WORLD), per_rank=[(row,) for row in x])]:
        assert high.tolist() == largest
        assert low["x"].tolist() == smallest
        assert low["less"].tolist() == [1]
        assert low["n"].item() == 0
        assert {y.dtype for y in (high, *low.values())} == {torch.int64}


def test_an_index_is_within_the_group_and_has_no_derivative(ranks: Pools) -> None:
    def f() -> Any:
        x = torch.tensor(float(dist.get_rank()))
        turned = fcoll.group([2, 0, 1])
        index = fcoll.argmax(x.requires_grad_(), turned)
        loss = grad(lambda x: x * fcoll.argmin(x, turned))
        return int(index), index.requires_grad, float(loss(x.detach()))

    assert ranks(3).run(f) == [(0, False, 1.0)] * 3


def test_sums_keep_the_dtype_and_round_halves_once(ranks: Pools) -> None:
    """256 + 1 + 1 is 258, in bfloat16 as well; small integers wrap."""
    values = [256.0, 1.0, 1.0]

    def f(x: Any, group: Any) -> Any:
        return fcoll.prefix_sum({"half": x.bfloat16(), "byte": x.to(torch.uint8) - 1, "z": x * 1j}, group)

    for rank, got in enumerate(
        ranks(3).run(lambda x: f(x, fcoll.WORLD), per_rank=[(torch.tensor(v),) for v in values])
    ):
        emulated = {k: y[rank] for k, y in fcoll.vmap(lambda x: f(x, "i"), axis_name="i")(torch.tensor(values)).items()}
        for y in (got, emulated):
            assert y["half"].dtype == torch.bfloat16
            assert y["half"].item() == [256.0, 256.0, 258.0][rank]
            assert y["byte"].item() == 255
            assert y["byte"].dtype == torch.uint8
            assert y["z"].item() == 1j * sum(values[: rank + 1])


def test_subgroups_of_several_sizes() -> None:
    uneven = fcoll.subgroups("i", [[2, 0, 3], [1]])
    x = torch.tensor([1, 10, 100, 1000])
    sums = fcoll.vmap(lambda x: fcoll.prefix_sum(x, uneven), axis_name="i")(x)
    assert sums.tolist() == [101, 10, 100, 1101]
    with pytest.raises(ValueError, match="argmax: the subgroups of 'i' have different sizes"):
        fcoll.vmap(lambda x: fcoll.argmax(x, uneven), axis_name="i")(x)


def test_what_they_cost() -> None:
    def f(x: Tensor) -> Any:
        return fcoll.prefix_sum(x, "i"), fcoll.argmax(x, "i")

    found = fcoll.trace(f, fcoll.virtual_mesh(i=8))(torch.ones(2))
    assert [(record.collective, record.ring, record.direct) for record in found] == [
        ("prefix_sum", 8, 24),
        ("all_gather", 56, 56),
    ]


def test_bad_calls() -> None:
    x, one = torch.ones(2), cast(Any, 1)
    with pytest.raises(TypeError, match="prefix_sum: reverse is True or False, got int"):
        fcoll.prefix_sum(x, (), reverse=one)
    with pytest.raises(TypeError, match="prefix_sum: tree is bool, which has no sum"):
        fcoll.prefix_sum(x > 0, ())
    with pytest.raises(TypeError, match=r"argmax: tree is torch\.complex64, which has no order"):
        fcoll.argmax(x * 1j, ())
