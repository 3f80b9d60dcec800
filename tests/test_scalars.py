"""Python numbers in a tree: one message for all, whatever their kinds, and results to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import Pools, grad
from torch import Tensor

import fcoll

METRICS = [
    {"loss": 0.1 + rank, "count": 2**53 + 1 - rank, "steps": [3, -rank], "rate": 1e30 * rank} for rank in range(3)
]


def expected(op: str) -> dict[str, Any]:
    """What an emulated axis gives: its stack of one number per rank, reduced."""
    reduce = {
        "sum": lambda x: x.sum(0),
        "max": lambda x: x.amax(0),
        "min": lambda x: x.amin(0),
        "prod": lambda x: x.prod(0),
    }

    def of(*values: Any) -> Tensor:
        y: Tensor = reduce[op](torch.tensor(values))
        return y

    loss, count, rate = ([metrics[key] for metrics in METRICS] for key in ("loss", "count", "rate"))
    steps: Any = [metrics["steps"] for metrics in METRICS]
    return {
        "loss": of(*loss),
        "count": of(*count),
        "steps": [of(*(pair[i] for pair in steps)) for i in (0, 1)],
        "rate": of(*rate),
    }


def bitwise(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_numbers_of_several_kinds(ranks: Pools, compile: bool) -> None:
    def f(metrics: Any) -> dict[str, Any]:
        out = {}
        for op in ("sum", "max", "min", "prod"):

            def call(x: Tensor, op: str = op) -> Any:
                return fcoll.all_reduce(metrics, fcoll.WORLD, op), fcoll.all_reduce((1, x, 0.5), fcoll.WORLD, op)

            torch.compiler.reset()
            run: Any = torch.compile(call, fullgraph=True, backend="aot_eager") if compile else call
            out[op] = run(torch.tensor(2.0))
        return out

    for got in ranks(3).run(f, per_rank=[(metrics,) for metrics in METRICS]):
        for op, (metrics, (one, two, half)) in got.items():
            bitwise(metrics, expected(op))
            powers = {"sum": (3, 6.0, 1.5), "prod": (1, 8.0, 0.125)}.get(op, (1, 2.0, 0.5))
            bitwise([one, two, half], [torch.tensor(value) for value in powers])


def test_they_take_one_message(ranks: Pools) -> None:
    def f() -> list[list[tuple[str, str]]]:
        trees: list[Any] = [{"loss": 0.3, "count": 12}, (0.3, 2, True, torch.ones(2), torch.ones(3)), [1, 2], 0.5]
        ops = ["sum", "max", "sum", "sum"]
        found = [
            fcoll.trace(lambda tree=tree, op=op: fcoll.all_reduce(tree, fcoll.WORLD, op))()
            for tree, op in zip(trees, ops, strict=True)
        ]
        return [[(record.collective, record.dtype) for record in records] for records in found]

    for got in ranks(2).run(f):
        assert got == [
            [("all_gather", "int64")],
            [("all_reduce", "float32"), ("all_gather", "int64")],
            [("all_reduce", "int64")],
            [("all_reduce", "float32")],
        ]


def test_tensors_among_numbers_keep_their_derivatives(ranks: Pools) -> None:
    def f(x: Tensor) -> Any:
        def loss(x: Tensor) -> Any:
            y: Any = fcoll.all_reduce({"x": x, "count": 3, "rate": 0.5}, fcoll.WORLD)
            return (y["x"] * y["count"] * y["rate"]).sum()

        return grad(loss)(x)

    for got in ranks(2).run(f, torch.ones(2)):
        assert got.tolist() == [12.0, 12.0]


def test_complex_numbers_go_by_themselves(ranks: Pools) -> None:
    numbers: list[Any] = [1j, 1, 0.5]
    for got in ranks(2).run(lambda: fcoll.all_reduce(numbers, fcoll.WORLD)):
        assert [y.item() for y in got] == [2j, 2, 1.0]
        assert [y.dtype for y in got] == [torch.complex64, torch.int64, torch.float32]
