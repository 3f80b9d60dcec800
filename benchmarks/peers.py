"""The peers: what torch has, and what one writes by hand. Each gives what the fcoll function of that name gives.

Every function is made by `peer(name)` and takes x. All act along axis 0.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fcoll

Function = Callable[[Tensor], Tensor]

funcol: Any = importlib.import_module("torch.distributed._functional_collectives")  # partly without annotations


def installed(name: str) -> ModuleType | None:
    """An optional peer."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def hush() -> None:
    """torch.distributed.nn and spmd_types call what torch has deprecated, which warns at every call. Only that."""
    warnings.filterwarnings("ignore", r"torch\.distributed\.nn\.functional\.\w+ is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", r"`torch\.distributed\._all_gather_base` is a private", FutureWarning)
    warnings.filterwarnings("ignore", r".*", FutureWarning, r"spmd_types\.")


def ours(name: str, n: int) -> Function:
    """The fcoll function over all ranks."""
    group = fcoll.WORLD
    neighbours = [(rank, (rank + 1) % n) for rank in range(n)]
    table: dict[str, Function] = {
        "all_reduce": lambda x: fcoll.all_reduce(x, group),
        "all_reduce mean": lambda x: fcoll.all_reduce(x, group, "mean"),
        "all_reduce max": lambda x: fcoll.all_reduce(x, group, "max"),
        "all_reduce prod": lambda x: fcoll.all_reduce(x, group, "prod"),
        "all_reduce any": lambda x: fcoll.all_reduce(x, group, "any"),
        "all_gather": lambda x: fcoll.all_gather(x, group),
        "reduce_scatter": lambda x: fcoll.reduce_scatter(x, group),
        "all_to_all": lambda x: fcoll.all_to_all(x, group),
        "broadcast": lambda x: fcoll.broadcast(x, group),
        "reduce": lambda x: fcoll.reduce(x, group),
        "gather": lambda x: fcoll.gather(x, group),
        "scatter": lambda x: fcoll.scatter(x, group),
        "permute": lambda x: fcoll.permute(x, group, neighbours),
        "shift": lambda x: fcoll.shift(x, group),
    }
    return table[name]


COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter",
    "permute", "shift",
)  # fmt: skip


def by_hand(name: str, n: int) -> dict[str, Function]:
    """The ways to write it with calls of torch.distributed; on a buffer of its own, since x stays as it is."""
    rank = dist.get_rank()

    def all_reduce(op: Any) -> Function:
        def f(x: Tensor) -> Tensor:
            y = x.clone()
            dist.all_reduce(y, op)
            return y

        return f

    def mean(x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y.div_(n)

    def truth(x: Tensor) -> Tensor:
        y = x.to(torch.uint8)
        dist.all_reduce(y, dist.ReduceOp.MAX)
        return y.bool()

    def gather_single(x: Tensor) -> Tensor:
        y = x.new_empty((n * x.shape[0], *x.shape[1:]))
        dist.all_gather_single(y, x)
        return y

    def gather_list(x: Tensor) -> Tensor:
        y = x.new_empty((n * x.shape[0], *x.shape[1:]))
        dist.all_gather(list(y.chunk(n)), x)
        return y

    def scatter_single(x: Tensor) -> Tensor:
        y = x.new_empty((x.shape[0] // n, *x.shape[1:]))
        dist.reduce_scatter_single(y, x)
        return y

    def exchange(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x)
        return y

    def exchange_and_sum(x: Tensor) -> Tensor:
        return exchange(x).view((n, *_block(x, n))).sum(0)

    def in_two_steps(x: Tensor) -> Tensor:
        return gather_list(exchange_and_sum(x))

    def gather_and_sum(x: Tensor) -> Tensor:
        return gather_single(x).view((n, *x.shape)).sum(0)

    def broadcast(x: Tensor) -> Tensor:
        y = x.clone() if rank == 0 else torch.empty_like(x)
        dist.broadcast(y, 0)
        return y

    def reduce(x: Tensor) -> Tensor:
        y = x.clone()
        dist.reduce(y, 0)
        return y if rank == 0 else y.zero_()

    def gather(x: Tensor) -> Tensor:
        if rank:
            dist.gather(x, None, 0)
            return x.new_zeros((n * x.shape[0], *x.shape[1:]))
        y = x.new_empty((n * x.shape[0], *x.shape[1:]))
        dist.gather(x, list(y.chunk(n)), 0)
        return y

    def gather_by_exchange(x: Tensor) -> Tensor:
        rows, m = x.shape[0], n * x.shape[0]
        y = x.new_empty((0 if rank else m, *x.shape[1:]))
        dist.all_to_all_single(y, x, [0 if rank else rows] * n, [rows] + [0] * (n - 1))
        return x.new_zeros((m, *x.shape[1:])) if rank else y

    def scatter(x: Tensor) -> Tensor:
        y = x.new_empty((x.shape[0] // n, *x.shape[1:]))
        dist.scatter(y, None if rank else list(x.chunk(n)), 0)
        return y

    def scatter_by_exchange(x: Tensor) -> Tensor:
        rows = x.shape[0] // n
        y = x.new_empty((rows, *x.shape[1:]))
        dist.all_to_all_single(y, x[:0] if rank else x, [rows] + [0] * (n - 1), [0 if rank else rows] * n)
        return y

    def send_and_receive(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        ops = [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, y, (rank - 1) % n)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return y

    def move_by_exchange(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        send, receive = [0] * n, [0] * n
        send[(rank + 1) % n] = receive[(rank - 1) % n] = x.shape[0]
        dist.all_to_all_single(y, x, receive, send)
        return y

    moves: dict[str, Function] = {"isend and irecv": send_and_receive, "all_to_all_single, uneven": move_by_exchange}
    table: dict[str, dict[str, Function]] = {
        "all_reduce": {
            "dist.all_reduce": all_reduce(dist.ReduceOp.SUM),
            "all_to_all, sum, all_gather": in_two_steps,
            "all_gather, sum": gather_and_sum,
        },
        "all_reduce mean": {"dist.all_reduce, div": mean},
        "all_reduce max": {"dist.all_reduce": all_reduce(dist.ReduceOp.MAX)},
        "all_reduce prod": {"dist.all_reduce": all_reduce(dist.ReduceOp.PRODUCT)},
        "all_reduce any": {"dist.all_reduce of bytes": truth},
        "all_gather": {"dist.all_gather_single": gather_single, "dist.all_gather of a list": gather_list},
        "reduce_scatter": {"dist.reduce_scatter_single": scatter_single, "all_to_all_single, sum": exchange_and_sum},
        "all_to_all": {"dist.all_to_all_single": exchange},
        "broadcast": {"dist.broadcast": broadcast},
        "reduce": {"dist.reduce": reduce},
        "gather": {"dist.gather": gather, "all_to_all_single, uneven": gather_by_exchange},
        "scatter": {"dist.scatter": scatter, "all_to_all_single, uneven": scatter_by_exchange},
        "permute": moves,
        "shift": moves,
    }
    return table[name]


def functional(name: str, n: int) -> Function | None:
    """torch.distributed._functional_collectives, with the wait, which any use of the result would cause."""
    group: Any = dist.group.WORLD
    wait = funcol.wait_tensor
    neighbours = [(rank + 1) % n for rank in range(n)]
    table: dict[str, Function] = {
        "all_reduce": lambda x: wait(funcol.all_reduce(x, "sum", group)),
        "all_reduce max": lambda x: wait(funcol.all_reduce(x, "max", group)),
        "all_reduce prod": lambda x: wait(funcol.all_reduce(x, "product", group)),
        "all_reduce mean": lambda x: wait(funcol.all_reduce(x, "sum", group)) / n,
        "all_gather": lambda x: wait(funcol.all_gather_single(x, 0, group)),
        "reduce_scatter": lambda x: wait(funcol.reduce_scatter_single(x, "sum", 0, group)),
        "all_to_all": lambda x: wait(funcol.all_to_all_single(x, None, None, group)),
        "broadcast": lambda x: wait(funcol.broadcast(x, 0, group)),
        # its splits count elements, so it is right for one axis only
        "permute": lambda x: wait(funcol.permute_tensor(x.reshape(-1), neighbours, group)).view(x.shape),
    }
    return table.get("permute" if name == "shift" else name)


def functional_autograd(name: str) -> Function | None:
    """Those of them that torch gives a gradient."""
    group: Any = dist.group.WORLD
    wait = funcol.wait_tensor
    table: dict[str, Function] = {
        "all_reduce": lambda x: wait(funcol.all_reduce(x, "sum", group)),
        "all_gather": lambda x: wait(funcol.all_gather_single_autograd(x, 0, group)),
        "reduce_scatter": lambda x: wait(funcol.reduce_scatter_single_autograd(x, "sum", 0, group)),
        "all_to_all": lambda x: wait(funcol.all_to_all_single_autograd(x, None, None, group)),
    }
    return table.get(name)


def nn_functional(name: str, n: int) -> Function | None:
    """torch.distributed.nn.functional, put together to the same result."""
    hush()
    dnn: Any = importlib.import_module("torch.distributed.nn.functional")
    table: dict[str, Function] = {
        "all_reduce": lambda x: dnn.all_reduce(x),
        "all_gather": lambda x: torch.cat(dnn.all_gather(x)),
        "reduce_scatter": lambda x: dnn.reduce_scatter(x.new_empty(_block(x, n)), list(x.chunk(n))),
        "all_to_all": lambda x: dnn.all_to_all_single(torch.empty_like(x), x),
        "broadcast": lambda x: dnn.broadcast(x, 0),
        "reduce": lambda x: dnn.reduce(x, 0),
        "gather": lambda x: torch.cat(dnn.gather(x, 0)),
        "scatter": lambda x: dnn.scatter(list(x.chunk(n)), 0),
    }
    return table.get(name)


def spmd_types(name: str) -> Function | None:
    """The package of that name, where it is installed and has the collective; its types are not checked here."""
    hush()
    package: Any = installed("spmd_types")
    if package is None:
        return None
    group = dist.group.WORLD
    table: dict[str, Function] = {
        "all_reduce": lambda x: package.all_reduce(x, group, src=package.P, dst=package.R),
        "all_gather": lambda x: package.all_gather(x, group, src=package.S(0), dst=package.R),
        "reduce_scatter": lambda x: package.reduce_scatter(x, group, src=package.P, dst=package.S(0)),
    }
    return table.get(name)


def _block(x: Tensor, n: int) -> tuple[int, ...]:
    return (x.shape[0] // n, *x.shape[1:])


class _Identity(torch.autograd.Function):
    """The least that a collective with derivatives can be: one Function, whose backward is the Function again."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return _identity(cotangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor) -> tuple[Tensor, Any]:
        return x.clone(), in_dims[0]


_identity: Function = _Identity.apply


def identity(x: Tensor) -> Tensor:
    """x, by one autograd.Function."""
    return _identity(x)
