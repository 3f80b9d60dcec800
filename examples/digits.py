"""Train a two-layer network on images of handwritten digits, data-parallel × tensor-parallel.

    python examples/digits.py                          one process emulates the 2 × 2 mesh
    torchrun --nproc-per-node 4 examples/digits.py     four processes are the mesh

Both run `train_parallel`. Only the groups differ: names of emulated axes, or process groups.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits
from torch import Tensor

import fcoll
from fcoll.groups import GroupLike

Params = dict[str, Tensor]
Data = tuple[Tensor, Tensor]  # images, digits
Model = Callable[[Params, Tensor], Tensor]

STEPS, BATCH, HIDDEN, HELD_OUT = 200, 256, 128, 357
OVER_TP = {"w1": 0, "b1": 0, "w2": 1}  # the axis of each parameter that is cut over tp; b2 is not


# The ranks compute one loss together, and it counts once. A value that is the same on all ranks enters work that differs
# by `vary`: parameters over dp, activations over tp. A result that is the same on all ranks comes from
# `all_reduce(invariant=True)`. Then the gradients are those of the one loss, without a factor of the number of ranks.
def parallel_logits(params: Params, x: Tensor, *, tp: GroupLike) -> Tensor:
    hidden = F.relu(fcoll.vary(x, tp) @ params["w1"].T + params["b1"])  # this rank's hidden units
    return fcoll.all_reduce(hidden @ params["w2"].T, tp, invariant=True) + params["b2"]


def parallel_loss(params: Params, x: Tensor, y: Tensor, *, dp: GroupLike, tp: GroupLike) -> Tensor:
    mine = F.cross_entropy(parallel_logits(fcoll.vary(params, dp), x, tp=tp), y)  # of this rank's images
    return fcoll.all_reduce(mine, dp, "mean", invariant=True)


def train_parallel(
    params: Params, batches: Tensor, train_set: Data, test_set: Data, report: Report, *, dp: GroupLike, tp: GroupLike
) -> Params:
    """One rank's program. Whole parameters in and out; in between, each rank holds its part."""
    mine = {name: fcoll.split(p, tp, OVER_TP[name]) if name in OVER_TP else p for name, p in params.items()}
    model = functools.partial(parallel_logits, tp=tp)
    loss = functools.partial(parallel_loss, dp=dp, tp=tp)
    mine = train(loss, model, mine, fcoll.split(batches, dp, axis=1), train_set, test_set, report)
    return {
        name: fcoll.all_gather(p, tp, OVER_TP[name], invariant=True) if name in OVER_TP else p
        for name, p in mine.items()
    }
