"""torch.compile, make_fx and the functorch namespace give what eager code gives, as one graph that is never stale."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import functorch  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from common import Pools, close, draw, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from functorch.compile import aot_function, nop  # type: ignore[import-untyped]
from table import TABLE, Row
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll.testing import Emulated, Processes, Ranks, Substrate

ROWS = {row.name: row for row in TABLE}
KINDS = [  # one row for each record and each way through a public function
    "all_reduce", "all_reduce max", "all_reduce prod", "all_reduce invariant", "all_reduce max invariant",
    "all_reduce prod invariant", "all_gather", "all_gather untiled invariant", "reduce_scatter axis -1",
    "reduce_scatter max", "all_to_all axes 0 1", "broadcast from last", "reduce to last", "reduce max",
    "gather untiled", "scatter from last axis -1", "permute chain", "shift", "vary", "split", "axis_index", "axis_size",
]  # fmt: skip
for _row in TABLE:  # and the first row of each function that has a derivative and that none of these is of
    if _row.vjp and _row.name.split()[0] not in {name.split()[0] for name in KINDS}:
        KINDS.append(_row.name)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


@pytest.fixture(params=["emulated", "gloo"])
def both(request: pytest.FixtureRequest, ranks: Pools) -> Substrate:
    return Emulated(3) if request.param == "emulated" else Processes(ranks(2))


def like(row: Row, n: int) -> tuple[Tensor, Tensor, Tensor]:
    stack = row.inputs(n)
    return stack, draw(row.values(stack).shape, 1), draw(stack.shape, 2)


def named(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return fcoll.vmap(f, axis_name="i", **options)


class Graphs:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward


# ---- torch.compile(fullgraph=True)


def test_kinds_hold_every_public_function() -> None:
    assert {name.split()[0] for name in KINDS} == set(fcoll.functional.__all__) - {"argmax", "argmin"}


def test_values_of_every_row(both: Substrate) -> None:
    def f(group: Any, xs: dict[str, Tensor]) -> dict[str, Any]:
        return {row.name: row.call(xs[row.name], group) for row in TABLE}

    got = both.map(f, {row.name: row.inputs(both.n) for row in TABLE}, compile="aot_eager")
    for row in TABLE:
        close(got[row.name], row.values(row.inputs(both.n)), row.name)


@pytest.mark.parametrize("name", KINDS)
def test_derivatives(both: Substrate, name: str) -> None:
    row = ROWS[name]

    def f(group: Any, x: Tensor, c: Tensor, t: Tensor) -> dict[str, Any]:
        def call(x: Tensor) -> Any:
            return row.call(x, group)

        def penalty(x: Tensor) -> Tensor:
            out: Tensor = (grad(lambda x: (call(x) ** 3).sum())(x) * torch.cos(x)).sum()
            return out

        y, pull = vjp(call, x)
        return {"value": y, "vjp": pull(c)[0], "jvp": jvp(call, (x,), (t,))[1], "grad grad": grad(penalty)(x)}

    x, c, t = like(row, both.n)
    got = both.map(f, x, c, t, compile="aot_eager")
    close(got["value"], row.values(x))
    close(got["vjp"], row.pull(x, c))
    close(got, both.map(f, x, c, t))


@pytest.mark.parametrize("name", ["all_reduce max", "all_gather", "split"])
def test_transforms(both: Substrate, name: str) -> None:
    row = ROWS[name]

    def f(group: Any, x: Tensor, t: Tensor) -> dict[str, Any]:
        def call(x: Tensor) -> Any:
            return row.call(x, group)

        def loss(x: Tensor) -> Tensor:
            total: Tensor = (call(x) ** 3).sum()
            return total

        xs = torch.stack((x, 2 * x), 1)
        return {
            "jacrev": jacrev(call)(x),
            "jacfwd": jacfwd(call)(x),
            "jacrev of grad": jacrev(grad(loss))(x),
            "jvp of grad": jvp(grad(loss), (x,), (t,))[1],
            "vmap": vmap(call, 1, -1)(xs),
            "vmap of grad": vmap(grad(loss), 1, -1)(xs),
            "grad of vmap": grad(lambda x: vmap(loss)(torch.stack((x, 2 * x))).sum())(x),
        }

    x, _, t = like(row, both.n)
    got = both.map(f, x, t, compile="aot_eager")
    want = both.map(f, x, t)
    for how in want:
        close(got[how], want[how], how)


def test_backward(both: Substrate) -> None:
    rows = [ROWS[name] for name in ("all_reduce", "all_reduce prod", "all_gather invariant", "scatter", "permute one")]

    def f(group: Any, xs: dict[str, Tensor]) -> dict[str, Any]:
        return {row.name: row.call(xs[row.name], group) for row in rows}

    xs = {row.name: row.inputs(both.n) for row in rows}
    cs = {row.name: draw(row.values(row.inputs(both.n)).shape) for row in rows}
    got = both.vjp(f, xs, cs, how="backward", compile="aot_eager")
    for row in rows:
        close(got[row.name], row.pull(xs[row.name], cs[row.name]), row.name)


def test_inductor(both: Substrate) -> None:
    """One of each kind: linear, not linear, declared, a movement, a root, and what tells the ranks apart."""
    kinds = ("all_reduce", "all_reduce max", "split", "all_to_all", "gather", "permute one", "axis_index")
    rows = [ROWS[name] for name in kinds]

    def f(group: Any, xs: dict[str, Tensor]) -> Any:
        def loss(xs: dict[str, Tensor]) -> tuple[Tensor, Any]:
            ys = {row.name: row.call(xs[row.name], group) for row in rows}
            total: Any = sum((y**2).sum() for y in ys.values())
            return total, ys

        return grad(loss, has_aux=True)(xs)

    xs = {row.name: row.inputs(both.n) for row in rows}
    close(both.map(f, xs, compile="inductor"), both.map(f, xs))


def test_compile_around_the_map_and_transforms_around_compile() -> None:
    row = ROWS["all_reduce prod"]
    x, c, _ = like(row, 3)
    f = named(row.on("i"))

    def total(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: (f(x) * c).sum()

    def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
        torch.compiler.reset()
        return torch.compile(f, fullgraph=True, backend="aot_eager")

    want = row.pull(x, c)
    close(compiled(grad(total(f)))(x), want, "compile(grad(vmap))")
    close(compiled(lambda x: vjp(f, x)[1](c)[0])(x), want, "compile(vjp(vmap))")
    close(compiled(hessian(total(f)))(x), hessian(total(lambda x: x.prod(0).expand_as(x)))(x), "compile(hessian(vmap))")
    close(compiled(vmap(f, 1, 1))(torch.stack((x, 2 * x), 1))[:, 0], row.values(x), "compile(vmap(vmap))")
    partly = torch.compile(row.on("i"), backend="aot_eager")  # torch runs it eagerly inside transforms
    close(named(partly)(x), row.values(x), "vmap(compile)")
    close(named(lambda x, c: vjp(partly, x)[1](c)[0])(x, c), want, "vmap(vjp(compile))")
    close(grad(total(torch.compile(f, backend="aot_eager")))(x), want, "grad(compile(vmap))")
    close(compiled(named(partly))(x), row.values(x), "compile(vmap(compile))")
    leaf = x.clone().requires_grad_()
    total(compiled(f))(leaf).backward()
    close(leaf.grad, want, "backward of compile(vmap)")


def test_names_on_a_thread_that_has_seen_none() -> None:
    """Compiled functions come first there, and the second must find what the first found."""
    x, out = torch.tensor([1.0, 2.0]), []

    def run() -> None:
        for f in (lambda x: fcoll.all_reduce(x, "i"), grad(lambda x: fcoll.all_reduce(x, "i") ** 2)):
            torch.compiler.reset()
            out.append(torch.compile(named(f), fullgraph=True, backend="aot_eager")(x).tolist())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert out == [[3, 3], [12, 12]]


def test_keyword_and_default_arguments() -> None:
    def f(x: Tensor, group: str = "i", *, op: str = "sum", scale: float = 2.0) -> Tensor:
        return fcoll.all_reduce(x, group=group, op=op) * scale

    x = torch.tensor([1.0, 2.0, 4.0])
    run = torch.compile(named(f), fullgraph=True, backend="aot_eager")
    assert run(x).tolist() == [14, 14, 14]
    assert run(x, op="max").tolist() == [8, 8, 8]
    assert run(x, op="max", scale=3.0).tolist() == [12, 12, 12]
    gradient = torch.compile(named(grad(f)), fullgraph=True, backend="aot_eager")
    assert gradient(x).tolist() == [6, 6, 6]
    assert gradient(x, op="max").tolist() == [0, 0, 6]


def test_trees() -> None:
    def f(tree: Any) -> Any:
        return fcoll.all_gather(tree, "i", tiled=False), fcoll.all_reduce((tree["a"], 1), "i")

    tree = {"a": torch.tensor([1.0, 2.0]), "b": [torch.tensor([3, 4]), None]}
    got = torch.compile(named(f), fullgraph=True, backend="aot_eager")(tree)
    close(got[0]["a"], torch.tensor([[1.0, 2.0]] * 2))
    close(got[0]["b"][0], torch.tensor([[3, 4]] * 2))
    assert got[0]["b"][1] is None
    close(got[1], (torch.tensor([3.0, 3.0]), torch.tensor([2, 2])))


# ---- sizes that change


def test_dynamic_shapes_make_one_graph(both: Substrate) -> None:
    """One graph for all sizes, on emulation and in each process."""
    n = both.n

    def program(group: Any, x: Tensor) -> Any:
        def loss(x: Tensor) -> Tensor:
            y = fcoll.reduce_scatter(fcoll.all_gather(x, group), group)
            y = fcoll.all_to_all(y, group) * fcoll.all_reduce(x, group, "max").sum()
            return fcoll.all_reduce(y.sum(), group)

        return grad(loss)(x)

    sizes = [(2, 5), (4, 7), (6, 5), (8, 9)]  # none twice in the first: torch takes equal sizes for the same
    stacks = [draw((n, n * rows, columns)) for rows, columns in sizes]

    def run(group: Any, *xs: Tensor) -> tuple[list[Tensor], int]:
        graphs = Graphs()
        torch.compiler.reset()
        f = torch.compile(lambda x: program(group, x), fullgraph=True, dynamic=True, backend=graphs)
        return [f(x) for x in xs], len(graphs.graphs)

    if isinstance(both, Emulated):
        graphs = Graphs()
        f = torch.compile(named(lambda x: program("i", x)), fullgraph=True, dynamic=True, backend=graphs)
        got, count = [f(x) for x in stacks], len(graphs.graphs)
    else:
        got, counts = both.map(run, *stacks)
        count = int(counts.max())
    for mine, x in zip(got, stacks, strict=True):
        close(mine, both.map(program, x))
    assert count == 1


def test_automatic_dynamic_shapes_make_two_graphs() -> None:
    """Without `dynamic=True` too, the second size makes the last graph."""
    graphs = Graphs()
    f = torch.compile(named(grad(lambda x: (fcoll.all_gather(x, "i") ** 2).sum())), fullgraph=True, backend=graphs)
    for size in (3, 5, 7, 9, 11):
        x = draw((2, size))
        close(f(x), 4 * x)
    assert len(graphs.graphs) == 2


def test_the_size_of_an_axis_is_never_stale() -> None:
    def f(x: Tensor) -> Any:
        return fcoll.all_reduce(x, "i", "mean"), fcoll.all_gather(x, "i", tiled=False), fcoll.axis_size("i")

    for dynamic in (False, None):
        torch.compiler.reset()
        run = torch.compile(named(f), fullgraph=True, dynamic=dynamic, backend=Graphs())
        for n in (2, 3, 5, 2, 1):
            x = draw((n, 4))
            mean, gathered, size = run(x)
            close(mean, x.mean(0).expand(n, 4), f"{n}, {dynamic}")
            close(gathered, x.expand(n, n, 4), f"{n}, {dynamic}")
            assert size.tolist() == [n] * n


def test_the_group_is_never_stale(ranks: Pools) -> None:
    """Groups of other sizes, other members or another order, in one compiled function."""

    def f(x: Tensor) -> Any:
        rank = dist.get_rank()
        groups = {
            "all": fcoll.group([0, 1, 2]),
            "turned": fcoll.group([2, 1, 0]),
            "pair": fcoll.group([1, 0] if rank < 2 else [2]),
            "world": fcoll.WORLD,
        }
        compiled = torch.compile(lambda x, g: fcoll.all_gather(x, g), fullgraph=True, backend=Graphs())
        return [(name, compiled(x, groups[name]).tolist()) for name in (*groups, *groups)]

    got = ranks(3).run(f, per_rank=[(torch.tensor([rank]),) for rank in range(3)])
    for rank, mine in enumerate(got):
        pair = [1, 0] if rank < 2 else [2]
        assert mine == [("all", [0, 1, 2]), ("turned", [2, 1, 0]), ("pair", pair), ("world", [0, 1, 2])] * 2


def test_every_kind_of_group(ranks: Pools) -> None:
    """A process group, a mesh, the world and groups, closed over by a compiled gradient."""

    def f(x: Tensor) -> Any:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        groups: dict[str, Any] = {
            "torch's world": dist.group.WORLD,
            "world": fcoll.WORLD,
            "mesh": mesh,
            "rows": mesh["b"],
            "listed": fcoll.group([3, 1, 0, 2]),
            "subgroups": fcoll.subgroups(fcoll.WORLD, [[2, 0], [1, 3]]),
        }
        out = {}
        for name, g in groups.items():
            torch.compiler.reset()

            def loss(x: Tensor, g: Any = g) -> Any:
                return (fcoll.all_gather(x, g) * torch.arange(fcoll.axis_size(g))).sum() * (fcoll.axis_index(g) + 1)

            run: Any = torch.compile(grad(loss), fullgraph=True, backend="aot_eager")
            out[name] = float(run(x)), float(grad(loss)(x))
        return out

    got = ranks(4).run(f, per_rank=[(torch.tensor([float(rank)]),) for rank in range(4)])
    in_order = [0.0, 10.0, 20.0, 30.0]
    want = {
        "torch's world": in_order,
        "world": in_order,
        "mesh": in_order,
        "rows": [0.0, 3.0, 0.0, 3.0],
        "listed": [20.0, 10.0, 30.0, 0.0],
        "subgroups": [3.0, 0.0, 0.0, 3.0],
    }
    for rank, mine in enumerate(got):
        assert mine == {name: (values[rank], values[rank]) for name, values in want.items()}


# ---- other tracers, and the functorch namespace


def test_make_fx(both: Substrate) -> None:
    def f(group: Any, x: Tensor) -> Any:
        def loss(x: Tensor) -> Tensor:
            total: Tensor = (fcoll.all_gather(x, group) * fcoll.all_reduce(x, group, "max").sum()).sum()
            return total

        return {"grad": grad(loss)(x), "value": fcoll.permute(x, group, [(0, 1)])}

    stack, other = draw((both.n, 4), 1), draw((both.n, 4), 2)
    if isinstance(both, Emulated):
        traced = make_fx(named(lambda x: f("i", x)))(stack)
        close(traced(other), both.map(f, other))
    else:
        got = both.map(lambda group, x, y: make_fx(lambda x: f(group, x))(x)(y), stack, other)
        close(got, both.map(f, other))


def test_a_traced_program_shows_its_messages(ranks: Pools) -> None:
    def f() -> list[str]:
        def program(x: Tensor) -> Any:
            return grad(lambda x: fcoll.reduce_scatter(fcoll.all_gather(x, fcoll.WORLD), fcoll.WORLD).sum())(x)

        graph = make_fx(program)(torch.ones(2)).graph
        return [str(node.target) for node in graph.nodes if "_c10d_functional" in str(node.target)]

    for seen in ranks(2).run(f):
        assert [name.split(".")[1] for name in seen if "wait" not in name] == [
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
        ]


@pytest.mark.filterwarnings("ignore:We've integrated functorch:FutureWarning")
def test_the_functorch_namespace(both: Substrate) -> None:
    def f(group: Any, x: Tensor) -> Any:
        def loss(x: Tensor) -> Tensor:
            total: Tensor = (fcoll.all_reduce(x, group) ** 2).sum()
            return total

        traced = functorch.make_fx(functorch.grad(loss))(x) if group != "ranks" else functorch.grad(loss)
        return {
            "grad": functorch.grad(loss)(x),
            "vmap": functorch.vmap(functorch.grad(loss))(torch.stack((x, x))),
            "jacrev": functorch.jacrev(loss)(x),
            "jvp": functorch.jvp(loss, (x,), (torch.ones_like(x),))[1],
            "vjp": functorch.vjp(loss, x)[1](torch.ones(()).to(x))[0],
            "make_fx": traced(2 * x),
        }

    n, x = both.n, draw((both.n, 3))
    total = x.sum(0).expand(n, 3)
    got = both.map(f, x)
    want = 2 * n * total
    close(got["grad"], want)
    close(got["vmap"], torch.stack((want, want), 1))
    close(got["jacrev"], want)
    close(got["jvp"], (2 * n * total).sum(1))
    close(got["vjp"], want)
    close(got["make_fx"], 2 * want)


def test_aot_tracing(both: Substrate) -> None:
    def program(call: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        traced = aot_function(lambda x: call(torch.sin(x)), fw_compiler=nop, bw_compiler=nop)
        traced(x).backward(torch.arange(x.numel(), dtype=x.dtype).view(x.shape))
        assert x.grad is not None
        return x.grad

    x = draw((both.n, 4))
    if isinstance(both, Emulated):
        c = torch.arange(x.numel(), dtype=x.dtype).view(x.shape)
        close(program(named(lambda x: fcoll.all_reduce(x, "i")), x), c.sum(0) * torch.cos(x))
    else:
        got = both.map(lambda group, x: program(lambda x: fcoll.all_reduce(x, group), x), x)
        close(got, both.n * torch.arange(4.0) * torch.cos(x))


# ---- what torch itself cannot do


def fails(f: Callable[[Tensor], Any]) -> bool:
    """Whether jacfwd over grad of f under a vmap cannot be compiled."""
    try:
        run: Any = torch.compile(vmap(jacfwd(grad(f))), fullgraph=True, backend="aot_eager")
        run(torch.ones(2, 3))
    except Exception:
        return True
    return False


def test_jacfwd_of_grad_in_a_vmap_is_torchs_limit() -> None:
    """torch cannot compile it, collective or not. In a process of its own, as it may leave functorch's stack dirty."""
    with Ranks(1) as own:
        assert own.run(fails, lambda x: (x**3).sum()) == [True]


def test_jacfwd_of_grad_of_a_process() -> None:
    """Without a vmap it works."""

    def f(x: Tensor) -> Any:
        f = jacfwd(grad(lambda x: (fcoll.all_reduce(x, fcoll.WORLD) ** 3).sum()))
        run: Any = torch.compile(f, fullgraph=True, backend="aot_eager")
        return run(x), f(x)

    with Ranks(2) as own:
        for got, want in own.run(f, torch.ones(2)):
            close(got, want)
            close(want, 48 * torch.eye(2))


def held() -> list[str]:
    """What Dynamo makes of calls that differ between ranks."""
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.append(graph.code)
        return graph.forward

    def sent(x: Tensor) -> Any:
        return fcoll.permute(x, fcoll.WORLD, [(0, 1)])

    def started(x: Tensor) -> Any:
        return fcoll.wait(fcoll.start(fcoll.permute, x, fcoll.WORLD, [(0, 1)]))

    for f in (sent, started):
        torch.compile(f, backend=backend, fullgraph=True)(torch.ones(3))
    return found


def test_graphs_of_different_ranks_are_cached_apart(ranks: Pools) -> None:
    first, second = ranks(2).run(held)
    assert len(first) == len(second) == 2
    assert all(a != b for a, b in zip(first, second, strict=True)), "one rank would find the code of the other"
