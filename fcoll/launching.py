"""`fcoll.launch`: a function on local ranks, its results by rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import torch

from fcoll._pool import Ranks
from fcoll.errors import check_callable, fail

__all__ = ["launch"]

P = ParamSpec("P")
T = TypeVar("T")


@overload
def launch(
    f: Callable[..., T], nproc: int, *args: Any, backend: str | None = None, timeout: float | None = None
) -> list[T]: ...


@overload
def launch(
    *, nproc: int, backend: str | None = None, timeout: float | None = None
) -> Callable[[Callable[P, T]], Callable[P, list[T]]]: ...


def launch(
    f: Callable[..., Any] | None = None,
    nproc: int = 0,
    *args: Any,
    backend: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Run a function on local ranks, processes that live for this call, and return each rank's result.

    Per rank:
        y_r = f(*args), in a process where `fcoll.WORLD` is a group of nproc ranks

    It is for notebooks, tests and single machines; `torchrun` starts whole programs. On every rank torch.distributed is
    initialised, and RANK, LOCAL_RANK, WORLD_SIZE and the rest of the environment are as torchrun and the caller set
    them. Ranks talk over the loopback interface only, share the caller's number of threads, and print where the caller
    prints. f, args and results travel by cloudpickle (the extra `fcoll[launch]`): functions of a notebook or a script,
    lambdas and closures work, and a script needs no `if __name__ == "__main__":`.

    As a decorator, `@fcoll.launch(nproc=4)` makes a function that runs on ranks whenever it is called.

    Whatever ends the call, no process outlives it: a result, an error, a rank that dies, the timeout, Ctrl-C.

    Args:
        f: the function of one rank.
        nproc: how many ranks.
        *args: its arguments, the same on every rank.
        backend: a backend of torch.distributed; by default nccl if there are nproc CUDA devices, of which rank r uses
            device r, else gloo.
        timeout: the limit in seconds; by default there is none.

    Raises:
        ValueError: nproc is not positive.
        TypeError: f is no function, or nproc no integer.
        ImportError: cloudpickle is not installed.
        TimeoutError: some ranks have not answered in time: which ones, with their stacks in notes.
        RuntimeError: a rank died, or its exception could not be rebuilt here.
        Exception: what f raised on the rank that failed first, with that rank and its traceback in a note, and other
            ranks that failed in another.

    Example:
        >>> fcoll.launch(lambda x: fcoll.all_reduce(x, fcoll.WORLD), 2, torch.tensor([1.0, 2.0]))
        [tensor([2., 4.]), tensor([2., 4.])]
    """
    if type(nproc) is not int:
        fail("type", "launch: nproc is an integer, got {}", type(nproc).__name__)
    if nproc < 1:
        fail("value", "launch: nproc is the number of ranks, at least 1, got {}", nproc)
    if f is None:
        return functools.partial(_decorate, nproc, backend, timeout)
    check_callable("launch", f)
    if backend is None:
        backend = "nccl" if torch.cuda.device_count() >= nproc else "gloo"
    limit = math.inf if timeout is None else timeout
    with Ranks(nproc, backend, limit, threads=max(1, torch.get_num_threads() // nproc)) as ranks:
        return ranks.run(f, *args)


def _decorate(nproc: int, backend: str | None, timeout: float | None, f: Callable[P, T]) -> Callable[P, list[T]]:
    check_callable("launch", f)

    @functools.wraps(f)
    def launched(*args: P.args, **kwargs: P.kwargs) -> list[T]:
        return launch(functools.partial(f, *args, **kwargs), nproc, backend=backend, timeout=timeout)

    return launched
