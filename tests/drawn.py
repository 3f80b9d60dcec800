"""Programs of collectives, drawn at random: on a 2x2 mesh of processes, optimised and not, they compute the same.

A program is data: instructions that each make one more 4x4 value of earlier ones. The first values are the inputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll import P

AXES: Sequence[Any] = ("dp", "tp", ("dp", "tp"), ("tp", "dp"))
SPECS: Sequence[P] = (P(), P("dp"), P("tp"), P(None, "tp"), P("dp", "tp"), P(("dp", "tp")), P(None, ("tp", "dp")))
SIZE = 4


def halves(x: Tensor, axis: int) -> Tensor:
    parts: Tensor = x.unflatten(axis, (-1, SIZE))
    return parts.mean(axis)


def blocks(x: Tensor, y: Tensor, group: Any, axis: int) -> Tensor:
    """As many of the two as the group has ranks."""
    n = fcoll.axis_size(group)
    return torch.cat([x, y] * (n // 2), axis)


def chosen(x: Tensor, y: Tensor, group: Any, place: int) -> Tensor:
    return torch.where(fcoll.axis_index(group) == place % fcoll.axis_size(group), x, y)


def ring(group: Any, k: int) -> list[tuple[int, int]]:
    n = fcoll.axis_size(group)
    return [(r, (r + 1) % n) for r in range(n - k % 2)]


Step = Callable[[Tensor, Tensor, Any, int], Tensor]
"""(a value, another, a group, a small number) -> a value"""

STEPS: dict[str, Step] = {
    "tanh": lambda x, y, g, k: x.tanh(),
    "sin": lambda x, y, g, k: x.sin(),
    "negative": lambda x, y, g, k: -x,
    "scaled": lambda x, y, g, k: x * (0.5, 2.0, 3, -1.5)[k],
    "divided": lambda x, y, g, k: x / (2, 3.0, 5, 4)[k],
    "turned": lambda x, y, g, k: x.t(),
    "cloned": lambda x, y, g, k: x.clone(),
    "sum": lambda x, y, g, k: x + y,
    "difference": lambda x, y, g, k: x - y,
    "product": lambda x, y, g, k: x * y.tanh(),
    "matmul": lambda x, y, g, k: x @ y / SIZE,
    "total": lambda x, y, g, k: x.sum(k % 2, keepdim=True).expand(SIZE, SIZE) / SIZE,
    "mean": lambda x, y, g, k: x.mean() + y,
    "constant": lambda x, y, g, k: torch.full_like(x, 0.25 * k) + torch.tensor(0.5),
    "all_reduce": lambda x, y, g, k: fcoll.all_reduce(x, g, ("sum", "sum", "mean", "mean")[k]),
    "all_reduce_extremum": lambda x, y, g, k: fcoll.all_reduce(x, g, ("max", "min")[k % 2]),
    "all_reduce_product": lambda x, y, g, k: fcoll.all_reduce(x.sin(), g, "prod"),
    "all_reduce_invariant": lambda x, y, g, k: fcoll.all_reduce(x, g, invariant=True),
    "two_reductions": lambda x, y, g, k: fcoll.all_reduce(x, g) + fcoll.all_reduce(y, g) / (k + 1),
    "same_reduction": lambda x, y, g, k: fcoll.all_reduce(x, g) * fcoll.all_reduce(x / (k + 1), g).tanh(),
    "of_a_pair": lambda x, y, g, k: torch.cat(fcoll.all_reduce([x[:2], y[2:]], g)),
    "all_gather": lambda x, y, g, k: halves(fcoll.all_gather(x, g, k % 2), k % 2),
    "all_gather_stacked": lambda x, y, g, k: fcoll.all_gather(x, g, k % 3, tiled=False).sum(k % 3),
    "all_gather_invariant": lambda x, y, g, k: halves(fcoll.all_gather(x, g, k % 2, invariant=True), k % 2),
    "one_of_all": lambda x, y, g, k: fcoll.all_gather(x, g)[:SIZE],
    "own_of_gathered": lambda x, y, g, k: fcoll.split(fcoll.all_gather(x, g, k % 2), g, k % 2),
    "other_of_gathered": lambda x, y, g, k: halves(fcoll.split(fcoll.all_gather(x, g), g, 1), 0).repeat(
        1, fcoll.axis_size(g)
    ),
    "own_of_reduced": lambda x, y, g, k: fcoll.split(fcoll.all_reduce(blocks(x, y, g, k % 2), g), g, k % 2),
    "reduce_scatter": lambda x, y, g, k: fcoll.reduce_scatter(
        blocks(x, y, g, k % 2), g, k % 2, ("sum", "mean")[k // 2]
    ),
    "gathered_again": lambda x, y, g, k: halves(
        fcoll.all_gather(fcoll.reduce_scatter(blocks(x, y, g, 0), g), g, k % 2), k % 2
    ),
    "scattered_again": lambda x, y, g, k: fcoll.reduce_scatter(fcoll.all_gather(x, g, k % 2), g, k % 2),
    "all_to_all": lambda x, y, g, k: (
        halves(fcoll.all_to_all(blocks(x, y, g, 0), g, 0, k % 2), 0)[:, :SIZE]
        if k % 2 == 0
        else fcoll.all_to_all(x, g, 0, 0)
    ),
    "broadcast": lambda x, y, g, k: fcoll.broadcast(x, g, k % fcoll.axis_size(g)),
    "reduce": lambda x, y, g, k: fcoll.reduce(x, g, k % fcoll.axis_size(g)),
    "gather_at_root": lambda x, y, g, k: halves(fcoll.gather(x, g, k % fcoll.axis_size(g), k % 2), k % 2),
    "scatter": lambda x, y, g, k: fcoll.scatter(blocks(x, y, g, k % 2), g, k % fcoll.axis_size(g), k % 2),
    "shift": lambda x, y, g, k: fcoll.shift(x, g, k, wrap=k % 2 == 0),
    "permute": lambda x, y, g, k: fcoll.permute(x, g, ring(g, k)),
    "two_permutes": lambda x, y, g, k: fcoll.permute(x.tanh(), g, ring(g, k)) - fcoll.shift(y, g, 1, wrap=k % 2 == 0),
    "prefix_sum": lambda x, y, g, k: fcoll.prefix_sum(x, g),
    "reduced_product": lambda x, y, g, k: fcoll.all_reduce(x @ y / SIZE, g),
    "reduced_wide": lambda x, y, g, k: halves(fcoll.all_reduce(torch.cat([x - y, x.t() * (k + 1)], k % 2), g), k % 2),
    "reduced_rows": lambda x, y, g, k: fcoll.all_reduce((x.sum(0) / SIZE).expand(SIZE, SIZE) * y.cos(), g),
    "reduced_function": lambda x, y, g, k: fcoll.all_reduce((x.mean(1, keepdim=True) + y[k]).tanh(), g),
    "normalised": lambda x, y, g, k: fcoll.all_reduce(torch.nn.functional.layer_norm(x, (SIZE,), y[k]), g),
    "masked": lambda x, y, g, k: fcoll.all_reduce(torch.where(y > 0, x[k], 0.5 * y).repeat(2, 1), g)[:SIZE],
    "partly_gathered": lambda x, y, g, k: halves(
        torch.cat(fcoll.all_gather([x, torch.full_like(x, 0.5), y.sin()], g, k % 2), k % 2), k % 2
    ),
    "partly_scattered": lambda x, y, g, k: torch.stack(
        fcoll.reduce_scatter([blocks(z, z, g, 0) for z in (x, torch.ones_like(x), y)], g, 0)
    ).sum(0),
    "two_exchanges": lambda x, y, g, k: fcoll.all_to_all(x, g) * fcoll.all_to_all(y.sin(), g),
    "residual": lambda x, y, g, k: x + fcoll.all_reduce(torch.nn.functional.layer_norm(x, (SIZE,), x[k]) @ y, g) / SIZE,
    "written": lambda x, y, g, k: fcoll.all_reduce(x.cos().mul_(k + 1), g),
    "vary": lambda x, y, g, k: fcoll.vary(x, g),
    "split": lambda x, y, g, k: fcoll.split(blocks(x, y, g, k % 2), g, k % 2),
    "by_rank": lambda x, y, g, k: x * (fcoll.axis_index(g) + 1),
    "chosen": chosen,
}


@dataclasses.dataclass(frozen=True)
class Program:
    """Inputs by their specs; steps by name, values, group and number; which values make the loss; what is computed."""

    specs: tuple[P, ...]
    steps: tuple[tuple[str, int, int, Any, int], ...]
    ends: tuple[int, ...]
    order: int
    mapped: bool  # by shard_map; otherwise every rank has its own inputs

    def run(self, values: Sequence[Tensor]) -> Tensor:
        """One rank's part."""
        values = list(values)
        for name, a, b, group, k in self.steps:
            values.append(STEPS[name](values[a], values[b], group, k))
        total = torch.stack([values[i].sin().mean() for i in self.ends]).sum()
        return fcoll.all_reduce(total, ("dp", "tp"), "mean")

    def function(self, mesh: Any, rank: int) -> tuple[Callable[..., Any], list[Tensor]]:
        """The value, the gradient, or the gradient of a product with that; and its arguments."""
        generator = torch.Generator().manual_seed(7 if self.mapped else 7 + rank)
        shapes = [shape_of(spec) if self.mapped else (SIZE, SIZE) for spec in self.specs]
        args = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        directions = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        if self.mapped:
            loss: Any = fcoll.shard_map(lambda *args: self.run(args), mesh, self.specs, P(), check=False)
        else:
            loss = fcoll.bind(mesh)(lambda *args: self.run(args))
        everything = tuple(range(len(args)))

        def value(*args: Tensor) -> Any:
            return loss(*args)

        gradient: Any = torch.func.grad(value, everything)

        def second(*args: Tensor) -> Any:
            n = len(args) // 2
            inner = lambda *xs: sum((g * d).sum() for g, d in zip(gradient(*xs), args[n:], strict=True))  # noqa: E731
            return torch.func.grad(inner, everything)(*args[:n])

        if self.order == 2:
            return second, args + directions
        return (gradient if self.order else value), args


def shape_of(spec: P) -> tuple[int, int]:
    """Of the global value whose pieces are 4x4."""
    entries = [*spec.entries, (), ()]
    return SIZE * 2 ** len(entries[0]), SIZE * 2 ** len(entries[1])


@st.composite
def programs(draw: Any) -> Program:
    """Any of them; most of the kind that may be rewritten."""
    specs = tuple(draw(st.lists(st.sampled_from(SPECS), min_size=1, max_size=3)))
    names = st.sampled_from(list(STEPS))
    steps = []
    for i in range(draw(st.integers(2, 7))):
        count = len(specs) + i
        which = st.integers(0, count - 1)
        steps.append(
            (draw(names), count - 1 - draw(which), draw(which), draw(st.sampled_from(AXES)), draw(st.integers(0, 3)))
        )
    count = len(specs) + len(steps)
    ends = (count - 1, *draw(st.lists(st.integers(len(specs), count - 1), max_size=2)))
    return Program(specs, tuple(steps), ends, draw(st.integers(0, 2)), bool(draw(st.integers(0, 4))))


def drawn(count: int) -> list[Program]:
    """The same ones every time, all different."""
    found: dict[Program, None] = {}

    @settings(
        max_examples=count + count // 4, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs())
    def collect(program: Program) -> None:
        found.setdefault(program)

    collect()
    return list(found)[:count]


def traced(program: Program, mesh: Any) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """The graph of what a program computes, and arguments."""
    function, args = program.function(mesh, dist.get_rank())
    with fcoll.marked():
        return make_fx(lambda *args: function(*args))(*args), args


def difference(program: Program, mesh: Any) -> tuple[str, fcoll.Plan]:
    """What is wrong on this rank with the program's optimised form, "" if nothing; and what was done."""
    graph, args = traced(program, mesh)
    want = as_list(graph(*args))
    got = as_list(fcoll.optimize(graph)(*args))
    plan = graph.meta["fcoll"]
    for a, b in zip(got, want, strict=True):
        scale = max(1.0, float(b.abs().max()))
        if not torch.allclose(a, b, rtol=1e-9, atol=1e-9 * scale, equal_nan=True):
            lines = "\n  ".join(plan.reasons)
            return f"{program}\n  differs by {float((a - b).abs().max())}\n  {lines}", plan
    return "", plan


def as_list(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


@functools.cache
def _mesh() -> fcoll.meshes.Mesh:
    """One for all programs: each makes groups, and each group of gloo a thread."""
    return fcoll.mesh(dp=2, tp=2)


def differences(programs: Sequence[Program]) -> tuple[list[str], list[fcoll.Plan]]:
    """Of all of them, on this rank."""
    mesh = _mesh()
    found = [difference(program, mesh) for program in programs]
    return [text for text, _ in found if text], [plan for _, plan in found]
