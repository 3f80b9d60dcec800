"""shard_map: one function of global values on a virtual mesh and on processes, with the gradients of the dense one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.distributed as dist
from common import Pools, draw, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from places import Place, close_to, full, made, said, whole
from table import DECLARED, DIFFERENTIABLE, TABLE, Row
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.func import functional_call, grad_and_value

import fcoll
from fcoll import P

Backend = str | None

each_way = pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])


# ---- values: specs, trees, kinds of leaves


@dataclass
class Pair:
    a: Any
    b: Any


class Couple(NamedTuple):
    a: Any
    b: Any


class Case(NamedTuple):
    f: Callable[..., Any]
    in_specs: Any
    out_specs: Any
    args: tuple[Any, ...]
    want: Any


def ranked(x: Tensor) -> Tensor:
    """x, and something of the rank's own."""
    return x + 100 * fcoll.axis_index(("dp", "tp"))


def values() -> dict[str, Case]:
    """On a mesh of dp=2, tp=2."""
    x = torch.arange(32.0, dtype=torch.float64).view(4, 8)
    rows, columns = x.view(2, 2, 8), x.view(4, 2, 4)
    rank = torch.arange(4.0, dtype=torch.float64)
    by_dp_tp, by_tp_dp = rank, rank.view(2, 2).T.flatten()

    def add(step: Tensor, axis: int, blocks: Tensor = x) -> Tensor:
        """x whose r-th block along the axis has grown by 100 step[r]."""
        size = blocks.shape[axis] // len(step)
        return blocks + 100 * step.repeat_interleave(size).view([-1 if a == axis else 1 for a in range(blocks.ndim)])

    both = x.view(2, 2, 2, 4) + 100 * rank.view(2, 1, 2, 1)

    return {
        "major first": Case(ranked, P(("dp", "tp")), P(("dp", "tp")), (x,), add(by_dp_tp, 0)),
        "in the other order": Case(ranked, P(("tp", "dp")), P(("tp", "dp")), (x,), add(by_tp_dp, 0)),
        "orders that differ": Case(
            lambda x: x * 1, P(("tp", "dp")), P(("dp", "tp")), (x,), x.view(2, 2, 8).transpose(0, 1).reshape(4, 8)
        ),
        "two axes": Case(ranked, P("dp", "tp"), P("dp", "tp"), (x,), both.view(4, 8)),
        "two axes, swapped": Case(
            ranked, P("tp", "dp"), P("tp", "dp"), (x,),
            (x.view(2, 2, 2, 4) + 100 * by_tp_dp.view(2, 1, 2, 1)).view(4, 8),
        ),
        "the last axis only": Case(ranked, P(None, ("tp", "dp")), P(None, ("tp", "dp")), (x,), add(by_tp_dp, 1)),
        "one name, the other replicated": Case(
            lambda x: fcoll.all_reduce(x, "tp"), P("dp"), P("dp"), (x,), 2 * x
        ),
        "a sum over one axis": Case(lambda x: fcoll.all_reduce(x, "dp"), P("dp"), P(), (x,), rows.sum(0)),
        "gathered": Case(lambda x: fcoll.all_gather(x, "tp", 1), P("dp", "tp"), P("dp"), (x,), x),
        "more result than entries": Case(lambda x: x[..., None], P(None, "tp"), P(None, "tp"), (x,), x[..., None]),
        "an axis gained in front": Case(
            lambda x: ranked(x).sum()[None, None], P("dp", "tp"), P("tp", "dp"), (x,), both.sum((1, 3)).T
        ),
        "a result along axes that no input is cut along": Case(
            lambda x: ranked(x)[None], P(), P(("tp", "dp")), (x,), x + 100 * by_tp_dp.view(4, 1, 1)
        ),
        "a prefix for a dict": Case(
            lambda d: {"sum": fcoll.all_reduce(d["a"] + d["b"]["c"], "dp"), "same": d["b"]},
            P("dp"), {"sum": None, "same": P("dp")},
            ({"a": x, "b": {"c": 2 * x}},),
            {"sum": (3 * rows).sum(0), "same": {"c": 2 * x}},
        ),
        "a tree of specs": Case(
            lambda d, pair, none, k: [d["rows"].sum((0, 1))[None], (pair[1] * k, none), pair[0]],
            ({"rows": P("dp"), "none": P("tp")}, [None, P("tp")], P("dp"), None),
            [P("dp"), (P("tp"), None), P()],
            ({"rows": x, "none": None}, [x, 2 * x], None, 3),
            [rows.sum((1, 2)), (6 * x, None), x],
        ),
        "a dataclass and a namedtuple": Case(
            lambda p: Couple(p.b, p.a), (P("dp"),), Couple(P("dp"), P("dp")),
            (Pair(x, {"k": 2 * x}),), Couple({"k": 2 * x}, x),
        ),
        "numbers": Case(
            lambda a, b, c, d: (a + 1, b, c * 2, d + 0), P(), P(), (2, True, 1.5, 1 + 2j),
            (torch.tensor(3), torch.tensor(True), torch.tensor(3.0), torch.tensor(1 + 2j)),
        ),
        "a 0-d tensor": Case(
            lambda x, y: x * y, (P(), P("dp")), P("dp"), (torch.tensor(2), torch.arange(4)), 2 * torch.arange(4)
        ),
        "integers": Case(
            lambda x: fcoll.all_reduce(x, "dp", "max"), P("dp"), P(),
            (torch.tensor([3, 1, 2, 5]),), torch.tensor([3, 5]),
        ),
        "bools": Case(
            lambda x: (fcoll.all_reduce(x, "dp", "any"), ~x), P("dp"), (P(), P("dp")),
            (torch.tensor([True, False, False, False]),),
            (torch.tensor([True, False]), torch.tensor([False, True, True, True])),
        ),
        "complex numbers": Case(
            lambda x: fcoll.all_reduce(x, "dp"), P("dp"), P(),
            (torch.complex(x, -x),), torch.complex(rows, -rows).sum(0),
        ),
        "float32": Case(lambda x: fcoll.all_gather(x, "dp"), P("dp"), P(), (x.float(),), x.float()),
        "no arguments": Case(
            lambda: fcoll.axis_index(("tp", "dp"))[None], (), P(("dp", "tp")), (), torch.tensor([0, 2, 1, 3])
        ),
        "no arguments, replicated": Case(
            lambda: torch.ones(3) * fcoll.axis_size(("dp", "tp")), (), P(), (), torch.full((3,), 4.0)
        ),
        "nothing but None": Case(lambda x: None, P(), P(), (None,), None),
        "empty": Case(lambda x: fcoll.all_reduce(x, "dp"), P("dp"), P(), (torch.ones(0, 3),), torch.ones(0, 3)),
        "a strided input": Case(lambda x: fcoll.all_gather(x, "tp"), P("tp"), P(), (x.T,), x.T),
        "columns": Case(lambda x: fcoll.all_reduce(x, "tp"), P(None, "tp"), P(), (x,), columns.sum(1)),
    }  # fmt: skip


ONCE = (  # one of each kind: compiling is slow
    "in the other order", "orders that differ", "two axes, swapped", "an axis gained in front", "a tree of specs",
    "numbers", "bools", "complex numbers", "no arguments", "nothing but None", "a strided input",
)  # fmt: skip


@each_way
def test_values(place: Place, backend: Backend) -> None:
    def body(mesh: Any, backend: Backend) -> None:
        cases = values()
        maps = {name: fcoll.shard_map(case.f, mesh, case.in_specs, case.out_specs) for name, case in cases.items()}
        if backend:  # of one graph, since a compilation of all costs little more than that of one

            def f(args: dict[str, Any]) -> dict[str, Any]:
                return {name: maps[name](*args[name]) for name in args}

            got = whole(f, backend)({name: cases[name].args for name in ONCE})
        else:
            got = {name: maps[name](*case.args) for name, case in cases.items()}
        for name, y in got.items():
            close_to(y, cases[name].want, name)

    place(body, backend, dp=2, tp=2)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_one_axis_of_every_size(place: Place, n: int) -> None:
    def body(mesh: Any) -> None:
        x = draw((2 * n, 3))
        m = fcoll.shard_map(
            lambda x: {"mean": fcoll.all_reduce(x.mean(0), "i", "mean"), "next": fcoll.shift(x, "i")},
            mesh, P("i"), {"mean": P(), "next": P("i")},
        )  # fmt: skip
        close_to(m(x), {"mean": x.mean(0), "next": x.roll(2, 0)})

    place(body, i=n)


def test_decorator_forms(place: Place) -> None:
    def body(mesh: Any) -> None:
        @fcoll.shard_map(mesh=mesh, in_specs=(P("i"), P()), out_specs=P())
        def first(x: Tensor, w: Tensor) -> Tensor:
            """Of both."""
            return fcoll.all_reduce((x * w).sum(), "i")

        @fcoll.shard_map(in_specs=P("i"), out_specs=P("i"), check=False)
        def later(x: Tensor) -> Tensor:
            """Of one."""
            return x * 2

        assert (first.__name__, first.__doc__) == ("first", "Of both.")
        assert (later.__name__, later.__doc__) == ("later", "Of one.")
        assert first(torch.arange(4), torch.tensor(2)) == 12
        for m in (later.on(mesh), later.on(fcoll.virtual_mesh(i=4)).on(mesh), first.on(mesh)):
            assert callable(m)
        close_to(later.on(mesh)(torch.arange(4)), 2 * torch.arange(4))
        close_to(later.on(fcoll.virtual_mesh(i=4))(torch.arange(4)), 2 * torch.arange(4))
        close_to(later.on(fcoll.virtual_mesh(i=4)).on(mesh)(torch.arange(4)), 2 * torch.arange(4))
        with pytest.raises(fcoll.CollectiveValueError) as raised:
            later(torch.arange(4))
        assert str(raised.value) == "shard_map: later has no mesh yet; call later.on(mesh)(...)"

    place(body, i=2)


# ---- DTensors in and out


def test_a_result_is_plain_where_replicated_and_a_dtensor_elsewhere(ranks: Pools) -> None:
    def body() -> None:
        mesh = made(dp=2, tp=2)
        x = draw((4, 4))
        for spec, placements in (
            (P("dp"), [Shard(0), Replicate()]),
            (P(None, "dp"), [Shard(1), Replicate()]),
            (P("tp", "dp"), [Shard(1), Shard(0)]),
            (P(("dp", "tp")), [Shard(0), Shard(0)]),
            (P(("tp", "dp")), [Shard(0), Shard(0)]),
        ):
            y = fcoll.shard_map(lambda x: x * 2, mesh, spec, spec)(x)
            assert isinstance(y, DTensor)
            assert list(y.placements) == placements, spec
            assert y.device_mesh == mesh
            close_to(y, 2 * x, str(spec))
        for whole_spec in (P(), P(None), P(None, None), None):
            y = fcoll.shard_map(lambda x: x * 2, mesh, P(), whole_spec)(x)
            assert type(y) is Tensor
            close_to(y, 2 * x)

    ranks(4).run(body)


def distributed(x: Tensor, mesh: Any, placements: Any) -> DTensor:
    """A DTensor of that global value; where it is Partial, each rank has another part."""
    sharded = distribute_tensor(x, mesh, [Replicate() if p.is_partial() else p for p in placements])
    share = 1.0
    for name, p in zip(mesh.mesh_dim_names, placements, strict=True):
        share *= (0.25, 0.75)[mesh.get_local_rank(name)] if p.is_partial() else 1.0
    return DTensor.from_local(sharded.to_local() * share, mesh, placements)


def test_dtensors_of_any_placement(ranks: Pools) -> None:
    def body() -> None:
        mesh = made(dp=2, tp=2)
        x, c = draw((4, 8)), draw((4, 8), 1)
        specs = (P(), P("dp"), P("tp", "dp"), P(("dp", "tp")), P(("tp", "dp"), None))
        kinds = (Replicate(), Shard(0), Shard(1), Partial())
        for spec, placements in itertools.product(specs, itertools.product(kinds, kinds)):
            at = f"{spec} of {placements}"
            m = fcoll.shard_map(ranked if spec.names else lambda x: x * 3, mesh, spec, spec)
            if len(spec.names) == 1:
                m = fcoll.shard_map(lambda x: fcoll.all_reduce(ranked(x), "tp"), mesh, spec, spec)
            want = full(m(x))
            close_to(m(distributed(x, mesh, placements)), want, at)
            if any(p.is_partial() for p in placements):
                continue
            d = distribute_tensor(x, mesh, placements).requires_grad_()
            (full(m(d)) * c).sum().backward()
            assert d.grad is not None
            plain = x.clone().requires_grad_()
            (full(m(plain)) * c).sum().backward()
            close_to(d.grad, plain.grad, at)

    ranks(4).run(body)


def test_compiled_with_dtensors(ranks: Pools) -> None:
    def body() -> None:
        torch.compiler.reset()
        mesh = made(dp=2, tp=2)
        args = arguments()
        placements: list[list[Any]] = [
            [Replicate(), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Replicate()], [Replicate(), Replicate()]
        ]  # fmt: skip
        mapped = fcoll.shard_map(default, mesh, SPECS, P())
        leaves = [distribute_tensor(x, mesh, p).requires_grad_() for x, p in zip(args, placements, strict=True)]
        loss = whole(mapped, "aot_eager")(*leaves)
        close_to(loss, dense(*args))
        loss.backward()
        close_to([leaf.grad for leaf in leaves], list(grad(dense, (0, 1, 2, 3))(*args)))
        with pytest.raises(TypeError, match=r"^shard_map: args\[0\] is a DTensor inside a torch.func transform"):
            grad(mapped)(*leaves)

    ranks(4).run(body)


# ---- derivatives from outside


def arguments() -> tuple[Tensor, ...]:
    return draw((4, 8)), draw((8, 4)), draw((6, 4)), draw((6, 4), 1)


SPECS = (P(None, "tp"), P("tp"), P("dp"), P("dp"))


def dense(w1: Tensor, w2: Tensor, x: Tensor, t: Tensor) -> Tensor:
    return (torch.tanh(x @ w1) @ w2 - t).square().mean()


def default(w1: Tensor, w2: Tensor, x: Tensor, t: Tensor) -> Tensor:
    y = fcoll.all_reduce(torch.tanh(x @ w1) @ w2, "tp")
    return fcoll.all_reduce((y - t).square().mean(), "dp", "mean")


def invariant(w1: Tensor, w2: Tensor, x: Tensor, t: Tensor) -> Tensor:
    y = fcoll.all_reduce(torch.tanh(x @ w1) @ w2, "tp", invariant=True)
    return fcoll.all_reduce((y - t).square().mean(), "dp", "mean", invariant=True)


def mixed(w1: Tensor, w2: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """Both conventions in one program, in places where only one of them would be right inside."""
    w1, x = fcoll.vary(w1, "dp"), fcoll.vary(x, "tp")
    y = fcoll.all_reduce(torch.tanh(x @ w1) @ w2, "tp", invariant=True)
    error = (y - t).square().mean()
    one = fcoll.all_reduce(error, "dp", "mean")
    return (one + fcoll.all_reduce(error, ("tp", "dp"), "mean", invariant=True)) / 2


def cut_inside(w1: Tensor, w2: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """Every argument comes in whole."""
    w1, w2 = fcoll.split(w1, "tp", 1), fcoll.split(w2, "tp")
    x, t = fcoll.split((x, t), "dp")
    y = fcoll.all_reduce(torch.tanh(x @ w1) @ w2, "tp")
    y = fcoll.all_gather(y - t, "dp", invariant=True)
    return y.square().mean()


def unchecked(w1: Tensor, w2: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """Replicated in fact, but from values that vary."""
    y = fcoll.reduce_scatter(torch.tanh(x @ w1) @ w2, "tp", 1)
    y = fcoll.all_gather(y, "tp", 1)
    mine = (y - t).square().mean() / 2
    return mine + fcoll.shift(mine, "dp")


PROGRAMS: dict[str, tuple[Callable[..., Tensor], Any, bool]] = {
    "default": (default, SPECS, True),
    "invariant": (invariant, SPECS, True),
    "mixed": (mixed, SPECS, True),
    "cut inside": (cut_inside, P(), True),
    "unchecked": (unchecked, SPECS, False),
}


def quantities(f: Callable[..., Tensor], args: tuple[Tensor, ...], t: tuple[Tensor, ...], *only: str) -> dict[str, Any]:
    """What torch.func can be asked about a scalar function: all of it, or the quantities that are named."""
    w1, w2, x, y = args
    every = (0, 1, 2, 3)
    xs = torch.stack((x, 2 * x, -x))
    dims = (None, None, 0, None)

    def of_gradients(*args: Tensor) -> Tensor:
        return torch.stack([g.sin().sum() for g in grad(f, every)(*args)]).sum()

    ways: dict[str, Callable[[], Any]] = {
        "value": lambda: f(*args),
        "grad": lambda: grad(f, every)(*args),
        "vjp": lambda: vjp(f, *args)[1](torch.tensor(0.5, dtype=torch.float64)),
        "jvp": lambda: jvp(f, args, t),
        "jvp of grad": lambda: jvp(grad(f, every), args, t)[1],
        "grad of jvp": lambda: grad(lambda *args: jvp(f, args, t)[1], every)(*args),
        "grad of grad": lambda: grad(of_gradients, every)(*args),
        "jacrev of grad": lambda: jacrev(grad(f, 1), 0)(*args),
        "hessian": lambda: hessian(f, 2)(*args),
        "jacfwd": lambda: jacfwd(f, 3)(*args),
        "vmap": lambda: vmap(f, dims)(w1, w2, xs, y),
        "vmap of grad": lambda: vmap(grad(f, every), dims)(w1, w2, xs, y),
        "grad of vmap": lambda: grad(lambda xs: (vmap(f, dims)(w1, w2, xs, y) ** 2).sum())(xs),
    }
    return {name: ways[name]() for name in only or ways}


@pytest.mark.parametrize("name", PROGRAMS)
def test_derivatives_are_those_of_the_dense_function(place: Place, name: str) -> None:
    def body(mesh: Any, name: str) -> None:
        f, specs, check = PROGRAMS[name]
        mapped = fcoll.shard_map(f, mesh, specs, P(), check=check)
        args = arguments()
        t = tuple(draw(x.shape, 9) for x in args)
        got, want = quantities(mapped, args, t), quantities(dense, args, t)
        for what in want:
            close_to(got[what], want[what], what)
        leaves = [x.clone().requires_grad_() for x in args]
        mapped(*leaves).backward()
        close_to([leaf.grad for leaf in leaves], list(want["grad"]), "backward")
        first = torch.autograd.grad(mapped(*leaves), leaves, create_graph=True)
        second = torch.autograd.grad(torch.stack([g.sin().sum() for g in first]).sum(), leaves)
        close_to(second, want["grad of grad"], "backward twice")

    place(body, name, dp=2, tp=2)


@pytest.mark.parametrize("what", [("value", "grad of grad"), ("jvp of grad", "vmap of grad")], ids=str)
def test_compiled_derivatives(place: Place, what: tuple[str, ...]) -> None:
    def body(mesh: Any, what: tuple[str, ...]) -> None:
        mapped = fcoll.shard_map(mixed, mesh, SPECS, P())
        args = arguments()
        t = tuple(draw(x.shape, 9) for x in args)
        got = whole(lambda *args: quantities(mapped, args, t, *what))(*args)
        close_to(got, quantities(dense, args, t, *what))

    place(body, what, dp=2, tp=2)


def test_compiled_gradients(place: Place) -> None:
    def body(mesh: Any) -> None:
        args = arguments()
        want = grad(dense, (0, 1, 2, 3))(*args)
        for name in ("cut inside", "unchecked"):
            f, specs, check = PROGRAMS[name]
            mapped = fcoll.shard_map(f, mesh, specs, P(), check=check)
            close_to(whole(grad(mapped, (0, 1, 2, 3)))(*args), want, name)
        leaves = [x.clone().requires_grad_() for x in args]
        whole(fcoll.shard_map(default, mesh, SPECS, P()))(*leaves).backward()
        close_to([leaf.grad for leaf in leaves], list(want), "backward")

    place(body, dp=2, tp=2)


def test_results_of_every_kind_at_once(place: Place) -> None:
    """A cut result, a replicated one, one over each name: the cotangents of all, with weights, reach the inputs."""

    def body(mesh: Any) -> None:
        def f(x: Tensor, w: Tensor) -> dict[str, Tensor]:
            y = torch.sin(x) * w
            return {
                "cut": y * 2,
                "over dp": fcoll.all_reduce(y, "tp"),
                "over tp": fcoll.all_reduce(y, "dp", invariant=True).square(),
                "one": fcoll.all_reduce(y.sum(), ("tp", "dp")),
                "untouched": w,
            }

        specs = {"cut": P("dp", "tp"), "over dp": P("dp"), "over tp": P(None, "tp"), "one": P(), "untouched": P()}

        def plain(x: Tensor, w: Tensor) -> dict[str, Tensor]:
            y = torch.sin(x) * w
            left, right = y.chunk(2, 1)
            top, bottom = y.chunk(2, 0)
            return {
                "cut": y * 2,
                "over dp": left + right,
                "over tp": (top + bottom).square(),
                "one": y.sum(),
                "untouched": w,
            }

        mapped = fcoll.shard_map(f, mesh, (P("dp", "tp"), P()), specs)
        x, w = draw((4, 4)), draw(())
        cotangents = {name: draw(y.shape, 2) for name, y in plain(x, w).items()}
        close_to(mapped(x, w), plain(x, w))
        close_to(vjp(mapped, x, w)[1](cotangents), vjp(plain, x, w)[1](cotangents))
        close_to(jvp(mapped, (x, w), (x.cos(), w.cos())), jvp(plain, (x, w), (x.cos(), w.cos())))
        close_to(jacrev(mapped, (0, 1))(x, w), jacrev(plain, (0, 1))(x, w))
        close_to(jacfwd(jacrev(mapped, 1), (0, 1))(x, w), jacfwd(jacrev(plain, 1), (0, 1))(x, w))

        xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = mapped(xs, ws)
        sum((full(out[name]) * c).sum() for name, c in cotangents.items()).backward()
        close_to((xs.grad, ws.grad), vjp(plain, x, w)[1](cotangents))

    place(body, dp=2, tp=2)


# ---- every collective inside


def rows_on(mesh: Any, f: Callable[[Row, Tensor, Tensor], Tensor], rows: list[Row]) -> Callable[..., Any]:
    """For each row by name, `f(row, x, c)` on each rank; rows whose results are the same are in their ranks' places."""

    def local(xs: dict[str, Tensor], cs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {row.name: f(row, xs[row.name].squeeze(0), cs[row.name].squeeze(0)).unsqueeze(0) for row in rows}

    mapped: Callable[..., Any] = fcoll.shard_map(local, mesh, P("i"), P("i"))
    return mapped


def stacks(rows: list[Row], n: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    xs = {row.name: row.inputs(n) for row in rows}
    return xs, {row.name: draw(row.values(xs[row.name]).shape, 3) for row in rows}


def value(row: Row, x: Tensor, c: Tensor) -> Tensor:
    y: Tensor = row.call(x, "i")
    return y


def pulled(row: Row, x: Tensor, c: Tensor) -> Tensor:
    y: Tensor = vjp(lambda x: row.call(x, "i"), x)[1](c)[0]
    return y


def weighted(ys: dict[str, Tensor]) -> Tensor:
    """Some function of all elements, in which none counts as another does."""
    return torch.stack([(y.flatten() * torch.arange(1, y.numel() + 1).sin()).sum() for y in ys.values()]).sum()


def test_every_collective_from_outside(place: Place) -> None:
    """Declared transposes too: from outside, a map has the derivative of the function of all ranks' values."""

    def body(mesh: Any) -> None:
        xs, cs = stacks(TABLE, mesh.size())
        got = rows_on(mesh, value, TABLE)(xs, cs)
        for row in TABLE:
            close_to(got[row.name], row.values(xs[row.name]), row.name)

        xs, cs = stacks(DIFFERENTIABLE, mesh.size())
        mapped = rows_on(mesh, value, DIFFERENTIABLE)

        def stacked(xs: dict[str, Tensor], cs: dict[str, Tensor]) -> dict[str, Tensor]:
            return {row.name: row.values(xs[row.name]) for row in DIFFERENTIABLE}

        def derivatives(f: Callable[..., Any]) -> dict[str, Any]:
            return {
                "vjp": vjp(lambda xs: f(xs, cs), xs)[1](cs)[0],
                "jvp": jvp(lambda xs: f(xs, cs), (xs,), ({name: x.cos() for name, x in xs.items()},))[1],
                "twice": grad(lambda xs: weighted(vjp(lambda xs: f(xs, cs), xs)[1](cs)[0]).sin())(xs),
            }

        got, want = derivatives(mapped), derivatives(stacked)
        for what in want:
            for row in DIFFERENTIABLE:
                close_to(got[what][row.name], want[what][row.name], f"{row.name}: {what}")

    place(body, i=3)


def test_every_collective_inside(place: Place) -> None:
    """Inside, a gradient is that of the sum over the ranks, or as declared; from outside it is a value like others."""

    def body(mesh: Any) -> None:
        xs, cs = stacks(DIFFERENTIABLE, mesh.size())

        def stacked(xs: dict[str, Tensor], cs: dict[str, Tensor]) -> dict[str, Tensor]:
            return {row.name: row.pull(xs[row.name], cs[row.name]) for row in DIFFERENTIABLE}

        def outer(f: Callable[..., Any]) -> dict[str, Any]:
            by_x, by_c = grad(lambda xs, cs: weighted(f(xs, cs)), (0, 1))(xs, cs)
            return {"value": f(xs, cs), "by input": by_x, "by cotangent": by_c}

        got, want = outer(rows_on(mesh, pulled, DIFFERENTIABLE)), outer(stacked)
        for what in want:
            for row in DIFFERENTIABLE:
                close_to(got[what][row.name], want[what][row.name], f"{row.name}: {what}")

    place(body, i=3)


KINDS = [row for row in DIFFERENTIABLE if row.name in (
    "all_reduce", "all_reduce max", "all_reduce prod invariant", "all_reduce invariant", "all_gather axis -1",
    "all_gather invariant", "reduce_scatter", "all_to_all axes 0 1", "broadcast from last", "reduce", "gather",
    "scatter untiled", "permute chain", "vary", "split", "axis_index",
)]  # fmt: skip


def test_every_collective_compiled(place: Place) -> None:
    """The gradient inside, and that of a whole map from outside, in one graph."""

    def body(mesh: Any) -> None:
        xs, cs = stacks(KINDS, mesh.size())
        inside, outside = rows_on(mesh, pulled, KINDS), rows_on(mesh, value, KINDS)

        def f(xs: dict[str, Tensor], cs: dict[str, Tensor]) -> tuple[Any, ...]:
            return inside(xs, cs), *(vjp(lambda xs: outside(xs, cs), xs)[1](cs))

        def by_hand(row: Row, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            return row.pull(x, c), vjp(row.values, x)[1](c)[0]

        got = whole(f, "aot_eager")(xs, cs)
        for row in KINDS:
            want = by_hand(row, xs[row.name], cs[row.name])
            for i, at in enumerate(("inside", "outside")):
                close_to(got[i][row.name], want[i], f"{row.name}: {at}")

    place(body, i=2)


def test_what_the_declared_rows_are() -> None:
    names = {row.name.split()[0] for row in DECLARED}
    assert names == {"all_reduce", "all_gather", "vary", "split"}
    assert len(DECLARED) == 11


# ---- within other transforms, and other maps


@each_way
def test_within_named_and_plain_vmaps(place: Place, backend: Backend) -> None:
    def body(mesh: Any, backend: Backend) -> None:
        def f(x: Tensor) -> Tensor:
            y = fcoll.all_reduce(x.sin(), "i")
            return fcoll.all_gather(y * fcoll.all_reduce(x.sum(), "j"), "i")

        def by_hand(xs: Tensor) -> Tensor:
            blocks = xs.sin().view(3, 2, 2)
            total = blocks.sum(1)  # j, block
            sums = xs.view(3, 2, 2).sum((0, 2))  # rank
            return (total[:, None] * sums[None, :, None]).reshape(3, 4)

        xs = draw((3, 4))
        mapped = fcoll.vmap(fcoll.shard_map(f, mesh, P("i"), P()), axis_name="j")

        def all_of(f: Callable[[Tensor], Tensor], xs: Tensor) -> tuple[Any, ...]:
            return f(xs), jacrev(f)(xs), grad(lambda xs: f(xs).sin().sum())(xs)

        close_to(whole(lambda xs: all_of(mapped, xs), backend)(xs), all_of(by_hand, xs))

        rows = fcoll.shard_map(lambda x, w: fcoll.all_reduce(x, "i") * w, mesh, (P("i"), P("i")), P("i"))
        w = draw((4,), 4)

        def columns(f: Callable[..., Any], xs: Tensor, w: Tensor) -> Tensor:
            y: Tensor = vmap(f, (1, None), 1)(xs, w)
            return y

        def plain(x: Tensor, w: Tensor) -> Tensor:
            return x.view(2, 2).sum(0).repeat(2) * w

        got = whole(lambda xs, w: (columns(rows, xs, w), jacrev(lambda xs: columns(rows, xs, w))(xs)), backend)(xs.T, w)
        close_to(got, (columns(plain, xs.T, w), jacrev(lambda xs: columns(plain, xs, w))(xs.T)))

    place(body, backend, i=2)


@each_way
def test_a_virtual_map_inside_a_map(place: Place, backend: Backend) -> None:
    """The inner one's global values are the outer one's local values, and both meshes' names are bound."""

    def body(mesh: Any, backend: Backend) -> None:
        def f(x: Tensor) -> Tensor:
            return fcoll.all_reduce(fcoll.all_reduce(x.square().sum(), "k"), "i") * x

        inner = fcoll.shard_map(f, fcoll.virtual_mesh(k=3), P("k"), P("k"))
        mapped = fcoll.shard_map(lambda x: inner(x * 2), mesh, P("i"), P("i"))

        def plain(x: Tensor) -> Tensor:
            return (2 * x).square().sum() * 2 * x

        x = draw((6,))
        got = whole(lambda x: (mapped(x), jacrev(mapped)(x), hessian(lambda x: mapped(x).sum())(x)), backend)(x)
        close_to(got, (plain(x), jacrev(plain)(x), hessian(lambda x: plain(x).sum())(x)))

    place(body, backend, i=2)


def test_the_same_virtual_mesh_inside_itself() -> None:
    """Its names mean the inner map's axes there."""
    mesh = fcoll.virtual_mesh(i=2)
    inner = fcoll.shard_map(lambda x: fcoll.all_reduce(x, "i"), mesh, P("i"), P())
    outer = fcoll.shard_map(lambda x: inner(x) + fcoll.all_reduce(x.sum(), "i"), mesh, P("i"), P("i"))
    close_to(outer(torch.arange(8.0)), torch.tensor([2.0, 4.0, 10.0, 12.0]) + 28)


# ---- compiled training


class Network(torch.nn.Module):
    """Megatron's two layers: on a rank, the parameters are its own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, hidden, dtype=torch.float64)
        self.down = torch.nn.Linear(hidden, 3, bias=False, dtype=torch.float64)
        self.bias = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor, tp: str | None = None, invariant: bool = False) -> Tensor:
        x = fcoll.vary(x, tp) if tp and invariant else x
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return (fcoll.all_reduce(y, tp, invariant=invariant) if tp else y) + self.bias


CUTS = {"up.weight": P("tp"), "up.bias": P("tp"), "down.weight": P(None, "tp"), "bias": P()}
Params = dict[str, Tensor]


def start() -> tuple[Params, Params, Tensor, Tensor]:
    shapes = {"up.weight": (8, 4), "up.bias": (8,), "down.weight": (3, 8), "bias": (3,)}
    params = {name: draw(shape, 7) for name, shape in shapes.items()}
    return params, {name: torch.zeros_like(p) for name, p in params.items()}, draw((6, 4)), draw((6, 3))


def error(net: Network, params: Params, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    output: Tensor = functional_call(net, params, (x,), options)
    return (output - y).square().mean()


def updated(params: Params, momentum: Params, gradient: Params) -> tuple[Params, Params]:
    momentum = {name: 0.9 * m + gradient[name] for name, m in momentum.items()}
    return {name: p - 0.1 * momentum[name] for name, p in params.items()}, momentum


def trained(step: Callable[..., Any], steps: int = 3) -> tuple[Params, Params, list[Tensor]]:
    params, momentum, x, y = start()
    losses = []
    for k in range(steps):
        params, momentum, loss = step(params, momentum, x + k, y)
        losses.append(loss)
    return params, momentum, losses


def dense_training() -> tuple[Params, Params, list[Tensor]]:
    net = Network(8)

    def step(params: Params, momentum: Params, x: Tensor, y: Tensor) -> tuple[Params, Params, Tensor]:
        gradient, loss = grad_and_value(lambda params: error(net, params, x, y))(params)
        return (*updated(params, momentum, gradient), loss)

    return trained(step)


def test_a_compiled_training_step_around_a_map(place: Place) -> None:
    def body(mesh: Any) -> None:
        net = Network(4)

        def local(params: Params, x: Tensor, y: Tensor) -> Tensor:
            return fcoll.all_reduce(error(net, params, x, y, tp="tp"), "dp", "mean")

        loss = fcoll.shard_map(local, mesh, (CUTS, P("dp"), P("dp")), P())
        counter = CompileCounterWithBackend("aot_eager")

        @functools.partial(torch.compile, fullgraph=True, backend=counter)
        def step(params: Params, momentum: Params, x: Tensor, y: Tensor) -> tuple[Params, Params, Tensor]:
            gradient, value = grad_and_value(loss)(params, x, y)
            return (*updated(params, momentum, gradient), value)

        close_to(trained(step), dense_training())
        assert counter.frame_count == 1

    place(body, dp=2, tp=2)


def test_a_compiled_training_step_inside_a_map(place: Place) -> None:
    """On processes, parameters are DTensors from the start, and stay so from step to step."""

    def body(mesh: Any) -> None:
        net = Network(4)

        def local(params: Params, x: Tensor, y: Tensor) -> Tensor:
            mine = error(net, params, x, y, tp="tp", invariant=True)
            return fcoll.all_reduce(mine, "dp", "mean", invariant=True)

        def one(params: Params, momentum: Params, x: Tensor, y: Tensor) -> tuple[Params, Params, Tensor]:
            gradient, loss = grad_and_value(lambda params: local(fcoll.vary(params, "dp"), x, y))(params)
            return (*updated(params, momentum, gradient), loss)

        mapped = fcoll.shard_map(one, mesh, (CUTS, CUTS, P("dp"), P("dp")), (CUTS, CUTS, P()))
        counter = CompileCounterWithBackend("aot_eager")
        step: Any = torch.compile(mapped, fullgraph=True, backend=counter)
        spread = fcoll.shard_map(lambda tree: optree.tree_map(lambda x: x * 1, tree), mesh, (CUTS,), CUTS)

        def placed(params: Params, momentum: Params, x: Tensor, y: Tensor) -> Any:
            if not counter.frame_count:
                params, momentum = spread(params), spread(momentum)
            out = step(params, momentum, x, y)
            assert counter.frame_count == 1
            return out

        close_to(trained(placed), dense_training())

    place(body, dp=2, tp=2)


def test_sizes_that_change_do_not_recompile(place: Place) -> None:
    def body(mesh: Any) -> None:
        mapped = fcoll.shard_map(
            lambda x, w: (fcoll.all_reduce((x * w).sum(0), "i"), x * 2), mesh, (P("i"), P()), (P(), P("i"))
        )
        for f in (mapped, grad(lambda x, w: mapped(x, w)[0].sum(), (0, 1))):
            counter = CompileCounterWithBackend("aot_eager")
            compiled: Any = torch.compile(f, fullgraph=True, backend=counter, dynamic=True)
            for size in (4, 8, 6):
                x, w = draw((size, 3)), draw((size // 2, 1), 2)
                close_to(compiled(x, w), full(f(x, w)), size)
            assert counter.frame_count == 1

    place(body, i=2)


# ---- bad input


class Bad(NamedTuple):
    in_specs: Any
    out_specs: Any
    args: tuple[Any, ...]
    kind: type[Exception]
    text: str
    f: Callable[..., Any] = lambda *args: args[0]


def bad() -> dict[str, Bad]:
    """On a mesh of dp=2, tp=2."""
    x = torch.ones(4, 6)
    prefix = "is no prefix of the tree of the"
    return {
        "an unknown axis": Bad(
            P("pp"), P(), (x,), ValueError,
            "shard_map: spec 0 of in_specs names 'pp', which is no axis of the mesh ('dp', 'tp')",
        ),
        "an unknown axis further in": Bad(
            (P(), {"a": None, "b": P("dp", ("tp", "qq"))}), P(), (x, {"a": x, "b": x}), ValueError,
            "shard_map: spec 2 of in_specs names 'qq', which is no axis of the mesh ('dp', 'tp')",
        ),
        "an unknown axis of a result": Bad(
            P(), [P(), P("pp")], (x,), ValueError,
            "shard_map: spec 1 of out_specs names 'pp', which is no axis of the mesh ('dp', 'tp')",
        ),
        "a spec deeper than its tree": Bad(
            ({"a": P("dp")},), P(), (x,), ValueError, "shard_map: in_specs=({'a': P('dp')},) " + prefix + " arguments",
        ),
        "a spec of other keys": Bad(
            ({"a": P("dp")},), P(), ({"b": x},), ValueError,
            "shard_map: in_specs=({'a': P('dp')},) " + prefix + " arguments",
        ),
        "more specs than arguments": Bad(
            (P(), P()), P(), (x,), ValueError, "shard_map: in_specs=(P(), P()) " + prefix + " arguments"
        ),
        "a list of specs": Bad(
            [P(), P()], P(), (x, x), ValueError, "shard_map: in_specs=[P(), P()] " + prefix + " arguments"
        ),
        "a spec deeper than the result": Bad(
            P(), (P(), P()), (x,), ValueError, "shard_map: out_specs=(P(), P()) " + prefix + " result"
        ),
        "a 0-d tensor": Bad(
            (P(), {"a": [P(), P("dp")]}), P(), (x, {"a": [x, torch.tensor(1.0)]}), ValueError,
            "shard_map: args[1]['a'][1] has shape (), fewer axes than its spec P('dp') has entries",
        ),
        "a number": Bad(
            P("dp"), P(), (3,), ValueError,
            "shard_map: args[0] has shape (), fewer axes than its spec P('dp') has entries",
        ),
        "too few axes": Bad(
            P(None, None, ("tp", "dp")), P(), (x,), ValueError,
            "shard_map: args[0] has shape (4, 6), fewer axes than its spec P(None, None, ('tp', 'dp')) has entries",
        ),
        "a result of too few axes": Bad(
            P(), {"loss": P("dp")}, (x,), ValueError,
            "shard_map: out['loss'] has shape (), fewer axes than its spec P('dp') has entries",
            lambda x: {"loss": x.sum()},
        ),
        "an uneven size": Bad(
            ({"a": P(None, "dp")},), P(), ({"a": torch.ones(2, 3)},), ValueError,
            "shard_map: args[0]['a'] has shape (2, 3): size 3 of axis 1 is not a multiple of 2, "
            "the size of mesh axis 'dp'; pad it",
        ),
        "an uneven size over two axes": Bad(
            P(None, ("tp", "dp")), P(), (x,), ValueError,
            "shard_map: args[0] has shape (4, 6): size 6 of axis 1 is not a multiple of 4, "
            "the size of mesh axes ('tp', 'dp'); pad it",
        ),
        "a leaf that is no tensor": Bad(
            P(), P(), ({"a": (x, "hello")},), TypeError,
            "shard_map: args[0]['a'][1] is a str; leaves are tensors, numbers and None",
        ),
        "a result that is no tensor": Bad(
            P(), P(), (x,), TypeError,
            "shard_map: out['name'] is a str; f returns tensors, numbers and None", lambda x: {"x": x, "name": "hello"},
        ),
        "a string for a spec": Bad("dp", P(), (x,), TypeError, "shard_map: in_specs holds fcoll.P and None, got str"),
        "a string among the specs": Bad(
            P(), (P(), "dp"), (x,), TypeError, "shard_map: out_specs holds fcoll.P and None, got str"
        ),
    }  # fmt: skip


@each_way
@pytest.mark.filterwarnings("ignore:shard_map. what out_specs says is replicated is not checked:UserWarning")
def test_bad_input(place: Place, backend: Backend) -> None:
    def body(mesh: Any, backend: Backend) -> None:
        for name, (in_specs, out_specs, args, kind, text, f) in bad().items():

            def call(*args: Any, f: Any = f, in_specs: Any = in_specs, out_specs: Any = out_specs) -> Any:
                return fcoll.shard_map(f, mesh, in_specs, out_specs)(*args)

            with pytest.raises(kind) as raised:
                whole(call, backend)(*args)
            assert said(raised.value) == text, name
            assert isinstance(raised.value, fcoll.FcollError), name
        if dist.is_initialized():
            dist.barrier()  # nobody waits for anybody

    place(body, backend, dp=2, tp=2)


def test_what_is_no_map(place: Place) -> None:
    def body(mesh: Any) -> None:
        with pytest.raises(TypeError) as raised:
            fcoll.shard_map(mesh, lambda x: x, P(), P())  # type: ignore[call-overload]
        assert str(raised.value) == f"shard_map: f is a function, got {type(mesh).__name__}; a mesh goes second"
        with pytest.raises(TypeError) as raised:
            fcoll.shard_map(lambda x: x, "dp", P(), P())  # type: ignore[call-overload]
        kinds = "fcoll.mesh, fcoll.virtual_mesh or torch's init_device_mesh"
        assert str(raised.value) == f"shard_map: a mesh is what {kinds} make, got str"
        with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
            fcoll.shard_map(lambda x: x, mesh, P(), P())(x=torch.ones(2))

    place(body, i=2)


def test_bad_specs() -> None:
    with pytest.raises(ValueError, match=r"^P: an axis name occurs once, got \('dp', 'tp', 'dp'\)$"):
        P("dp", ("tp", "dp"))
    for entry, text in ((3, "3"), ((1,), "(1,)"), (["dp"], "['dp']")):
        with pytest.raises(TypeError) as raised:
            P(entry)  # type: ignore[arg-type]
        assert str(raised.value) == f"P: an entry is an axis name, a tuple of names or None, got {text}"
    assert P("dp", None) == P(("dp",), ()) != P("dp")
    assert {P("dp"): 1}[P("dp")] == 1
    assert repr(P("dp", None, ("tp", "pp"))) == "P('dp', None, ('tp', 'pp'))"
    assert (len(P("dp", None)), list(P("dp", None)), P("dp", ("a", "b")).names) == (2, [("dp",), ()], ("dp", "a", "b"))


@each_way
def test_dtensors_that_cannot_be(ranks: Pools, backend: Backend) -> None:
    def body(backend: Backend) -> None:
        torch.compiler.reset()
        mesh, other = made(dp=2, tp=2), made(dp=4)
        x = torch.ones(4)
        for here, there, kind, text in (
            (mesh, other, ValueError, "is a DTensor on another mesh; redistribute it, or pass x.full_tensor()"),
            (
                fcoll.virtual_mesh(dp=2), mesh, TypeError,
                "is a DTensor, and the mesh is virtual; pass x.full_tensor()",
            ),
        ):  # fmt: skip
            mapped = whole(fcoll.shard_map(lambda tree: tree["a"] * 2, here, P("dp"), P("dp")), backend)
            with pytest.raises(kind) as raised:
                mapped({"a": distribute_tensor(x, there, [Replicate()] * there.ndim)})
            assert said(raised.value) == f"shard_map: args[0]['a'] {text}"
        again = fcoll.mesh(dp=2, tp=2)  # an equal mesh is the same
        close_to(whole(fcoll.shard_map(lambda x: x * 2, again, P("dp"), P("dp")), backend)(
            distribute_tensor(x, mesh, [Replicate()] * 2)), 2 * x)  # fmt: skip

    ranks(4).run(body, backend)


def test_a_dtensor_inside_a_transform(ranks: Pools) -> None:
    def body() -> None:
        mesh = made(i=2)
        mapped = fcoll.shard_map(lambda x: fcoll.all_reduce(x.sum(), "i"), mesh, P("i"), P())
        d = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        text = (
            "shard_map: args[0] is a DTensor inside a torch.func transform, which torch cannot take apart; pass plain "
            "global tensors there, or differentiate with .backward()"
        )
        for transformed in (grad(mapped), jacrev(mapped), lambda d: vjp(mapped, d)):  # torch itself refuses jvp
            with pytest.raises(TypeError) as raised:
                transformed(d)
            assert str(raised.value) == text
        assert mapped(d) == 6

    ranks(2).run(body)
