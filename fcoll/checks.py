"""`fcoll.checked`: before each collective on a process group, the ranks compare what they are about to do.

Each rank writes a digest of its call to the store that the world was made with; the group's first rank compares, and
writes a verdict that all read. Nothing is sent over the group itself, so that a check cannot break what it checks. Only
after a mismatch do the ranks write out their calls in full. Who waits longer than the limit writes the verdict instead,
and says who is missing: the first verdict counts for all, a rank that comes late included.

What is called under `checked` is checked in its derivatives too, wherever they run: `groups.Layout.check` goes along.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import _torch, recorder
from fcoll.errors import CommunicationError, DisagreementError, fail

Function = TypeVar("Function", bound=Callable[..., Any])
Facts = dict[str, str]
"""What a call is, in words, by what is compared."""


class Check(NamedTuple):
    """How calls are compared; travels as a plain tuple, in `groups.Layout.check`."""

    which: str  # "all", or "first": each line once
    timeout: float
    lines: bool  # whether the ranks must call from the same line
    done: bool = False  # what runs now has been compared


def _from_environment() -> tuple[Any, ...]:
    which = os.environ.get("FCOLL_CHECK", "")
    if which in ("", "0"):
        return ()
    return tuple(
        Check("first" if which == "first" else "all", float(os.environ.get("FCOLL_CHECK_TIMEOUT", "30")), True)
    )


class _State(threading.local):
    def __init__(self) -> None:  # an attribute of the object from the start: Dynamo guards on where it was found
        self.check: tuple[Any, ...] = _from_environment()


_state = _State()


def wanted() -> tuple[Any, ...]:
    """How calls that are made here are to be compared, as a `Check`; () if they are not."""
    return _state.check


class checked:
    """Compare the ranks' calls before each collective on a process group: whoever differs is named, nobody hangs.

    Per rank:
        function, parameters, group, tree, shapes, dtypes, devices, requires_grad and the line of the call are compared,
        for forward calls as well as for those of derivatives

    A context manager, and a decorator. It holds for the calls that this thread makes in it, and for their derivatives,
    wherever these run. Emulated axes need no check and are left alone. `FCOLL_CHECK=1` (or `first`) in the environment
    checks the whole process, with the limit `FCOLL_CHECK_TIMEOUT`.

    Off, it costs nothing. On, each call costs every rank one message of some 100 bytes to the world's store, and a few
    round trips there. All ranks of a group must turn it on and off at the same calls.

    Args:
        which: "all", or "first" to compare each line of the program once per group.
        timeout: how many seconds a rank waits for the others.
        lines: whether the ranks must call from the same line of the program.

    Raises:
        DisagreementError: in the checked calls, on every rank of the group: which ranks differ, in what, at which
            lines; or who has not arrived within the limit, and where everyone is.
        CommunicationError: in the checked calls, if the store is gone.
        ValueError: another `which`, or a limit that is not positive.

    Example:
        >>> @fcoll.checked(timeout=10)
        ... def total(x, group):
        ...     return fcoll.all_reduce(x, group)
        >>> fcoll.vmap(lambda x: total(x, "i"), axis_name="i")(torch.tensor([1, 2]))
        tensor([3, 3])
    """

    def __init__(self, which: str = "all", *, timeout: float = 30.0, lines: bool = True) -> None:
        if which not in ("all", "first"):
            fail("value", 'checked: which is "all" or "first", got {!r}', which)
        if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout > 0:
            fail("value", "checked: timeout is a positive number of seconds, got {!r}", timeout)
        self._check: tuple[Any, ...] = (which, float(timeout), bool(lines), False)
        self._before: list[tuple[Any, ...]] = []

    def __enter__(self) -> None:
        self._before.append(_state.check)
        _state.check = self._check

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _state.check = self._before.pop()

    def __call__(self, f: Function) -> Function:
        """f, with its calls checked."""
        which, timeout, lines, _ = self._check

        @functools.wraps(f)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with checked(which, timeout=timeout, lines=lines):
                return f(*args, **kwargs)

        return wrapped  # type: ignore[return-value]


# ---- what is compared


def whole(function: str, leaves: list[Any], spec: Any, layout: Any) -> Any:
    """Compare a call with its whole tree, and return the layout that its collectives go on with.

    The caller is the constructor of a `Call`, and its caller the public function, whose arguments are the parameters.
    While something traces, nothing can be compared: then each collective is, by `each`.
    """
    if torch.compiler.is_compiling() or any(_torch.tracing(leaf) for leaf in leaves):
        return layout
    check = Check(*layout.check)
    frame = sys._getframe(2)
    count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
    given = {name: frame.f_locals[name] for name in frame.f_code.co_varnames[:count] if name not in ("tree", "group")}
    grads = _needs_gradients(given) and torch.is_grad_enabled()

    def facts(name: Callable[[int], str]) -> Facts:
        found = {name: repr(value) for name, value in given.items()}
        found |= {"the structure of the tree": str(spec)} if spec is not None else {}
        return found | {name(i): _tensor(leaf, grads) for i, leaf in enumerate(leaves)}

    def paths() -> Facts:
        names = ["tree"] if spec is None else [str(accessor.codify("tree")) for accessor in spec.accessors()]
        found = facts(names.__getitem__)
        found.pop("the structure of the tree", None)  # the paths tell
        return found

    _compare(layout.process, layout.order, check, function, recorder.source(), "", lambda: facts(str), paths)
    return layout._replace(check=tuple(check._replace(done=True)))


def each(name: str, x: Tensor, params: tuple[Any, ...], layout: Any) -> Tensor:
    """Compare one collective of one tensor, and return the tensor; while something traces, the graph will."""
    check = Check(*layout.check)
    if check.done:
        return x
    text = f"{name}{params}".replace(",)", ")")
    place, phase = recorder.source(), "backward" if recorder.backward() else ""
    arguments = (layout.process, list(layout.order), check.which, check.timeout, check.lines, text, place, phase)
    if _torch.tracing(x):
        checked: Tensor = torch.ops.fcoll.check(x, *arguments)
        return checked
    _each(x, *arguments)
    return x


def _each(
    x: Tensor,
    process: str,
    order: list[int],
    which: str,
    timeout: float,
    lines: bool,
    text: str,
    place: str,
    phase: str,
) -> None:
    facts = {"what is sent": _tensor(x, False)}
    _compare(process, order, Check(which, timeout, lines), text, place, phase, lambda: facts, lambda: facts)


@torch.library.custom_op("fcoll::check", mutates_args=())
def _check(
    x: Tensor,
    process: str,
    order: list[int],
    which: str,
    timeout: float,
    lines: bool,
    text: str,
    place: str,
    phase: str,
) -> Tensor:
    """x, once the ranks have compared the collective that takes it: graphs keep the two in order."""
    _each(x, process, order, which, timeout, lines, text, place, phase)
    return x.clone()


@_check.register_fake
def _(
    x: Tensor,
    process: str,
    order: list[int],
    which: str,
    timeout: float,
    lines: bool,
    text: str,
    place: str,
    phase: str,
) -> Tensor:
    return x.clone()


def derivative_of(layout: Any) -> Any:
    """The layout for the derivatives of a collective, which have not been compared."""
    return layout._replace(check=(*layout.check[:3], False))


def _needs_gradients(given: dict[str, Any]) -> bool:
    """Whether the backward pass communicates, so that all ranks must make it or none."""
    if given.get("op") in ("any", "all"):
        return False
    return not given.get("invariant") or given.get("op") in ("max", "min", "prod")


def _tensor(x: Tensor, grads: bool) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{dtype}{[int(size) for size in x.shape]} on {x.device.type}" + (
        _GRADIENT if grads and x.requires_grad else ""
    )


# ---- how it is compared


def _compare(
    process: str,
    order: Sequence[int],
    check: Check,
    function: str,
    place: str,
    phase: str,
    digested: Callable[[], Facts],
    written: Callable[[], Facts],
) -> None:
    """Return if all ranks of the process group make the same call, raise on all if not.

    `digested` are the facts that must be the same, `written` the same for the eye, with the paths of leaves.
    """
    channel = _channel(process)
    if channel is None:
        return
    if check.which == "first":
        site = f"{function} {place} {phase}"
        if site in channel.seen:
            return
        channel.seen.add(site)
    common = {"function": function, "phase": phase or "forward", "line": place if check.lines else ""}
    common["ranks of the group"] = str([channel.ranks[i] for i in order or range(len(channel.ranks))])
    digest = hashlib.blake2b(json.dumps([common, digested()]).encode(), digest_size=16).hexdigest()
    where = f"{phase} of {place}: {function}" if phase else f"{place}: {function}"
    ranks = {"ranks of the group": common["ranks of the group"]}
    channel.agree(digest, where, lambda: {"call": where} | ranks | written(), check.timeout)


class _Channel:
    """What the ranks of one process group say to each other, by way of the world's store.

    Keys of call k: `k/r` what rank r is about to do, `k/verdict` whether all do the same, and after a mismatch
    `k/r/full` and `k/full`. Each rank removes its own once the verdict is there, the first rank the verdict before.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name, self.here = name, group.rank()
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.seen: set[str] = set()
        self.count = 0
        self.stale: list[str] = []  # keys that the first rank wrote and nobody needs once all have come further
        clone = _torch.default_store().clone()  # of its own, so that groups in different threads do not wait in line
        self.store = dist.PrefixStore(f"fcoll/{name}/{'_'.join(map(str, self.ranks))}", clone)
        self.positions = dist.PrefixStore("fcoll/at", clone)
        self.lock = threading.Lock()

    def agree(self, digest: str, where: str, describe: Callable[[], Facts], timeout: float) -> None:
        """One call of this rank: return when all make it, raise DisagreementError if not."""
        with self.lock:
            self.count += 1
            own = f"{self.count}/{self.here}"
            try:
                self.positions.set(str(self.ranks[self.here]), f"{where}, call {self.count} of {self._label()}")
                self.store.set(own, json.dumps([digest, where]))
                verdict = self._verdict(timeout)
                if verdict == DIFFER:
                    verdict = self._explained(describe, timeout)
                self.store.delete_key(own)
            except dist.DistNetworkError as error:
                raise CommunicationError(
                    f"{where}: the store of torch.distributed, by which the ranks of {self._label()} compare their "
                    f"calls, has gone; the process that holds it, often rank 0, has ended"
                ) from error
        if verdict != SAME:
            raise DisagreementError(verdict)

    def _verdict(self, timeout: float) -> str:
        """The verdict on this call, whoever gives it."""
        key = f"{self.count}/verdict"
        try:
            if self.here:
                return self._read(self.store, key, timeout)
            if self.store.check([key]):  # the others have given up
                return self._read(self.store, key, timeout)
            calls = self._calls(range(len(self.ranks)), timeout)
            while self.stale:
                self.store.delete_key(self.stale.pop())
            return self._decide(key, SAME if len({digest for digest, _ in calls.values()}) == 1 else DIFFER)
        except dist.DistStoreError:
            return self._decide(key, self._missing(timeout))

    def _explained(self, describe: Callable[[], Facts], timeout: float) -> str:
        """How the calls differ."""
        own, key = f"{self.count}/{self.here}/full", f"{self.count}/full"
        self.store.set(own, json.dumps(describe()))
        try:
            if self.here:
                return self._read(self.store, key, timeout)
            written = [json.loads(self._read(self.store, f"{self.count}/{r}/full", timeout)) for r in self._all()]
            return self._decide(key, self._differences(written))
        except dist.DistStoreError:
            return self._decide(key, f"the ranks of {self._label()} disagree on call {self.count}; not all say in what")
        finally:
            self.store.delete_key(own)

    def _decide(self, key: str, verdict: str) -> str:
        """The verdict that counts: this one, unless there is one."""
        self.stale.append(key)
        return str(self.store.compare_set(key, "", verdict).decode())

    def _read(self, store: Any, key: str, timeout: float) -> str:
        store.wait([key], timedelta(seconds=timeout))
        return str(store.get(key).decode())

    def _all(self) -> range:
        return range(len(self.ranks))

    def _calls(self, members: Sequence[int], timeout: float) -> dict[int, tuple[str, str]]:
        keys = [f"{self.count}/{r}" for r in members]
        self.store.wait(keys, timedelta(seconds=timeout))
        return {r: tuple(json.loads(text)) for r, text in zip(members, self.store.multi_get(keys), strict=True)}

    def _label(self) -> str:
        return f"process group {self.name!r} of {len(self.ranks)} ranks"

    def _missing(self, timeout: float) -> str:
        """Who has not come, and where everyone is."""
        here = [r for r in self._all() if self.store.check([f"{self.count}/{r}"])]
        calls = self._calls(here, timeout)
        absent = [r for r in self._all() if r not in here]
        who = _names([self.ranks[r] for r in absent]) if absent else f"rank {self.ranks[0]}, which compares,"
        lines = [f"after {timeout:g} s, {who} had not come to call {self.count} of {self._label()}"]
        for r in absent:
            rank = str(self.ranks[r])
            last = self._read(self.positions, rank, timeout) if self.positions.check([rank]) else "no checked call yet"
            lines.append(f"  rank {rank} was last seen at {last}")
        lines += [f"  rank {self.ranks[r]} waits at {where}" for r, (_, where) in calls.items()]
        return "\n".join(lines)

    def _differences(self, written: list[Facts]) -> str:
        lines = [f"the ranks of {self._label()} disagree on call {self.count}"]
        for what in dict.fromkeys(what for facts in written for what in facts):
            by_value: dict[str, list[int]] = {}
            for r, facts in enumerate(written):
                by_value.setdefault(facts.get(what, "missing"), []).append(self.ranks[r])
            if len(by_value) > 1 or what == "call":
                lines.append(f"  {what}: " + "; ".join(f"{_has(ranks)} {value}" for value, ranks in by_value.items()))
        if any(_GRADIENT in line for line in lines):
            lines.append("  a leaf must require a gradient on every rank or on none: x.requires_grad_() makes it")
        return "\n".join(lines)


SAME, DIFFER = "same", "differ"
_GRADIENT = " that requires a gradient"

_channels: weakref.WeakKeyDictionary[Any, dict[str, _Channel | None]] = weakref.WeakKeyDictionary()  # by world, name
_making = threading.Lock()


def _channel(name: str) -> _Channel | None:
    """The channel of a process group; None where there is nobody to compare with."""
    with _making:
        channels = _channels.setdefault(_torch.world(), {})
        if name not in channels:
            group = _torch.process_group(name)
            alone = group.size() == 1 or dist.get_backend(group) == "fake"
            channels[name] = None if alone else _Channel(name, group)
        return channels[name]


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _has(ranks: list[int]) -> str:
    return f"{_names(ranks)} {'has' if len(ranks) == 1 else 'have'}"


# ---- what the backend reports


def explain(error: RuntimeError, name: str, x: Tensor, layout: Any) -> None:
    """Raise what names the collective and the group, if an error is the backend's, which names neither."""
    if _torch.tracing(x) or not (type(error) is RuntimeError or isinstance(error, dist.DistError)):
        return
    phase = "the backward pass of " if recorder.backward() else ""
    raise CommunicationError(
        f"{name} over {layout.label} of {layout.sizes[0]} ranks, in {phase}{recorder.source()}, failed: {error}. "
        "A rank has died, is stuck, or makes other calls than the others; fcoll.checked() tells which"
    ) from error
