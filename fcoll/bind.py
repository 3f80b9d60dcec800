"""The one place where a collective meets torch: engines, vmap, and derivatives of every order, for any record.

`bind(name, x, axis, *params)` applies `PRIMITIVES[name]`. An emulated axis has one token per part: the ranks' indices,
batched by the `fcoll.vmap` level of that part. In the vmap rule, a batched token tells that this is the named level:
the ranks' values are put on a leading axis of x. When all parts are there, the record acts on the stack. Any other
level is a plain batch: its axis goes to the front and the record's axis parameters move over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fcoll import _torch, checks, recorder
from fcoll.engine import Flight, Process
from fcoll.groups import PENDING, Axis, Layout, axis_index, from_major, process_of, stacked_index
from fcoll.primitives import PRIMITIVES, Params, Primitive


def bind(name: str, x: Tensor, axis: Axis, *params: Any) -> Tensor:
    """Apply a collective to one tensor. Everything has been checked."""
    layout, tokens = axis
    if layout.process and not _torch.transforming():
        return _eager(x, name, params, layout)
    place = place_in(layout.process) if layout.process and torch.compiler.is_compiling() else -1
    return _apply(x, name, params, tuple(layout), place, *tokens)


@_torch.assume_constant_result
def place_in(process: str) -> int:
    """This process's rank in a group: part of a compiled graph, whose code is cached by what it holds."""
    return Process(process, 0, ()).here()


@_torch.allow_in_graph  # Dynamo would drop the vmap rule of a Function that it traces into
def _apply(x: Tensor, name: str, params: Params, layout: tuple[Any, ...], place: int, *tokens: Tensor) -> Tensor:
    return _applied(x, _Static(name, params, Layout(*layout)), *tokens)


def _applied(x: Tensor, static: _Static, *tokens: Tensor) -> Tensor:
    """By the rule of the innermost transform."""
    level = _torch.vmap_level()
    if level is None:
        if static.layout.process and not _torch.transforming():
            return _eager(x, static.name, static.params, static.layout)
        return _bind(x, static, *tokens)
    unwrapped, dims = zip(*[_torch.unbatch(value, level) for value in (x, *tokens)], strict=True)
    with _torch.below():
        if all(dim is None for dim in dims):
            return _applied(x, static, *tokens)
        y, dim = _vmap(dims, unwrapped[0], static, *unwrapped[1:])
    return y if dim is None else _torch.batch(y, dim, level)


class _Static:
    """What is not a tensor, in one piece: torch takes containers apart at every level."""

    __slots__ = ("layout", "name", "params")

    def __init__(self, name: str, params: Params, layout: Layout) -> None:
        self.name, self.params, self.layout = name, params, layout


def _eager(x: Tensor, name: str, params: Params, layout: Layout) -> Tensor:
    """On processes, with no transform around: a Function only for a gradient, and of the kind that costs half."""
    if x.requires_grad and torch.is_grad_enabled():
        return _classic_bind(x, _Static(name, params, layout))
    return _on_process(x, name, params, layout)


def _on_process(x: Tensor, name: str, params: Params, layout: Layout) -> Tensor:
    y = started(x, name, params, layout, process_of(layout))
    return arrived(y, name, layout) if isinstance(y, Flight) else y


def started(x: Tensor, name: str, params: Params, layout: Layout, process: Process) -> Tensor | Flight:
    """A collective on a process group: its result, or the flight for `arrived`."""
    recorder.tell(name, x, layout, params)
    record = PRIMITIVES[name]
    if layout.check and record.wire:
        x = checks.each(record.wire, x, params, layout)
    try:
        return record.on_process(x, process, *params)
    except RuntimeError as error:
        checks.explain(error, record.wire or name, x, layout)
        raise


def arrived(flight: Flight, name: str, layout: Layout) -> Tensor:
    """The result of a flight."""
    try:
        y = flight.wait()
    except RuntimeError as error:
        checks.explain(error, PRIMITIVES[name].wire or name, flight.buffer, layout)
        raise
    if layout.check:
        checks.ended(y, layout)
    return y


def _again(x: Tensor, name: str, params: Params, layout: Layout, *tokens: Tensor) -> Tensor:
    """A collective in the derivative of another."""
    return _applied(x, _Static(name, params, layout), *tokens)


class _Bind(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, static: _Static, *tokens: Tensor) -> Tensor:
        name, params, layout = static.name, static.params, static.layout
        if layout.process:
            return _on_process(x, name, params, layout)
        if PENDING in layout.at:
            raise RuntimeError(f"{name}: a value of an emulated axis was used outside the fcoll.vmap that binds it")
        y = _on_stack(x, name, params, layout)
        if _once(PRIMITIVES[name], layout):  # a cotangent would lack the ranks' axes
            y = y.expand((*x.shape[: _stacked(layout)], *y.shape)).contiguous()
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        if saved := _setup(ctx, inputs, output):
            ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return _backward(ctx, cotangent)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        name, params, layout, saves, _ = ctx.kept
        record = PRIMITIVES[name]
        saved: tuple[Tensor, ...] = ctx.saved_tensors if saves else ()
        if record.transpose:
            return _again(tangent, name, params, layout, *saved)
        x, y, *tokens = saved
        with _torch.differentiated_again():
            x, y = _torch.primal(x), _torch.primal(y)
            return _rule(record.jvp, name)(_Call(layout, tuple(tokens)), x, y, tangent, *params)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, static: _Static, *tokens: Tensor
    ) -> tuple[Tensor, int | None]:
        return _vmap((in_dims[0], *in_dims[2:]), x, static, *tokens)


class _ClassicBind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        y = _Bind.forward(*inputs)
        _setup(ctx, inputs, y)
        return y

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return _backward(ctx, cotangent)


_bind: Callable[..., Tensor] = _Bind.apply
_classic_bind: Callable[..., Tensor] = _ClassicBind.apply


def _vmap(dims: tuple[int | None, ...], x: Tensor, static: _Static, *tokens: Tensor) -> tuple[Tensor, int | None]:
    """Below a vmap that maps these axes of x and the tokens, of which not all are None; and which axis it maps then."""
    name, params, layout = static.name, static.params, static.layout
    record, x_dim, token_dims = PRIMITIVES[name], dims[0], dims[1:]
    stacked = _stacked(layout)
    here = [i for i, dim in enumerate(token_dims) if dim is not None]
    if not here:
        assert x_dim is not None
        x = x.movedim(x_dim, stacked)
        y = _applied(x, _Static(name, record.shift(params), layout), *tokens)
        return y, 0 if tokens and _once(record, layout) else stacked

    if record.exact and layout.outside >= 0:  # derivatives through the stack are taken from outside the map
        name, record = record.exact, PRIMITIVES[record.exact]
    (token,) = here
    part = [i for i, at in enumerate(layout.at) if at == PENDING][token]
    n = layout.sizes[part]
    if x_dim is None and record.unmapped and len(layout.sizes) == 1 and not layout.partition:
        return record.unmapped(x, n, *params), 0
    x = x.expand(n, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
    at = tuple(0 if i == part else p if p == PENDING else p + 1 for i, p in enumerate(layout.at))
    layout, tokens = layout._replace(at=at), (*tokens[:token], *tokens[token + 1 :])
    if tokens or record.exact:
        y = _applied(x, _Static(name, params, layout), *tokens)
    else:  # plain operations, whose own derivative is the exact one
        y = _on_stack(x, name, params, layout)
    return y, None if _once(record, layout) else 0


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> tuple[Tensor, ...]:
    """Keep what derivatives need; returns the tensors among it."""
    x, static, *tokens = inputs
    name, params, layout = static.name, static.params, static.layout
    source = recorder.source() if recorder.active() or layout.check else ""
    if layout.check:
        layout = checks.derivative_of(layout)
    if layout.outside >= 0 and _torch.level() <= layout.outside:
        name = PRIMITIVES[name].exact or name
    saved = (*tokens,) if PRIMITIVES[name].transpose else (x, output, *tokens)
    ctx.kept = name, params, layout, bool(saved), source  # in one piece: a wrapped ctx is slow to write to
    if saved:
        ctx.save_for_backward(*saved)
    return saved


def _backward(ctx: Any, cotangent: Tensor) -> Any:
    name, params, layout, saves, source = ctx.kept
    record = PRIMITIVES[name]
    saved: tuple[Tensor, ...] = ctx.saved_tensors if saves else ()
    with recorder.derivative(source, record.wire or name):
        if record.transpose:
            name, *params = record.transpose(*params)
            return _again(cotangent, name, tuple(params), layout, *saved), None, *[None] * len(saved)
        x, y, *tokens = saved
        result = _rule(record.vjp, name)(_Call(layout, tuple(tokens)), x, y, cotangent, *params)
    return result, None, *[None] * len(tokens)


class _Call:
    """See primitives.Call."""

    def __init__(self, layout: Layout, tokens: tuple[Tensor, ...]) -> None:
        self.layout, self.tokens = layout, tokens
        self.stacked = _stacked(layout)

    def __call__(self, name: str, x: Tensor, *params: Any) -> Tensor:
        return _again(x, name, params, self.layout, *self.tokens)

    def index(self, ndim: int) -> Tensor:
        if not self.stacked:
            return axis_index(Axis(self.layout, self.tokens))
        index = stacked_index(self.layout)
        return index.view(*index.shape, *[1] * (ndim - self.stacked))


def _stacked(layout: Layout) -> int:
    return sum(at != PENDING for at in layout.at)


def _once(record: Primitive, layout: Layout) -> bool:
    """Whether `_on_stack` gives one result for all ranks, rather than a stack."""
    return record.replicated and not layout.partition


def _rule(rule: Any, name: str) -> Any:
    if rule is None:
        raise NotImplementedError(f"{name} has no derivative")
    return rule


def _on_stack(x: Tensor, name: str, params: Params, layout: Layout) -> Tensor:
    """Act on x, whose leading axes hold the ranks of all parts; the result has them in the same places."""
    recorder.tell(name, x, layout, params)
    record, parts = PRIMITIVES[name], len(layout.sizes)
    to_major = (*layout.at, *range(parts, x.ndim))
    n = math.prod(layout.sizes)
    stack = x.permute(to_major).reshape(n, *x.shape[parts:])
    if layout.partition:
        y = _in_subgroups(stack, record, params, layout.partition)
    else:
        y = record.on_stack(stack, n, *params)
        if record.replicated:
            return y
    y = y.unflatten(0, layout.sizes) if parts else y.squeeze(0)
    return y.permute((*from_major(layout), *range(parts, y.ndim)))  # without names, of a 0-d tensor, no dims at all


def _in_subgroups(stack: Tensor, record: Primitive, params: Params, partition: tuple[tuple[int, ...], ...]) -> Tensor:
    ranks = [rank for subgroup in partition for rank in subgroup]
    order = torch.tensor(ranks, device=stack.device)
    back = torch.tensor(sorted(range(len(ranks)), key=ranks.__getitem__), device=stack.device)
    sizes = [len(subgroup) for subgroup in partition]
    n = sizes[0]
    if all(size == n for size in sizes):  # one more batch axis, whatever the number of subgroups
        groups = stack.index_select(0, order).unflatten(0, (len(sizes), n)).movedim(0, 1)
        y = record.on_stack(groups, n, *record.shift(params))
        y = y.expand(n, *y.shape) if record.replicated else y
        return y.movedim(1, 0).flatten(0, 1).index_select(0, back)
    results = []
    for piece in stack.index_select(0, order).split(sizes):
        y = record.on_stack(piece, len(piece), *params)
        results.append(y.expand(len(piece), *y.shape) if record.replicated else y)
    return torch.cat(results).index_select(0, back)
