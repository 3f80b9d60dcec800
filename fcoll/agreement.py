"""How the ranks of a process group compare their calls, before they make them: by way of the world's store.

Each rank writes a digest of its call to the store. The group's first rank compares, and writes a verdict that all read.
Nothing is sent over the group itself, so that a check cannot break what it checks. Only after a mismatch do the ranks
write out their calls in full. Who waits longer than the limit writes the verdict instead, and says who is missing: the
first verdict counts for all, a rank that comes late included.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from fcoll import _torch
from fcoll.errors import CommunicationError, DisagreementError, explained

Facts = dict[str, str]
"""What a call is, in words, by what is compared."""

GRADIENT = " that requires a gradient"
SAME, DIFFER = "same", "differ"


class Site(NamedTuple):
    """A call on a process group, and how it is to be compared."""

    process: str  # the name of the process group
    order: Sequence[int]  # see engine.Process
    which: str  # see checks.Check, also for the next two
    timeout: float
    lines: bool
    function: str
    place: str  # file and line
    phase: str  # "backward" in a derivative, else ""

    def __str__(self) -> str:
        return f"backward of {self.place}: {self.function}" if self.phase else f"{self.place}: {self.function}"


Sizes = tuple[list[int], list[int]]
"""What a rank sends to each rank and receives from each; nothing for the latter if it does not say."""


class _Call(NamedTuple):
    """What each rank writes."""

    digest: str
    where: str
    sizes: Sizes | None


def compare(site: Site, sizes: Sizes | None, digested: Callable[[], Facts], written: Callable[[], Facts]) -> None:
    """Return if all ranks of the process group make the same call, raise on all if not.

    Args:
        site: this rank's call.
        sizes: what is compared crosswise.
        digested: the facts that must be the same.
        written: the same for the eye.
    """
    channel, connections = _channel(site.process)
    if channel is None:
        return
    if site.which == "first":
        if str(site) in channel.seen:
            return
        channel.seen.add(str(site))
    ranks = {"ranks of the group": str([channel.ranks[i] for i in site.order or channel.all()])}
    common = {"function": site.function, "phase": site.phase, "line": site.place if site.lines else ""} | ranks
    digest = hashlib.blake2b(json.dumps([common, digested()]).encode(), digest_size=16).hexdigest()
    call = _Call(digest, str(site), sizes)
    channel.agree(call, site, lambda: {"call": str(site)} | ranks | written(), connections)


class _Channel:
    """What the ranks of one process group say to each other.

    Keys of call k: `k/r` what rank r is about to do, `k/verdict`, after a mismatch `k/r/full` and `k/full`. They are
    kept until all ranks have come to a later call; then each removes what is its own, the first rank the verdicts.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.here = group.rank()
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.label = f"process group {name!r} of {len(self.ranks)} ranks"
        self.seen: set[str] = set()
        self.count = 0
        self.stale: list[str] = []  # the keys to remove
        self.lock = threading.Lock()
        self.prefix = f"fcoll/{name}/{'_'.join(map(str, self.ranks))}"
        self.store: Any = None  # during a call
        self.positions: Any = None

    def all(self) -> range:
        """The ranks, as the process group counts them."""
        return range(len(self.ranks))

    def agree(self, call: _Call, site: Site, describe: Callable[[], Facts], connections: list[Any]) -> None:
        """One call of this rank: return when all make it, raise DisagreementError if not."""
        with self.lock:
            self.count += 1
            try:
                connection = connections.pop() if connections else _torch.default_store().clone()
                connection.set_timeout(timedelta(seconds=site.timeout))
                self.store = dist.PrefixStore(self.prefix, connection)  # type: ignore[attr-defined]
                self.positions = dist.PrefixStore("fcoll/at", connection)  # type: ignore[attr-defined]
                verdict = self._agreed(call, site, describe)
                connections.append(connection)
            except dist.DistNetworkError as error:
                text = (
                    f"{site}: the store of torch.distributed, by which the ranks of {self.label} compare their calls, "
                    "has gone; the process that holds it, often rank 0, has ended"
                )
                raise explained(CommunicationError(text), "A rank that has died, is stuck or is late") from error
        if verdict != SAME:
            raise explained(DisagreementError(verdict), "Ranks that disagree")

    def _agreed(self, call: _Call, site: Site, describe: Callable[[], Facts]) -> str:
        """SAME, or what is wrong."""
        own = f"{self.count}/{self.here}"
        self.positions.set(str(self.ranks[self.here]), f"{site}, call {self.count} of {self.label}")
        self.store.set(own, json.dumps(call))
        verdict = self._verdict(site)
        if verdict in (SAME, DIFFER):  # all have come here
            for key in self.stale:
                self.store.delete_key(key)
            self.stale.clear()
        self.stale += [own] if self.here else [own, f"{self.count}/verdict"]
        return self._explanation(describe, site) if verdict == DIFFER else verdict

    def _verdict(self, site: Site) -> str:
        """SAME, DIFFER, or that somebody is missing."""
        key = f"{self.count}/verdict"
        try:
            if self.here:
                return self._read(key)
            calls = self._calls()
            same = len({call.digest for call in calls}) == 1 and not self._crossed(calls, site)
            return self._decide(key, SAME if same else DIFFER)
        except dist.DistStoreError:
            return self._decide(key, self._missing(site))

    def _explanation(self, describe: Callable[[], Facts], site: Site) -> str:
        """How the calls differ."""
        own, key = f"{self.count}/{self.here}/full", f"{self.count}/full"
        self.store.set(own, json.dumps(describe()))
        self.stale += [own] if self.here else [own, key]
        try:
            if self.here:
                return self._read(key)
            facts = [json.loads(self._read(f"{self.count}/{r}/full")) for r in self.all()]
            return self._decide(key, "\n".join([*self._differences(facts), *self._crossed(self._calls(), site)]))
        except dist.DistStoreError:
            return self._decide(key, f"the ranks of {self.label} disagree on call {self.count}; not all say in what")

    def _decide(self, key: str, verdict: str) -> str:
        """The verdict that counts: this one, unless there is one."""
        return str(self.store.compare_set(key, "", verdict).decode())

    def _read(self, key: str) -> str:
        return str(self.store.get(key).decode())

    def _calls(self) -> list[_Call]:
        return [_Call(*json.loads(text)) for text in self.store.multi_get([f"{self.count}/{r}" for r in self.all()])]

    def _missing(self, site: Site) -> str:
        """Who has not come, and where everyone is."""
        here = [r for r in self.all() if self.store.check([f"{self.count}/{r}"])]
        waiting = {self.ranks[r]: _Call(*json.loads(self._read(f"{self.count}/{r}"))).where for r in here}
        absent = [rank for rank in self.ranks if rank not in waiting]
        who = _names(absent) if absent else f"rank {self.ranks[0]}, which compares,"
        lines = [f"after {site.timeout:g} s, {who} had not come to call {self.count} of {self.label}"]
        for rank in absent:
            seen = self.positions.check([str(rank)])
            last = f"was last seen at {self.positions.get(str(rank)).decode()}" if seen else "has made no checked call"
            lines.append(f"  rank {rank} {last}")
        return "\n".join([*lines, *(f"  rank {rank} waits at {where}" for rank, where in waiting.items())])

    def _differences(self, written: list[Facts]) -> list[str]:
        lines = [f"the ranks of {self.label} disagree on call {self.count}"]
        for what in dict.fromkeys(what for facts in written for what in facts):
            by_value: dict[str, list[int]] = {}
            for r, facts in enumerate(written):
                by_value.setdefault(facts.get(what, "nothing"), []).append(self.ranks[r])
            if len(by_value) > 1 or what == "call":
                lines.append(f"  {what}: " + "; ".join(f"{_has(ranks)} {value}" for value, ranks in by_value.items()))
        if any(GRADIENT in line for line in lines):
            lines.append("  a leaf must require a gradient on every rank or on none: x.requires_grad_() makes it")
        return lines

    def _crossed(self, calls: list[_Call], site: Site) -> list[str]:
        """Where what a rank sends is not what the other expects."""
        lines: list[str] = []
        if any(len(sizes) not in (0, len(calls)) for call in calls for sizes in call.sizes or ()):
            return lines  # which all ranks refuse
        in_order = list(site.order or self.all())  # sizes are listed in the order of the group
        for i, sender in enumerate(in_order):
            for j, receiver in enumerate(in_order):
                sent, expected = calls[sender].sizes, calls[receiver].sizes
                if sent and expected and expected[1] and sent[0][j] != expected[1][i]:
                    lines.append(
                        f"  sizes: rank {self.ranks[sender]} sends {sent[0][j]} to rank {self.ranks[receiver]}, "
                        f"which expects {expected[1][i]}"
                    )
        return lines


class _World:
    """What a world of torch.distributed has."""

    def __init__(self) -> None:
        self.channels: dict[str, _Channel | None] = {}  # by process group; None where there is nobody to compare with
        self.connections: list[Any] = []  # to the store, while nobody uses them: a thread must not wait for another


_worlds: weakref.WeakKeyDictionary[Any, _World] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _channel(name: str) -> tuple[_Channel | None, list[Any]]:
    """The channel of a process group, and the connections that it may use."""
    with _making:
        world = _worlds.setdefault(_torch.world(), _World())
        if name not in world.channels:
            group = _torch.process_group(name)
            alone = group.size() == 1 or dist.get_backend(group) == "fake"
            world.channels[name] = None if alone else _Channel(name, group)
        return world.channels[name], world.connections


def _names(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks[:8])) + more


def _has(ranks: list[int]) -> str:
    return f"{_names(ranks)} {'has' if len(ranks) == 1 else 'have'}"
