"""Every private torch name that fcoll needs, each with its reason. Tried on torch 2.13."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _functorch, _len_torch_dispatch_stack  # see `transforming`, `batched`, `tracing`
from torch._C._dynamo.eval_frame import set_eval_frame  # see `below`

Function = TypeVar("Function", bound=Callable[..., Any])


def with_own_code(f: Function) -> Function:
    """`f`, a closure, with a code object of its own.

    Dynamo counts recompilations per code object: closures of one `def` would share the limit, and a ninth would fail.
    """
    if not torch.compiler.is_compiling():
        f.__code__ = f.__code__.replace()
    return f


def process_group(name: str) -> dist.ProcessGroup:
    """The process group called `name`: a graph carries names, and torch has no public way back."""
    resolve: Callable[[str], dist.ProcessGroup] = vars(dist.distributed_c10d)["_resolve_process_group"]
    return resolve(name)


def world() -> dist.ProcessGroup:
    """The process group of all ranks, once there is one (public, but said to be None perhaps)."""
    group = dist.group.WORLD
    assert group is not None
    return group


def default_store() -> Any:
    """The store that the world was made with: torch has no public way to it."""
    return vars(dist.distributed_c10d)["_get_default_store"]()


def new_group(ranks: list[int]) -> dist.ProcessGroup:
    """A process group that its members make without the others, named by its ranks.

    torch's own (`dist.new_group` with `use_local_synchronization`) hides in the name how many groups a process is in
    already: members that are in different numbers of groups would wait for each other for good.
    """
    c10d: Any = dist.distributed_c10d
    default = world()
    backend, store = c10d._world.pg_map[default]
    made: dist.ProcessGroup
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend),
        store,
        "fcoll_" + "_".join(map(str, ranks)),
        timeout=c10d._get_default_timeout(backend),
        device_id=default.bound_device_id,
    )
    c10d._world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    return made


def allow_in_graph(f: Function) -> Function:
    """torch.compiler.allow_in_graph (public, without annotations)."""
    allowed: Function = torch.compiler.allow_in_graph(f)
    return allowed


def assume_constant_result(f: Function) -> Function:
    """torch.compiler.assume_constant_result (public, without annotations)."""
    constant: Function = torch.compiler.assume_constant_result(f)
    return constant


def unwrap_opaque(group: Any) -> Any:
    """Dynamo shows a DeviceMesh argument as an opaque stand-in; the mesh is behind it."""
    return getattr(group, "real_obj", group)


def tracing(x: torch.Tensor) -> bool:
    """Whether what is done to `x` is being recorded, by compile, export, make_fx or fake tensors."""
    return torch.compiler.is_compiling() or _len_torch_dispatch_stack() > 0 or type(x) not in _PLAIN


def unknown(x: torch.Tensor) -> torch.Tensor:
    """x, of whose value the tracer knows nothing.

    torch's tracers compute what follows from constants as they trace: a collective of `torch.tensor(1.0)` would
    communicate then, and its result would be part of the graph.
    """
    from torch._subclasses.functional_tensor import mb_unwrap_functional_tensor

    if getattr(mb_unwrap_functional_tensor(x), "constant", None) is None:
        return x
    return torch.cat((x.reshape(-1), torch.empty(0, dtype=x.dtype, device=x.device))).view(x.shape)


def traced_lines() -> list[tuple[str, int]]:
    """While a compiler traces: files and lines of the program that lead to the operation at hand, innermost last."""
    if _len_torch_dispatch_stack() == 0:
        return []
    from torch.fx import traceback

    found = re.findall(r'File "(.+)", line (\d+)', "".join(traceback.format_stack()))
    return [(file, int(line)) for file, line in found]


def transforming() -> bool:
    """Whether a torch.func transform or a forward-mode level is active."""
    return (
        _functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch.compiler.is_compiling()
    )


@assume_constant_result
def level() -> int:
    """How many torch.func transforms are active; in the methods of a Function, up to the one being applied."""
    current = _functorch.maybe_current_level()
    return 0 if current is None else int(current)


@assume_constant_result
def transforms() -> tuple[str, ...]:
    """The kinds of the active torch.func transforms, outermost first: "Grad", "Jvp", "Vmap"."""
    kinds = tuple(interpreter.key().name for interpreter in _functorch.get_interpreter_stack() or ())
    return (*kinds, "Jvp") if torch.autograd.forward_ad._current_level >= 0 and "Jvp" not in kinds else kinds


def vmap_level() -> int | None:
    """The level of the innermost transform, if that is a vmap."""
    innermost = _functorch.peek_interpreter_stack()
    return innermost.level() if innermost is not None and innermost.key() == _functorch.TransformType.Vmap else None


def differentiated_again() -> Any:
    """To be entered in the `jvp` of a Function: what is done there is differentiated by the transforms around.

    torch turns forward mode off there, and with it that of the levels outside: jvp of jvp would miss a term. What was
    saved must be stripped of its tangent of this level then, see `primal`.
    """
    return torch.autograd.forward_ad._set_fwd_grad_enabled(True)


def primal(x: torch.Tensor) -> torch.Tensor:
    """x without its tangent of the innermost forward mode (public, but for the level, of which there is one only)."""
    stripped: torch.Tensor = torch.autograd.forward_ad.unpack_dual(x, level=0).primal
    return stripped


class below:
    """Out of the innermost transform, a vmap: its rules are applied here, without the detour by an autograd.Function
    that torch makes, which costs four times as much.

    Dynamo, which leaves code alone where a transform is active, must not find that none is.
    """

    def __enter__(self) -> None:
        self.callback = set_eval_frame(None)
        self.layer = _functorch.pop_dynamic_layer_stack()

    def __exit__(self, *_: object) -> None:
        _functorch.push_dynamic_layer_stack(self.layer)
        set_eval_frame(self.callback)


def unbatch(x: torch.Tensor, level: int) -> tuple[torch.Tensor, int | None]:
    """The tensor below the vmap of that level, and which axis of it that maps; None if it maps none."""
    x = _functorch.unwrap_if_dead(x)  # saved in a transform that has ended since
    unwrapped: tuple[torch.Tensor, int | None] = _functorch._unwrap_batched(x, level)
    return unwrapped


def batch(x: torch.Tensor, axis: int, level: int) -> torch.Tensor:
    """The tensor that the vmap of that level sees, if it maps `axis`."""
    from torch._functorch.predispatch import _add_batch_dim  # the one that torch.export records

    mapped: torch.Tensor = _add_batch_dim(x, axis, level)
    return mapped


def is_operator(target: Any) -> bool:
    """Whether what a node of a graph calls is an operator of torch or of a library."""
    return isinstance(target, torch._ops.OpOverload)


def is_mutable(target: Any) -> bool:
    """Whether it is one that writes into an argument. Batch norms write their statistics and do not say so."""
    if not is_operator(target):
        return False
    name = target._schema.name
    unsaid = "batch_norm" in name and not any(part in name for part in ("_legit", "functional", "backward"))
    return unsaid or bool(target._schema.is_mutable)


def is_higher_order(target: Any) -> bool:
    """Whether it is one that takes graphs, such as cond."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def out_of_place(target: Any) -> Any:
    """What makes a new tensor where an operation writes into its first argument and returns that; None for others."""
    if not is_operator(target) or target.namespace != "aten" or not target._schema.name.endswith("_"):
        return None
    written = [
        argument.alias_info is not None and argument.alias_info.is_write for argument in target._schema.arguments
    ]
    packet = getattr(torch.ops.aten, target._schema.name.removeprefix("aten::")[:-1], None)
    other = getattr(packet, target._overloadname, None)
    plain = is_operator(other) and not is_mutable(other) and not is_view(other)
    return other if plain and written[0] and not any(written[1:]) else None


def is_view(target: Any) -> bool:
    """Whether it is one whose result may share memory with an argument; getitem takes apart what such a one gives."""
    return not is_operator(target) or any(each.alias_info is not None for each in target._schema.returns)


def mode_options(mode: str | None) -> dict[str, Any]:
    """What a mode of torch.compile means for inductor (public, without annotations)."""
    from torch._inductor import list_mode_options

    options: dict[str, Any] = list_mode_options(mode) if mode and mode != "default" else {}
    return options


def passes(given: Any) -> list[Any]:
    """Inductor's option for passes over graphs, which is one, several or None, as a list."""
    return list(given) if isinstance(given, (list, tuple)) else [given] if given is not None else []


def graph_pass(rewrite: Callable[[torch.fx.GraphModule], Any], version: str | None) -> Any:
    """A pass for inductor; what is compiled of what it makes is cached under its version, None for never."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            assert graph.owning_module is not None
            rewrite(graph.owning_module)

        def uuid(self) -> str | None:
            return version

    return Pass()


@functools.cache  # graphs are kept by backend
def with_joint_pass(backend: Any, rewrite: Callable[[torch.fx.GraphModule], Any]) -> Any:
    """A backend that AOTAutograd feeds, with a pass over its graph before it cuts that into forward and backward.

    None for other backends: torch has no place for such a pass in general.
    """
    from torch._dynamo.backends import common, debugging
    from torch._functorch import partitioners

    if backend == "aot_eager":
        given: dict[str, Any] = {
            "fw_compiler": debugging.boxed_nop,
            "bw_compiler": debugging.boxed_nop,
            "partition_fn": partitioners.min_cut_rematerialization_partition,
            "keep_inference_input_mutations": True,
        }
    elif isinstance(backend, common.AotAutograd):
        given = dict(backend.kwargs)
    else:
        return None
    cut = given.get("partition_fn") or partitioners.default_partition
    alone = given.get("inference_compiler") or given["fw_compiler"]

    def partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return cut(rewrite(joint), *args, **kwargs)

    def compiler(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return alone(rewrite(graph), *args, **kwargs)

    return common.aot_autograd(**{**given, "partition_fn": partition, "inference_compiler": compiler})


def fake_result(like: Any, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What an operation gives for the fake tensors of a graph; `like` is one of them."""
    mode = like.fake_mode

    def adopted(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.fake_mode is mode:  # type: ignore[attr-defined]
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)  # make_fx has a mode for each

    with mode:
        args, kwargs = torch.utils._pytree.tree_map(adopted, (args, kwargs))
        return target(*args, **kwargs)


def keep_in_order(op: Any) -> None:
    """Let compilers neither drop an operation nor move it past another that is kept in order."""
    from torch._library.effects import EffectType

    op.register_effect(EffectType.ORDERED)


def batched(x: torch.Tensor) -> bool:
    """Whether `x` carries the batch axis of the innermost vmap (public torch shows no batch axes)."""
    return bool(_functorch.is_batchedtensor(x) and _functorch.maybe_get_level(x) == level())


def hint(size: Any) -> int:
    """A size as it is now: `int` would tie a compiled graph to it where it is a symbol."""
    from torch.fx.experimental.symbolic_shapes import guarding_hint_or_throw

    return int(guarding_hint_or_throw(size)) if isinstance(size, torch.SymInt) else int(size)


def possible(condition: Any) -> bool:
    """Whether `condition`, on sizes that may be symbols, can hold: True where nobody can know it yet."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return bool(guard_or_true(condition))


def holds(condition: Any) -> bool:
    """Whether `condition` holds; where nobody can know it yet, it is asserted when the graph runs."""
    if not possible(condition):
        return False
    torch._check(condition)  # documented, whatever it is called
    return True


def in_a_batch(x: torch.Tensor) -> bool:
    """Whether a vmap, at whatever level, gives `x` several values."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def hides_dtensor(x: torch.Tensor) -> bool:
    """Whether `x` is a DTensor that a torch.func transform has wrapped."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return "DTensor" in type(x).__name__


@contextmanager
def plain() -> Iterator[None]:
    """Out of reach of the modes around it, which would trace what is done here, or want fake tensors."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def tracked(x: torch.Tensor) -> bool:
    """Whether a torch.func transform takes the gradient with respect to what `x` comes from."""
    return bool(_functorch.is_gradtrackingtensor(x))


@contextmanager
def fakes() -> Iterator[None]:
    """Make fake tensors of what is made here, out of reach of the modes and transforms around it."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        temporarily_clear_interpreter_stack(),
        _disable_current_modes(),
        torch.random.fork_rng(devices=[]),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def observed(operations: Container[Any], tell: Callable[[], None]) -> Any:
    """A context in which each call of one of these operations is told, by whatever it is made."""
    from torch.utils._python_dispatch import TorchDispatchMode  # documented, without a public place

    class Observer(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in operations:
                tell()
            return func(*args, **(kwargs or {}))

    return Observer()  # type: ignore[no-untyped-call]


def into_compiled() -> Any:
    """A context in which make_fx records what a compiled function does; torch refuses, unless its config says so."""
    from torch._dynamo import config

    return config.patch(error_on_nested_fx_trace=False)


def mark_cacheable(names: Sequence[str], version: str) -> None:
    """Let torch's compile caches keep graphs that hold these functions, as long as `version` is the same."""
    from torch._inductor import config

    config.unsafe_marked_cacheable_functions.update(dict.fromkeys(names, version))


def restart_trace(reason: str) -> None:
    """If Dynamo is tracing the caller, let it start again: something that it has read is no longer true."""
    if torch.compiler.is_compiling():
        from torch._dynamo.exc import UnspecializeRestartAnalysis

        raise UnspecializeRestartAnalysis(restart_reason=reason)  # the one that forgets the trace


def traced_error(kind: type[Exception]) -> type[Exception]:
    """`kind`, in a form that Dynamo lets through.

    Dynamo turns an exception of traced code into its own `Unsupported`, but re-raises an `Unsupported` as it is; a
    class that is both reaches the caller of the compiled function as the error that eager code would have given.
    """
    from torch._dynamo.exc import Unsupported

    def __init__(self: Exception, message: str) -> None:
        Unsupported.__init__(self, message)  # type: ignore[arg-type]

    return type(kind.__name__, (kind, Unsupported), {"__init__": __init__, "__module__": kind.__module__})


def backend_error(error: Exception) -> Exception:
    """The error of a backend, in a form that Dynamo and inductor let through; see `traced_error`."""
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)

    def __init__(self: Exception, message: str) -> None:
        ShortenTraceback.__init__(self, message, first_useful_frame=None)  # type: ignore[arg-type]

    def __reduce__(self: Exception) -> Any:  # elsewhere it is the plain one
        return kind, (str(self),), {"__notes__": getattr(self, "__notes__", [])}

    members = {"__init__": __init__, "__reduce__": __reduce__, "__module__": kind.__module__}
    passing: Exception = type(kind.__name__, (kind, ShortenTraceback), members)(str(error))
    for note in getattr(error, "__notes__", ()):
        passing.add_note(note)
    return passing


_PLAIN = (torch.Tensor, torch.nn.Parameter)
