"""fcoll.testing: the pool of ranks, the substrates, the adjoint identity."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fcoll
from fcoll.testing import Emulated, Processes, Ranks, Substrate, check_adjoint

Pools = Callable[[int], Ranks]


@pytest.fixture
def pool() -> Iterator[Ranks]:
    """A pool of its own, for tests that damage it."""
    with Ranks(3, timeout=30) as ranks:
        yield ranks


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure, wait for all other ranks, however slow."""
    monkeypatch.setattr("fcoll._pool.GRACE", 60.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure, wait for other ranks no longer than it takes to see that somebody does."""
    monkeypatch.setattr("fcoll._pool.GRACE", 0.5)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = pathlib.Path(f"/proc/{pid}/stat")  # a process that has ended may still wait to be reaped
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


# ---- the pool: what works


def test_results_come_by_rank(ranks: Pools) -> None:
    assert ranks(3).run(dist.get_rank) == [0, 1, 2]
    assert ranks(3).run(dist.get_world_size) == [3, 3, 3]


def test_arguments_of_one_rank_come_first(ranks: Pools) -> None:
    got = ranks(2).run(lambda *args: args, "all", per_rank=[(1, "a"), (2,)])
    assert got == [(1, "a", "all"), (2, "all")]


def test_closures_and_local_classes_travel(ranks: Pools) -> None:
    class Box:
        def __init__(self, value: int) -> None:
            self.value = value

    ten = 10
    got = ranks(2).run(lambda: Box(ten + dist.get_rank()))
    assert [type(box) for box in got] == [Box, Box]
    assert [box.value for box in got] == [10, 11]


def test_the_ranks_are_one_world(ranks: Pools) -> None:
    def total(x: float) -> torch.Tensor:
        y = torch.tensor(x)
        dist.all_reduce(y)
        return y

    assert ranks(4).run(total, per_rank=[(1.0,), (2.0,), (3.0,), (4.0,)]) == [torch.tensor(10.0)] * 4


def test_tensors_keep_strides_dtype_and_requires_grad(ranks: Pools) -> None:
    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t().requires_grad_()
    for y in ranks(2).run(lambda x: x, x):
        torch.testing.assert_close(y, x)
        assert y.stride() == (1, 3)
        assert y.requires_grad


def test_processes_live_from_call_to_call(ranks: Pools) -> None:
    first = ranks(2).run(os.getpid)
    assert ranks(2).run(os.getpid) == first == ranks(2).pids


def test_ranks_have_the_callers_warning_filters(ranks: Pools) -> None:
    def warn() -> str:
        with warnings.catch_warnings(record=True) as seen:
            warnings.warn("a word of warning", FutureWarning, stacklevel=1)
        return str(seen[0].message) if seen else ""

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert ranks(2).run(warn) == ["a word of warning"] * 2
        warnings.filterwarnings("ignore", "a word")
        assert ranks(2).run(warn) == ["", ""]
        warnings.filterwarnings("error", category=FutureWarning)
        with pytest.raises(FutureWarning, match="a word of warning"):
            ranks(2).run(warn)


def test_pools_do_not_collide(ranks: Pools) -> None:
    with Ranks(2) as a, Ranks(2) as b:
        assert a.run(dist.get_rank) == b.run(dist.get_rank) == [0, 1]
        assert not set(a.pids) & set(b.pids)


# ---- the pool: what fails


@pytest.mark.usefixtures("impatient")
def test_an_exception_keeps_its_type_and_brings_its_traceback(pool: Ranks) -> None:
    def culprit() -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("by rank 1")
        dist.barrier()

    with pytest.raises(ZeroDivisionError, match="by rank 1") as caught:
        pool.run(culprit)
    assert "raised on rank 1" in notes(caught.value)
    assert "in culprit" in notes(caught.value)
    assert "ranks 0, 2 had not answered" in notes(caught.value)
    assert pool.run(dist.get_rank) == [0, 1, 2]


def test_an_exception_of_a_local_class_keeps_its_type(ranks: Pools) -> None:
    class Odd(Exception):
        pass

    def f() -> None:
        raise Odd("local")

    with pytest.raises(Odd, match="local"):
        ranks(2).run(f)


def test_an_exception_that_cannot_be_rebuilt_is_told_in_words(ranks: Pools) -> None:
    class Particular(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} and {b}")

    def f() -> None:
        raise Particular(1, 2)

    with pytest.raises(RuntimeError, match="Particular: 1 and 2"):
        ranks(2).run(f)


def test_an_exit_on_a_rank_does_not_exit_the_caller(ranks: Pools) -> None:
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        ranks(2).run(sys.exit, 3)


def test_a_result_that_cannot_travel_is_an_error(ranks: Pools) -> None:
    with pytest.raises(TypeError, match="pickle"):
        ranks(2).run(lambda: (x for x in [1]))


def test_a_function_that_cannot_travel_is_an_error(ranks: Pools) -> None:
    generator = (x for x in [1])
    with pytest.raises(TypeError, match="pickle"):
        ranks(2).run(lambda: generator)
    assert ranks(2).run(dist.get_rank) == [0, 1]


@pytest.mark.usefixtures("patient")
def test_the_first_failure_is_the_one_that_is_raised(pool: Ranks, tmp_path: pathlib.Path) -> None:
    def f(flag: pathlib.Path) -> None:
        if dist.get_rank() == 2:
            flag.touch()
            raise LookupError("first")
        while not flag.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        raise OSError("later")

    with pytest.raises(LookupError, match="first") as caught:
        pool.run(f, tmp_path / "flag")
    assert "ranks 0, 1 failed too: OSError: later" in notes(caught.value)


@pytest.mark.usefixtures("patient")
def test_when_all_ranks_raise_they_live_on(pool: Ranks) -> None:
    inputs: dict[str, int] = {}
    pids = pool.run(os.getpid)
    for _ in range(2):
        with pytest.raises(KeyError, match="bad input"):
            pool.run(lambda: inputs["bad input"])
    assert pool.run(os.getpid) == pids


@pytest.mark.usefixtures("impatient")
def test_when_all_ranks_raise_out_of_step_they_are_replaced(pool: Ranks) -> None:
    def f() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3), async_op=True)
        raise ValueError("halfway")

    pids = pool.run(os.getpid)
    with pytest.raises(ValueError, match="halfway"):
        pool.run(f)
    assert not any(map(alive, pids))
    assert pool.run(lambda: float(fcoll.all_reduce(1.0, fcoll.WORLD))) == [3.0] * 3


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_dies_is_named_and_not_its_peers(pool: Ranks) -> None:
    def f() -> None:
        if dist.get_rank() == 1:
            os._exit(7)
        dist.barrier()

    with pytest.raises(RuntimeError, match="rank 1 died with exit code 7"):
        pool.run(f)
    assert pool.run(dist.get_rank) == [0, 1, 2]


def test_a_rank_that_dies_between_calls_is_replaced(pool: Ranks) -> None:
    pids = pool.run(os.getpid)
    with contextlib.suppress(ProcessLookupError):  # raised once it has been reaped
        while True:
            os.kill(pids[0], signal.SIGKILL)
            time.sleep(0.01)
    assert pool.run(dist.get_rank) == [0, 1, 2]
    assert not any(map(alive, pids))


def test_a_rank_that_hangs_is_named_with_its_stack(pool: Ranks) -> None:
    def linger() -> None:
        if dist.get_rank() == 1:
            time.sleep(600)

    pids = pool.run(os.getpid)
    with pytest.raises(TimeoutError, match=r"no answer after 3 s from rank 1 of 3") as caught:
        pool.run(linger, timeout=3)
    assert "in linger" in notes(caught.value)
    assert not any(map(alive, pids))
    assert pool.run(dist.get_rank) == [0, 1, 2]


def test_ranks_that_wait_for_one_another_are_named(pool: Ranks) -> None:
    def mismatched() -> None:
        if dist.get_rank() != 2:
            dist.barrier()

    pool.run(dist.get_rank)
    with pytest.raises(TimeoutError, match="ranks 0, 1 of 3") as caught:
        pool.run(mismatched, timeout=3)
    assert notes(caught.value).count("in mismatched") == 2


def test_an_interrupted_call_leaves_no_process_behind(pool: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    pids = pool.run(os.getpid)
    with monkeypatch.context() as patch:
        patch.setattr("fcoll._pool._World._collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.run(time.sleep, 600)
    assert not any(map(alive, pids))
    assert pool.run(dist.get_rank) == [0, 1, 2]


def test_no_process_is_left_after_close() -> None:
    ranks = Ranks(2)
    assert ranks.pids == []
    pids = ranks.run(os.getpid)
    assert pids == ranks.pids
    ranks.close()
    assert not any(map(alive, pids))
    assert ranks.pids == []
    assert ranks.run(os.getpid) != pids  # a closed pool starts again
    ranks.close()
    ranks.close()


def test_no_process_outlives_the_parent(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\n"
        "from fcoll.testing import Ranks\n"
        "def busy():\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    ranks = Ranks(2)\n"
        "    print(*ranks.run(os.getpid), flush=True)\n"
        "    ranks.run(busy)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        parent.kill()
    while any(map(alive, pids)):  # the limit of the test is the limit of the wait
        time.sleep(0.05)


def test_bad_arguments_of_a_pool(ranks: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at least one rank, got n=0"):
        Ranks(0)
    with pytest.raises(ValueError, match="needs 2 tuples, one for each rank, got 1"):
        ranks(2).run(dist.get_rank, per_rank=[()])
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match=r"fcoll\[launch\]"):
        Ranks(2)


def test_an_unknown_backend_is_an_error_of_the_first_run() -> None:
    with Ranks(2, backend="pigeon") as ranks:
        with pytest.raises(AssertionError, match="Unknown backend type pigeon"):
            ranks.run(dist.get_rank)
        assert ranks.pids == []


# ---- the substrates


@pytest.fixture(params=["emulated", "gloo"])
def small(request: pytest.FixtureRequest, ranks: Pools) -> Substrate:
    """Two ranks, for what takes a compilation."""
    return Emulated(2) if request.param == "emulated" else Processes(ranks(2))


def rows(n: int, *shape: int) -> torch.Tensor:
    """A stack in which every element differs."""
    return torch.arange(1.0, 1 + n * torch.Size(shape).numel(), dtype=torch.float64).reshape(n, *shape)


def weighted(group: Any, tree: Any) -> Any:
    """Rank-dependent, non-linear, with an integer leaf on each side."""
    y = fcoll.all_reduce(tree["x"] ** 2, group) * (1 + fcoll.axis_index(group))
    return {"y": y, "k": fcoll.all_reduce(tree["k"], group)}


def check_map(substrate: Substrate, compile: str | None) -> None:
    n = substrate.n
    x, k = rows(n, 2), torch.arange(n)
    got = substrate.map(weighted, {"x": x, "k": k}, compile=compile)
    ranks = torch.arange(1, n + 1)[:, None]
    assert set(got) == {"y", "k"}
    torch.testing.assert_close(got["y"], (x**2).sum(0) * ranks)
    torch.testing.assert_close(got["k"], k.sum().expand(n))


def test_map(substrate: Substrate) -> None:
    check_map(substrate, None)


@pytest.mark.parametrize("compile", ["aot_eager", "inductor"])
def test_map_compiled(small: Substrate, compile: str) -> None:
    check_map(small, compile)


def test_map_of_several_arguments_numbers_and_none(substrate: Substrate) -> None:
    n = substrate.n
    x, y = rows(n), rows(n, 2)
    got = substrate.map(lambda group, a, b: (a + b, None, [fcoll.axis_size(group)]), x, y)
    torch.testing.assert_close(got[0], x[:, None] + y)
    assert got[1] is None
    torch.testing.assert_close(got[2], [torch.full((n,), n)])


def test_map_without_arguments(substrate: Substrate) -> None:
    got = substrate.map(lambda group: fcoll.axis_index(group))
    torch.testing.assert_close(got, torch.arange(substrate.n))


def check_vjp(substrate: Substrate, how: Any, compile: str | None) -> None:
    n = substrate.n
    x, c = rows(n, 2), rows(n, 2) / 7
    got = substrate.vjp(weighted, {"x": x, "k": torch.arange(n)}, {"y": c, "k": None}, how=how, compile=compile)
    assert got["k"] is None
    ranks = torch.arange(1, n + 1)[:, None]
    torch.testing.assert_close(got["x"], 2 * x * (c * ranks).sum(0))


@pytest.mark.parametrize("how", ["func", "backward"])
def test_vjp(substrate: Substrate, how: Any) -> None:
    check_vjp(substrate, how, None)


@pytest.mark.parametrize("how", ["func", "backward"])
def test_vjp_compiled(small: Substrate, how: Any) -> None:
    check_vjp(small, how, "aot_eager")


def check_jvp(substrate: Substrate, compile: str | None) -> None:
    n = substrate.n
    x, t = rows(n, 2), rows(n, 2) / 7
    out, tangent = substrate.jvp(weighted, {"x": x, "k": torch.arange(n)}, {"x": t, "k": None}, compile=compile)
    assert tangent["k"] is None
    ranks = torch.arange(1, n + 1)[:, None]
    torch.testing.assert_close(out["y"], (x**2).sum(0) * ranks)
    torch.testing.assert_close(out["k"], torch.arange(n).sum().expand(n))
    torch.testing.assert_close(tangent["y"], (2 * x * t).sum(0) * ranks)


def test_jvp(substrate: Substrate) -> None:
    check_jvp(substrate, None)


def test_jvp_compiled(small: Substrate) -> None:
    check_jvp(small, "aot_eager")


@pytest.mark.parametrize("compile", [None, "aot_eager"])
def test_errors_keep_their_type(small: Substrate, compile: str | None) -> None:
    with pytest.raises(fcoll.CollectiveValueError, match="axis"):
        small.map(lambda group, x: fcoll.all_gather(x, group, 7), rows(2, 3), compile=compile)


@pytest.mark.parametrize("how", ["func", "backward"])
def test_vjp_of_what_does_not_depend_on_the_input_is_zero(substrate: Substrate, how: Any) -> None:
    x = rows(substrate.n)
    got = substrate.vjp(lambda group, x: torch.ones(2, dtype=x.dtype), x, rows(substrate.n, 2), how=how)
    torch.testing.assert_close(got, torch.zeros_like(x))


def test_processes_can_be_fewer_than_the_pool(ranks: Pools) -> None:
    part = Processes(ranks(4), m=3)
    assert part.n == 3
    got = part.map(lambda group, x: fcoll.all_reduce(x, group), rows(3))
    torch.testing.assert_close(got, torch.full((3,), 6.0, dtype=torch.float64))
    with pytest.raises(ValueError, match="m=5 is not between 1 and the 4 ranks"):
        Processes(ranks(4), m=5)


def test_bad_arguments_of_a_substrate(substrate: Substrate) -> None:
    n = substrate.n
    with pytest.raises(ValueError, match=f"size {n + 1}|size {n} along axis 0"):
        substrate.map(lambda group, x: x, rows(n + 1))
    with pytest.raises(ValueError, match="1 tangents or cotangents for 2 leaves"):
        substrate.vjp(lambda group, x: (x, x), rows(n), rows(n))
    with pytest.raises(ValueError, match='"func" or "backward"'):
        substrate.vjp(lambda group, x: x, rows(n), rows(n), how="sideways")  # type: ignore[arg-type]


def test_results_that_differ_in_structure(ranks: Pools) -> None:
    with pytest.raises(ValueError, match="differ in structure"):
        Processes(ranks(2)).map(lambda group: [torch.ones(())] * (1 + dist.get_rank()))


# ---- the adjoint identity


def on(substrate: Substrate, f: Callable[[Any, Any], Any], inputs: Any, **options: Any) -> None:
    """check_adjoint where the substrate runs; f takes the group first."""
    if isinstance(substrate, Processes):

        def check(group: Any, tree: Any) -> torch.Tensor:
            check_adjoint(lambda x: f(group, x), tree, group, **options)
            return torch.zeros(())

        substrate.map(check, inputs)
    else:
        check_adjoint(lambda x: f("ranks", x), inputs, "ranks", **options)


RIGHT: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda group, x: fcoll.all_reduce(x, group),
    "all_gather": lambda group, x: fcoll.all_gather(x, group, 1),
    "all_to_all": lambda group, x: fcoll.all_to_all(x, group, 0, 1),
    "broadcast": lambda group, x: fcoll.broadcast(x, group, 1),
    "max": lambda group, x: fcoll.all_reduce(x, group, "max"),
    "a function around one": lambda group, x: torch.sin(fcoll.all_reduce(x**2, group)) * x.sum(),
    "no communication": lambda group, x: x.cumsum(0),
    "a declared pair": lambda group, x: fcoll.all_reduce(fcoll.vary(x, group), group, invariant=True),
    "a constant": lambda group, x: torch.ones(2, dtype=x.dtype),
}


@pytest.mark.parametrize("f", RIGHT.values(), ids=RIGHT)
def test_the_identity_holds(substrate: Substrate, f: Callable[[Any, Any], Any]) -> None:
    on(substrate, f, rows(substrate.n, 12, 2) / 50)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128])
def test_the_identity_holds_in_each_dtype(substrate: Substrate, dtype: torch.dtype) -> None:
    stack = torch.randn(substrate.n, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    on(substrate, lambda group, x: fcoll.all_reduce(x, group) * x, stack)


def test_the_identity_holds_on_trees_with_integers(substrate: Substrate) -> None:
    n = substrate.n
    tree = {"x": rows(n, 2), "k": (torch.arange(n), torch.arange(n) > 0), "z": rows(n).to(torch.complex128)}

    def f(group: Any, tree: Any) -> Any:
        total = fcoll.all_reduce(tree["x"] * tree["z"], group)
        return [total, fcoll.all_reduce(tree["k"][0], group), None, tree["k"][1]]

    on(substrate, f, tree)


def careless(x: torch.Tensor, group: Any) -> Any:
    return Careless.apply(x, group)  # type: ignore[no-untyped-call]


class CarelessStack(torch.autograd.Function):
    """The emulated counterpart of `Careless`: a sum over axis 0 whose VJP forgets to sum."""

    @staticmethod
    def forward(stack: torch.Tensor) -> torch.Tensor:
        return stack.sum(0).expand(stack.shape).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        return cotangent

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent.sum(0).expand(tangent.shape).clone()


class Careless(torch.autograd.Function):
    """An all_reduce whose VJP is the identity where it has to be an all_reduce."""

    @staticmethod
    def forward(x: torch.Tensor, group: Any) -> torch.Tensor:
        return fcoll.all_reduce(x, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        return cotangent, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> torch.Tensor:
        return fcoll.all_reduce(tangent, ctx.group)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, group: Any) -> Any:
        return CarelessStack.apply(x.movedim(in_dims[0], 0)), 0  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("patient")
def test_the_identity_finds_a_wrong_derivative(substrate: Substrate) -> None:
    with pytest.raises(AssertionError, match=r"not the transpose .* Σ⟨ȳ, J t⟩ = .*relative error") as caught:
        on(substrate, lambda group, x: careless(x, group), rows(substrate.n, 3))
    if isinstance(substrate, Processes):
        assert notes(caught.value).count("not the transpose") == substrate.n  # every rank raises


@pytest.mark.parametrize("n", [2, 4])
def test_both_places_of_differentiation_are_checked(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = rows(n, 3)
    with pytest.raises(AssertionError, match=r"axis 'i' of .*from outside the map"):
        check_adjoint(lambda x: careless(x, "i"), stack, "i")
    monkeypatch.setattr(CarelessStack, "backward", lambda ctx, c: c.sum(0).expand(c.shape))
    with pytest.raises(AssertionError, match=r"axis 'i' of .*inside the map"):
        check_adjoint(lambda x: careless(x, "i"), stack, "i")


def test_a_declared_transpose_is_not_one_in_this_sense(substrate: Substrate) -> None:
    stack = rows(substrate.n, 3)
    with pytest.raises(AssertionError):
        on(substrate, lambda group, x: fcoll.all_reduce(x, group, invariant=True), stack)


def test_nan_is_no_agreement(substrate: Substrate) -> None:
    with pytest.raises(AssertionError, match="nan"):
        on(substrate, lambda group, x: x * float("nan"), rows(substrate.n, 3))


def test_tolerances_can_be_given(substrate: Substrate) -> None:
    def f(group: Any, x: Any) -> Any:
        return careless(x, group)

    on(substrate, f, rows(substrate.n, 3), atol=1e6)
    on(substrate, f, rows(substrate.n, 3), rtol=1e6)


def test_bad_inputs_of_check_adjoint() -> None:
    with pytest.raises(ValueError, match="axis 'i': inputs are tensors with the ranks along axis 0"):
        check_adjoint(lambda x: x, (torch.ones(2), torch.ones(3)), "i")
    with pytest.raises(ValueError, match="axis 'i': inputs are tensors with the ranks along axis 0"):
        check_adjoint(lambda x: x, (), "i")
    with pytest.raises(ValueError, match="no tensor of floating-point"):
        check_adjoint(lambda x: x, torch.arange(3), "i")


def test_substrates_have_names(ranks: Pools) -> None:
    assert repr(Emulated(3)) == "Emulated(3)"
    assert repr(Processes(ranks(4), m=2)) == "Processes(2)"
