"""Region pairs, by the names that people search for: where tensor- and sequence-parallel regions begin and end.

Each is one collective with the gradient that its place in a model calls for. "The same everywhere" means that all ranks
hold one value and use it in the same way, so that it counts once.

| Megatron-LM | here | forward | gradient |
| --- | --- | --- | --- |
| copy_to_tensor_model_parallel_region(x) | `copy_to(x, g)` | x | all-reduce |
| reduce_from_tensor_model_parallel_region(x) | `reduce_from(x, g)` | all-reduce | identity |
| scatter_to_tensor_model_parallel_region(x) | `scatter_to(x, g)` | own block, last axis | all-gather |
| gather_from_tensor_model_parallel_region(x) | `gather_from(x, g)` | all-gather, last axis | own block |
| scatter_to_sequence_parallel_region(x) | `scatter_to(x, g, 0)` | own block, first axis | all-gather |
| gather_from_sequence_parallel_region(x) | `gather_from(x, g, 0, tensor_parallel_output_grad=True)` | \
all-gather, first axis | reduce-scatter |
| gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False) | `gather_from(x, g, 0)` | \
all-gather, first axis | own block |
| reduce_scatter_to_sequence_parallel_region(x) | `reduce_scatter_to(x, g)` | reduce-scatter, first axis | all-gather |
| all_gather_last_dim_from_tensor_parallel_region(x) | `gather_from(x, g, tensor_parallel_output_grad=True)` | \
all-gather, last axis | reduce-scatter |
| reduce_scatter_last_dim_to_tensor_parallel_region(x) | `reduce_scatter_to(x, g, -1)` | reduce-scatter, last axis | \
all-gather |
| all_to_all_sp2hp(x) | `fcoll.all_to_all(x, g, 1, 0)` | last axis cut, first joined | first axis cut, last joined |
| all_to_all_hp2sp(x) | `fcoll.all_to_all(x, g, 0, 1)` | first axis cut, last joined | last axis cut, first joined |

None of these is new: `copy_to` is `fcoll.vary`, `scatter_to` is `fcoll.split`, `reduce_from` is
`fcoll.all_reduce(invariant=True)`, `gather_from` is `fcoll.all_gather`, invariant or not, `reduce_scatter_to` is
`fcoll.reduce_scatter`. So trees, emulated axes, torch.func and compile come along, and all raise as those do.
`scale_gradient` is for code that averages gradients afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fcoll import _torch, functional, trees
from fcoll.errors import check_flag, fail
from fcoll.groups import GroupLike

__all__ = ["copy_to", "gather_from", "reduce_from", "reduce_scatter_to", "scale_gradient", "scatter_to"]

Tree = TypeVar("Tree")


def copy_to(tree: Tree, group: GroupLike) -> Tree:
    """Enter a region where each rank uses x in its own way: `fcoll.vary(x, group)`.

    Per rank:
        y_r = x_r, the same everywhere

    Transpose: all-reduce: the gradients of all ranks' uses are summed.

    Args:
        tree: leaves of any dtype, the same on every rank.
        group: the ranks.

    Example:
        >>> def loss(x, w):
        ...     return (regions.copy_to(x, "tp") * w).sum()
        >>> grad = fcoll.vmap(torch.func.grad(loss), in_dims=(None, 0), axis_name="tp")
        >>> grad(torch.tensor(1.0), torch.tensor([2.0, 3.0]))
        tensor([5., 5.])
    """
    return functional.vary(tree, group)


def reduce_from(tree: Tree, group: GroupLike) -> Tree:
    """Leave a region with the sum of the ranks' parts: `fcoll.all_reduce(x, group, invariant=True)`.

    Per rank:
        y_r = Σ_s x_s, the same everywhere

    Transpose: the identity, without communication.

    Args:
        tree: leaves of the same shape on every rank, not of bool.
        group: the ranks.

    Example:
        >>> grad = fcoll.vmap(torch.func.grad(lambda x: regions.reduce_from(x, "tp") ** 2), axis_name="tp")
        >>> grad(torch.tensor([2.0, 3.0]))
        tensor([10., 10.])
    """
    return functional.all_reduce(tree, group, invariant=True)


def scatter_to(tree: Tree, group: GroupLike, axis: int = -1, *, rank0_only: bool = False) -> Tree:
    """Enter a region where each rank has its block: `fcoll.split(x, group, axis)`.

    Per rank:
        y_r = block r of x_r along `axis`, where x is the same everywhere; with `rank0_only`, of x_0

    Transpose: all-gather, so that every rank has the whole gradient. With `rank0_only`, which is
    `fcoll.scatter(x, group, 0, axis)`, the gradient is gathered on rank 0, and is zero elsewhere.

    Args:
        tree: leaves of any dtype; the size along `axis` is a multiple of n.
        group: the ranks.
        axis: the axis that is cut; 0 for a sequence region whose tensors have the sequence first.
        rank0_only: only the x of rank 0 counts.

    Example:
        >>> fcoll.vmap(lambda: regions.scatter_to(torch.arange(4), "sp", 0), axis_name="sp", axis_size=2)()
        tensor([[0, 1],
                [2, 3]])
    """
    if check_flag("scatter_to", "rank0_only", rank0_only):
        return functional.scatter(tree, group, 0, axis)
    return functional.split(tree, group, axis)


def gather_from(
    tree: Tree,
    group: GroupLike,
    axis: int = -1,
    *,
    tensor_parallel_output_grad: bool = False,
    rank0_only: bool = False,
) -> Tree:
    """Leave a region with all ranks' blocks: `fcoll.all_gather(x, group, axis, invariant=True)`.

    Per rank:
        y_r = x_0, …, x_{n-1} concatenated along `axis`; with `rank0_only`, on rank 0, and zeros elsewhere

    Transpose: the own block of the gradient, without communication: what follows does the same on every rank. With
    `tensor_parallel_output_grad`, which is `fcoll.all_gather(x, group, axis)`, each rank uses y in its own way, as a
    tensor-parallel layer does, and the gradients are reduce-scattered. With `rank0_only`, which is
    `fcoll.gather(x, group, 0, axis)`, rank 0's gradient is scattered.

    Args:
        tree: leaves of any dtype, of the same shape on every rank.
        group: the ranks.
        axis: the axis that is joined; 0 for a sequence region whose tensors have the sequence first.
        tensor_parallel_output_grad: what follows differs between the ranks.
        rank0_only: only rank 0 goes on with y.

    Raises:
        ValueError: both options at once.

    Example:
        >>> def loss(x, **options):
        ...     return (regions.gather_from(x, "tp", **options) * torch.tensor([1.0, 10.0])).sum()
        >>> x = torch.ones(2, 1)
        >>> fcoll.vmap(torch.func.grad(loss), axis_name="tp")(x).flatten()
        tensor([ 1., 10.])
        >>> summed = fcoll.vmap(lambda x: torch.func.grad(loss)(x, tensor_parallel_output_grad=True), axis_name="tp")
        >>> summed(x).flatten()
        tensor([ 2., 20.])
    """
    check_flag("gather_from", "tensor_parallel_output_grad", tensor_parallel_output_grad)
    if check_flag("gather_from", "rank0_only", rank0_only) and tensor_parallel_output_grad:
        fail("value", "gather_from: with rank0_only the gradient is rank 0's; leave out tensor_parallel_output_grad")
    if rank0_only:
        return functional.gather(tree, group, 0, axis)
    return functional.all_gather(tree, group, axis, invariant=not tensor_parallel_output_grad)


def reduce_scatter_to(tree: Tree, group: GroupLike, axis: int = 0) -> Tree:
    """Leave a tensor-parallel region for a sequence-parallel one: `fcoll.reduce_scatter(x, group, axis)`.

    Per rank:
        y_r = Σ_s block r of x_s along `axis`

    Transpose: all-gather.

    Args:
        tree: leaves of the same shape on every rank; the size along `axis` is a multiple of n.
        group: the ranks.
        axis: the axis that is cut.

    Example:
        >>> fcoll.vmap(lambda x: regions.reduce_scatter_to(x, "tp"), axis_name="tp")(torch.ones(2, 4))
        tensor([[2., 2.],
                [2., 2.]])
    """
    return functional.reduce_scatter(tree, group, axis)


def scale_gradient(tree: Tree, factor: float) -> Tree:
    """The value itself, with its derivative times `factor`.

    Per rank:
        y_r = x_r, ẏ_r = factor · ẋ_r

    Transpose: x̄_r = factor · ȳ_r.

    Where gradients are averaged over all ranks afterwards, as by DistributedDataParallel, those of which each of the n
    ranks of a region has only its part come out n times too small: `factor=fcoll.axis_size(group)` makes up for it.
    Where those of which every rank has the whole are summed, it is `factor=1 / fcoll.axis_size(group)`.

    Args:
        tree: leaves of floating-point or complex numbers are scaled; others pass.
        factor: a number.

    Raises:
        TypeError: a factor that is no number.

    Example:
        >>> torch.func.grad(lambda x: regions.scale_gradient(x, 4) ** 2)(torch.tensor(3.0))
        tensor(24.)
    """
    if not isinstance(factor, (int, float)) or isinstance(factor, bool):
        fail("type", "scale_gradient: factor is a number, got {}", type(factor).__name__)

    def each(x: Any) -> Any:
        differentiable = isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
        return _scaled(x, float(factor)) if differentiable else x

    return each(tree) if isinstance(tree, Tensor) else trees.map_leaves(each, tree)  # type: ignore[no-any-return]


@_torch.allow_in_graph  # Dynamo would drop the vmap rule of a Function that it traces into
def _scaled(x: Tensor, factor: float) -> Tensor:
    return _apply(x, factor)


class _Scale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.factor = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return cotangent * ctx.factor, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Any:
        with _torch.differentiated_again():
            return tangent * ctx.factor


_apply: Callable[..., Tensor] = _Scale.apply
