"""`shard_map`: a function of each rank's pieces, mapped over a mesh into a function of global values.

On a virtual mesh it is a nest of vmaps, one per mesh axis; on a mesh of processes every rank runs f once on its own
pieces. Both differentiate, from outside, as the one global function that they are. What lets a group of processes do
that stands at the border of the map: a replicated input enters through `vary`, whose transpose sums its cotangents,
and a replicated result leaves through `unvary`, whose transpose shares its one cotangent out among the ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, NoReturn, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fcoll import _torch, axes, groups, marks, meshes, recorder, replication, trees
from fcoll.bind import bind
from fcoll.engine import SIMULATED
from fcoll.errors import beyond_int64, check_flag, fail
from fcoll.maps import replicated, unvarying
from fcoll.meshes import Mesh, Shape
from fcoll.specs import Entries, P, from_ranks, spelled, to_ranks

Params = ParamSpec("Params")
Result = TypeVar("Result")
Output = TypeVar("Output", covariant=True)


class Mapped(Protocol[Params, Output]):
    """What `shard_map` returns."""

    __name__: str

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Output:
        """The result for global values, which are given by position."""

    def on(self, mesh: Mesh) -> Mapped[Params, Output]:
        """The same map over another mesh."""


@overload
def shard_map(
    f: Callable[Params, Result],
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    *,
    check: bool = True,
) -> Mapped[Params, Result]: ...
@overload  # for lambdas, where mypy gives up on the first one
def shard_map(
    f: Callable[..., Any], mesh: Mesh | None = None, in_specs: Any = None, out_specs: Any = None, *, check: bool = True
) -> Mapped[..., Any]: ...
@overload
def shard_map(
    f: None = None, mesh: Mesh | None = None, in_specs: Any = None, out_specs: Any = None, *, check: bool = True
) -> Callable[[Callable[Params, Result]], Mapped[Params, Result]]: ...
def shard_map(
    f: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    *,
    check: bool = True,
) -> Any:
    """Map `f`, a program for one rank, over a mesh: global values in, global values out.

    Per rank: f sees, of each argument, the block that its spec gives to this rank, and the mesh's axis names are
    bound as groups. The results are put together as their specs say.

    Gradients from outside are exact: those of the global function. Inside f they follow the rules of each collective.

    Args:
        f: a function of trees of tensors. Without it, a decorator is returned.
        mesh: a VirtualMesh or a DeviceMesh. Without it, `mapped.on(mesh)` gives it later.
        in_specs: a tuple, one entry per argument: `P`s, or trees of them that are prefixes of the argument. A single
            `P` is for all arguments. None is `P()`.
        out_specs: the same for what f returns. An axis name that a spec leaves out says that the result is the same
            on all ranks along it.
        check: verify that, before anything runs, by evaluating f on fake tensors. False takes your word.

    Returns:
        A function of global values. On a VirtualMesh these are plain tensors. On a DeviceMesh an argument is a
        DTensor (redistributed to its spec) or a plain tensor that holds the whole value on each rank; a result is a
        plain tensor where its spec is fully replicated, and a DTensor elsewhere (inside a torch.func transform, which
        cannot return one, the whole value as a plain tensor).

    Raises:
        ValueError: a size that the mesh does not divide, an unknown axis name, a spec that is no prefix or has more
            entries than the tensor has axes, a result that varies over an axis that its spec leaves out, a DTensor on
            another mesh. All name the leaf, before any communication.
        TypeError: a leaf that is no tensor or number, something else than a spec or a mesh.

    Example:
        >>> mesh = fcoll.mesh(dp=2, tp=2)
        >>> @fcoll.shard_map(mesh=mesh, in_specs=(fcoll.P("dp", "tp"), fcoll.P("tp")), out_specs=fcoll.P("dp"))
        ... def matvec(a, x):
        ...     return fcoll.all_reduce(a @ x, "tp")
        >>> matvec(torch.ones(4, 6), torch.ones(6))
        tensor([6., 6., 6., 6.])
    """
    if f is None:
        return functools.partial(shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check)
    if not callable(f):
        fail("type", "shard_map: f is a function, got {}; a mesh goes second", type(f).__name__)
    check_flag("shard_map", "check", check)
    if mesh is None:
        return _unplaced(f, in_specs, out_specs, check)
    shape = meshes.shape_of("shard_map", mesh)
    for name, spec in (("in_specs", in_specs), ("out_specs", out_specs)):
        _check_names(shape, name, spec)
    job = _job(f, shape, in_specs, out_specs, check)

    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        return _call(job, mesh, args)

    mapped.on = functools.partial(_on, f, in_specs, out_specs, check)  # type: ignore[attr-defined]
    if job.label:
        replication.keep_with(mapped, job.label)
    return _torch.with_own_code(mapped)


def _unplaced(f: Callable[..., Any], in_specs: Any, out_specs: Any, check: bool) -> Any:
    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        fail("value", "shard_map: {} has no mesh yet; call {}.on(mesh)(...)", *[getattr(f, "__name__", "f")] * 2)

    mapped.on = functools.partial(_on, f, in_specs, out_specs, check)  # type: ignore[attr-defined]
    return mapped


def _on(f: Callable[..., Any], in_specs: Any, out_specs: Any, check: bool, mesh: Mesh) -> Any:
    return shard_map(f, mesh, in_specs, out_specs, check=check)


class _Job(NamedTuple):
    """A shard_map without its arguments."""

    f: Callable[..., Any]
    shape: Shape
    in_specs: Any
    out_specs: Any
    check: bool
    label: str = ""  # of the check

    def __reduce__(self) -> Any:  # the label is known to this process only
        return _arrived, self[:-1]


def _job(f: Callable[..., Any], shape: Shape, in_specs: Any, out_specs: Any, check: bool) -> _Job:
    job = _Job(f, shape, in_specs, out_specs, check)
    return job._replace(label=replication.enlist(getattr(f, "__name__", "f"), _fake_run(job))) if check else job


def _arrived(f: Callable[..., Any], shape: Shape, in_specs: Any, out_specs: Any, check: bool) -> _Job:
    """The job in another process. Meshes of processes do not travel."""
    meshes.register(meshes.VirtualMesh(shape.axis_names, shape.sizes))
    return _job(f, shape, in_specs, out_specs, check)


class _Leaf(NamedTuple):
    """What a message needs to know of a leaf."""

    what: str  # "args" or "out"
    tree: Any
    place: int

    def fail(self, kind: str, template: str, *details: object, about: str = "") -> None:
        fail(kind, "shard_map: {} " + template, trees.path(self.tree, self.place, self.what), *details, about=about)


def _call(job: _Job, mesh: Mesh, args: tuple[Any, ...]) -> Any:
    leaves, structure = trees.flatten(args)
    entries = _spread("in_specs", job.in_specs, args, len(leaves))
    for i, leaf in enumerate(leaves):
        leaves[i] = _checked(job.shape, _Leaf("args", args, i), leaf, entries[i])
    unchecked = replication.verify(job.label, entries, args, leaves) if job.check else ""
    if not job.shape.processes and not recorder.active():  # whose vmaps check themselves
        return _on_virtual(job, leaves, structure, entries, _torch.level())
    outside = _torch.level()
    if job.check and outside and not recorder.active() and not torch.compiler.is_compiling():
        _refuse_tracked(job.f)
    out = _on_processes(job, mesh, leaves, structure, entries, outside)
    if unchecked:  # said now, since f, with data, may have run into the same error
        replication.warn(job.label, unchecked)
    return out


def _on_virtual(job: _Job, leaves: list[Tensor], structure: Any, entries: list[Entries], outside: int) -> Any:
    """Every mesh axis is a vmap level, the first one outermost."""
    names, sizes = job.shape.axis_names, job.shape.sizes
    used = [{name for entry in spec for name in entry} for spec in entries]
    returned: list[Any] = []

    def level(depth: int, values: Sequence[Tensor]) -> list[Tensor]:
        if depth == len(names):
            out = job.f(*trees.unflatten(structure, list(values)))
            flat, out_structure = trees.flatten(out)
            specs = _spread("out_specs", job.out_specs, out, len(flat))
            flat = [_result(_Leaf("out", out, i), y, specs[i]) for i, y in enumerate(flat)]
            returned[:] = [out, out_structure, specs]
            return flat
        name, n = names[depth], sizes[depth]
        kinds: list[str] = []
        once: list[Tensor] = []  # not through the vmap: torch refuses what an outer one has batched

        def body(token: Tensor, *inner: Tensor) -> list[Tensor]:
            with axes.bound([axes.Named(name, n, token, "", outside)]):
                flat = level(depth + 1, inner)
            kinds[:] = [_kind(job, name, y, spec) for y, spec in zip(flat, returned[2], strict=True)]
            once[:] = [_replicated(returned[0], i, y, name) for i, y in enumerate(flat) if kinds[i] == "once"]
            return [y for y, k in zip(flat, kinds, strict=True) if k != "once"]

        in_dims = [0 if name in names_of else None for names_of in used]
        run = torch.func.vmap(body, in_dims=(0, *in_dims), randomness="different")
        device = values[0].device if values else None
        stacks, single = iter(run(torch.arange(n, device=device), *values)), iter(once)
        results = []
        for k in kinds:
            y = next(single) if k == "once" else next(stacks)
            results.append(share(y, n) if k == "claimed" else y)
        return results

    pieces = [to_ranks(x, spec, names, sizes) for x, spec in zip(leaves, entries, strict=True)]
    flat = level(0, pieces)
    _, out_structure, specs = returned
    return trees.unflatten(out_structure, [from_ranks(y, s, names) for y, s in zip(flat, specs, strict=True)])


def _kind(job: _Job, name: str, y: Tensor, spec: Entries) -> str:
    """How a result leaves the vmap of one name: "cut" along it, "once" for all its ranks, or "claimed" to be so."""
    if any(name in entry for entry in spec):
        return "cut"
    return "once" if job.check or not (torch.compiler.is_compiling() or _torch.batched(y)) else "claimed"


def _replicated(out: Any, i: int, y: Tensor, name: str) -> Tensor:
    if unvarying(y):
        return y
    return replicated(
        y,
        "shard_map: {} is replicated over {!r} by out_specs, but varies over it; reduce it, as with "
        "fcoll.all_reduce(..., {!r}), or put {!r} into its spec",
        trees.path(out, i, "out"), name, name, name,
    )  # fmt: skip


@_torch.allow_in_graph
def share(stack: Tensor, n: int) -> Tensor:
    """One of n results that are claimed to be the same; its cotangent is shared out among them."""
    apply: Callable[..., Tensor] = _Share.apply
    return apply(stack, n) if stack.is_floating_point() or stack.is_complex() else stack.select(0, 0)


class _Share(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(stack: Tensor, n: int) -> Tensor:
        return stack.select(0, 0).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.n = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return (cotangent / ctx.n).expand(ctx.n, *cotangent.shape), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        with _torch.differentiated_again():
            return tangent.mean(0)


def _on_processes(
    job: _Job, mesh: Any, leaves: list[Tensor], structure: Any, entries: list[Entries], outside: int
) -> Any:
    """This rank's share of the work."""
    shape = job.shape
    local = [_enter(shape, mesh, x, spec) for x, spec in zip(leaves, entries, strict=True)]
    with axes.bound(meshes.named(shape, outside)):
        out = job.f(*trees.unflatten(structure, local))
    flat, out_structure = trees.flatten(out)
    specs = _spread("out_specs", job.out_specs, out, len(flat))
    flat = [_result(_Leaf("out", out, i), y, specs[i]) for i, y in enumerate(flat)]
    whole = outside > 0 or not shape.processes
    return trees.unflatten(out_structure, [_leave(shape, mesh, y, s, whole) for y, s in zip(flat, specs, strict=True)])


def _enter(shape: Shape, mesh: Any, x: Tensor, spec: Entries) -> Tensor:
    """The own block of a global value. Cut first: the transpose of `vary` then sums the small piece."""
    if isinstance(x, DTensor):
        x = _to_placements(shape, mesh, x, spec)
    else:
        x = _marked(shape, x, shape.axis_names)
        for axis, names in enumerate(spec):
            if names:
                x = bind("split", x, _along(shape, names), axis, True)
    replicated = _missing(shape, spec)
    if replicated and _differentiable(x):
        x = bind("vary", x, _along(shape, replicated), "sum")
    return x


def _leave(shape: Shape, mesh: Any, y: Tensor, spec: Entries, whole: bool) -> Tensor:
    """The global value of which y is this rank's block."""
    replicated = _missing(shape, spec)
    if replicated and _differentiable(y):
        y = bind("unvary", y, _along(shape, replicated))
    y = _marked(shape, y, replicated)
    if not any(spec):
        return y
    if whole:
        with recorder.paused():
            for axis, names in enumerate(spec):
                if names:
                    y = bind("all_gather_invariant", y, _along(shape, names), axis, True)
        return _marked(shape, y, shape.axis_names)
    for names in spec:
        if len(names) > 1:
            y = _reorder(shape, y, names, _in_mesh_order(shape, names))
    return DTensor.from_local(y, mesh, _placements(shape, spec), run_check=False)


def _marked(shape: Shape, x: Tensor, names: tuple[str, ...]) -> Tensor:
    """x, of which a graph is told that it is the same along these axes; see `marks`."""
    if not marks.wanted() or not names or not (shape.processes or recorder.active()):
        return x
    if torch.compiler.is_compiling():
        x = marks.uncached(x)
    key = SIMULATED + shape.key if recorder.active() else shape.key
    return bind("mark", x, _along(shape, names), meshes.ranks_along(key, names))


def _to_placements(shape: Shape, mesh: Any, x: DTensor, spec: Entries) -> Tensor:
    y: Tensor = x.redistribute(mesh, _placements(shape, spec)).to_local()
    for names in spec:
        if len(names) > 1:
            y = _reorder(shape, y, _in_mesh_order(shape, names), names)
    return y


def _reorder(shape: Shape, y: Tensor, have: tuple[str, ...], want: tuple[str, ...]) -> Tensor:
    """DTensor numbers blocks along several mesh axes in the mesh's order: exchange them if a spec has another."""
    if have == want:
        return y
    places = itertools.product(*[range(shape.sizes[shape.axis_names.index(name)]) for name in want])
    moves = []
    for block, place in enumerate(places):  # rank `block`, counted along `have`, has it; this one is to hold it:
        rank = 0
        for name in have:
            rank = rank * shape.sizes[shape.axis_names.index(name)] + place[want.index(name)]
        moves.append((block, rank))
    return bind("permute", y, _along(shape, have), tuple(moves))


def _placements(shape: Shape, spec: Entries) -> list[Any]:
    placements: list[Any] = [Replicate()] * len(shape.axis_names)
    for axis, names in enumerate(spec):
        for name in names:
            placements[shape.axis_names.index(name)] = Shard(axis)
    return placements


def _in_mesh_order(shape: Shape, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in shape.axis_names if name in names)


def _missing(shape: Shape, spec: Entries) -> tuple[str, ...]:
    return tuple(name for name in shape.axis_names if not any(name in entry for entry in spec))


def _along(shape: Shape, names: tuple[str, ...]) -> groups.Axis:
    """The group along some axes of the mesh, as the border of the map sees it: with declared transposes."""
    with axes.bound(meshes.named(shape)):
        return groups.resolve("shard_map", names)


def _differentiable(x: Tensor) -> bool:
    needed = _torch.transforming() or (x.requires_grad and torch.is_grad_enabled())
    return needed and (x.is_floating_point() or x.is_complex())


# Checks


def _fake_run(job: _Job) -> Callable[..., None]:
    def run(leaves: list[Tensor], structure: Any, entries: list[Entries]) -> None:
        out = _on_virtual(job._replace(check=True), leaves, structure, entries, 0)
        if job.shape.processes:  # the arguments are fakes that need no gradient: if a result does, f holds what does
            for i, y in enumerate(trees.flatten(out)[0]):
                if y.requires_grad:
                    _refuse_captured(trees.path(out, i, "out"))

    return run


def _refuse_captured(where: str) -> NoReturn:
    fail(
        "value",
        "shard_map: {} depends on a tensor that f closes over and that needs a gradient, of which each process would "
        "get its own part only; pass it as an argument, with the spec P() if it is the same on all ranks",
        where, about="A tensor that a mapped function closes over",
    )  # fmt: skip


def _refuse_tracked(f: Any) -> None:
    """The same for tensors of a torch.func transform, which cannot be evaluated on fakes."""
    for cell in getattr(f, "__closure__", None) or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not set yet
            continue
        for value in trees.leaves(held, lambda node: isinstance(node, Tensor)):
            if isinstance(value, Tensor) and _torch.tracked(value):
                _refuse_captured("what f computes")
            if isinstance(value, FunctionType) and value is not f:
                _refuse_tracked(value)


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, P)


def _spread(name: str, specs: Any, tree: Any, n: int) -> list[Entries]:
    """Per leaf of the tree, the entries of its spec."""
    if _is_spec(specs):
        return [specs.entries if specs is not None else ()] * n
    try:
        leaves = trees.broadcast_prefix(specs, tree, _is_spec)
    except (ValueError, TypeError):
        leaves = None
    if leaves is None:
        what = "arguments" if name == "in_specs" else "result"
        fail("value", "shard_map: {}={} is no prefix of the tree of the {}", name, spelled(specs), what)
    return [spec.entries if spec is not None else () for spec in leaves]


def _check_names(shape: Shape, name: str, specs: Any) -> None:
    for i, spec in enumerate(trees.leaves(specs, _is_spec)):
        if not _is_spec(spec):
            fail("type", "shard_map: {} holds fcoll.P and None, got {}", name, type(spec).__name__)
        for axis in spec.names if spec is not None else ():
            if axis not in shape.axis_names:
                fail("value", "shard_map: {} {} of {} names {!r}, which is no axis of the mesh {}",
                     "spec", i, name, axis, str(shape.axis_names))  # fmt: skip


def _checked(shape: Shape, leaf: _Leaf, value: Any, spec: Entries) -> Tensor:
    """An argument's leaf as a tensor that fits its spec."""
    x = _tensor(leaf, value, "leaves are")
    if x.layout != torch.strided:
        leaf.fail("type", "is {}; only strided tensors can be cut: use .to_dense()", str(x.layout))
    if len(spec) > x.ndim:
        leaf.fail("value", "has shape {}, fewer axes than its spec {} has entries", x.shape, spelled(P(*spec)))
    for axis, names in enumerate(spec):
        n = 1
        for name in names:
            n *= shape.sizes[shape.axis_names.index(name)]
        if x.shape[axis] % n:
            leaf.fail(
                "value", "has shape {}: size {} of axis {} is not a multiple of {}, the size of mesh {}; pad it",
                x.shape, x.shape[axis], axis, n, f"axis {names[0]!r}" if len(names) == 1 else f"axes {names}",
                about="A size that the ranks do not divide",
            )  # fmt: skip
    if isinstance(x, DTensor):
        if not shape.processes:
            leaf.fail("type", "is a DTensor, and the mesh is virtual; pass x.full_tensor()", about="A DTensor in a map")
        if not meshes.same(shape.key, x.device_mesh):
            text = "is a DTensor on another mesh; redistribute it, or pass x.full_tensor()"
            leaf.fail("value", text, about="A DTensor in a map")
    elif not torch.compiler.is_compiling() and _torch.hides_dtensor(x):
        leaf.fail("type", "is a DTensor inside a torch.func transform, which torch cannot take apart; pass plain "
                  "global tensors there, or differentiate with .backward()", about="A DTensor in a map")  # fmt: skip
    return x


def _result(leaf: _Leaf, value: Any, spec: Entries) -> Tensor:
    """A leaf of what f returns, as a tensor that fits its spec."""
    y = _tensor(leaf, value, "f returns")
    if len(spec) > y.ndim:
        leaf.fail("value", "has shape {}, fewer axes than its spec {} has entries", y.shape, spelled(P(*spec)))
    return y


def _tensor(leaf: _Leaf, value: Any, who: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, (bool, int, float, complex)):
        leaf.fail("type", "is a {}; {} tensors, numbers and None", type(value).__name__, who)
    if beyond_int64(value):
        leaf.fail("value", "is {}, which no int64 tensor holds; make it a float", value)
    return torch.tensor(value)
