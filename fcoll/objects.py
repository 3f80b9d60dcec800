"""Trees that one rank knows, or of which each rank has its own: state dicts, metrics, and objects of any kind.

The tensors of a tree travel as tensors, small ones together. What else it is (structure, shapes, dtypes, numbers,
strings) goes ahead in a header, see `headers.py`: a peer can send a wrong tree, but no code. `broadcast_object` and
`all_gather_object` take what no header can hold. They unpickle, which can run code, and nothing calls them implicitly.

All of them move data and have no derivative: results are detached.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import _torch, groups, headers, recorder
from fcoll.calls import Call
from fcoll.errors import fail
from fcoll.functional import all_gather, all_reduce, broadcast
from fcoll.groups import GroupLike
from fcoll.headers import Header, Malformed, Unfit

__all__ = ["all_gather_object", "all_gather_tree", "broadcast_object", "broadcast_tree"]


def broadcast_tree(tree: Any, group: GroupLike, src: int = 0) -> Any:
    """Give every rank the tree of one, of which the others know nothing.

    Per rank:
        y_r = tree_src, in memory of its own on every rank, src included

    Where all ranks hold trees of the same shapes, `broadcast` sends less, has derivatives and works on emulated axes.

    Transpose: none; results are detached.

    Args:
        tree: on src tensors of any dtype, bool, int, float, complex, str, bytes and None, in lists, tuples, dicts and
            OrderedDicts, whose keys are str or int and keep their order. On the other ranks anything: it is ignored.
        group: the ranks, which are processes.
        src: index within the group.

    Returns:
        The tree. Tensors are contiguous, parameters are plain tensors, a tensor that occurs twice arrives as two, and
        one of another device than the CPU is on each rank's current device of that kind.

    Raises:
        TypeError: a leaf that the header cannot hold, which is named; on all ranks, so that nobody waits. Or an
            emulated axis, whose ranks share their Python objects.
        ValueError: src is no rank of the group, a header is malformed, or a transform of torch or a compiler is at
            work here, which cannot follow a tree that it does not know.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.broadcast_tree({"x": x}, "i"), axis_name="i")(torch.ones(2))
        Traceback (most recent call last):
        fcoll.errors.CollectiveTypeError: broadcast_tree: 'i' is an emulated axis, whose ranks share their Python
        objects; it is for process groups
    """
    return _Exchange("broadcast_tree", group, src).run(lambda: headers.write(tree))[0]


def all_gather_tree(tree: Any, group: GroupLike) -> list[Any]:
    """Give every rank the trees of all, which need not look alike.

    Per rank:
        y_r = [tree_0, …, tree_{n-1}], in memory of their own

    Where the tensors of all trees have the same shapes and dtypes they are gathered, otherwise each rank broadcasts.

    Transpose: none; results are detached.

    Args:
        tree: as on the src of `broadcast_tree`.
        group: the ranks, which are processes.

    Returns:
        The trees by rank, each as `broadcast_tree` gives it.

    Raises:
        TypeError: as for `broadcast_tree`; the message names the rank.
        ValueError: as for `broadcast_tree`.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.all_gather_tree({"x": x}, "i"), axis_name="i")(torch.ones(2))
        Traceback (most recent call last):
        fcoll.errors.CollectiveTypeError: all_gather_tree: 'i' is an emulated axis, whose ranks share their Python
        objects; it is for process groups
    """
    return _Exchange("all_gather_tree", group, every=True).run(lambda: headers.write(tree))


def broadcast_object(obj: Any, group: GroupLike, src: int = 0) -> Any:
    """Give every rank the object of one. It is UNPICKLED, which runs whatever code the sender has put into it.

    Per rank:
        y_r = a copy of obj_src, on src too

    Only for groups whose every rank is trusted; `broadcast_tree` runs no code of peers, and is faster.

    Transpose: none.

    Args:
        obj: on src anything that `pickle` takes; on the other ranks it is ignored.
        group: the ranks, which are processes.
        src: index within the group.

    Raises:
        TypeError: the object cannot be pickled, on all ranks; or an emulated axis.
        ValueError: as for `broadcast_tree`.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.broadcast_object({1, 2}, "i"), axis_name="i")(torch.ones(2))
        Traceback (most recent call last):
        fcoll.errors.CollectiveTypeError: broadcast_object: 'i' is an emulated axis, whose ranks share their Python
        objects; it is for process groups
    """
    return _unpickled(_Exchange("broadcast_object", group, src).run(lambda: _pickled(obj))[0])


def all_gather_object(obj: Any, group: GroupLike) -> list[Any]:
    """Give every rank the objects of all. They are UNPICKLED, which runs whatever code the senders have put into them.

    Per rank:
        y_r = [a copy of obj_0, …, a copy of obj_{n-1}]

    Only for groups whose every rank is trusted; `all_gather_tree` runs no code of peers, and is faster.

    Transpose: none.

    Args:
        obj: anything that `pickle` takes.
        group: the ranks, which are processes.

    Raises:
        TypeError: an object cannot be pickled, on all ranks; or an emulated axis.
        ValueError: as for `broadcast_tree`.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.all_gather_object({1, 2}, "i"), axis_name="i")(torch.ones(2))
        Traceback (most recent call last):
        fcoll.errors.CollectiveTypeError: all_gather_object: 'i' is an emulated axis, whose ranks share their Python
        objects; it is for process groups
    """
    return [_unpickled(row) for row in _Exchange("all_gather_object", group, every=True).run(lambda: _pickled(obj))]


class _Exchange:
    """One call: what ranks have written goes to all, from one source or from every rank.

    Whatever is wrong on one rank, all of them learn of it before tensors are sent, and raise.
    """

    def __init__(self, function: str, group: GroupLike, src: int = 0, *, every: bool = False) -> None:
        call: Call[Any] = Call(function, [], group)
        if not call.axis.layout.process:
            text = "{}: {} is an emulated axis, whose ranks share their Python objects; it is for process groups"
            fail("type", text, function, call.axis.label)
        if _torch.transforming() or recorder.active():
            text = "{}: it needs values, which transforms, compilers and traces do not have; call it outside of them"
            fail("value", text, function, about="Values inside transforms and compiled code")
        process = groups.process_of(call.axis.layout)
        self.function, self.group, self.every = function, group, every
        self.n, self.here = process.n, process.here()
        if every:
            call._even()
        self.sources = list(range(process.n)) if every else [call.root("src", src)]
        self.devices = [each.split(":")[0] for each in dist.get_backend_config(process.group()).split(",")]
        self.problem: tuple[str, str] | None = None  # the kind of error, and its text

    def run(self, write: Callable[[], tuple[bytes, list[Tensor]]]) -> list[Any]:
        """The tree of each source; `write` gives this rank's header and tensors."""
        own, tensors = self._written(write) if self.here in self.sources else (b"", [])
        sizes = self._sizes(self._rows(torch.tensor(len(own))))
        found = self._headers(self._rows(_padded(own, max(sizes))), sizes) if sizes else []
        values = [
            self._outgoing(header, tensors if source == self.here else None)
            for source, header in zip(self.sources, found, strict=False)  # nothing is found where something is wrong
        ]
        self._agree()
        arrived = self._send(found, values)
        return [
            headers.fill(header, [y.to(slot.device) for y, slot in zip(each, header.slots, strict=True)])
            for header, each in zip(found, arrived, strict=True)
        ]

    def _device(self, kind: str) -> torch.device:
        """Where a tensor of this kind of device is while it travels."""
        return torch.device(kind if kind in self.devices else self.devices[0])

    def _rows(self, x: Tensor) -> Tensor:
        """Each source's x, on the CPU."""
        x = x.to(self._device("cpu"))
        y = all_gather(x, self.group, tiled=False) if self.every else broadcast(x, self.group, *self.sources)[None]
        return y.cpu()

    def _wrong(self, kind: str, text: str) -> None:
        self.problem = self.problem or (kind, text)

    def _written(self, write: Callable[[], tuple[bytes, list[Tensor]]]) -> tuple[bytes, list[Tensor]]:
        try:
            return write()
        except Unfit as error:
            return headers.refuse(f"on rank {self.here}, {error}" if self.every else str(error)), []

    def _sizes(self, ahead: Tensor) -> list[int]:
        """The sizes of the headers; none if something is wrong."""
        sizes: list[int] = ahead.tolist()
        for source, size in zip(self.sources, sizes, strict=True):
            if not 0 < size <= headers.MAX_HEADER:
                self._wrong("value", f"no header came from rank {source}; do all ranks make this call?")
        return [] if self.problem else sizes

    def _headers(self, rows: Tensor, sizes: list[int]) -> list[Header]:
        found = []
        for source, row, size in zip(self.sources, rows, sizes, strict=True):
            try:
                header = headers.read(_bytes(row[:size]))
            except Malformed as error:
                self._wrong("value", f"the header of rank {source} is malformed: {error}")
                continue
            if header.refusal:
                self._wrong("type", header.refusal)
            found.append(header)
        return [] if self.problem else found

    def _outgoing(self, header: Header, tensors: list[Tensor] | None) -> list[Tensor]:
        """What this rank puts into the message: a source its tensors, another rank what has their shapes only."""
        values = []
        for i, (dtype, kind, shape) in enumerate(header.slots):
            try:
                device = self._device(kind)
                if tensors is None:
                    values.append(torch.empty((), dtype=dtype, device=device).expand(shape))
                else:
                    values.append(tensors[i].detach().resolve_conj().resolve_neg().to(device))
            except (RuntimeError, AssertionError) as error:  # torch's ways to say that there is no such device
                self._wrong("value", f"rank {self.here} cannot make a tensor on {kind}: {error}")
                break
        return values

    def _agree(self) -> None:
        """Raise if something is wrong on any rank."""
        bad = torch.zeros(self.n, dtype=torch.int64, device=self._device("cpu"))
        bad[self.here] = self.problem is not None
        bad = all_reduce(bad, self.group)
        if self.problem is not None:
            kind, text = self.problem
            fail(kind, "{}: {}", self.function, text)
        if bad.any():
            ranks = bad.nonzero().flatten().tolist()
            fail("value", "{}: it failed on ranks {}, whose errors say why", self.function, str(ranks))

    def _send(self, found: list[Header], values: list[list[Tensor]]) -> list[list[Tensor]]:
        """Each source's tensors, in memory of their own."""
        if self.every and all(header.slots == found[0].slots for header in found):
            stacks = all_gather(values[self.here], self.group, tiled=False)
            return [[stack[source].clone() for stack in stacks] for source in self.sources]
        return [broadcast(xs, self.group, source) for source, xs in zip(self.sources, values, strict=True)]


def _padded(data: bytes, size: int) -> Tensor:
    row = torch.zeros(size, dtype=torch.uint8)
    if data:
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return row


def _bytes(row: Tensor) -> bytes:
    data = bytearray(row.numel())
    torch.frombuffer(data, dtype=torch.uint8).copy_(row)
    return bytes(data)


def _pickled(obj: Any) -> tuple[bytes, list[Tensor]]:
    try:
        data = pickle.dumps(obj)
    except Exception as error:  # whatever the object's own methods raise
        raise Unfit(f"the object cannot be pickled: {type(error).__name__}: {error}") from error
    return headers.write(_padded(data, len(data)))


def _unpickled(row: Tensor) -> Any:
    return pickle.loads(_bytes(row))
