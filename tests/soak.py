"""Long runs on four local ranks: memory stays flat, no thread is left over, nothing is said at the end.

python tests/soak.py                              10,000 calls of 1 MiB, then 2,000 training steps; some minutes
python tests/soak.py --calls 400 --steps 80       shorter, as the tests do
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fcoll

ROOT = Path(__file__).parents[1]
RANKS, SAMPLES = 4, 40
MIB = 1 << 20


class Sample(NamedTuple):
    """What a rank holds at one moment."""

    memory: int  # bytes, resident
    threads: int  # of the process
    python_threads: int


def sample() -> Sample:
    try:
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        threads = len(os.listdir("/proc/self/task"))
    except OSError:  # no Linux: the peak, which does not grow either
        memory, threads = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, threading.active_count()
    return Sample(memory, threads, threading.active_count())


# ---- what the ranks do


def dropped(x: torch.Tensor, weighted: torch.Tensor) -> list[Callable[[], Any]]:
    """Calls whose results nobody wants; the last ones are started and never waited for."""
    world = fcoll.WORLD
    pieces = {"a": list(x.split(4096)), "b": weighted}
    return [
        lambda: fcoll.all_reduce(x, world),
        lambda: fcoll.all_reduce(x, world, "max"),
        lambda: fcoll.all_gather(x[: x.numel() // RANKS], world),
        lambda: fcoll.reduce_scatter(x, world),
        lambda: fcoll.all_to_all(x, world),
        lambda: fcoll.broadcast(x, world, 1),
        lambda: fcoll.gather(x[: x.numel() // RANKS], world, 2),
        lambda: fcoll.shift(x, world),
        lambda: fcoll.all_gather(x[: x.numel() // RANKS], world, sizes="exchange"),
        lambda: fcoll.all_reduce(pieces, world),
        lambda: fcoll.all_reduce(weighted, world),  # and its graph
        lambda: torch.autograd.grad(fcoll.reduce_scatter(weighted * x, world).sum(), weighted),
        lambda: torch.func.grad(lambda x: fcoll.all_reduce(x, world).sum())(x),
        lambda: fcoll.start(fcoll.all_reduce, x, world),
        lambda: fcoll.start(fcoll.all_gather, x[: x.numel() // RANKS], world),
        lambda: fcoll.start(fcoll.reduce_scatter, weighted * x, world),
        lambda: fcoll.start(fcoll.all_reduce, pieces, world),
    ]


def calls(count: int) -> Iterator[None]:
    x = torch.ones(MIB // 4) * dist.get_rank()
    todo = dropped(x, torch.ones(MIB // 4, requires_grad=True))
    for number in range(count):
        todo[number % len(todo)]()
        yield


def steps(count: int) -> Iterator[None]:
    """The training of examples/digits.py."""
    sys.path.insert(0, str(ROOT / "examples"))
    import digits

    params, batches, data, _ = digits.setup(count)
    state = (digits.SPECS, digits.SPECS)
    mesh = fcoll.mesh(dp=2, tp=2)
    specs = (state, fcoll.P("dp"), fcoll.P("dp"))
    step: Any = fcoll.shard_map(functools.partial(digits.update, digits.loss), mesh, specs, (state, fcoll.P()))
    current: Any = params, {name: torch.zeros_like(p) for name, p in params.items()}
    images, labels = data
    for batch in batches:
        current, _ = step(current, images[batch], labels[batch])
        yield


def measured(work: Iterator[None], count: int) -> list[Sample]:
    """One sample after each of SAMPLES equal parts."""
    out = []
    for number, _ in enumerate(work, start=1):
        if number % max(count // SAMPLES, 1) == 0:
            out.append(sample())
    return out


def on_rank(rank: int, store: str, counts: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for work, count in zip((calls, steps), counts, strict=True):
        print(json.dumps([work.__name__, measured(work(count), count)]), flush=True)
        dist.barrier()
    dist.destroy_process_group()


# ---- what is asked of them


class Report(NamedTuple):
    """Of one kind of work, over all ranks."""

    growth: float  # the largest of a rank's memory from after the warm-up to the end, as a part of it
    memory: float  # MiB at the end, the largest
    threads: int  # more at the end than after the warm-up, the largest


def soak(count_calls: int, count_steps: int) -> tuple[dict[str, Report], str]:
    """The reports, and what the ranks said on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "error::ResourceWarning", __file__, "--store", f"{folder}/store"]
        command += ["--calls", str(count_calls), "--steps", str(count_steps), "--rank"]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        ranks = [
            subprocess.Popen(
                [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        try:
            said = [rank.communicate() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    errors = "".join(error for _, error in said) + "".join(
        f"rank {rank} ended with {process.returncode}\n" for rank, process in enumerate(ranks) if process.returncode
    )
    found: dict[str, list[list[Sample]]] = {}
    for out, _ in said:
        for line in out.splitlines():
            name, samples = json.loads(line)
            found.setdefault(name, []).append([Sample(*each) for each in samples])
    return {name: report(ranks) for name, ranks in found.items()}, errors


def report(ranks: list[list[Sample]]) -> Report:
    """The warm-up is the first quarter; then the second quarter is compared with the last."""
    growth, memory, threads = [], [], []
    for samples in ranks:
        part = max(len(samples) // 4, 1)
        before, after = samples[part : 2 * part], samples[-part:]
        start, end = (statistics.median(each.memory for each in some) for some in (before, after))
        growth.append(end / start - 1)
        memory.append(end / MIB)
        threads.append(
            max(
                after[-1].threads - max(each.threads for each in before),
                after[-1].python_threads - max(each.python_threads for each in before),
            )
        )
    return Report(max(growth), max(memory), max(threads))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000, help="calls of 1 MiB (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2_000, help="training steps (default: %(default)s)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        on_rank(given.rank, given.store, [given.calls, given.steps])
        return 0
    from rich.console import Console  # not on the ranks, whose memory is measured

    with Console(stderr=True).status(f"{given.calls:,} calls and {given.steps:,} steps on {RANKS} ranks"):
        reports, errors = soak(given.calls, given.steps)
    for name, each in reports.items():
        print(f"{name:6} memory {each.memory:6.1f} MiB, growth {each.growth:+.2%}, more threads {each.threads}")
    print(errors or "nothing on stderr")
    flat = all(each.growth <= 0.02 and each.threads <= 0 for each in reports.values())
    return int(not (flat and len(reports) == 2 and not errors))


if __name__ == "__main__":
    sys.exit(main())
