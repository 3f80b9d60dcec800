"""`fcoll.compile`: torch.compile with the settings that programs of collectives want."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

import torch

from fcoll import _torch, backends, guards, marks
from fcoll.errors import check_callable, fail, kind_of

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def compile(f: Function, *, optimize: bool | None = None, **options: Any) -> Function: ...
@overload
def compile(f: None = None, *, optimize: bool | None = None, **options: Any) -> Callable[[Function], Function]: ...
def compile(f: Any = None, *, optimize: bool | None = None, **options: Any) -> Any:
    """torch.compile for functions with collectives: one whole graph, usable inside eager transforms, cacheable.

    It differs from torch.compile in five things. Messages that are provably needless are not sent, and others travel
    together, by `fcoll.optimize`: in programs of `fcoll.shard_map` over all processes. `fullgraph=True` is the default,
    so that nothing runs uncompiled unnoticed. Called inside an active torch.func transform, where torch refuses, it
    runs f eagerly, with one warning: compile around the transform instead. The caches of AOTAutograd and inductor,
    which torch bypasses for graphs that hold functions it does not know, serve the next start of the program too. And a
    call does not verify again that the code of fcoll, optree and torch is what it was when it was traced, which would
    take longer than a small collective.

    Args:
        f: the function. Without it, a decorator is returned.
        optimize: whether to drop and merge messages. None: of graphs that all ranks are sure to compile together,
            those that call a `shard_map` over all processes, and with the backends inductor, aot_eager and those of
            aot_autograd. True: of every graph; then all ranks of the world must compile the same functions in the same
            order, and nothing is cached. False: of none.
        options: of torch.compile.

    Returns:
        The compiled function.

    Example:
        >>> @fcoll.compile(backend="aot_eager")
        ... def double(x):
        ...     return fcoll.vmap(lambda x: fcoll.all_reduce(x, "i"), axis_name="i")(x)
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """
    if f is None:
        return functools.partial(compile, optimize=optimize, **options)
    check_callable("compile", f)
    if optimize is not None and not isinstance(optimize, bool):
        fail("type", "compile: optimize is True, False or None, got {}", kind_of(optimize))
    _torch.mark_cacheable(_NAMES, _digest())
    given = options.get("options") or {}
    if options.get("backend", "inductor") == "inductor":  # torch takes either a mode or options
        given = {**_torch.mode_options(options.pop("mode", None)), **given}
    if options.get("mode") is None:
        options["options"] = {"guard_filter_fn": guards.needed, **given}
    marking = optimize is not False and backends.optimize_first(options, bool(optimize), _digest())
    compiled: Any = torch.compile(f, **{"fullgraph": True, **options})
    name = getattr(f, "__name__", type(f).__name__)
    warned: list[bool] = []

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what traces here has to optimise
            return compiled(*args, **kwargs)
        if _torch.level() == 0:
            if not marking:
                return compiled(*args, **kwargs)
            with marks.marked():
                return compiled(*args, **kwargs)
        if not warned:
            warned.append(True)
            warnings.warn(
                f"fcoll.compile: {name} runs uncompiled inside a torch.func transform; compile around the transform",
                stacklevel=2,
            )
        return f(*args, **kwargs)

    return call


_NAMES = (
    "fcoll.bind._apply",
    "fcoll.errors.fail",
    "fcoll.maps.replicated",
    "fcoll.p2p._no_forward_mode",
    "fcoll.p2p._recv",
    "fcoll.p2p._send",
    "fcoll.p2p._tie",
    "fcoll.p2p._wait",
    "fcoll.passage._begin_in_graph",
    "fcoll.passage._end_in_graph",
    "fcoll.replication._in_graph",
    "fcoll.regions._scaled",
    "fcoll.sharding.share",
)
"""The functions that graphs hold by name."""


@functools.cache
def _digest() -> str:
    """Changes with this package: a graph that an older one made must not be found."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
