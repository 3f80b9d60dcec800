"""Sizes that differ between the ranks: values, derivatives of every order, compile, vmap, and bad sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import Pools, close, draw, grad, jvp, vjp, vmap
from torch import Tensor

import fcoll
from fcoll.testing import check_adjoint

GATHERED = {2: [3, 0], 3: [2, 0, 3]}  # rows of each rank
SENT = {2: [[1, 2], [0, 3]], 3: [[1, 2, 0], [0, 0, 0], [3, 1, 2]]}  # rows from each rank to each rank


class Case:
    """A call of rank `rank`, its input, and what it gives on the inputs of all ranks."""

    def __init__(self, call: Callable[[Any, Any, int], Any], inputs: Any, value: Callable[[Sequence[Tensor]], Any]):
        self.call, self.inputs, self.value = call, inputs, value


def received(n: int, rank: int) -> list[int]:
    return [SENT[n][sender][rank] for sender in range(n)]


def blocks(x: Tensor, sizes: Sequence[int], axis: int = 0) -> Sequence[Tensor]:
    return x.split(list(sizes), axis)


def scattered(n: int, op: Callable[[Tensor], Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    return lambda xs: blocks(op(torch.stack(list(xs))), GATHERED[n], 1)


def cases(n: int) -> dict[str, Case]:
    sizes = GATHERED[n]
    rows = [draw((size, 2), rank) for rank, size in enumerate(sizes)]
    columns = [draw((2, size), rank) for rank, size in enumerate(sizes)]
    whole = [draw((2, sum(sizes)), rank) for rank in range(n)]
    sent = [draw((sum(SENT[n][rank]), 2), rank) for rank in range(n)]
    heads = [draw((2, sizes[rank], sum(sizes)), rank) for rank in range(n)]  # a sequence in pieces, all heads
    return {
        "all_gather": Case(
            lambda x, g, r: fcoll.all_gather(x, g, sizes=sizes), rows, lambda xs: [torch.cat(list(xs))] * n
        ),
        "all_gather exchange": Case(
            lambda x, g, r: fcoll.all_gather(x, g, -1, sizes="exchange"),
            columns,
            lambda xs: [torch.cat(list(xs), 1)] * n,
        ),
        "reduce_scatter": Case(
            lambda x, g, r: fcoll.reduce_scatter(x, g, 1, sizes=torch.tensor(sizes)),
            whole,
            scattered(n, lambda stack: stack.sum(0)),
        ),
        "reduce_scatter mean": Case(
            lambda x, g, r: fcoll.reduce_scatter(x, g, -1, "mean", sizes=tuple(sizes)),
            whole,
            scattered(n, lambda stack: stack.mean(0)),
        ),
        "reduce_scatter max": Case(
            lambda x, g, r: fcoll.reduce_scatter(x, g, 1, "max", sizes=sizes),
            whole,
            scattered(n, lambda stack: stack.amax(0)),
        ),
        "all_to_all": Case(
            lambda x, g, r: fcoll.all_to_all(x, g, send_sizes=SENT[n][r], recv_sizes=received(n, r)),
            sent,
            lambda xs: [
                torch.cat([blocks(x, SENT[n][sender])[rank] for sender, x in enumerate(xs)]) for rank in range(n)
            ],
        ),
        "all_to_all exchange": Case(
            lambda x, g, r: fcoll.all_to_all(x.t(), g, 1, 1, send_sizes=SENT[n][r]).t(),
            sent,
            lambda xs: [
                torch.cat([blocks(x, SENT[n][sender])[rank] for sender, x in enumerate(xs)]) for rank in range(n)
            ],
        ),
        "all_to_all between axes": Case(
            lambda x, g, r: fcoll.all_to_all(x, g, -1, 1, send_sizes=sizes),
            heads,
            lambda xs: [torch.cat([blocks(x, sizes, 2)[rank] for x in xs], 1) for rank in range(n)],
        ),
    }


def test_values_and_derivatives(ranks: Pools) -> None:
    """Against the function of all ranks' inputs in one process, and by the adjoint identity, twice."""

    def f(inputs: dict[str, list[Tensor]], cotangents: dict[str, list[Tensor]]) -> dict[str, Any]:
        rank, n = dist.get_rank(), dist.get_world_size()
        out = {}
        for name, case in cases(n).items():
            x, c = inputs[name][rank], cotangents[name][rank]

            def call(x: Tensor, case: Case = case) -> Any:
                return case.call(x, fcoll.WORLD, rank)

            def loss(x: Tensor, c: Tensor = c, call: Any = call) -> Any:
                return (call(x) ** 3 * c).sum()

            leaf = x.clone().requires_grad_()
            loss(leaf).backward()
            out[name] = {
                "value": call(x),
                "backward": leaf.grad,
                "vjp": vjp(call, x)[1](c)[0],
                "jvp": jvp(call, (x,), (torch.cos(x),))[1],
                "grad grad": grad(lambda x, loss=loss: (grad(loss)(x) * torch.cos(x)).sum())(x),
                "vmap": vmap(call, 1, 1)(torch.stack((x, 2 * x), 1)),
                "vmap grad": vmap(grad(loss), -1, -1)(torch.stack((x, 2 * x), -1))[..., 0],
            }
            check_adjoint(call, x, fcoll.WORLD)
            check_adjoint(lambda x, call=call, c=c: vjp(call, x)[1](c * 2)[0] * x**2, x, fcoll.WORLD)
        return out

    for n in (2, 3):
        table = cases(n)
        inputs = {name: case.inputs for name, case in table.items()}
        cotangents = {
            name: [draw(y.shape, 7 + rank) for rank, y in enumerate(case.value(case.inputs))]
            for name, case in table.items()
        }
        got = ranks(n).run(f, inputs, cotangents)
        for name, case in table.items():
            want = reference(case, cotangents[name])
            for rank in range(n):
                for what in want:
                    close(got[rank][name][what], want[what][rank], f"{name}, rank {rank} of {n}: {what}")


def reference(case: Case, cs: list[Tensor]) -> dict[str, list[Any]]:
    def value(*xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(case.value(xs))

    def loss(xs: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([(y**3 * c).sum() for y, c in zip(value(*xs), cs, strict=True)]).sum()

    def penalty(xs: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([(g * torch.cos(x)).sum() for g, x in zip(grad(loss)(xs), xs, strict=True)]).sum()

    xs = tuple(case.inputs)
    ys = value(*xs)
    return {
        "value": list(ys),
        "backward": list(grad(loss)(xs)),
        "vjp": list(vjp(value, *xs)[1](tuple(cs))),
        "jvp": list(jvp(value, xs, tuple(map(torch.cos, xs)))[1]),
        "grad grad": list(grad(penalty)(xs)),
        "vmap": [torch.stack((y, y2), 1) for y, y2 in zip(ys, value(*(2 * x for x in xs)), strict=True)],
        "vmap grad": list(grad(loss)(xs)),
    }


def sizes_from_tensors() -> Any:
    """Let graphs hold numbers that come out of tensors. By name, as torch's configuration cannot be pickled."""
    return importlib.import_module("torch._dynamo.config").patch(capture_scalar_outputs=True)


def test_compiled(ranks: Pools) -> None:
    """Sizes as numbers: values, and the gradient of a gradient."""

    def f(inputs: dict[str, list[Tensor]]) -> dict[str, Any]:
        rank, n = dist.get_rank(), dist.get_world_size()
        out = {}
        for name, case in cases(n).items():
            if "exchange" in name:
                continue

            def penalty(x: Tensor, case: Case = case) -> Any:
                return (grad(lambda x: (case.call(x, fcoll.WORLD, rank) ** 3).sum())(x) * torch.cos(x)).sum()

            def both(x: Tensor, case: Case = case, penalty: Any = penalty) -> Any:
                return case.call(x, fcoll.WORLD, rank), grad(penalty)(x)

            x = inputs[name][rank]
            torch.compiler.reset()
            with sizes_from_tensors():  # reduce_scatter's
                out[name] = torch.compile(both, fullgraph=True, backend="aot_eager")(x), both(x)
        return out

    table = cases(3)
    for got in ranks(3).run(f, {name: case.inputs for name, case in table.items()}):
        assert len(got) == len(table) - 2
        for name, (compiled, eager) in got.items():
            close(compiled, eager, name)
