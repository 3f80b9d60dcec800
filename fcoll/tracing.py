"""`fcoll.trace`: what a function communicates and what that costs, found on fake tensors, without communication."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ParamSpec

import torch
from torch import Tensor

from fcoll import _torch, axes, charts, forecast, meshes, recorder, trees
from fcoll.charts import bytes_of
from fcoll.errors import check_callable, check_flag
from fcoll.groups import PENDING, Layout
from fcoll.meshes import Mesh
from fcoll.primitives import PRIMITIVES
from fcoll.svg import Picture

Params = ParamSpec("Params")
Cost = Callable[[int, float], tuple[float, float]]
"""(ranks, bytes that a rank puts in) -> (messages one after the other, bytes that the busiest rank sends)"""


# Ring: to the next rank only, in n - 1 rounds. Direct: to each rank at once, so one round. The usual alpha-beta model:
# Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 3.
_RING: dict[str, Cost] = {
    "all_reduce": lambda n, b: (2 * (n - 1), 2 * b * (n - 1) / n),
    "all_gather": lambda n, b: (n - 1, b * (n - 1)),
    "reduce_scatter": lambda n, b: (n - 1, b * (n - 1) / n),
    "all_to_all": lambda n, b: (n - 1, b * (n - 1) / 2),  # a block goes n/2 steps on average
    "broadcast": lambda n, b: (n - 1, b),
    "reduce": lambda n, b: (n - 1, b),
    "gather": lambda n, b: (n - 1, b * (n - 1)),
    "scatter": lambda n, b: (n - 1, b * (n - 1) / n),
    "permute": lambda n, b: (1, b),
    "prefix_sum": lambda n, b: (n - 1, b),
    "send": lambda n, b: (1, b),
    "recv": lambda n, b: (1, b),
}
_DIRECT: dict[str, Cost] = {
    "all_reduce": lambda n, b: (1, b * (n - 1)),
    "all_gather": lambda n, b: (1, b * (n - 1)),
    "reduce_scatter": lambda n, b: (1, b * (n - 1) / n),
    "all_to_all": lambda n, b: (1, b * (n - 1) / n),
    "broadcast": lambda n, b: (1, b * (n - 1)),
    "reduce": lambda n, b: (1, b),
    "gather": lambda n, b: (1, b),
    "scatter": lambda n, b: (1, b * (n - 1) / n),
    "permute": lambda n, b: (1, b),
    "prefix_sum": lambda n, b: (math.ceil(math.log2(n)), b * math.ceil(math.log2(n))),
    "send": lambda n, b: (1, b),
    "recv": lambda n, b: (1, b),
}


@dataclass(frozen=True)
class Record:
    """One collective, as one rank takes part in it.

    Attributes:
        collective: its public name.
        axis: the group, as the program names it.
        n: the number of ranks in the group.
        shape, dtype: of what the rank puts in.
        payload: the size of that, in bytes.
        ring, direct: the bytes that the busiest rank sends, with each of the two algorithms.
        phase: "forward" or "backward".
        source: the line of the program that called for it, "file:line".
    """

    collective: str
    axis: str
    n: int
    shape: tuple[int, ...]
    dtype: str
    payload: int
    ring: int
    direct: int
    phase: str
    source: str


class Trace:
    """What a program communicates, in order; made by `fcoll.trace`.

    Print it for a table; a notebook shows one.

    Attributes:
        records: one `Record` per collective.
        optimized: what `fcoll.optimize` leaves of it, if `trace` was asked for that, else None. A record that stands
            for several has the source of one of them.
        reasons: why what is left out is not sent, by the numbers of the records.
    """

    def __init__(self, records: list[Record], optimized: Trace | None = None, reasons: tuple[str, ...] = ()) -> None:
        self.records, self.optimized, self.reasons = records, optimized, reasons

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def to_dicts(self) -> list[dict[str, Any]]:
        """The records as plain dicts, which pandas.DataFrame takes."""
        return [asdict(record) for record in self.records]

    def totals(self) -> dict[str, dict[str, int]]:
        """Per axis: how many collectives, and the sums of payload and wire bytes of one rank."""
        found: dict[str, dict[str, int]] = {}
        for record in self.records:
            total = found.setdefault(record.axis, {"collectives": 0, "payload": 0, "ring": 0, "direct": 0})
            total["collectives"] += 1
            for key in ("payload", "ring", "direct"):
                total[key] += getattr(record, key)
        return found

    def time(
        self,
        latency: float | Mapping[str, float] = 5e-6,
        bandwidth: float | Mapping[str, float] = 25e9,
        *,
        algorithm: str = "best",
    ) -> float:
        """The seconds that the collectives take one after the other, by the alpha-beta model.

        Args:
            latency: seconds per message; a number, or one per axis.
            bandwidth: bytes per second of one rank's link; a number, or one per axis.
            algorithm: "ring", "direct", or "best", the faster for each collective.

        Raises:
            ValueError: another algorithm.
            KeyError: an axis without a number.
        """
        if algorithm not in ("ring", "direct", "best"):
            raise ValueError(f"algorithm is ring, direct or best, got {algorithm!r}")
        return sum((_seconds(record, latency, bandwidth, algorithm) for record in self.records), 0.0)

    def draw(
        self, latency: float | Mapping[str, float] = 5e-6, bandwidth: float | Mapping[str, float] = 25e9
    ) -> Picture:
        """Draw a timeline of the collectives, one after the other as in `time`, and the bytes per axis.

        Args:
            latency, bandwidth: as for `time`.

        Raises:
            ValueError: more than 1000 collectives.
            KeyError: an axis without a number.

        Example:
            >>> found = fcoll.trace(lambda x: fcoll.all_reduce(x, "dp"), fcoll.virtual_mesh(dp=8))(torch.ones(1024))
            >>> found.draw()
            1 collective, 6.15 µs one after the other
            dp   put in: 4 KiB; sent by ring: 7 KiB; sent directly: 28 KiB
        """
        events = [
            charts.Event(
                r.collective,
                r.axis,
                _seconds(r, latency, bandwidth, "best"),
                r.phase,
                f"{r.collective} over {r.axis}, {r.n} ranks, {bytes_of(r.payload)}, {r.phase}, {r.source}",
            )
            for r in self.records
        ]
        return charts.picture(events, self.totals())

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self._table(), strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in self._table()]
        lines = [lines[0], "─" * max(map(len, lines)), *lines[1:], *self._summary()]
        if self.optimized is not None:
            why = [f"  {reason}" for reason in self.reasons]
            lines += ["", self._heading(), "", str(self.optimized), *(["", "because", *why] if why else [])]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = [[html.escape(cell) for cell in row] for row in self._table()]
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        heads = "".join(f"<th>{cell}</th>" for cell in head)
        summary = "<br>".join(map(html.escape, self._summary()))
        picture = self.draw()._repr_html_() if 0 < len(self) <= charts.EVENTS else ""
        own = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table><p>{summary}</p>{picture}"
        if self.optimized is None:
            return own
        why = "".join(f"<li>{html.escape(reason)}</li>" for reason in self.reasons)
        return f"{own}<p>{html.escape(self._heading())}</p>{self.optimized._repr_html_()}<ul>{why}</ul>"

    def _heading(self) -> str:
        assert self.optimized is not None
        return f"after fcoll.optimize, {len(self.optimized)} of {len(self)}:"

    def _table(self) -> list[list[str]]:
        head = ["", "collective", "axis", "ranks", "puts in", "payload", "ring", "direct", "phase", "source"]
        rows = []
        for i, r in enumerate(self.records):
            sizes = [bytes_of(count) for count in (r.payload, r.ring, r.direct)]
            what = f"{r.dtype}{list(r.shape)}"
            rows.append([str(i), r.collective, r.axis, str(r.n), what, *sizes, r.phase, r.source])
        return [head, *rows]

    def _summary(self) -> list[str]:
        lines = [
            f"{axis}: {t['collectives']} collective{'' if t['collectives'] == 1 else 's'}, "
            f"payload {bytes_of(t['payload'])}, "
            f"sent per rank {bytes_of(t['ring'])} (ring) or {bytes_of(t['direct'])} (direct)"
            for axis, t in self.totals().items()
        ]
        return lines or ["nothing is communicated"]


def trace(f: Callable[Params, Any], mesh: Mesh | None = None, *, optimize: bool = False) -> Callable[Params, Trace]:
    """List what a function communicates, without running it: on fake tensors, for any size of mesh.

    The collectives inside `fcoll.shard_map` are listed as one rank of its mesh makes them, virtual or not, those of
    derivatives too. With `mesh`, f is itself one rank's program: the mesh's axis names are bound, and arguments are
    that rank's own.

    Args:
        f: a function of trees of tensors.
        mesh: a VirtualMesh or DeviceMesh.
        optimize: find also what `fcoll.optimize` would leave of it, and why: the `optimized` and `reasons` of the
            result.

    Returns:
        A function of the same arguments, of which only shapes, dtypes and devices matter, that returns a `Trace`.

    Raises:
        RuntimeError: f branches on data, which fake tensors have not.

    Example:
        >>> def loss(x, w):
        ...     return fcoll.all_reduce((x @ w).sum(), "dp")
        >>> found = fcoll.trace(loss, fcoll.virtual_mesh(dp=4096))(torch.ones(8, 2), torch.ones(2))
        >>> [(r.collective, r.axis, r.n, r.payload) for r in found]
        [('all_reduce', 'dp', 4096, 4)]
        >>> found.totals()
        {'dp': {'collectives': 1, 'payload': 4, 'ring': 8, 'direct': 16380}}
        >>> twice = fcoll.shard_map(lambda x: fcoll.all_reduce(x, "dp"), fcoll.virtual_mesh(dp=4096), fcoll.P())
        >>> found = fcoll.trace(twice, optimize=True)(torch.ones(8))
        >>> len(found), len(found.optimized), found.reasons
        (1, 0, ('#0: what it takes is the same on all ranks of the group',))
    """
    if mesh is not None:
        meshes.shape_of("trace", mesh)  # or the error

    check_callable("trace", f)
    check_flag("trace", "optimize", optimize)

    def traced(*args: Params.args, **kwargs: Params.kwargs) -> Trace:
        records: list[Record] = []
        current = -1  # the number of the latest collective, if it is listed
        scope = meshes.named(meshes.shape_of("trace", mesh)) if mesh is not None else []

        def listen(name: str, x: Tensor, layout: Layout, source: str, backward: bool) -> None:
            nonlocal current
            record = _record(name, x, layout, source, backward)
            if record is not None:
                records.append(record)
                current = len(records) - 1
            elif name not in PRIMITIVES or PRIMITIVES[name].wire:
                current = -1

        with _torch.fakes():
            leaves, structure = trees.flatten(trees.map_leaves(_fake, (args, kwargs)))

            def run(leaves: list[Any]) -> Any:
                args, kwargs = trees.unflatten(structure, leaves)
                with axes.bound(scope), recorder.listening(listen), torch.compiler.set_stance("force_eager"):
                    return f(*args, **kwargs)

            if not optimize:
                run(leaves)
                return Trace(records)
            left, why = forecast.forecast(run, leaves, lambda: current, lambda: len(records))
        return Trace(records, Trace([_left(records, message) for message in left]), tuple(why))

    return traced


def _fake(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    fake = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return fake.requires_grad_(leaf.requires_grad)


def _record(name: str, x: Tensor, layout: Layout, source: str, backward: bool) -> Record | None:
    collective = name if name in ("send", "recv") else PRIMITIVES[name].wire
    n = max(map(len, layout.partition)) if layout.partition else math.prod(layout.sizes)
    if not collective or n == 1:
        return None
    shape = tuple(x.shape[sum(at != PENDING for at in layout.at) :])
    axis = layout.label.strip("()").replace("'", "").replace(" ", "")
    return _costed(collective, axis, n, shape, x.dtype, "backward" if backward else "forward", source)


def _costed(
    collective: str, axis: str, n: int, shape: tuple[int, ...], dtype: torch.dtype, phase: str, source: str
) -> Record:
    payload = math.prod(shape) * dtype.itemsize
    ring, direct = (math.ceil(table[collective](n, payload)[1]) for table in (_RING, _DIRECT))
    return Record(collective, axis, n, shape, str(dtype).removeprefix("torch."), payload, ring, direct, phase, source)


def _left(records: list[Record], message: forecast.Message) -> Record:
    """The record of a message that `fcoll.optimize` leaves or makes."""
    before = records[message.of]
    if not message.new:
        return before
    assert message.x is not None
    shape, dtype = tuple(message.x.shape), message.x.dtype
    return _costed(message.collective, before.axis, before.n, shape, dtype, before.phase, before.source)


def _seconds(
    record: Record, latency: float | Mapping[str, float], bandwidth: float | Mapping[str, float], algorithm: str
) -> float:
    alpha = latency[record.axis] if isinstance(latency, Mapping) else latency
    beta = bandwidth[record.axis] if isinstance(bandwidth, Mapping) else bandwidth
    times = {}
    for name, table in (("ring", _RING), ("direct", _DIRECT)):
        messages, sent = table[record.collective](record.n, record.payload)
        times[name] = messages * alpha + sent / beta
    return min(times.values()) if algorithm == "best" else times[algorithm]
