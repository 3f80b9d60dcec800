"""A collective in two steps: `begin` sends, `end` waits, and what is computed in between overlaps with the message.

The transpose works in two steps as well: that of `end` begins the transposed collective, and that of `begin` waits for
it. Between the two goes a handle, a zero that lets torch see that one depends on the other; the message itself is kept
in a `Passage`, which both know. There is nothing to overlap with on an emulated axis: there, `begin` does it all.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from fcoll import _torch, recorder
from fcoll.bind import arrived, bind, place_in, started
from fcoll.engine import Flight
from fcoll.errors import fail
from fcoll.groups import Axis, Layout, process_of
from fcoll.primitives import PRIMITIVES, Params


class Passage:
    """One collective of one tensor on its way, and the passages of its derivatives."""

    def __init__(self, name: str, params: Params, layout: Layout, number: int = 0) -> None:
        self.name, self.params, self.layout, self.number = name, params, layout, number
        self.flight: Flight | None = None
        self.transposed: Passage | None = None
        self.tangents: dict[int, Passage] = {}  # by the level of the transform that they belong to
        self.batched: Passage | None = None
        self.source = recorder.source() if recorder.active() else ""

    def send(self, x: Tensor) -> None:
        """Let it begin."""
        process = process_of(self.layout)._replace(overlap=True)
        y = started(x, self.name, self.params, self.layout, process)
        self.flight = y if isinstance(y, Flight) else Flight(y, ())

    def receive(self) -> Tensor:
        """Wait for it, once."""
        if self.flight is None and self.batched:
            fail("value", "wait: this Pending was started inside a vmap that has ended; wait for it in there")
        if self.flight is None:
            fail("value", "wait: this Pending has been waited for already; keep the result of the first wait")
        flight, self.flight = self.flight, None
        return arrived(flight, self.name, self.layout)

    def back(self) -> Passage:
        """The passage of the transposed collective."""
        transpose = PRIMITIVES[self.name].transpose
        assert transpose is not None
        name, *params = transpose(*self.params)
        self.transposed = Passage(name, tuple(params), self.layout)
        return self.transposed

    def again(self, params: Params) -> Passage:
        """A passage of the same collective."""
        return Passage(self.name, params, self.layout)


_numbers = itertools.count(1)
_waited: dict[str, int] = {}  # process group → the number of the last passage waited for, of those with derivatives


def begin(name: str, x: Tensor, axis: Axis, params: Params) -> tuple[Tensor | None, Passage | int | None]:
    """A handle and what `end` needs with it; the result itself and None, if there is nothing to wait for."""
    layout, tokens = axis
    record = PRIMITIVES[name]
    differentiated = _torch.transforming() or (x.requires_grad and torch.is_grad_enabled())
    if tokens or not layout.process or not record.wire or (differentiated and not record.transpose):
        return bind(name, x, axis, *params), None
    if torch.compiler.is_compiling():
        key = _new_key()
        return _begin_in_graph(x, key, name, params, tuple(layout), place_in(layout.process)), key
    passage = Passage(name, params, layout, next(_numbers) if differentiated else 0)
    if differentiated:
        return _Begin.apply(x, passage), passage  # type: ignore[no-untyped-call]
    passage.send(x)
    return None, passage


def end(handle: Tensor | None, passage: Passage | int | None) -> Tensor:
    """The result of the collective."""
    if isinstance(passage, int):
        assert handle is not None
        return _end_in_graph(handle, passage)
    if passage is None:
        assert handle is not None
        return handle
    if handle is None:
        return passage.receive()
    group = passage.layout.process
    if passage.number < _waited.get(group, 0) and not _torch.tracing(handle):
        fail(
            "value",
            "wait: this Pending was started before one that has been waited for; where there are derivatives, wait in "
            "the order of the starts, since the backward passes of all ranks communicate in the reverse of it",
        )
    _waited[group] = passage.number
    y: Tensor = _End.apply(handle, passage)  # type: ignore[no-untyped-call]
    return y


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, passage: Passage) -> Tensor:
        passage.send(x)
        return x.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.passage = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return _End.apply(cotangent, ctx.passage.transposed), None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Any:
        passage, level = ctx.passage, _torch.level()
        passage.tangents[level] = passage.again(passage.params)
        return _Begin.apply(tangent, passage.tangents[level])  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, passage: Passage) -> tuple[Tensor, int]:
        passage.batched = passage.again(PRIMITIVES[passage.name].shift(passage.params))
        handle: Tensor = _Begin.apply(x.movedim(in_dims[0], 0), passage.batched)  # type: ignore[no-untyped-call]
        return handle.expand(info.batch_size), 0


class _End(torch.autograd.Function):
    @staticmethod
    def forward(handle: Tensor, passage: Passage) -> Tensor:
        return passage.receive()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.passage = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        with recorder.derivative(ctx.passage.source):
            return _Begin.apply(cotangent, ctx.passage.back()), None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Any:
        return _End.apply(tangent, ctx.passage.tangents[_torch.level()])  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], handle: Tensor, passage: Passage) -> tuple[Tensor, int]:
        y: Tensor = _End.apply(handle.select(in_dims[0], 0), passage.batched)  # type: ignore[no-untyped-call]
        return y, 0


# ---- while Dynamo traces: a graph holds functions of plain arguments, so the two know each other by a number

_in_graphs: dict[int, Passage] = {}


@_torch.assume_constant_result
def _new_key() -> int:
    return next(_numbers)


@_torch.allow_in_graph
def _begin_in_graph(x: Tensor, key: int, name: str, params: Params, layout: tuple[Any, ...], place: int) -> Tensor:
    _in_graphs[key] = Passage(name, params, Layout(*layout))
    handle: Tensor = _Begin.apply(x, _in_graphs[key])  # type: ignore[no-untyped-call]
    return handle


@_torch.allow_in_graph
def _end_in_graph(handle: Tensor, key: int) -> Tensor:
    y: Tensor = _End.apply(handle, _in_graphs[key])  # type: ignore[no-untyped-call]
    return y
