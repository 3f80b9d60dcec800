"""What a process of a pool does: join the world, then answer calls until its pipe closes. See `_pool.py`."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

AFTERMATH = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "gloo/transport",
    "A rank has died, is stuck",  # of a CommunicationError
)


class Answer(NamedTuple):
    """What a rank has to say about one call."""

    result: bytes | None = None  # the pickled result
    error: bytes | None = None  # the pickled exception, where it can be rebuilt
    summary: str = ""  # the exception's type and text; empty if there was none
    trace: str = ""
    when: float = 0.0
    aftermath: bool = False  # the exception only reports that another rank has gone


class Place(NamedTuple):
    """Which rank a process is, and of what."""

    rank: int
    n: int
    backend: str
    port: int  # of the store, on the loopback interface
    threads: int  # for torch
    environment: dict[str, str]


class Pipes(NamedTuple):
    """A rank's ends of its pipes."""

    calls: Connection
    stack: Connection
    out: Connection
    err: Connection


def cloudpickle() -> Any:
    """The module, which is imported when somebody needs it."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError as error:
        raise ImportError("local ranks need cloudpickle: pip install 'fcoll[launch]'") from error


def store(port: int, **options: Any) -> Any:
    """The store through which the ranks find each other."""
    return dist.TCPStore("127.0.0.1", port, wait_for_workers=False, **options)  # type: ignore[attr-defined]


def serve(place: Place, pipes: Pipes) -> None:
    """A rank's main function."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    if hasattr(os, "setsid"):  # as under torchrun: its own share of the cores, and a group that can be killed as one
        os.setsid()
    multiprocessing.current_process().daemon = False  # it may have children, such as those of a DataLoader
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    for stream, file, pipe in ((1, sys.stdout, pipes.out), (2, sys.stderr, pipes.err)):
        os.dup2(pipe.fileno(), stream)
        pipe.close()
        file.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=pipes.stack.fileno(), all_threads=True)
    _tell(pipes.calls, _answer(_join, place))
    while True:
        try:
            common, own = pipes.calls.recv_bytes(), pipes.calls.recv_bytes()
        except (EOFError, OSError):
            break
        _tell(pipes.calls, _answer(_call, common, own))
    if dist.is_initialized():
        dist.destroy_process_group()


def _tell(pipe: Connection, answer: Answer) -> None:
    for file in (sys.stdout, sys.stderr):  # what was printed is there before the answer
        file.flush()
    pipe.send(answer)


def _exit_with_parent() -> None:
    """End this process and its own with its parent, whatever its main thread is blocked in."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    if hasattr(os, "killpg"):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _join(place: Place) -> None:
    rank, n, port = place.rank, place.n, place.port
    loopback = "lo" if os.path.exists("/sys/class/net/lo") else "lo0"
    os.environ.clear()
    os.environ.update(
        place.environment,
        RANK=f"{rank}",
        WORLD_SIZE=f"{n}",
        LOCAL_RANK=f"{rank}",
        LOCAL_WORLD_SIZE=f"{n}",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=f"{port}",
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the parent's
        GLOO_SOCKET_IFNAME=loopback,
        NCCL_SOCKET_IFNAME=loopback,
    )
    torch.set_num_threads(place.threads)
    torch._inductor.config.compile_threads = 1  # the ranks share the cores
    if "nccl" in place.backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(place.backend, store=store(port, is_master=False), rank=rank, world_size=n)


def _call(common: bytes, own: bytes) -> Any:
    f, args, filters = pickle.loads(common)
    mine = pickle.loads(own)
    _show_globals(f)
    with warnings.catch_warnings():
        if filters:
            warnings.resetwarnings()
        for action, *rest in filters:
            warnings.filterwarnings(action, *rest)
        return f(*mine, *args)


def _show_globals(f: Any) -> None:
    """Let torch.compile find the globals of a function of the caller's `__main__`: it looks for them in that module."""
    while not hasattr(f, "__globals__"):
        inner = getattr(f, "__wrapped__", getattr(f, "func", getattr(f, "__func__", None)))
        if inner is None:
            return
        f = inner
    if f.__globals__.get("__name__") == "__main__":
        names = {name: value for name, value in f.__globals__.items() if not name.startswith("__")}
        vars(sys.modules["__main__"]).update(names)


def _answer(f: Callable[..., Any], *args: Any) -> Answer:
    """Call f and put what it returns or raises into an answer, as bytes that hold no file descriptors."""
    try:
        return Answer(result=cloudpickle().dumps(f(*args)))
    except BaseException as error:
        when = time.monotonic()
        summary = traceback.format_exception_only(error)[-1].strip()
        trace = "".join(traceback.format_exception(error.with_traceback(_own_frames(error))))
        aftermath = isinstance(error, dist.DistError) or any(text in str(error) for text in AFTERMATH)
        return Answer(None, _pickled(error), summary, trace, when, aftermath)


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
        data: bytes = cloudpickle().dumps(error)
        rebuilt = cloudpickle().loads(data)
    except Exception:
        return None
    return data if type(rebuilt) is type(error) and str(rebuilt) == str(error) else None
