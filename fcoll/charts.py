"""The picture of a trace: when its collectives run, one after the other, and how much each axis has to carry."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fcoll import svg
from fcoll.errors import fail
from fcoll.svg import Box, Label, Line, Picture, Shape

EVENTS = 1000
"""The most collectives of a picture."""

_MARGIN = 14.0
_WIDTH = 620.0  # of the timeline, and of the longest bar
_LANE = 34.0
_BAR = 20.0
_SHORT = {"forward": "fwd", "backward": "bwd"}
_MEASURES = (("payload", "put in"), ("ring", "sent by ring"), ("direct", "sent directly"))


class Event(NamedTuple):
    """A collective of the timeline."""

    collective: str
    axis: str
    seconds: float
    phase: str
    tip: str


def picture(events: Sequence[Event], totals: Mapping[str, Mapping[str, int]]) -> Picture:
    """Lanes of events, one per axis, and below them the bytes per axis."""
    if len(events) > EVENTS:
        fail("value", "Trace.draw: {} collectives; a picture has room for {}", len(events), EVENTS)
    total = sum(event.seconds for event in events)
    title = f"{len(events)} collective{'' if len(events) == 1 else 's'}"
    title += f", {seconds(total)} one after the other" if events else ""
    shapes: list[Shape] = [Label(_MARGIN, _MARGIN + 8, title, "start", 15, bold=True)]
    colors = {axis: i for i, axis in enumerate(totals)}
    words = max([svg.width_of(text) for text in [*totals, *(word for _, word in _MEASURES)]])
    left = _MARGIN + words + 14
    bottom = _MARGIN + 28
    if events:
        bottom = _timeline(shapes, events, colors, total, left, bottom)
        bottom = _bars(shapes, totals, colors, left, bottom + 14)
    return Picture(title, left + _WIDTH + 60, bottom + _MARGIN, shapes, _text(title, totals))


def seconds(value: float) -> str:
    """A duration in words."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def bytes_of(count: int) -> str:
    """A size in words."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _timeline(
    shapes: list[Shape], events: Sequence[Event], colors: dict[str, int], total: float, left: float, top: float
) -> float:
    scale = _WIDTH / total if total else 0.0
    lanes = {axis: top + 30 + i * (_LANE + 6) for i, axis in enumerate(colors)}
    bottom = top + 30 + len(colors) * (_LANE + 6)
    for axis, y in lanes.items():
        shapes.append(Label(_MARGIN, y + _LANE / 2, axis, "start", bold=True))
        shapes.append(Line(left, y + _LANE / 2, left + _WIDTH, y + _LANE / 2))
    starts = [left + scale * s for s in itertools.accumulate((event.seconds for event in events), initial=0.0)]
    for i, event in enumerate(events):
        x, y, width = starts[i], lanes[event.axis], starts[i + 1] - starts[i]
        shapes.append(Box(x, y, width, _LANE, (colors[event.axis],), f"{i}: {event.tip}, {seconds(event.seconds)}"))
        for text in (f"{i} {event.collective}", str(i)):
            if svg.width_of(text, 12) + 6 <= width:
                shapes.append(Label(x + width / 2, y + _LANE / 2, text, size=12, over=colors[event.axis]))
                break
    at = 0
    for phase, run in itertools.groupby(event.phase for event in events):
        begin, at = at, at + len(list(run))
        shapes.append(Line(starts[begin] + 1, top + 22, starts[at] - 1, top + 22))
        for text in (phase, _SHORT[phase]):
            if svg.width_of(text, 12) <= starts[at] - starts[begin]:
                shapes.append(Label((starts[begin] + starts[at]) / 2, top + 10, text, size=12))
                break
    for i in range(5):
        x = left + i * _WIDTH / 4
        shapes.append(Line(x, bottom, x, bottom + 5))
        shapes.append(Label(x, bottom + 14, seconds(i * total / 4) if i else "0", size=11, faint=True))
    return bottom + 24


def _bars(
    shapes: list[Shape], totals: Mapping[str, Mapping[str, int]], colors: dict[str, int], left: float, top: float
) -> float:
    most = max(total[key] for total in totals.values() for key, _ in _MEASURES) or 1
    shapes.append(Label(_MARGIN, top, "bytes of one rank", "start", bold=True))
    top += 16
    for axis, total in totals.items():
        shapes.append(Label(left, top + 8, axis, "start", bold=True))
        top += 20
        for key, word in _MEASURES:
            width = max(_WIDTH * total[key] / most * 0.86, 1.0)
            shapes.append(Label(_MARGIN, top + _BAR / 2, word, "start"))
            shapes.append(Box(left, top, width, _BAR, (colors[axis],), f"{axis}, {word}: {total[key]} bytes"))
            shapes.append(Label(left + width + 8, top + _BAR / 2, bytes_of(total[key]), "start"))
            top += _BAR + 4
        top += 6
    return top


def _text(title: str, totals: Mapping[str, Mapping[str, int]]) -> str:
    lines = [title]
    for axis, total in totals.items():
        sizes = "; ".join(f"{word}: {bytes_of(total[key])}" for key, word in _MEASURES)
        lines.append(f"{axis}   {sizes}")
    return "\n".join(lines)
