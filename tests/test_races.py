"""Threads, delays and whoever reads a result: right values every time. Each repetition has other values."""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from common import Pools, grad
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fcoll

REPETITIONS = 200


def in_threads(*bodies: Callable[[], None]) -> None:
    """All at once, in threads of their own; the first error is raised here."""
    errors: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def value(rank: int, turn: int) -> Tensor:
    return torch.arange(6, dtype=torch.float64).view(3, 2) + 10 * rank + 1000 * turn


def total(n: int, turn: int) -> Tensor:
    return sum((value(rank, turn) for rank in range(n)), torch.zeros(()))


def loss(x: Tensor, group: Any, weight: Tensor) -> Tensor:
    """Its gradient, summed over the ranks, is that of 2 Σ weight · total + Σ total²."""
    y = fcoll.all_reduce(x, group)
    rows = fcoll.all_gather(x, group, 0, tiled=False)
    tree: Any = fcoll.all_reduce({"a": x[0], "b": [x[1], x[2]]}, group)
    joined = torch.stack(optree.tree_leaves(tree))
    return (weight * (joined + rows.sum(0))).sum() + (y * y).sum()


def both(x: Tensor, group: Any, weight: Tensor) -> None:
    loss(x, group, weight).backward()


def slope(n: int, turn: int) -> Tensor:
    """What every rank gets: the weights of all ranks are r + 1."""
    return 2 * torch.full((3, 2), n * (n + 1) / 2).double() + 2 * n * total(n, turn)


@pytest.mark.parametrize("n", [2, 3])
def test_backward_in_worker_threads(ranks: Pools, n: int) -> None:
    """Forward here and backward there, both there, recomputed there, and a transform there."""

    def body() -> None:
        rank, world = dist.get_rank(), fcoll.WORLD
        weight = torch.tensor(rank + 1.0)
        for turn in range(REPETITIONS):
            x = value(rank, turn).requires_grad_()
            match turn % 4:
                case 0:
                    in_threads(loss(x, world, weight).backward)
                case 1:
                    in_threads(functools.partial(both, x, world, weight))
                case 2:
                    again = checkpoint(loss, x, world, weight, use_reentrant=turn % 8 == 2)
                    in_threads(again.backward)
                case 3:

                    def transformed(x: Tensor = x) -> None:
                        x.grad = grad(loss)(x.detach(), world, weight)

                    in_threads(transformed)
            torch.testing.assert_close(x.grad, slope(n, turn), msg=f"repetition {turn}")

    ranks(n).run(body)


def test_a_bound_name_is_known_to_backward_in_a_thread(ranks: Pools) -> None:
    """Though it is not bound there."""

    def body() -> None:
        rank = dist.get_rank()
        for turn in range(20):
            x = value(rank, turn).requires_grad_()
            with fcoll.bind(fcoll.mesh(i=2)):
                y = loss(x, "i", torch.tensor(rank + 1.0))
            in_threads(y.backward)
            torch.testing.assert_close(x.grad, slope(2, turn))

    ranks(2).run(body)


def test_two_groups_from_two_threads(ranks: Pools) -> None:
    """Each thread has its group, its order of calls, its pending ones and its backward passes."""

    def body() -> None:
        n, rank = dist.get_world_size(), dist.get_rank()
        groups = [dist.new_group(), dist.new_group()]

        def work(which: int) -> None:
            group = groups[which]
            for turn in range(which, 2 * REPETITIONS, 2):
                x = value(rank, turn).requires_grad_()
                loss(x, group, torch.tensor(rank + 1.0)).backward()
                torch.testing.assert_close(x.grad, slope(n, turn), msg=f"group {which}, repetition {turn}")
                started = [fcoll.start(fcoll.shift, value(rank, turn), group, by) for by in range(3)]
                for by in (2, 0, 1):  # without derivatives in any order
                    assert torch.equal(fcoll.wait(started[by]), value((rank - by) % n, turn))
                with fcoll.checked(timeout=20) if turn % 40 == which else fcoll.checked("first", timeout=20):
                    y: dict[str, Any] = fcoll.broadcast({"a": value(rank, turn), "b": turn}, group, turn % n)
                assert torch.equal(y["a"], value(turn % n, turn))

        in_threads(*[functools.partial(work, which) for which in range(2)])

    ranks(3).run(body, timeout=110)


def test_emulated_axes_in_two_threads() -> None:
    """Of one name, and of different sizes."""

    def work(n: int) -> None:
        for turn in range(REPETITIONS):
            xs = torch.stack([value(rank, turn) for rank in range(n)])
            weights = torch.arange(1.0, n + 1)
            got = fcoll.vmap(grad(lambda x, w: loss(x, "i", w)), axis_name="i")(xs, weights)
            torch.testing.assert_close(got, slope(n, turn).expand(n, 3, 2), msg=f"{n} ranks, repetition {turn}")

    in_threads(*[functools.partial(work, n) for n in (2, 3)])


def test_a_late_rank(ranks: Pools) -> None:
    """By half a second: in forward, before a wait, in and before backward, and in a recomputation."""

    def body() -> None:
        n, rank, world = dist.get_world_size(), dist.get_rank(), fcoll.WORLD
        weight = torch.tensor(rank + 1.0)

        def late(turn: int, where: int) -> None:
            if rank == turn % n and where == turn:
                time.sleep(0.5)

        for turn in range(5):
            x = value(rank, turn).requires_grad_()
            late(turn, 0)
            pending = fcoll.start(fcoll.all_gather, x, world)
            late(turn, 1)
            gathered = fcoll.wait(pending)
            assert torch.equal(gathered, torch.cat([value(r, turn) for r in range(n)]))
            x.register_hook(lambda g, turn=turn: late(turn, 2))

            def slow(x: Tensor, turn: int = turn) -> Tensor:
                late(turn, 3)
                return loss(x, world, weight)

            y: Any = checkpoint(slow, x, use_reentrant=False)
            late(turn, 4)
            (y + 0 * gathered.sum()).backward()
            torch.testing.assert_close(x.grad, slope(n, turn), msg=f"repetition {turn}")

    ranks(3).run(body)


# ---- who reads a result


class Read(torch.autograd.Function):
    """It reads the memory of its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return by_pointer(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return by_pointer(cotangent)


def by_pointer(x: Tensor) -> Tensor:
    x = x.detach().contiguous()
    numbers = (ctypes.c_double * x.numel()).from_address(x.data_ptr())
    return torch.tensor(list(numbers), dtype=torch.float64).view(x.shape)


def saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


def printed(x: Tensor) -> Tensor:
    shown: Tensor = eval(repr(x.detach()), {"tensor": torch.tensor, "torch": torch})
    return shown


def in_a_thread(x: Tensor) -> Tensor:
    found: list[Tensor] = []
    in_threads(lambda: found.append(x.detach().clone()))
    return found[0]


READERS: dict[str, Callable[[Tensor], Any]] = {
    "repr": printed,
    "numpy": lambda x: torch.from_numpy(x.detach().numpy().copy()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "data_ptr": by_pointer,
    "Function": Read.apply,
    "tolist": lambda x: torch.tensor(x.tolist(), dtype=torch.float64),
    "item": lambda x: torch.tensor([[y.item() for y in row] for row in x], dtype=torch.float64),
    "dlpack": lambda x: torch.utils.dlpack.from_dlpack(x.detach()).clone(),
    "save": lambda x: saved(x.detach()),
    "storage": lambda x: (
        torch.tensor(list(x.detach().contiguous().untyped_storage()), dtype=torch.uint8)
        .view(torch.float64)
        .view(x.shape)
    ),
    "in place": lambda x: x.detach().add_(0.0),
    "a thread": in_a_thread,
}


def test_every_reader_sees_the_result(ranks: Pools) -> None:
    """Right after the call, eager, started and compiled; in turn with results that have not been read."""

    def body() -> int:
        n, rank, world = dist.get_world_size(), dist.get_rank(), fcoll.WORLD
        calls: list[Callable[[Tensor], Any]] = [
            lambda x: fcoll.all_reduce(x, world),
            lambda x: fcoll.wait(fcoll.start(fcoll.all_reduce, x, world)),
            lambda x: fcoll.reduce_scatter(x.repeat(n, 1), world),
            lambda x: fcoll.all_gather(x, world, tiled=False).sum(0),
            lambda x: fcoll.all_reduce([x, x], world)[1],
            torch.compile(lambda x: fcoll.all_reduce(x, world), fullgraph=True, backend="aot_eager"),
        ]
        read = 0
        for turn in range(REPETITIONS):
            for place, (name, reader) in enumerate(READERS.items()):
                x = value(rank, turn).requires_grad_(name == "Function")
                y = calls[(turn + place) % len(calls)](x)
                got = reader(y)
                torch.testing.assert_close(got.detach(), total(n, turn), msg=f"{name}, repetition {turn}")
                if name == "Function":
                    got.backward(value(rank, turn + 1))
                    torch.testing.assert_close(x.grad, total(n, turn + 1), msg=f"repetition {turn}")
                read += 1
        return read

    assert set(ranks(2).run(body, timeout=110)) == {REPETITIONS * len(READERS)}
