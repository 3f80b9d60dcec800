"""The process-group engine: torch.distributed on tensors of one process. No derivatives, no trees, no checks.

Every function starts a message and returns the `Flight` to wait for. While something traces, the operations are
`torch.ops._c10d_functional`, which compilers know; otherwise those of the process group on fresh buffers, which cost a
tenth of them, in the way that `lowering.py` chooses. Blocks of all ranks are stacked on axis 0, in the group's order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import _torch, lowering, marks
from fcoll.wire import movable, reducible, same, wide

_c10d = torch.ops._c10d_functional
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "prod": dist.ReduceOp.PRODUCT}


def _options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


_OPTIONS = {name: _options(op) for name, op in _OPS.items()}
_SCATTER = dist.ReduceScatterOptions()  # of a sum


@functools.cache
def _rooted(kind: Any, root: int) -> Any:
    """Options of this kind, which cost more to make than a message to nobody."""
    options = kind()
    options.rootRank = root
    return options


_NAMES = {"sum": "sum", "max": "max", "min": "min", "prod": "product"}
_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {  # of a stack, here
    "sum": lambda stack: stack.sum(0, dtype=stack.dtype),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "prod": lambda stack: stack.prod(0, dtype=wide(stack)).to(stack.dtype),
}

SIMULATED = "fcoll-simulated:"  # names of groups that have a size and a first rank only, see trace
TAG = 0xFC011  # of messages between two ranks: apart from what users send


class Process(NamedTuple):
    """A process group, whose members count in their own order."""

    name: str
    n: int
    order: tuple[int, ...]  # index in this order → rank of the process group; () where they agree
    overlap: bool = False  # other work goes on meanwhile: one message only, so that it needs no further step

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
        if torch.compiler.is_compiling() or marks.wanted():
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


RANK = torch.ops.fcoll.rank.default


@torch.library.custom_op("fcoll::move", mutates_args=())
def _move(x: Tensor, kind: str, places: list[int], group: str) -> Tensor:
    """What `moving` gives. Unlike what that is made of, it reads the same on all ranks."""
    return moving(x, kind, places, group).wait().clone(memory_format=torch.contiguous_format)


@_move.register_fake
def _(x: Tensor, kind: str, places: list[int], group: str) -> Tensor:
    return x.new_empty({"gather": (places[0], *x.shape), "scatter": x.shape[1:]}.get(kind, x.shape))


MOVE = torch.ops.fcoll.move.default


def moving(x: Tensor, kind: str, places: Sequence[int], group: str) -> Flight:
    """A permute, gather or scatter among ranks of a process group: `places` are n, and then the root, or source,
    destination, source, ...
    """
    process, ranks = Process(group, places[0], ()), places[1:]
    if kind == "permute":
        return permute(x, list(zip(ranks[::2], ranks[1::2], strict=True)), process)
    return (gather if kind == "gather" else scatter)(x, ranks[0], process)


def _later(x: Tensor, kind: str, ranks: Iterable[int], process: Process) -> Flight:
    """The same, as one operation of the graph until `deferred.py` puts this rank's part into its place."""
    return _traced(torch.ops.fcoll.move(_torch.unknown(x), kind, [process.n, *ranks], process.name))


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


class Flight:
    """A message on its way: what to wait for, and what makes the result of the buffer then."""

    __slots__ = ("buffer", "finish", "traced", "works")

    def __init__(
        self, buffer: Tensor, works: Sequence[Any], finish: Callable[[Tensor], Tensor] = same, traced: bool = False
    ) -> None:
        self.buffer, self.works, self.finish, self.traced = buffer, works, finish, traced

    def then(self, step: Callable[[Tensor], Tensor]) -> Flight:
        """The same message, with one step more to its result."""
        before = self.finish
        self.finish = step if before is same else lambda y: step(before(y))
        return self

    def wait(self) -> Tensor:
        """The result."""
        if self.traced:
            return self.finish(_c10d.wait_tensor(self.buffer))
        for work in self.works:
            work.wait()
        return self.finish(self.buffer)


def _traced(buffer: Tensor, finish: Callable[[Tensor], Tensor] = same) -> Flight:
    return Flight(buffer, (), finish, True)


def all_reduce(x: Tensor, op: str, process: Process) -> Flight:
    """Reduce elementwise over the ranks; `op` is sum, max, min or prod."""
    if op == "prod" and x.is_complex():
        return all_gather(x, process).then(_REDUCE[op])
    if _torch.tracing(x):
        wire, back = reducible(x, op)
        return _traced(_c10d.all_reduce(_torch.unknown(wire.contiguous()), _NAMES[op], process.name), back)
    group = process.group()
    ordered = op in ("max", "min") and x.dtype.is_floating_point
    how = lowering.choose("extremum" if ordered else "all_reduce", x, process.n, group)
    if how == "gather, reduce":
        return all_gather(x, process).then(_REDUCE[op])
    if how and not process.overlap:
        return _all_reduce_in_two_steps(x, op, process)
    wire, back = reducible(x, op)
    buffer = _copy(wire)
    return Flight(buffer, (group.allreduce([buffer], _OPTIONS[op]),), back)


def _all_reduce_in_two_steps(x: Tensor, op: str, process: Process) -> Flight:
    """Each rank reduces a block, and gives it to the others."""
    n, flat = process.n, x.reshape(-1)
    size = -(-flat.numel() // n)
    if size * n != flat.numel():
        flat = torch.nn.functional.pad(flat, (0, size * n - flat.numel()))
    own = all_to_all(flat.view(n, size), process).then(_REDUCE[op]).wait()
    return all_gather(own, process).then(lambda blocks: blocks.view(-1)[: x.numel()].view(x.shape))


def all_gather(x: Tensor, process: Process) -> Flight:
    """Stack every rank's x."""
    n = process.n
    if _torch.tracing(x):
        wire, back = movable(x)
        wire = _torch.unknown(wire.unsqueeze(0))
        return _traced(_c10d.all_gather_into_tensor(wire, n, process.name), back).then(_from_ranks(process))
    group = process.group()
    how = lowering.choose("all_gather", x, n, group)
    if how == "exchange":
        return exchange(x.expand(n, *x.shape), (), (), process).then(_from_ranks(process))
    wire, back = movable(x)
    gathered = wire.new_empty((n, *wire.shape))
    if how == "direct":
        here, others = _others(process)
        gathered[here].copy_(wire)
        sent = [(wire, rank) for _, rank in others]
        return Flight(gathered, _direct(group, sent, [(gathered[q], rank) for q, rank in others]), back)
    work = group.all_gather_single(gathered, wire.unsqueeze(0))
    return Flight(gathered, (work,), back).then(_from_ranks(process))


def reduce_scatter(blocks: Tensor, process: Process) -> Flight:
    """Sum block r of every rank onto rank r."""
    traced, group = _torch.tracing(blocks), process.group
    if not traced and lowering.choose("reduce_scatter", blocks, process.n, group()):
        return all_to_all(blocks, process).then(_REDUCE["sum"])
    wire, back = reducible(_to_ranks(blocks, process), "sum")
    wire = wire.contiguous()
    if traced:
        flight = _traced(_c10d.reduce_scatter_tensor(_torch.unknown(wire), "sum", process.n, process.name), back)
    else:
        block = wire.new_empty((1, *wire.shape[1:]))
        flight = Flight(block, (group().reduce_scatter_single(block, wire, _SCATTER),), back)
    return flight.then(_only)


def all_to_all(blocks: Tensor, process: Process) -> Flight:
    """Send block q to rank q; block q of the result came from rank q."""
    return exchange(_to_ranks(blocks, process), (), (), process).then(_from_ranks(process))


def broadcast(x: Tensor, src: int, process: Process) -> Flight:
    """Rank src's x."""
    wire, back = movable(x)
    root = process.rank(src)
    if _torch.tracing(x):
        return _traced(_c10d.broadcast(_torch.unknown(wire), root, process.name), back)
    group = process.group()
    here = group.rank() == root
    buffer = wire.clone() if here else torch.empty_like(wire)
    if not lowering.choose("broadcast", x, process.n, group):
        return Flight(buffer, (group.broadcast(buffer, root),), back)
    if here:
        return Flight(buffer, _direct(group, [(buffer, rank) for _, rank in _others(process)[1]], []), back)
    return Flight(buffer, _direct(group, [], [(buffer, root)]), back)


def reduce(x: Tensor, dst: int, process: Process) -> Flight:
    """The sum on rank dst, zeros elsewhere."""
    if _torch.tracing(x):
        return all_reduce(x, "sum", process).then(lambda y: at_root(y, dst, process))
    group = process.group()
    if lowering.choose("reduce", x, process.n, group):
        flight, here = _to_root(x, dst, process)
        return flight.then(_REDUCE["sum"] if here else lambda y: zeros(x, x.shape, y))
    wire, back = reducible(x, "sum")
    buffer, root = _copy(wire), process.rank(dst)
    flight = Flight(buffer, (group.reduce([buffer], _rooted(dist.ReduceOptions, root)),), back)
    return flight if group.rank() == root else flight.then(lambda _: zeros(x, x.shape))


def gather(x: Tensor, dst: int, process: Process) -> Flight:
    """Every rank's x stacked on rank dst, zeros elsewhere."""
    if marks.wanted() and _torch.tracing(x):
        return _later(x, "gather", [process.rank(dst)], process).then(_from_ranks(process))
    flight, here = _to_root(x, dst, process)
    return flight if here else flight.then(lambda y: zeros(x, (process.n, *x.shape), y))


def _to_root(x: Tensor, dst: int, process: Process) -> tuple[Flight, bool]:
    """Every rank's x stacked on rank dst, nothing elsewhere; and whether this is the root."""
    n, root = process.n, process.rank(dst)
    if _torch.tracing(x):
        here = process.here() == dst
        send = [int(rank == root) for rank in range(n)]
        flight = exchange(x.unsqueeze(0), send, [int(here)] * n, process)
        return flight.then(_from_ranks(process)) if here else flight, here
    group = process.group()
    direct = lowering.choose("gather", x, n, group)
    wire, back = movable(x)
    if group.rank() != root:
        works = (
            _direct(group, [(wire, root)], [])
            if direct
            else [group.gather([], [wire], _rooted(dist.GatherOptions, root))]
        )
        return Flight(wire, works, back), False
    stack = wire.new_empty((n, *wire.shape))
    if direct:
        stack[dst].copy_(wire)
        return Flight(stack, _direct(group, [], [(stack[q], rank) for q, rank in _others(process)[1]]), back), True
    work = group.gather([list(stack.unbind(0))], [wire], _rooted(dist.GatherOptions, root))
    return Flight(stack, (work,), back).then(_from_ranks(process)), True


def scatter(blocks: Tensor, src: int, process: Process) -> Flight:
    """Block r of rank src."""
    n, root = process.n, process.rank(src)
    if _torch.tracing(blocks):
        if marks.wanted():
            return _later(_to_ranks(blocks, process), "scatter", [root], process)
        here = process.here() == src
        receive = [int(rank == root) for rank in range(n)]
        rows = _to_ranks(blocks, process) if here else blocks[:0]
        return exchange(rows, [int(here)] * n, receive, process).then(_only)
    group = process.group()
    direct = lowering.choose("scatter", blocks, n, group, blocks.nbytes // n)
    if group.rank() != root:
        wire, back = movable(blocks[src])  # of which only the shape matters
        block = torch.empty_like(wire)
        works = (
            _direct(group, [], [(block, root)])
            if direct
            else [group.scatter([block], [], _rooted(dist.ScatterOptions, root))]
        )
        return Flight(block, works, back)
    wire, back = movable(blocks)
    if direct:
        works = _direct(group, [(wire[q], rank) for q, rank in _others(process)[1]], [])
        return Flight(wire[src].clone(), works, back)
    block = torch.empty_like(wire[src])
    own = list(_to_ranks(wire, process).unbind(0))
    return Flight(block, (group.scatter([block], [own], _rooted(dist.ScatterOptions, root)),), back)


def permute(x: Tensor, perm: Sequence[tuple[int, int]], process: Process) -> Flight:
    """x of the rank that sends here, zeros where nobody does; `perm` holds (source, destination)."""
    if marks.wanted() and _torch.tracing(x):
        return _later(x, "permute", (process.rank(index) for pair in perm for index in pair), process)
    here = process.here()
    to = [process.rank(destination) for source, destination in perm if source == here]
    source = [process.rank(source) for source, destination in perm if destination == here]

    def arrived(y: Tensor) -> Tensor:
        return y if source else zeros(x, x.shape, y)

    if not _torch.tracing(x) and _one_way(perm) and lowering.choose("permute", x, process.n, group := process.group()):
        wire, back = movable(x)
        if to == source:  # to itself
            return Flight(wire.clone(), (), back).then(arrived)
        y = torch.empty_like(wire)
        works = _direct(group, [(wire, rank) for rank in to], [(y, rank) for rank in source])
        return Flight(y, works, back).then(arrived)
    send, receive = [0] * process.n, [0] * process.n
    for rank in to:
        send[rank] = 1
    for rank in source:
        receive[rank] = 1
    flight = exchange(x.unsqueeze(0)[: len(to)], send, receive, process)
    return flight.then(_only).then(arrived) if source else flight.then(arrived)


def _one_way(perm: Sequence[tuple[int, int]]) -> bool:
    """Whether no two ranks send to each other."""
    moves = {(source, destination) for source, destination in perm if source != destination}
    return not any((destination, source) in moves for source, destination in moves)


def exchange(rows: Tensor, send: Sequence[int], receive: Sequence[int], process: Process) -> Flight:
    """Send `send[q]` rows to rank q and receive `receive[q]` rows from it, both in the order of ranks; () for one
    row each.
    """
    wire, back = movable(rows)
    if _torch.tracing(rows):
        one = [1] * process.n
        sizes = (list(receive) or one, list(send) or one)
        return _traced(_c10d.all_to_all_single(_torch.unknown(wire), *sizes, process.name), back)
    received = wire.new_empty((sum(receive), *wire.shape[1:])) if receive else torch.empty_like(wire)
    return Flight(received, (process.group().all_to_all_single(received, wire, list(receive), list(send)),), back)


def _copy(x: Tensor) -> Tensor:
    """x in memory of its own, contiguous."""
    return x.clone() if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _direct(group: dist.ProcessGroup, sent: list[tuple[Tensor, int]], received: list[tuple[Tensor, int]]) -> list[Any]:
    """Messages between pairs of ranks."""
    works = [group.recv([tensor], rank, TAG) for tensor, rank in received]
    return works + [group.send([tensor], rank, TAG) for tensor, rank in sent]


def _others(process: Process) -> tuple[int, list[tuple[int, int]]]:
    """This process's index, and index and rank of the others."""
    here = process.here()
    return here, [(q, process.rank(q)) for q in range(process.n) if q != here]


def at_root(y: Tensor, root: int, process: Process) -> Tensor:
    """y on the root, zeros elsewhere."""
    if marks.wanted() and _torch.tracing(y):
        return torch.where(process.index_tensor().to(y.device) == root, y, zeros(y, ()))
    return y if process.here() == root else zeros(y, y.shape, y)


def zeros(like: Tensor, shape: Sequence[int], arrived: Tensor | None = None) -> Tensor:
    """Zeros that take no memory, for a rank to which nothing was sent, or nothing that counts: what has arrived. In a
    graph they are made of that, since partitioners drop messages that no result needs, for which other ranks wait.
    """
    zero = torch.full((), 0, dtype=like.dtype, device=like.device)  # which inductor knows after `deferred.py` as well
    if arrived is not None and _torch.tracing(arrived):
        zero = torch.cat((arrived.reshape(-1)[:0].to(like.dtype), zero.view(1))).view(())
    return zero.expand(shape)


def _to_ranks(blocks: Tensor, process: Process) -> Tensor:
    return blocks[_inverse(process.order)] if process.order else blocks


def _from_ranks(process: Process) -> Callable[[Tensor], Tensor]:
    return (lambda blocks: blocks[list(process.order)]) if process.order else same


def _only(rows: Tensor) -> Tensor:
    return rows.squeeze(0)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
