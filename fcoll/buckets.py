"""Buckets: small leaves of a tree travel together, since a message costs far more than its bytes.

Two hundred leaves of 1 KiB, one by one, take a hundred times as long as together. Large leaves travel uncopied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SMALL = 1 << 20  # bytes: a leaf from this size on travels alone
FULL = 25 << 20  # bytes: no bucket is larger, if a call does not say so


def plan(leaves: Sequence[Tensor], full: int = FULL) -> list[list[int]]:
    """Which leaves travel together, in order. Nothing that may differ between ranks decides, or they would disagree."""
    small = min(SMALL, full)
    buckets: list[list[int]] = []
    opened: dict[Any, list[Any]] = {}  # of each kind the last bucket, and how many bytes it holds
    dtype = device = kind = None
    for i, leaf in enumerate(leaves):
        size = leaf.nbytes
        if size >= small:
            buckets.append([i])
            continue
        if kind is None or leaf.dtype is not dtype or leaf.device != device:
            dtype, device = leaf.dtype, leaf.device
            kind = opened.setdefault((dtype, device), [[], full])
        if kind[1] + size > full or not kind[0]:
            kind[:] = [[], 0]
            buckets.append(kind[0])
        kind[0].append(i)
        kind[1] += size
    return buckets


def pack(parts: Sequence[Tensor], lead: int) -> tuple[Tensor, list[Sequence[int]]]:
    """One tensor of all parts, whose `lead` axes in front stay, and the shapes that follow them."""
    shapes: list[Sequence[int]] = [part.shape[lead:] for part in parts]
    flat = [
        part if part.ndim == lead + 1 else part.reshape((*part.shape[:lead], math.prod(shape)))
        for part, shape in zip(parts, shapes, strict=True)
    ]
    return torch.cat(flat, -1), shapes


def unpack(y: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """What `pack` has put together; other axes than before may be in front."""
    front = y.shape[:-1]
    split: Any = torch.split_with_sizes_copy  # copies: what is done to one result must not touch another
    pieces: list[Tensor] = split(y, [math.prod(shape) for shape in shapes], -1)
    return [
        piece if len(shape) == 1 else piece.view((*front, *shape)) for piece, shape in zip(pieces, shapes, strict=True)
    ]
