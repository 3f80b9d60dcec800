"""`python -m fcoll.bench`: how fast the collectives are on your own ranks, beside the raw torch.distributed call.

    torchrun --nproc-per-node 8 -m fcoll.bench              # on the ranks of a launcher
    python -m fcoll.bench --nproc 2                         # on local ranks

It prints what nccl-tests prints. `size` is what the rank that holds most holds, S bytes. The algorithm bandwidth is S
over the time. The bus bandwidth is that times a factor for what each link has to carry at least, so that it can be
compared between collectives, between numbers of ranks, and with what the hardware can do (doc/PERFORMANCE.md of
https://github.com/NVIDIA/nccl-tests). A time is the mean over the ranks of the mean over many calls.

fcoll's functions make their results; the raw call works in place, or into a buffer that is used again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fcoll

ROUNDS = 5  # how often fcoll and the raw call take turns
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
Step = Callable[[], object]


class Collective(NamedTuple):
    """What is measured."""

    ours: Callable[[Tensor], object]
    raw: Callable[[Tensor, int], Step]  # (x, n) -> a call, whose buffers are made
    factor: Callable[[int], float]  # of the bus bandwidth, for n ranks
    rule: str  # the same for people
    part: bool = False  # a rank starts with S/n bytes


def _all_gather(x: Tensor, n: int) -> Step:
    y = x.new_empty(n * x.numel())
    return lambda: dist.all_gather_single(y, x)


def _reduce_scatter(x: Tensor, n: int) -> Step:
    y = x.new_empty(x.numel() // n)
    return lambda: dist.reduce_scatter_single(y, x)


def _all_to_all(x: Tensor, n: int) -> Step:
    y = torch.empty_like(x)
    return lambda: dist.all_to_all_single(y, x)


def _gather(x: Tensor, n: int) -> Step:
    ys = [torch.empty_like(x) for _ in range(n)] if dist.get_rank() == 0 else None
    return lambda: dist.gather(x, ys, dst=0)


def _scatter(x: Tensor, n: int) -> Step:
    y = x.new_empty(x.numel() // n)
    xs = list(x.chunk(n)) if dist.get_rank() == 0 else None
    return lambda: dist.scatter(y, xs, src=0)


def _shift(x: Tensor, n: int) -> Step:
    rank, y = dist.get_rank(), torch.empty_like(x)

    def call() -> None:
        send = dist.P2POp(dist.isend, x, (rank + 1) % n)
        receive = dist.P2POp(dist.irecv, y, (rank - 1) % n)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return call


W = fcoll.WORLD
TWICE = (lambda n: 2 * (n - 1) / n, "2(n-1)/n")
ONCE = (lambda n: (n - 1) / n, "(n-1)/n")
ALL = (lambda n: 1.0, "1")

COLLECTIVES = {
    "all_reduce": Collective(lambda x: fcoll.all_reduce(x, W), lambda x, n: lambda: dist.all_reduce(x), *TWICE),
    "all_gather": Collective(lambda x: fcoll.all_gather(x, W), _all_gather, *ONCE, part=True),
    "reduce_scatter": Collective(lambda x: fcoll.reduce_scatter(x, W), _reduce_scatter, *ONCE),
    "all_to_all": Collective(lambda x: fcoll.all_to_all(x, W), _all_to_all, *ONCE),
    "broadcast": Collective(lambda x: fcoll.broadcast(x, W), lambda x, n: lambda: dist.broadcast(x, 0), *ALL),
    "reduce": Collective(lambda x: fcoll.reduce(x, W), lambda x, n: lambda: dist.reduce(x, 0), *ALL),
    "gather": Collective(lambda x: fcoll.gather(x, W), _gather, *ONCE, part=True),
    "scatter": Collective(lambda x: fcoll.scatter(x, W), _scatter, *ONCE),
    "shift": Collective(lambda x: fcoll.shift(x, W), _shift, *ALL),
}


class Rate(NamedTuple):
    """How fast one way is."""

    seconds: float
    algbw: float  # GB/s
    busbw: float


class Row(NamedTuple):
    """One line of the table."""

    collective: str
    size: int  # bytes
    calls: int  # in each of the rounds
    fcoll: Rate
    torch: Rate


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; the exit status."""
    options = _options(arguments)
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        _join(options)
        try:
            measure(options)
        finally:
            dist.destroy_process_group()
        return 0
    if options.nproc is None:
        print(
            "fcoll.bench needs ranks. Start it on those of a launcher, or say how many there are to be here:\n"
            "    torchrun --nproc-per-node 2 -m fcoll.bench\n"
            "    python -m fcoll.bench --nproc 2",
            file=sys.stderr,
        )
        return 2
    fcoll.launch(measure, options.nproc, options, backend=options.backend)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fcoll.bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nproc", type=int, metavar="N", help="start N local ranks, where no launcher has")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES), metavar="NAME")
    parser.add_argument("--sizes", nargs="+", type=size, default=[1 << 10, 1 << 16, 1 << 20, 1 << 24], metavar="SIZE")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cuda if each rank has one, unless given")
    parser.add_argument("--backend", help="nccl or gloo, unless given")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure; 0.5 unless given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save what was measured")
    options = parser.parse_args(arguments)
    if options.nproc is not None and options.nproc < 2:
        parser.error("--nproc: a collective takes two ranks at least")
    try:
        import rich  # noqa: F401
    except ImportError:
        parser.exit(1, "fcoll.bench prints with rich: pip install 'fcoll[bench]'\n")
    ranks = options.nproc or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if options.device is None:
        options.device = "cuda" if torch.cuda.device_count() >= ranks and options.backend != "gloo" else "cpu"
    if options.backend is None:
        options.backend = "nccl" if options.device == "cuda" and torch.cuda.device_count() >= ranks else "gloo"
    options.columns, options.terminal = shutil.get_terminal_size((100, 25)).columns, sys.stdout.isatty()
    return options


def size(text: str) -> int:
    """Bytes, as in 4096, 64K, 1M or 1MiB."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"a size is like 4096, 64K or 1M, got {text!r}")
    return int(match[1]) * UNITS[match[2].upper()]


def _join(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group(options.backend)


def measure(options: argparse.Namespace) -> None:
    """On a rank: all that is asked for. The first rank prints and saves it."""
    from rich.console import Console
    from rich.progress import Progress

    n, first = dist.get_world_size(), dist.get_rank() == 0
    if n < 2:
        raise SystemExit("fcoll.bench: a collective takes two ranks at least")
    console = Console(width=options.columns, force_terminal=options.terminal, quiet=not first)
    console.print(f"{n} ranks, {dist.get_backend()}, {options.device}; sizes in bytes, times in µs, bandwidths in GB/s")
    rows: list[Row] = []
    with Progress(console=console, transient=True, disable=not (first and options.terminal)) as progress:
        task = progress.add_task("", total=len(options.collectives) * len(options.sizes))
        for name in options.collectives:
            for asked in options.sizes:
                progress.update(task, description=f"{name}, {asked} bytes")
                rows.append(_row(name, asked, options))
                progress.advance(task)
            console.print(_table(name, n, rows[-len(options.sizes) :]))
    if first and options.json:
        report = {"machine": _machine(options), "rows": [_plain(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"saved {options.json}")


def _row(name: str, asked: int, options: argparse.Namespace) -> Row:
    n, collective = dist.get_world_size(), COLLECTIVES[name]
    block = max(1, asked // (4 * n))
    x = torch.zeros(block if collective.part else n * block, device=options.device)
    ways: dict[str, Step] = {"fcoll": lambda: collective.ours(x), "torch": collective.raw(x, n)}
    for call in ways.values():  # memory, connections
        _seconds(call, 2, options.device)
    calls = math.ceil(options.seconds / ROUNDS / max(_seconds(call, 3, options.device) for call in ways.values()))
    calls = max(2, min(calls, 2000))
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, call in ways.items():
            times[way].append(_seconds(call, calls, options.device))
    total = 4 * n * block
    return Row(name, total, calls, *(rate(name, total, n, statistics.median(times[way])) for way in ways))


def _seconds(call: Step, calls: int, device: str) -> float:
    """Of one call, as the mean over all ranks."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if device != "cpu":
        torch.accelerator.synchronize()
    spent = torch.tensor((time.perf_counter() - start) / calls, device=device)
    return float(fcoll.all_reduce(spent, fcoll.WORLD, "mean"))


def rate(name: str, size: int, n: int, seconds: float) -> Rate:
    """What a time means for `size` bytes among n ranks."""
    algbw = size / seconds / 1e9
    return Rate(seconds, algbw, algbw * COLLECTIVES[name].factor(n))


def _table(name: str, n: int, rows: list[Row]) -> Any:
    from rich.table import Table

    collective = COLLECTIVES[name]
    table = Table(title=f"{name}, busbw = algbw · {collective.rule} = algbw · {collective.factor(n):.3g}")
    for heading in ("size", "fcoll: time", "algbw", "busbw", "torch: time", "algbw", "busbw", "fcoll / torch"):
        table.add_column(heading, justify="right")
    for row in rows:
        rates = [
            cell
            for way in (row.fcoll, row.torch)
            for cell in (f"{way.seconds * 1e6:.1f}", f"{way.algbw:.3f}", f"{way.busbw:.3f}")
        ]
        table.add_row(f"{row.size}", *rates, f"{row.fcoll.seconds / row.torch.seconds:.2f}")
    return table


def _plain(row: Row) -> dict[str, Any]:
    return {**row._asdict(), "fcoll": row.fcoll._asdict(), "torch": row.torch._asdict()}


def _machine(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu",
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fcoll": fcoll.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
