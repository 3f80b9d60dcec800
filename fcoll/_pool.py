"""A pool of local processes that are the ranks of one torch.distributed world and live from call to call.

This is the parent's side; `_rank.py` is that of a rank.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch.distributed as dist

from fcoll import _rank
from fcoll._rank import Answer, Pipes, Place

__all__ = ["Ranks"]

T = TypeVar("T")

START_LIMIT = 120.0  # seconds for all processes to start and to join the world
GRACE = 2.0  # seconds that the other ranks are given to answer once one has failed
# what the fork server imports, once for all pools
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "fcoll._rank"]


class Ranks:
    """A pool of `n` local processes, the ranks of one `torch.distributed` world, kept from call to call.

    The processes start at the first `run` and end at `close` (or at the end of a `with` block). They speak
    over the loopback interface only, and the port is one that the system has handed out, so pools cannot
    collide. Where the platform has a fork server, torch is imported once for all pools, and starting a pool
    takes a fraction of a second. They have this process's environment as it is when they start, with `RANK`,
    `LOCAL_RANK` and `WORLD_SIZE` set as torchrun does. What they print appears here.

    Args:
        n: how many ranks.
        backend: a backend of `torch.distributed`. With NCCL, rank r uses CUDA device r.
        timeout: the limit of one `run`, in seconds, unless the call gives its own.
        threads: how many threads torch uses in each.

    Raises:
        ValueError: `n` is not positive.
        ImportError: cloudpickle, which the extra `fcoll[launch]` installs, is missing.

    Example:
        >>> with Ranks(2) as ranks:
        ...     ranks.run(lambda x: fcoll.all_reduce(x, fcoll.WORLD), per_rank=[(1.0,), (2.0,)])
        [tensor(3.), tensor(3.)]
    """

    def __init__(self, n: int, backend: str = "gloo", timeout: float = 60.0, threads: int = 1) -> None:
        if n < 1:
            raise ValueError(f"a pool needs at least one rank, got n={n}")
        self.n = n
        self.backend = backend
        self.timeout = timeout
        self.threads = threads
        self._pickle = _rank.cloudpickle()
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
        and results travel by cloudpickle: closures, lambdas, classes made in a function and what a script or a
        notebook defines work; what an importable module defines is imported by name on the rank.

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
            self._world = _World(self.n, self.backend, self.threads)
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
    """One generation of processes."""

    def __init__(self, n: int, backend: str, threads: int) -> None:
        self.n = n
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        context.set_forkserver_preload(PRELOAD)  # heard by a fork server that has yet to start
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        # the store outlives every rank, so that its end is never what a rank's failure looks like
        self._store = _rank.store(port, is_master=True, master_listen_fd=listener.detach())
        self._pipes: list[Connection] = []
        self._stacks: list[Connection] = []
        self._outputs: dict[Connection, tuple[str, codecs.IncrementalDecoder]] = {}  # → "stdout" or "stderr"
        self._processes: list[multiprocessing.process.BaseProcess] = []
        try:
            with _uninterrupted(), _main_not_run_again():
                for rank in range(n):
                    place = Place(rank, n, backend, port, threads, dict(os.environ))
                    self._start(place, context)
            answers = self._collect(START_LIMIT)
            if len(answers) < n or any(a.summary for a in answers.values()):
                raise _error(answers, self, START_LIMIT)
        except BaseException:
            self.kill()
            raise

    def _start(self, place: Place, context: Any) -> None:
        pipe, theirs = context.Pipe()
        ends = [context.Pipe(duplex=False) for _ in range(3)]
        (stack, _), *outputs = ends
        pipes = Pipes(theirs, *(end for _, end in ends))
        process = context.Process(
            target=_rank.serve,
            args=(place, pipes),
            name=f"fcoll-rank-{place.rank}",
            daemon=True,
        )
        process.start()
        for end in pipes:
            end.close()
        self._pipes.append(pipe)
        self._stacks.append(stack)
        for name, (output, _) in zip(("stdout", "stderr"), outputs, strict=True):
            self._outputs[output] = name, codecs.getincrementaldecoder("utf-8")("replace")
        self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def alive(self) -> bool:
        """Whether the processes wait for a call; the pipe of one that has died is at its end."""
        return all(process.is_alive() for process in self._processes) and not any(pipe.poll() for pipe in self._pipes)

    def ask(self, common: bytes, own: list[bytes], limit: float) -> dict[int, Answer]:
        """Send one call to every rank and return the answers that came within the limit."""
        for pipe, mine in zip(self._pipes, own, strict=True):
            try:
                pipe.send_bytes(common)
                pipe.send_bytes(mine)
            except OSError:
                pass  # the rank has died, which `_collect` sees
        return self._collect(limit)

    def _collect(self, limit: float) -> dict[int, Answer]:
        waiting = dict(enumerate(self._pipes))
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + limit
        while waiting and (left := deadline - time.monotonic()) > 0:
            patience = None if math.isinf(left) else left
            ready = multiprocessing.connection.wait([*waiting.values(), *self._outputs], patience)
            self._show(ready)
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    answers[rank] = waiting.pop(rank).recv()
                except (EOFError, OSError):
                    answers[rank] = self._died(rank)
                if answers[rank].summary:
                    deadline = min(deadline, time.monotonic() + GRACE)
        self._show(multiprocessing.connection.wait(list(self._outputs), 0))  # what came before the last answer
        return answers

    def _show(self, ready: Sequence[object]) -> None:
        """Print what ranks have printed."""
        for output in [output for output in self._outputs if output in ready]:
            name, decoder = self._outputs[output]
            data = os.read(output.fileno(), 1 << 16)  # no pipe holds more
            file = getattr(sys, name)
            file.write(decoder.decode(data, final=not data))
            file.flush()
            if not data:  # the rank has ended
                del self._outputs[output]
                output.close()

    def _died(self, rank: int) -> Answer:
        now = time.monotonic()
        self._processes[rank].join(1)
        code = self._processes[rank].exitcode
        how = f"with exit code {code}" if code is None or code >= 0 else f"of {signal.Signals(-code).name}"
        return Answer(summary=f"rank {rank} died {how}", when=now)

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
        """Kill the processes that this world has started, and those that they have."""
        with _uninterrupted():
            for process in self._processes:
                if process.is_alive():
                    process.kill()
                if process.pid is not None and hasattr(os, "killpg"):
                    with contextlib.suppress(ProcessLookupError):  # where nothing is left, or not begun
                        os.killpg(process.pid, signal.SIGKILL)
            for process in self._processes:
                process.join()
            for pipe in (*self._pipes, *self._stacks, *self._outputs):
                pipe.close()


def _error(answers: dict[int, Answer], world: _World, limit: float) -> BaseException:
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
    error = RuntimeError(answer.summary) if answer.error is None else _rank.cloudpickle().loads(answer.error)
    if answer.trace:
        error.add_note(f"raised on rank {rank}:\n{answer.trace.rstrip()}")
    if others := [r for r in sorted(failed) if r != rank]:
        error.add_note(f"{_names(others)} failed too: " + "; ".join(answers[r].summary for r in others))
    if silent:
        error.add_note(f"{_names(silent)} had not answered and had to be stopped")
    return error


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _warning_filters() -> list[tuple[Any, ...]]:
    """The caller's warning filters, last one first, as arguments for `warnings.filterwarnings`."""

    def pattern(regex: Any) -> str:
        return "" if regex is None else getattr(regex, "pattern", regex)

    filters = reversed(warnings.filters)
    return [(action, pattern(text), kind, pattern(module), line) for action, text, kind, module, line in filters]


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end: a process whose start or end it cut short would be nobody's to kill."""
    if threading.current_thread() is not threading.main_thread():  # which is never interrupted
        yield
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    masks = hasattr(signal, "pthread_sigmask")
    if masks:  # for the fork server, which inherits it, and hears Ctrl-C as well
        importlib.import_module("multiprocessing.resource_tracker").ensure_running()  # it would lift the mask
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if masks:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if held:
            signal.raise_signal(signal.SIGINT)


_hidden = threading.Lock()


@contextlib.contextmanager
def _main_not_run_again() -> Iterator[None]:
    """Keep multiprocessing from running the caller's script on every rank: cloudpickle sends what they need of it."""
    main: Any = sys.modules["__main__"]
    with _hidden:
        spec, file = getattr(main, "__spec__", None), vars(main).pop("__file__", None)
        main.__spec__ = None
        try:
            yield
        finally:
            main.__spec__ = spec
            if file is not None:
                main.__file__ = file
