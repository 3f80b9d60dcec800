"""What docs/gradients.md says of other libraries is what they do, on two ranks."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as nn
from common import Pools
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

import fcoll
from fcoll import regions

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "gradients.md").read_text()
(PROBE,) = re.findall(r"^```python\n(w = .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SUM, REPLICATED, MEAN = ("3.", "3."), ("1.", "2."), ("1.5000", "1.5000")


def in_place(w: Tensor) -> Tensor:
    y = w.clone()
    dist.all_reduce(y)
    return y


def by_dtensor(w: Tensor) -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(w, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


def functional(w: Tensor) -> Tensor:
    world: Any = dist.group.WORLD
    y: Tensor = funcol.all_reduce(w, "sum", world)
    return y


LIBRARIES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, str]]] = {
    "fcoll": (lambda w: fcoll.all_reduce(w, fcoll.WORLD), SUM),
    "torch.distributed.nn": (lambda w: nn.all_reduce(w), SUM),
    "funcol": (functional, SUM),
    "fcoll, invariant": (lambda w: fcoll.all_reduce(w, fcoll.WORLD, invariant=True), REPLICATED),
    "Megatron-LM's reduce_from": (lambda w: regions.reduce_from(w, fcoll.WORLD), REPLICATED),
    "DTensor": (by_dtensor, REPLICATED),
    "dist.all_reduce": (in_place, REPLICATED),
    "fcoll, mean": (lambda w: fcoll.all_reduce(w, fcoll.WORLD, "mean"), MEAN),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_probe_tells_the_convention(library: str, ranks: Pools) -> None:
    all_reduce, want = LIBRARIES[library]

    def f() -> str:
        scope: dict[str, Any] = {"torch": torch, "all_reduce": all_reduce, "rank": dist.get_rank()}
        with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.distributed.nn is deprecated
            exec(PROBE, scope)
        return out.getvalue()

    assert ranks(2).run(f) == [f"{rank} tensor({gradient})\n" for rank, gradient in enumerate(want)]


def test_ddp_averages(ranks: Pools) -> None:
    def f() -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        replica = DistributedDataParallel(model)
        (replica(torch.ones(1, 1)) * (1 + dist.get_rank())).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.item()

    assert ranks(2).run(f) == [1.5, 1.5]


def test_the_rows_of_the_first_table() -> None:
    """Two ranks with the rows 1 and 3, a weight that both hold, and the objective w² times the mean of the rows."""
    rows, w = torch.tensor([1.0, 3.0]), torch.tensor(5.0)

    def on_ranks(f: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
        gradient: Any = fcoll.vmap(torch.func.grad(f), in_dims=(None, 0), axis_name="i")
        found: list[float] = gradient(w, rows).tolist()
        return found

    def again(f: Callable[[Tensor, Tensor], Tensor], op: str) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda w, x: fcoll.all_reduce(f(w, x), "i", op)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return w**2 * x

    def declared(w: Tensor, x: Tensor) -> Tensor:
        return fcoll.all_reduce(loss(fcoll.vary(w, "i"), x), "i", "mean", invariant=True)

    want = 2 * 5.0 * 2  # of w² times the mean of 1 and 3

    def mapped(f: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
        found: list[float] = fcoll.vmap(f, in_dims=(None, 0), axis_name="i")(w, rows).tolist()
        return found

    assert on_ranks(loss) == [10.0, 30.0]  # their mean is right
    assert mapped(again(torch.func.grad(loss), "mean")) == [want, want]
    assert on_ranks(declared) == [want, want]
    assert mapped(again(torch.func.grad(declared), "sum")) == [2 * want, 2 * want]  # summed twice

    def undeclared(w: Tensor, x: Tensor) -> Tensor:
        return fcoll.all_reduce(loss(w, x), "i", "mean", invariant=True)

    assert on_ranks(undeclared) == [5.0, 15.0]  # their sum is right
    assert mapped(again(torch.func.grad(undeclared), "sum")) == [want, want]
    assert mapped(again(torch.func.grad(undeclared), "mean")) == [want / 2, want / 2]  # the mean was taken twice
