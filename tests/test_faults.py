"""Ranks that die, stop, raise or lose their connections, at every point of forward and backward.

Every survivor that depends on the failed rank gets an error in time, which names group and collective. One world
serves many faults: each scenario has a process group of its own and runs in a thread of its own on each of its ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from common import grad
from torch import Tensor

import fcoll
from fcoll import _torch, agreement
from fcoll.errors import CommunicationError

N = 4
VICTIM = N - 1  # of the world, and the last of every group
LIMIT = 3.0  # of the scenarios' groups, in seconds
SLACK = 4.0  # for cores that others use too
Fail = Callable[[], None]

# ---- scenarios: what the ranks do, where the last rank of the group fails, who cannot do without it


class Scenario(NamedTuple):
    size: int  # of the group
    program: Callable[[Any, int, Fail], Any]  # (group, index in it, what the victim calls to fail)
    named: str  # the collective in the error
    only: Callable[[int], int] | None = None  # the survivor that depends on the victim, if not all do


def value(index: int, n: int) -> Tensor:
    return torch.full((n, 2), index + 1.0, requires_grad=True)


CALLS: dict[str, Callable[[Tensor, Any, int], Tensor]] = {  # (x, group, its last index)
    "all_reduce": lambda x, g, last: fcoll.all_reduce(x, g),
    "max": lambda x, g, last: fcoll.all_reduce(x, g, "max"),
    "prod": lambda x, g, last: fcoll.all_reduce(x, g, "prod"),
    "all_gather": lambda x, g, last: fcoll.all_gather(x, g),
    "reduce_scatter": lambda x, g, last: fcoll.reduce_scatter(x, g),
    "all_to_all": lambda x, g, last: fcoll.all_to_all(x, g),
    "broadcast": lambda x, g, last: fcoll.broadcast(x, g, last),
    "reduce": lambda x, g, last: fcoll.reduce(x, g, 0),
    "gather": lambda x, g, last: fcoll.gather(x, g, 0),
    "scatter": lambda x, g, last: fcoll.scatter(x, g, last),
    "shift": lambda x, g, last: fcoll.shift(x, g),
    "tree": lambda x, g, last: fcoll.all_reduce({"a": x, "b": x}, g)["a"],
    # those whose backward pass depends on the last rank
    "reduce to last": lambda x, g, last: fcoll.reduce(x, g, last),
    "gather to last": lambda x, g, last: fcoll.gather(x, g, last),
    "broadcast from first": lambda x, g, last: fcoll.broadcast(x, g, 0),
    "scatter from first": lambda x, g, last: fcoll.scatter(x, g, 0),
}
WIRE = {"max": "all_reduce", "prod": "all_reduce", "shift": "permute", "tree": "all_reduce"}
BACKWARD = {  # what is sent in the backward pass
    "all_reduce": "all_reduce",
    "max": "all_reduce",
    "prod": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "reduce to last": "broadcast",
    "gather to last": "scatter",
    "broadcast from first": "reduce",
    "scatter from first": "gather",
}


def forward(name: str) -> Callable[[Any, int, Fail], Any]:
    """It fails before the call, in which the others wait."""

    def program(group: Any, index: int, fail: Fail) -> Any:
        n = fcoll.axis_size(group)
        fail()
        return CALLS[name](value(index, n).detach(), group, n - 1)

    return program


def backward(name: str) -> Callable[[Any, int, Fail], Any]:
    """It fails between the call and its backward pass."""

    def program(group: Any, index: int, fail: Fail) -> Any:
        n = fcoll.axis_size(group)
        x = value(index, n)
        y = CALLS[name](x, group, n - 1)
        fail()
        y.sum().backward()
        return x.grad

    return program


def within_backward(group: Any, index: int, fail: Fail) -> Any:
    """It fails after the first of two collectives of the backward pass."""
    x = value(index, fcoll.axis_size(group))
    middle = fcoll.all_reduce(x, group)
    middle.register_hook(lambda cotangent: fail())
    fcoll.all_gather(middle, group).sum().backward()
    return x.grad


def within_forward(group: Any, index: int, fail: Fail) -> Any:
    """It fails after the first of two calls."""
    y = fcoll.all_gather(value(index, 2), group)
    fail()
    return fcoll.all_reduce(y, group)


def transform(group: Any, index: int, fail: Fail) -> Any:
    """It fails in a function whose gradient is taken."""

    def f(x: Tensor) -> Tensor:
        y = fcoll.all_reduce(x, group)
        fail()
        return (y * y).sum()

    return grad(f)(torch.ones(2))


def second_order(group: Any, index: int, fail: Fail) -> Any:
    """It fails between the first and the second derivative."""
    x = value(index, 2)
    (first,) = torch.autograd.grad((fcoll.all_reduce(x, group) ** 3).sum(), x, create_graph=True)
    fail()
    return torch.autograd.grad(first.sum(), x)


def later_step(group: Any, index: int, fail: Fail) -> Any:
    """It fails after some good steps."""
    w = torch.ones(2)
    for step in range(4):
        if step == 3:
            fail()
        w = w - 0.1 * fcoll.all_reduce(grad(lambda w: (w * (index + 1)).square().sum())(w), group, "mean")
    return w


ALONE: dict[str, Callable[[int], int]] = {  # who depends on the last rank
    "reduce": lambda n: 0,
    "gather": lambda n: 0,
    "shift": lambda n: 0,
    "broadcast from first": lambda n: 0,
    "scatter from first": lambda n: 0,
}


def scenarios() -> dict[str, Scenario]:
    found = {}
    for i, name in enumerate(name for name in CALLS if name not in ("reduce to last", "gather to last")):
        if " from first" not in name:
            found[f"forward of {name}"] = Scenario(2 + i % 3, forward(name), WIRE.get(name, name), ALONE.get(name))
    for i, (name, sent) in enumerate(BACKWARD.items()):
        found[f"backward of {name}"] = Scenario(2 + i % 3, backward(name), sent, ALONE.get(name))
    found["within backward"] = Scenario(3, within_backward, "all_reduce")
    found["within forward"] = Scenario(4, within_forward, "all_reduce")
    found["in a transform"] = Scenario(2, transform, "all_reduce")
    found["second order"] = Scenario(3, second_order, "all_reduce")
    found["in a later step"] = Scenario(4, later_step, "all_reduce")
    return found


SCENARIOS = scenarios()
CHECKED = [name for name in SCENARIOS if name.startswith(("within", "in a", "second", "forward of a", "backward of a"))]


# ---- worlds: processes of this test, some of which die


class World:
    """Local ranks that report by pipe; a rank that dies reports nothing."""

    def __init__(self, n: int, program: Callable[..., Any], *args: Any, own_store: bool = False) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "fcoll.testing"])
        self.stores = [] if own_store else [_store(0, is_master=True) for _ in range(2)]  # one for a second world
        ports = [_free_port()] if own_store else [store.port for store in self.stores]
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(n):
            pipe, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(theirs, rank, n, ports, own_store, program, args), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(pipe)
            self.processes.append(process)
        self.ports = ports

    def reports(self, limit: float) -> dict[int, Any]:
        """What the ranks report, until all have or have died."""
        waiting, found = dict(enumerate(self.pipes)), {}
        deadline = time.monotonic() + limit
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting.values()), left):
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                with suppress(EOFError):
                    found[rank] = waiting[rank].recv()
                del waiting[rank]
        assert not waiting, f"no answer from ranks {list(waiting)}, only {found}"
        return found

    def end(self) -> list[int]:
        """Let all processes end by themselves, and return their exit codes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
                raise AssertionError("a rank did not end")
        return [process.exitcode for process in self.processes]


def _store(port: int, is_master: bool = False) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)  # type: ignore[attr-defined]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _rank(
    pipe: Connection, rank: int, n: int, ports: list[int], own: bool, program: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = _store(ports[0], is_master=own and rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=60))
    pipe.send(program(rank, ports, *args))
    with suppress(EOFError):
        pipe.recv()  # until the test lets go
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- faults: what happens to the victim in all scenarios at once


def run_scenarios(rank: int, ports: list[int], fault: str, checked: bool) -> Any:
    """Run them all, each in a thread; the outcome of each: (error, message, seconds since the point of the fault)."""
    names = CHECKED if checked else list(SCENARIOS)
    groups, sockets = {}, {}
    for name in names:
        members = list(range(N - SCENARIOS[name].size, N))
        before = _open_sockets()
        groups[name] = dist.new_group(members, timeout=timedelta(seconds=LIMIT))
        if rank in members:
            fcoll.all_reduce(torch.ones(1), groups[name])  # connects
        sockets[name] = _open_sockets() - before
    pids = fcoll.all_gather(torch.tensor([os.getpid()]), fcoll.WORLD).tolist()
    survivors = dist.new_group(list(range(VICTIM)))
    mine = [name for name in names if rank >= N - SCENARIOS[name].size]
    if checked:  # connections to the store in advance, one of which may take longer than the limit
        _, connections = agreement._channel(groups[mine[0]].group_name)
        connections.extend(_torch.default_store().clone() for _ in mine)
        dist.barrier()
    together = threading.Barrier(
        len(names), action=lambda: os.kill(os.getpid(), FATAL[fault]) if fault in FATAL else None
    )
    outcomes: dict[str, Any] = {}

    def fail(name: str) -> None:
        if fault in FATAL:
            together.wait()  # until all are at their points
        elif fault == "raises":
            raise ZeroDivisionError(MISTAKE)
        elif fault == "drops":
            for descriptor in sockets[name]:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)
        elif fault == "leaves":
            dist.destroy_process_group(groups[name])

    def work(name: str) -> None:
        group, scenario = groups[name], SCENARIOS[name]
        begin = time.monotonic()

        def reached() -> None:
            nonlocal begin
            begin = time.monotonic()
            if rank == VICTIM:
                fail(name)

        try:
            with fcoll.checked(timeout=LIMIT) if checked else nullcontext():
                scenario.program(group, rank - (N - scenario.size), reached)
            outcomes[name] = "", "", time.monotonic() - begin
        except BaseException as error:
            outcomes[name] = type(error).__name__, str(error), time.monotonic() - begin

    threads = [threading.Thread(target=work, args=(name,)) for name in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after: Any = None
    if rank != VICTIM:
        dist.barrier(group=survivors)
        if fault == "stops" and rank == 0:
            os.kill(pids[VICTIM], signal.SIGCONT)
        after = again(rank, ports)
    return outcomes, after, _listening()


MISTAKE = "the victim's own mistake"
FATAL = {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}


def again(rank: int, ports: list[int]) -> tuple[float, float]:
    """What the survivors can do: a new group in the same world, and a new world in the same process."""
    group = fcoll.group(list(range(VICTIM)))
    first = float(fcoll.all_reduce(torch.tensor(rank + 1.0), group))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=_store(ports[1]), rank=rank, world_size=VICTIM)
    x = torch.tensor(rank + 1.0, requires_grad=True)
    (fcoll.all_reduce(x, fcoll.WORLD) ** 2).backward()
    assert x.grad is not None
    return first, float(x.grad)


def _open_sockets() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found


def _listening() -> list[int]:
    """The ports that this process listens at."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{name}"))
    ports = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                ports.append(int(fields[1].split(":")[1], 16))
    return ports


@contextmanager
def no_leftovers(world: World, dead: tuple[int, ...] = ()) -> Iterator[None]:
    """All processes end by themselves, but for the dead, and none is left."""
    try:
        yield
    finally:
        codes = world.end()
    assert codes == [-signal.SIGKILL if rank in dead else 0 for rank in range(len(codes))]
    for process in world.processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def inject(fault: str, checked: bool = False) -> dict[int, Any]:
    """The reports of the ranks."""
    world = World(N, run_scenarios, fault, checked)
    with no_leftovers(world, (VICTIM,) if fault == "dies" else ()):
        reports = world.reports(60)
    assert sorted(reports) == list(range(N - (fault == "dies")))
    for _, after, listening in reports.values():
        assert after in (None, (6.0, 36.0))  # a new group, and a new world of three: 3 ranks of 2 · 6
        for port in listening:
            socket.create_server(("127.0.0.1", port)).close()  # free again
    assert all(reports[rank][1] for rank in range(VICTIM))
    return reports


@pytest.mark.parametrize("fault", ["raises", "drops", "leaves", "stops", "dies"])
def test_every_survivor_gets_an_error_in_time(fault: str) -> None:
    reports = inject(fault)
    for name, scenario in SCENARIOS.items():
        survivors = range(N - scenario.size, VICTIM)
        for index, rank in enumerate(survivors):
            kind, text, seconds = reports[rank][0][name]
            where = f"{fault}, {name}, rank {rank}: {kind} {text} after {seconds:.1f} s"
            assert seconds < LIMIT + SLACK, where
            if not kind and scenario.only is not None and scenario.only(scenario.size) != index:
                continue  # it can do without the victim, and does
            assert kind == "CommunicationError", where
            assert re.match(rf"{scenario.named} over process group '\w+' of {scenario.size} ranks, in ", text), where
            assert "test_faults.py:" in text, where
            assert ("in the backward pass of " in text) == (name in IN_BACKWARD), where
        if fault == "raises":
            assert reports[VICTIM][0][name][:2] == ("ZeroDivisionError", MISTAKE)


@pytest.mark.parametrize("fault", ["raises", "stops", "dies"])
def test_checked_names_who_failed(fault: str) -> None:
    reports = inject(fault, checked=True)
    for name in CHECKED:
        scenario, texts = SCENARIOS[name], set()
        for rank in range(N - scenario.size, VICTIM):
            kind, text, seconds = reports[rank][0][name]
            where = f"{fault}, {name}, rank {rank}: {kind} {text} after {seconds:.1f} s"
            assert kind == "DisagreementError", where
            assert re.match(rf"after 3 s, rank {VICTIM} had not come to call \d+ of process group '\w+' of ", text), (
                where
            )
            assert f"rank {rank} waits at " in text, where
            assert seconds < LIMIT + SLACK, where
            texts.add(text)
        if fault == "stops":  # who comes late hears the same
            texts.add(reports[VICTIM][0][name][1])
        assert len(texts) == 1, (name, texts)


def test_there_are_many_faults() -> None:
    assert len(SCENARIOS) * 5 >= 100
    assert {scenario.size for scenario in SCENARIOS.values()} == {2, 3, 4}


# ---- the rank that holds the store dies


def lose_the_store(rank: int, ports: list[int]) -> Any:
    with fcoll.checked(timeout=LIMIT):
        fcoll.all_reduce(torch.ones(1), fcoll.WORLD)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            fcoll.all_gather(torch.ones(1), fcoll.WORLD)
        except CommunicationError as error:
            return str(error), time.monotonic() - begin


def test_the_end_of_the_store_is_an_error_too() -> None:
    world = World(3, lose_the_store, own_store=True)
    with no_leftovers(world, (0,)):
        reports = world.reports(30)
    assert sorted(reports) == [1, 2]
    for text, seconds in reports.values():
        assert re.match(
            r"test_faults.py:\d+: all_gather: the store of torch.distributed, .* '0' of 3 ranks .* has gone", text
        )
        assert seconds < LIMIT + SLACK


# ---- only some ranks require a gradient, without checks


def one_gradient(rank: int, ports: list[int]) -> Any:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
    x = torch.full((2,), rank + 1.0, requires_grad=rank == 0)
    y = fcoll.all_reduce(x, group)
    begin = time.monotonic()
    try:
        if rank == 0:
            (y * y).sum().backward()
    except CommunicationError as error:
        return str(error), time.monotonic() - begin
    time.sleep(3)  # it goes on with something else
    return y.tolist(), 0.0


def test_a_gradient_that_one_rank_wants_alone_is_an_error_after_the_groups_limit() -> None:
    world = World(2, one_gradient)
    with no_leftovers(world):
        reports = world.reports(30)
    text, seconds = reports[0]
    assert re.match(r"all_reduce over process group '1' of 2 ranks, in the backward pass of all_reduce at ", text)
    assert seconds < 1.5 + SLACK
    assert reports[1] == ([3.0, 3.0], 0.0)


IN_BACKWARD = {name for name in SCENARIOS if name.startswith(("backward", "within backward", "in a tr", "second"))}
