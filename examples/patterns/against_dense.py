"""What every pattern ends with: its loss and gradients beside those of the dense program, as one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Values = dict[str, Tensor]
Loss = Callable[[Values], Tensor]


def ranks() -> int:
    """The number of processes under torchrun; otherwise four are emulated."""
    return int(os.environ.get("WORLD_SIZE", "4"))


def differences(program: Loss, dense: Loss, values: Values) -> tuple[float, float]:
    """The difference of the losses, and the largest one between the gradients with respect to all values."""
    gradients, loss = torch.func.grad_and_value(program)(values)
    expected_gradients, expected_loss = torch.func.grad_and_value(dense)(values)
    of_gradients = [float((gradients[name] - g).abs().max()) for name, g in expected_gradients.items()]
    return float((loss - expected_loss).abs()), max(of_gradients)


def report(name: str, program: Loss, dense: Loss, values: Values) -> None:
    """Print one line, on one rank; end with status 1 if the program is not the dense one."""
    of_loss, of_gradients = differences(program, dense, values)
    if dist.is_initialized():
        rank, where = dist.get_rank(), f"{dist.get_world_size()} processes"
        dist.destroy_process_group()
    else:
        rank, where = 0, f"{ranks()} emulated ranks"
    if rank == 0:
        print(f"{name}, {where}: differs from dense by {of_loss:.0e} in loss, {of_gradients:.0e} in gradients")
    sys.exit(int(max(of_loss, of_gradients) > 1e-10))
