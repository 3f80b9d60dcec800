"""A pool of local processes that are the ranks of one torch.distributed world and live from call to call."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import pickle
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

__all__ = ["Ranks"]

T = TypeVar("T")

START_LIMIT = 120.0  # seconds for all processes to start and to join the world
GRACE = 2.0  # seconds that the other ranks are given to answer once one has failed
# what the fork server imports, once for all pools
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "fcoll._pool"]
AFTERMATH = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")


class _Answer(NamedTuple):
    """What a rank has to say about one call."""

    result: bytes | None = None  # the pickled result
    error: bytes | None = None  # the pickled exception, where it can be rebuilt
    summary: str = ""  # the exception's type and text; empty if there was none
    trace: str = ""
    when: float = 0.0
    aftermath: bool = False  # the exception only reports that another rank has gone


class Ranks:
    """A pool of `n` local processes, the ranks of one `torch.distributed` world, kept from call to call.

    The processes start at the first `run` and end at `close` (or at the end of a `with` block). They speak
    over the loopback interface only, and the port is one that the system has handed out, so pools cannot
    collide. Where the platform has a fork server, torch is imported once for all pools, and starting a pool
    takes a fraction of a second.

    A script that makes a pool needs the usual `if __name__ == "__main__":` guard of `multiprocessing`.

    Args:
        n: how many ranks.
        backend: a backend of `torch.distributed`. With NCCL, rank r uses CUDA device r.
        timeout: the limit of one `run`, in seconds, unless the call gives its own.

    Raises:
        ValueError: `n` is not positive.
        ImportError: cloudpickle, which the extra `fcoll[testing]` installs, is missing.

    Example:
        >>> with Ranks(2) as ranks:
        ...     ranks.run(lambda x: fcoll.all_reduce(x, fcoll.WORLD), per_rank=[(1.0,), (2.0,)])
        [tensor(3.), tensor(3.)]
    """

    def __init__(self, n: int, backend: str = "gloo", timeout: float = 60.0) -> None:
        if n < 1:
            raise ValueError(f"a pool needs at least one rank, got n={n}")
        self.n = n
        self.backend = backend
        self.timeout = timeout
        self._pickle = _cloudpickle()
        self._world: _World | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids by rank, empty while no process runs."""
        return [] if self._world is None else self._world.pids

    def run(
        self,
        f: Callable[..., T],
        *args: Any,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        timeout: float | None = None,
    ) -> list[T]:
        """Call `f` on every rank and return the results by rank.

        Rank r calls `f(*per_rank[r], *args)`, under the warning filters of the caller. Function, arguments
        and results travel by cloudpickle: closures, lambdas and classes made in a function work; what an
        importable module defines is imported by name on the rank.

        A failure stops the call. If every rank has raised and the world is still in step, the processes go
        on living. After any other failure, and after a timeout, they are killed, and the next `run` starts
        new ones.

        Args:
            f: the function.
            *args: arguments for every rank.
            per_rank: one tuple for each rank: its own arguments, which come first.
            timeout: the limit in seconds; by default the pool's.

        Raises:
            ValueError: `per_rank` does not hold one tuple for each rank.
            TimeoutError: some ranks have not answered; the message names them, notes hold their Python
                stacks.
            RuntimeError: a rank died, or its exception could not be rebuilt here.
            Exception: what `f` raised, with the rank and its traceback in a note. If several ranks raised,
                the first in time, but not one which merely reports that another rank has gone.
        """
        if per_rank is not None and len(per_rank) != self.n:
            raise ValueError(f"per_rank needs {self.n} tuples, one for each rank, got {len(per_rank)}")
        limit = self.timeout if timeout is None else timeout
        common = self._pickle.dumps((f, args, _warning_filters()))
        own = [self._pickle.dumps(tuple(mine)) for mine in per_rank or [()] * self.n]
        if self._world is not None and not self._world.alive():
            self._stop()
        if self._world is None:
            self._world = _World(self.n, self.backend)
        try:
            answers = self._world.ask(common, own, limit)
            if len(answers) == self.n and not any(a.summary for a in answers.values()):
                return [self._pickle.loads(answers[rank].result) for rank in range(self.n)]
            error = _error(answers, self._world, limit)
            keep = len(answers) == self.n and all(a.trace and not a.aftermath for a in answers.values())
            if not (keep and self._in_step()):
                self._stop()
        except BaseException:  # the caller was interrupted, or a result cannot be loaded
            self._stop()
            raise
        raise error

    def close(self) -> None:
        """End the processes; a later `run` starts new ones."""
        if self._world is not None:
            self._world.close()
            self._world = None

    def _in_step(self) -> bool:
        """Whether a barrier completes: some ranks may have begun a collective that the others have not."""
        assert self._world is not None
        barrier = self._pickle.dumps((dist.barrier, (), []))
        answers = self._world.ask(barrier, [self._pickle.dumps(())] * self.n, GRACE)
        return len(answers) == self.n and not any(a.summary for a in answers.values())

    def _stop(self) -> None:
        if self._world is not None:
            self._world.kill()
            self._world = None


class _World:
    """The parent's side of one generation of processes."""

    def __init__(self, n: int, backend: str) -> None:
        self.n = n
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        context.set_forkserver_preload(PRELOAD)  # heard by a fork server that has yet to start
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        # the store outlives every rank, so that its end is never what a rank's failure looks like
        self._store = _store(port, is_master=True, master_listen_fd=listener.detach())
        self._pipes: list[Connection] = []
        self._stacks: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        try:
            for rank in range(n):
                pipe, theirs = context.Pipe()
                stack, their_stack = context.Pipe(duplex=False)
                process = context.Process(
                    target=_serve,
                    args=(rank, n, backend, port, theirs, their_stack),
                    name=f"fcoll-rank-{rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                their_stack.close()
                self._pipes.append(pipe)
                self._stacks.append(stack)
                self._processes.append(process)
            answers = self._collect(START_LIMIT)
            if len(answers) < n or any(a.summary for a in answers.values()):
                raise _error(answers, self, START_LIMIT)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def alive(self) -> bool:
        """Whether the processes wait for a call; the pipe of one that has died is at its end."""
        return all(process.is_alive() for process in self._processes) and not any(pipe.poll() for pipe in self._pipes)

    def ask(self, common: bytes, own: list[bytes], limit: float) -> dict[int, _Answer]:
        """Send one call to every rank and return the answers that came within the limit."""
        for pipe, mine in zip(self._pipes, own, strict=True):
            try:
                pipe.send_bytes(common)
                pipe.send_bytes(mine)
            except OSError:
                pass  # the rank has died, which `_collect` sees
        return self._collect(limit)

    def _collect(self, limit: float) -> dict[int, _Answer]:
        waiting = dict(enumerate(self._pipes))
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + limit
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = multiprocessing.connection.wait(list(waiting.values()), left)
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    answers[rank] = waiting.pop(rank).recv()
                except (EOFError, OSError):
                    answers[rank] = self._died(rank)
                if answers[rank].summary:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _died(self, rank: int) -> _Answer:
        now = time.monotonic()
        self._processes[rank].join(1)
        return _Answer(summary=f"rank {rank} died with exit code {self._processes[rank].exitcode}", when=now)

    def stack(self, rank: int) -> str:
        """The Python stacks of a rank that does not answer."""
        process, source = self._processes[rank], self._stacks[rank]
        if process.pid is None or not process.is_alive() or not hasattr(signal, "SIGUSR1"):
            return "no stack"
        os.kill(process.pid, signal.SIGUSR1)
        text, patience = b"", 5.0
        while multiprocessing.connection.wait([source], patience):
            part = os.read(source.fileno(), 65536)
            text, patience = text + part, 0.2
            if not part:  # the end: the rank has died of the signal, as it had not started yet
                break
        blocks = [block for block in text.decode().strip().split("\n\n") if "in _exit_with_parent" not in block]
        return "\n\n".join(blocks) or "no stack"

    def close(self) -> None:
        """Let the ranks end by themselves, and kill those that do not."""
        for pipe in self._pipes:
            pipe.close()  # which ends the rank's loop
        deadline = time.monotonic() + 5
        for process in self._processes:
            process.join(max(0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill the processes that this world has started."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        for pipe in (*self._pipes, *self._stacks):
            pipe.close()


def _error(answers: dict[int, _Answer], world: _World, limit: float) -> BaseException:
    """The exception to raise for a call in which a rank raised, died, or did not answer."""
    silent = [rank for rank in range(world.n) if rank not in answers]
    failed = [rank for rank, answer in answers.items() if answer.summary]
    error: BaseException
    if not failed:
        error = TimeoutError(f"no answer after {limit:g} s from {_names(silent)} of {world.n}")
        for rank in silent:
            error.add_note(f"rank {rank}, stack when it was stopped:\n{world.stack(rank)}")
        return error
    rank = min(failed, key=lambda r: (answers[r].aftermath, answers[r].when))
    answer = answers[rank]
    error = RuntimeError(answer.summary) if answer.error is None else _cloudpickle().loads(answer.error)
    if answer.trace:
        error.add_note(f"raised on rank {rank}:\n{answer.trace.rstrip()}")
    if others := [r for r in sorted(failed) if r != rank]:
        error.add_note(f"{_names(others)} failed too: " + "; ".join(answers[r].summary for r in others))
    if silent:
        error.add_note(f"{_names(silent)} had not answered and had to be stopped")
    return error


def _store(port: int, **options: Any) -> Any:
    return dist.TCPStore("127.0.0.1", port, wait_for_workers=False, **options)  # type: ignore[attr-defined]


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _cloudpickle() -> Any:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError as error:
        raise ImportError("a pool of ranks needs cloudpickle: pip install 'fcoll[testing]'") from error


def _warning_filters() -> list[tuple[Any, ...]]:
    """The caller's warning filters, last one first, as arguments for `warnings.filterwarnings`."""

    def pattern(regex: Any) -> str:
        return "" if regex is None else getattr(regex, "pattern", regex)

    filters = reversed(warnings.filters)
    return [(action, pattern(text), kind, pattern(module), line) for action, text, kind, module, line in filters]


# ---- on the ranks


def _serve(rank: int, n: int, backend: str, port: int, pipe: Connection, stack: Connection) -> None:
    """A rank's main function: join the world, then answer calls until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=stack.fileno(), all_threads=True)
    pipe.send(_answer(_join, rank, n, backend, port))
    while True:
        try:
            common, own = pipe.recv_bytes(), pipe.recv_bytes()
        except (EOFError, OSError):
            break
        pipe.send(_answer(_call, common, own))
    if dist.is_initialized():
        dist.destroy_process_group()


def _exit_with_parent() -> None:
    """End this process with its parent, whatever its main thread is blocked in."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _join(rank: int, n: int, backend: str, port: int) -> None:
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # the ranks share the cores
    loopback = "lo" if os.path.exists("/sys/class/net/lo") else "lo0"
    os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    store = _store(port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=n)


def _call(common: bytes, own: bytes) -> Any:
    f, args, filters = pickle.loads(common)
    mine = pickle.loads(own)
    with warnings.catch_warnings():
        if filters:
            warnings.resetwarnings()
        for action, *rest in filters:
            warnings.filterwarnings(action, *rest)
        return f(*mine, *args)


def _answer(f: Callable[..., Any], *args: Any) -> _Answer:
    """Call f and put what it returns or raises into an answer, as bytes that hold no file descriptors."""
    try:
        return _Answer(result=_cloudpickle().dumps(f(*args)))
    except BaseException as error:
        when = time.monotonic()
        summary = traceback.format_exception_only(error)[-1].strip()
        trace = "".join(traceback.format_exception(error.with_traceback(_own_frames(error))))
        aftermath = isinstance(error, dist.DistError) or any(text in str(error) for text in AFTERMATH)
        return _Answer(None, _pickled(error), summary, trace, when, aftermath)


def _own_frames(error: BaseException) -> Any:
    """The traceback without the frames of this module at its top."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _pickled(error: BaseException) -> bytes | None:
    """The exception as bytes, or None where they cannot rebuild it or it must not be raised elsewhere."""
    if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
        return None
    try:
        data: bytes = _cloudpickle().dumps(error)
        rebuilt = _cloudpickle().loads(data)
    except Exception:
        return None
    return data if type(rebuilt) is type(error) and str(rebuilt) == str(error) else None
