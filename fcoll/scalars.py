"""Python numbers of several dtypes, as in a dict of metrics, reduced in one message.

Their bits travel as int64, and each rank reduces what it has gathered. Thus an integer is not rounded, as it would be
among floats, and the result is that of an emulated axis to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fcoll import pending
from fcoll.bind import bind
from fcoll.calls import RECORDS, Call
from fcoll.primitives import PRIMITIVES

Tree = TypeVar("Tree")


def mixed(call: Call[Any]) -> bool:
    """Whether there are numbers that would not travel together with each other."""
    if len(call.numbers) < 2 or not call.axis.layout.process or pending.starting():
        return False
    return len({call.leaves[i].dtype for i in _packable(call)}) > 1


def all_reduce(call: Call[Tree], op: str, rest: Callable[[list[Tensor]], list[Tensor]]) -> Tree:
    """The tree of all results; `rest` reduces the leaves that were no numbers."""
    packed = _packable(call)
    others = [i for i in call.indices if i not in packed]
    results = dict(zip(others, rest([call.leaves[i] for i in others]), strict=True))
    stack = bind("all_gather", torch.stack([_bits(call.leaves[i]) for i in packed]), call.axis, 0, False)
    for i, bits in zip(packed, stack.unbind(1), strict=True):
        values = _from_bits(bits, call.leaves[i].dtype)
        results[i] = PRIMITIVES[RECORDS[op]].on_stack(values, call.axis.n, op)
    return call.rebuild([results[i] for i in call.indices])


def _packable(call: Call[Any]) -> list[int]:
    return [i for i in call.numbers if not call.leaves[i].is_complex()]


def _bits(x: Tensor) -> Tensor:
    return x.to(torch.float64).view(torch.int64) if x.is_floating_point() else x.to(torch.int64)


def _from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return (bits.view(torch.float64) if dtype.is_floating_point else bits).to(dtype)
