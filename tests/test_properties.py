"""Drawn calls: with any tree, shape, axis, group, dtype and layout they mean what plain torch gives on the stack."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import common
import optree
import pytest
import torch
from common import Pools, vjp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from table import Tensors, cut, join, largest, only, product, same, send, smallest, sum_blocks, swap, total
from torch import Tensor

import fcoll
from fcoll.testing import check_adjoint

QUIET = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
HALVES = [torch.float16, torch.bfloat16]
SMOOTH = [torch.float32, torch.float64, torch.complex64, torch.complex128]
DTYPES = [*HALVES, *SMOOTH, torch.int32, torch.int64, torch.uint8]

AXES = ("all_gather", "gather", "reduce_scatter", "scatter", "split", "all_to_all")
CUTS = ("reduce_scatter", "scatter", "split", "all_to_all")
NAMES = ("all_reduce", "broadcast", "reduce", "permute", "shift", "vary", *AXES)


@dataclass
class Case:
    """One call, and what it is called with."""

    name: str
    n: int  # ranks in the group
    sizes: tuple[int, ...]  # of the named axes
    order: tuple[int, ...]  # in which the group takes the axes
    partition: tuple[tuple[int, ...], ...]  # of an axis, if that is not one group
    leaves: list[tuple[tuple[int, ...], torch.dtype, str]]  # shape, dtype and layout
    tree: Any  # with the leaves' numbers in their places
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"axis {i}" for i in range(len(self.sizes)))

    def group(self) -> Any:
        if self.partition:
            return fcoll.subgroups(self.names[0], self.partition)
        names = tuple(self.names[i] for i in self.order)
        return names if len(names) > 1 else names[0]

    def call(self, tree: Any, group: Any) -> Any:
        function: Callable[..., Any] = getattr(fcoll, self.name)
        return function(tree, group, **self.options)

    def inputs(self) -> list[Tensor]:
        """Per leaf a stack over all ranks, axes of names in front: small integers, so that sums are exact."""
        out = []
        for i, (shape, dtype, _) in enumerate(self.leaves):
            random = torch.Generator().manual_seed(i + 1)
            x = torch.randint(-3, 4, (*self.sizes, *shape), generator=random)
            if dtype.is_complex:
                out.append(torch.complex(x.double(), x.flip(0).double()).to(dtype))
            else:
                out.append((x.abs() if dtype == torch.uint8 else x).to(dtype))
        return out

    def fill(self, leaves: Any) -> Any:
        spec = optree.tree_structure(self.tree)
        return optree.tree_unflatten(spec, list(leaves))

    def lay_out(self, leaves: Any) -> list[Tensor]:
        return [LAYOUTS[layout](x) for x, (_, _, layout) in zip(leaves, self.leaves, strict=True)]

    def run(self, leaves: Any, group: Any) -> list[Tensor]:
        """The per-rank program, on a list of leaves."""
        out: list[Tensor] = optree.tree_leaves(self.call(self.fill(self.lay_out(leaves)), group))
        return out

    def mapped(self, f: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(self.names):
            f = fcoll.vmap(f, axis_name=name)
        return f

    def to_group(self, stack: Tensor) -> Tensor:
        """From the axes of names to one axis of ranks in the order of the group; of groups, one after the other."""
        k = len(self.sizes)
        ranks: Tensor = stack.permute(*self.order, *range(k, stack.ndim)).flatten(0, k - 1)
        if self.partition:
            ranks = ranks[torch.tensor(self.partition).flatten()]
        return ranks

    def from_group(self, ranks: Tensor) -> Tensor:
        if self.partition:
            ranks = torch.empty_like(ranks).index_copy(0, torch.tensor(self.partition).flatten(), ranks)
        stack: Tensor = ranks.unflatten(0, [self.sizes[i] for i in self.order])
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return stack.permute(*back, *range(len(back), stack.ndim))

    def meant(self, stack: Tensor, layout: str) -> Tensor:
        """What the call gives on one stacked leaf, in plain torch."""
        ranks = [LAYOUTS[layout](x) for x in self.to_group(stack)]
        groups = [ranks[i : i + self.n] for i in range(0, len(ranks), self.n)]
        return self.from_group(torch.stack([y for xs in groups for y in self.of_ranks(xs)])).to(stack.dtype)

    def of_ranks(self, xs: Tensors) -> Tensors:
        n, o = self.n, self.options
        tiled = o.get("tiled", True)
        match self.name:
            case "all_reduce" | "reduce":
                y = {"sum": total, "mean": mean, "max": largest, "min": smallest, "prod": product}[o["op"]](xs)
                return only(xs, y, o["dst"]) if self.name == "reduce" else same(xs, y)
            case "broadcast":
                return same(xs, xs[o["src"]])
            case "permute":
                return send(xs, o["perm"])
            case "shift":
                moves = [(s, s + o["offset"]) for s in range(n)]
                return send(xs, [(s, d % n) for s, d in moves if o["wrap"] or 0 <= d < n])
            case "vary":
                return xs
            case "all_gather":
                return same(xs, join(xs, o["axis"], tiled))
            case "gather":
                return only(xs, join(xs, o["axis"], tiled), o["dst"])
            case "reduce_scatter":
                return sum_blocks(xs, o["axis"], tiled)
            case "scatter":
                return cut(xs, xs[o["src"]], o["axis"], tiled)
            case "split":
                return [cut(xs, x, o["axis"], tiled)[rank] for rank, x in enumerate(xs)]
        return swap(xs, o["split_axis"], o["concat_axis"], tiled)


def mean(xs: Tensors) -> Tensor:
    return total(xs) / len(xs)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "turned": lambda x: x.movedim(0, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 0) if x.ndim else x,
    "every other": lambda x: torch.stack((x, -x), -1)[..., 0],
    "expanded": lambda x: x[:1].expand_as(x) if x.ndim else x,
}


@st.composite
def cases(draw: Any, dtypes: list[torch.dtype], n: int = 0, flat: bool = False) -> Case:
    """Any call; with n given, of the n ranks of a world; `flat` for a single name."""
    if n:
        sizes, order = (n,), (0,)
    else:
        sizes = tuple(draw(st.lists(st.integers(1, 4 if flat else 3), min_size=1, max_size=1 if flat else 2)))
        order = tuple(draw(st.permutations(range(len(sizes)))))
    world = math.prod(sizes)
    partition: tuple[tuple[int, ...], ...] = ()
    size = world
    if len(sizes) == 1 and draw(st.booleans()):
        size = draw(st.sampled_from([k for k in range(1, world + 1) if world % k == 0]))
        ranks = draw(st.permutations(range(world)))
        partition = tuple(tuple(ranks[i : i + size]) for i in range(0, world, size))

    name = draw(st.sampled_from(NAMES))
    tiled = draw(st.booleans())
    options: dict[str, Any] = {}
    ranks_of = st.integers(0, size - 1)
    if name in ("all_reduce", "reduce"):
        options["op"] = draw(st.sampled_from(["sum", "mean", "max", "min", "prod"]))
    if name in ("broadcast", "scatter"):
        options["src"] = draw(ranks_of)
    if name in ("reduce", "gather"):
        options["dst"] = draw(ranks_of)
    if name == "permute":
        count = draw(st.integers(0, size))
        sources, destinations = draw(st.permutations(range(size))), draw(st.permutations(range(size)))
        options["perm"] = list(zip(sources[:count], destinations[:count], strict=True))
    if name == "shift":
        options |= {"offset": draw(st.integers(-2 * size, 2 * size)), "wrap": draw(st.booleans())}

    low = 1 if name in CUTS or (name in AXES and tiled) else 0
    ndim = draw(st.integers(low, 3)) if name in AXES else 0  # the same for all leaves, as the axis is
    axis = split = 0
    if name in AXES:
        options["tiled"] = tiled
        inserted = 0 if tiled or name in CUTS else 1
        axis = draw(st.integers(-ndim - inserted, ndim + inserted - 1))
        if name == "all_to_all":
            split = draw(st.integers(-ndim, ndim - 1))
            options |= {"split_axis": split, "concat_axis": axis}
        else:
            options["axis"] = split = axis

    if options.get("op") == "mean":
        dtypes = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    if options.get("op") in ("max", "min"):
        dtypes = [dtype for dtype in dtypes if not dtype.is_complex]
    leaves = []
    for _ in range(draw(st.integers(1, 3))):
        count = ndim if name in AXES else draw(st.integers(0, 3))
        shape = [draw(st.integers(0, 3)) for _ in range(count)]
        if name in CUTS:
            shape[split] = size * draw(st.integers(0, 2)) if tiled else size
        leaves.append((tuple(shape), draw(st.sampled_from(dtypes)), draw(st.sampled_from(list(LAYOUTS)))))
    tree = draw(trees(list(range(len(leaves)))))
    return Case(name, size, sizes, order, partition, leaves, tree, options)


@st.composite
def trees(draw: Any, numbers: list[int]) -> Any:
    """A tree with these leaves in this order."""
    if len(numbers) == 1 and draw(st.booleans()):
        return numbers[0]
    at = draw(st.integers(1, len(numbers)))
    parts = [draw(trees(part)) for part in (numbers[:at], numbers[at:]) if part]
    kind = draw(st.sampled_from(["list", "tuple", "dict", "None"]))
    if kind == "dict":
        return {f"k{i}": part for i, part in enumerate(parts)}
    return [None, *parts] if kind == "None" else parts if kind == "list" else tuple(parts)


def close(got: Tensor, want: Tensor, at: Any) -> None:
    assert got.dtype == want.dtype, at
    if at.options.get("op") == "mean":
        torch.testing.assert_close(got, want, msg=lambda text: f"{at}: {text}")
    else:
        assert torch.equal(got, want), f"{at}: {got} != {want}"


@settings(QUIET, max_examples=200)
@given(cases(DTYPES))
def test_values(case: Case) -> None:
    got = case.mapped(lambda *leaves: case.run(leaves, case.group()))(*case.inputs())
    for y, x, (_, _, layout) in zip(got, case.inputs(), case.leaves, strict=True):
        close(y, case.meant(x, layout), case)


def random_like(xs: list[Tensor], seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    wide = {True: torch.complex128, False: torch.float64}
    return [torch.randn(x.shape, dtype=wide[x.dtype.is_complex], generator=random).to(x.dtype) for x in xs]


@settings(QUIET, max_examples=150)
@given(cases(SMOOTH, flat=True).filter(lambda case: case.name not in ("vary", "split")))
def test_the_adjoint_identity(case: Case) -> None:
    inputs = random_like(case.inputs(), 5)
    if sum(x.numel() for x in inputs):
        check_adjoint(lambda leaves: case.run(leaves, case.group()), inputs, case.names[0])


@settings(QUIET, max_examples=100)
@given(cases([torch.float64, torch.complex128]).filter(lambda case: case.name not in ("vary", "split")))
def test_inside_and_outside_of_the_map_the_gradient_is_the_same(case: Case) -> None:
    """Over tuples of names too."""
    inputs = random_like(case.inputs(), 5)
    whole = case.mapped(lambda *leaves: tuple(case.run(leaves, case.group())))
    results, pull = vjp(whole, *inputs)
    cotangents = random_like(list(results), 6)

    def pulled(leaves: Any, cotangents: Any) -> Any:
        return vjp(lambda *leaves: tuple(case.run(leaves, case.group())), *leaves)[1](tuple(cotangents))

    got = case.mapped(pulled)(inputs, cotangents)
    for mine, want in zip(got, pull(tuple(cotangents)), strict=True):
        torch.testing.assert_close(mine, want, msg=lambda text: f"{case}: {text}")


def drawn(strategy: Any, count: int) -> list[Case]:
    """So many cases at once."""
    found: list[Case] = []

    @settings(QUIET, max_examples=count, phases=[Phase.generate])
    @given(strategy)
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


@pytest.mark.parametrize("n", [2, 3, 4])
def test_values_on_processes(ranks: Pools, n: int) -> None:
    found = drawn(cases(DTYPES, n=n), 60)

    def f(found: list[Case]) -> list[list[Tensor]]:
        rank, out = int(fcoll.axis_index(fcoll.WORLD)), []
        for case in found:
            group = fcoll.subgroups(fcoll.WORLD, case.partition) if case.partition else fcoll.WORLD
            out.append(case.run([x[rank] for x in case.inputs()], group))
        return out

    got = ranks(n).run(f, found)
    for i, case in enumerate(found):
        for j, (x, (_, _, layout)) in enumerate(zip(case.inputs(), case.leaves, strict=True)):
            close(torch.stack([mine[i][j] for mine in got]), case.meant(x, layout), case)


@pytest.mark.parametrize("n", [3, 4])
def test_gradients_on_processes(ranks: Pools, n: int) -> None:
    """Against emulation."""
    found = drawn(cases([torch.float64, torch.complex128], n=n), 40)

    def pulled(case: Case, leaves: list[Tensor], weights: list[Tensor], group: Any) -> Any:
        ys, pull = vjp(lambda *leaves: tuple(case.run(leaves, group)), *leaves)
        return pull(tuple(weight * y for weight, y in zip(weights, ys, strict=True)))

    def emulated(case: Case) -> Callable[..., Any]:
        return lambda leaves, weights: pulled(case, leaves, weights, case.group())

    def arguments(case: Case) -> tuple[list[Tensor], list[Tensor]]:
        inputs = random_like(case.inputs(), 5)
        return inputs, random_like([torch.empty(n, dtype=x.dtype) for x in inputs], 6)

    def f(found: list[Case]) -> list[Any]:
        rank, out = int(fcoll.axis_index(fcoll.WORLD)), []
        for case in found:
            inputs, weights = arguments(case)
            group = fcoll.subgroups(fcoll.WORLD, case.partition) if case.partition else fcoll.WORLD
            out.append(pulled(case, [x[rank] for x in inputs], [w[rank] for w in weights], group))
        return out

    got = ranks(n).run(f, found)
    for i, case in enumerate(found):
        inputs, weights = arguments(case)
        run = case.mapped(emulated(case))
        for j, want in enumerate(run(inputs, weights)):
            common.close(torch.stack([rank[i][j] for rank in got]), want, case)
