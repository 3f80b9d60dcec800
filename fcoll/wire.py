"""In which dtype a tensor travels: every backend moves some, and reduces fewer as torch itself would."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Pair = tuple[Tensor, Callable[[Tensor], Tensor]]
"""The tensor that travels, and what makes the result of the one that arrives."""

_NATIVE = {
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64
}  # fmt: skip


def movable(x: Tensor) -> Pair:
    """x in a dtype that every backend moves, contiguous, and the way back."""
    if x.dtype in _NATIVE:
        return x.contiguous(), same
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj().contiguous()), torch.view_as_complex
    dtype = x.dtype  # one more axis of bytes
    return x.unsqueeze(-1).contiguous().view(torch.uint8), lambda y: y.view(dtype).squeeze(-1)


def reducible(x: Tensor, op: str) -> Pair:
    """x in a dtype that every backend reduces as the emulation does, and the way back."""
    dtype = x.dtype
    if op in ("max", "min") and dtype.is_floating_point:
        return _ordered(x, op)
    if dtype in _NATIVE:
        if dtype in (torch.float16, torch.bfloat16) and x.is_cpu:
            return x.to(torch.float32), lambda y: y.to(dtype)  # gloo would round after every addition
        return x, same
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj()), torch.view_as_complex
    if dtype == torch.bool:
        return x.to(torch.uint8), lambda y: y.to(dtype)
    return x.to(torch.int32), lambda y: y.to(dtype)


def _ordered(x: Tensor, op: str) -> Pair:
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


def wide(x: Tensor) -> torch.dtype:
    """What to add up or multiply in: halves as float32, so that there is one rounding."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def same(x: Tensor) -> Tensor:
    """x."""
    return x
