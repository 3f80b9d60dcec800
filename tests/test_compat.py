"""fcoll.compat.torch_nn against torch.distributed.nn.functional where that is right, and against dense maths."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as theirs
from common import Pools, close, draw, grad, jvp, vjp, vmap
from torch import Tensor
from torch.distributed import ReduceOp

import fcoll
from fcoll.compat import torch_nn
from fcoll.testing import Emulated, Processes, Substrate, check_adjoint

N = 3
NAMES = [*torch_nn.__all__, "_all_gather_base"]

Stack = Callable[[Tensor], Any]


class Case(NamedTuple):
    """A call with the functions of a module, and what it gives on a stack of all ranks' (N, 2) inputs."""

    call: Callable[[Any, Tensor, Any], Any]  # module, x, group
    value: Stack
    torchs: bool = True  # whether torch's gradient is right, too


def everywhere(y: Any) -> Any:
    return torch.stack([y] * N)


def at(rank: int, y: Tensor) -> Tensor:
    return torch.stack([y if r == rank else torch.zeros_like(y) for r in range(N)])


def blocks(xs: Tensor) -> Tensor:
    """Row r of every rank's x on rank r."""
    return xs.transpose(0, 1)


CASES = {
    "broadcast": Case(lambda m, x, g: m.broadcast(x, 1, g), lambda xs: everywhere(xs[1])),
    "gather": Case(lambda m, x, g: torch.stack(m.gather(x, 2, g)), lambda xs: at(2, xs)),
    "scatter": Case(lambda m, x, g: m.scatter(list(x), 1, g), lambda xs: xs[1]),
    "reduce": Case(lambda m, x, g: m.reduce(x, 1, ReduceOp.SUM, g), lambda xs: at(1, xs.sum(0))),
    "reduce mean": Case(lambda m, x, g: m.reduce(x, 0, op=ReduceOp.AVG, group=g), lambda xs: at(0, xs.mean(0)), False),
    "reduce_scatter": Case(
        lambda m, x, g: m.reduce_scatter(torch.empty_like(x[0]), list(x), group=g), lambda xs: xs.sum(0)
    ),
    "reduce_scatter max": Case(
        lambda m, x, g: m.reduce_scatter(torch.empty_like(x[0]), list(x), ReduceOp.MAX, g), lambda xs: xs.amax(0), False
    ),
    "reduce_scatter product": Case(
        lambda m, x, g: m.reduce_scatter(torch.empty_like(x[0]), list(x), ReduceOp.PRODUCT, g),
        lambda xs: xs.prod(0),
        False,
    ),
    "all_gather": Case(lambda m, x, g: torch.stack(m.all_gather(x, g)), everywhere),
    "_all_gather_base": Case(
        lambda m, x, g: m._all_gather_base(x.new_empty(N * N, 2), x, g), lambda xs: everywhere(xs.flatten(0, 1)), False
    ),
    "_all_gather_base stacked": Case(lambda m, x, g: m._all_gather_base(x.new_empty(N, N, 2), x, g), everywhere, False),
    "all_to_all": Case(lambda m, x, g: torch.stack(m.all_to_all(list(torch.empty_like(x)), list(x), g)), blocks),
    "all_to_all_single": Case(lambda m, x, g: m.all_to_all_single(torch.empty_like(x), x, group=g), blocks),
    "all_reduce": Case(lambda m, x, g: m.all_reduce(x, group=g), lambda xs: everywhere(xs.sum(0))),
    "all_reduce max": Case(lambda m, x, g: m.all_reduce(x, ReduceOp.MAX, g), lambda xs: everywhere(xs.amax(0)), False),
    "all_reduce min": Case(lambda m, x, g: m.all_reduce(x, ReduceOp.MIN, g), lambda xs: everywhere(xs.amin(0)), False),
    "all_reduce product": Case(
        lambda m, x, g: m.all_reduce(x, ReduceOp.PRODUCT, g), lambda xs: everywhere(xs.prod(0)), False
    ),
    "all_reduce mean": Case(lambda m, x, g: m.all_reduce(x, ReduceOp.AVG, g), lambda xs: everywhere(xs.mean(0)), False),
}


@pytest.fixture(params=["emulated", "gloo"])
def both(request: pytest.FixtureRequest, ranks: Pools) -> Substrate:
    return Emulated(N) if request.param == "emulated" else Processes(ranks(N))


def ours(case: Case) -> Callable[[Any, Any], Any]:
    return lambda group, x: case.call(torch_nn, x, group)


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_torchs(name: str) -> None:
    mine, torchs = (inspect.signature(getattr(module, name)).parameters for module in (torch_nn, theirs))
    assert list(mine) == list(torchs)
    for parameter in mine:
        if parameter != "group":
            assert mine[parameter].default == torchs[parameter].default, parameter
            assert mine[parameter].kind == torchs[parameter].kind, parameter
    assert mine["group"].default is None


def test_nothing_of_torchs_is_missing() -> None:
    public = {name for name, f in vars(theirs).items() if inspect.isfunction(f) and f.__module__ == theirs.__name__}
    assert public - {"_not_supported_under_compile", "_deprecated"} == set(NAMES)
    assert {name.split()[0] for name in CASES} == set(NAMES)


def test_values_and_gradients(both: Substrate) -> None:
    xs = draw((N, N, 2))
    for name, case in CASES.items():
        want, pull = vjp(case.value, xs)
        cs = draw(want.shape[::-1], 2).permute(*reversed(range(want.ndim)))  # strided, which torch's gradients take ill
        assert cs[0].ndim < 2 or not cs[0].is_contiguous()
        close(both.map(ours(case), xs), want, name)
        close(both.vjp(ours(case), xs, cs, how="func"), pull(cs)[0], name)
        close(both.vjp(ours(case), xs, cs, how="backward"), pull(cs)[0], f"{name}, backward")


def all_of_them(group: Any, x: Tensor) -> Any:
    """Gradients, a batch and, eagerly, second order of every function, in one graph."""
    out = {}
    for name, case in CASES.items():

        def loss(x: Tensor, case: Case = case) -> Any:
            return (case.call(torch_nn, x, group) ** 3).sum()

        def batch(x: Tensor, case: Case = case) -> Any:
            return vmap(lambda x: case.call(torch_nn, x, group), in_dims=2, out_dims=0)(torch.stack((x, -x), 2))

        out[name] = {"grad": grad(loss)(x), "batch": batch(x)}
        if "max" not in name and "min" not in name and not torch.compiler.is_compiling():
            out[name]["second"] = grad(lambda x, loss=loss: (grad(loss)(x) ** 2).sum())(x)
    return out


@pytest.mark.parametrize("compile", [None, "aot_eager"])
def test_transforms(both: Substrate, compile: str | None) -> None:
    xs = draw((N, N, 2))
    got = both.map(all_of_them, xs, compile=compile)
    for name, case in CASES.items():

        def loss(xs: Tensor, case: Case = case) -> Any:
            return (case.value(xs) ** 3).sum()

        close(got[name]["grad"], grad(loss)(xs), name)
        close(got[name]["batch"], torch.stack((case.value(xs), case.value(-xs)), 1), name)
        if "second" in got[name]:
            close(got[name]["second"], grad(lambda xs, loss=loss: (grad(loss)(xs) ** 2).sum())(xs), name)


def test_adjoints() -> None:
    """Forward mode too."""
    xs = draw((N, N, 2))
    for case in CASES.values():

        def f(x: Tensor, case: Case = case) -> Any:
            return case.call(torch_nn, x, "i")

        def pushed(x: Tensor, f: Any = f) -> Any:
            return jvp(f, (x,), (x,))[1]

        check_adjoint(f, xs, "i")
        close(fcoll.vmap(pushed, axis_name="i")(xs), jvp(case.value, (xs,), (xs,))[1])


def test_where_torch_is_right_it_is_the_same(ranks: Pools) -> None:
    """With their functions in place of ours: values, returned kinds, what is in the outputs, gradients."""

    def f(xs: Tensor, cs: dict[str, Tensor]) -> list[str]:
        wrong = []
        for name, case in CASES.items():
            if not case.torchs:
                continue
            found = []
            for module in (torch_nn, theirs):
                x = xs[dist.get_rank()].clone().requires_grad_()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    y = case.call(module, x, None)
                    y.backward(cs[name][dist.get_rank()])
                known = dist.get_rank() == 1 or name != "reduce"  # elsewhere torch leaves it open
                found.append((y if known else y * 0, x.grad))
            if not all(torch.allclose(a, b) for a, b in zip(*found, strict=True)):
                wrong.append(name)
        return wrong

    xs = draw((N, N, 2))
    cs = {name: draw(case.value(xs).shape, 2) for name, case in CASES.items()}
    assert ranks(N).run(f, xs, cs) == [[]] * N


def test_kinds_and_outputs(ranks: Pools) -> None:
    def f() -> list[bool]:
        x = torch.arange(6.0).view(3, 2) + dist.get_rank()
        outputs = [torch.empty(2) for _ in range(N)]
        single, base, one = torch.empty(3, 2), torch.empty(9, 2), torch.empty(2)
        received = torch_nn.all_to_all(outputs, list(x.requires_grad_()))
        return [
            isinstance(torch_nn.gather(x), tuple),
            isinstance(torch_nn.all_gather(x), tuple),
            isinstance(received, tuple),
            torch.equal(torch.stack(received), torch.stack(outputs)),
            torch.equal(torch_nn.all_to_all_single(single, x), single),
            torch.equal(torch_nn._all_gather_base(base, x), base),
            torch.equal(torch_nn.reduce_scatter(one, list(x)), one),
            not any(y.requires_grad for y in (*outputs, single, base, one)),
        ]

    assert ranks(N).run(f) == [[True] * 8] * N


SENT = [[1, 2, 0], [0, 3, 1], [2, 0, 2]]  # rows from each rank to each


def test_uneven_exchanges(ranks: Pools) -> None:
    """Lists of different shapes, and split sizes: against dense slices, eager and compiled."""

    def f(compiled: bool) -> Any:
        torch.compiler.reset()
        rank = dist.get_rank()
        send, receive = SENT[rank], [row[rank] for row in SENT]
        x = draw((sum(send), 2), rank)

        def single(x: Tensor) -> Any:
            return torch_nn.all_to_all_single(x.new_empty(sum(receive), 2), x, receive, send)

        def lists(x: Tensor) -> Any:
            rows = [part.t().contiguous() if q == 2 else part for q, part in enumerate(x.split(send))]
            outputs = [x.new_empty((2, size) if rank == 2 else (size, 2)) for size in receive]
            got = torch_nn.all_to_all(outputs, rows)
            return torch.cat([part.t() if rank == 2 else part for part in got])

        out = []
        for g in (single, lists):

            def both(x: Tensor, g: Callable[[Tensor], Any] = g) -> Any:
                y = g(x)
                return y, grad(lambda x: (g(x) ** 2).sum())(x), vmap(g)(torch.stack((x, -x)))

            run = torch.compile(both, fullgraph=True, backend="aot_eager") if compiled else both
            out.append(run(x))
        return out

    xs = [draw((sum(send), 2), rank) for rank, send in enumerate(SENT)]
    parts = [x.split(send) for x, send in zip(xs, SENT, strict=True)]
    for compiled in (False, True):
        for rank, results in enumerate(ranks(N).run(f, compiled)):
            want = torch.cat([parts[sender][rank] for sender in range(N)])
            for y, gradient, batch in results:
                close(y, want)
                close(gradient, 2 * xs[rank])
                close(batch, torch.stack((want, -want)))


def test_subgroups_count_in_the_world(ranks: Pools) -> None:
    """Within torch's group of two ranks of four, and within one that lists them the other way round."""

    def f(compiled: bool) -> Any:
        torch.compiler.reset()
        rank = dist.get_rank()
        made = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        x, low = torch.tensor([1.0, 10.0]) * (rank + 1), rank % 2

        def program(x: Tensor, group: Any) -> Any:
            return {
                "broadcast": torch_nn.broadcast(x, low + 2, group),
                "reduce": torch_nn.reduce(x, low, group=group),
                "gather": torch.stack(torch_nn.gather(x, low + 2, group)),
                "scatter": torch_nn.scatter(list(x), low + 2, group),
                "grad": grad(lambda x: (torch_nn.broadcast(x, low + 2, group) * (rank + 1)).sum())(x),
            }

        out = []
        for group in (made, fcoll.group([low + 2, low])):
            run = torch.compile(program, fullgraph=True, backend="aot_eager") if compiled else program
            out.append(run(x, group))
        return out

    for compiled in (False, True):
        got = ranks(4).run(f, compiled)
        for rank in range(4):
            low = rank % 2
            x = {r: torch.tensor([1.0, 10.0]) * (r + 1) for r in (low, low + 2)}
            first = rank == low
            for order, result in zip([[low, low + 2], [low + 2, low]], got[rank], strict=True):
                close(result["broadcast"], x[low + 2])
                close(result["reduce"], (x[low] + x[low + 2]) * first)
                close(result["gather"], torch.stack([x[r] for r in order]) * (not first))
                close(result["scatter"], x[low + 2][order.index(rank)])
                close(result["grad"], torch.full((2,), (0.0 if first else 2.0 * low + 4)))


def test_bad_calls(ranks: Pools) -> None:
    def message(f: Callable[[], Any]) -> str:
        with pytest.raises(fcoll.FcollError) as caught:
            f()
        return f"{type(caught.value).__name__[10:]}: {caught.value}"

    def f() -> dict[str, str]:
        x, group = torch.ones(4, 2), fcoll.group([1, 0])
        return {
            "src": message(lambda: torch_nn.broadcast(x, 2, group)),
            "kind": message(lambda: torch_nn.broadcast(x, "0", group)),  # type: ignore[arg-type]
            "op": message(lambda: torch_nn.all_reduce(x, ReduceOp.BAND, group)),
            "list": message(lambda: torch_nn.scatter(None, 0, group)),  # type: ignore[arg-type]
            "empty": message(lambda: torch_nn.scatter([], 0, group)),
            "number": message(lambda: torch_nn.all_to_all([x], [x], group)),
            "shapes": message(lambda: torch_nn.scatter([x, x[0]], 0, group)),
            "dtypes": message(lambda: torch_nn.scatter([x, x.long()], 0, group)),
            "output": message(lambda: torch_nn.reduce_scatter(x[0], [x, x], group=group)),
            "dtype": message(lambda: torch_nn.all_to_all_single(x.long(), x, group=group)),
            "base": message(lambda: torch_nn._all_gather_base(x, x, group)),
            "rows": message(lambda: torch_nn.all_to_all_single(x, x[:3], group=group)),
        }

    got = ranks(2).run(f)
    assert got[0] == got[1]
    label = got[0]["src"].split(" of ")[1].split(",")[0]
    assert got[0] == {
        "src": f"ValueError: broadcast: src=2 is not a rank of {label}, which has ranks (1, 0), counted in the world",
        "kind": "TypeError: broadcast: src is an integer, got str",
        "op": "ValueError: all_reduce: op is ReduceOp.SUM, AVG, MAX, MIN or PRODUCT, got RedOpType.BAND",
        "list": "TypeError: scatter: tensors is a list of tensors, got NoneType",
        "empty": "ValueError: scatter: tensors is empty",
        "number": "ValueError: all_to_all: output_tensor_list holds 1 tensors for 2 ranks",
        "shapes": "ValueError: scatter: the tensors of tensors have one shape, got (4, 2) and (2,)",
        "dtypes": "TypeError: scatter: the tensors of tensors have one dtype, got [torch.float32, torch.int64]",
        "output": "ValueError: reduce_scatter: the output has shape (2,), the result (4, 2)",
        "dtype": "TypeError: all_to_all_single: the output is torch.int64, the input torch.float32",
        "base": "ValueError: _all_gather_base: output_tensor has shape (4, 2); it holds 2 tensors of shape (4, 2), "
        "in a row or stacked",
        "rows": "ValueError: all_to_all_single: input has shape (3, 2): axis 0 is not a multiple of the 2 ranks",
    }
