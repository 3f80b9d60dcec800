"""What fcoll takes for granted of torch without a promise. A new torch that breaks fcoll breaks these first."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import Pools
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll import _torch, backends
from fcoll.testing import Ranks

NAMES = [
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._functorch.get_interpreter_stack",
    "torch._C._functorch.maybe_current_level",
    "torch._C._functorch.maybe_get_level",
    "torch._C._functorch.is_batchedtensor",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.get_unwrapped",
    "torch._C._functorch.unwrap_if_dead",
    "torch._C._functorch._unwrap_batched",
    "torch._C._functorch.pop_dynamic_layer_stack",
    "torch._C._functorch.push_dynamic_layer_stack",
    "torch._C._functorch.TransformType",
    "torch._C._dynamo.eval_frame.set_eval_frame",
    "torch._functorch.predispatch._add_batch_dim",
    "torch._C._len_torch_dispatch_stack",
    "torch.autograd.forward_ad._current_level",
    "torch.autograd.forward_ad._set_fwd_grad_enabled",
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "torch.distributed.distributed_c10d._get_default_timeout",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._inductor.config.unsafe_marked_cacheable_functions",
    "torch._library.effects.EffectType",
    "torch._ops.OpOverload",
    "torch._ops.HigherOrderOperator",
    "torch._inductor.list_mode_options",
    "torch._dynamo.config.error_on_nested_fx_trace",
    "torch._inductor.custom_graph_pass.CustomGraphPass",
    "torch._dynamo.backends.common.AotAutograd",
    "torch._dynamo.backends.debugging.boxed_nop",
    "torch._functorch.partitioners.default_partition",
    "torch._functorch.partitioners.min_cut_rematerialization_partition",
    "torch.utils._pytree.tree_map",
    "torch._dynamo.exc.Unsupported",
    "torch._dynamo.exc.UnspecializeRestartAnalysis",
    "torch._dynamo.exc.ShortenTraceback",
    "torch.ops._c10d_functional.all_reduce",
    "torch.ops._c10d_functional.all_gather_into_tensor",
    "torch.ops._c10d_functional.reduce_scatter_tensor",
    "torch.ops._c10d_functional.all_to_all_single",
    "torch.ops._c10d_functional.broadcast",
    "torch.ops._c10d_functional.wait_tensor",
]


def test_forward_mode_goes_on_in_the_jvp_of_a_function() -> None:
    """torch turns it off there, at all levels: that is why fcoll turns it on, and strips what it has saved."""

    class Cube(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x**3

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            ctx.save_for_forward(*inputs)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            with _torch.differentiated_again():
                x = _torch.primal(ctx.saved_tensors[0])
                return tangent * 3 * x**2

    cube: Any = Cube.apply
    jacfwd: Any = torch.func.jacfwd
    x = torch.tensor(2.0)
    assert [f(x).item() for f in (jacfwd(cube), jacfwd(jacfwd(cube)), jacfwd(jacfwd(jacfwd(cube))))] == [12, 12, 6]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.tensor(1.0))
        assert torch.autograd.forward_ad.unpack_dual(cube(dual)).tangent.item() == 12


def test_the_rule_of_a_vmap_can_be_applied_by_hand() -> None:
    """Down a level, what is saved in a transform that has ended included, and up again."""
    assert _torch.vmap_level() is None
    seen: list[Any] = []

    def f(x: Tensor, y: Tensor) -> Tensor:
        level = _torch.vmap_level()
        assert level is not None
        kept: list[Tensor] = []
        torch.func.grad(lambda z: kept.append(z * 1) or z.sum())(x)  # type: ignore[func-returns-value]
        torch.func.grad(lambda z: seen.append(_torch.vmap_level()) or z.sum())(x)  # type: ignore[func-returns-value]
        (a, dim), (b, none), (c, other) = (_torch.unbatch(value, level) for value in (x, y, kept[0]))
        with _torch.below():
            seen.extend([_torch.vmap_level(), dim, none, other is not None, a.shape, c.numel()])
            total = a.movedim(dim or 0, 0).sum(0) * b
        return _torch.batch(torch.stack([total, 2 * total]), 0, level)

    x = torch.arange(6.0).view(3, 2)
    y: Tensor = torch.func.vmap(f, in_dims=(1, None))(x, torch.tensor(10.0))
    assert seen == [None, None, 1, None, True, x.shape, 6]
    assert y.tolist() == [[10 * v for v in x.sum(1).tolist()], [20 * v for v in x.sum(1).tolist()]]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_exists(name: str) -> None:
    __import__("torch._inductor.config")
    __import__("torch._dynamo.exc")
    __import__("torch._functorch.pyfunctorch")
    __import__("torch._functorch.predispatch")
    __import__("torch._library.effects")
    __import__("torch._inductor.custom_graph_pass")
    __import__("torch._dynamo.backends.debugging")
    __import__("torch._functorch.partitioners")
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    assert found is not None


def test_all_names_of_the_file_are_listed() -> None:
    source = inspect.getsource(_torch)
    private = {name.split(".")[-1] for name in NAMES if "torch.ops" not in name}
    for name in private:
        assert name in source, f"{name} is no longer used"


def test_transforming_sees_every_transform() -> None:
    seen: list[bool] = []

    def f(x: Tensor) -> Tensor:
        seen.append(_torch.transforming())
        return x.sin().sum()

    x = torch.ones(2)
    f(x)
    torch.func.grad(f)(x)
    torch.func.vmap(f)(torch.ones(2, 2))
    torch.func.jvp(f, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        f(x)
    f(x)
    assert seen == [False, True, True, True, True, False]


def test_tracing_sees_every_tracer() -> None:
    seen: list[bool] = []

    def f(x: Tensor) -> Tensor:
        seen.append(_torch.tracing(x))
        return x.sin()

    f(torch.ones(2))
    f(torch.nn.Parameter(torch.ones(2)))
    make_fx(f)(torch.ones(2))
    make_fx(f, tracing_mode="fake")(torch.ones(2))
    with torch._subclasses.fake_tensor.FakeTensorMode():
        f(torch.ones(2))
    assert seen == [False, False, True, True, True]


def test_batched_knows_the_innermost_vmap() -> None:
    seen: list[bool] = []

    def inner(x: Tensor, y: Tensor) -> Tensor:
        seen.extend([_torch.batched(x), _torch.batched(y), _torch.batched(torch.ones(1)), _torch.batched(x + y)])
        return x + y

    torch.func.vmap(lambda y: torch.func.vmap(lambda x: inner(x, y))(torch.ones(2)))(torch.ones(3))
    assert seen == [True, False, False, True]
    seen.clear()
    torch.func.vmap(lambda x: torch.func.grad(lambda y: inner(x, y))(x))(torch.ones(2))
    assert not any(seen)  # the innermost level is the gradient's


def test_in_a_batch_knows_every_vmap() -> None:
    seen: list[bool] = []

    def inner(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        seen.extend([_torch.in_a_batch(x), _torch.in_a_batch(y), _torch.in_a_batch(z)])
        return x * z

    def outer(y: Tensor) -> Any:
        return torch.func.vmap(lambda x: torch.func.grad(lambda z: inner(x, y, z))(torch.ones(())))(torch.ones(2))

    torch.func.vmap(outer)(torch.ones(3))
    assert seen == [True, True, False]


def test_possible_and_holds_of_what_nobody_knows() -> None:
    """A size that comes out of a tensor may be anything, and no graph is tied to it; what must hold is asserted."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def f(x: Tensor, sizes: Tensor) -> tuple[Tensor, list[bool]]:
        size, rows = sizes.tolist()[0], x.shape[0]
        may_be = [_torch.possible(size == 3), _torch.possible(rows == 2), _torch.possible(rows == 5)]
        return x.new_zeros(size), [*may_be, _torch.holds(size >= 3), _torch.holds(rows == 5)]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run: Any = torch.compile(f, fullgraph=True, backend=backend)
        for size in (3, 4):
            y, seen = run(torch.ones(2), torch.tensor([size]))
            assert len(y) == size
            assert seen == [True, True, False, True, False]
        with pytest.raises(RuntimeError, match="Runtime assertion failed"):
            run(torch.ones(2), torch.tensor([2]))
    assert len(graphs) == 1
    assert [_torch.possible(True), _torch.possible(False), _torch.holds(True), _torch.holds(False)] == [True, False] * 2


def test_level_counts_transforms() -> None:
    seen: list[int] = []

    def f(x: Tensor) -> Tensor:
        seen.append(_torch.level())
        return x

    f(torch.ones(2))
    torch.func.vmap(f)(torch.ones(2))
    torch.func.vmap(torch.func.vmap(f))(torch.ones(2, 2))
    torch.func.vmap(torch.func.grad(lambda x: f(x)))(torch.ones(2))
    assert seen == [0, 1, 2, 2]


def test_transforms_are_told_apart() -> None:
    seen: list[tuple[str, ...]] = []

    def f(x: Tensor) -> Tensor:
        seen.append(_torch.transforms())
        return x.sin()

    x = torch.tensor(1.0)
    f(x)
    torch.func.vmap(torch.func.grad(f))(torch.ones(2))
    torch.func.grad(lambda x: torch.func.jvp(f, (x,), (x,))[1])(x)
    with torch.autograd.forward_ad.dual_level():
        f(x)
    torch.compiler.reset()
    torch.compile(torch.func.grad(f), fullgraph=True, backend="eager")(x)
    assert seen == [(), ("Vmap", "Grad"), ("Grad", "Jvp"), ("Jvp",), ("Grad",)]


def test_operations_kept_in_order_are_neither_dropped_nor_moved() -> None:
    """With nothing but the mark to tell that they matter."""
    made: list[float] = []

    @torch.library.custom_op("fcoll_tests::note", mutates_args=())
    def note(x: Tensor, number: int) -> Tensor:
        made.append(number)
        return x.clone()

    @note.register_fake
    def _(x: Tensor, number: int) -> Tensor:
        return torch.empty_like(x)

    def f(x: Tensor) -> Any:
        first = note(x * 2, 1)
        note(x, 2)
        last = note(x, 3)
        return last + first

    for keep in (False, True):
        if keep:
            _torch.keep_in_order(note)
        torch.compiler.reset()
        made.clear()
        torch.compile(f, fullgraph=True, backend="aot_eager")(torch.ones(1))
        assert sorted(made) == ([1, 2, 3] if keep else [1, 3]), keep
    assert made == [1, 2, 3]


def test_the_token_of_a_vmap_is_batched_where_the_vmap_is() -> None:
    """A Function's vmap rule sees, level by level from the innermost, which arguments that level has batched."""
    seen: list[tuple[Any, ...]] = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, token: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor, token: Tensor) -> Any:
            seen.append((info.batch_size, *in_dims))
            return Spy.apply(x, token), in_dims[0]  # type: ignore[no-untyped-call]

    def named(token: Tensor) -> Any:
        return torch.func.vmap(lambda x: Spy.apply(x, token))(torch.ones(5, 1))  # type: ignore[no-untyped-call]

    torch.func.vmap(named)(torch.arange(3))
    assert seen == [(5, 0, None), (3, None, 0)]


def test_names_lead_to_process_groups(ranks: Pools) -> None:
    def f() -> bool:
        world = _torch.world()
        return _torch.process_group(world.group_name) is world is dist.group.WORLD

    assert ranks(2).run(f) == [True, True]


def test_a_new_group_needs_its_members_only() -> None:
    def f() -> list[float]:
        if dist.get_rank() == 1:
            return []
        made = _torch.new_group([0, 2])
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=made)
        x.add_(made.rank())
        return [*x.tolist(), *map(float, dist.get_process_group_ranks(made))]

    with Ranks(3) as own:
        assert own.run(f) == [[2.0, 0.0, 2.0], [], [3.0, 0.0, 2.0]]


def test_fakes_are_out_of_reach_of_what_is_around() -> None:
    def f(x: Tensor) -> Tensor:
        with _torch.fakes():
            y = torch.ones(3)
            assert "Fake" in type(y).__name__
            assert not torch._C._functorch.is_functorch_wrapped_tensor(y)
        return x

    torch.func.vmap(torch.func.grad(lambda x: f(x)))(torch.ones(2))


@pytest.mark.parametrize("kind", [ValueError, TypeError, NameError])
def test_dynamo_lets_the_errors_through(kind: type[Exception]) -> None:
    @_torch.allow_in_graph
    def refuse(x: Tensor) -> Tensor:
        raise _torch.traced_error(kind)("the message")

    torch.compiler.reset()
    with pytest.raises(kind, match="the message"):
        torch.compile(lambda x: refuse(x) + 1, fullgraph=True, backend="eager")(torch.ones(1))


def test_dynamo_starts_again_when_asked() -> None:
    runs: list[int] = []

    @_torch.assume_constant_result
    def once() -> bool:
        runs.append(1)
        if len(runs) == 1:
            _torch.restart_trace("for the test")
        return True

    torch.compiler.reset()
    assert torch.compile(lambda x: x + once(), fullgraph=True, backend="eager")(torch.ones(1)).tolist() == [2]
    assert len(runs) == 2


def test_dynamo_keeps_the_vmap_rule_of_a_function_that_it_does_not_trace() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
            return 2 * x, in_dims[0]

    @_torch.allow_in_graph
    def apply(x: Tensor) -> Tensor:
        out: Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]
        return out

    torch.compiler.reset()
    run = torch.compile(torch.func.vmap(lambda x: apply(x)), fullgraph=True, backend="aot_eager")
    assert run(torch.ones(3)).tolist() == [2, 2, 2]


def test_closures_have_code_of_their_own() -> None:
    def make() -> Callable[[], int]:
        return lambda: 1

    assert make().__code__ is make().__code__
    assert _torch.with_own_code(make()).__code__ is not make().__code__


def test_marked_functions_are_known_to_the_cache() -> None:
    from torch._inductor import config

    with config.patch(unsafe_marked_cacheable_functions={}):
        _torch.mark_cacheable(["a.b"], "1")
        assert config.unsafe_marked_cacheable_functions == {"a.b": "1"}
    assert "a.b" not in config.unsafe_marked_cacheable_functions


def store_of_the_world() -> tuple[bytes, bool]:
    rank = dist.get_rank()
    clone = _torch.default_store().clone()
    clone.set_timeout(timedelta(seconds=30))
    clone.set(f"private/{rank}", str(rank))
    other = clone.get(f"private/{1 - rank}")  # waits for it
    verdicts = {bytes(clone.compare_set("private/verdict", "", str(rank))) for _ in range(2)}
    return other, len(verdicts) == 1


def test_the_store_of_the_world_can_be_cloned_and_decides(ranks: Pools) -> None:
    assert ranks(2).run(store_of_the_world) == [(b"1", True), (b"0", True)]


def test_lines_are_those_of_the_program_while_it_is_traced() -> None:
    seen: list[list[tuple[str, int]]] = []

    @_torch.allow_in_graph
    def look(x: Tensor) -> Tensor:
        seen.append(_torch.traced_lines())
        return x.sin()

    def f(x: Tensor) -> Tensor:
        return look(x)

    torch.compile(f, fullgraph=True, backend="aot_eager")(torch.ones(2))
    lines = {line for place in seen for file, line in place if file == __file__}
    assert f.__code__.co_firstlineno + 1 in lines
    assert _torch.traced_lines() == []


def test_what_traces_call_is_seen_before_it_is_in_the_graph() -> None:
    calls: list[str] = []
    sin, cos = torch.ops.aten.sin.default, torch.ops.aten.cos.default

    def f(x: Tensor) -> Tensor:
        with _torch.observed({sin, cos}, lambda: calls.append("one")):
            gradient: Tensor = torch.func.grad(lambda x: (x.sin() + 1).sum())(x)
            return gradient

    with _torch.fakes():
        graph = make_fx(f)(torch.ones(2)).graph
    assert len(calls) == sum(node.target in (sin, cos) for node in graph.nodes) == 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_errors_of_a_pass_reach_the_caller(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: Any) -> Any:
        error = fcoll.CommunicationError("the message")
        error.add_note("a note")
        raise error

    monkeypatch.setitem(vars(backends), "optimize", failing)
    with pytest.raises(fcoll.CommunicationError, match="the message") as found:
        fcoll.compile(torch.sin, backend=backend, optimize=True)(torch.ones(2))
    again = pickle.loads(pickle.dumps(found.value))
    assert type(again) is fcoll.CommunicationError
    assert str(again).startswith("the message")  # torch adds to it
    assert again.__notes__[0] == "a note"


def test_make_fx_records_what_compiled_functions_do() -> None:
    f = torch.compile(torch.sin, backend="aot_eager")
    with _torch.fakes(), torch.compiler.set_stance("force_eager"):
        with pytest.raises(RuntimeError, match="symbolically trace a dynamo-optimized function"):
            make_fx(lambda x: f(x))(torch.ones(2))
        with _torch.into_compiled():
            graph = make_fx(lambda x: f(x))(torch.ones(2)).graph
    assert torch.ops.aten.sin.default in [node.target for node in graph.nodes]


def test_operations_that_write_have_others_that_do_not() -> None:
    aten: Any = torch.ops.aten
    assert _torch.out_of_place(aten.masked_fill_.Scalar) == aten.masked_fill.Scalar
    assert _torch.out_of_place(aten.mul_.Tensor) == aten.mul.Tensor
    for target in (aten.mul.Tensor, aten.mul.out, aten.t_.default, aten.copy_.default, torch.mul):
        found = _torch.out_of_place(target)
        assert found is None or not _torch.is_mutable(found), target
    assert _torch.out_of_place(aten.t_.default) is None  # whose other one is a view
    assert _torch.is_higher_order(torch.ops.higher_order.cond)
    assert not _torch.is_higher_order(aten.mul.Tensor)
