"""Sizes that differ between the ranks: values, derivatives of every order, compile, vmap, and bad sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    pieces: Sequence[Tensor] = x.split_with_sizes(list(sizes), axis)
    return pieces


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

            def pulled(x: Tensor, call: Any = call, c: Tensor = c) -> Any:
                return vjp(call, x)[1](c)[0] * x**2

            check_adjoint(pulled, x, fcoll.WORLD)
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


COMPILED = ("all_gather exchange", "reduce_scatter", "all_to_all exchange", "all_to_all between axes")


def test_compiled(ranks: Pools) -> None:
    """Values, and the gradient of a gradient."""

    def f(inputs: dict[str, list[Tensor]]) -> dict[str, Any]:
        rank, n = dist.get_rank(), dist.get_world_size()
        out = {}
        for name in COMPILED:
            case = cases(n)[name]

            def penalty(x: Tensor, case: Case = case) -> Any:
                return (grad(lambda x: (case.call(x, fcoll.WORLD, rank) ** 3).sum())(x) * torch.cos(x)).sum()

            def both(x: Tensor, case: Case = case, penalty: Any = penalty) -> Any:
                return case.call(x, fcoll.WORLD, rank), grad(penalty)(x)

            x = inputs[name][rank]
            torch.compiler.reset()
            with sizes_from_tensors():  # that of a reduce_scatter, and those that are exchanged
                out[name] = torch.compile(both, fullgraph=True, backend="aot_eager")(x), both(x)
        return out

    for got in ranks(2).run(f, {name: case.inputs for name, case in cases(2).items()}):
        for name, (compiled, eager) in got.items():
            close(compiled, eager, name)


def test_dynamic_shapes(ranks: Pools) -> None:
    """Sizes that change from call to call: as numbers, as a tensor, and exchanged."""

    def f() -> dict[str, Any]:
        rank, group = dist.get_rank(), fcoll.WORLD
        calls: dict[str, Callable[..., Any]] = {
            "gather, numbers": lambda x, sizes: fcoll.all_gather(x, group, sizes=sizes),
            "gather, exchanged": lambda x, sizes: fcoll.all_gather(x, group, sizes="exchange"),
            "scatter, numbers": lambda x, sizes: fcoll.reduce_scatter(x, group, 1, sizes=sizes),
            "scatter, a tensor": lambda x, sizes: fcoll.reduce_scatter(x, group, 1, sizes=sizes),
            "send, numbers": lambda x, sizes: fcoll.all_to_all(x, group, 1, 1, send_sizes=sizes, recv_sizes=sizes),
            "send, a tensor": lambda x, sizes: fcoll.all_to_all(x, group, 1, 1, send_sizes=sizes),
        }
        out: dict[str, Any] = {}
        for name, call in calls.items():
            graphs: list[Any] = []

            def backend(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
                graphs.append(graph)
                return graph.forward

            def pulled(x: Tensor, sizes: Any, call: Any = call) -> Any:
                return grad(lambda x: (call(x, sizes) ** 2).sum())(x)

            torch.compiler.reset()
            run: Any = torch.compile(pulled, fullgraph=True, dynamic=True, backend=backend)
            for sizes in ([5, 3], [3, 7], [0, 4], [9, 9]):
                given: Any = torch.tensor(sizes) if "tensor" in name else sizes
                if name == "send, a tensor":
                    given = given + rank
                elif name == "send, numbers":  # as many to each other
                    given = [min(sizes), sizes[1]] if rank else [sizes[0], min(sizes)]
                shape = (sizes[rank], 2) if "gather" in name else (2, int(sum(given)))
                x = draw(shape, rank)
                with sizes_from_tensors():
                    out[f"{name}: {sizes}"] = run(x, given), pulled(x, given)
            out[name] = len(graphs)
        return out

    for got in ranks(2).run(f):
        for name, value in got.items():
            if isinstance(value, int):
                assert value <= 4, name
            else:
                close(value[0], value[1], name)
        assert got["scatter, a tensor"] == 1


def test_a_tree_has_one_size_for_all_leaves(ranks: Pools) -> None:
    def f() -> dict[str, Any]:
        rank, group = dist.get_rank(), fcoll.group([1, 0])  # sizes are in the order of the group
        tree = {"a": torch.full((2 + rank, 1), float(rank)), "b": (torch.full((2 + rank,), rank), None)}
        whole = {"a": torch.arange(5.0), "b": torch.arange(10).view(5, 2)}
        return {
            "gathered": fcoll.all_gather(tree, group, sizes=(3, 2)),
            "exchanged": fcoll.all_gather(tree, group, sizes="exchange"),
            "scattered": fcoll.reduce_scatter(whole, group, sizes=torch.tensor([1, 4])),
            "along -1": fcoll.reduce_scatter([torch.ones(2, 5), torch.arange(5.0)], group, -1, "mean", sizes=[1, 4]),
            "sent": fcoll.all_to_all(whole, group, send_sizes=[3, 2] if rank else [1, 4]),
            "invariant": grad(lambda x: (fcoll.all_gather(x, group, sizes=[3, 2], invariant=True) ** 2).sum())(
                tree["a"]
            ),
            "small leaves together": len(
                fcoll.trace(lambda x: fcoll.reduce_scatter([x, 2 * x], group, 0, "max", sizes=[1, 4]))(whole["a"])
            ),
            "messages": len(fcoll.trace(lambda x: fcoll.all_gather(x, group, sizes="exchange"))(tree["a"])),
            "vmapped": vmap(lambda x: fcoll.all_gather(x, group, sizes=(3, 0)), 1)(torch.ones(3 * rank, 2)),
            "no leaves": fcoll.all_gather([], group, sizes="exchange"),
        }

    for rank, got in enumerate(ranks(2).run(f)):
        close(
            got["gathered"], {"a": torch.tensor([[1.0]] * 3 + [[0.0]] * 2), "b": (torch.tensor([1, 1, 1, 0, 0]), None)}
        )
        close(got["exchanged"], got["gathered"])
        rows = [0] if rank else [1, 2, 3, 4]
        close(got["scattered"], {"a": 2.0 * torch.tensor(rows), "b": 2 * torch.arange(10).view(5, 2)[rows]})
        close(got["along -1"], [torch.ones(2, len(rows)), 1.0 * torch.tensor(rows)])
        rows = [0, 1, 2, 0] if rank else [3, 4, 1, 2, 3, 4]
        close(got["sent"], {"a": 1.0 * torch.tensor(rows), "b": torch.arange(10).view(5, 2)[rows]})
        close(got["invariant"], 2.0 * torch.full((2 + rank, 1), rank))
        assert torch.equal(got["vmapped"], torch.ones(2, 3))  # where one rank's rows are none
        assert got["messages"] == 2
        assert got["small leaves together"] == 1
        assert got["no leaves"] == []


def test_equal_sizes_on_an_emulated_axis() -> None:
    x = draw((2, 4, 3))

    def f(x: Tensor) -> Any:
        return {
            "gathered": fcoll.all_gather(x, "i", sizes=torch.tensor([4, 4])),
            "exchanged": fcoll.all_gather(x, "i", 1, sizes="exchange"),
            "scattered": fcoll.reduce_scatter(x, "i", 0, "mean", sizes=[2, 2]),
            "sent": fcoll.all_to_all(x, "i", 0, 1, send_sizes=[2, 2]),
        }

    def plain(x: Tensor) -> Any:
        return {
            "gathered": fcoll.all_gather(x, "i"),
            "exchanged": fcoll.all_gather(x, "i", 1),
            "scattered": fcoll.reduce_scatter(x, "i", 0, "mean"),
            "sent": fcoll.all_to_all(x, "i", 0, 1),
        }

    run, want = fcoll.vmap(f, axis_name="i"), fcoll.vmap(plain, axis_name="i")
    close(run(x), want(x))
    cotangents = {name: draw(y.shape) for name, y in want(x).items()}
    close(vjp(run, x)[1](cotangents), vjp(want, x)[1](cotangents))


def test_under_checks(ranks: Pools) -> None:
    """Right sizes pass, also in the backward pass; wrong ones are an error on every rank."""

    def f() -> tuple[Tensor, list[str]]:
        rank, group = dist.get_rank(), fcoll.WORLD
        x = torch.ones(2 + rank, 2)
        told = []
        with fcoll.checked(timeout=10):
            x.requires_grad_()
            y = fcoll.all_gather(x, group, sizes=[2, 3])
            y = fcoll.all_to_all(y, group, send_sizes=[1, 4] if rank else [3, 2], recv_sizes=[2, 4] if rank else [3, 1])
            y = fcoll.reduce_scatter(y[:4], group, sizes=[1, 3])
            (y**2).sum().backward()
            bad: list[Callable[[], Any]] = [
                lambda: fcoll.all_gather(x.detach(), group, sizes=[2, 3 + 1 - rank]),
                lambda: fcoll.all_gather(x.detach(), group, sizes=torch.tensor([2, 3 + 1 - rank])),
                lambda: fcoll.reduce_scatter(torch.ones(4), group, sizes=[2 - rank, 2 + rank]),
                lambda: fcoll.all_to_all(
                    x.detach(), group, send_sizes=[1, 1 + rank], recv_sizes=[1 + 2 * rank, 1 + rank]
                ),
            ]
            for call in bad:
                try:
                    call()
                except fcoll.DisagreementError as error:
                    told.append(str(error))
        assert x.grad is not None
        return x.grad, told

    for got, told in ranks(2).run(f):
        assert got.abs().sum() > 0
        assert len(told) == 4


# ---- what sizes cannot be


class Bad(NamedTuple):
    call: Callable[[Tensor], Any]  # of a 3 by 2 tensor, on the axis "i" of two ranks
    kind: type[Exception]
    message: str


BAD = {
    "negative": Bad(
        lambda x: fcoll.reduce_scatter(x, "i", sizes=[4, -1]),
        ValueError,
        "reduce_scatter: sizes are not negative, got (4, -1)",
    ),
    "not equal": Bad(
        lambda x: fcoll.reduce_scatter(x, "i", sizes=[1, 2]),
        ValueError,
        "reduce_scatter: sizes=(1, 2), but all ranks of 'i', which is emulated, have one shape; pad, or use "
        "ragged_all_to_all",
    ),
    "of each rank": Bad(
        lambda x: fcoll.all_to_all(x, "i", send_sizes=fcoll.axis_index("i") + torch.tensor([1, 2])),
        ValueError,
        "all_to_all: send_sizes differ within a vmap; shapes cannot: pad, or use ragged_all_to_all",
    ),
    "sent, without the sum": Bad(
        lambda x: fcoll.all_to_all(x, "i", send_sizes=[1, 1]),
        ValueError,
        "all_to_all: tree has shape (3, 2): send_sizes (1, 1) add up to 2, not to the 3 along split_axis=0",
    ),
    "only received": Bad(
        lambda x: fcoll.all_to_all(x, "i", recv_sizes=[1, 2]), ValueError, "all_to_all: recv_sizes go with send_sizes"
    ),
    "stacked": Bad(
        lambda x: fcoll.all_gather(x, "i", tiled=False, sizes=[3, 3]),
        ValueError,
        "all_gather: sizes are for tiled=True; blocks that are stacked have one size",
    ),
    "a number": Bad(
        lambda x: fcoll.all_gather(x, "i", sizes=3),  # type: ignore[arg-type]
        TypeError,
        "all_gather: sizes are a sequence or a tensor of integers, got int",
    ),
    "floats": Bad(
        lambda x: fcoll.reduce_scatter(x, "i", sizes=torch.ones(2)),
        TypeError,
        "reduce_scatter: sizes are integers, got torch.float32",
    ),
    "a matrix": Bad(
        lambda x: fcoll.reduce_scatter(x, "i", sizes=torch.ones(2, 2, dtype=torch.int64)),
        ValueError,
        "reduce_scatter: sizes are a tensor of one axis, got shape (2, 2)",
    ),
    "a word": Bad(
        lambda x: fcoll.all_gather(x, "i", sizes="ask"),
        ValueError,
        "all_gather: sizes are numbers, or \"exchange\", got 'ask'",
    ),
    "of one leaf": Bad(
        lambda x: fcoll.all_gather([x, x.t()], "i", sizes="exchange"),
        ValueError,
        "all_gather: tree[1] has size 2 along axis=0, and an earlier leaf has 3",
    ),
    "of several leaves": Bad(
        lambda x: fcoll.all_to_all([x, x.t()], "i", 1, 0, send_sizes=[1, 1]),
        ValueError,
        "all_to_all: tree[1] has shape (2, 3): send_sizes (1, 1) add up to 2, not to the 3 along split_axis=1",
    ),
    "along several axes": Bad(
        lambda x: fcoll.all_to_all([x[:2], x[:2, 0]], "i", 0, -1, send_sizes=[1, 1]),
        ValueError,
        "all_to_all: tree[1] would receive other sizes than an earlier leaf; call it for each alone",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_sizes(name: str) -> None:
    call, kind, message = BAD[name]
    with pytest.raises(kind) as raised:
        fcoll.vmap(call, axis_name="i")(torch.ones(2, 3, 2))
    assert str(raised.value) == message
    assert isinstance(raised.value, fcoll.FcollError)
