"""JAX's collectives: the names, argument order, defaults and dtype rules of `jax.lax`, on `fcoll.functional`.

`axis_name` is whatever `fcoll.functional` takes as a group, or a list of names, which is a tuple of them; an empty one
is the identity. `axis_index_groups` are lists of indices that collectives stay within, in the order of each list; they
go through `fcoll.subgroups`. Derivatives are those of `fcoll.functional`: the exact transposes over all ranks, which
is what JAX gives under `vmap` and under `shard_map(check_vma=False)`.

Where JAX has no rule, or accepts what has no meaning, fcoll's own answer holds: `pmax` and `pmin` have derivatives,
`ppermute` takes partial permutations and several names everywhere, complex `pmax` is a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from fcoll import functional, trees
from fcoll.errors import fail
from fcoll.groups import GroupLike, subgroups
from fcoll.uneven import Sizes

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "pvary",
    "ragged_all_to_all",
]

Tree = TypeVar("Tree")
AxisName: TypeAlias = "GroupLike | int | Sequence[Any]"
"""A group; or several names and, in the reductions, array axes, which are integers."""
Groups: TypeAlias = "Sequence[Sequence[int]] | None"


def psum(x: Tree, axis_name: AxisName, *, axis_index_groups: Groups = None) -> Tree:
    """Sum over the ranks.

    Per rank:
        y_r = Σ_s x_s       bool becomes int32; a Python number is multiplied by n at once, and stays one

    Transpose: psum.

    Args:
        x: a tree.
        axis_name: the ranks. Integers among names are array axes: they are summed over first, and disappear.
        axis_index_groups: sum within each of these.

    Example:
        >>> fcoll.vmap(lambda x: x / fcoll.lax.psum(1, "i"), axis_name="i")(torch.tensor([1.0, 2.0]))
        tensor([0.5000, 1.0000])
    """
    sums: Tree = _reduced(
        "psum", "sum", x, axis_name, axis_index_groups,
        before=lambda x: x.to(torch.int32) if x.dtype == torch.bool else x,
        over=lambda x, array_axes: x.sum(array_axes, dtype=x.dtype), number=lambda value, n: value * n,
    )  # fmt: skip
    return sums


def pmean(x: Tree, axis_name: AxisName, *, axis_index_groups: Groups = None) -> Tree:
    """Average over the ranks.

    Per rank:
        y_r = Σ_s x_s / n       float64 for int64, float32 for bool and the other integers

    Transpose: pmean.

    Args:
        x: a tree.
        axis_name: the ranks. Integers among names are array axes, averaged over as well.
        axis_index_groups: average within each of these.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.lax.pmean(x, "i"), axis_name="i", out_dims=None)(torch.tensor([1, 2]))
        tensor(1.5000, dtype=torch.float64)
    """
    means: Any = _reduced(
        "pmean", "mean", x, axis_name, axis_index_groups,
        before=_as_mean, over=torch.mean, number=lambda value, n: value / 1,
    )  # fmt: skip
    result: Tree
    if isinstance(x, Tensor):
        dtype = _mean_dtype(x)
        result = means.to(dtype) if dtype else means
        return result
    leaves, spec = trees.flatten(x)
    pairs = zip(trees.flatten(means)[0], map(_mean_dtype, leaves), strict=True)
    result = trees.unflatten(spec, [mean.to(dtype) if dtype else mean for mean, dtype in pairs])
    return result


def pmax(x: Tree, axis_name: AxisName, *, axis_index_groups: Groups = None) -> Tree:
    """Maximum over the ranks, elementwise.

    Per rank:
        y_r = max over s of x_s     NaN wins

    Derivative: ties share evenly, as in `fcoll.all_reduce`.

    Args:
        x: a tree, not of complex numbers.
        axis_name: the ranks. Integers among names are array axes, which are reduced as well.
        axis_index_groups: reduce within each of these.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.lax.pmax(x, "i"), axis_name="i")(torch.tensor([1, 3, 2]))
        tensor([3, 3, 3])
    """
    result: Tree = _reduced("pmax", "max", x, axis_name, axis_index_groups, over=torch.amax)
    return result


def pmin(x: Tree, axis_name: AxisName, *, axis_index_groups: Groups = None) -> Tree:
    """Minimum over the ranks, elementwise.

    Per rank:
        y_r = min over s of x_s     NaN wins

    Derivative: ties share evenly, as in `fcoll.all_reduce`.

    Args:
        x: a tree, not of complex numbers.
        axis_name: the ranks. Integers among names are array axes, which are reduced as well.
        axis_index_groups: reduce within each of these.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.lax.pmin(x, "i"), axis_name="i")(torch.tensor([1, 3, 2]))
        tensor([1, 1, 1])
    """
    result: Tree = _reduced("pmin", "min", x, axis_name, axis_index_groups, over=torch.amin)
    return result


def pbroadcast(x: Tree, axis_name: AxisName, source: int) -> Tree:
    """Give every rank the x of one.

    Per rank:
        y_r = x_source

    Transpose: the sum of all cotangents for the source, zeros for the others.

    Args:
        x: a tree.
        axis_name: the ranks.
        source: an index within the group.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.lax.pbroadcast(x, "i", 1), axis_name="i")(torch.tensor([5, 6, 7]))
        tensor([6, 6, 6])
    """
    return functional.broadcast(x, _group("pbroadcast", axis_name), source)


def ppermute(x: Tree, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Tree:
    """Send x along (source, destination) pairs.

    Per rank:
        y_d = x_s for each (s, d) in `perm`; zeros on a rank that is nobody's destination

    Transpose: ppermute with the pairs turned round.

    Args:
        x: a tree.
        axis_name: the ranks.
        perm: pairs of indices within the group; a source occurs once, a destination too.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.lax.ppermute(x, "i", [(0, 1), (1, 0)]), axis_name="i")(torch.tensor([5, 6]))
        tensor([6, 5])
    """
    return functional.permute(x, _group("ppermute", axis_name), perm)


def pshuffle(x: Tree, axis_name: AxisName, perm: Sequence[int]) -> Tree:
    """Fetch x from the rank that a permutation gives.

    Per rank:
        y_r = x_{perm[r]}

    Transpose: pshuffle with the inverse permutation.

    Args:
        x: a tree.
        axis_name: the ranks.
        perm: each index of the group once.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.lax.pshuffle(x, "i", [2, 0, 1]), axis_name="i")(torch.tensor([5, 6, 7]))
        tensor([7, 5, 6])
    """
    group = _group("pshuffle", axis_name)
    if not isinstance(perm, (list, tuple)) or not all(type(source) is int for source in perm):
        fail("type", "pshuffle: perm lists integers, got {}", str(perm))
    if sorted(perm) != list(range(functional.axis_size(group))):
        fail("value", "pshuffle: perm holds each of {} ranks once, got {}", functional.axis_size(group), str(perm))
    return functional.permute(x, group, [(source, rank) for rank, source in enumerate(perm)])


def pswapaxes(x: Tree, axis_name: AxisName, axis: int, *, axis_index_groups: Groups = None) -> Tree:
    """Exchange an axis of size n with the ranks.

    Per rank:
        index s along `axis` of y_r is index r along `axis` of x_s

    Transpose: pswapaxes.

    Args:
        x: a tree, of size n along `axis`.
        axis_name: the ranks.
        axis: the axis.
        axis_index_groups: exchange within each of these, all of size n.

    Example:
        >>> x = torch.tensor([[1, 2], [3, 4]])
        >>> fcoll.vmap(lambda x: fcoll.lax.pswapaxes(x, "i", 0), axis_name="i")(x)
        tensor([[1, 3],
                [2, 4]])
    """
    return functional.all_to_all(
        x, _group("pswapaxes", axis_name, axis_index_groups, even=True), axis, axis, tiled=False
    )


def all_to_all(
    x: Tree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> Tree:
    """Send block q to rank q, and put together what arrives in the order of the ranks.

    Per rank:
        untiled     `split_axis` has size n and disappears; a new axis of size n appears at `concat_axis`
        tiled       y_r = block r of x_0, …, x_{n-1} along `split_axis`, concatenated along `concat_axis`

    Transpose: all_to_all with the two axes exchanged.

    Args:
        x: a tree.
        axis_name: the ranks.
        split_axis: the axis that is cut.
        concat_axis: the axis along which blocks arrive.
        axis_index_groups: exchange within each of these, all of one size.
        tiled: keep the number of axes.

    Example:
        >>> x = torch.arange(4).view(2, 2)
        >>> fcoll.vmap(lambda x: fcoll.lax.all_to_all(x, "i", 0, 0), axis_name="i")(x)
        tensor([[0, 2],
                [1, 3]])
    """
    group = _group("all_to_all", axis_name, axis_index_groups, even=True)
    return functional.all_to_all(x, group, split_axis, concat_axis, tiled=tiled)


def all_gather(
    x: Tree,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
) -> Tree:
    """Give every rank the x of all.

    Per rank:
        untiled     y_r = x_0, …, x_{n-1} stacked along a new `axis` of size n
        tiled       y_r = x_0, …, x_{n-1} concatenated along `axis`

    Transpose: psum_scatter; with `to="invarying"`, where the result counts once, the own block of the own cotangent.

    Args:
        x: a tree.
        axis_name: the ranks.
        axis_index_groups: gather within each of these, all of one size, in the order of the list.
        axis: where; of the result, if untiled.
        tiled: concatenate, rather than stack.
        to: "varying", or "invarying": the result is used in the same way on every rank.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.lax.all_gather(x, "i"), axis_name="i", out_dims=None)(torch.tensor([1, 2]))
        tensor([1, 2])
    """
    if to not in ("varying", "invarying"):
        fail("value", 'all_gather: to is "varying" or "invarying", got {!r}', to)
    group = _group("all_gather", axis_name, axis_index_groups, even=True)
    return functional.all_gather(x, group, axis, tiled=tiled, invariant=to == "invarying")


def psum_scatter(
    x: Tree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> Tree:
    """Sum over the ranks and leave block r on rank r.

    Per rank:
        untiled     `scatter_dimension` has size n and disappears
        tiled       y_r = Σ_s block r of x_s along `scatter_dimension`

    Transpose: all_gather.

    Args:
        x: a tree.
        axis_name: the ranks.
        scatter_dimension: the axis that is cut.
        axis_index_groups: sum within each of these, all of one size.
        tiled: keep the axis.

    Example:
        >>> x = torch.arange(4).view(2, 2)
        >>> fcoll.vmap(lambda x: fcoll.lax.psum_scatter(x, "i"), axis_name="i")(x)
        tensor([2, 4])
    """
    group = _group("psum_scatter", axis_name, axis_index_groups, even=True)
    return functional.reduce_scatter(x, group, scatter_dimension, tiled=tiled)


def ragged_all_to_all(
    operand: Tree, output: Tree, input_offsets: Sizes, send_sizes: Sizes, output_offsets: Sizes, recv_sizes: Sizes,
    *, axis_name: AxisName, axis_index_groups: Groups = None,
) -> Tree:  # fmt: skip
    """`fcoll.ragged_all_to_all`: send some rows to each rank, which finds them where the sender wants them.

    Example:
        >>> x, size = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0, 2], [1, 0]])
        >>> f = lambda x, size, back: lax.ragged_all_to_all(x, 0 * x, [0, 0], size, [0, 0], back, axis_name="i")
        >>> fcoll.vmap(f, axis_name="i")(x, size, size.T).tolist()
        [[3, 0], [1, 2]]
    """
    group = _group("ragged_all_to_all", axis_name, axis_index_groups, even=True)
    return functional.ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, group)


def axis_index(axis_name: AxisName) -> Tensor:
    """This rank's index, a 0-d int32 tensor; of several names the first counts most.

    Example:
        >>> fcoll.vmap(lambda: fcoll.lax.axis_index("i"), axis_name="i", axis_size=3)()
        tensor([0, 1, 2], dtype=torch.int32)
    """
    return functional.axis_index(_group("axis_index", axis_name)).to(torch.int32)


def axis_size(axis_name: AxisName) -> int:
    """The number of ranks; of several names their product.

    Example:
        >>> fcoll.vmap(lambda x: x * fcoll.lax.axis_size("i"), axis_name="i")(torch.tensor([5, 6]))
        tensor([10, 12])
    """
    return functional.axis_size(_group("axis_size", axis_name))


def pcast(x: Tree, axis_name: AxisName, *, to: str) -> Tree:
    """Mark where a value that is the same on all ranks, and counts once, starts to be used differently on each.

    Per rank:
        y_r = x_r

    Transpose: the sum over the ranks. fcoll does not put it in by itself, as JAX does under `check_vma=True`.

    Args:
        x: a tree.
        axis_name: the ranks.
        to: "varying".

    Example:
        >>> def loss(w, x):
        ...     return fcoll.lax.pcast(w, "i", to="varying") * x
        >>> w, x = torch.tensor(1.0), torch.tensor([2.0, 3.0])
        >>> fcoll.vmap(torch.func.grad(loss), in_dims=(None, 0), axis_name="i")(w, x)
        tensor([5., 5.])
    """
    if to != "varying":
        fail("value", 'pcast: to is "varying", got {!r}', to)
    return functional.vary(x, _group("pcast", axis_name))


def pvary(x: Tree, axis_name: AxisName) -> Tree:
    """`pcast(x, axis_name, to="varying")`, by its earlier name.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.lax.pvary(x, "i"), axis_name="i")(torch.tensor([5, 6]))
        tensor([5, 6])
    """
    return functional.vary(x, _group("pvary", axis_name))


def _reduced(
    function: str,
    op: str, x: Any, axis_name: AxisName, axis_index_groups: Groups,
    *,
    over: Callable[[Tensor, tuple[int, ...]], Tensor],
    before: Callable[[Tensor], Tensor] | None = None,
    number: Callable[[Any, int], Any] | None = None,
) -> Any:  # fmt: skip
    """all_reduce of what `before` makes of each tensor, `over` having reduced its array axes; and `number` of numbers,
    which need no communication."""
    array_axes, names = _array_axes(axis_name)
    group = _group(function, names, axis_index_groups, array_axes)

    def prepared(leaf: Any, i: int = 0) -> Any:
        if before and isinstance(leaf, Tensor):
            leaf = before(leaf)
        return over(leaf, _checked_axes(function, x, i, leaf, array_axes)) if array_axes else leaf

    if isinstance(x, Tensor):  # the same as below, with less to trace
        return functional.all_reduce(prepared(x), group, op)
    leaves, spec = trees.flatten(x)
    even = axis_index_groups is None or _even(axis_index_groups)
    folds = [number is not None and even and not array_axes and isinstance(leaf, _NUMBERS) for leaf in leaves]
    # what is folded leaves a None, so that the other leaves keep their paths
    rest = [None if fold else prepared(leaf, i) for i, (leaf, fold) in enumerate(zip(leaves, folds, strict=True))]
    results = iter(trees.flatten(functional.all_reduce(trees.unflatten(spec, rest), group, op))[0])
    n = functional.axis_size(group) if any(folds) else 0
    return trees.unflatten(
        spec,
        [number(leaf, n) if number and fold else next(results) for leaf, fold in zip(leaves, folds, strict=True)],
    )


_NUMBERS = (bool, int, float, complex)


def _array_axes(axis_name: AxisName) -> tuple[tuple[int, ...], AxisName]:
    """The integers among several names, and the rest."""
    parts = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    array_axes = tuple(part for part in parts if type(part) is int)
    if not array_axes:
        return (), axis_name
    names = tuple(part for part in parts if type(part) is not int)
    return array_axes, names[0] if len(names) == 1 else names


def _group(
    function: str, axis_name: AxisName, axis_index_groups: Groups = None, array_axes: Sequence[int] = (),
    *, even: bool = False,
) -> Any:  # fmt: skip
    """The group that is meant; `even` where subgroups must be of one size."""
    group: Any = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    if axis_index_groups is None:
        return group
    if even and not _even(axis_index_groups):
        fail("value", "{}: axis_index_groups must be of one size, got {}", function, str(axis_index_groups))
    if array_axes:
        fail("value", "{}: axis_index_groups go with names only, got the array axes {}", function, str(array_axes))
    return subgroups(group, axis_index_groups)


def _even(axis_index_groups: Sequence[Sequence[int]]) -> bool:
    lists = axis_index_groups if isinstance(axis_index_groups, (list, tuple)) else ()
    return len({len(ranks) for ranks in lists if isinstance(ranks, (list, tuple))}) < 2  # `subgroups` refuses the rest


def _checked_axes(function: str, x: Any, i: int, leaf: Any, array_axes: tuple[int, ...]) -> tuple[int, ...]:
    shape = leaf.shape if isinstance(leaf, Tensor) else ()
    for axis in array_axes:
        if not -len(shape) <= axis < len(shape):
            fail("value", "{}: {} has shape {}: no axis {} to reduce", function, trees.path(x, i, "x"), shape, axis)
        if function in ("pmax", "pmin") and not shape[axis]:
            fail("value", "{}: {} has shape {}: nothing along axis {}", function, trees.path(x, i, "x"), shape, axis)
    if len({axis % len(shape) for axis in array_axes}) < len(array_axes):
        fail("value", "{}: array axes are distinct, got {}", function, str(array_axes))
    return array_axes


def _as_mean(x: Tensor) -> Tensor:
    """Integers as float64: their sum neither wraps nor is rounded."""
    return x.to(torch.float64) if _mean_dtype(x) else x


def _mean_dtype(leaf: Any) -> torch.dtype | None:
    """What the mean of integers is; None where the leaf has a mean of its own."""
    dtype = leaf.dtype if isinstance(leaf, Tensor) else None
    return torch.float64 if dtype in (torch.int64, torch.uint64) else torch.float32 if dtype in _NARROW else None


_NARROW = (torch.bool, torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32)
