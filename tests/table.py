"""One row per variant of a collective: how it is called, and what it means on the values of all ranks.

The meaning is written without fcoll, on lists with one tensor per rank: `value` gives the results from the inputs, and
`vjp` the cotangents of the inputs from the inputs and the cotangents of the results. The tests of values, derivatives,
`vmap` and compile run over these rows, on every substrate.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import fcoll

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Row:
    name: str  # the public function, then what is particular
    call: Callable[[Any, Any], Any]  # (x, group) -> y
    shape: Callable[[int], tuple[int, ...]]  # of x, for n ranks
    value: Callable[[Tensors], Tensors]  # all x -> all y
    vjp: Callable[[Tensors, Tensors], Tensors] | None = None  # all x, all cotangents of y -> all cotangents of x
    linear: bool = True
    once: Literal["", "input", "result"] = ""  # what counts once, by declaration: then vjp is no transpose

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def on(self, group: Any) -> Callable[[Any], Any]:
        """The call in this group."""
        return lambda x: self.call(x, group)

    def inputs(self, n: int, seed: int = 0) -> Tensor:
        """A stack of inputs, different on every rank."""
        random = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {n} {seed}".encode()))
        if self.vjp is None:
            return torch.randint(0, 2, (n, *self.shape(n)), generator=random).double()
        return torch.randn(n, *self.shape(n), dtype=torch.float64, generator=random)

    def values(self, stack: Tensor) -> Tensor:
        """`value` on stacks."""
        return torch.stack(list(self.value(list(stack))))

    def pull(self, stack: Tensor, cotangents: Tensor) -> Tensor:
        """`vjp` on stacks."""
        assert self.vjp is not None
        return torch.stack(list(self.vjp(list(stack), list(cotangents))))


def last(group: Any) -> int:
    return fcoll.axis_size(group) - 1


# ---- what collectives are made of, on lists with one tensor per rank


def total(xs: Tensors) -> Tensor:
    return torch.stack(list(xs)).sum(0)


def same(xs: Tensors, y: Tensor) -> Tensors:
    return [y for _ in xs]


def only(xs: Tensors, y: Tensor, at: int) -> Tensors:
    return [y if rank == at % len(xs) else torch.zeros_like(y) for rank in range(len(xs))]


def cut(xs: Tensors, x: Tensor, axis: int, tiled: bool = True) -> Tensors:
    return x.tensor_split(len(xs), axis) if tiled else x.unbind(axis)


def join(xs: Tensors, axis: int, tiled: bool = True) -> Tensor:
    return torch.cat(list(xs), axis) if tiled else torch.stack(list(xs), axis)


def swap(xs: Tensors, split: int, concat: int, tiled: bool = True) -> Tensors:
    """Rank r gets block r of everybody."""
    blocks = [cut(xs, x, split, tiled) for x in xs]
    return [join([own[rank] for own in blocks], concat, tiled) for rank in range(len(xs))]


def sum_blocks(xs: Tensors, axis: int, tiled: bool = True) -> Tensors:
    """Rank r gets the sum of everybody's block r."""
    return cut(xs, total(xs), axis, tiled)


def send(xs: Tensors, moves: Sequence[tuple[int, int]]) -> Tensors:
    ys = [torch.zeros_like(x) for x in xs]
    for source, destination in moves:
        ys[destination] = xs[source]
    return ys


def back(moves: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    return [(destination, source) for source, destination in moves]


def shared(xs: Tensors, y: Tensor, c: Tensor) -> Tensors:
    """The cotangent c of an extremum, shared evenly among the ranks that attain it."""
    attained = total([(x == y).to(x.dtype) for x in xs])
    return [c * (x == y) / attained for x in xs]


def product(xs: Tensors) -> Tensor:
    y = torch.ones_like(xs[0])
    for x in xs:
        y = y * x
    return y


def others(xs: Tensors) -> Tensors:
    return [product([torch.ones_like(x), *xs[:rank], *xs[rank + 1 :]]) for rank, x in enumerate(xs)]


def largest(xs: Tensors) -> Tensor:
    return torch.stack(list(xs)).amax(0)


def smallest(xs: Tensors) -> Tensor:
    return torch.stack(list(xs)).amin(0)


def turn(n: int) -> list[tuple[int, int]]:
    return [(rank, n - 1 - rank) for rank in range(n)]


def chain(n: int) -> list[tuple[int, int]]:
    """All but the last rank send, all but the first receive; out of order."""
    return [(rank, rank + 1) for rank in reversed(range(n - 1))]


def cross(n: int) -> list[tuple[int, int]]:
    return [(0, n - 1)]


def flat(n: int) -> tuple[int, ...]:
    return (2, 3)


def rows_cut(n: int) -> tuple[int, ...]:
    return (2 * n, 3)


def columns_cut(n: int) -> tuple[int, ...]:
    return (2, 2 * n)


def both_cut(n: int) -> tuple[int, ...]:
    return (n, 2 * n)


def piece(sender: int, receiver: int) -> int:
    """How many rows go from one rank to another, none among them."""
    return (sender + receiver) % 3


def ragged(x: Any, group: Any) -> Any:
    """Both the operand and what lies under the result depend on x; the rows from rank s arrive at 2s."""
    n, rank = fcoll.axis_size(group), fcoll.axis_index(group)
    others = torch.arange(n)
    size = (rank + others) % 3
    below = torch.cat((x, x))[: 2 * n]
    return fcoll.ragged_all_to_all(x, below, rank * others % n, size, (2 * rank).expand(n), size, group)


def ragged_value(xs: Tensors) -> Tensors:
    n, ys = len(xs), [torch.cat((x, x))[: 2 * len(xs)] for x in xs]
    rows = [[xs[s][s * r % n :][: piece(s, r)] for s in range(n)] for r in range(n)]
    return [
        torch.cat([torch.cat((rows[r][s], y[2 * s + len(rows[r][s]) : 2 * s + 2])) for s in range(n)])
        for r, y in enumerate(ys)
    ]


def ragged_vjp(xs: Tensors, cs: Tensors) -> Tensors:
    n, bars = len(xs), [torch.zeros_like(x) for x in xs]
    for r, c in enumerate(cs):
        for s in range(n):
            begin, size = s * r % n, piece(s, r)
            bars[s][begin : begin + size] += c[2 * s : 2 * s + size]
            for row in range(2 * s + size, 2 * s + 2):
                bars[r][row % len(xs[r])] += c[row]
    return bars


TABLE = [
    Row(
        "all_reduce",
        lambda x, g: fcoll.all_reduce(x, g),
        flat,
        lambda xs: same(xs, total(xs)),
        lambda xs, cs: same(xs, total(cs)),
    ),
    Row(
        "all_reduce mean",
        lambda x, g: fcoll.all_reduce(x, g, "mean"),
        flat,
        lambda xs: same(xs, total(xs) / len(xs)),
        lambda xs, cs: same(xs, total(cs) / len(xs)),
    ),
    Row(
        "all_reduce max",
        lambda x, g: fcoll.all_reduce(x, g, "max"),
        flat,
        lambda xs: same(xs, largest(xs)),
        lambda xs, cs: shared(xs, largest(xs), total(cs)),
        linear=False,
    ),
    Row(
        "all_reduce min",
        lambda x, g: fcoll.all_reduce(x, g, "min"),
        flat,
        lambda xs: same(xs, smallest(xs)),
        lambda xs, cs: shared(xs, smallest(xs), total(cs)),
        linear=False,
    ),
    Row(
        "all_reduce prod",
        lambda x, g: fcoll.all_reduce(x, g, "prod"),
        flat,
        lambda xs: same(xs, product(xs)),
        lambda xs, cs: [total(cs) * other for other in others(xs)],
        linear=False,
    ),
    Row(
        "all_reduce any",
        lambda x, g: fcoll.all_reduce(x, g, "any"),
        lambda n: (3, 5),
        lambda xs: same(xs, total([x != 0 for x in xs]) > 0),
        linear=False,
    ),
    Row(
        "all_reduce all",
        lambda x, g: fcoll.all_reduce(x, g, "all"),
        lambda n: (3, 5),
        lambda xs: same(xs, total([x != 0 for x in xs]) == len(xs)),
        linear=False,
    ),
    Row(
        "all_reduce invariant",
        lambda x, g: fcoll.all_reduce(x, g, invariant=True),
        flat,
        lambda xs: same(xs, total(xs)),
        lambda xs, cs: cs,
        once="result",
    ),
    Row(
        "all_reduce mean invariant",
        lambda x, g: fcoll.all_reduce(x, g, "mean", invariant=True),
        flat,
        lambda xs: same(xs, total(xs) / len(xs)),
        lambda xs, cs: [c / len(xs) for c in cs],
        once="result",
    ),
    Row(
        "all_reduce max invariant",
        lambda x, g: fcoll.all_reduce(x, g, "max", invariant=True),
        flat,
        lambda xs: same(xs, largest(xs)),
        lambda xs, cs: [shared(xs, largest(xs), c)[rank] for rank, c in enumerate(cs)],
        linear=False,
        once="result",
    ),
    Row(
        "all_reduce min invariant",
        lambda x, g: fcoll.all_reduce(x, g, "min", invariant=True),
        flat,
        lambda xs: same(xs, smallest(xs)),
        lambda xs, cs: [shared(xs, smallest(xs), c)[rank] for rank, c in enumerate(cs)],
        linear=False,
        once="result",
    ),
    Row(
        "all_reduce prod invariant",
        lambda x, g: fcoll.all_reduce(x, g, "prod", invariant=True),
        flat,
        lambda xs: same(xs, product(xs)),
        lambda xs, cs: [c * other for c, other in zip(cs, others(xs), strict=True)],
        linear=False,
        once="result",
    ),
    Row(
        "all_gather",
        lambda x, g: fcoll.all_gather(x, g),
        flat,
        lambda xs: same(xs, join(xs, 0)),
        lambda xs, cs: sum_blocks(cs, 0),
    ),
    Row(
        "all_gather axis -1",
        lambda x, g: fcoll.all_gather(x, g, -1),
        flat,
        lambda xs: same(xs, join(xs, 1)),
        lambda xs, cs: sum_blocks(cs, 1),
    ),
    Row(
        "all_gather untiled",
        lambda x, g: fcoll.all_gather(x, g, 1, tiled=False),
        flat,
        lambda xs: same(xs, join(xs, 1, False)),
        lambda xs, cs: sum_blocks(cs, 1, False),
    ),
    Row(
        "all_gather untiled axis -1",
        lambda x, g: fcoll.all_gather(x, g, -1, tiled=False),
        flat,
        lambda xs: same(xs, join(xs, 2, False)),
        lambda xs, cs: sum_blocks(cs, 2, False),
    ),
    Row(
        "all_gather invariant",
        lambda x, g: fcoll.all_gather(x, g, 1, invariant=True),
        flat,
        lambda xs: same(xs, join(xs, 1)),
        lambda xs, cs: [cut(xs, c, 1)[rank] for rank, c in enumerate(cs)],
        once="result",
    ),
    Row(
        "all_gather untiled invariant",
        lambda x, g: fcoll.all_gather(x, g, -1, tiled=False, invariant=True),
        flat,
        lambda xs: same(xs, join(xs, 2, False)),
        lambda xs, cs: [cut(xs, c, 2, False)[rank] for rank, c in enumerate(cs)],
        once="result",
    ),
    Row(
        "reduce_scatter",
        lambda x, g: fcoll.reduce_scatter(x, g),
        rows_cut,
        lambda xs: sum_blocks(xs, 0),
        lambda xs, cs: same(xs, join(cs, 0)),
    ),
    Row(
        "reduce_scatter axis -1",
        lambda x, g: fcoll.reduce_scatter(x, g, -1),
        columns_cut,
        lambda xs: sum_blocks(xs, 1),
        lambda xs, cs: same(xs, join(cs, 1)),
    ),
    Row(
        "reduce_scatter untiled",
        lambda x, g: fcoll.reduce_scatter(x, g, 1, tiled=False),
        lambda n: (2, n, 3),
        lambda xs: sum_blocks(xs, 1, False),
        lambda xs, cs: same(xs, join(cs, 1, False)),
    ),
    Row(
        "reduce_scatter mean",
        lambda x, g: fcoll.reduce_scatter(x, g, 0, "mean"),
        rows_cut,
        lambda xs: cut(xs, total(xs) / len(xs), 0),
        lambda xs, cs: same(xs, join(cs, 0) / len(xs)),
    ),
    Row(
        "reduce_scatter max",
        lambda x, g: fcoll.reduce_scatter(x, g, -1, "max"),
        columns_cut,
        lambda xs: cut(xs, largest(xs), 1),
        lambda xs, cs: shared(xs, largest(xs), join(cs, 1)),
        linear=False,
    ),
    Row(
        "reduce_scatter min untiled",
        lambda x, g: fcoll.reduce_scatter(x, g, 0, "min", tiled=False),
        both_cut,
        lambda xs: cut(xs, smallest(xs), 0, False),
        lambda xs, cs: shared(xs, smallest(xs), join(cs, 0, False)),
        linear=False,
    ),
    Row(
        "all_to_all",
        lambda x, g: fcoll.all_to_all(x, g),
        rows_cut,
        lambda xs: swap(xs, 0, 0),
        lambda xs, cs: swap(cs, 0, 0),
    ),
    Row(
        "all_to_all axes 0 1",
        lambda x, g: fcoll.all_to_all(x, g, 0, 1),
        rows_cut,
        lambda xs: swap(xs, 0, 1),
        lambda xs, cs: swap(cs, 1, 0),
    ),
    Row(
        "all_to_all axes -1 -2",
        lambda x, g: fcoll.all_to_all(x, g, -1, -2),
        columns_cut,
        lambda xs: swap(xs, 1, 0),
        lambda xs, cs: swap(cs, 0, 1),
    ),
    Row(
        "all_to_all untiled",
        lambda x, g: fcoll.all_to_all(x, g, 0, 1, tiled=False),
        lambda n: (n, 2, 3),
        lambda xs: swap(xs, 0, 1, False),
        lambda xs, cs: swap(cs, 1, 0, False),
    ),
    Row(
        "all_to_all untiled axes 1 -1",
        lambda x, g: fcoll.all_to_all(x, g, 1, -1, tiled=False),
        lambda n: (2, n, 3),
        lambda xs: swap(xs, 1, 2, False),
        lambda xs, cs: swap(cs, 2, 1, False),
    ),
    Row(
        "broadcast",
        lambda x, g: fcoll.broadcast(x, g),
        flat,
        lambda xs: same(xs, xs[0]),
        lambda xs, cs: only(xs, total(cs), 0),
    ),
    Row(
        "broadcast from last",
        lambda x, g: fcoll.broadcast(x, g, last(g)),
        flat,
        lambda xs: same(xs, xs[-1]),
        lambda xs, cs: only(xs, total(cs), -1),
    ),
    Row(
        "reduce",
        lambda x, g: fcoll.reduce(x, g),
        flat,
        lambda xs: only(xs, total(xs), 0),
        lambda xs, cs: same(xs, cs[0]),
    ),
    Row(
        "reduce to last",
        lambda x, g: fcoll.reduce(x, g, last(g)),
        flat,
        lambda xs: only(xs, total(xs), -1),
        lambda xs, cs: same(xs, cs[-1]),
    ),
    Row(
        "reduce mean",
        lambda x, g: fcoll.reduce(x, g, last(g), "mean"),
        flat,
        lambda xs: only(xs, total(xs) / len(xs), -1),
        lambda xs, cs: same(xs, cs[-1] / len(xs)),
    ),
    Row(
        "reduce max",
        lambda x, g: fcoll.reduce(x, g, last(g), "max"),
        flat,
        lambda xs: only(xs, largest(xs), -1),
        lambda xs, cs: shared(xs, largest(xs), cs[-1]),
        linear=False,
    ),
    Row(
        "reduce min",
        lambda x, g: fcoll.reduce(x, g, op="min"),
        flat,
        lambda xs: only(xs, smallest(xs), 0),
        lambda xs, cs: shared(xs, smallest(xs), cs[0]),
        linear=False,
    ),
    Row(
        "reduce prod",
        lambda x, g: fcoll.reduce(x, g, last(g), "prod"),
        flat,
        lambda xs: only(xs, product(xs), -1),
        lambda xs, cs: [cs[-1] * other for other in others(xs)],
        linear=False,
    ),
    Row(
        "reduce any",
        lambda x, g: fcoll.reduce(x, g, last(g), "any"),
        lambda n: (3, 5),
        lambda xs: only(xs, total([x != 0 for x in xs]) > 0, -1),
        linear=False,
    ),
    Row(
        "reduce all",
        lambda x, g: fcoll.reduce(x, g, 0, "all"),
        lambda n: (3, 5),
        lambda xs: only(xs, total([x != 0 for x in xs]) == len(xs), 0),
        linear=False,
    ),
    Row(
        "gather",
        lambda x, g: fcoll.gather(x, g),
        flat,
        lambda xs: only(xs, join(xs, 0), 0),
        lambda xs, cs: cut(xs, cs[0], 0),
    ),
    Row(
        "gather to last axis -1",
        lambda x, g: fcoll.gather(x, g, last(g), -1),
        flat,
        lambda xs: only(xs, join(xs, 1), -1),
        lambda xs, cs: cut(xs, cs[-1], 1),
    ),
    Row(
        "gather untiled",
        lambda x, g: fcoll.gather(x, g, last(g), -2, tiled=False),
        flat,
        lambda xs: only(xs, join(xs, 1, False), -1),
        lambda xs, cs: cut(xs, cs[-1], 1, False),
    ),
    Row(
        "scatter",
        lambda x, g: fcoll.scatter(x, g),
        rows_cut,
        lambda xs: cut(xs, xs[0], 0),
        lambda xs, cs: only(xs, join(cs, 0), 0),
    ),
    Row(
        "scatter from last axis -1",
        lambda x, g: fcoll.scatter(x, g, last(g), -1),
        columns_cut,
        lambda xs: cut(xs, xs[-1], 1),
        lambda xs, cs: only(xs, join(cs, 1), -1),
    ),
    Row(
        "scatter untiled",
        lambda x, g: fcoll.scatter(x, g, last(g), 1, tiled=False),
        lambda n: (2, n, 3),
        lambda xs: cut(xs, xs[-1], 1, False),
        lambda xs, cs: only(xs, join(cs, 1, False), -1),
    ),
    Row(
        "permute all",
        lambda x, g: fcoll.permute(x, g, turn(fcoll.axis_size(g))),
        flat,
        lambda xs: send(xs, turn(len(xs))),
        lambda xs, cs: send(cs, back(turn(len(xs)))),
    ),
    Row(
        "permute chain",
        lambda x, g: fcoll.permute(x, g, chain(fcoll.axis_size(g))),
        flat,
        lambda xs: send(xs, chain(len(xs))),
        lambda xs, cs: send(cs, back(chain(len(xs)))),
    ),
    Row(
        "permute one",
        lambda x, g: fcoll.permute(x, g, cross(fcoll.axis_size(g))),
        flat,
        lambda xs: send(xs, cross(len(xs))),
        lambda xs, cs: send(cs, back(cross(len(xs)))),
    ),
    Row(
        "permute none",
        lambda x, g: fcoll.permute(x, g, []),
        flat,
        lambda xs: [0 * x for x in xs],
        lambda xs, cs: [torch.zeros_like(x) for x in xs],
    ),
    Row(
        "shift",
        lambda x, g: fcoll.shift(x, g),
        flat,
        lambda xs: [xs[rank - 1] for rank in range(len(xs))],
        lambda xs, cs: [cs[(rank + 1) % len(xs)] for rank in range(len(xs))],
    ),
    Row(
        "shift back far",
        lambda x, g: fcoll.shift(x, g, -2 - fcoll.axis_size(g)),
        flat,
        lambda xs: [xs[(rank + 2) % len(xs)] for rank in range(len(xs))],
        lambda xs, cs: [cs[(rank - 2) % len(xs)] for rank in range(len(xs))],
    ),
    Row(
        "shift without wrap",
        lambda x, g: fcoll.shift(x, g, -1, wrap=False),
        flat,
        lambda xs: [*xs[1:], torch.zeros_like(xs[0])],
        lambda xs, cs: [torch.zeros_like(cs[0]), *cs[:-1]],
    ),
    Row(
        "shift out",
        lambda x, g: fcoll.shift(x, g, fcoll.axis_size(g), wrap=False),
        flat,
        lambda xs: [0 * x for x in xs],
        lambda xs, cs: [torch.zeros_like(x) for x in xs],
    ),
    Row(
        "prefix_sum",
        lambda x, g: fcoll.prefix_sum(x, g),
        flat,
        lambda xs: [total(xs[: rank + 1]) for rank in range(len(xs))],
        lambda xs, cs: [total(cs[rank:]) for rank in range(len(cs))],
    ),
    Row(
        "prefix_sum exclusive",
        lambda x, g: fcoll.prefix_sum(x, g, inclusive=False),
        flat,
        lambda xs: [total([0 * xs[0], *xs[:rank]]) for rank in range(len(xs))],
        lambda xs, cs: [total([0 * cs[0], *cs[rank + 1 :]]) for rank in range(len(cs))],
    ),
    Row(
        "prefix_sum reverse",
        lambda x, g: fcoll.prefix_sum(x, g, reverse=True),
        flat,
        lambda xs: [total(xs[rank:]) for rank in range(len(xs))],
        lambda xs, cs: [total(cs[: rank + 1]) for rank in range(len(cs))],
    ),
    Row("ragged_all_to_all", ragged, lambda n: (n + 2, 3), ragged_value, ragged_vjp),
    Row(
        "argmax",
        lambda x, g: fcoll.argmax(x, g),
        lambda n: (3, 5),
        lambda xs: same(xs, torch.stack(list(xs)).argmax(0)),
        linear=False,
    ),
    Row(
        "argmin",
        lambda x, g: fcoll.argmin(x, g),
        lambda n: (3, 5),
        lambda xs: same(xs, torch.stack(list(xs)).argmin(0)),
        linear=False,
    ),
    Row(
        "vary",
        lambda x, g: fcoll.vary(x, g),
        flat,
        lambda xs: xs,
        lambda xs, cs: same(xs, total(cs)),
        once="input",
    ),
    Row(
        "split",
        lambda x, g: fcoll.split(x, g),
        rows_cut,
        lambda xs: [cut(xs, x, 0)[rank] for rank, x in enumerate(xs)],
        lambda xs, cs: same(xs, join(cs, 0)),
        once="input",
    ),
    Row(
        "split axis -1",
        lambda x, g: fcoll.split(x, g, -1),
        columns_cut,
        lambda xs: [cut(xs, x, 1)[rank] for rank, x in enumerate(xs)],
        lambda xs, cs: same(xs, join(cs, 1)),
        once="input",
    ),
    Row(
        "split untiled",
        lambda x, g: fcoll.split(x, g, -2, tiled=False),
        lambda n: (2, n, 3),
        lambda xs: [cut(xs, x, 1, False)[rank] for rank, x in enumerate(xs)],
        lambda xs, cs: same(xs, join(cs, 1, False)),
        once="input",
    ),
    Row(
        "axis_index",
        lambda x, g: x * fcoll.axis_index(g),
        flat,
        lambda xs: [x * rank for rank, x in enumerate(xs)],
        lambda xs, cs: [c * rank for rank, c in enumerate(cs)],
    ),
    Row(
        "axis_size",
        lambda x, g: x * fcoll.axis_size(g),
        flat,
        lambda xs: [x * len(xs) for x in xs],
        lambda xs, cs: [c * len(xs) for c in cs],
    ),
]

DIFFERENTIABLE = [row for row in TABLE if row.vjp is not None]
TRANSPOSED = [row for row in DIFFERENTIABLE if not row.once]
DECLARED = [row for row in DIFFERENTIABLE if row.once]
