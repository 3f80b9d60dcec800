"""The collectives: pure functions of trees of tensors over a group of n ranks.

In every specification r is this rank's index in the group, x_r its leaf, y_r its result, and block r the r-th of n
equal pieces along an axis. `group` is an axis name, a tuple of names (major first), a ProcessGroup, a DeviceMesh (all
of it), a `fcoll.Group` or `fcoll.WORLD`. Negative axes count from the end. Python numbers become 0-d tensors, though
type checkers, to which a result is of its tree's type, still take them for numbers.

Derivatives are those of the whole map over all ranks: a gradient taken inside a rank's program is the gradient of the
sum of all ranks' outputs. `invariant=True`, `vary` and `split` declare that a value counts once for all ranks.

On process groups, the leaves of a tree that are smaller than 1 MiB travel together, by dtype and device: in messages of
up to `bucket_size` bytes, which is 25 MiB if not given; 0 sends each leaf by itself. All ranks give the same.

All functions raise `ValueError` for an axis, size, rank or permutation that does not fit, `TypeError` for a leaf or
dtype that the collective is not defined for, `NameError` for an unbound axis name, all before any communication.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fcoll import groups, scalars, uneven
from fcoll.bind import bind
from fcoll.blocks import join_blocks, split_blocks
from fcoll.buckets import FULL
from fcoll.calls import RECORDS, Call, Fused
from fcoll.errors import fail, kind_of
from fcoll.groups import GroupLike
from fcoll.ragged import ragged_all_to_all
from fcoll.ranking import argmax, argmin, prefix_sum
from fcoll.uneven import Sizes

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "argmax",
    "argmin",
    "axis_index",
    "axis_size",
    "broadcast",
    "gather",
    "permute",
    "prefix_sum",
    "ragged_all_to_all",
    "reduce",
    "reduce_scatter",
    "scatter",
    "shift",
    "split",
    "vary",
]

Tree = TypeVar("Tree")


def all_reduce(
    tree: Tree, group: GroupLike, op: str = "sum", *, invariant: bool = False, bucket_size: int = FULL
) -> Tree:
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
            leaves; max and min not for complex ones. Python numbers keep their kinds (0.5 becomes float32, 2 int64),
            and all take one message.
        group: the ranks.
        op: one of the above.
        invariant: the result is used in the same way on every rank, and counts once in derivatives.
        bucket_size: how large a message of several leaves may be, in bytes.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.all_reduce(x, "i", "max"), axis_name="i")(torch.tensor([1, 3, 2]))
        tensor([3, 3, 3])
    """
    call = Call("all_reduce", tree, group)
    call.check_op(op)
    if scalars.mixed(call):
        again = functools.partial(all_reduce, group=group, op=op, invariant=invariant, bucket_size=bucket_size)
        return scalars.all_reduce(call, op, again)
    suffix = "_invariant" if call.flag("invariant", invariant) and op not in ("any", "all") else ""
    return call.run_elementwise(RECORDS[op] + suffix, op, bucket_size=call.bucket_size(bucket_size))


def all_gather(
    tree: Tree,
    group: GroupLike,
    axis: int = 0,
    *,
    tiled: bool = True,
    invariant: bool = False,
    sizes: Sizes | str | None = None,
    bucket_size: int = FULL,
) -> Tree:
    """Give every rank the x of all.

    Per rank:
        tiled       y_r = x_0, …, x_{n-1} concatenated along `axis`: size a there becomes n·a
        untiled     y_r = x_0, …, x_{n-1} stacked along a new `axis` of size n
        sizes       as tiled; x_s has sizes[s] along `axis`, and y_r their sum

    Transpose: `reduce_scatter`; with `invariant=True`, where the result counts once, `split`: x̄_r is block r of ȳ_r,
    without communication.

    Args:
        tree: leaves of any dtype, of the same shape on every rank (but for `sizes`); 0-d leaves need `tiled=False`.
        group: the ranks.
        axis: where; of the result, if untiled.
        tiled: concatenate, rather than stack.
        invariant: the result is used in the same way on every rank, and counts once in derivatives.
        sizes: n numbers, or an int tensor of them: how large each rank's leaves are along `axis`, perhaps 0. Or
            "exchange": the ranks tell each other first, in one more message. x travels padded to the largest. On an
            emulated axis the sizes are equal, since all ranks have one shape.
        bucket_size: how large a message of several leaves may be, in bytes.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.all_gather(x, "i"), axis_name="i", out_dims=None)(torch.tensor([[1], [2]]))
        tensor([1, 2])
    """
    if sizes is not None:
        stack = functools.partial(all_gather, group=group, tiled=False, invariant=invariant, bucket_size=bucket_size)
        return uneven.all_gather(tree, group, axis, tiled, sizes, invariant, bucket_size, stack)
    call = Call("all_gather", tree, group)
    params = [(call.axis_of(i, "axis", axis, tiled=tiled), tiled) for i in call.indices]
    fused = Fused(0, (0, False), None, lambda y, own: join_blocks(y, *own), call.bucket_size(bucket_size))
    return call.run("all_gather_invariant" if call.flag("invariant", invariant) else "all_gather", params, fused)


def reduce_scatter(
    tree: Tree,
    group: GroupLike,
    axis: int = 0,
    op: str = "sum",
    *,
    tiled: bool = True,
    sizes: Sizes | None = None,
    bucket_size: int = FULL,
) -> Tree:
    """Reduce over the ranks and leave block r on rank r.

    Per rank:
        tiled       y_r = op over s of block r of x_s along `axis`: size a there becomes a/n
        untiled     `axis` has size n and disappears
        sizes       as tiled, of blocks that have sizes[0], …, sizes[n-1] along `axis`

    Transpose: of the sum, `all_gather`; of the mean the same over n; max and min share as in `all_reduce`.

    Args:
        tree: leaves of the same shape on every rank; the size along `axis` is a multiple of n (untiled: n).
        group: the ranks.
        axis: the axis that is cut.
        op: sum, mean, max or min; dtypes as for `all_reduce`.
        tiled: keep the axis.
        sizes: n numbers, or an int tensor of them, the same on every rank: how large each rank's block is, perhaps 0.
            On an emulated axis they are equal.
        bucket_size: how large a message of several leaves may be, in bytes.

    Example:
        >>> x = torch.arange(4).repeat(2, 1)
        >>> fcoll.vmap(lambda x: fcoll.reduce_scatter(x, "i"), axis_name="i")(x)
        tensor([[0, 2],
                [4, 6]])
    """
    if sizes is not None:
        return uneven.reduce_scatter(tree, group, axis, op, tiled, sizes, bucket_size)
    call = Call("reduce_scatter", tree, group)
    call.check_op(op, among=("sum", "mean", "max", "min"))
    axes = [call.blocks_of(i, "axis", axis, tiled) for i in call.indices]
    n, size = call.axis.n, call.bucket_size(bucket_size)
    if op == "sum" or op == "mean":

        def wide(x: Tensor, _: object) -> Tensor:  # a sum of halves may overflow where the mean does not
            return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x

        def mean(y: Tensor, _: object, dtype: torch.dtype) -> Tensor:
            return (y / n).to(dtype)

        fused = Fused(1, (0, False), lambda x, own: split_blocks(x, n, *own), None, size)
        steps = (None, None) if op == "sum" else (wide, mean)
        return call.run("reduce_scatter", [(a, tiled) for a in axes], fused, *steps)

    def cut(x: Tensor, own: tuple[int, ...]) -> Tensor:
        return x.unflatten(own[0], (n, x.shape[own[0]] // n)) if tiled else x

    def extremum(received: Tensor, own: tuple[int, ...], _: object) -> Tensor:  # of what this rank has received
        return received.amax(own[0]) if op == "max" else received.amin(own[0])

    return call.run("all_to_all", [(a, a, False) for a in axes], None, cut, extremum)


def all_to_all(
    tree: Tree,
    group: GroupLike,
    split_axis: int = 0,
    concat_axis: int = 0,
    *,
    tiled: bool = True,
    send_sizes: Sizes | None = None,
    recv_sizes: Sizes | None = None,
    bucket_size: int = FULL,
) -> Tree:
    """Send block q to rank q, and put together what arrives in the order of the ranks.

    Per rank:
        tiled       y_r = block r of x_0, …, x_{n-1} along `split_axis`, concatenated along `concat_axis`
        untiled     `split_axis` has size n and disappears; a new axis of size n appears at `concat_axis`
        sizes       as tiled; the block to rank q has send_sizes[q] along `split_axis`, and that from rank q
                    recv_sizes[q] along `concat_axis`

    Transpose: `all_to_all` with the two axes exchanged, and the sizes.

    Args:
        tree: leaves of any dtype, of the same shape on every rank; the size along `split_axis` is a multiple of n
            (untiled: n).
        group: the ranks.
        split_axis: the axis that is cut.
        concat_axis: the axis along which blocks arrive; of the result, if untiled.
        tiled: keep the number of axes.
        send_sizes: n numbers, or an int tensor of them, perhaps 0. Between two different axes, the same on every rank.
            On an emulated axis they are equal; `ragged_all_to_all` has sizes of its own for every emulated rank.
        recv_sizes: likewise, what arrives; by default the ranks tell each other first, in one more message.
        bucket_size: how large a message of several leaves may be, in bytes.

    Example:
        >>> x = torch.arange(4).view(2, 2)
        >>> fcoll.vmap(lambda x: fcoll.all_to_all(x, "i"), axis_name="i")(x)
        tensor([[0, 2],
                [1, 3]])
    """
    if send_sizes is not None or recv_sizes is not None:
        return uneven.all_to_all(tree, group, split_axis, concat_axis, tiled, send_sizes, recv_sizes)
    call = Call("all_to_all", tree, group)
    params = [
        (call.blocks_of(i, "split_axis", split_axis, tiled), call.axis_of(i, "concat_axis", concat_axis), tiled)
        for i in call.indices
    ]

    def cut(x: Tensor, own: tuple[int, int, bool]) -> Tensor:
        return split_blocks(x, call.axis.n, own[0], tiled)

    def finish(blocks: Tensor, own: tuple[int, int, bool]) -> Tensor:
        return join_blocks(blocks, own[1], tiled)

    return call.run("all_to_all", params, Fused(1, (0, 0, False), cut, finish, call.bucket_size(bucket_size)))


def broadcast(tree: Tree, group: GroupLike, src: int = 0, *, bucket_size: int = FULL) -> Tree:
    """Give every rank the x of one.

    Per rank:
        y_r = x_src

    Transpose: `reduce` to src. The other ranks' x gets zeros.

    Args:
        tree: leaves of any dtype, of the same shape on every rank.
        group: the ranks.
        src: index within the group.
        bucket_size: how large a message of several leaves may be, in bytes.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.broadcast(x, "i", src=1), axis_name="i")(torch.tensor([5, 6, 7]))
        tensor([6, 6, 6])
    """
    call = Call("broadcast", tree, group)
    root = call.root("src", src)
    return call.run_elementwise("broadcast", root, bucket_size=call.bucket_size(bucket_size))


def reduce(tree: Tree, group: GroupLike, dst: int = 0, op: str = "sum", *, bucket_size: int = FULL) -> Tree:
    """Reduce elementwise over the ranks; one rank gets the result, the others zeros.

    Per rank:
        y_dst = op over s of x_s, else 0 (bool results: False), which has no memory of its own

    Transpose: of the sum, `broadcast` from dst.

    Args:
        tree: as for `all_reduce`.
        group: the ranks.
        dst: index within the group.
        op: as for `all_reduce`.
        bucket_size: how large a message of several leaves may be, in bytes.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.reduce(x, "i", dst=1), axis_name="i")(torch.tensor([5, 6, 7]))
        tensor([ 0, 18,  0])
    """
    call = Call("reduce", tree, group)
    root = call.root("dst", dst)
    call.check_op(op)
    size = call.bucket_size(bucket_size)
    if op == "sum":
        return call.run_elementwise("reduce", root, bucket_size=size)

    def there(y: Tensor, *_: object) -> Tensor:
        return bind("only_at", y, call.axis, root)

    return call.run_elementwise(RECORDS[op], op, after=there, bucket_size=size)


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
    call = Call("gather", tree, group)
    root = call.root("dst", dst)
    axes = [call.axis_of(i, "axis", axis, tiled=tiled) for i in call.indices]
    return call.run("gather", [(a, tiled, root) for a in axes])


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
    call = Call("scatter", tree, group)
    root = call.root("src", src)
    axes = [call.blocks_of(i, "axis", axis, tiled) for i in call.indices]
    return call.run("scatter", [(a, tiled, root) for a in axes])


def permute(tree: Tree, group: GroupLike, perm: Sequence[tuple[int, int]], *, bucket_size: int = FULL) -> Tree:
    """Send x along (source, destination) pairs.

    Per rank:
        y_d = x_s for each (s, d) in `perm`; on a rank that is nobody's destination zeros, without memory of their own

    Transpose: `permute` with the pairs turned round.

    Args:
        tree: leaves of any dtype, of the same shape on every rank.
        group: the ranks.
        perm: pairs of indices within the group; a source occurs once, a destination too.
        bucket_size: how large a message of several leaves may be, in bytes.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.permute(x, "i", [(0, 2)]), axis_name="i")(torch.tensor([5, 6, 7]))
        tensor([0, 0, 5])
    """
    call = Call("permute", tree, group)
    return call.run_elementwise("permute", call.pairs(perm), bucket_size=call.bucket_size(bucket_size))


def shift(tree: Tree, group: GroupLike, offset: int = 1, *, wrap: bool = True, bucket_size: int = FULL) -> Tree:
    """Send x to the rank `offset` further on.

    Per rank:
        wrap        y_r = x_{(r - offset) mod n}
        else        y_r = x_{r - offset}, zeros (without memory of their own) where there is no such rank

    Transpose: `shift` by -offset.

    Args:
        tree: leaves of any dtype, of the same shape on every rank.
        group: the ranks.
        offset: how far; may be negative.
        wrap: go on at the other end.
        bucket_size: how large a message of several leaves may be, in bytes.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.shift(x, "i"), axis_name="i")(torch.tensor([5, 6, 7]))
        tensor([7, 5, 6])
    """
    call = Call("shift", tree, group)
    if not isinstance(offset, int) or isinstance(offset, bool):
        fail("type", "shift: offset is an integer, got {}", kind_of(offset))
    call._even()
    params = offset, call.flag("wrap", wrap)
    return call.run_elementwise("shift", *params, bucket_size=call.bucket_size(bucket_size))


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
    call = Call("vary", tree, group)
    parts = groups.split_parts(call.axis)
    if len(parts) == 1:
        return call.run_elementwise("vary", "sum")

    def each(x: Tensor) -> Tensor:
        for part in parts:
            x = bind("vary", x, part, "sum")
        return x

    return call.rebuild([each(x) for x in call.leaves])


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
    call = Call("split", tree, group)
    axes = [call.blocks_of(i, "axis", axis, tiled) for i in call.indices]
    parts = groups.split_parts(call.axis)

    def each(x: Tensor, a: int) -> Tensor:
        if not tiled and len(parts) != 1:
            x = x.unflatten(a, [part.n for part in parts]) if parts else x.squeeze(a)
        for part in parts:
            x = bind("split", x, part, a, tiled)
        return x

    return call.rebuild([each(x, a) for x, a in zip(call.leaves, axes, strict=True)])


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
    if not axis.even:
        text = "axis_size: the subgroups of {} have different sizes"
        fail("value", text, axis.label, about="Subgroups of different sizes")
    return axis.n
