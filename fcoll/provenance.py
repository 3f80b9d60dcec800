"""Which numbers of which ranks each number of a result comes from, and with it whose cotangents each gradient has.

Found by running the function with its collectives on an emulated mesh: forward with one input after the other changed,
backward with one cotangent after the other. Nothing here knows what a collective does, so it cannot be wrong about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fcoll import maps, trees
from fcoll.errors import fail

RANKS, NUMBERS, CELLS = 16, 64, 256
"""The most ranks, numbers of one rank, and numbers of all ranks that are followed."""

_OTHER_VALUES = (7.5, -7.5, 0.0)  # what an input is changed to, beyond all others in both directions


class Term(NamedTuple):
    """A number that another one comes from: of which rank, which of its numbers, and times what."""

    rank: int
    number: int
    factor: float


class Origin(NamedTuple):
    """Where a number comes from.

    kind: "sum" (of the terms, and of `offset`), "max", "min", "product", "any", "all", "argmax", "argmin" of them, or
        "other". The factors of all but sums mean nothing, nor those of a gradient that depends on the inputs
        (`depends`).
    """

    kind: str
    terms: tuple[Term, ...]
    offset: float = 0.0
    depends: bool = False


class Leaf(NamedTuple):
    """A tensor on every rank: its name and shape, and whether a cotangent can belong to it."""

    name: str
    shape: tuple[int, ...]
    differentiable: bool = True

    @property
    def numbers(self) -> int:
        """How many."""
        return math.prod(self.shape)


class Flow(NamedTuple):
    """Of a function: its leaves, and per rank, for the numbers of all of them, where they come from."""

    inputs: list[Leaf]
    outputs: list[Leaf]
    forward: list[list[Origin]]  # in inputs
    backward: list[list[Origin]]  # in cotangents of the differentiable outputs


def follow(f: Callable[..., Any], axes: Sequence[tuple[str, int]], args: tuple[Any, ...], names: Sequence[str]) -> Flow:
    """Run f, one rank's program, on a mesh with these axes, and follow the floating-point numbers of `args`.

    Of floating-point leaves only the shape and dtype matter. Others are passed on as they are, the same on each rank.
    """
    program = _Program(f, axes, args, names)
    seen: list[tuple[Tensor, Tensor]] = []  # of all runs, what went in and what came out, flat
    found = torch.zeros(program.n * program.size, program.n * program.out_size, dtype=torch.bool)
    for base in _bases(program.n * program.size):
        inputs = torch.cat([base[None], *(_changed(base, value) for value in _OTHER_VALUES)])
        outputs = program.run(inputs)
        seen.append((inputs, outputs))
        others = outputs[1:].unflatten(0, (len(_OTHER_VALUES), len(base)))
        found |= (~_same(others, outputs[0], program.tolerance)).any(0)
    inputs, outputs = seen[0]
    steps = _OTHER_VALUES[0] - inputs[0]
    slopes = (outputs[1 : 1 + len(steps)] - outputs[0]) / steps[:, None]  # input, output
    inputs, outputs = (torch.cat(column) for column in zip(*seen, strict=True))
    program.check_numbers(outputs)
    slopes = slopes.where(found, 0.0)
    offsets = outputs[0] - inputs[0] @ slopes
    linear = _same(inputs @ slopes + offsets, outputs, program.tolerance).all(0)
    forward = []
    for o in range(program.n * program.out_size):
        sources = found[:, o].nonzero().flatten()
        if linear[o]:
            terms = _terms(sources, slopes[sources, o], program.size, program.tolerance)
            forward.append(Origin("sum", terms, _offset(float(offsets[o]), program.tolerance)))
        else:
            terms = _terms(sources, torch.ones(len(sources)), program.size, program.tolerance)
            runs = [(x[:, sources], y[:, o]) for x, y in seen]
            forward.append(Origin(_kind(runs, program.tolerance), terms))
    return Flow(program.inputs, program.outputs, _by_rank(forward, program.n), _backward(program, forward))


def _backward(program: _Program, forward: list[Origin]) -> list[list[Origin]]:
    """Where each number of each rank's gradient comes from."""
    bases = _bases(program.n * program.size)[:2]
    if any(origin.kind != "sum" for origin in forward):  # of extrema: each rank is the one that attains it, once
        for value in _OTHER_VALUES[:2]:
            bases += list(torch.where(_of_rank(program), bases[0] + value, bases[0]))
    coefficients = torch.stack([program.pull(base) for base in bases])  # base, cotangent, input
    tolerance = program.tolerance
    found = ~_same(coefficients, torch.zeros(()), tolerance).all(0)
    steady = _same(coefficients, coefficients[0], tolerance).all(0) & coefficients[0].isfinite()
    backward = []
    for i in range(program.n * program.size):
        sources = found[:, i].nonzero().flatten()
        depends = not bool(steady[sources, i].all())
        factors = torch.ones(len(sources)) if depends else coefficients[0, sources, i]
        backward.append(Origin("sum", _terms(sources, factors, program.cotangents, tolerance), depends=depends))
    return _by_rank(backward, program.n)


class _Program:
    """f on all ranks, as a function of one row of numbers: those of rank 0, then those of rank 1, …"""

    def __init__(
        self, f: Callable[..., Any], axes: Sequence[tuple[str, int]], args: tuple[Any, ...], names: Sequence[str]
    ) -> None:
        self.f, self.axes = f, axes
        self.n = 1
        for _, size in axes:
            self.n *= size
        if self.n > RANKS:
            fail("value", "draw: {} ranks; a picture has room for {}, and shows the same with fewer", self.n, RANKS)
        self.values, self.structure = trees.flatten(args)
        self.places: list[int] = []  # of the leaves that are followed
        self.inputs: list[Leaf] = []
        for i, value in enumerate(self.values):
            if isinstance(value, Tensor) and value.is_complex():
                fail("type", "draw: {} is {}; give a real one, which moves in the same way",
                     trees.path(args, i, "args"), str(value.dtype))  # fmt: skip
            if isinstance(value, Tensor) and value.is_floating_point():
                self.places.append(i)
                self.inputs.append(Leaf(_name(args, i, names), tuple(value.shape)))
        self.size = _room("the arguments have", self.inputs, self.n)
        if not self.size:
            fail("type", "draw: no argument is a floating-point tensor, whose numbers could be followed")
        self.dtypes = [self.values[i].dtype for i in self.places]
        self.tolerance = min(256 * max(torch.finfo(dtype).eps for dtype in self.dtypes), 0.06)  # of sums of up to 64
        self.outputs: list[Leaf] = []
        self.out_size = 0
        self._first_run()
        self.cotangents = sum(leaf.numbers for leaf in self.outputs if leaf.differentiable)

    def _first_run(self) -> None:
        stacks = self._stacks(_bases(self.n * self.size)[0])
        results: list[Any] = []
        outs = self._map(lambda *xs: self._call(xs, results), stacks)
        for i, y in enumerate(outs):
            if y.is_complex():
                fail("type", "draw: {} is {}; only real numbers are followed",
                     trees.path(results[0], i, "out"), str(y.dtype))  # fmt: skip
            self.outputs.append(Leaf(trees.path(results[0], i, "y"), tuple(y.shape[1:]), y.is_floating_point()))
        self.out_size = _room("the results have", self.outputs, self.n)
        if not self.out_size:
            fail("value", "draw: the function returns no numbers")

    def run(self, rows: Tensor) -> Tensor:
        """Row by row, what comes out."""

        def one(row: Tensor) -> Tensor:
            outs = self._map(lambda *xs: self._call(xs), self._stacks(row))
            return torch.cat([y.to(torch.float64).reshape(self.n, -1) for y in outs], 1).flatten()

        result: Tensor = torch.func.vmap(one, randomness="same")(rows)
        return result

    def check_numbers(self, outputs: Tensor) -> None:
        """That something can be seen of each result."""
        lost = outputs.isnan().all(0).reshape(self.n, self.out_size).any(0)
        for leaf, part in zip(self.outputs, lost.split([leaf.numbers for leaf in self.outputs]), strict=True):
            if bool(part.any()):
                fail("value", "draw: {} is NaN whatever goes in, from {} to {}", leaf.name, *sorted(_OTHER_VALUES)[::2])

    def pull(self, base: Tensor) -> Tensor:
        """Row by row, the gradient for one cotangent. Taken inside each rank's program."""
        leaves = [leaf for leaf in self.outputs if leaf.differentiable]
        if not leaves:
            return base.new_zeros(0, len(base))
        stacks = self._stacks(base)

        def gradient(*values: Tensor) -> list[Tensor]:
            xs, cotangents = values[: len(stacks)], values[len(stacks) :]

            def differentiable(*xs: Tensor) -> list[Tensor]:
                return [y for y in self._call(xs) if y.is_floating_point()]

            vjp: Any = torch.func.vjp  # whose annotation knows of has_aux only
            ys, pullback = vjp(differentiable, *xs)
            return list(pullback([c.to(y.dtype) for c, y in zip(cotangents, ys, strict=True)]))

        def one(row: Tensor) -> Tensor:
            pieces = row.unflatten(0, (self.n, -1)).split([leaf.numbers for leaf in leaves], 1)
            cotangents = [c.reshape(self.n, *leaf.shape) for c, leaf in zip(pieces, leaves, strict=True)]
            return torch.cat(
                [g.double().reshape(self.n, -1) for g in self._map(gradient, [*stacks, *cotangents])], 1
            ).flatten()

        result: Tensor = torch.func.vmap(one, randomness="same")(torch.eye(self.n * self.cotangents).double())
        return result

    def _call(self, xs: Sequence[Tensor], results: list[Any] | None = None) -> list[Tensor]:
        values = list(self.values)
        for place, x in zip(self.places, xs, strict=True):
            values[place] = x
        out = self.f(*trees.unflatten(self.structure, values))
        if results is not None:
            results[:] = [out]
        ys = trees.flatten(out)[0]
        for i, y in enumerate(ys):
            if not isinstance(y, (Tensor, bool, int, float)):
                fail("type", "draw: {} of the result is a {}; a function that can be drawn returns real tensors",
                     trees.path(out, i, "out"), type(y).__name__)  # fmt: skip
        return [torch.as_tensor(y) for y in ys]

    def _map(self, f: Callable[..., list[Tensor]], stacks: list[Tensor]) -> list[Tensor]:
        """f on every rank; ranks are in front of what goes in and what comes out."""
        sizes = [size for _, size in self.axes]
        for name, _ in reversed(self.axes):
            f = maps.vmap(f, randomness="different", axis_name=name)
        return [y.flatten(0, len(sizes) - 1) for y in f(*(x.unflatten(0, sizes) for x in stacks))]

    def _stacks(self, row: Tensor) -> list[Tensor]:
        pieces = row.unflatten(0, (self.n, self.size)).split([leaf.numbers for leaf in self.inputs], 1)
        return [
            piece.reshape(self.n, *leaf.shape).to(dtype)
            for piece, leaf, dtype in zip(pieces, self.inputs, self.dtypes, strict=True)
        ]


def _name(args: tuple[Any, ...], i: int, names: Sequence[str]) -> str:
    """As the program calls it: x, or w['bias']."""
    path = trees.path(args, i, "")
    argument, rest = path[1:].split("]", 1)
    return (names[int(argument)] if int(argument) < len(names) else f"args[{argument}]") + rest


def _room(what: str, leaves: Sequence[Leaf], n: int) -> int:
    size = sum(leaf.numbers for leaf in leaves)
    if size > NUMBERS or size * n > CELLS:
        fail(
            "value", "draw: {} {} numbers on each of {} ranks; a picture has room for {} on each, and {} in all: "
            "make them smaller, what goes where does not change",
            what, size, n, NUMBERS, CELLS,
        )  # fmt: skip
    return size


def _bases(size: int) -> list[Tensor]:
    """The inputs around which one is changed: numbers in general position, positive and of both signs, and zeros."""
    generator = torch.Generator().manual_seed(0)
    positive = 1 + torch.rand(size, dtype=torch.float64, generator=generator)
    signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
    signed = signs * (1 + torch.rand(size, dtype=torch.float64, generator=generator))
    return [positive, signed, torch.zeros(size).double()]


def _changed(base: Tensor, value: float) -> Tensor:
    """A row per number of `base`, in which it is `value`."""
    return torch.where(torch.eye(len(base), dtype=torch.bool), value, base)


def _of_rank(program: _Program) -> Tensor:
    return torch.eye(program.n, dtype=torch.bool).repeat_interleave(program.size, 1)


def _same(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    close = (a - b).abs() <= tolerance * (1 + torch.maximum(a.abs(), b.abs()))
    return close | (a == b) | (a.isnan() & b.isnan())


def _terms(sources: Tensor, factors: Tensor, width: int, tolerance: float) -> tuple[Term, ...]:
    """Of numbers counted through all ranks, of `width` each; factors without the noise of their rounding."""
    digits = max(2, min(6, int(-math.log10(tolerance))))

    def rounded(factor: float) -> float:
        whole = round(factor)
        return float(whole if abs(factor - whole) <= tolerance else f"{factor:.{digits}g}")

    return tuple(
        Term(i // width, i % width, rounded(c)) for i, c in zip(sources.tolist(), factors.tolist(), strict=True)
    )


def _offset(value: float, tolerance: float) -> float:
    return 0.0 if abs(value) <= 4 * tolerance else value


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
    "product": lambda x: x.prod(1),
    "any": lambda x: (x != 0).any(1),
    "all": lambda x: (x != 0).all(1),
    "argmax": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(1),
}


def _kind(runs: list[tuple[Tensor, Tensor]], tolerance: float) -> str:
    """What y is of the columns of x, in all runs."""
    for kind, function in _KINDS.items():
        if all(  # the first row of each before the others: most kinds end there
            bool(_same(function(x[rows]).to(y.dtype), y[rows], tolerance).all())
            for rows in (slice(1), slice(None))
            for x, y in runs
        ):
            return kind
    return "other"


def _by_rank(origins: list[Origin], n: int) -> list[list[Origin]]:
    size = len(origins) // n
    return [origins[rank * size : (rank + 1) * size] for rank in range(n)]
