"""Train a two-layer network on images of handwritten digits, data-parallel × tensor-parallel on a 2 × 2 mesh.

python examples/digits.py                          one process emulates the mesh
torchrun --nproc-per-node 4 examples/digits.py     four processes are the mesh
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits
from torch import Tensor
from torch.distributed.tensor import DTensor

import fcoll
from fcoll import P

Params = dict[str, Tensor]
State = tuple[Params, Params]  # the parameters and their momentum
Data = tuple[Tensor, Tensor]  # images and labels
Loss = Callable[[Params, Tensor, Tensor], Tensor]
Step = Callable[[State, Tensor, Tensor], tuple[State, Tensor]]

STEPS, BATCH, HIDDEN, HELD_OUT, RATE, MOMENTUM = 200, 256, 128, 357, 0.2, 0.9
SPECS = {"w1": P("tp"), "b1": P("tp"), "w2": P(None, "tp"), "b2": P()}  # the hidden units are cut over tp


# The ranks have one loss between them, and it counts once. A value that is the same on all ranks passes `vary` where
# it enters work that differs: parameters over dp, activations over tp. A result that is the same on all ranks comes
# from `all_reduce(invariant=True)`. Then every gradient is that of the one loss, with no factor left to divide by.
def logits(params: Params, x: Tensor) -> Tensor:
    hidden = F.relu(fcoll.vary(x, "tp") @ params["w1"].T + params["b1"])  # this rank's hidden units
    return fcoll.all_reduce(hidden @ params["w2"].T, "tp", invariant=True) + params["b2"]


def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    mine = F.cross_entropy(logits(fcoll.vary(params, "dp"), x), y)  # of this rank's images
    return fcoll.all_reduce(mine, "dp", "mean", invariant=True)


def accuracy(params: Params, x: Tensor, y: Tensor) -> Tensor:
    return (logits(params, x).argmax(-1) == y).double().mean()


def dense_loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.relu(x @ params["w1"].T + params["b1"]) @ params["w2"].T + params["b2"], y)


def update(loss: Loss, state: State, x: Tensor, y: Tensor) -> tuple[State, Tensor]:
    """One step of gradient descent with momentum, for whole parameters as for one rank's part of them."""
    params, momentum = state
    gradients, value = torch.func.grad_and_value(loss)(params, x, y)
    momentum = {name: MOMENTUM * momentum[name] + g for name, g in gradients.items()}
    params = {name: p - RATE * momentum[name] for name, p in params.items()}
    return (params, momentum), value


def train(
    step: Step, params: Params, batches: Tensor, data: Data, show: Callable[[int, Tensor, Params], None]
) -> Params:
    images, labels = data
    state = params, {name: torch.zeros_like(p) for name, p in params.items()}
    for number, batch in enumerate(batches, start=1):
        state, value = step(state, images[batch], labels[batch])
        show(number, value, state[0])
    return state[0]


def setup(steps: int) -> tuple[Params, Tensor, Data, Data]:
    """Initial parameters, the images of each step by index, what to train on and what to test on."""
    generator = torch.Generator().manual_seed(2)
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=generator)
    images, labels = torch.from_numpy(bunch.data)[order] / 16, torch.from_numpy(bunch.target)[order]
    w1 = torch.randn(HIDDEN, 64, generator=generator, dtype=torch.float64) / 8
    w2 = torch.randn(10, HIDDEN, generator=generator, dtype=torch.float64) / HIDDEN**0.5
    params = {"w1": w1, "b1": w1.new_zeros(HIDDEN), "w2": w2, "b2": w2.new_zeros(10)}
    batches = torch.randint(len(labels) - HELD_OUT, (steps, BATCH), generator=generator)
    return params, batches, (images[HELD_OUT:], labels[HELD_OUT:]), (images[:HELD_OUT], labels[:HELD_OUT])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="how long to train (default: %(default)s)")
    steps = parser.parse_args().steps
    processes = int(os.environ.get("WORLD_SIZE", "4"))
    if processes != 4:
        sys.exit(f"the mesh is 2 × 2, but there are {processes} processes: use torchrun --nproc-per-node 4")

    torch.set_num_threads(1)  # these matrices are too small for more
    params, batches, data, test = setup(steps)
    mesh = fcoll.mesh(dp=2, tp=2)
    state = (SPECS, SPECS)
    step = fcoll.shard_map(functools.partial(update, loss), mesh, (state, P("dp"), P("dp")), (state, P()))
    score = fcoll.shard_map(accuracy, mesh, (SPECS, P(), P()), P())

    console = Console(quiet=dist.is_initialized() and dist.get_rank() > 0, highlight=False)
    reached = 0.0
    with Progress(console=console) as progress:
        bar = progress.add_task("training", total=steps)

        def show(number: int, value: Tensor, params: Params) -> None:
            nonlocal reached
            progress.update(bar, completed=number)
            if number % 20 == 0 or number == steps:
                reached = float(score(params, *test))
                console.print(f"step {number:4}   loss {float(value):.4f}   test accuracy {reached:.2%}")

        trained = train(step, params, batches, data, show)

    dense = train(functools.partial(update, dense_loss), params, batches, data, lambda *_: None)
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in trained.items()}
    difference = max(float((whole[name] - p).abs().max()) for name, p in dense.items())
    console.print(f"largest difference from the parameters of dense training: {difference:.1e}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(difference > 1e-5 or (steps >= STEPS and reached < 0.97))


if __name__ == "__main__":
    sys.exit(main())
