"""torch.distributed.nn.functional with right gradients: the same functions and signatures.

    from fcoll.compat import torch_nn as dist_fn      # instead of: import torch.distributed.nn.functional as dist_fn

Everything works under torch.func transforms and torch.compile(fullgraph=True), where torch's functions raise or are
wrong. What else differs:

- Gradients are those of the sum of all ranks' outputs. torch's are wrong for `broadcast` in a subgroup, for max, min
  and product, for the average of `reduce` and `reduce_scatter`, and for strided cotangents on gloo.
- `src` and `dst` are ranks of the world, as there; on an emulated axis, indices along it. `group=None`, the default, is
  the world. Every group of fcoll can be given.
- On ranks other than `dst`, `gather` and `reduce` return zeros without memory of their own, where torch leaves open
  what `reduce` returns. Do not write into them.
- Receivers of `scatter` pass tensors of the right shape, as torch's code wants them to (its documentation says None).
- The tensors given for output are filled, except inside a torch.func transform, where that cannot be; gradients flow
  through the returned values only.
- Operations are ReduceOp.SUM, AVG, MAX, MIN and PRODUCT; bitwise ones have no counterpart.
- `_all_gather_base` has a gradient on every backend. Nothing warns of a deprecation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from fcoll import _torch, functional, groups
from fcoll.engine import SIMULATED, Process
from fcoll.errors import fail
from fcoll.groups import WORLD, GroupLike

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "all_to_all_single", "broadcast", "gather", "reduce", "reduce_scatter",
    "scatter",
]  # fmt: skip


def broadcast(tensor: Tensor, src: int, group: GroupLike | None = None) -> Tensor:
    """Every rank gets the tensor of rank `src` of the world: `fcoll.broadcast`.

    Example:
        >>> fcoll.vmap(lambda x: torch_nn.broadcast(x, 1, "i"), axis_name="i")(torch.tensor([5, 6]))
        tensor([6, 6])
    """
    group = _group(group)
    return functional.broadcast(tensor, group, _index("broadcast", "src", src, group))


def gather(tensor: Tensor, dst: int = 0, group: GroupLike | None = None) -> tuple[Tensor, ...]:
    """Rank `dst` of the world gets a tuple of all ranks' tensors, the others zeros: `fcoll.gather`.

    Example:
        >>> a, b = fcoll.vmap(lambda x: torch_nn.gather(x, 0, "i"), axis_name="i")(torch.tensor([5, 6]))
        >>> a, b
        (tensor([5, 0]), tensor([6, 0]))
    """
    group = _group(group)
    return functional.gather(tensor, group, _index("gather", "dst", dst, group), tiled=False).unbind(0)


def scatter(tensors: Sequence[Tensor], src: int = 0, group: GroupLike | None = None) -> Tensor:
    """Each rank gets its one of the tensors of rank `src` of the world: `fcoll.scatter`.

    Example:
        >>> x = torch.tensor([[1, 2], [0, 0]])
        >>> fcoll.vmap(lambda x: torch_nn.scatter(list(x), 0, "i"), axis_name="i")(x)
        tensor([1, 2])
    """
    group = _group(group)
    stack = _stack("scatter", "tensors", tensors)
    return functional.scatter(stack, group, _index("scatter", "src", src, group), tiled=False)


def reduce(tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, group: GroupLike | None = None) -> Tensor:
    """Rank `dst` of the world gets the reduction, the others zeros: `fcoll.reduce`.

    Example:
        >>> fcoll.vmap(lambda x: torch_nn.reduce(x, 1, group="i"), axis_name="i")(torch.tensor([5, 6]))
        tensor([ 0, 11])
    """
    group = _group(group)
    return functional.reduce(tensor, group, _index("reduce", "dst", dst, group), _op("reduce", op))


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Any = ReduceOp.SUM, group: GroupLike | None = None
) -> Tensor:
    """Each rank gets the reduction over the ranks of its one of the tensors: `fcoll.reduce_scatter`.

    Example:
        >>> x = torch.tensor([[1, 2], [3, 4]])
        >>> fcoll.vmap(lambda x: torch_nn.reduce_scatter(x[0], list(x), group="i"), axis_name="i")(x)
        tensor([4, 6])
    """
    group, name = _group(group), _op("reduce_scatter", op)
    stack = _stack("reduce_scatter", "input_list", input_list)
    _like("reduce_scatter", output, stack, stack.shape[1:])
    if name == "prod":  # of what arrives
        return _filled(output, functional.all_to_all(stack, group, tiled=False).prod(0, dtype=stack.dtype))
    return _filled(output, functional.reduce_scatter(stack, group, 0, name, tiled=False))


def all_gather(tensor: Tensor, group: GroupLike | None = None) -> tuple[Tensor, ...]:
    """Every rank gets a tuple of all ranks' tensors: `fcoll.all_gather`.

    Example:
        >>> fcoll.vmap(lambda x: torch_nn.all_gather(x, "i"), axis_name="i", out_dims=None)(torch.tensor([5, 6]))
        (tensor(5), tensor(6))
    """
    return functional.all_gather(tensor, _group(group), tiled=False).unbind(0)


def _all_gather_base(output_tensor: Tensor, input_tensor: Tensor, group: GroupLike | None = None) -> Tensor:
    """Every rank gets all ranks' tensors in one, of the shape of `output_tensor`: `fcoll.all_gather`."""
    group = _group(group)
    n, shape, whole = functional.axis_size(group), input_tensor.shape, output_tensor.shape
    if whole != (n, *shape) and not (shape and whole == (n * shape[0], *shape[1:])):
        fail(
            "value",
            "_all_gather_base: output_tensor has shape {}; it holds {} tensors of shape {}, in a row or stacked",
            whole, n, shape,
        )  # fmt: skip
    _like("_all_gather_base", output_tensor, input_tensor, whole)
    return _filled(output_tensor, functional.all_gather(input_tensor, group, tiled=False).reshape(whole))


def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: GroupLike | None = None
) -> tuple[Tensor, ...]:
    """Tensor q goes to rank q; the returned tuple holds what arrives: `fcoll.all_to_all`.

    Shapes may differ, as long as each output has that of the input which is sent to it.

    Example:
        >>> x = torch.tensor([[1, 2], [3, 4]])
        >>> fcoll.vmap(lambda x: torch_nn.all_to_all(list(x), list(x), "i"), axis_name="i")(x)
        (tensor([1, 2]), tensor([3, 4]))
    """
    group = _group(group)
    n = functional.axis_size(group)
    given = {"output_tensor_list": output_tensor_list, "input_tensor_list": input_tensor_list}
    for name, tensors in given.items():
        _listed("all_to_all", name, tensors)
        if len(tensors) != n:
            fail("value", "all_to_all: {} holds {} tensors for {} ranks", name, len(tensors), n)
    for x in output_tensor_list:
        _like("all_to_all", x, input_tensor_list[0], x.shape)
    row = torch.cat([x.reshape(-1) for x in input_tensor_list])
    sizes = [x.numel() for x in output_tensor_list]
    received = functional.all_to_all(
        row, group, send_sizes=[x.numel() for x in input_tensor_list], recv_sizes=sizes
    ).split(sizes)
    return tuple(
        _filled(output, part.view(output.shape)) for output, part in zip(output_tensor_list, received, strict=True)
    )


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Rows go to the ranks in turn, as many as the sizes say, in equal parts without: `fcoll.all_to_all`.

    Example:
        >>> x = torch.tensor([[1, 2], [3, 4]])
        >>> fcoll.vmap(lambda x: torch_nn.all_to_all_single(x, x, group="i"), axis_name="i")(x)
        tensor([[1, 3],
                [2, 4]])
    """
    group = _group(group)
    send = _sizes("input", input, input_split_sizes, group)
    receive = _sizes("output", output, output_split_sizes, group)
    _like("all_to_all_single", output, input, (output.shape[0], *input.shape[1:]))
    return _filled(output, functional.all_to_all(input, group, send_sizes=send, recv_sizes=receive))


def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: GroupLike | None = None) -> Tensor:
    """Every rank gets the reduction: `fcoll.all_reduce`.

    Example:
        >>> fcoll.vmap(lambda x: torch_nn.all_reduce(x, group="i"), axis_name="i")(torch.tensor([5, 6]))
        tensor([11, 11])
    """
    return functional.all_reduce(tensor, _group(group), _op("all_reduce", op))


# ---- what the signatures mean


def _group(group: GroupLike | None) -> GroupLike:
    return WORLD if group is None else group


def _index(function: str, name: str, rank: int, group: GroupLike) -> int:
    """The index in the group of a rank of the world."""
    layout = groups.resolve(function, group).layout
    if not layout.process or type(rank) is not int:
        return rank
    ranks = _ranks(layout.process, layout.sizes[0], layout.order)
    if rank not in ranks:
        fail(
            "value", "{}: {}={} is not a rank of {}, which has ranks {}, counted in the world",
            function, name, rank, layout.label, str(ranks),
        )  # fmt: skip
    return ranks.index(rank)


@_torch.assume_constant_result
def _ranks(name: str, n: int, order: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of the world in a group, in its order; in a trace, where there is no world, its own."""
    process = Process(name, n, order)
    if name.startswith(SIMULATED):
        return tuple(range(n))
    members = dist.get_process_group_ranks(process.group())
    return tuple(members[process.rank(index)] for index in range(n))


_NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.MAX: "max",
    ReduceOp.MIN: "min",
    ReduceOp.PRODUCT: "prod",
}


@_torch.assume_constant_result
def _name(op: Any) -> str:
    return next((name for known, name in _NAMES.items() if op == known), "")


def _op(function: str, op: Any) -> str:
    name = _name(op)
    if not name:
        fail("value", "{}: op is ReduceOp.SUM, AVG, MAX, MIN or PRODUCT, got {}", function, str(op))
    return name


def _listed(function: str, name: str, tensors: Any) -> None:
    """Tensors of one dtype."""
    if not isinstance(tensors, (list, tuple)) or not all(isinstance(x, Tensor) for x in tensors):
        fail("type", "{}: {} is a list of tensors, got {}", function, name, type(tensors).__name__)
    if not tensors:
        fail("value", "{}: {} is empty", function, name)
    dtypes = [x.dtype for x in tensors]
    if len(set(dtypes)) > 1:
        fail("type", "{}: the tensors of {} have one dtype, got {}", function, name, str(dtypes))


def _stack(function: str, name: str, tensors: Any) -> Tensor:
    """Tensors of one shape and dtype, as one."""
    _listed(function, name, tensors)
    for x in tensors:
        if x.shape != tensors[0].shape:
            fail(
                "value",
                "{}: the tensors of {} have one shape, got {} and {}",
                function,
                name,
                tensors[0].shape,
                x.shape,
            )
    return torch.stack(list(tensors))


def _sizes(name: str, x: Tensor, sizes: Sequence[int] | None, group: GroupLike) -> Sequence[int]:
    n = functional.axis_size(group)
    if sizes:
        return sizes
    if not x.ndim or x.shape[0] % n:
        fail("value", "all_to_all_single: {} has shape {}: axis 0 is not a multiple of the {} ranks", name, x.shape, n)
    return [x.shape[0] // n] * n


def _like(function: str, output: Tensor, x: Tensor, shape: Sequence[int]) -> None:
    """An output has the dtype of the input, and this shape."""
    if output.dtype != x.dtype:
        fail("type", "{}: the output is {}, the input {}", function, str(output.dtype), str(x.dtype))
    if output.shape != tuple(shape):
        fail("value", "{}: the output has shape {}, the result {}", function, output.shape, shape)


def _filled(output: Tensor, y: Tensor) -> Tensor:
    """y, after it was written into `output`, where that can be."""
    if not _torch.transforms():
        with torch.no_grad():
            output.copy_(y)
    return y
