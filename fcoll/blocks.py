"""The n equal pieces of a tensor along an axis. Sizes are written out, since -1 has no meaning for empty tensors."""

from __future__ import annotations

from torch import Tensor


def split_blocks(x: Tensor, n: int, axis: int, tiled: bool) -> Tensor:
    """The n blocks along `axis`, on a new axis 0; untiled, `axis` itself holds them."""
    if tiled:
        shape = x.shape
        x = x.view((*shape[:axis], n, shape[axis] // n, *shape[axis + 1 :]))
    return x.movedim(axis, 0) if axis else x


def join_blocks(blocks: Tensor, axis: int, tiled: bool) -> Tensor:
    """The blocks on axis 0 side by side along `axis`; untiled, along a new axis."""
    if axis:
        blocks = blocks.movedim(0, axis)
    return blocks.flatten(axis, axis + 1) if tiled else blocks
