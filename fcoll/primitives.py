"""One record per collective: what it does on a process group and on a stack of all ranks, and how it is transposed.

Conventions of every record: `axis` parameters count from the front; a stack has the ranks on axis 0; blocks are the n
equal pieces along an axis. `bind.py` derives everything else: both engines, vmap, forward and reverse mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fcoll import engine, marks
from fcoll.blocks import join_blocks, split_blocks
from fcoll.engine import Flight, Process
from fcoll.wire import wide

Params = tuple[Any, ...]


class Call(Protocol):
    """Collectives over the axis at hand, for the rules of non-linear ones. The first `stacked` axes of a tensor may
    be ranks; whatever a rule adds goes to the end."""

    @property
    def stacked(self) -> int: ...

    def __call__(self, name: str, x: Tensor, *params: Any) -> Tensor: ...

    def index(self, ndim: int) -> Tensor:
        """This rank's index in the group, to be broadcast against a tensor of `ndim` axes."""


@dataclass(frozen=True)
class Primitive:
    """A collective. Either `transpose` is given (it is linear) or `vjp` and `jvp` are, made of other collectives."""

    on_process: Callable[..., Tensor | Flight]
    """(x, process, *params) -> y, or the flight to wait for"""
    on_stack: Callable[..., Tensor]
    """(stack, n, *params) -> stack of results; where `replicated`, the one result instead"""
    wire: str = ""
    """How it is listed and costed in traces; "" where nothing is sent."""
    replicated: bool = False
    """Every rank gets the same result."""
    transpose: Callable[..., tuple[Any, ...]] | None = None
    """params -> (name, *params) of the transposed collective"""
    vjp: Callable[..., Tensor] | None = None
    """(call, x, y, cotangent, *params) -> cotangent of x"""
    jvp: Callable[..., Tensor] | None = None
    """(call, x, y, tangent, *params) -> tangent of y"""
    axes: tuple[int, ...] = ()
    """Which params are tensor axes: they move when vmap puts a batch axis in front."""
    exact: str = ""
    """Set where the transpose is declared (a value counts once for all ranks): the same map with its own transpose."""
    unmapped: Callable[..., Tensor] | None = None
    """(x, n, *params) -> stack of results, for an x that no rank has a value of its own of"""

    def shift(self, params: Params, by: int = 1) -> Params:
        """The params after `by` axes were put in front."""
        return tuple(p + by if i in self.axes else p for i, p in enumerate(params))


def own_block(stack: Tensor, n: int, axis: int, tiled: bool) -> Tensor:
    """Of each rank's x its own block."""
    blocks = split_blocks(stack, n, axis + 1, tiled)  # block, rank, ...
    return blocks.diagonal(dim1=0, dim2=1).movedim(-1, 0)


def only_at(y: Tensor, root: int, n: int) -> Tensor:
    """A stack with y on the root and zeros elsewhere."""
    rows = [0, 0] * y.ndim + [root, n - root - 1]
    return torch.nn.functional.pad(y.unsqueeze(0), rows)  # unlike select_scatter, with complex derivatives


# Reductions


def _reduce_stack(stack: Tensor, n: int, op: str) -> Tensor:
    match op:
        case "sum":
            return stack.sum(0, dtype=stack.dtype)
        case "mean":
            return stack.mean(0)
        case "max":
            return stack.amax(0)
        case "min":
            return stack.amin(0)
        case "prod":
            return stack.prod(0, dtype=wide(stack)).to(stack.dtype)
        case "any":
            return stack.any(0)
    return stack.all(0)


_WIRE = {"mean": "sum", "any": "max", "all": "min"}


def _reduce_process(x: Tensor, process: Process, op: str) -> Flight:
    if op == "mean":
        half = x.dtype in (torch.float16, torch.bfloat16) and x.is_cpu  # where it is sent as float32
        sent = x.float() if half else x  # so that there is one rounding, and no overflow
        return engine.all_reduce(sent, "sum", process).then(lambda y: (y / process.n).to(x.dtype))
    return engine.all_reduce(x, _WIRE.get(op, op), process)


def _shared_vjp(invariant: bool) -> Callable[..., Tensor]:
    """max and min: the ranks that attain the result share its cotangent evenly, as torch.amax does for elements."""

    def vjp(call: Call, x: Tensor, y: Tensor, cotangent: Tensor, op: str) -> Tensor:
        attains = (x == y).to(x.dtype)
        if invariant:
            return call("vary", cotangent, "sum") * attains / call("all_reduce", attains, "sum")
        total, count = call("all_reduce", torch.stack((cotangent, attains), -1), "sum").unbind(-1)
        return total * attains / count

    return vjp


def _shared_jvp(reduction: str) -> Callable[..., Tensor]:
    def jvp(call: Call, x: Tensor, y: Tensor, tangent: Tensor, op: str) -> Tensor:
        attains = (x == y).to(x.dtype)
        total, count = call(reduction, torch.stack((tangent * attains, attains), -1), "sum").unbind(-1)
        return total / count

    return jvp


def _others(call: Call, x: Tensor) -> Tensor:
    """The product over all other ranks: by products, not y / x, so finite at zeros at every order."""
    factors = call("all_gather", x, x.ndim - call.stacked, False)
    ranks = torch.arange(factors.shape[-1], device=x.device)
    return torch.where(ranks == call.index(factors.ndim).to(x.device), 1, factors).prod(-1)


def _prod_vjp(invariant: bool) -> Callable[..., Tensor]:
    def vjp(call: Call, x: Tensor, y: Tensor, cotangent: Tensor, op: str) -> Tensor:
        total = call("vary" if invariant else "all_reduce", cotangent, "sum")
        return total * _others(call, x).conj()

    return vjp


def _prod_jvp(reduction: str) -> Callable[..., Tensor]:
    def jvp(call: Call, x: Tensor, y: Tensor, tangent: Tensor, op: str) -> Tensor:
        return call(reduction, tangent * _others(call, x), "sum")

    return jvp


def _expand(reduced: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Rank by rank what `reduced` gives once. In memory of its own: forward mode writes tangents of that layout."""

    def on_stack(stack: Tensor, n: int, *params: Any) -> Tensor:
        y = reduced(stack, n, *params)
        return y.expand(n, *y.shape).clone(memory_format=torch.contiguous_format)

    return on_stack


# Movements. On a stack too, results have memory of their own: whoever writes into one does not change an input.


def _join_stack(blocks: Tensor, axis: int, tiled: bool) -> Tensor:
    joined = blocks.movedim(0, axis).clone(memory_format=torch.contiguous_format)
    return joined.flatten(axis, axis + 1) if tiled else joined


def _gather_stack(stack: Tensor, n: int, axis: int, tiled: bool) -> Tensor:
    return _join_stack(stack, axis, tiled)


def _gather_process(x: Tensor, process: Process, axis: int, tiled: bool) -> Flight:
    return engine.all_gather(x, process).then(lambda blocks: join_blocks(blocks, axis, tiled))


def _split_process(x: Tensor, process: Process, axis: int, tiled: bool) -> Tensor:
    return (
        split_blocks(x, process.n, axis, tiled).index_select(0, process.index_tensor().view(1).to(x.device)).squeeze(0)
    )


def _embed_process(x: Tensor, process: Process, axis: int, tiled: bool) -> Tensor:
    blocks = x.new_zeros((process.n, *x.shape)).index_copy(0, process.index_tensor().view(1).to(x.device), x[None])
    return join_blocks(blocks, axis, tiled)


def _embed_stack(stack: Tensor, n: int, axis: int, tiled: bool) -> Tensor:
    return join_blocks(torch.diag_embed(stack.movedim(0, -1), dim1=0, dim2=1), axis + 1, tiled)


def _scale(x: Tensor, n: int, op: str) -> Tensor:
    return x / n if op == "mean" else x.clone()


def _scale_process(x: Tensor, process: Process, op: str) -> Tensor:
    return _scale(x, process.n, op)


def _all_to_all_stack(stack: Tensor, n: int, split: int, concat: int, tiled: bool) -> Tensor:
    blocks = split_blocks(stack, n, split + 1, tiled)  # receiver, sender, ...
    return _join_stack(blocks.movedim(1, 0), concat + 1, tiled)


def _all_to_all_process(x: Tensor, process: Process, split: int, concat: int, tiled: bool) -> Flight:
    flight = engine.all_to_all(split_blocks(x, process.n, split, tiled), process)
    return flight.then(lambda blocks: join_blocks(blocks, concat, tiled))


def _to_root_process(x: Tensor, process: Process, axis: int, tiled: bool, dst: int) -> Flight:
    return engine.gather(x, dst, process).then(lambda blocks: join_blocks(blocks, axis, tiled))


def _permute_stack(stack: Tensor, n: int, perm: tuple[tuple[int, int], ...]) -> Tensor:
    offset = (perm[0][1] - perm[0][0]) % n if perm else 0
    if len(perm) == n and all((source + offset) % n == destination for source, destination in perm):
        return stack.roll(offset, 0)
    sources = {destination: source for source, destination in perm}
    rows = torch.tensor([sources.get(rank, n) for rank in range(n)], device=stack.device)
    return torch.cat((stack, torch.zeros_like(stack[:1]))).index_select(0, rows)  # unlike index_copy, for all dtypes


def _inverse(perm: tuple[tuple[int, int], ...]) -> tuple[Any, ...]:
    return "permute", tuple((destination, source) for source, destination in perm)


def _uneven_process(
    x: Tensor, process: Process, split: int, concat: int, send: tuple[int, ...], receive: tuple[int, ...]
) -> Flight:
    in_order = sorted(range(process.n), key=process.rank)  # index of each rank
    shape = list(x.shape)
    shape[split] = send[process.here()]
    shapes = [(*shape[:concat], size, *shape[concat + 1 :]) for size in receive]
    blocks = x.split(list(send), split)
    rows = torch.cat([blocks[index].reshape(-1) for index in in_order])
    numbers = [math.prod(shapes[index]) for index in in_order]

    def joined(received: Tensor) -> Tensor:
        parts = received.split(numbers)
        return torch.cat([parts[process.rank(index)].view(shape) for index, shape in enumerate(shapes)], concat)

    return engine.exchange(rows, [blocks[index].numel() for index in in_order], numbers, process).then(joined)


# Scans


def _prefix_sum_stack(stack: Tensor, n: int, inclusive: bool, reverse: bool) -> Tensor:
    x = stack.flip(0) if reverse else stack
    y = x.cumsum(0, dtype=wide(x)).to(x.dtype)
    if not inclusive:
        y = torch.cat((torch.zeros_like(y[:1]), y[:-1]))
    return y.flip(0) if reverse else y


def _prefix_sum_process(x: Tensor, process: Process, inclusive: bool, reverse: bool) -> Tensor:
    """By doubling: log2 n messages of one x each, on gloo as fast as gathering small x, and four times as fast as that
    with large ones."""
    n = process.n

    def shifted(y: Tensor, offset: int) -> Tensor:
        pairs = [(rank, rank + offset) for rank in range(n - offset)]
        return engine.permute(y, [(d, s) for s, d in pairs] if reverse else pairs, process).wait()

    y = x.to(wide(x))
    y = y if inclusive else shifted(y, 1)
    offset = 1
    while offset < n:
        y = y + shifted(y, offset)
        offset *= 2
    return y.to(x.dtype) if n > 1 else y.to(x.dtype, copy=True)


def _shift_process(x: Tensor, process: Process, offset: int, wrap: bool) -> Flight:
    n = process.n
    moves = [(source, source + offset) for source in range(n)]
    return engine.permute(x, [(s, d % n) for s, d in moves if wrap or 0 <= d < n], process)


def _shift_stack(stack: Tensor, n: int, offset: int, wrap: bool) -> Tensor:
    if wrap:
        return stack.roll(offset, 0)
    kept = stack[: max(0, n - offset)] if offset >= 0 else stack[min(n, -offset) :]
    missing = n - kept.shape[0]
    rows = [missing, 0] if offset >= 0 else [0, missing]
    return torch.nn.functional.pad(kept, [0, 0] * (stack.ndim - 1) + rows) if missing else kept.clone()


PRIMITIVES: dict[str, Primitive] = {
    "all_reduce": Primitive(  # op: sum or mean
        wire="all_reduce",
        on_process=_reduce_process,
        on_stack=_reduce_stack,
        replicated=True,
        transpose=lambda op: ("all_reduce", op),
    ),
    "all_reduce_invariant": Primitive(
        wire="all_reduce",
        on_process=_reduce_process,
        on_stack=_expand(_reduce_stack),
        transpose=lambda op: ("vary", op),
        exact="all_reduce",
    ),
    "vary": Primitive(  # op: what the transposed all_reduce does
        on_process=_scale_process,
        on_stack=_scale,
        transpose=lambda op: ("all_reduce_invariant", op),
        exact="scale",
        unmapped=lambda x, n, op: _scale(x.expand(n, *x.shape), n, op),
    ),
    "scale": Primitive(  # what vary does, as a map of its own
        on_process=_scale_process,
        on_stack=_scale,
        transpose=lambda op: ("scale", op),
    ),
    "unvary": Primitive(  # a value that is the same on all ranks leaves a map, where it counts once
        on_process=lambda x, process: x.clone(),
        on_stack=lambda stack, n: stack.clone(),
        transpose=lambda: ("vary", "mean"),
    ),
    "extremum": Primitive(  # op: max or min
        wire="all_reduce",
        on_process=_reduce_process,
        on_stack=_reduce_stack,
        replicated=True,
        vjp=_shared_vjp(invariant=False),
        jvp=_shared_jvp("all_reduce"),
    ),
    "extremum_invariant": Primitive(
        wire="all_reduce",
        on_process=_reduce_process,
        on_stack=_expand(_reduce_stack),
        vjp=_shared_vjp(invariant=True),
        jvp=_shared_jvp("all_reduce_invariant"),
        exact="extremum",
    ),
    "product": Primitive(
        wire="all_reduce",
        on_process=_reduce_process,
        on_stack=_reduce_stack,
        replicated=True,
        vjp=_prod_vjp(invariant=False),
        jvp=_prod_jvp("all_reduce"),
    ),
    "product_invariant": Primitive(
        wire="all_reduce",
        on_process=_reduce_process,
        on_stack=_expand(_reduce_stack),
        vjp=_prod_vjp(invariant=True),
        jvp=_prod_jvp("all_reduce_invariant"),
        exact="product",
    ),
    "truth": Primitive(  # op: any or all, of booleans
        wire="all_reduce",
        on_process=_reduce_process,
        on_stack=_reduce_stack,
        replicated=True,
    ),
    "all_gather": Primitive(
        wire="all_gather",
        on_process=_gather_process,
        on_stack=_gather_stack,
        replicated=True,
        transpose=lambda axis, tiled: ("reduce_scatter", axis, tiled),
        axes=(0,),
    ),
    "reduce_scatter": Primitive(
        wire="reduce_scatter",
        on_process=lambda x, process, axis, tiled: engine.reduce_scatter(
            split_blocks(x, process.n, axis, tiled), process
        ),
        on_stack=lambda stack, n, axis, tiled: split_blocks(stack.sum(0, dtype=stack.dtype), n, axis, tiled),
        transpose=lambda axis, tiled: ("all_gather", axis, tiled),
        axes=(0,),
    ),
    "all_gather_invariant": Primitive(
        wire="all_gather",
        on_process=_gather_process,
        on_stack=_expand(_gather_stack),
        transpose=lambda axis, tiled: ("split", axis, tiled),
        axes=(0,),
        exact="all_gather",
    ),
    "split": Primitive(
        on_process=_split_process,
        on_stack=lambda stack, n, axis, tiled: own_block(stack, n, axis, tiled).clone(),
        transpose=lambda axis, tiled: ("all_gather_invariant", axis, tiled),
        axes=(0,),
        exact="own_block",
        unmapped=lambda x, n, axis, tiled: split_blocks(x, n, axis, tiled).clone(),
    ),
    "own_block": Primitive(  # what split does, as a map of its own
        on_process=_split_process,
        on_stack=own_block,
        transpose=lambda axis, tiled: ("embed", axis, tiled),
        axes=(0,),
        unmapped=split_blocks,
    ),
    "embed": Primitive(  # x as the own block among zeros
        on_process=_embed_process,
        on_stack=_embed_stack,
        transpose=lambda axis, tiled: ("own_block", axis, tiled),
        axes=(0,),
    ),
    "mark": Primitive(  # x, of which graphs are told that these ranks of the world have the same, see `marks`
        on_process=lambda x, process, ranks: marks.mark(x, ranks),
        on_stack=lambda stack, n, ranks: stack.clone(),
        transpose=lambda ranks: ("cotangent",),
    ),
    "cotangent": Primitive(  # of a marked value: code outside of the graph may give each rank another one
        on_process=lambda x, process: marks.cotangent(x, process.name),
        on_stack=lambda stack, n: stack.clone(),
        transpose=lambda: ("mark", ()),
    ),
    "all_to_all": Primitive(
        wire="all_to_all",
        on_process=_all_to_all_process,
        on_stack=_all_to_all_stack,
        transpose=lambda split, concat, tiled: ("all_to_all", concat, split, tiled),
        axes=(0, 1),
    ),
    "all_to_all_uneven": Primitive(  # send: the sizes of the blocks to the ranks along split; receive: along concat
        wire="all_to_all",
        on_process=_uneven_process,
        on_stack=lambda stack, n, split, concat, *_: _all_to_all_stack(stack, n, split, concat, True),  # all equal
        transpose=lambda split, concat, send, receive: ("all_to_all_uneven", concat, split, receive, send),
        axes=(0, 1),
    ),
    "prefix_sum": Primitive(
        wire="prefix_sum",
        on_process=_prefix_sum_process,
        on_stack=_prefix_sum_stack,
        transpose=lambda inclusive, reverse: ("prefix_sum", inclusive, not reverse),
    ),
    "broadcast": Primitive(
        wire="broadcast",
        on_process=lambda x, process, src: engine.broadcast(x, src, process),
        on_stack=lambda stack, n, src: stack.select(0, src).clone(),
        replicated=True,
        transpose=lambda src: ("reduce", src),
    ),
    "reduce": Primitive(
        wire="reduce",
        on_process=lambda x, process, dst: engine.reduce(x, dst, process),
        on_stack=lambda stack, n, dst: only_at(stack.sum(0, dtype=stack.dtype), dst, n),
        transpose=lambda dst: ("broadcast", dst),
    ),
    "only_at": Primitive(  # x on one rank, zeros elsewhere
        on_process=lambda x, process, root: engine.at_root(x.clone(), root, process),
        on_stack=lambda stack, n, root: only_at(stack.select(0, root), root, n),
        transpose=lambda root: ("only_at", root),
    ),
    "gather": Primitive(
        wire="gather",
        on_process=_to_root_process,
        on_stack=lambda stack, n, axis, tiled, dst: only_at(join_blocks(stack, axis, tiled), dst, n),
        transpose=lambda axis, tiled, dst: ("scatter", axis, tiled, dst),
        axes=(0,),
    ),
    "scatter": Primitive(
        wire="scatter",
        on_process=lambda x, process, axis, tiled, src: engine.scatter(
            split_blocks(x, process.n, axis, tiled), src, process
        ),
        on_stack=lambda stack, n, axis, tiled, src: split_blocks(stack.select(0, src), n, axis, tiled).clone(),
        transpose=lambda axis, tiled, src: ("gather", axis, tiled, src),
        axes=(0,),
    ),
    "shift": Primitive(  # a permute that takes no list of all ranks, which would have to be traced
        wire="permute",
        on_process=_shift_process,
        on_stack=_shift_stack,
        transpose=lambda offset, wrap: ("shift", -offset, wrap),
    ),
    "permute": Primitive(
        wire="permute",
        on_process=lambda x, process, perm: engine.permute(x, perm, process),
        on_stack=_permute_stack,
        transpose=_inverse,
    ),
}
