"""The gradients in a table of notebooks/08_porting.ipynb: torch's and the right ones, on three gloo ranks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import execute
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as theirs
from common import Pools
from torch import Tensor
from torch.distributed import ReduceOp

from fcoll.compat import torch_nn

ROW = re.compile(r"^\| `(nn\.[^`]+)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def table() -> dict[str, list[list[float]]]:
    """By call: the gradients of all ranks of its group, with torch and right."""
    cells = execute.read(execute.HERE / "08_porting.ipynb").cells
    rows = ROW.findall("\n".join(cell.source for cell in cells))
    return {call: [[float(number) for number in column.split(",")] for column in columns] for call, *columns in rows}


def measured(calls: list[str]) -> dict[str, list[float]]:
    """By call, on a rank of its group: this rank's gradients, with torch and with fcoll's."""
    rank, last_two = dist.get_rank(), dist.new_group([1, 2])
    found = {}
    for call in calls:
        if rank == 0 and "last_two" in call:
            continue

        def run(module: Any, x: Tensor, call: str = call) -> Any:
            return eval(call, {"nn": module, "ReduceOp": ReduceOp, "last_two": last_two, "x": x})

        def gradient(module: Any, run: Callable[..., Any] = run) -> float:
            x = torch.tensor([2.0, 5.0, 3.0])[rank].requires_grad_()
            run(module, x).backward(torch.tensor([1.0, 10.0, 100.0])[rank])
            assert x.grad is not None
            return float(x.grad)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's functions are deprecated
            found[call] = [gradient(theirs), gradient(torch_nn)]
            for transform in (torch.func.grad, torch.func.vmap):
                with pytest.raises(RuntimeError, match="setup_context"):
                    transform(lambda x, run=run: run(theirs, x))(torch.ones([1] * (transform is torch.func.vmap)))
    return found


def test_the_gradients_of_the_table(ranks: Pools) -> None:
    rows = table()
    assert len(rows) == 7
    results = ranks(3).run(measured, list(rows))
    for call, columns in rows.items():
        on_ranks = [result[call] for result in results if call in result]
        assert [list(column) for column in zip(*on_ranks, strict=True)] == [pytest.approx(c, abs=1e-3) for c in columns]
