"""`python -m fcoll.selfcheck`: every collective on this machine's ranks and backend, before the first real program.

    python -m fcoll.selfcheck                              4 emulated ranks in this process
    torchrun --nproc-per-node 4 -m fcoll.selfcheck         the ranks and the backend that one has

Per collective: values, gradient and tangent, which are compared with those of the same map written for all ranks
in plain torch, the adjoint identity, and the same in compiled code. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fcoll
from fcoll import _torch

Tensors = Sequence[Tensor]
COLUMNS = ("values", "gradient", "tangent", "adjoint", "compiled", "its gradient")
LIMIT = 60.0  # seconds that a rank waits for another


class Row(NamedTuple):
    """One collective: how it is called, and what it means on the values of all ranks, in plain torch."""

    call: Callable[[Tensor, Any], Tensor]  # (x, group) -> y
    value: Callable[[Tensors], Tensors]  # all x -> all y
    rows: int = 1  # of x, times the number of ranks; 0 for a single one
    once: str = ""  # what counts once in derivatives, by declaration: the "input" or the "result"
    smooth: bool = True  # it has derivatives


def _same(xs: Tensors, y: Tensor) -> Tensors:
    return [y] * len(xs)


def _at(xs: Tensors, y: Tensor, root: int) -> Tensors:
    return [y if rank == root else torch.zeros_like(y) for rank in range(len(xs))]


def _sum(xs: Tensors) -> Tensor:
    return torch.stack(list(xs)).sum(0)


def _swap(xs: Tensors) -> Tensors:
    blocks = [x.chunk(len(xs)) for x in xs]
    return [torch.cat([own[rank] for own in blocks]) for rank in range(len(xs))]


def _running(xs: Tensors) -> Tensors:
    return list(torch.stack(list(xs)).cumsum(0))


def _sizes(group: Any) -> list[int]:
    return [1] * fcoll.axis_size(group)


def _ragged(x: Tensor, group: Any) -> Tensor:
    """An all_to_all of single rows."""
    n, device = fcoll.axis_size(group), x.device
    ones, all_ranks = torch.ones(n, dtype=torch.int64, device=device), torch.arange(n, device=device)
    own = fcoll.axis_index(group).to(device).expand(n)
    return fcoll.ragged_all_to_all(x, torch.zeros_like(x), all_ranks, ones, own, ones, group)


ROWS: dict[str, Row] = {
    "all_reduce": Row(lambda x, g: fcoll.all_reduce(x, g), lambda xs: _same(xs, _sum(xs))),
    "all_reduce mean": Row(lambda x, g: fcoll.all_reduce(x, g, "mean"), lambda xs: _same(xs, _sum(xs) / len(xs))),
    "all_reduce max": Row(
        lambda x, g: fcoll.all_reduce(x, g, "max"), lambda xs: _same(xs, torch.stack(list(xs)).amax(0))
    ),
    "all_reduce min": Row(
        lambda x, g: fcoll.all_reduce(x, g, "min"), lambda xs: _same(xs, torch.stack(list(xs)).amin(0))
    ),
    "all_reduce prod": Row(
        lambda x, g: fcoll.all_reduce(x, g, "prod"), lambda xs: _same(xs, torch.stack(list(xs)).prod(0))
    ),
    "all_reduce any": Row(
        lambda x, g: fcoll.all_reduce(x > 0, g, "any"),
        lambda xs: _same(xs, torch.stack(list(xs)).amax(0) > 0),
        smooth=False,
    ),
    "all_reduce invariant": Row(
        lambda x, g: fcoll.all_reduce(x, g, invariant=True), lambda xs: _same(xs, _sum(xs)), once="result"
    ),
    "all_gather": Row(lambda x, g: fcoll.all_gather(x, g), lambda xs: _same(xs, torch.cat(list(xs)))),
    "all_gather stacked": Row(
        lambda x, g: fcoll.all_gather(x, g, 1, tiled=False), lambda xs: _same(xs, torch.stack(list(xs), 1))
    ),
    "all_gather sizes": Row(
        lambda x, g: fcoll.all_gather(x, g, sizes=_sizes(g)),
        lambda xs: _same(xs, torch.cat(list(xs))),
        rows=0,
    ),
    "all_gather invariant": Row(
        lambda x, g: fcoll.all_gather(x, g, invariant=True), lambda xs: _same(xs, torch.cat(list(xs))), once="result"
    ),
    "reduce_scatter": Row(lambda x, g: fcoll.reduce_scatter(x, g), lambda xs: _sum(xs).chunk(len(xs))),
    "all_to_all": Row(lambda x, g: fcoll.all_to_all(x, g), _swap),
    "all_to_all sizes": Row(lambda x, g: fcoll.all_to_all(x, g, send_sizes=_sizes(g), recv_sizes=_sizes(g)), _swap),
    "ragged_all_to_all": Row(_ragged, _swap),
    "broadcast": Row(lambda x, g: fcoll.broadcast(x, g, 1), lambda xs: _same(xs, xs[1])),
    "reduce": Row(lambda x, g: fcoll.reduce(x, g, 1), lambda xs: _at(xs, _sum(xs), 1)),
    "gather": Row(lambda x, g: fcoll.gather(x, g, 1), lambda xs: _at(xs, torch.cat(list(xs)), 1)),
    "scatter": Row(lambda x, g: fcoll.scatter(x, g, 1), lambda xs: xs[1].chunk(len(xs))),
    "permute": Row(
        lambda x, g: fcoll.permute(x, g, [(0, fcoll.axis_size(g) - 1)]), lambda xs: _at(xs, xs[0], len(xs) - 1)
    ),
    "shift": Row(lambda x, g: fcoll.shift(x, g), lambda xs: [xs[rank - 1] for rank in range(len(xs))]),
    "vary": Row(lambda x, g: fcoll.vary(x, g), lambda xs: xs, once="input"),
    "split": Row(
        lambda x, g: fcoll.split(x, g), lambda xs: [x.chunk(len(xs))[rank] for rank, x in enumerate(xs)], once="input"
    ),
    "prefix_sum": Row(lambda x, g: fcoll.prefix_sum(x, g), _running),
    "argmax": Row(lambda x, g: fcoll.argmax(x, g), lambda xs: _same(xs, torch.stack(list(xs)).argmax(0)), smooth=False),
    "argmin": Row(lambda x, g: fcoll.argmin(x, g), lambda xs: _same(xs, torch.stack(list(xs)).argmin(0)), smooth=False),
}


# ---- what a row gives


class Place(NamedTuple):
    """Where the collectives run."""

    group: Any  # an axis name, or the world
    n: int
    rank: int | None  # of this process; None if it has all of them
    device: torch.device

    def map(self, f: Callable[..., Any], *stacks: Any) -> Any:
        """f on each rank's own, or on this rank's; stacks have the ranks on axis 0."""
        if self.rank is None:
            return fcoll.vmap(f, axis_name=self.group)(*stacks)
        return f(*(stack[self.rank] for stack in stacks))

    def own(self, stack: Any) -> Any:
        """What `map` should return, of all ranks' results."""
        return stack if self.rank is None else stack[self.rank]

    def exchange(self, text: str) -> list[str]:
        """The texts of all ranks, by way of the store: not by what is being checked."""
        if self.rank is None:
            return [text]
        store = _torch.default_store()
        number = store.add(f"fcoll/selfcheck/{self.rank}", 1)  # of this exchange
        store.set(f"fcoll/selfcheck/{number}/{self.rank}", text)
        keys = [f"fcoll/selfcheck/{number}/{rank}" for rank in range(self.n)]
        store.wait(keys, timedelta(seconds=2 * LIMIT))
        return [store.get(key).decode() for key in keys]


class _Check:
    """The checks of one row; each raises AssertionError, or whatever goes wrong."""

    def __init__(self, name: str, place: Place) -> None:
        self.row, self.place = ROWS[name], place
        n, random = place.n, torch.Generator().manual_seed(zlib.crc32(name.encode()))

        def draw(shape: Sequence[int]) -> Tensor:
            return torch.randn(n, *shape, dtype=torch.float64, generator=random).to(place.device, self.dtype)

        self.dtype = torch.float32 if place.device.type == "mps" else torch.float64
        self.x = draw((n * self.row.rows or 1, 2))
        self.y = torch.stack(list(self.row.value(list(self.x))))
        self.tangent = draw(self.x.shape[1:])
        self.cotangent = draw(self.y.shape[1:]) if self.row.smooth else self.y

    def call(self, x: Tensor) -> Tensor:
        """The collective, in one rank's program."""
        return self.row.call(x, self.place.group)

    def pull(self, x: Tensor, cotangent: Tensor) -> Tensor:
        """The gradient, in one rank's program."""
        pulled: Tensor = torch.func.vjp(self.call, x)[1](cotangent)[0]
        return pulled

    def push(self, x: Tensor, tangent: Tensor) -> Tensor:
        """The tangent, in one rank's program."""
        pushed: Tensor = torch.func.jvp(self.call, (x,), (tangent,))[1]
        return pushed

    def pulled(self) -> Tensor:
        """What the gradient must be: that of the whole map, or what is declared."""
        if self.row.once == "input":  # every rank has the sum of all uses
            pulled = self._transpose(self.cotangent)
            return pulled.sum(0).expand_as(pulled)
        pulled = self._transpose(self.cotangent)
        if self.row.once == "result":  # every rank's cotangent is already the sum
            xs = [self._transpose(c.expand_as(self.cotangent) / self.place.n)[r] for r, c in enumerate(self.cotangent)]
            return torch.stack(xs)
        return pulled

    def _transpose(self, cotangent: Tensor) -> Tensor:
        x = self.x.clone().requires_grad_()
        y = torch.stack(list(self.row.value(list(x))))
        return torch.autograd.grad(y, x, cotangent)[0]

    def values(self) -> None:
        """The results."""
        self._close(self.place.map(self.call, self.x), self.y)

    def gradient(self) -> None:
        """The vector-Jacobian product."""
        self._close(self.place.map(self.pull, self.x, self.cotangent), self.pulled())

    def tangents(self) -> None:
        """The Jacobian-vector product."""
        want = torch.func.jvp(lambda x: torch.stack(list(self.row.value(list(x)))), (self.x,), (self.tangent,))[1]
        self._close(self.place.map(self.push, self.x, self.tangent), want)

    def adjoint(self) -> None:
        """Σ⟨ȳ, J t⟩ = Σ⟨Jᵀ ȳ, t⟩, of what the collective gives."""
        place, terms = self.place, [float("nan")] * 2
        try:
            pushed = place.map(self.push, self.x, self.tangent)
            pulled = place.map(self.pull, self.x, self.cotangent)
            terms = [float((pushed * place.own(self.cotangent)).sum()), float((pulled * place.own(self.tangent)).sum())]
        finally:
            told = place.exchange(" ".join(map(str, terms)))
        left, right = (sum(map(float, column)) for column in zip(*(text.split() for text in told), strict=True))
        self._close(torch.tensor(left), torch.tensor(right), whole=True)

    def compiled(self) -> None:
        """The results, of one graph."""
        self._close(self._compile(self.call)(self.x), self.y)

    def compiled_gradient(self) -> None:
        """The gradient, of one graph."""
        self._close(self._compile(self.pull)(self.x, self.cotangent), self.pulled())

    def _compile(self, f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        torch.compiler.reset()
        mapped: Any = torch.compile(lambda *args: self.place.map(f, *args), fullgraph=True, backend="aot_eager")
        return mapped  # type: ignore[no-any-return]

    def _close(self, got: Tensor, want: Tensor, whole: bool = False) -> None:
        tolerance = 1e-4 if self.dtype == torch.float32 else 1e-9
        want = want if whole else self.place.own(want)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)

    def run(self) -> Iterator[tuple[str, str]]:
        """Column by column: its name, and what is wrong. Between two, no rank waits for another."""
        checks = (self.values, self.gradient, self.tangents, self.adjoint, self.compiled, self.compiled_gradient)
        for column, check in zip(COLUMNS, checks, strict=True):
            if column not in ("values", "compiled") and not self.row.smooth:
                continue
            if column == "adjoint" and self.row.once:  # does not hold where something counts once
                continue
            try:
                check()
                yield column, ""
            except Exception as error:
                yield column, f"{type(error).__name__}: {error}"


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, and print a table; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fcoll.selfcheck", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="check the collectives whose names begin with this")
    parser.add_argument("--ranks", type=int, default=4, help="how many emulated ranks, without torchrun")
    parser.add_argument("--backend", default=None, help="of torch.distributed; by default nccl with CUDA, else gloo")
    options = parser.parse_args(arguments)
    names = [name for name in ROWS if name.startswith(options.only)]
    if not names:
        parser.error(f"--only {options.only}: no such collective; there are {', '.join(ROWS)}")
    with _place(options.ranks, options.backend) as place:
        if place.n < 2:
            parser.error("at least two ranks are needed")
        return _report(names, place)


@contextmanager
def _place(ranks: int, backend: str | None) -> Iterator[Place]:
    if "RANK" not in os.environ and not dist.is_initialized():
        yield Place("ranks", ranks, None, torch.device("cpu"))
        return
    device, made = torch.device("cpu"), not dist.is_initialized()
    if torch.cuda.is_available() and backend != "gloo":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if made:
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        dist.init_process_group(backend, timeout=timedelta(seconds=LIMIT))
    yield Place(fcoll.WORLD, dist.get_world_size(), dist.get_rank(), device)
    if made:
        dist.destroy_process_group()


def _report(names: list[str], place: Place) -> int:
    begin = time.monotonic()
    table: dict[str, dict[str, str]] = {}
    for name in _progress(names, place):
        table[name] = {}
        for column, problem in _Check(name, place).run():
            problems = place.exchange(problem)
            named = [
                f"rank {rank}: {text}" if place.rank is not None else text for rank, text in enumerate(problems) if text
            ]
            table[name][column] = "\n".join(named)
    failed = {name: columns for name, columns in table.items() if any(columns.values())}
    if not place.rank:
        where = f"{place.n} emulated ranks" if place.rank is None else f"{place.n} ranks, {dist.get_backend()}"
        width = max(map(len, names))
        print("  ".join([" " * width, *COLUMNS]))
        for name, columns in table.items():
            marks = [{"": "ok"}.get(columns[c], "WRONG") if c in columns else "-" for c in COLUMNS]
            print(
                "  ".join(
                    [name.ljust(width), *(mark.ljust(len(c)) for mark, c in zip(marks, COLUMNS, strict=True))]
                ).rstrip()
            )
        for name, columns in failed.items():
            for column, problem in columns.items():
                if problem:
                    print(f"\n{name}, {column}\n{problem}")
        verdict = (
            f"{len(failed)} of {len(names)} collectives are wrong"
            if failed
            else f"all {len(names)} collectives are right"
        )
        print(f"\n{verdict} on {where}, {place.device.type}, in {time.monotonic() - begin:.0f} s")
    return int(bool(failed))


def _progress(names: list[str], place: Place) -> Iterator[str]:
    """The names, with a bar on the first rank: rich's if it is installed."""
    if place.rank:
        yield from names
        return
    try:
        from rich.progress import track
    except ImportError:
        for i, name in enumerate(names):
            if sys.stderr.isatty():
                print(f"\r{i + 1}/{len(names)} {name.ljust(24)}", end="", file=sys.stderr, flush=True)
            yield name
        if sys.stderr.isatty():
            print(file=sys.stderr)
        return
    from rich.console import Console

    quiet = not sys.stderr.isatty()
    yield from track(names, description="checking", console=Console(stderr=True), transient=True, disable=quiet)


if __name__ == "__main__":
    sys.exit(main())
