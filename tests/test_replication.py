"""Results that a spec calls replicated are checked before anything runs: what varies, what does not, and when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from common import Pools, draw, grad
from places import Place, close_to, full, made, said, whole
from torch import Tensor

import fcoll
from fcoll import P, replication

DP, TP, BOTH = P("dp"), P("tp"), P(("dp", "tp"))


def remedy(what: str, name: str) -> str:
    return (
        f"shard_map: {what} is replicated over {name!r} by out_specs, but varies over it; reduce it, as with "
        f"fcoll.all_reduce(..., {name!r}), or put {name!r} into its spec"
    )


class Case(NamedTuple):
    f: Callable[..., Any]
    in_specs: Any
    out_specs: Any
    varies: str = ""  # over which axis, where a spec says that it does not
    what: str = "out"


def weight_gradient(x: Tensor, w: Tensor, *, vary: bool) -> Tensor:
    def loss(w: Tensor) -> Tensor:
        w = fcoll.vary(w, "dp") if vary else w
        return fcoll.all_reduce((w * x).sum(), "dp", invariant=True)

    g: Tensor = grad(loss)(w)
    return g


ROWS, ALL = fcoll.subgroups(("dp", "tp"), [[0, 1], [2, 3]]), fcoll.subgroups("dp", [[1, 0]])

CASES = {
    # what varies
    "an input that is cut": Case(lambda x, w: x, DP, P(), "dp"),
    "a part of a result": Case(lambda x, w: {"loss": (w, x.sum())}, (DP, P()), {"loss": P()}, "dp", "out['loss'][1]"),
    "one axis of two, the inner one": Case(lambda x, w: fcoll.all_reduce(x, "dp"), BOTH, P(), "tp"),
    "one axis of two, the outer one": Case(lambda x, w: fcoll.all_reduce(x, "tp"), BOTH, P(), "dp"),
    "an axis that the spec leaves out": Case(lambda x, w: x, P(("tp", "dp")), DP, "tp"),
    "a rank's index": Case(lambda x, w: x * fcoll.axis_index("dp"), P(), P(), "dp"),
    "a rank's index, over the other axis": Case(lambda x, w: x * fcoll.axis_index("tp"), P(), DP, "tp"),
    "a number from nowhere": Case(lambda x, w: fcoll.axis_index("tp"), P(), P(), "tp"),
    "random numbers": Case(lambda x, w: x + torch.rand(len(x)), P(), P(), "tp"),
    "random numbers like an input": Case(lambda x, w: torch.randn_like(x), P(), TP, "dp"),
    "dropout": Case(lambda x, w: torch.nn.functional.dropout(x, 0.1), P(), P(), "tp"),
    "reduce": Case(lambda x, w: fcoll.reduce(x, "dp"), DP, P(), "dp"),
    "gather": Case(lambda x, w: fcoll.gather(x, "dp"), DP, P(), "dp"),
    "scatter": Case(lambda x, w: fcoll.scatter(x, "dp"), P(), P(), "dp"),
    "split": Case(lambda x, w: fcoll.split(x, "dp"), P(), P(), "dp"),
    "vary": Case(lambda x, w: fcoll.vary(x, "dp"), P(), P(), "dp"),
    "shift": Case(lambda x, w: fcoll.shift(x, "dp"), DP, P(), "dp"),
    "reduce_scatter": Case(lambda x, w: fcoll.reduce_scatter(x, "dp"), DP, P(), "dp"),
    "all_to_all": Case(lambda x, w: fcoll.all_to_all(x, "dp"), DP, P(), "dp"),
    "a sum within subgroups": Case(lambda x, w: fcoll.all_reduce(x, ROWS), BOTH, P(), "tp"),
    "a gradient of a weight that counts on each rank": Case(
        lambda x, w: weight_gradient(x, w, vary=False), (DP, P()), P(), "dp"
    ),
    "a gradient of a mean, inside": Case(
        lambda x, w: grad(lambda w: fcoll.all_reduce((w * x).sum(), "dp", "mean"))(w), (DP, P()), P(), "dp"
    ),
    # what does not
    "an input that is not cut": Case(lambda x, w: x * 2, P(), P()),
    "nothing of the input": Case(lambda x, w: torch.ones(3), DP, P()),
    "a size": Case(lambda x, w: x.shape[0] * fcoll.axis_size("dp"), DP, P()),
    "all_reduce": Case(lambda x, w: fcoll.all_reduce(x, "dp"), DP, P()),
    "all_reduce over both, one by one": Case(lambda x, w: fcoll.all_reduce(fcoll.all_reduce(x, "tp"), "dp"), BOTH, P()),
    "all_reduce over both at once": Case(lambda x, w: fcoll.all_reduce(x, ("tp", "dp")), BOTH, P()),
    "all_reduce, of what does not vary over the other axis": Case(lambda x, w: fcoll.all_reduce(x * w, "tp"), TP, P()),
    "pmax, pmin": Case(lambda x, w: (fcoll.lax.pmax(x, "dp"), fcoll.lax.pmin(x, "dp")), DP, P()),
    "prod, mean, any": Case(lambda x, w: [fcoll.all_reduce(x, "dp", op) for op in ("prod", "mean", "any")], DP, P()),
    "invariant reductions": Case(
        lambda x, w: [fcoll.all_reduce(x, "dp", op, invariant=True) for op in ("sum", "mean", "max", "min", "prod")],
        DP, P(),
    ),
    "all_gather": Case(lambda x, w: fcoll.all_gather(x, "dp"), DP, P()),
    "all_gather, invariant": Case(lambda x, w: fcoll.all_gather(x, "dp", invariant=True), DP, P()),
    "broadcast": Case(lambda x, w: fcoll.broadcast(x, "dp"), DP, P()),
    "random numbers of one rank": Case(lambda x, w: fcoll.broadcast(torch.rand(3), ("dp", "tp")) * 0, P(), P()),
    "a gradient of a weight that counts once": Case(
        lambda x, w: weight_gradient(x, w, vary=True), (DP, P()), P()
    ),
    "a gradient that is summed": Case(
        lambda x, w: fcoll.all_reduce(grad(lambda w: (w * x).sum())(w), "dp"), (DP, P()), P()
    ),
    "each over the axis that its spec leaves out": Case(
        lambda x, w: (fcoll.all_reduce(x, "tp"), fcoll.all_reduce(x, "dp")), BOTH, (DP, TP)
    ),
}  # fmt: skip
ONCE = (  # compiled, which is slow
    "an input that is cut", "a part of a result", "one axis of two, the outer one", "random numbers", "vary",
    "a gradient of a mean, inside", "a gradient of a weight that counts once",
)  # fmt: skip


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_what_varies_and_what_does_not(place: Place, backend: str | None) -> None:
    def body(mesh: Any, backend: str | None) -> None:
        x, w = draw(8), draw(())
        for name in ONCE if backend else CASES:
            f, specs, out_specs, varies, what = CASES[name]
            in_specs = specs if isinstance(specs, tuple) else (specs, P())
            mapped = fcoll.shard_map(f, mesh, in_specs, out_specs)
            call = whole(mapped, backend)
            if varies:
                with pytest.raises(fcoll.CollectiveValueError) as raised:
                    call(x, w)
                assert said(raised.value) == remedy(what, varies), name
                fcoll.shard_map(f, mesh, in_specs, out_specs, check=False)(x, w)
            else:
                got, want = call(x, w), fcoll.shard_map(f, mesh, in_specs, out_specs, check=False)(x, w)
                close_to(got, full(want), name)

    place(body, backend, dp=2, tp=2)


def test_before_anything_runs(ranks: Pools) -> None:
    """On each rank, f is called once, on fake tensors, and no message leaves it; then the ranks work on."""

    def body() -> int:
        calls = []

        def f(x: Tensor) -> Tensor:
            calls.append(x)
            y = fcoll.all_reduce(x, "i")
            return y + fcoll.shift(x, "i")

        mapped = fcoll.shard_map(f, made(i=3), P("i"), P())
        for attempt in (1, 2, 3):
            with pytest.raises(fcoll.CollectiveValueError):
                mapped(torch.ones(6))
            assert len(calls) == attempt
            with pytest.raises(fcoll.CollectiveValueError):
                mapped(torch.ones(6).requires_grad_())
            calls.pop()
        torch.distributed.barrier()
        return int(fcoll.all_reduce(torch.tensor(1), fcoll.WORLD))

    pool = ranks(3)
    assert pool.run(body) == [3] * 3
    before = pool.pids
    text = remedy("out", "i")
    with pytest.raises(fcoll.CollectiveValueError) as raised:
        pool.run(lambda: fcoll.shard_map(lambda x: x, made(i=3), P("i"), P())(torch.ones(6)))
    assert str(raised.value) == text
    assert pool.pids == before
    assert pool.run(body) == [3] * 3


def test_f_is_evaluated_once_for_arguments_that_look_the_same(place: Place) -> None:
    def body(mesh: Any) -> None:
        calls = []

        def f(x: Tensor) -> Tensor:
            calls.append(x.shape)
            return fcoll.all_reduce(x.sum(), "i")

        mapped = fcoll.shard_map(f, mesh, P("i"), P())
        for size, evaluations in ((4, 1), (4, 0), (8, 1), (4, 0), (8, 0)):
            before = len(calls)
            mapped(torch.ones(size, 3))
            assert calls[before:] == [(size // 2, 3)] * (evaluations + 1)
        before = len(calls)
        mapped(torch.ones(4, 3, dtype=torch.int64))
        assert len(calls) == before + 2
        unchecked = fcoll.shard_map(f, mesh, P("i"), P(), check=False)
        before = len(calls)
        unchecked(torch.ones(2, 3))
        assert len(calls) == before + 1

    place(body, i=2)


def test_a_thousand_ranks_without_data() -> None:
    """The arguments would take a petabyte, were they there."""
    mesh = fcoll.virtual_mesh(dp=32, tp=32)
    assert mesh.size() == 1024

    def loss(w1: Tensor, w2: Tensor, x: Tensor) -> Tensor:
        y = fcoll.all_reduce(torch.relu(x @ w1) @ w2, "tp")
        return fcoll.all_reduce(y.square().mean(), "dp", "mean")

    size = 2**23
    args = [torch.zeros(()).expand(size, size) for _ in range(3)]
    assert sum(x.numel() * x.element_size() for x in args) > 0.8e15
    specs = (P(None, "tp"), P("tp"), P("dp"))
    wrong = fcoll.shard_map(lambda *args: {"y": loss(*args), "x": args[2]}, mesh, specs, {"y": P(), "x": P()})
    with pytest.raises(fcoll.CollectiveValueError) as raised:
        wrong(*args)
    assert str(raised.value) == remedy("out['x']", "dp")
    with pytest.raises(fcoll.CollectiveValueError) as raised:
        grad(lambda *args: wrong(*args)["y"])(*args)
    assert str(raised.value) == remedy("out['x']", "dp")

    shapes = ((4096, 2**20), (2**20, 4096), (2**15, 4096))
    y = fcoll.shard_map(loss, mesh, specs, P())(*(torch.empty(shape, device="meta") for shape in shapes))
    assert (y.shape, y.device.type) == ((), "meta")  # and where there is no data, f runs as well


def test_the_first_call_may_be_compiled(place: Place) -> None:
    def body(mesh: Any) -> None:
        mapped = fcoll.shard_map(lambda x: x * 2, mesh, P("i"), P())
        for call in (mapped, grad(lambda x: mapped(x).sum()), lambda x: torch.vmap(mapped)(x[None])):
            with pytest.raises(fcoll.CollectiveValueError) as raised:
                whole(call)(torch.ones(4))
            assert said(raised.value) == remedy("out", "i")

    place(body, i=2)


@dataclass
class Weights:
    a: Any


def test_where_compiled_code_cannot_check_it_says_so_once(ranks: Pools) -> None:
    def body() -> None:
        torch.compiler.reset()
        mesh = made(i=2)
        text = (
            "^shard_map: what out_specs says is replicated is not checked: it is made, or called with other "
            "containers than dicts, lists and tuples, in compiled code$"
        )

        def made_here(x: Tensor) -> Tensor:
            y: Tensor = fcoll.shard_map(lambda x: fcoll.all_reduce(x, "i"), mesh, P("i"), P())(x)
            return y

        with pytest.warns(UserWarning, match=text):
            close_to(whole(made_here)(torch.arange(4.0)), torch.tensor([2.0, 4.0]))
        close_to(whole(lambda x: made_here(x) + 1)(torch.arange(4.0)), torch.tensor([3.0, 5.0]))

        mapped = fcoll.shard_map(lambda w: fcoll.all_reduce(w.a, "i"), mesh, P("i"), P())
        with pytest.warns(UserWarning, match=text):
            close_to(whole(mapped)(Weights(torch.arange(4.0))), torch.tensor([2.0, 4.0]))
        close_to(whole(lambda w: mapped(w) + 1)(Weights(torch.arange(4.0))), torch.tensor([3.0, 5.0]))
        mapped(Weights(torch.arange(4.0)))  # which eager code checks
        wrong = fcoll.shard_map(lambda w: w.a, mesh, P("i"), P())
        with pytest.raises(fcoll.CollectiveValueError):
            wrong(Weights(torch.arange(4.0)))

    ranks(2).run(body)


def test_a_virtual_mesh_always_checks() -> None:
    """There the vmaps themselves know what varies."""
    mesh = fcoll.virtual_mesh(i=2)
    with pytest.raises(fcoll.CollectiveValueError) as raised:
        whole(lambda x: fcoll.shard_map(lambda x: x, mesh, P("i"), P())(x))(torch.ones(4))
    assert said(raised.value) == remedy("out", "i")
    with pytest.raises(fcoll.CollectiveValueError) as raised:
        whole(fcoll.shard_map(lambda w: w.a, mesh, P("i"), P()))(Weights(torch.ones(4)))
    assert said(raised.value) == remedy("out", "i")


def test_an_f_that_needs_data_runs_on_processes_and_warns_once(ranks: Pools) -> None:
    def body() -> None:
        def branches(x: Tensor) -> Tensor:
            return fcoll.all_reduce(x, "i") if x.sum() > -1 else x

        mapped = fcoll.shard_map(branches, made(i=2), P("i"), P())
        text = (
            r"^shard_map: what out_specs says is replicated is not checked: branches cannot be evaluated on fake "
            r"tensors \(RuntimeError: vmap: It looks like you're attempting to use a Tensor in some data-dependent"
        )
        with pytest.warns(UserWarning, match=text):
            close_to(mapped(torch.arange(4.0)), torch.tensor([2.0, 4.0]))
        close_to(mapped(torch.arange(4.0)), torch.tensor([2.0, 4.0]))  # a warning would be an error
        close_to(mapped(torch.arange(6.0)), torch.tensor([3.0, 5.0, 7.0]))
        close_to(grad(lambda x: mapped(x).sum())(torch.arange(4.0)), torch.ones(4))
        unchecked = fcoll.shard_map(branches, made(i=2), P("i"), P(), check=False)
        close_to(unchecked(torch.arange(4.0)), torch.tensor([2.0, 4.0]))

    ranks(2).run(body)


def test_an_f_that_needs_data_is_torchs_error_on_a_virtual_mesh() -> None:
    mapped = fcoll.shard_map(lambda x: x if x.sum() > 0 else -x, fcoll.virtual_mesh(i=2), P("i"), P("i"))
    with pytest.raises(RuntimeError, match=r"^vmap: It looks like you're attempting to use a Tensor in some data"):
        mapped(torch.arange(4.0))


@pytest.mark.filterwarnings("error")
def test_an_error_of_f_is_its_own(place: Place) -> None:
    def body(mesh: Any) -> None:
        def f(x: Tensor, y: Tensor) -> Tensor:
            raise KeyError("on purpose")

        with pytest.raises(KeyError, match="on purpose"):
            fcoll.shard_map(f, mesh, P("i"), P())(torch.ones(4), torch.ones(4))
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
            fcoll.shard_map(f, mesh, P("i"), P())(torch.ones(4))  # type: ignore[call-arg]
        with pytest.raises(fcoll.CollectiveValueError, match=r"^broadcast: src=7 is not a rank of 'i'"):
            fcoll.shard_map(lambda x: fcoll.broadcast(x, "i", src=7), mesh, P("i"), P())(torch.ones(4))
        with pytest.raises(NameError, match=r"^all_reduce: axis name 'j' is not bound; bound here: \['i'\]\n"):
            fcoll.shard_map(lambda x: fcoll.all_reduce(x, "j"), mesh, P("i"), P())(torch.ones(4))

    place(body, i=2)


def test_random_numbers_are_those_without_the_check(place: Place) -> None:
    def body(mesh: Any) -> None:
        def f(x: Tensor) -> Tensor:
            return x + torch.rand(2)

        torch.manual_seed(3)
        want = fcoll.shard_map(f, mesh, P("i"), P("i"), check=False)(torch.zeros(4))
        torch.manual_seed(3)
        close_to(fcoll.shard_map(f, mesh, P("i"), P("i"))(torch.zeros(4)), full(want))

    place(body, i=2)


def test_what_f_closes_over(place: Place) -> None:
    """Tensors and modules that f brings along are the same on all ranks."""

    def body(mesh: Any) -> None:
        net = torch.nn.Linear(3, 2, dtype=torch.float64).requires_grad_(False)
        net.load_state_dict({"weight": draw((2, 3)), "bias": draw(2)})
        scale = draw(2, 3)
        x = draw((4, 3))
        mapped = fcoll.shard_map(
            lambda x: (fcoll.all_reduce((net(x) * scale).sum(), "i"), net.weight, scale + 1), mesh, P("i"), P()
        )
        close_to(mapped(x), ((net(x) * scale).sum(), net.weight, scale + 1))
        close_to(grad(lambda x: mapped(x)[0])(x), grad(lambda x: (net(x) * scale).sum())(x))

    place(body, i=2)


def test_within_other_named_axes(place: Place) -> None:
    """The axes around the map are known to the check; so are their sizes."""

    def body(mesh: Any) -> None:
        def f(x: Tensor) -> Tensor:
            return fcoll.all_gather(fcoll.all_reduce(x, "i") / fcoll.axis_size("j"), "j")

        good = fcoll.shard_map(f, mesh, P("i"), P())
        bad = fcoll.shard_map(lambda x: fcoll.all_reduce(x, "j"), mesh, P("i"), P())
        for n in (2, 3):
            x = torch.arange(4.0 * n).view(n, 4)
            want = (x.view(n, 2, 2).sum(1) / n).flatten().expand(n, 2 * n)
            close_to(fcoll.vmap(good, axis_name="j")(x), want)
            close_to(whole(fcoll.vmap(good, axis_name="j"))(x), want)
            for call in (fcoll.vmap(bad, axis_name="j"), whole(fcoll.vmap(bad, axis_name="j"))):
                with pytest.raises(fcoll.CollectiveValueError) as raised:
                    call(x)
                assert said(raised.value) == remedy("out", "i")

    place(body, i=2)


def test_a_check_goes_with_its_map() -> None:
    """A map that is made anew in each step leaves nothing behind."""
    gc.collect()
    before = len(replication._runs), len(replication._verified)

    def f(x: Tensor) -> Tensor:
        return fcoll.all_reduce(x, "i")

    mapped = fcoll.shard_map(f, fcoll.virtual_mesh(i=2), P("i"), P())
    mapped(torch.ones(2))
    gone = weakref.ref(mapped)
    assert len(replication._runs) == before[0] + 1
    del mapped
    gc.collect()
    assert gone() is None
    assert (len(replication._runs), len(replication._verified)) == before
