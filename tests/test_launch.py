"""fcoll.launch: results, errors, output, and that no process is left."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fcoll

PROC = pathlib.Path("/proc")


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def children(parent: int) -> set[int]:
    """The processes that a process has started and that still run."""
    found = set()
    for status in PROC.glob("[0-9]*/stat"):
        try:
            state, of = status.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if int(of) == parent and state != "Z":
            found.add(int(status.parent.name))
    return found


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test, the fork server has no more processes than before."""
    (server,) = fcoll.launch(os.getppid, 1)
    before = children(server)
    yield
    assert children(server) <= before


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcoll._pool.GRACE", 0.5)


# ---- what works


def test_results_come_by_rank_from_a_world_like_that_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_CALLER", "here")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OF_THE_CALLER")

    def f(x: Tensor, scale: float) -> Any:
        total = fcoll.all_reduce(x * (1 + dist.get_rank()), fcoll.WORLD) * scale
        return total.tolist(), dist.get_backend(), [os.environ[name] for name in names]

    got = fcoll.launch(f, 3, torch.tensor([1.0, 2.0]), 0.5)
    assert got == [([3.0, 6.0], "gloo", [f"{r}", f"{r}", "3", "3", "127.0.0.1", "here"]) for r in range(3)]


def test_the_ranks_share_the_callers_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert fcoll.launch(torch.get_num_threads, 2) == [2, 2]
    finally:
        torch.set_num_threads(before)


def test_as_a_decorator() -> None:
    offset = 10

    @fcoll.launch(nproc=2, timeout=60)
    def train(x: int, *, lr: int) -> int:
        """Train."""
        return x + lr + offset + dist.get_rank()

    assert train(100, lr=1) == [111, 112]
    assert (train.__name__, train.__doc__) == ("train", "Train.")


def test_functions_of_a_notebook() -> None:
    """They are in no file, and refer to what else the notebook defines."""
    cells = (
        "class Box:\n"
        "    def __init__(self, value): self.value = value\n"
        "def double(x): return 2 * x\n"
        "def f(x): return Box(double(x))\n"
    )
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(cells, scope)
    assert [type(box) is scope["Box"] and box.value for box in fcoll.launch(scope["f"], 2, 3)] == [6, 6]


COMPILED = """
import functools, torch, fcoll
SCALE = 3.0
def scaled(x):
    return x * SCALE
def loss(x):
    return fcoll.all_reduce(scaled(x), fcoll.WORLD).sum()
def step(x, k):
    gradient = fcoll.compile(torch.func.grad(lambda x: k * loss(x)), backend="aot_eager")
    return gradient(x), torch.compile(loss, fullgraph=True, backend="aot_eager")(x)
"""


def test_functions_of_a_notebook_can_be_compiled() -> None:
    """torch.compile looks up the globals of a function in the module that it says it is from."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(COMPILED, scope)
    for f in (scope["step"], functools.partial(scope["step"])):
        for gradient, value in fcoll.launch(f, 2, torch.ones(2), 5.0):
            assert gradient.tolist() == [30.0, 30.0]
            assert value == 12.0


def test_functions_of_a_notebook_can_be_checked() -> None:
    """The decorator's wrapper travels with all that it refers to, the thread's settings among them."""

    @fcoll.checked(timeout=20)
    def f() -> Tensor:
        return fcoll.all_reduce(torch.ones(2 + dist.get_rank()), fcoll.WORLD)

    with pytest.raises(fcoll.DisagreementError, match="disagree on call 1"):
        fcoll.launch(f, 2)


def test_a_rank_may_have_processes() -> None:
    def f() -> int | None:
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
        child.start()
        child.join()
        return child.exitcode

    assert fcoll.launch(f, 1) == [0]


def test_what_ranks_print_appears(capsys: pytest.CaptureFixture[str]) -> None:
    def f() -> None:
        print("out from", dist.get_rank())
        print("größer", end="")
        os.write(2, f"err from {dist.get_rank()}\n".encode())

    fcoll.launch(f, 2)
    out, err = capsys.readouterr()
    assert sorted(out.replace("größer", "").splitlines()) == ["out from 0", "out from 1"]
    assert out.count("größer") == 2
    assert {"err from 0", "err from 1"} <= set(err.splitlines())


def test_ranks_listen_on_the_loopback_interface_only() -> None:
    def f() -> list[str]:
        fcoll.all_reduce(1.0, fcoll.WORLD)
        targets = [os.readlink(link) for link in PROC.glob("self/fd/*") if link.is_symlink()]
        inodes = {target[len("socket:[") : -1] for target in targets if target.startswith("socket:")}
        lines = [line.split() for name in ("tcp", "tcp6") for line in (PROC / f"net/{name}").read_text().splitlines()]
        return [line[1].split(":")[0] for line in lines if line[9] in inodes]

    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    for addresses in fcoll.launch(f, 2):
        assert addresses
        assert set(addresses) <= loopback


@pytest.mark.parametrize(("devices", "backend"), [(0, "gloo"), (2, "gloo"), (3, "nccl")])
def test_the_backend(devices: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Spy(RuntimeError):
        def __init__(self, n: int, backend: str, *_: Any, **__: Any) -> None:
            asked.append(backend)
            raise self

    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr("fcoll.launching.Ranks", Spy)
    for given in (None, "pigeon"):
        with pytest.raises(Spy):
            fcoll.launch(print, 3, backend=given)
    assert asked == [backend, "pigeon"]


# ---- what fails


def gone(pid: int) -> bool:
    """Ended, or about to be reaped by whoever has inherited it."""
    try:
        return (PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("dies", [False, True])
def test_what_a_rank_has_started_ends_with_it(dies: bool, tmp_path: pathlib.Path) -> None:
    def f(file: pathlib.Path) -> None:
        file.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

    file = tmp_path / "pid"
    with pytest.raises(RuntimeError, match="SIGKILL") if dies else contextlib.nullcontext():
        fcoll.launch(f, 1, file)
    while not gone(int(file.read_text())):  # the limit of the test is the limit of the wait
        time.sleep(0.01)


@pytest.mark.usefixtures("nothing_left", "impatient")
def test_the_rank_that_failed_first_is_named() -> None:
    def f() -> None:
        if dist.get_rank() == 1:
            raise LookupError("of rank 1")
        dist.barrier()

    with pytest.raises(LookupError, match="of rank 1") as caught:
        fcoll.launch(f, 2)
    first, *others = caught.value.__notes__
    assert first.startswith("raised on rank 1:\nTraceback")
    assert "in f" in first
    assert len(others) == 1  # rank 0 noticed, or was stopped
    assert others[0].startswith("rank 0")


@pytest.mark.usefixtures("nothing_left", "impatient")
def test_a_rank_that_is_killed() -> None:
    def f() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(RuntimeError, match="rank 1 died of SIGKILL") as caught:
        fcoll.launch(f, 2)
    assert "rank 0 had not answered" in notes(caught.value)


@pytest.mark.usefixtures("nothing_left")
def test_the_timeout_names_the_silent_ranks() -> None:
    def linger() -> None:
        if dist.get_rank() == 0:
            time.sleep(600)

    with pytest.raises(TimeoutError, match=r"no answer after 1 s from rank 0 of 2") as caught:
        fcoll.launch(linger, 2, timeout=1)
    assert "in linger" in notes(caught.value)


@pytest.mark.usefixtures("nothing_left")
def test_an_interrupt_at_any_time() -> None:
    """From before the processes start until they run."""

    def interrupted(delay: float) -> None:  # perhaps before launch is called
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        fcoll.launch(time.sleep, 2, 600)

    for delay in (0.001, 0.02, 0.1, 0.8):
        with pytest.raises(KeyboardInterrupt):
            interrupted(delay)


def test_ctrl_c_in_a_script_without_a_guard(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time, fcoll\n"
        "print('the script runs', flush=True)\n"
        "class Result:\n"
        "    value = 7\n"
        "def busy():\n"
        "    print(os.getpid(), os.getppid())\n"
        "    time.sleep(600)\n"
        "assert [type(r) for r in fcoll.launch(Result, 2)] == [Result] * 2\n"
        "try:\n"
        "    fcoll.launch(busy, 2)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        "print(__file__ == sys.argv[0])\n"
    )
    command = [sys.executable, "-W", "ignore", str(script)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline() for _ in range(3)]
        assert lines[0] == "the script runs\n"
        ranks = {int(line.split()[0]) for line in lines[1:]}
        (server,) = {int(line.split()[1]) for line in lines[1:]}
        assert children(server) == ranks
        os.killpg(parent.pid, signal.SIGINT)  # what a terminal does
        out, err = parent.communicate()
    assert out == "interrupted\nTrue\n"
    assert err == ""
    assert parent.returncode == 0
    assert not [rank for rank in ranks if (PROC / str(rank)).exists()]


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: fcoll.launch(print, 0), ValueError, "launch: nproc is the number of ranks, at least 1, got 0"),
        (lambda: fcoll.launch(print, 2.0), TypeError, "launch: nproc is an integer, got float"),  # type: ignore[call-overload]
        (lambda: fcoll.launch(1, 2), TypeError, "launch: f is a function, got int"),  # type: ignore[call-overload]
        (lambda: fcoll.launch(nproc=2)(1), TypeError, "launch: f is a function, got int"),  # type: ignore[arg-type]
        (lambda: fcoll.launch(print), ValueError, "launch: nproc is the number"),  # type: ignore[call-overload]
        (lambda: fcoll.launch(lambda: sys._getframe(), 2), TypeError, "cannot pickle 'frame' object"),
    ],
)
def test_bad_arguments(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


def test_without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match=r"pip install 'fcoll\[launch\]'"):
        fcoll.launch(print, 2)


def test_maps_over_virtual_meshes_travel() -> None:
    """The check of a map belongs to the process that made it: each rank makes its own, and not another map's."""
    mesh = fcoll.virtual_mesh(i=2)
    mapped: Any = fcoll.shard_map(lambda x: fcoll.all_reduce(x.sum(), "i"), mesh, fcoll.P("i"), fcoll.P())

    def f(x: Tensor) -> Any:
        other: Any = fcoll.shard_map(lambda x: x * 2, mesh, fcoll.P("i"), fcoll.P("i"))
        return mapped(x), other(x).sum(), torch.func.grad(mapped)(x).sum(), len(fcoll.trace(mapped)(x))

    assert fcoll.launch(f, 2, torch.ones(4)) == [(4, 8, 4, 1)] * 2
    varying = fcoll.shard_map(lambda x: x.sum(), mesh, fcoll.P("i"), fcoll.P())
    with pytest.raises(ValueError, match="is replicated over 'i' by out_specs, but varies over it"):
        fcoll.launch(varying, 1, torch.ones(4))
