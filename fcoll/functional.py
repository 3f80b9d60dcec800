"""The collectives: pure functions of trees of tensors over a group of n ranks.

In every specification r is this rank's index in the group, x_r its leaf, y_r its result, and block r the r-th of n
equal pieces along an axis. `group` is an axis name, a tuple of names (major first), a ProcessGroup, a DeviceMesh (all
of it), a `fcoll.Group` or `fcoll.WORLD`. Negative axes count from the end. Python numbers become 0-d tensors.

Derivatives are those of the whole map over all ranks: a gradient taken inside a rank's program is the gradient of the
sum of all ranks' outputs. `invariant=True`, `vary` and `split` declare that a value counts once for all ranks.

All functions raise `ValueError` for an axis, size, rank or permutation that does not fit, `TypeError` for a leaf or
dtype that the collective is not defined for, `NameError` for an unbound axis name, all before any communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fcoll import groups, trees
from fcoll.bind import bind
from fcoll.errors import fail
from fcoll.groups import Axis, GroupLike

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "axis_size",
    "broadcast",
    "gather",
    "permute",
    "reduce",
    "reduce_scatter",
    "scatter",
    "shift",
    "split",
    "vary",
]

Tree = TypeVar("Tree")


def all_reduce(tree: Tree, group: GroupLike, op: str = "sum", *, invariant: bool = False) -> Tree:
    """Reduce elementwise over the ranks; every rank gets the result.

    Per rank:
        sum, mean, max, min, prod   y_r = op over s of x_s
        any, all                    y_r = op over s of (x_s != 0), a bool tensor

    Transpose: of sum and mean, themselves. max and min share Σ_s ȳ_s evenly among the ranks that attain the result (a
    NaN wins, and makes the gradient NaN); prod multiplies Σ_s ȳ_s by the product over the other ranks, finite at zeros.
    With `invariant=True` the result counts once: ȳ_r stands for Σ_s ȳ_s, and sum's transpose is `vary`.

    Choose `reduce_scatter` if each rank needs a block only, `reduce` if one rank needs it.

    Args:
        tree: leaves of the same shape on every rank. Not for bool (use any, all); mean is for floating and complex
            leaves; max and min not for complex ones.
        group: the ranks.
        op: one of the above.
        invariant: the result is used in the same way on every rank, and counts once in derivatives.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.all_reduce(x, "i", "max"), axis_name="i")(torch.tensor([1, 3, 2]))
        tensor([3, 3, 3])
    """
    call = _Leaves("all_reduce", tree, group)
    call.check_op(op)
    suffix = "_invariant" if invariant and op not in ("any", "all") else ""
    name = _RECORDS[op] + suffix
    return call.run(lambda x: bind(name, x, call.axis, op))


def all_gather(tree: Tree, group: GroupLike, axis: int = 0, *, tiled: bool = True, invariant: bool = False) -> Tree:
    """Give every rank the x of all.

    Per rank:
        tiled       y_r = x_0, …, x_{n-1} concatenated along `axis`: size a there becomes n·a
        untiled     y_r = x_0, …, x_{n-1} stacked along a new `axis` of size n

    Transpose: `reduce_scatter`; with `invariant=True`, where the result counts once, `split`: x̄_r is block r of ȳ_r,
    without communication.

    Args:
        tree: leaves of any dtype, of the same shape on every rank; 0-d leaves need `tiled=False`.
        group: the ranks.
        axis: where; of the result, if untiled.
        tiled: concatenate, rather than stack.
        invariant: the result is used in the same way on every rank, and counts once in derivatives.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.all_gather(x, "i"), axis_name="i", out_dims=None)(torch.tensor([[1], [2]]))
        tensor([1, 2])
    """
    call = _Leaves("all_gather", tree, group)
    axes = [call.axis_of(i, "axis", axis, inserted=not tiled) for i in call.indices]
    name = "all_gather_invariant" if invariant else "all_gather"
    return call.run(lambda x, a: bind(name, x, call.axis, a, tiled), axes)


def reduce_scatter(tree: Tree, group: GroupLike, axis: int = 0, op: str = "sum", *, tiled: bool = True) -> Tree:
    """Reduce over the ranks and leave block r on rank r.

    Per rank:
        tiled       y_r = op over s of block r of x_s along `axis`: size a there becomes a/n
        untiled     `axis` has size n and disappears

    Transpose: of the sum, `all_gather`; of the mean the same over n; max and min share as in `all_reduce`.

    Args:
        tree: leaves of the same shape on every rank; the size along `axis` is a multiple of n (untiled: n).
        group: the ranks.
        axis: the axis that is cut.
        op: sum, mean, max or min; dtypes as for `all_reduce`.
        tiled: keep the axis.

    Example:
        >>> x = torch.arange(4).repeat(2, 1)
        >>> fcoll.vmap(lambda x: fcoll.reduce_scatter(x, "i"), axis_name="i")(x)
        tensor([[0, 2],
                [4, 6]])
    """
    call = _Leaves("reduce_scatter", tree, group)
    call.check_op(op, among=("sum", "mean", "max", "min"))
    axes = [call.blocks_of(i, "axis", axis, tiled) for i in call.indices]
    if op == "sum":
        return call.run(lambda x, a: bind("reduce_scatter", x, call.axis, a, tiled), axes)
    if op == "mean":
        return call.run(lambda x, a: bind("reduce_scatter", x / call.axis.n, call.axis, a, tiled), axes)

    def extremum(x: Tensor, a: int) -> Tensor:  # each rank reduces what it received
        if tiled:
            x = x.unflatten(a, (call.axis.n, x.shape[a] // call.axis.n))
        received = bind("all_to_all", x, call.axis, a, a, False)
        return received.amax(a) if op == "max" else received.amin(a)

    return call.run(extremum, axes)


def all_to_all(tree: Tree, group: GroupLike, split_axis: int = 0, concat_axis: int = 0, *, tiled: bool = True) -> Tree:
    """Send block q to rank q, and put together what arrives in the order of the ranks.

    Per rank:
        tiled       y_r = block r of x_0, …, x_{n-1} along `split_axis`, concatenated along `concat_axis`
        untiled     `split_axis` has size n and disappears; a new axis of size n appears at `concat_axis`

    Transpose: `all_to_all` with the two axes exchanged.

    Args:
        tree: leaves of any dtype, of the same shape on every rank; the size along `split_axis` is a multiple of n
            (untiled: n).
        group: the ranks.
        split_axis: the axis that is cut.
        concat_axis: the axis along which blocks arrive; of the result, if untiled.
        tiled: keep the number of axes.

    Example:
        >>> x = torch.arange(4).view(2, 2)
        >>> fcoll.vmap(lambda x: fcoll.all_to_all(x, "i"), axis_name="i")(x)
        tensor([[0, 2],
                [1, 3]])
    """
    call = _Leaves("all_to_all", tree, group)
    axes = [
        (call.blocks_of(i, "split_axis", split_axis, tiled), call.axis_of(i, "concat_axis", concat_axis))
        for i in call.indices
    ]
    return call.run(lambda x, pair: bind("all_to_all", x, call.axis, *pair, tiled), axes)


def broadcast(tree: Tree, group: GroupLike, src: int = 0) -> Tree:
    """Give every rank the x of one.

    Per rank:
        y_r = x_src

    Transpose: `reduce` to src. The other ranks' x gets zeros.

    Args:
        tree: leaves of any dtype, of the same shape on every rank.
        group: the ranks.
        src: index within the group.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.broadcast(x, "i", src=1), axis_name="i")(torch.tensor([5, 6, 7]))
        tensor([6, 6, 6])
    """
    call = _Leaves("broadcast", tree, group)
    root = call.root("src", src)
    return call.run(lambda x: bind("broadcast", x, call.axis, root))


def reduce(tree: Tree, group: GroupLike, dst: int = 0, op: str = "sum") -> Tree:
    """Reduce elementwise over the ranks; one rank gets the result, the others zeros.

    Per rank:
        y_dst = op over s of x_s, else 0 (bool results: False)

    Transpose: of the sum, `broadcast` from dst.

    Args:
        tree: as for `all_reduce`.
        group: the ranks.
        dst: index within the group.
        op: as for `all_reduce`.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.reduce(x, "i", dst=1), axis_name="i")(torch.tensor([5, 6, 7]))
        tensor([ 0, 18,  0])
    """
    call = _Leaves("reduce", tree, group)
    root = call.root("dst", dst)
    call.check_op(op)
    if op == "sum":
        return call.run(lambda x: bind("reduce", x, call.axis, root))
    if op == "mean":
        return call.run(lambda x: bind("reduce", x, call.axis, root) / call.axis.n)
    return call.run(lambda x: bind("only_at", bind(_RECORDS[op], x, call.axis, op), call.axis, root))


def gather(tree: Tree, group: GroupLike, dst: int = 0, axis: int = 0, *, tiled: bool = True) -> Tree:
    """Give one rank the x of all, the others zeros.

    Per rank:
        y_dst = x_0, …, x_{n-1} as in `all_gather`, else 0, of the same shape and without memory of its own

    Transpose: `scatter` from dst.

    Args:
        tree: as for `all_gather`.
        group: the ranks.
        dst: index within the group.
        axis: where; of the result, if untiled.
        tiled: concatenate, rather than stack.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.gather(x, "i"), axis_name="i")(torch.tensor([[1], [2]]))
        tensor([[1, 2],
                [0, 0]])
    """
    call = _Leaves("gather", tree, group)
    root = call.root("dst", dst)
    axes = [call.axis_of(i, "axis", axis, inserted=not tiled) for i in call.indices]
    return call.run(lambda x, a: bind("gather", x, call.axis, a, tiled, root), axes)


def scatter(tree: Tree, group: GroupLike, src: int = 0, axis: int = 0, *, tiled: bool = True) -> Tree:
    """Give rank r block r of one rank's x.

    Per rank:
        tiled       y_r = block r of x_src along `axis`
        untiled     `axis` has size n and disappears

    Transpose: `gather` to src. The other ranks' x, of which only the shape matters, gets zeros.

    Args:
        tree: leaves of any dtype, of the same shape on every rank; the size along `axis` is a multiple of n
            (untiled: n).
        group: the ranks.
        src: index within the group.
        axis: the axis that is cut.
        tiled: keep the axis.

    Example:
        >>> x = torch.tensor([[1, 2], [0, 0]])
        >>> fcoll.vmap(lambda x: fcoll.scatter(x, "i"), axis_name="i")(x)
        tensor([[1],
                [2]])
    """
    call = _Leaves("scatter", tree, group)
    root = call.root("src", src)
    axes = [call.blocks_of(i, "axis", axis, tiled) for i in call.indices]
    return call.run(lambda x, a: bind("scatter", x, call.axis, a, tiled, root), axes)


def permute(tree: Tree, group: GroupLike, perm: Sequence[tuple[int, int]]) -> Tree:
    """Send x along (source, destination) pairs.

    Per rank:
        y_d = x_s for each (s, d) in `perm`; zeros on a rank that is nobody's destination

    Transpose: `permute` with the pairs turned round.

    Args:
        tree: leaves of any dtype, of the same shape on every rank.
        group: the ranks.
        perm: pairs of indices within the group; a source occurs once, a destination too.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.permute(x, "i", [(0, 2)]), axis_name="i")(torch.tensor([5, 6, 7]))
        tensor([0, 0, 5])
    """
    call = _Leaves("permute", tree, group)
    pairs = call.pairs(perm)
    return call.run(lambda x: bind("permute", x, call.axis, pairs))


def shift(tree: Tree, group: GroupLike, offset: int = 1, *, wrap: bool = True) -> Tree:
    """Send x to the rank `offset` further on.

    Per rank:
        wrap        y_r = x_{(r - offset) mod n}
        else        y_r = x_{r - offset}, zeros where there is no such rank

    Transpose: `shift` by -offset.

    Args:
        tree: leaves of any dtype, of the same shape on every rank.
        group: the ranks.
        offset: how far; may be negative.
        wrap: go on at the other end.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.shift(x, "i"), axis_name="i")(torch.tensor([5, 6, 7]))
        tensor([7, 5, 6])
    """
    call = _Leaves("shift", tree, group)
    if not isinstance(offset, int):
        fail("type", "shift: offset is an integer, got {}", type(offset).__name__)
    n = call.axis.n
    moves = [(source, source + offset) for source in range(n)]
    pairs = tuple((s, d % n) for s, d in moves if wrap or 0 <= d < n)
    return call.run(lambda x: bind("permute", x, call.axis, pairs))


def vary(tree: Tree, group: GroupLike) -> Tree:
    """Mark where a value that is the same on all ranks, and counts once, starts to be used differently on each.

    Per rank:
        y_r = x_r

    Transpose: `all_reduce`: the cotangents of all ranks' uses are summed.

    Args:
        tree: leaves of any dtype.
        group: the ranks.

    Example:
        >>> def loss(w, x):
        ...     return (fcoll.vary(w, "i") * x).sum()
        >>> grad = fcoll.vmap(torch.func.grad(loss), in_dims=(None, 0), axis_name="i")
        >>> grad(torch.tensor(1.0), torch.tensor([2.0, 3.0]))
        tensor([5., 5.])
    """
    call = _Leaves("vary", tree, group)
    parts = groups.split_parts(call.axis)

    def each(x: Tensor) -> Tensor:
        for part in parts:
            x = bind("vary", x, part, "sum")
        return x

    return call.run(each)


def split(tree: Tree, group: GroupLike, axis: int = 0, *, tiled: bool = True) -> Tree:
    """Take the own block of a value that is the same on all ranks, and counts once.

    Per rank:
        tiled       y_r = block r of x_r along `axis`
        untiled     `axis` has size n and disappears

    Transpose: `all_gather`: every rank gets the cotangents of all blocks. There is no communication forward.

    Args:
        tree: leaves of any dtype; the size along `axis` is a multiple of n (untiled: n).
        group: the ranks.
        axis: the axis that is cut.
        tiled: keep the axis.

    Example:
        >>> fcoll.vmap(lambda: fcoll.split(torch.arange(4), "i"), axis_name="i", axis_size=2)()
        tensor([[0, 1],
                [2, 3]])
    """
    call = _Leaves("split", tree, group)
    axes = [call.blocks_of(i, "axis", axis, tiled) for i in call.indices]
    parts = groups.split_parts(call.axis)

    def each(x: Tensor, a: int) -> Tensor:
        if tiled or len(parts) == 1:
            for part in parts:
                x = bind("split", x, part, a, tiled)
            return x
        x = x.unflatten(a, [part.n for part in parts]) if parts else x.squeeze(a)
        for part in parts:
            x = bind("split", x, part, a, False)
        return x

    return call.run(each, axes)


def axis_index(group: GroupLike) -> Tensor:
    """This rank's index in the group, as a 0-d int64 tensor; over a tuple of names it is row-major.

    Example:
        >>> fcoll.vmap(lambda: fcoll.axis_index("i"), axis_name="i", axis_size=3)()
        tensor([0, 1, 2])
    """
    return groups.axis_index(groups.resolve("axis_index", group))


def axis_size(group: GroupLike) -> int:
    """The number of ranks in the group.

    Example:
        >>> fcoll.vmap(lambda x: x / fcoll.axis_size("i"), axis_name="i")(torch.ones(2))
        tensor([0.5000, 0.5000])
    """
    axis = groups.resolve("axis_size", group)
    if len(set(map(len, axis.layout.partition))) > 1:
        fail("value", "axis_size: the subgroups of {} have different sizes", axis.label)
    return axis.n


_RECORDS = {
    "sum": "all_reduce",
    "mean": "all_reduce",
    "max": "extremum",
    "min": "extremum",
    "prod": "product",
    "any": "truth",
    "all": "truth",
}


class _Leaves(Generic[Tree]):
    """One call: its leaves, its axis, and the checks of both, each of which names the leaf."""

    def __init__(self, function: str, tree: Tree, group: GroupLike) -> None:
        self.function, self.tree = function, tree
        self.axis: Axis = groups.resolve(function, group)
        self.leaves, self.spec = trees.flatten(tree)
        self.indices = range(len(self.leaves))
        for i, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Tensor):
                self.leaves[i] = self._number(i, leaf)
            elif isinstance(leaf, DTensor):
                self.fail(i, "type", "is a DTensor; send its .to_local(), or use fcoll.shard_map")
            elif leaf.layout != torch.strided:
                self.fail(i, "type", "is {}; only strided tensors can be sent: use .to_dense()", str(leaf.layout))

    def run(self, each: Callable[..., Tensor], arguments: Sequence[Any] | None = None) -> Tree:
        """The tree of `each(leaf)`, or `each(leaf, its argument)`."""
        if arguments is None:
            results = [each(leaf) for leaf in self.leaves]
        else:
            results = [each(leaf, argument) for leaf, argument in zip(self.leaves, arguments, strict=True)]
        result: Tree = trees.unflatten(self.spec, results)
        return result

    def fail(self, i: int, kind: str, template: str, *details: object) -> NoReturn:
        fail(kind, "{}: {} " + template, self.function, trees.path(self.tree, i), *details)

    def _number(self, i: int, leaf: Any) -> Tensor:
        if isinstance(leaf, (bool, int, float, complex)):
            return torch.tensor(leaf)
        self.fail(i, "type", "is a {}; leaves are tensors, numbers and None", type(leaf).__name__)

    def axis_of(self, i: int, name: str, axis: int, *, inserted: bool = False) -> int:
        """`axis`, counted from the front; `inserted` where it is one that the result has and the leaf has not."""
        self._even()
        leaf = self.leaves[i]
        if not isinstance(axis, int) or isinstance(axis, bool):
            fail("type", "{}: {} is an integer, got {}", self.function, name, type(axis).__name__)
        ndim = leaf.ndim + inserted
        if not -ndim <= axis < ndim:
            remedy = f"use one from {-ndim} to {ndim - 1}" if ndim else "a 0-d tensor has no axis; use tiled=False"
            self.fail(i, "value", "has shape {}: {}={} is out of range; {}", leaf.shape, name, axis, remedy)
        return axis + ndim if axis < 0 else axis

    def blocks_of(self, i: int, name: str, axis: int, tiled: bool) -> int:
        """`axis`, counted from the front, along which the leaf is cut into n blocks."""
        leaf, n = self.leaves[i], self.axis.n
        axis = self.axis_of(i, name, axis)
        size = leaf.shape[axis]
        if tiled and size % n:
            self.fail(
                i, "value", "has shape {}: size {} along {}={} is not a multiple of the {} ranks of {}; pad it",
                leaf.shape, size, name, axis, n, self.axis.label,
            )  # fmt: skip
        if not tiled and size != n:
            self.fail(
                i, "value",
                "has shape {}: size {} along {}={} must be {}, the number of ranks of {}; or use tiled=True",
                leaf.shape, size, name, axis, n, self.axis.label,
            )  # fmt: skip
        return axis

    def _even(self) -> None:
        if len(set(map(len, self.axis.layout.partition))) > 1:
            fail("value", "{}: the subgroups of {} have different sizes", self.function, self.axis.label)

    def check_op(self, op: str, among: Sequence[str] = tuple(_RECORDS)) -> None:
        """The operation exists, and for every leaf's dtype."""
        if op not in among:
            fail("value", "{}: op is one of {}, got {!r}", self.function, ", ".join(among), op)
        if op == "prod":
            self._even()
        for i, leaf in enumerate(self.leaves):
            dtype = leaf.dtype
            if op in ("any", "all"):
                self.leaves[i] = leaf if dtype == torch.bool else leaf != 0
            elif dtype == torch.bool and op in ("sum", "mean", "prod"):
                self.fail(i, "type", "is bool, which has no {}; use any or all, or convert it", op)
            elif op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
                self.fail(i, "type", "is {}, which has no mean; convert it to a floating dtype", str(dtype))
            elif op in ("max", "min") and dtype.is_complex:
                self.fail(i, "type", "is {}, which has no order and so no {}", str(dtype), op)
            elif dtype in _ONLY_MOVED:
                self.fail(i, "type", "is {}, which torch can move but not reduce; convert it", str(dtype))

    def root(self, name: str, rank: int) -> int:
        """A rank of the group."""
        if not isinstance(rank, int) or isinstance(rank, bool):
            fail("type", "{}: {} is an integer, got {}", self.function, name, type(rank).__name__)
        n = min(map(len, self.axis.layout.partition)) if self.axis.layout.partition else self.axis.n
        if not 0 <= rank < n:
            fail(
                "value", "{}: {}={} is not a rank of {}: they go from 0 to {}, counted within the group",
                self.function, name, rank, self.axis.label, n - 1,
            )  # fmt: skip
        return rank

    def pairs(self, perm: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """A permutation, whole or in part."""
        self._even()
        pairs = tuple((int(source), int(destination)) for source, destination in perm)
        for what, ranks in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
            for rank in ranks:
                if not 0 <= rank < self.axis.n:
                    fail(
                        "value", "{}: {} {} in perm is not a rank of {}: they go from 0 to {}",
                        self.function, what, rank, self.axis.label, self.axis.n - 1,
                    )  # fmt: skip
            if len(set(ranks)) != len(ranks):
                fail("value", "{}: each {} in perm occurs once, got {}", self.function, what, str(pairs))
        return pairs


_ONLY_MOVED = {
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
}  # fmt: skip
