"""Collectives along an axis whose size differs between the ranks, on process groups: told, or exchanged first.

Gathered blocks travel padded to the largest, so that derivatives are those of the even collective. Exchanged blocks
travel as they are. On an emulated axis all ranks have one shape, so only equal sizes have a meaning.

Sizes may be symbols in a compiled function, of whose value nothing is known: what cannot be checked while tracing is
asserted when the graph runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from fcoll import _torch, recorder
from fcoll.bind import bind
from fcoll.calls import Call, Fused
from fcoll.engine import Process
from fcoll.errors import beyond_int64, check_flag, fail, kind_of
from fcoll.groups import GroupLike
from fcoll.primitives import Params

Tree = TypeVar("Tree")
Sizes: TypeAlias = "Sequence[int] | Tensor"
"""One per rank, in the order of the group."""


def all_gather(
    tree: Tree,
    group: GroupLike,
    axis: int,
    tiled: bool,
    sizes: Sizes | str,
    invariant: bool,
    bucket_size: int,
    gather: Callable[[list[Tensor]], list[Tensor]],
) -> Tree:
    """See functional.all_gather; `gather` stacks tensors of one shape."""
    _check_tiled("all_gather", "sizes", tiled)
    call = Call("all_gather", tree, group)
    call.flag("invariant", invariant)  # which `gather` would look at only after the sizes have been exchanged
    call.bucket_size(bucket_size)
    axes = [call.axis_of(i, "axis", axis) for i in call.indices]
    if not call.leaves:
        return tree
    own = [leaf.shape[a] for leaf, a in zip(call.leaves, axes, strict=True)]
    if isinstance(sizes, str):
        if sizes != "exchange":
            fail("value", 'all_gather: sizes are numbers, or "exchange", got {!r}', sizes)
        for i in call.indices:
            _require(
                own[i] == own[0], call, i, "has size {} along axis={}, and an earlier leaf has {}", own[i], axis, own[0]
            )
        listed = _exchanged(call, [own[0]] * call.axis.n)
    else:
        listed = _listed(call, "sizes", sizes)
        here = _here(call)
        for i in call.indices:
            _require(
                own[i] == listed[here], call, i, "has shape {}: size {} along axis={} is not {}, this rank's of sizes",
                call.leaves[i].shape, own[i], axis, listed[here],
            )  # fmt: skip
    largest = functools.reduce(torch.sym_max, listed)

    def padded(x: Tensor, a: int) -> Tensor:  # a cat would lose the batch axis of a vmap where x is empty
        return torch.nn.functional.pad(x, (*[0] * (2 * (x.ndim - a) - 1), largest - x.shape[a]))

    def cut(stack: Tensor, a: int) -> Tensor:
        return torch.cat([x.narrow(a, 0, size) for x, size in zip(stack.unbind(0), listed, strict=True)], a)

    stacks = gather([padded(x, a) for x, a in zip(call.leaves, axes, strict=True)])
    return call.rebuild([cut(stack, a) for stack, a in zip(stacks, axes, strict=True)])


def reduce_scatter(
    tree: Tree, group: GroupLike, axis: int, op: str, tiled: bool, sizes: Sizes, bucket_size: int
) -> Tree:
    """See functional.reduce_scatter."""
    _check_tiled("reduce_scatter", "sizes", tiled)
    call = Call("reduce_scatter", tree, group)
    call.check_op(op, among=("sum", "mean", "max", "min"))
    axes = [call.axis_of(i, "axis", axis) for i in call.indices]
    listed = _listed(call, "sizes", sizes)
    for i, a in enumerate(axes):
        _add_up(call, i, "sizes", listed, "axis", axis, call.leaves[i].shape[a])
    n, size = call.axis.n, listed[_here(call)]

    def reduced(received: Tensor, own: Params, dtype: torch.dtype) -> Tensor:  # each rank reduces what it has received
        blocks: Tensor = received.unflatten(own[0], (n, size))
        if op in ("max", "min"):
            return blocks.amax(own[0]) if op == "max" else blocks.amin(own[0])
        half = dtype in (torch.float16, torch.bfloat16)  # of which a sum may overflow where the mean does not
        total = blocks.sum(own[0], dtype=torch.float32 if half else dtype)
        return (total / n if op == "mean" else total).to(dtype)

    def cut(x: Tensor, own: Params) -> Tensor:
        return x.movedim(own[0], 0)

    def finish(y: Tensor, own: Params) -> Tensor:
        return y.movedim(0, own[0])

    ends = tuple(listed), (size,) * n
    fused = Fused(1, (0, 0, *ends), cut, finish, call.bucket_size(bucket_size))
    return call.run("all_to_all_uneven", [(a, a, *ends) for a in axes], fused, after=reduced)


def all_to_all(
    tree: Tree,
    group: GroupLike,
    split_axis: int,
    concat_axis: int,
    tiled: bool,
    send_sizes: Sizes | None,
    recv_sizes: Sizes | None,
) -> Tree:
    """See functional.all_to_all."""
    _check_tiled("all_to_all", "send_sizes", tiled)
    call = Call("all_to_all", tree, group)
    if send_sizes is None:
        fail("value", "all_to_all: recv_sizes go with send_sizes")
    axes = [
        (call.axis_of(i, "split_axis", split_axis), call.axis_of(i, "concat_axis", concat_axis)) for i in call.indices
    ]
    if not axes:
        return tree
    send = _listed(call, "send_sizes", send_sizes)
    here = _here(call)
    for i, (split, _) in enumerate(axes):
        _add_up(call, i, "send_sizes", send, "split_axis", split_axis, call.leaves[i].shape[split])

    # What this rank keeps: its block for itself, or, across axes, its whole size along the other one.
    kept = [send[here] if s == c else leaf.shape[c] for leaf, (s, c) in zip(call.leaves, axes, strict=True)]
    if recv_sizes is None:
        for i in call.indices:
            _require(
                kept[i] == kept[0], call, i, "would receive other sizes than an earlier leaf; call it for each alone"
            )
        moved = axes[0][0] != axes[0][1]
        receive = _exchanged(call, [kept[0]] * call.axis.n if moved else send)
    else:
        receive = _listed(call, "recv_sizes", recv_sizes)
        for i in call.indices:
            _require(
                kept[i] == receive[here], call, i, "has shape {}: this rank keeps {} along concat_axis={}, not the {} "
                "of recv_sizes", call.leaves[i].shape, kept[i], concat_axis, receive[here],
            )  # fmt: skip
    return call.rebuild(
        [
            bind("all_to_all_uneven", x, call.axis, *pair, tuple(send), tuple(receive))
            for x, pair in zip(call.leaves, axes, strict=True)
        ]
    )


def _check_tiled(function: str, name: str, tiled: bool) -> None:
    if not check_flag(function, "tiled", tiled):
        fail("value", "{}: {} are for tiled=True; blocks that are stacked have one size", function, name)


def _listed(call: Call[Any], name: str, sizes: Sizes) -> list[int]:
    """The sizes as numbers, one per rank."""
    call._even()
    function, n = call.function, call.axis.n
    if isinstance(sizes, Tensor):
        if sizes.is_floating_point() or sizes.is_complex() or sizes.dtype == torch.bool:
            fail("type", "{}: {} are integers, got {}", function, name, str(sizes.dtype))
        if sizes.ndim != 1:
            fail("value", "{}: {} are a tensor of one axis, got shape {}", function, name, sizes.shape)
        if sizes.is_meta:
            fail("value", "{}: {} are a tensor on the meta device, which holds no numbers", function, name)
        if not torch.compiler.is_compiling() and _torch.in_a_batch(sizes):
            fail("value", "{}: {} differ within a vmap; shapes cannot: pad, or use ragged_all_to_all", function, name)
        listed: list[int] = sizes.tolist()
    elif isinstance(sizes, (list, tuple)):
        listed = list(sizes)
    else:
        fail("type", "{}: {} are a sequence or a tensor of integers, got {}", function, name, kind_of(sizes))
    for size in listed:
        if not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool):
            fail("type", "{}: {} are integers, got {}", function, name, kind_of(size))
        if not isinstance(sizes, Tensor) and beyond_int64(size):  # of a tensor's, a compiled graph knows nothing
            fail("value", "{}: {} are int64 numbers, got {}", function, name, size)
    if len(listed) != n:
        fail("value", "{}: {} are {} numbers for the {} ranks of {}", function, name, len(listed), n, call.axis.label)
    for size in listed:
        if not _torch.holds(size >= 0):
            fail("value", "{}: {} are not negative, got {}", function, name, listed)
    listed = [size if _torch.possible(size != 0) else 0 for size in listed]  # for torch's solver, as shapes do
    if not call.axis.layout.process:
        for size in listed:
            if not _torch.holds(size == listed[0]):
                fail(
                    "value",
                    "{}: {}={}, but all ranks of {}, which is emulated, have one shape; pad, or use ragged_all_to_all",
                    function, name, listed, call.axis.label,
                )  # fmt: skip
    return listed


def _exchanged(call: Call[Any], sizes: list[int]) -> list[int]:
    """What each rank has for this one, each telling the others its `sizes`."""
    if not call.axis.layout.process:
        return sizes
    told = bind("all_to_all", torch.tensor(sizes, device=call.leaves[0].device), call.axis, 0, 0, True)
    if recorder.active():  # fake tensors, which tell nothing: as if all ranks were like this one
        return sizes
    listed: list[int] = told.tolist()
    for size in listed:
        _torch.holds(size >= 0)  # which a compiled graph does not know
    return listed


def _add_up(call: Call[Any], i: int, name: str, sizes: list[int], axis: str, at: int, size: int) -> None:
    _require(
        sum(sizes) == size, call, i, "has shape {}: {} {} add up to {}, not to the {} along {}={}",
        call.leaves[i].shape, name, sizes, sum(sizes), size, axis, at,
    )  # fmt: skip


def _require(condition: bool, call: Call[Any], i: int, template: str, *details: object) -> None:
    if not _torch.holds(condition):
        call.fail(i, "value", template, *details)


def _here(call: Call[Any]) -> int:
    """This rank's index; emulated ranks are all like the first."""
    layout = call.axis.layout
    return _index(layout.process, call.axis.n, layout.order) if layout.process else 0


@_torch.assume_constant_result  # shapes depend on it, so a compiled function has it as a number
def _index(name: str, n: int, order: tuple[int, ...]) -> int:
    return Process(name, n, order).here()
