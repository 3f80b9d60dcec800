"""Where the order of the ranks matters: sums over those before this one, and which of them has the largest value."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from fcoll.calls import Call
from fcoll.groups import GroupLike

Tree = TypeVar("Tree")


def prefix_sum(tree: Tree, group: GroupLike, *, inclusive: bool = True, reverse: bool = False) -> Tree:
    """Sum elementwise over the ranks up to this one.

    Per rank:
        inclusive       y_r = Σ_{s ≤ r} x_s; with `reverse`, Σ_{s ≥ r} x_s
        exclusive       y_r = Σ_{s < r} x_s; with `reverse`, Σ_{s > r} x_s; zeros where there is no such rank

    Transpose: `prefix_sum` in the other direction: x̄_r = Σ_{s ≥ r} ȳ_s.

    Args:
        tree: leaves of the same shape on every rank, of any dtype but bool.
        group: the ranks.
        inclusive: count this rank's own x.
        reverse: sum over the ranks from this one on.

    Example:
        >>> rows = torch.tensor([3, 1, 2])  # how many each rank has; where do its own begin?
        >>> fcoll.vmap(lambda x: fcoll.prefix_sum(x, "i", inclusive=False), axis_name="i")(rows)
        tensor([0, 3, 4])
    """
    call = Call("prefix_sum", tree, group)
    call.check_op("sum")
    return call.run_elementwise("prefix_sum", call.flag("inclusive", inclusive), call.flag("reverse", reverse))


def argmax(tree: Tree, group: GroupLike) -> Tree:
    """Tell elementwise which rank has the largest value.

    Per rank:
        y_r = the first s where x_s is the maximum over the ranks; a NaN wins, as in torch.argmax

    No derivative: the result is an int64 tensor.

    Args:
        tree: leaves of the same shape on every rank, not complex.
        group: the ranks; the result is an index within the group.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.argmax(x, "i"), axis_name="i")(torch.tensor([1.0, 3.0, 3.0]))
        tensor([1, 1, 1])
    """
    return _where_attained("argmax", "max", tree, group)


def argmin(tree: Tree, group: GroupLike) -> Tree:
    """Tell elementwise which rank has the smallest value.

    Per rank:
        y_r = the first s where x_s is the minimum over the ranks; a NaN wins, as in torch.argmin

    No derivative: the result is an int64 tensor.

    Args:
        tree: leaves of the same shape on every rank, not complex.
        group: the ranks; the result is an index within the group.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.argmin(x, "i"), axis_name="i")(torch.tensor([1.0, 3.0, 1.0]))
        tensor([0, 0, 0])
    """
    return _where_attained("argmin", "min", tree, group)


def _where_attained(function: str, op: str, tree: Tree, group: GroupLike) -> Tree:
    call = Call(function, tree, group)
    call.check_op(op)
    call._even()

    for i, x in enumerate(call.leaves):
        call.leaves[i] = (x.to(torch.uint8) if x.dtype == torch.bool else x).detach()  # bool has no argmax in torch

    def attained(gathered: Tensor, *_: object) -> Tensor:
        return gathered.argmax(0) if op == "max" else gathered.argmin(0)

    return call.run_elementwise("all_gather", 0, False, after=attained)
