"""`fcoll.optimize`: what each rule does, what it leaves alone, and where `fcoll.compile` applies it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import Pools, close, draw, grad
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll import P, backends, invariance, optimizing

Case = tuple[str, tuple[P, ...], Callable[..., Any], int, int, str]
"""Its name, the specs of its arguments, a rank's part, and messages before and after, and part of a reason."""


def mean(*values: Tensor) -> Tensor:
    total = sum(value.sin().mean() for value in values)
    return fcoll.all_reduce(torch.as_tensor(total), ("dp", "tp"), "mean")


AR = fcoll.all_reduce
CASES: list[Case] = [
    ("sum", (P(),), lambda x: fcoll.all_reduce(x, "dp"), 1, 0, "is the same on all ranks of the group"),
    ("mean", (P(),), lambda x: fcoll.all_reduce(x, "dp", "mean"), 1, 0, "is the same"),
    ("max", (P(),), lambda x: fcoll.all_reduce(x, "dp", "max"), 1, 0, "is the same"),
    ("any", (P(),), lambda x: fcoll.all_reduce(x > 0, "dp", "any"), 1, 0, "is the same"),
    ("gather", (P(),), lambda x: fcoll.all_gather(x, "tp", 1), 1, 0, "is the same"),
    ("scatter", (P(),), lambda x: fcoll.all_gather(fcoll.reduce_scatter(x, "tp", 1), "tp", 1), 2, 1, "is the same"),
    ("broadcast", (P(),), lambda x: fcoll.broadcast(x, "tp", 1), 1, 0, "is the same"),
    ("flattened", (P("tp"),), lambda x: fcoll.all_reduce(x, ("dp", "tp")), 1, 1, ""),
    ("inner", (P(),), lambda x: fcoll.all_reduce(fcoll.all_reduce(x, "dp"), ("tp", "dp")), 2, 0, "is the same"),
    ("infinite", (P("dp"),), lambda x: torch.nan_to_num(AR(x / 0.0, "dp")) * AR(x, "dp"), 2, 1, "travel"),
    ("twice", (P("dp"),), lambda x: fcoll.all_reduce(fcoll.all_reduce(x, "dp"), "dp"), 2, 1, "is the same"),
    ("by rank", (P(),), lambda x: fcoll.all_reduce(x * fcoll.axis_index("dp"), "dp"), 1, 1, ""),
    ("other rank", (P(),), lambda x: fcoll.all_reduce(x * fcoll.axis_index("tp"), "dp"), 1, 0, "is the same"),
    ("literal", (P("dp"),), lambda x: mean(x) + fcoll.all_reduce(torch.tensor(2.0), "dp"), 2, 1, "is the same"),
    ("random", (P(),), lambda x: fcoll.all_reduce(x * (torch.rand_like(x) > 2), "dp"), 1, 1, ""),
    ("empty", (P(),), lambda x: fcoll.all_reduce(torch.empty_like(x) > 2, "dp", "any").any() & False, 1, 1, ""),
    ("once", (P("dp"),), lambda x: AR(x, "dp") * AR(x, "dp"), 2, 1, "sends what"),
    ("multiple", (P("dp"),), lambda x: AR(x / 2, "dp") * AR(-x, "dp"), 2, 1, "sends what"),
    ("of sum", (P("dp"),), lambda x: AR(x, "dp") - 3 * fcoll.all_reduce(x.sin(), "dp"), 2, 1, "reduces the sum"),
    ("own", (P("dp"),), lambda x: mean(fcoll.split(fcoll.all_gather(x, "dp", 1), "dp", 1)), 2, 1, "the own part"),
    ("other own", (P("dp"),), lambda x: mean(fcoll.split(fcoll.all_gather(x, "dp", 1), "dp", 0)), 2, 2, ""),
    ("own of sum", (P("dp"),), lambda x: mean(fcoll.split(AR(x, "dp"), "dp", 1)), 2, 2, "only the own"),
    ("again", (P("dp"),), lambda x: fcoll.all_gather(fcoll.reduce_scatter(x, "dp"), "dp"), 2, 1, "has scattered"),
    ("unused", (P("dp"),), lambda x: mean(x, 0 * x if fcoll.all_reduce(x, "dp") is None else x), 2, 1, "nothing uses"),
    ("together", (P("dp"),), lambda x: mean(AR(x, "dp") @ AR(x.t().sin(), "dp")), 3, 1, "travel"),
    ("halves", (P("dp"),), lambda x: AR(x.half() / 3, "dp") * AR(x.half(), "dp"), 2, 1, "travel together"),
]  # fmt: skip


def run_case(mesh: Any, specs: tuple[P, ...], f: Callable[..., Any]) -> tuple[Any, Any, fcoll.Plan]:
    mapped: Any = fcoll.shard_map(f, mesh, specs, P(), check=False)
    args = [draw((8, 8), seed) for seed in range(len(specs))]
    with fcoll.marked():
        graph = make_fx(lambda *args: mapped(*args))(*args)
    want = graph(*args)
    got = fcoll.optimize(graph)(*args)
    assert "fcoll.invariant" not in graph.code
    return got, want, graph.meta["fcoll"]


def run_cases(cases: list[Case]) -> list[tuple[Any, Any, fcoll.Plan]]:
    mesh = fcoll.mesh(dp=2, tp=2)
    return [run_case(mesh, specs, f) for _, specs, f, *_ in cases]


def test_each_rule(ranks: Pools) -> None:
    for results in ranks(4).run(run_cases, CASES):
        for (name, _, _, before, after, reason), (got, want, plan) in zip(CASES, results, strict=True):
            close(got, want, name, 1e-3 if name == "halves" else 1e-10)
            assert (plan.before, plan.after) == (before, after), (name, plan)
            assert reason in " ".join(plan.reasons), (name, plan)
            assert bool(plan.reasons) == bool(reason), (name, plan)


def test_trace_foresees_it() -> None:
    mesh = fcoll.virtual_mesh(dp=2, tp=2)
    for name, specs, f, before, after, reason in CASES:
        mapped: Any = fcoll.shard_map(f, mesh, specs, P(), check=False)
        found = fcoll.trace(mapped, optimize=True)(*[draw((8, 8), seed) for seed in range(len(specs))])
        assert found.optimized is not None
        assert (len(found), len(found.optimized)) == (before, after), (name, found)
        assert reason in " ".join(found.reasons), (name, found)
        assert not fcoll.trace(mapped)(draw((8, 8))).reasons


def test_a_trace_shows_what_is_left_and_why() -> None:
    mapped: Any = fcoll.shard_map(network, fcoll.virtual_mesh(dp=256, tp=4), SPECS, P())
    shapes = [(4, 8), (8, 4), (512, 4), (512, 4)]
    found = fcoll.trace(grad(mapped, (0, 1)), optimize=True)(*[torch.empty(shape, device="meta") for shape in shapes])
    assert found.optimized is not None
    assert [(r.collective, r.axis, r.payload, r.phase) for r in found.optimized] == [
        ("all_reduce", "tp", 32, "forward"),
        ("all_reduce", "dp", 4, "forward"),
        ("all_reduce", "dp", 64, "backward"),
        ("all_gather", "tp", 64, "backward"),
    ]  # the published placement
    assert found.reasons == (
        "#2: what it takes is the same on all ranks of the group",
        "#3: what it takes is the same on all ranks of the group",
        "#4, #6: travel together",
        "#5, #7: travel together",
    )
    assert "after fcoll.optimize, 4 of 8:" in str(found)
    assert str(found).endswith("because\n" + "\n".join(f"  {reason}" for reason in found.reasons))
    assert "<li>#4, #6: travel together</li>" in found._repr_html_()


def test_a_trace_of_other_groups_foresees_as_much() -> None:
    mesh = fcoll.virtual_mesh(i=6)

    def f(x: Tensor) -> Tensor:
        halves = fcoll.subgroups("i", [[0, 2, 4], [1, 3, 5]])
        y = fcoll.all_reduce(fcoll.all_reduce(x, halves), halves)  # the second is needless
        return fcoll.shift(y, "i", 1) + fcoll.all_reduce(fcoll.gather(y, "i", 0).sum(0), "i")

    found = fcoll.trace(f, mesh, optimize=True)(torch.ones(3))
    assert found.optimized is not None
    assert [r.collective for r in found] == ["all_reduce", "all_reduce", "permute", "gather", "all_reduce"]
    assert [r.collective for r in found.optimized] == ["all_reduce", "permute", "gather", "all_reduce"]

    two = fcoll.shard_map(lambda x: fcoll.all_reduce(x, "i"), mesh, P(), P())
    other = fcoll.shard_map(lambda x: fcoll.all_reduce(x, "i"), fcoll.virtual_mesh(i=2), P(), P())
    found = fcoll.trace(lambda x: two(x) + other(x), optimize=True)(torch.ones(3))
    assert found.reasons == ("the program has groups of several meshes",)
    empty = fcoll.trace(torch.sin, optimize=True)(torch.ones(3))
    assert empty.optimized is not None
    assert len(empty) == len(empty.optimized) == 0


def plans(different: bool) -> str:
    """What a rank is told if one of four does something else."""
    graph = make_fx(lambda x: fcoll.all_reduce(torch.full((3,), 2.0), fcoll.WORLD) + x)(torch.ones(3))
    with fcoll.checked(timeout=20):
        rewrite = optimizing.rewrite
        if different and dist.get_rank() == 2:
            vars(optimizing)["rewrite"] = lambda *_: []
        try:
            fcoll.optimize(graph)
        except fcoll.DisagreementError as error:
            return str(error)
        finally:
            vars(optimizing)["rewrite"] = rewrite
    return ""


def test_under_check_the_plans_are_compared(ranks: Pools) -> None:
    assert ranks(4).run(plans, False) == [""] * 4
    for told in ranks(4).run(plans, True):
        assert "what was done: ranks 0, 1, 3 have all_reduce: full is the same on" in told
        assert "rank 2 has nothing" in told


# ---- what is left alone


def left_alone() -> dict[str, tuple[Any, Any, fcoll.Plan]]:
    mesh = fcoll.mesh(dp=2, tp=2)
    rank = dist.get_rank()
    x = draw((4, 4), rank)

    def of(f: Callable[..., Any], *args: Any) -> tuple[Any, Any, fcoll.Plan]:
        with fcoll.marked():
            graph = make_fx(f)(*args)
        copies = [arg.clone() for arg in args]
        want = graph(*args)
        return fcoll.optimize(graph)(*copies), want, graph.meta["fcoll"]

    mapped: Any = fcoll.shard_map(lambda x: fcoll.all_reduce(x, "dp"), mesh, (P(),), P())
    assert isinstance(mesh, DeviceMesh)
    tp = mesh.get_group("tp")
    pairs = fcoll.subgroups(fcoll.WORLD, [[0, 3], [1, 2]])
    uneven = fcoll.subgroups(fcoll.WORLD, [[0, 1, 2], [3]])
    return {
        "an input": of(lambda x: fcoll.all_reduce(x, fcoll.WORLD), x),
        "an input said to be replicated by nobody": of(fcoll.bind(mesh)(lambda x: fcoll.all_reduce(x, "dp")), x),
        "a literal rank": of(lambda x: mapped(torch.ones(4, 4)) + fcoll.all_reduce(x * 0 + rank, tp), x),
        "a branch on the rank": of(lambda x: fcoll.all_reduce(torch.ones(3) if rank else torch.zeros(3), tp), x),
        "in place": of(lambda x: fcoll.all_reduce(torch.zeros(4, 4).add_(x), tp), x),
        "uneven": of(lambda x: fcoll.all_reduce(torch.full((2,), 3.0), uneven), x),
        "sizes": of(lambda x: fcoll.all_to_all(x, tp, send_sizes=[1, 3], recv_sizes=[1 + rank % 2 * 2] * 2), x),
        "at a root": of(lambda x: fcoll.all_reduce(fcoll.reduce(x, tp, 0), tp), x),
        "a constant of the user": of(lambda y: fcoll.all_reduce(x, tp) + y, x),
        "of subgroups": of(lambda x: fcoll.all_reduce(fcoll.all_reduce(x, pairs), tp), x),
    }


def test_what_may_vary_is_sent(ranks: Pools) -> None:
    for results in ranks(4).run(left_alone):
        for name, (got, want, plan) in results.items():
            close(got, want, name)
            assert plan.before == plan.after > 0, (name, plan)


def groups_without_a_mesh() -> list[tuple[Any, Any, int]]:
    pairs = fcoll.subgroups(fcoll.WORLD, [[0, 3], [1, 2]])
    x = draw((4,), dist.get_rank())

    def f(x: Tensor) -> Tensor:
        y = fcoll.all_reduce(x, pairs)
        z = fcoll.all_reduce(y, fcoll.WORLD)
        return fcoll.all_reduce(y, pairs) + fcoll.all_gather(fcoll.all_reduce(z, pairs), pairs)[:4]

    graph = make_fx(f)(x)
    want = graph(x)
    fcoll.optimize(graph)
    return [(graph(x), want, graph.meta["fcoll"].after)]


def test_groups_are_sets_of_ranks_that_all_tell(ranks: Pools) -> None:
    for ((got, want, after),) in ranks(4).run(groups_without_a_mesh):
        close(got, want)
        assert after == 2


def results_are_no_views() -> tuple[list[float], list[float]]:
    mesh = fcoll.mesh(dp=2, tp=2)
    mapped: Any = fcoll.shard_map(lambda x: (x, x, fcoll.all_reduce(x, "dp", "max")), mesh, (P(),), P())
    x = torch.ones(3)
    with fcoll.marked():
        graph = make_fx(lambda x: mapped(x))(x)
    out = fcoll.optimize(graph)(x)
    out[2].add_(1)
    out[0].add_(10)
    return x.tolist(), out[2].tolist()


def test_results_share_no_memory_with_arguments(ranks: Pools) -> None:
    assert ranks(4).run(results_are_no_views)[0] == ([1.0] * 3, [2.0] * 3)


def test_without_processes_nothing_happens() -> None:
    graph = make_fx(torch.sin)(torch.ones(2))
    assert fcoll.optimize(graph) is graph
    assert graph.meta["fcoll"] == fcoll.Plan("", 0, 0, ("there are no processes",))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"optimize: graph_module is a torch\.fx\.GraphModule, got function"):
        fcoll.optimize(mean)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="compile: optimize is True, False or None, got"):
        fcoll.compile(mean, optimize="yes")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"compile: optimize=True is for .*, got 'eager'; call fcoll\.optimize in"):
        fcoll.compile(mean, optimize=True, backend="eager")
    with pytest.raises(ValueError, match="got 'test_wrong_arguments_are_refused"):
        fcoll.compile(mean, optimize=True, backend=test_wrong_arguments_are_refused)


# ---- classes


def test_classes() -> None:
    rows, columns = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    by_row, by_column, varying = (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3)
    assert invariance.meet(by_row, by_column) == varying
    assert invariance.meet(by_row, (0, 0, 0, 0)) == by_row
    assert invariance.join(by_row, by_column) == (0, 0, 0, 0)
    assert invariance.join((0, 1, 1, 2), varying) == (0, 1, 1, 2)
    assert invariance.gathered(varying, rows, False) == by_row
    assert invariance.gathered(by_column, rows, False) == (0, 0, 0, 0)  # every row holds the same
    assert invariance.gathered(by_row, rows, False) == by_row
    assert invariance.gathered(by_column, rows, True) == by_column
    assert invariance.gathered((0, 1, 1, 0), rows, False) == by_row  # the same values, but in another order
    assert invariance.gathered((0, 0, 0, 0), ((0, 1, 2),), False) == (0, 0, 0, 1)  # the last rank takes no part
    assert invariance.alike(by_row, rows)
    assert not invariance.alike(by_row, columns)


def test_what_is_a_function_of_its_arguments() -> None:
    aten: Any = torch.ops.aten
    operation: Any
    for operation in (aten.add.Tensor, aten.mm.default, aten.convolution.default, aten.zeros.default, aten.select.int):
        assert invariance.function_of_arguments(operation), operation
    for operation in (
        aten.add_.Tensor, aten.rand_like.default, aten.bernoulli.default, aten.native_dropout.default,
        aten.empty_like.default, aten.new_empty.default, aten.native_batch_norm.default, aten.randperm.default,
        aten._assert_async.msg, torch.ops.fcoll.rank.default, torch.ops.fcoll.invariant.default, torch.add, mean,
    ):  # fmt: skip
        assert not invariance.function_of_arguments(operation), operation


def test_groups_must_fit_together() -> None:
    family = optimizing._family
    assert family([[0, 1], [0, 1], [2, 3], [2, 3]]) == [[0, 1], [2, 3]]
    assert family([[0, 1], [0, 1], [0, 1], [2, 3]]) is None
    assert family([[0, 1], [1, 0], [2, 3], [2, 3]]) is None


# ---- compiled


def network(w1: Tensor, w2: Tensor, x: Tensor, target: Tensor) -> Tensor:
    y = fcoll.all_reduce(torch.relu(x @ w1) @ w2, "tp")
    return fcoll.all_reduce((y - target).square().mean(), "dp", "mean")


SPECS = (P(None, "tp"), P("tp"), P("dp"), P("dp"))
SHAPES = ((4, 8), (8, 4), (6, 4), (6, 4))


def compiled(kinds: list[str]) -> list[tuple[str, Any, Any, list[fcoll.Plan]]]:
    mesh = fcoll.mesh(dp=2, tp=2)
    mapped: Any = fcoll.shard_map(network, mesh, SPECS, P())
    args = [draw(shape, seed) for seed, shape in enumerate(SHAPES)]
    everything = (0, 1, 2, 3)
    gradient, found = grad(mapped, everything), []
    direction = tuple(draw(shape, 9) for shape in SHAPES)

    def along(*args: Tensor) -> Any:
        return sum((g * d).sum() for g, d in zip(gradient(*args), direction, strict=True))

    plain, plans = optimizing.optimize, []

    def watched(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
        plans.append(plain(graph).meta["fcoll"])
        return graph

    vars(backends)["optimize"] = vars(optimizing)["optimize"] = watched
    try:
        for kind in kinds:
            torch.compiler.reset()
            del plans[:]
            how, _, name = kind.partition(" ")
            backend: Any = aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward)) if name == "own" else name
            options = {"optimize": None if how == "outside" else True, "backend": backend}
            if how == "second":
                got, want = fcoll.compile(grad(along, everything), **options)(*args), grad(along, everything)(*args)
            else:
                leaves = [arg.clone().requires_grad_() for arg in args]
                fcoll.compile(mapped, **options)(*leaves).backward()
                got, want = tuple(leaf.grad for leaf in leaves), gradient(*args)
            found.append((kind, got, want, list(plans)))
    finally:
        vars(backends)["optimize"] = vars(optimizing)["optimize"] = plain
    return found


def test_compile_applies_it(ranks: Pools) -> None:
    results = ranks(4).run(compiled, ["outside aot_eager", "second own"], timeout=100)
    for found in results:
        for kind, got, want, plans in found:
            close(got, want, kind)
            (plan,) = plans
            assert plan.after < plan.before, (kind, plan)


def local_labels() -> list[Any]:
    """What ranks do with a result outside of the map may differ: then so does its cotangent."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.compiler.reset()
    labels = torch.arange(3.0).double() + 10 * rank
    mapped: Any = fcoll.shard_map(lambda w: w * 2, fcoll.mesh(i=n), (P(),), P())
    loss: Any = fcoll.shard_map(
        lambda w, x: fcoll.all_reduce(((x @ w) ** 2).sum(), "i", "mean"), fcoll.mesh(i=n), (P(), P("i")), P()
    )
    x, w = draw((2 * n, 3)), draw((3,), 1)

    def outside(w: Tensor, weight: Tensor) -> Any:
        return (mapped(w) * labels).sum() * weight

    def weighed(w: Tensor, weight: Tensor) -> Any:
        return loss(w, x) * weight

    found = []
    for f, whole in ((outside, mapped), (weighed, lambda w: loss(w, x))):
        weight = torch.tensor(rank + 1.0, dtype=torch.float64)
        want = grad(f)(w, weight)
        leaf = w.clone().requires_grad_()
        y = fcoll.compile(whole, backend="aot_eager")(leaf)
        (y * labels * weight if y.ndim else y * weight).sum().backward()
        found.append((want, leaf.grad, fcoll.compile(grad(f), backend="aot_eager")(w, weight)))
    return found


def test_cotangents_from_outside_may_differ(ranks: Pools) -> None:
    for found in ranks(3).run(local_labels, timeout=60):
        for want, *got in found:
            close(got, [want] * len(got))


def by_inductor() -> tuple[Any, Any, str]:
    mapped: Any = fcoll.shard_map(lambda x: fcoll.all_reduce(x, "i"), fcoll.mesh(i=2), (P(),), P())
    x = draw((3,))
    torch.compiler.reset()
    got, code = run_and_get_code(fcoll.compile(mapped), x)
    for f in (  # what takes an own block, which inductor knows by another operation
        lambda x: fcoll.all_gather(fcoll.reduce_scatter(x, "i"), "i").sin(),
        lambda x: fcoll.scatter(x, "i", 1) + fcoll.all_to_all(x, "i", 0, 0).sum(0),
        lambda x: fcoll.split(fcoll.all_reduce(x * fcoll.axis_index("i"), "i"), "i"),
    ):
        own: Any = fcoll.shard_map(lambda x, f=f: fcoll.all_reduce(f(x).sum(), "i"), fcoll.mesh(i=2), (P(),), P())
        wide = draw((4, 4))
        close(fcoll.compile(grad(own))(wide), grad(own)(wide))
    return got, mapped(x), code[0]


@pytest.mark.timeout(120)
def test_compile_applies_it_for_inductor(ranks: Pools) -> None:
    for got, want, code in ranks(2).run(by_inductor, timeout=100):
        close(got, want)
        assert "all_reduce" not in code


def alone() -> list[Any]:
    """What only some ranks compile: none may wait for the others."""
    rank, x, found = dist.get_rank(), draw((4,)), []
    torch.compiler.reset()
    everyone = fcoll.mesh(dp=2, tp=2)
    assert isinstance(everyone, DeviceMesh)

    def compiled(f: Callable[..., Any], mesh: Any, *specs: P) -> Any:
        mapped = fcoll.shard_map(f, mesh, specs[0], specs[1])
        return fcoll.compile(mapped, backend="aot_eager")(x), mapped(x)

    if rank < 2:
        found.append(compiled(lambda x: fcoll.all_reduce(x, "tp"), everyone["tp"], P(), P()))
    if rank == 3:
        found.append(compiled(lambda x: x.sin(), everyone, P(), P()))
        found.append((fcoll.compile(torch.sin, backend="aot_eager")(x), x.sin()))
    return found


def test_a_rank_that_compiles_alone_waits_for_nobody(ranks: Pools) -> None:
    results = ranks(4).run(alone, timeout=60)
    assert [len(found) for found in results] == [1, 1, 0, 2]
    for found in results:
        for got, want in found:
            close(got, want)
