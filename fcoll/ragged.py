"""`ragged_all_to_all`: pieces of any size between any two ranks, where all shapes are fixed and the sizes are data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fcoll import _torch, trees
from fcoll.bind import bind
from fcoll.calls import Call
from fcoll.errors import beyond_int64, fail
from fcoll.groups import GroupLike
from fcoll.uneven import Sizes

Tree = TypeVar("Tree")
NAMES = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


def ragged_all_to_all(
    operand: Tree,
    output: Tree,
    input_offsets: Sizes,
    send_sizes: Sizes,
    output_offsets: Sizes,
    recv_sizes: Sizes,
    group: GroupLike,
) -> Tree:
    """Send some rows to each rank, which finds them where the sender wants them; shapes do not depend on the sizes.

    Per rank:
        y_q = output_q, but for each rank s the rows that begin at output_offsets_s[q] are the send_sizes_s[q] rows of
        operand_s that begin at input_offsets_s[q]

    Transpose: of `operand`, the rows go back; of `output`, zeros where rows have arrived.

    Every rank, emulated or not, has offsets and sizes of its own. On process groups in eager mode, exactly the rows
    travel. On an emulated axis, compiled, and under a vmap of the sizes, every rank receives all operands.

    Args:
        operand: leaves of any dtype, of the same shape on every rank; rows are along axis 0.
        output: what the result holds where nothing arrives; a tree like `operand`, with any number of rows.
        input_offsets: n numbers, or an int tensor of them: in `operand`, where the rows for each rank begin.
        send_sizes: likewise, how many there are; perhaps 0.
        output_offsets: likewise, where each rank is to put them.
        recv_sizes: likewise, how many rows each rank sends here.
        group: the ranks.

    Raises:
        ValueError: a wrong number of offsets or sizes; rows outside of `operand` or `output` and, after the exchange,
            wrong `recv_sizes`, if their values can be seen: on process groups in eager mode. Otherwise such rows are
            unspecified, and `recv_sizes` without effect.

    Example:
        >>> x = torch.tensor([[1, 2, 3], [4, 5, 6]])  # rank 0 keeps a row and sends two; rank 1 sends two
        >>> begin, size = torch.tensor([[0, 1], [0, 2]]), torch.tensor([[1, 2], [2, 1]])
        >>> place = torch.tensor([[0, 0], [1, 2]])  # rank 1 puts its rows behind those of rank 0
        >>> f = fcoll.vmap(fcoll.ragged_all_to_all, in_dims=(0, None, 0, 0, 0, 0, None), axis_name="i")
        >>> f(x, torch.zeros(4, dtype=torch.int64), begin, size, place, size.T, "i")
        tensor([[1, 4, 5, 0],
                [2, 3, 6, 0]])
    """
    call = Call("ragged_all_to_all", operand, group, alike=False)
    call._even()
    outputs = _outputs(call, output)
    if not call.leaves:
        return operand
    given = (input_offsets, send_sizes, output_offsets, recv_sizes)
    vectors, numbers = zip(*(_vector(call, name, value) for name, value in zip(NAMES, given, strict=True)), strict=True)
    pairs = list(zip(call.leaves, outputs, strict=True))
    _check_rows(call, pairs, numbers)
    if not call.axis.layout.process or None in numbers or _torch.tracing(call.leaves[0]):
        return call.rebuild(_by_gathering(call, pairs, vectors))
    return call.rebuild(_exactly(call, pairs, vectors, numbers))


Pairs = list[tuple[Tensor, Tensor]]


def _exactly(call: Call[Any], pairs: Pairs, vectors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
    first, sent, _, expected = numbers
    told = bind("all_to_all", torch.stack((vectors[1], vectors[2]), 1), call.axis, 0, 0, True)
    arriving, places = told.t().tolist()
    results = []
    for x, output in pairs:
        own = [torch.arange(start, start + size, device=x.device) for start, size in zip(first, sent, strict=True)]
        rows = x.index_select(0, torch.cat(own))  # a cat of nothing would lose the batch axis of a vmap
        received = bind("all_to_all_uneven", rows, call.axis, 0, 0, tuple(sent), tuple(arriving))
        source, count = torch.arange(output.shape[0], device=x.device), output.shape[0]
        for place, size in zip(places, arriving, strict=True):
            source[place : place + size] = torch.arange(count, count + size, device=x.device)
            count += size
        results.append(torch.cat((output, received)).index_select(0, source))
    if arriving != expected:  # only now, so that the other ranks have what they wait for
        fail("value", "ragged_all_to_all: recv_sizes are {}, and what arrived {}", expected, arriving)
    return results


def _by_gathering(call: Call[Any], pairs: Pairs, vectors: Sequence[Tensor]) -> list[Tensor]:
    """Every rank gets all operands, and picks its rows: whatever the sizes are, shapes are the same."""
    told = bind("all_to_all", torch.stack(tuple(vectors[:3]), 1), call.axis, 0, 0, True)
    first, size, place = (numbers.unsqueeze(1) for numbers in told.unbind(1))  # by sender
    results = []
    for x, output in pairs:
        (n, rows), device = (call.axis.n, x.shape[0]), x.device
        if not rows:
            results.append(output.clone())
            continue
        after = torch.arange(output.shape[0], device=device) - place  # of each row of the result, by sender
        row = torch.arange(n, device=device).unsqueeze(1) * rows + (first + after).clamp(0, rows - 1)
        source = torch.where((after >= 0) & (after < size), row, -1).amax(0)
        picked = bind("all_gather", x, call.axis, 0, True)[source.clamp(min=0)]
        results.append(torch.where((source >= 0).view(-1, *[1] * (x.ndim - 1)), picked, output))
    return results


def _outputs(call: Call[Any], output: Any) -> list[Tensor]:
    """The leaves of `output`, which go with those of the operand."""
    leaves, spec = ([output], None) if isinstance(output, Tensor) else trees.flatten(output)
    if spec != call.spec:
        fail("value", "{}: output and operand are trees of the same structure", call.function)
    for i, (x, y) in enumerate(zip(call.leaves, leaves, strict=True)):
        if not isinstance(y, Tensor):
            place = trees.path(output, i, "output")
            fail("type", "{}: {} is a {}; leaves are tensors", call.function, place, type(y).__name__)
        if not x.ndim:
            call.fail(i, "value", "has no axis of rows")
        if x.shape[1:] != y.shape[1:] or not y.ndim or x.dtype != y.dtype:
            fail(
                "value", "{}: {} is {} of shape {}, and the operand {} of shape {}; only the number of rows may differ",
                call.function, trees.path(output, i, "output"), str(y.dtype), y.shape, str(x.dtype), x.shape,
            )  # fmt: skip
    return leaves


def _vector(call: Call[Any], name: str, value: Sizes) -> tuple[Tensor, list[int] | None]:
    """An argument as a tensor, and as numbers where they can be seen."""
    n, numbers = call.axis.n, None
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            fail("type", "{}: {} are integers, got {}", call.function, name, str(value.dtype))
        if value.is_meta:
            fail("value", "{}: {} are a tensor on the meta device, which holds no numbers", call.function, name)
        vector = value.to(call.leaves[0].device, torch.int64)
    elif isinstance(value, (list, tuple)) and all(type(number) is int for number in value):
        numbers = list(value)
        for number in numbers:
            if beyond_int64(number):
                fail("value", "{}: {} are int64 numbers, got {}", call.function, name, number)
        vector = torch.tensor(numbers, dtype=torch.int64, device=call.leaves[0].device)
    else:
        fail("type", "{}: {} are a sequence or a tensor of integers, got {}", call.function, name, str(value))
    if vector.ndim != 1 or vector.shape[0] != n:
        fail(
            "value", "{}: {} have shape {}; there is one for each of the {} ranks of {}",
            call.function, name, vector.shape, n, call.axis.label,
        )  # fmt: skip
    if numbers is None and not _torch.tracing(vector) and not _torch.in_a_batch(vector):
        numbers = vector.tolist()
    return vector, numbers


def _check_rows(call: Call[Any], pairs: Pairs, numbers: Sequence[list[int] | None]) -> None:
    first, sent, places, _ = numbers
    for name, values in zip(NAMES, numbers, strict=True):
        if values and min(values) < 0:
            fail("value", "{}: {} are not negative, got {}", call.function, name, values)
    for what, begins, tensors in (("input", first, [x for x, _ in pairs]), ("output", places, [y for _, y in pairs])):
        if begins is None or sent is None:
            continue
        last = max([0, *(begin + size for begin, size in zip(begins, sent, strict=True) if size)])
        for i, tensor in enumerate(tensors):
            if last > tensor.shape[0]:
                call.fail(
                    i, "value", "goes with {} {} rows; {}_offsets {} and send_sizes {} reach beyond",
                    tensor.shape[0], what, what, begins, sent,
                )  # fmt: skip
