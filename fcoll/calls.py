"""One call of a public function: its leaves, its group, the checks of both, and how small leaves travel together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fcoll import _torch, buckets, checks, groups, pending, trees
from fcoll.bind import bind
from fcoll.errors import beyond_int64, check_flag, fail, kind_of
from fcoll.groups import Axis, GroupLike
from fcoll.passage import begin
from fcoll.primitives import Params

Tree = TypeVar("Tree")

RECORDS = {
    "sum": "all_reduce",
    "mean": "all_reduce",
    "max": "extremum",
    "min": "extremum",
    "prod": "product",
    "any": "truth",
    "all": "truth",
}
"""Which record does an op."""


Step = Callable[[Tensor, Params], Tensor]
"""(tensor, parameters of the record) -> tensor"""
Finish = Callable[[Tensor, Params, torch.dtype], Tensor]
"""(what the record gives, its parameters, dtype of the leaf) -> result"""


class Fused(NamedTuple):
    """How leaves travel together: `pack` keeps `lead` axes in front, the record has `params`, `finish` unpacks."""

    lead: int
    params: Params
    pack: Step | None = None
    finish: Step | None = None
    size: int = buckets.FULL


class Call(Generic[Tree]):
    """One call: its leaves, its axis, and the checks of both, each of which names the leaf."""

    def __init__(self, function: str, tree: Tree, group: GroupLike, *, alike: bool = True) -> None:
        self.function, self.tree = function, tree
        self.axis: Axis = groups.resolve(function, group)
        self.leaves: list[Any] = [tree]
        self.spec: Any = None
        if not isinstance(tree, Tensor):
            self.leaves, self.spec = trees.flatten(tree)
        self.indices = range(len(self.leaves))
        self.numbers: list[int] = []  # which leaves were Python numbers
        for i, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Tensor):
                self.leaves[i] = self._number(i, leaf)
                self.numbers.append(i)
            elif isinstance(leaf, DTensor):
                self.fail(i, "type", "is a DTensor; send its .to_local(), or use fcoll.shard_map")
            elif leaf.layout != torch.strided:
                self.fail(i, "type", "is {}; only strided tensors can be sent: use .to_dense()", str(leaf.layout))
            elif leaf.is_nested:
                self.fail(i, "type", "is a nested tensor, whose rows differ in shape; send its .unbind(), or pad it")
            elif leaf.dtype not in _MOVED:
                self.fail(i, "type", "is {}, which torch can neither move nor reduce; convert it", str(leaf.dtype))
        if self.axis.layout.check and alike:  # else other ranks make other calls
            layout = checks.whole(function, self.leaves, self.spec, self.axis.layout)
            self.axis = self.axis._replace(layout=layout)

    def run_elementwise(
        self, name: str, *params: Any, after: Finish | None = None, bucket_size: int = buckets.FULL
    ) -> Tree:
        """`run` where the record keeps elements in their places, and has the same parameters for all leaves."""
        if self.spec is None and not pending.starting():
            x = self.leaves[0]
            y = bind(name, x, self.axis, *params)
            return after(y, params, x.dtype) if after else y  # type: ignore[return-value]
        return self.run(name, [params] * len(self.leaves), Fused(0, params, size=bucket_size), after=after)

    def run(
        self,
        name: str,
        params: Sequence[Params],
        fused: Fused | None = None,
        before: Step | None = None,
        after: Finish | None = None,
    ) -> Tree:
        """The tree of `after(record(before(leaf)))`, with the leaf's params; on processes, small leaves together if it
        is said how. Within `fcoll.start`, what is to be waited for.
        """
        if pending.starting():
            return self._start(name, params, fused, before, after)  # type: ignore[return-value]
        if self.spec is None:
            leaf, own = self.leaves[0], params[0]
            y = bind(name, before(leaf, own) if before else leaf, self.axis, *own)
            return after(y, own, leaf.dtype) if after else y  # type: ignore[return-value]
        results: list[Any] = [None] * len(self.leaves)
        for bucket in self._plan(fused):
            x, own, shapes = self._packed(bucket, params, fused)
            y = bind(name, before(x, own) if before else x, self.axis, *own)
            y = after(y, own, x.dtype) if after else y
            self._unpack(y, bucket, shapes, params, fused, results)
        return self.rebuild(results)

    def _start(self, name: str, params: Any, fused: Fused | None, before: Any, after: Any) -> pending.Pending[Any]:
        tensors: list[Tensor | None] = []
        passages: list[Any] = []
        packed = []
        for bucket in self._plan(fused):
            x, own, shapes = self._packed(bucket, params, fused)
            handle, way = begin(name, before(x, own) if before else x, self.axis, own)
            tensors.append(handle)
            passages.append(way)
            packed.append((bucket, own, x.dtype, shapes))

        def finish(arrived: list[Tensor]) -> Tree:
            results: list[Any] = [None] * len(self.leaves)
            for y, (bucket, own, dtype, shapes) in zip(arrived, packed, strict=True):
                self._unpack(after(y, own, dtype) if after else y, bucket, shapes, params, fused, results)
            return self.rebuild(results)

        return pending.Pending(tensors, passages, finish)

    def _plan(self, fused: Fused | None) -> list[list[int]]:
        if fused is None or not self.axis.layout.process or len(self.leaves) < 2:
            return [[i] for i in self.indices]
        return buckets.plan(self.leaves, fused.size)

    def _packed(
        self, bucket: list[int], params: Sequence[Params], fused: Fused | None
    ) -> tuple[Tensor, Params, list[Sequence[int]]]:
        """What travels for a bucket, the record's parameters, and the shapes in it."""
        if fused is None or len(bucket) == 1:
            return self.leaves[bucket[0]], params[bucket[0]], []
        pack = fused.pack
        x, shapes = buckets.pack(
            [pack(self.leaves[i], params[i]) for i in bucket] if pack else [self.leaves[i] for i in bucket], fused.lead
        )
        return x, fused.params, shapes

    def _unpack(
        self,
        y: Tensor,
        bucket: list[int],
        shapes: list[Sequence[int]],
        params: Sequence[Params],
        fused: Fused | None,
        results: list[Any],
    ) -> None:
        """Put the results of a bucket in their places."""
        if fused is None or len(bucket) == 1:
            results[bucket[0]] = y
            return
        tracked = not y.requires_grad or _torch.transforming()
        for i, part in zip(bucket, buckets.unpack(y, shapes), strict=True):
            part = fused.finish(part, params[i]) if fused.finish else part
            results[i] = part if tracked or self.leaves[i].requires_grad else part.detach()

    def rebuild(self, results: list[Any]) -> Tree:
        """The tree with these in the places of the leaves."""
        result: Tree = results[0] if self.spec is None else trees.unflatten(self.spec, results)
        return result

    def fail(self, i: int, kind: str, template: str, *details: object, about: str = "") -> NoReturn:
        fail(kind, "{}: {} " + template, self.function, trees.path(self.tree, i), *details, about=about)

    def _number(self, i: int, leaf: Any) -> Tensor:
        if isinstance(leaf, (bool, int, float, complex)):
            if beyond_int64(leaf):
                self.fail(i, "value", "is {}, which no int64 tensor holds; make it a float", leaf)
            return torch.tensor(leaf)
        self.fail(i, "type", "is a {}; leaves are tensors, numbers and None", kind_of(leaf))

    def flag(self, name: str, value: bool) -> bool:
        """`value`, which is True or False."""
        return check_flag(self.function, name, value)

    def axis_of(self, i: int, name: str, axis: int, *, tiled: bool = True) -> int:
        """`axis`, counted from the front; untiled, it is one that the result has and the leaf has not."""
        inserted = not self.flag("tiled", tiled)
        self._even()
        leaf = self.leaves[i]
        if not isinstance(axis, int) or isinstance(axis, bool):
            fail("type", "{}: {} is an integer, got {}", self.function, name, kind_of(axis))
        ndim = leaf.ndim + inserted
        if not -ndim <= axis < ndim:
            remedy = f"use one from {-ndim} to {ndim - 1}" if ndim else "a 0-d tensor has no axis; use tiled=False"
            self.fail(i, "value", "has shape {}: {}={} is out of range; {}", leaf.shape, name, axis, remedy)
        return axis + ndim if axis < 0 else axis

    def blocks_of(self, i: int, name: str, axis: int, tiled: bool) -> int:
        """`axis`, counted from the front, along which the leaf is cut into n blocks."""
        leaf, n = self.leaves[i], self.axis.n
        self.flag("tiled", tiled)
        axis = self.axis_of(i, name, axis)
        size = leaf.shape[axis]
        if tiled and size % n:
            self.fail(
                i, "value", "has shape {}: size {} along {}={} is not a multiple of the {} ranks of {}; pad it",
                leaf.shape, size, name, axis, n, self.axis.label, about="A size that the ranks do not divide",
            )  # fmt: skip
        if not tiled and size != n:
            self.fail(
                i, "value",
                "has shape {}: size {} along {}={} must be {}, the number of ranks of {}; or use tiled=True",
                leaf.shape, size, name, axis, n, self.axis.label, about="A size that the ranks do not divide",
            )  # fmt: skip
        return axis

    def _even(self) -> None:
        if not self.axis.even:
            text = "{}: the subgroups of {} have different sizes"
            fail("value", text, self.function, self.axis.label, about="Subgroups of different sizes")

    def check_op(self, op: str, among: Sequence[str] = tuple(RECORDS)) -> None:
        """The operation exists, and for every leaf's dtype."""
        if op is not None and not isinstance(op, str):
            fail("type", "{}: op is a string, got {}", self.function, kind_of(op))
        if op not in among:
            fail("value", "{}: op is one of {}, got {!r}", self.function, ", ".join(among), op)
        if op == "prod" and self.axis.layout.partition:  # whose derivative gathers within each, on one stack of all
            self._even()
        if op in ("any", "all"):
            self.leaves = [leaf if leaf.dtype == torch.bool else leaf != 0 for leaf in self.leaves]
            return
        seen = None
        about = "A dtype that the operation is not defined for"
        for i, leaf in enumerate(self.leaves):
            dtype = leaf.dtype
            if dtype is seen:  # as that of the leaf before
                continue
            seen = dtype
            if dtype == torch.bool and op in ("sum", "mean", "prod"):
                self.fail(i, "type", "is bool, which has no {}; use any or all, or convert it", op, about=about)
            elif op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
                text = "is {}, which has no mean; convert it to a floating dtype"
                self.fail(i, "type", text, str(dtype), about=about)
            elif op in ("max", "min") and dtype.is_complex:
                self.fail(i, "type", "is {}, which has no order and so no {}", str(dtype), op, about=about)
            elif dtype in _ONLY_MOVED:
                self.fail(i, "type", "is {}, which torch can move but not reduce; convert it", str(dtype), about=about)

    def bucket_size(self, size: int) -> int:
        """How large a message of several leaves may be, in bytes."""
        if type(size) is not int:
            fail("type", "{}: bucket_size is an integer, got {}", self.function, kind_of(size))
        if size < 0:
            fail("value", "{}: bucket_size={} is negative; 0 sends each leaf by itself", self.function, size)
        return size

    def root(self, name: str, rank: int) -> int:
        """A rank of the group."""
        if not isinstance(rank, int) or isinstance(rank, bool):
            fail("type", "{}: {} is an integer, got {}", self.function, name, kind_of(rank))
        n = min(self.axis.layout.subgroups, default=self.axis.n)
        if not 0 <= rank < n:
            fail(
                "value", "{}: {}={} is not a rank of {}: they go from 0 to {}, counted within the group",
                self.function, name, rank, self.axis.label, n - 1,
            )  # fmt: skip
        return rank

    def pairs(self, perm: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """A permutation, whole or in part."""
        self._even()
        if not isinstance(perm, (list, tuple)):
            fail("type", "{}: perm lists (source, destination) pairs, got {}", self.function, kind_of(perm))
        for pair in perm:
            if not isinstance(pair, (list, tuple)) or [type(rank) for rank in pair] != [int, int]:
                fail("type", "{}: perm holds pairs of integers (source, destination), got {}", self.function, str(pair))
        pairs = tuple((source, destination) for source, destination in perm)
        for what, ranks in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
            for rank in ranks:
                if not 0 <= rank < self.axis.n:
                    fail(
                        "value", "{}: {} {} in perm is not a rank of {}: they go from 0 to {}",
                        self.function, what, rank, self.axis.label, self.axis.n - 1,
                    )  # fmt: skip
            if len(set(ranks)) != len(ranks):
                fail("value", "{}: each {} in perm occurs once, got {}", self.function, what, str(pairs))
        if torch.compiler.is_compiling():  # where ranks that vary between calls are unknown sizes, until they index
            numbers = tuple(range(self.axis.n))
            pairs = tuple((numbers[source], numbers[destination]) for source, destination in pairs)
        return pairs


_ONLY_MOVED = {
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32,
}  # fmt: skip
_MOVED = _ONLY_MOVED | {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip
