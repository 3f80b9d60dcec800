"""The process-group engine: torch.distributed on tensors of one process. No derivatives, no trees, no checks.

While something traces, the operations are `torch.ops._c10d_functional`, which compilers know; otherwise `dist.*` on a
fresh buffer, which costs a fifth of them. Blocks of all ranks are stacked on axis 0, in the order of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import _torch

_c10d = torch.ops._c10d_functional
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "prod": dist.ReduceOp.PRODUCT}


def _options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


_OPTIONS = {name: _options(op) for name, op in _OPS.items()}
_NAMES = {"sum": "sum", "max": "max", "min": "min", "prod": "product"}


SIMULATED = "fcoll-simulated:"  # names of groups that have a size and a first rank only, see trace


class Process(NamedTuple):
    """A process group, whose members count in their own order."""

    name: str
    n: int
    order: tuple[int, ...]  # index in this order → rank of the process group; () where they agree

    def group(self) -> dist.ProcessGroup:
        """The process group itself."""
        return _torch.process_group(self.name)

    def rank(self, index: int) -> int:
        """The process group's rank for an index."""
        return self.order[index] if self.order else index

    def here(self) -> int:
        """This process's index."""
        rank = 0 if self.name.startswith(SIMULATED) else self.group().rank()
        return self.order.index(rank) if self.order else rank

    def index_tensor(self) -> Tensor:
        """This process's index as a tensor: while tracing an operation, not a literal, so that graphs agree."""
        if torch.compiler.is_compiling():
            rank: Tensor = torch.ops.fcoll.rank(self.name)
            return torch.tensor(_inverse(self.order)).index_select(0, rank.view(1)).view(()) if self.order else rank
        return torch.tensor(self.here())


@torch.library.custom_op("fcoll::rank", mutates_args=())
def _rank(group: str) -> Tensor:
    """This process's rank in a process group."""
    return torch.tensor(_torch.process_group(group).rank())


@_rank.register_fake
def _(group: str) -> Tensor:
    return torch.empty((), dtype=torch.int64)


_made: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}  # the world is kept: its id is a key


def make_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of these ranks of the world; made once while that world lives."""
    world = _torch.world()
    listed = tuple(sorted(ranks))
    if len(listed) == dist.get_world_size():
        return world
    key = (id(world), *listed)
    if key not in _made:
        _made[key] = world, _torch.new_group(list(listed))
    return _made[key][1]


def order_of(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """torch numbers a group's members by their rank in the world: index as listed → number given."""
    order = tuple(sorted(ranks).index(rank) for rank in ranks)
    return () if order == tuple(range(len(order))) else order


def all_reduce(x: Tensor, op: str, process: Process) -> Tensor:
    """Reduce elementwise over the ranks; `op` is sum, max, min or prod."""
    if op == "prod" and x.is_complex():
        return all_gather(x, process).prod(0)
    wire, back = _reducible(x, op)
    if _torch.tracing(x):
        return back(_c10d.wait_tensor(_c10d.all_reduce(_torch.unknown(wire.contiguous()), _NAMES[op], process.name)))
    buffer = wire.clone(memory_format=torch.contiguous_format)
    process.group().allreduce([buffer], _OPTIONS[op]).wait()  # dist.all_reduce takes twice as long to get here
    return back(buffer)


def all_gather(x: Tensor, process: Process) -> Tensor:
    """Stack every rank's x."""
    wire, back = _movable(x)
    if _torch.tracing(x):
        wire = _torch.unknown(wire.unsqueeze(0))
        gathered = _c10d.wait_tensor(_c10d.all_gather_into_tensor(wire, process.n, process.name))
    else:
        gathered = wire.new_empty((process.n, *wire.shape))
        if x.device.type == "cpu":  # gloo is faster with a list
            dist.all_gather(list(gathered.unbind(0)), wire, group=process.group())
        else:
            dist.all_gather_into_tensor(gathered, wire.unsqueeze(0), group=process.group())
    return back(_from_ranks(gathered, process))


def reduce_scatter(blocks: Tensor, process: Process) -> Tensor:
    """Sum block r of every rank onto rank r."""
    traced = _torch.tracing(blocks)
    if not traced and blocks.device.type == "cpu":  # twice as fast as gloo's own
        return all_to_all(blocks, process).sum(0, dtype=blocks.dtype)
    wire, back = _reducible(_to_ranks(blocks, process), "sum")
    wire = wire.contiguous()
    if traced:
        block = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(_torch.unknown(wire), "sum", process.n, process.name))
    else:
        block = wire.new_empty((1, *wire.shape[1:]))
        dist.reduce_scatter_tensor(block, wire, group=process.group())
    return back(block.squeeze(0))


def all_to_all(blocks: Tensor, process: Process) -> Tensor:
    """Send block q to rank q; block q of the result came from rank q."""
    return _from_ranks(exchange(_to_ranks(blocks, process), [1] * process.n, [1] * process.n, process), process)


def broadcast(x: Tensor, src: int, process: Process) -> Tensor:
    """Rank src's x."""
    wire, back = _movable(x)
    root = process.rank(src)
    if _torch.tracing(x):
        return back(_c10d.wait_tensor(_c10d.broadcast(_torch.unknown(wire), root, process.name)))
    buffer = wire.clone()
    dist.broadcast(buffer, group=process.group(), group_src=root)
    return back(buffer)


def reduce(x: Tensor, dst: int, process: Process) -> Tensor:
    """The sum on rank dst, zeros elsewhere."""
    if _torch.tracing(x):
        return at_root(all_reduce(x, "sum", process), dst, process)
    wire, back = _reducible(x, "sum")
    buffer = wire.clone(memory_format=torch.contiguous_format)
    dist.reduce(buffer, group=process.group(), group_dst=process.rank(dst))
    return at_root(back(buffer), dst, process)


def gather(x: Tensor, dst: int, process: Process) -> Tensor:
    """Every rank's x stacked on rank dst, zeros elsewhere."""
    here = process.here() == dst
    send = [int(rank == process.rank(dst)) for rank in range(process.n)]
    stack = exchange(x.unsqueeze(0), send, [int(here)] * process.n, process)
    return _from_ranks(stack, process) if here else zeros(x, (process.n, *x.shape))


def scatter(blocks: Tensor, src: int, process: Process) -> Tensor:
    """Block r of rank src."""
    here = process.here() == src
    receive = [int(rank == process.rank(src)) for rank in range(process.n)]
    rows = _to_ranks(blocks, process) if here else blocks[:0]
    return exchange(rows, [int(here)] * process.n, receive, process).squeeze(0)


def permute(x: Tensor, perm: Sequence[tuple[int, int]], process: Process) -> Tensor:
    """x of the rank that sends here, zeros where nobody does; `perm` holds (source, destination)."""
    here = process.here()
    send, receive = [0] * process.n, [0] * process.n
    for source, destination in perm:
        if source == here:
            send[process.rank(destination)] = 1
        if destination == here:
            receive[process.rank(source)] = 1
    rows = exchange(x.unsqueeze(0)[: sum(send)], send, receive, process)
    return rows.squeeze(0) if sum(receive) else zeros(x, x.shape)


def exchange(rows: Tensor, send: list[int], receive: list[int], process: Process) -> Tensor:
    """Send `send[q]` rows to rank q and receive `receive[q]` rows from it, both in the order of ranks."""
    wire, back = _movable(rows)
    if _torch.tracing(rows):
        return back(_c10d.wait_tensor(_c10d.all_to_all_single(_torch.unknown(wire), receive, send, process.name)))
    received = wire.new_empty((sum(receive), *wire.shape[1:]))
    dist.all_to_all_single(received, wire, receive, send, group=process.group())
    return back(received)


def at_root(y: Tensor, root: int, process: Process) -> Tensor:
    """y on the root, zeros elsewhere."""
    return y if process.here() == root else zeros(y, y.shape)


def zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros that take no memory."""
    return like.new_zeros(()).expand(shape)


def _to_ranks(blocks: Tensor, process: Process) -> Tensor:
    return blocks[_inverse(process.order)] if process.order else blocks


def _from_ranks(blocks: Tensor, process: Process) -> Tensor:
    return blocks[list(process.order)] if process.order else blocks


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


_Pair = tuple[Tensor, Callable[[Tensor], Tensor]]
_NATIVE = {
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64
}  # fmt: skip


def _movable(x: Tensor) -> _Pair:
    """x in a dtype that every backend moves, contiguous, and the way back."""
    if x.dtype in _NATIVE:
        return x.contiguous(), _same
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj().contiguous()), torch.view_as_complex
    dtype = x.dtype  # one more axis of bytes
    return x.unsqueeze(-1).contiguous().view(torch.uint8), lambda y: y.view(dtype).squeeze(-1)


def _reducible(x: Tensor, op: str) -> _Pair:
    """x in a dtype that every backend reduces as the emulation does, and the way back."""
    dtype = x.dtype
    if op in ("max", "min") and dtype.is_floating_point:
        return _ordered(x, op)
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj()), torch.view_as_complex
    if dtype == torch.bool:
        return x.to(torch.uint8), lambda y: y.to(dtype)
    if dtype not in _NATIVE:
        return x.to(torch.int32), lambda y: y.to(dtype)
    if dtype in (torch.float16, torch.bfloat16) and x.device.type == "cpu":
        return x.to(torch.float32), lambda y: y.to(dtype)  # gloo would round after every addition
    return x, _same


def _ordered(x: Tensor, op: str) -> _Pair:
    """Floats as integers of the same order, NaN outermost: backends disagree on NaN, even between ranks."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)
    integer = torch.int64 if wide.dtype == torch.float64 else torch.int32
    limits = torch.iinfo(integer)

    def flip(bits: Tensor) -> Tensor:  # negative floats grow with their bits; an involution
        return torch.where(bits < 0, bits ^ limits.max, bits)

    nan = limits.max if op == "max" else limits.min
    keys = torch.where(wide.isnan(), nan, flip(wide.contiguous().view(integer)))

    def back(keys: Tensor) -> Tensor:
        value = flip(keys).view(wide.dtype)
        return torch.where(keys == nan, torch.nan, value).to(x.dtype)

    return keys, back


def _same(x: Tensor) -> Tensor:
    return x
