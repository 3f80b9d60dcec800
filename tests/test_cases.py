"""Faults that users of other libraries reported, as small cases with their numbers: each of them on every substrate."""

from __future__ import annotations

import gc
import pickle
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import Pools, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch import Tensor

import fcoll
from fcoll.testing import Emulated, Processes, Substrate

PLACES = [(kind, compile) for kind in ("emulated", "gloo") for compile in (None, "aot_eager")]


class Place:
    """Emulated ranks or processes, eager or compiled."""

    def __init__(self, kind: str, compile: str | None, ranks: Pools) -> None:
        self.kind, self.compile, self.ranks = kind, compile, ranks

    def on(self, n: int) -> Substrate:
        return Emulated(n) if self.kind == "emulated" else Processes(self.ranks(n))

    def map(self, f: Callable[..., Any], *stacks: Any) -> Any:
        """f(group, *locals) of ranks that the first stack counts."""
        return self.on(len(stacks[0])).map(f, *stacks, compile=self.compile)

    def backward(self, f: Callable[..., Any], stack: Any, cotangents: Any) -> Any:
        return self.on(len(stack)).vjp(f, stack, cotangents, how="backward", compile=self.compile)


@pytest.fixture(params=PLACES, ids=lambda p: f"{p[0]}-{'compiled' if p[1] else 'eager'}")
def place(request: pytest.FixtureRequest, ranks: Pools) -> Place:
    kind, compile = request.param
    return Place(kind, compile, ranks)


def close(got: Any, want: Any) -> None:
    want = want if isinstance(want, Tensor) else torch.tensor(want)
    torch.testing.assert_close(got, want.to(got.dtype))


def index(group: Any) -> Tensor:
    return fcoll.axis_index(group)


def test_case_01_the_gradient_does_not_vanish(place: Place) -> None:
    def f(group: Any, x: Tensor) -> Any:
        y = fcoll.all_reduce(x, group)
        return y**2 / 2

    x = torch.tensor([1.0, 2.0])
    close(place.backward(f, x, torch.ones(2)), [6.0, 6.0])
    close(place.map(lambda group, x: grad(lambda x: f(group, x))(x), x), [6.0, 6.0])


def test_case_01_the_result_requires_grad(ranks: Pools) -> None:
    def f() -> bool:
        y: Tensor = fcoll.all_reduce(torch.ones((), requires_grad=True), fcoll.WORLD)
        return y.requires_grad

    assert ranks(2).run(f) == [True, True]
    x = torch.ones(2, requires_grad=True)
    assert fcoll.vmap(lambda x: fcoll.all_reduce(x, "i"), axis_name="i")(x).requires_grad


def test_case_02_transforms_go_through_a_collective(place: Place) -> None:
    def f(group: Any, x: Tensor, t: Tensor, batch: Tensor) -> Any:
        def total(x: Tensor) -> Any:
            return fcoll.all_reduce(x, group)

        three = torch.ones(3) * x
        return {
            "grad": grad(lambda x: total(x) ** 2)(x),
            "jvp of ones": jvp(total, (x,), (torch.ones_like(x),)),
            "jvp of t": jvp(total, (x,), (t,))[1],
            "jacrev": jacrev(total)(three),
            "jacfwd": jacfwd(total)(three),
            "vmap": vmap(total)(batch),
        }

    x, t = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
    got = place.map(f, x, t, torch.tensor([[1.0, 2.0], [2.0, 4.0]]))
    close(got["grad"], [12.0, 12.0])
    close(got["jvp of ones"][0], [3.0, 3.0])
    close(got["jvp of ones"][1], [2.0, 2.0])
    close(got["jvp of t"], [1.0, 1.0])
    close(got["jacrev"], 2 * torch.eye(3).expand(2, 3, 3))
    close(got["jacfwd"], 2 * torch.eye(3).expand(2, 3, 3))
    close(got["vmap"], [[3.0, 6.0], [3.0, 6.0]])


def test_case_03_the_backward_of_a_gather_does_not_mix_ranks(place: Place) -> None:
    def f(group: Any, x: Tensor, c: Tensor) -> Any:
        return grad(lambda x: (c * fcoll.all_gather(x, group, tiled=False)).sum())(x)

    close(place.map(f, torch.zeros(2), torch.tensor([[1.0, 10.0], [100.0, 1000.0]])), [101.0, 1010.0])


def test_case_04_both_gradients_of_a_replicated_loss_have_a_name(place: Place) -> None:
    def f(group: Any, w: Tensor) -> Any:
        return {
            "sum over ranks": grad(lambda w: fcoll.all_reduce(w, group) ** 2)(w),
            "one loss": grad(lambda w: fcoll.all_reduce(w, group, invariant=True) ** 2)(w),
            "gather": grad(lambda x: 2 * fcoll.all_gather(x, group, tiled=False).sum())(w),
            "gather, one loss": grad(lambda x: 2 * fcoll.all_gather(x, group, tiled=False, invariant=True).sum())(w),
        }

    got = place.map(f, torch.tensor([2.0, 3.0]))
    close(got["sum over ranks"], [20.0, 20.0])
    close(got["one loss"], [10.0, 10.0])
    close(got["gather"], [4.0, 4.0])
    close(got["gather, one loss"], [2.0, 2.0])


def test_case_04_a_shared_weight_is_marked(place: Place) -> None:
    def f(group: Any, w: Tensor) -> Any:
        d = index(group)
        return {
            "own weights": grad(lambda w: fcoll.all_reduce((w**2 + 1) * d, group))(w),
            "shared": grad(lambda w: fcoll.all_reduce((fcoll.vary(w, group) ** 2 + 1) * d, group, invariant=True))(w),
        }

    got = place.map(f, torch.ones(2))
    close(got["own weights"], [0.0, 4.0])
    close(got["shared"], [2.0, 2.0])


def test_case_05_a_gathered_activation_in_a_replicated_and_a_varying_loss(place: Place) -> None:
    def f(group: Any, x: Tensor) -> Any:
        return {
            "one": grad(lambda x: (fcoll.all_gather(x, group, tiled=False, invariant=True) ** 2).sum())(x),
            "sum": grad(lambda x: (fcoll.all_gather(x, group, tiled=False) ** 2).sum())(x),
            "varying": grad(lambda x: (1 + index(group)) * fcoll.all_gather(x, group, tiled=False).sum())(x),
        }

    got = place.map(f, torch.tensor([1.0, 2.0]))
    close(got["one"], [2.0, 4.0])
    close(got["sum"], [4.0, 8.0])
    close(got["varying"], [3.0, 3.0])
    close(place.map(f, torch.ones(4))["varying"], [10.0] * 4)


@pytest.mark.parametrize("compile", [None, "aot_eager"])
def test_case_07_roots_are_counted_within_the_group(ranks: Pools, compile: str | None) -> None:
    """In a process group that omits rank 0, in both orders, and in emulated subgroups alike."""

    def program(group: Any, rank: Any, x: Tensor) -> dict[str, Tensor]:
        def pull(f: Callable[[Tensor], Tensor]) -> Tensor:
            out: Tensor = grad(lambda x: (f(x) * (rank + 1)).sum())(x)
            return out

        return {
            "broadcast 1": fcoll.broadcast(x, group, 1),
            "grad broadcast 1": pull(lambda x: fcoll.broadcast(x, group, 1)),
            "grad broadcast 0": pull(lambda x: fcoll.broadcast(x, group)),
            "reduce 1": fcoll.reduce(x, group, 1),
            "grad reduce 1": pull(lambda x: fcoll.reduce(x, group, 1)),
            "gather 0": fcoll.gather(x, group, 0),
            "grad gather 1": pull(lambda x: fcoll.gather(x, group, 1)),
            "scatter 1": fcoll.scatter(torch.cat((x, -x)), group, 1),
            "grad scatter 1": pull(lambda x: fcoll.scatter(torch.cat((x, -x)), group, 1)),
        }

    def on_rank(x: Tensor) -> Any:
        rank, out = dist.get_rank(), {}
        groups = {
            "listed": fcoll.group([1, 2] if rank else [0]),
            "turned": fcoll.group([2, 1] if rank else [0]),
        }
        plain = dist.new_group([1, 2])
        if rank == 0:
            return None
        for name, group in {**groups, "plain": plain}.items():
            torch.compiler.reset()
            run = lambda x, group=group: program(group, rank, x)  # noqa: E731
            out[name] = (torch.compile(run, fullgraph=True, backend=compile) if compile else run)(x)
        return out

    x = torch.tensor([[1.0], [3.0], [5.0]])
    _, rank_1, rank_2 = ranks(3).run(on_rank, per_rank=[(own,) for own in x])
    for name in ("listed", "plain"):
        got = {key: [rank_1[name][key].tolist(), rank_2[name][key].tolist()] for key in rank_1[name]}
        assert got == {
            "broadcast 1": [[5], [5]],
            "grad broadcast 1": [[0], [5]],
            "grad broadcast 0": [[5], [0]],
            "reduce 1": [[0], [8]],
            "grad reduce 1": [[3], [3]],
            "gather 0": [[3, 5], [0, 0]],
            "grad gather 1": [[3], [3]],
            "scatter 1": [[5], [-5]],
            "grad scatter 1": [[0], [-1]],
        }
    got = {key: [rank_1["turned"][key].tolist(), rank_2["turned"][key].tolist()] for key in rank_1["turned"]}
    assert got == {
        "broadcast 1": [[3], [3]],
        "grad broadcast 1": [[5], [0]],
        "grad broadcast 0": [[0], [5]],
        "reduce 1": [[8], [0]],
        "grad reduce 1": [[2], [2]],
        "gather 0": [[0, 0], [5, 3]],
        "grad gather 1": [[2], [2]],
        "scatter 1": [[-3], [3]],
        "grad scatter 1": [[1], [0]],
    }
    for name, part in {"listed": [[0, 3], [1, 2]], "turned": [[0, 3], [2, 1]]}.items():  # all of one size
        pairs = fcoll.subgroups("i", part)
        run = fcoll.vmap(lambda x, pairs=pairs: program(pairs, index("i"), x), axis_name="i")
        emulated = run(torch.tensor([[1.0], [3.0], [5.0], [0.0]]))
        for key in rank_1[name]:
            close(emulated[key][1:3], torch.stack((rank_1[name][key], rank_2[name][key])))


def test_case_08_strided_inputs_are_right(place: Place) -> None:
    def f(group: Any, matrix: Tensor) -> Any:
        x = matrix[:, 0]
        return {
            "sum": fcoll.all_reduce(x, group),
            "broadcast": fcoll.broadcast(x, group),
            "scatter": fcoll.scatter(torch.stack((x, x, x))[:, 0], group),
        }

    matrix = torch.tensor([[[1.0 + r, 9.0], [2.0 + r, 9.0]] for r in range(3)])
    got = place.map(f, matrix)
    close(got["sum"], [[6.0, 9.0]] * 3)
    close(got["broadcast"], [[1.0, 2.0]] * 3)
    close(got["scatter"], [[1.0]] * 3)


def every_collective(x: Tensor, group: Any) -> dict[str, Any]:
    """All of them on a matrix whose last axis can be cut."""
    return {
        "all_reduce": fcoll.all_reduce(x, group),
        "mean": fcoll.all_reduce(x, group, "mean"),
        "max": fcoll.all_reduce(x, group, "max"),
        "prod": fcoll.all_reduce(x, group, "prod"),
        "any": fcoll.all_reduce(x, group, "any"),
        "invariant": fcoll.all_reduce(x, group, invariant=True),
        "all_gather": fcoll.all_gather(x, group, -1),
        "stacked": fcoll.all_gather(x, group, -1, tiled=False),
        "gathered once": fcoll.all_gather(x, group, 0, invariant=True),
        "reduce_scatter": fcoll.reduce_scatter(x, group, -1),
        "all_to_all": fcoll.all_to_all(x, group, -1, 0),
        "broadcast": fcoll.broadcast(x, group, 1),
        "reduce": fcoll.reduce(x, group, 1),
        "gather": fcoll.gather(x, group, 1, 1),
        "scatter": fcoll.scatter(x, group, 1, -1),
        "permute": fcoll.permute(x, group, [(0, 1)]),
        "shift": fcoll.shift(x, group),
        "vary": fcoll.vary(x, group),
        "split": fcoll.split(x, group, -1),
    }


def test_case_08_a_transpose_gives_what_its_copy_gives(place: Place) -> None:
    def f(group: Any, matrix: Tensor) -> Any:
        return every_collective(matrix.t(), group), every_collective(matrix.t().contiguous(), group)

    strided, contiguous = place.map(f, torch.arange(12.0).view(2, 2, 3))
    for name in strided:
        close(strided[name], contiguous[name])
    close(strided["all_reduce"], (torch.arange(12.0).view(2, 2, 3).sum(0).t()).expand(2, 3, 2))


def test_case_11_compile_keeps_the_rule_of_a_named_axis(place: Place) -> None:
    def f(group: Any, x: Tensor, *, scale: float = 1.0) -> Any:
        return fcoll.all_reduce(x, group) * x * scale

    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    close(place.map(f, x), 10 * x)
    close(place.map(lambda group, x: grad(lambda x: f(group, x))(x), x), [20.0] * 4)
    close(place.map(lambda group, x: grad(lambda x, **k: f(group, x, **k))(x, scale=0.5), x), [10.0] * 4)
    close(place.backward(f, x, torch.ones(4)), [20.0] * 4)
    close(place.map(lambda group, x: vmap(grad(lambda x: f(group, x)))(torch.stack((x, 2 * x))), x), [[20.0, 40.0]] * 4)


def test_case_13_the_mean_has_its_own_gradient(place: Place) -> None:
    def f(group: Any, x: Tensor) -> Any:
        weight = index(group) + 1
        return {
            "value": fcoll.all_reduce(x, group, "mean"),
            "weighted": grad(lambda x: weight * fcoll.all_reduce(x, group, "mean"))(x),
            "plain": grad(lambda x: fcoll.all_reduce(x, group, "mean"))(x),
            "broadcast": grad(lambda x: weight * fcoll.broadcast(x, group))(x),
        }

    got = place.map(f, torch.tensor([1.0, 2.0]))
    close(got["value"], [1.5, 1.5])
    close(got["weighted"], [1.5, 1.5])
    close(got["plain"], [1.0, 1.0])
    close(got["broadcast"], [3.0, 0.0])


def test_case_13_the_mean_of_one_is_the_identity(ranks: Pools) -> None:
    x = torch.tensor([3.0])
    for one in (Emulated(1), Processes(ranks(2), 1)):
        close(one.map(lambda group, x: fcoll.all_reduce(x, group, "mean"), x), x)
        close(one.map(lambda group, x: grad(lambda x: fcoll.all_reduce(x, group, "mean"))(x), x), [1.0])


def test_case_14_extrema_and_products_have_gradients(place: Place) -> None:
    def f(group: Any, x: Tensor) -> Any:
        weight = index(group) + 1

        def pull(op: str) -> Any:
            return grad(lambda x: (weight * fcoll.all_reduce(x, group, op)).sum())(x)

        return {
            "max": pull("max"),
            "prod": pull("prod"),
            "detached": grad(lambda x: (x + fcoll.all_reduce(x.detach(), group, "max")).sum())(x),
        }

    nan = float("nan")
    got = place.map(f, torch.tensor([[3.0, 5.0, 2.0, 0.0, nan], [5.0, 5.0, 3.0, 3.0, 1.0]]))
    close(got["max"][:, :2], [[0.0, 1.5], [3.0, 1.5]])
    close(got["prod"][:, 2:4], [[9.0, 9.0], [6.0, 0.0]])
    assert got["max"][:, 4].isnan().all()  # a NaN is nobody's maximum, and everybody's gradient
    close(got["detached"], torch.ones(2, 5))


def test_case_15_second_derivatives_are_complete(place: Place) -> None:
    def f(group: Any, x: Tensor) -> Any:
        def loss(x: Tensor) -> Any:
            return fcoll.all_reduce(x, group) ** 3

        return {
            "first": grad(loss)(x),
            "penalty": grad(lambda x: grad(loss)(x) ** 2 / 2)(x),
            "jvp of grad": jvp(grad(loss), (x,), (torch.ones_like(x),))[1],
        }

    got = place.map(f, torch.tensor([1.0, 2.0]))
    close(got["first"], [54.0, 54.0])
    close(got["penalty"], [3888.0, 3888.0])
    close(got["jvp of grad"], [72.0, 72.0])


def test_case_15_double_backward(ranks: Pools) -> None:
    def f(call: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad((call(x) ** 3).sum(), x, create_graph=True)
        (g**2 / 2).sum().backward()
        assert x.grad is not None
        return x.grad

    x = torch.tensor([1.0, 2.0])
    close(f(fcoll.vmap(lambda x: fcoll.all_reduce(x, "i"), axis_name="i"), x), [3888.0, 3888.0])
    close(Processes(ranks(2)).map(lambda group, x: f(lambda x: fcoll.all_reduce(x, group), x), x), [3888.0, 3888.0])


@pytest.mark.parametrize("compile", [None, "aot_eager"])
def test_case_16_constants_take_part_in_a_named_axis(compile: str | None) -> None:
    def run(f: Callable[..., Any], n: int, *args: Tensor) -> Any:
        torch.compiler.reset()
        mapped = fcoll.vmap(f, axis_name="i", axis_size=n)
        return (torch.compile(mapped, fullgraph=True, backend=compile) if compile else mapped)(*args)

    two = torch.tensor(2.0)
    for n in (3, 4):
        got = run(lambda: {op: fcoll.all_reduce(two, "i", op) for op in ("sum", "mean", "max", "prod")}, n)
        assert {op: y.tolist() for op, y in got.items()} == {
            "sum": [2.0 * n] * n,
            "mean": [2.0] * n,
            "max": [2.0] * n,
            "prod": [2.0**n] * n,
        }
        close(run(lambda: fcoll.all_gather(two, "i", tiled=False), n), torch.full((n, n), 2.0))

    def swapped(x: Tensor) -> Any:
        return vjp(lambda x: fcoll.permute(x, "i", [(0, 1), (1, 0)]), x)[1](torch.tensor(1.0))[0]

    close(run(swapped, 2, torch.tensor([1.0, 2.0])), [1.0, 1.0])

    def tenfold(x: Tensor) -> Any:
        return sum(fcoll.all_gather(x, "i", tiled=False)[1] for _ in range(10))

    close(run(grad(tenfold), 5, torch.ones(5)), [0.0, 50.0, 0.0, 0.0, 0.0])


def test_case_23_a_result_is_complete_for_whoever_reads_it(ranks: Pools) -> None:
    """Rank 1 comes late: rank 0 must not see a half-finished sum."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, c: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return 2 * x * fcoll.all_reduce(c, fcoll.WORLD).view(1, 1)

    def f() -> dict[str, Any]:
        x = torch.ones(1, 1, dtype=torch.bfloat16)

        def late() -> Any:
            if dist.get_rank() == 1:
                torch.linalg.svd(torch.ones(300, 300))
            return fcoll.all_reduce(x, fcoll.WORLD)

        leaf = torch.ones(1, 1, requires_grad=True)
        Square.apply(fcoll.all_reduce(leaf, fcoll.WORLD)).sum().backward()  # type: ignore[no-untyped-call]
        packed = torch.empty(2, dtype=torch.bfloat16)
        packed[1:].copy_(late().view(1))
        return {
            "repr": repr(late()),
            "cast": late().to(torch.float64).item(),
            "view": late().t().contiguous().tolist(),
            "numpy": late().float().numpy().tolist(),
            "pickle": pickle.loads(pickle.dumps(late())).tolist(),
            "memory": bytes(late().view(torch.uint8).untyped_storage()),
            "packed": packed[1].item(),
            "backward": None if leaf.grad is None else leaf.grad.tolist(),
        }

    want = {
        "repr": "tensor([[2.]], dtype=torch.bfloat16)",
        "cast": 2.0,
        "view": [[2.0]],
        "numpy": [[2.0]],
        "pickle": [[2.0]],
        "memory": b"\x00\x40",
        "packed": 2.0,
        "backward": [[16.0]],  # Σ over ranks of 2·y·Σ1, y = 2
    }
    assert ranks(2).run(f) == [want, want]


def test_case_24_dropped_results_do_not_pile_up(ranks: Pools) -> None:
    def f() -> tuple[int, float]:
        x = torch.ones(2**18)  # 1 MiB
        for _ in range(20):
            fcoll.all_reduce(x, fcoll.WORLD)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(300):
            fcoll.all_reduce(x, fcoll.WORLD)
        gc.collect()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

        x = torch.full((2**18,), 3.0)
        y = fcoll.all_reduce(x, fcoll.WORLD)
        del x
        torch.full((2**18,), 7.0)  # into the memory that has become free
        return grown, float(y.max())

    for grown, largest in ranks(2).run(f):
        assert grown < 32 * 1024  # KiB; the results together have 300 MiB
        assert largest == 6.0


def test_case_27_negative_axes(place: Place) -> None:
    def f(group: Any, x: Tensor) -> Any:
        return {
            "reduce_scatter": [fcoll.reduce_scatter(x, group, axis) for axis in (-1, 1)],
            "all_gather": fcoll.all_gather(x[:, :3], group, -1),
        }

    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    got = place.map(f, torch.stack((x, 10 * x)))
    for blocks in got["reduce_scatter"]:
        close(blocks, [[[11.0, 22], [55, 66]], [[33.0, 44], [77, 88]]])
    close(got["all_gather"], torch.cat((x[:, :3], 10 * x[:, :3]), 1).expand(2, 2, 6))


def test_case_27_no_axis_is_the_identity() -> None:
    """A group of one: what stacks or cuts untiled gains or loses an axis of size 1, nothing else changes."""
    x = torch.arange(6.0).view(3, 2)
    one = [(0, 0)]
    results = {
        "all_reduce": fcoll.all_reduce(x, ()),
        "mean": fcoll.all_reduce(x, (), "mean"),
        "max": fcoll.all_reduce(x, (), "max"),
        "prod": fcoll.all_reduce(x, (), "prod"),
        "all_gather": fcoll.all_gather(x, ()),
        "reduce_scatter": fcoll.reduce_scatter(x, ()),
        "all_to_all": fcoll.all_to_all(x, (), 0, 1),
        "broadcast": fcoll.broadcast(x, ()),
        "reduce": fcoll.reduce(x, ()),
        "gather": fcoll.gather(x, ()),
        "scatter": fcoll.scatter(x, ()),
        "permute": fcoll.permute(x, (), one),
        "shift": fcoll.shift(x, ()),
        "vary": fcoll.vary(x, ()),
        "split": fcoll.split(x, ()),
    }
    for name, y in results.items():
        assert torch.equal(y, x), name


def test_case_27_a_mesh_of_two_axes_is_all_of_it(ranks: Pools) -> None:
    def f() -> list[float]:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = torch.tensor(1.0)
        return [float(fcoll.all_reduce(x, group)) for group in (mesh, mesh["a"], mesh["b"])]

    assert ranks(4).run(f) == [[4.0, 2.0, 2.0]] * 4

    def emulated(x: Tensor) -> Any:
        return [fcoll.all_reduce(x, group) for group in (("a", "b"), "a", "b")]

    got = fcoll.vmap(fcoll.vmap(emulated, axis_name="b"), axis_name="a")(torch.ones(2, 2))
    assert [y.unique().tolist() for y in got] == [[4.0], [2.0], [2.0]]


def test_case_29_dtypes(place: Place) -> None:
    def f(group: Any, flags: Tensor, half: Tensor, z: Tensor, tree: Any) -> Any:
        def norm(z: Tensor) -> Any:
            y = fcoll.all_reduce(z, group)
            return (y * y.conj()).real

        def loss(a: Tensor, k: Tensor) -> Any:
            out = fcoll.all_reduce({"a": a, "k": k}, group)
            return out["a"] * out["k"], out["k"]

        gradient, k = grad(loss, has_aux=True)(tree["a"], tree["k"])
        return {
            "flags": (fcoll.broadcast(flags, group), fcoll.gather(flags, group, tiled=False)),
            "any": fcoll.all_reduce(flags, group, "any"),
            "half": fcoll.all_reduce(half, group),
            "sum": fcoll.all_reduce(z, group),
            "gradient": grad(norm)(z),
            "tree": (gradient, k),
        }

    flags = torch.tensor([True, False])
    half = torch.tensor([256.0, 1.0], dtype=torch.bfloat16)
    z = torch.tensor([1 + 2j, 3 - 1j])
    got = place.map(f, flags, half, z, {"a": torch.tensor([1.0, 2.0]), "k": torch.tensor([3, 4])})
    assert got["flags"][0].tolist() == [True, True]
    assert got["flags"][1].tolist() == [[True, False], [False, False]]
    assert got["any"].tolist() == [True, True]
    assert got["half"].tolist() == [256, 256]
    assert got["half"].dtype == torch.bfloat16
    close(got["sum"], [4 + 1j, 4 + 1j])
    close(got["gradient"], [16 + 4j, 16 + 4j])
    close(got["tree"][0], [14.0, 14.0])
    assert got["tree"][1].dtype == torch.int64
    three = place.map(lambda group, x: fcoll.all_reduce(x, group), torch.tensor([256.0, 1, 1], dtype=torch.bfloat16))
    assert three.tolist() == [258] * 3


def test_case_29_what_is_not_defined_is_refused() -> None:
    for x, op, text in (
        (torch.ones(2, dtype=torch.bool), "sum", "all_reduce: tree is bool, which has no sum; use any or all"),
        (torch.ones(2, dtype=torch.complex64), "max", "all_reduce: tree is torch.complex64, which has no order"),
    ):
        with pytest.raises(TypeError, match=text):
            fcoll.vmap(lambda x, op=op: fcoll.all_reduce(x, "i", op), axis_name="i")(x)


def test_case_30_empty_tensors(place: Place) -> None:
    def f(group: Any, x: Tensor) -> Any:
        def total(x: Tensor) -> Any:
            ys = every_collective(x, group)
            return sum(y.double().sum() for name, y in ys.items() if name != "any")

        return every_collective(x, group), grad(total)(x)

    values, gradient = place.map(f, torch.zeros(2, 1, 0, 2))
    assert gradient.shape == (2, 1, 0, 2)
    shapes = {name: tuple(y.shape[1:]) for name, y in values.items()}
    same, cut = (1, 0, 2), (1, 0, 1)
    assert shapes == {
        "all_reduce": same, "mean": same, "max": same, "prod": same, "any": same, "invariant": same,
        "all_gather": (1, 0, 4), "stacked": (1, 0, 2, 2), "gathered once": (2, 0, 2), "reduce_scatter": cut,
        "all_to_all": (2, 0, 1), "broadcast": same, "reduce": same, "gather": (1, 0, 2), "scatter": cut,
        "permute": same, "shift": same, "vary": same, "split": cut,
    }  # fmt: skip


def test_case_32_a_mean_over_unequal_batches(place: Place) -> None:
    """Sums over counts: a mean of means would be 2.5."""

    def f(group: Any, x: Tensor, valid: Tensor) -> Any:
        def mean(x: Tensor) -> Any:
            total, count = fcoll.all_reduce(((x * valid).sum(), valid.sum()), group)
            return total / count

        return mean(x), grad(mean)(x), grad(lambda x: mean(x.t().contiguous().t()))(x)

    x, valid = torch.tensor([[[1.0, 0.0]], [[3.0, 5.0]]]), torch.tensor([[[1, 0]], [[1, 1]]])
    value, gradient, transposed = place.map(f, x, valid)
    close(value, [3.0, 3.0])
    close(gradient, [[[2 / 3, 0.0]], [[2 / 3, 2 / 3]]])
    close(transposed, gradient)


def test_case_33_emulation_is_no_stand_in(place: Place) -> None:
    def f(group: Any, one: Tensor, x: Tensor, block: Tensor) -> Any:
        return fcoll.all_reduce(one, group), fcoll.all_gather(x, group, tiled=False), fcoll.reduce_scatter(block, group)

    block = torch.arange(4.0) + 10 * torch.arange(4.0).view(4, 1)
    total, gathered, scattered = place.map(f, torch.ones(4), torch.arange(4.0), block)
    close(total, [4.0] * 4)
    close(gathered, torch.arange(4.0).expand(4, 4))
    close(scattered, [[60.0], [64.0], [68.0], [72.0]])


def test_case_33_a_listed_group_keeps_its_order(ranks: Pools) -> None:
    order = [0, 3, 1, 2]

    def f(group: Any, x: Tensor) -> Any:
        return fcoll.all_gather(x, group, tiled=False), fcoll.broadcast(x, group, 1), fcoll.reduce(x, group, 3)

    listed = fcoll.subgroups("i", [order])
    emulated = fcoll.vmap(lambda x: f(listed, x), axis_name="i")(torch.arange(4.0))
    real = Processes(ranks(4)).map(lambda _, x: f(fcoll.group(order), x), torch.arange(4.0))
    for gathered, root, reduced in (emulated, real):
        close(gathered, torch.tensor([0.0, 3.0, 1.0, 2.0]).expand(4, 4))
        close(root, [3.0] * 4)
        close(reduced, [0.0, 0.0, 6.0, 0.0])
