"""Pictures: boxes, labels and arrows, as SVG text, and on matplotlib axes for who has it.

One list of shapes serves both. A colour is the number of a rank, and never the only thing that tells ranks apart: every
coloured box has a label. Text and lines have the colour of what is around them, light or dark.
"""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape, quoteattr

from fcoll.errors import fail

# Okabe and Ito, "Color Universal Design", 2008: distinct with every kind of colour vision. Grey stands for their black,
# which a dark page would hide.
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#A3A3A3")
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, 'DejaVu Sans', sans-serif"
_THEME = (
    "<style>.fcoll-picture { color: #1f2328 } "
    "@media (prefers-color-scheme: dark) { .fcoll-picture { color: #e6edf3 } }</style>"
)
SIZE = 13.0


class Box(NamedTuple):
    """A rectangle. One colour fills it; with several, a bar at its foot has them all; without, it is dashed."""

    x: float
    y: float
    width: float
    height: float
    colors: Sequence[int] = ()
    tip: str = ""
    dashed: bool = False


class Label(NamedTuple):
    """A line of text, `y` its middle. On a box of one colour (`over`), it is black or white."""

    x: float
    y: float
    text: str
    anchor: str = "middle"  # start, middle, end
    size: float = SIZE
    bold: bool = False
    faint: bool = False
    over: int | None = None


class Line(NamedTuple):
    """A thin line, with an arrow's head at its end if wanted."""

    x: float
    y: float
    to_x: float
    to_y: float
    arrow: bool = False


Shape = Box | Label | Line


class Picture:
    """A picture, made by `fcoll.draw`, `P.draw`, `VirtualMesh.draw` or `Trace.draw`. A notebook shows it.

    Printed, it is a table of what it shows, which is also what screen readers are told.

    Attributes:
        title: what it shows.
        text: the table.
        svg: a file of SVG. Its text is dark on light pages and light on dark ones.

    Example:
        >>> picture = fcoll.draw(fcoll.shift, n=3)
        >>> picture.svg[:4], picture.title
        ('<svg', "shift(x, 'i'), i=3")
    """

    def __init__(self, title: str, width: float, height: float, shapes: Sequence[Shape], text: str) -> None:
        self.title: str = title
        self.text: str = text
        self.width: float = width
        self.height: float = height
        self.shapes: tuple[Shape, ...] = tuple(shapes)

    @property
    def svg(self) -> str:
        """The picture as the text of an SVG file."""
        return self._svg(_THEME)

    def save(self, path: str | pathlib.Path) -> None:
        """Write the SVG file.

        Args:
            path: its name, which ends in .svg.

        Raises:
            ValueError: another ending. Matplotlib knows more: `picture.plot().figure.savefig("picture.png")`.
        """
        if pathlib.Path(path).suffix != ".svg":
            fail(
                "value", 'save: {} does not end in .svg; for others: picture.plot().figure.savefig("picture.png")', path
            )
        pathlib.Path(path).write_text(self.svg, encoding="utf-8")

    def plot(self, ax: Any = None) -> Any:
        """Draw it on matplotlib axes.

        Args:
            ax: the axes; without, those of a new figure of the picture's own size.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return _plot(self, ax)

    def _repr_html_(self) -> str:
        return self._svg("")  # within a page it takes the colour of the page's text, which may have a theme of its own

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _svg(self, style: str) -> str:
        width, height = _number(self.width), _number(self.height)
        shapes = "\n".join(_SVG[type(shape)](shape) for shape in self.shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="fcoll-picture" role="img" width="{width}" '
            f'height="{height}" viewBox="0 0 {width} {height}" style="max-width: 100%; height: auto" '
            f'font-family="{_FONT}" fill="currentColor" aria-label={quoteattr(self.title)}>\n'
            f"<desc>{escape(self.text)}</desc>{style}\n{shapes}\n</svg>\n"
        )


def width_of(text: str, size: float = SIZE) -> float:
    """Room for a text, in whatever font there is."""
    return sum(0.36 if char in " .,:'|il·" else 0.95 if char in "mwMW" else 0.66 for char in text) * size


def runs(numbers: Sequence[int], spell: Callable[[int], str] = str) -> str:
    """Increasing numbers in words: 0–3 rather than 0,1,2,3."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    if len(found) > 4:
        return f"{len(numbers)} of {spell(numbers[0])}–{spell(numbers[-1])}"
    return ",".join(",".join(map(spell, run)) if len(run) < 3 else f"{spell(run[0])}–{spell(run[-1])}" for run in found)


def color_of(rank: int) -> str:
    """The rank's colour."""
    return PALETTE[rank % len(PALETTE)]


def ink_on(rank: int) -> str:
    """Black or white, whichever stands out more on the rank's colour (relative luminance as in WCAG 2)."""
    channels = [int(color_of(rank)[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def bands(box: Box) -> list[tuple[float, float, float, float, int]]:
    """The coloured rectangles of a box: x, y, width, height, rank."""
    if len(box.colors) == 1:
        return [(box.x, box.y, box.width, box.height, box.colors[0])]
    height = min(0.28 * box.height, 16)
    step = box.width / max(len(box.colors), 1)
    return [(box.x + i * step, box.y + box.height - height, step, height, c) for i, c in enumerate(box.colors)]


def inset(box: Box) -> tuple[float, float, float, float] | None:
    """The second outline, which tells the ranks that have a colour again from those that had it first."""
    if len(box.colors) != 1 or box.colors[0] < len(PALETTE):
        return None
    return box.x + 3, box.y + 3, box.width - 6, box.height - 6


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _rect(x: float, y: float, width: float, height: float, rest: str) -> str:
    places = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
    return f"<rect {places} {rest}/>"


def _box(box: Box) -> str:
    parts = [_rect(x, y, w, h, f'fill="{color_of(rank)}"') for x, y, w, h, rank in bands(box)]
    second = inset(box)
    if second:
        parts.append(_rect(*second, f'fill="none" stroke="{ink_on(box.colors[0])}"'))
    outline = 'fill="none" stroke="currentColor" stroke-opacity="0.55" pointer-events="all"'  # for the tip
    if box.dashed:
        outline += ' stroke-dasharray="3 3"'
    parts.append(_rect(box.x, box.y, box.width, box.height, outline))
    tip = f"<title>{escape(box.tip)}</title>" if box.tip else ""
    return f"<g>{tip}{''.join(parts)}</g>"


def _label(label: Label) -> str:
    rest = f' fill="{ink_on(label.over)}"' if label.over is not None else ""
    rest += ' font-weight="600"' if label.bold else ""
    rest += ' fill-opacity="0.75"' if label.faint else ""
    at = f'x="{_number(label.x)}" y="{_number(label.y + 0.35 * label.size)}"'  # its baseline
    return (
        f'<text {at} font-size="{_number(label.size)}" text-anchor="{label.anchor}" pointer-events="none"{rest}>'
        f"{escape(label.text)}</text>"
    )


def _line(line: Line) -> str:
    ends = f"M{_number(line.x)} {_number(line.y)} L{_number(line.to_x)} {_number(line.to_y)}"
    for x, y in head(line):
        ends += f" M{_number(x)} {_number(y)} L{_number(line.to_x)} {_number(line.to_y)}"
    return f'<path d="{ends}" fill="none" stroke="currentColor" stroke-opacity="0.75" stroke-width="1.3"/>'


def head(line: Line) -> list[tuple[float, float]]:
    """Where the two strokes of an arrow's head begin."""
    if not line.arrow:
        return []
    dx, dy = line.to_x - line.x, line.to_y - line.y
    scale = 6 / (dx * dx + dy * dy) ** 0.5
    dx, dy = dx * scale, dy * scale
    return [(line.to_x - dx - 0.6 * side * dy, line.to_y - dy + 0.6 * side * dx) for side in (1, -1)]


_SVG: dict[type[Shape], Any] = {Box: _box, Label: _label, Line: _line}


def _plot(picture: Picture, ax: Any) -> Any:
    plt: Any = importlib.import_module("matplotlib.pyplot")
    patches: Any = importlib.import_module("matplotlib.patches")
    if ax is None:
        figure = plt.figure(figsize=(picture.width / 72, picture.height / 72))
        ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set(xlim=(0, picture.width), ylim=(picture.height, 0), aspect="equal")
    ax.set_axis_off()
    room = ax.get_window_extent()
    points = min(room.width / picture.width, room.height / picture.height) * 72 / ax.figure.dpi
    ink = plt.rcParams["text.color"]

    def rectangle(x: float, y: float, width: float, height: float, **style: Any) -> None:
        ax.add_patch(patches.Rectangle((x, y), width, height, **style))

    for shape in picture.shapes:
        if isinstance(shape, Box):
            for *place, rank in bands(shape):
                rectangle(*place, facecolor=color_of(rank), linewidth=0)
            second = inset(shape)
            if second:
                rectangle(*second, fill=False, edgecolor=ink_on(shape.colors[0]), linewidth=points)
            style = "--" if shape.dashed else "-"
            rectangle(*shape[:4], fill=False, edgecolor=ink, alpha=0.55, linewidth=points, linestyle=style)
        elif isinstance(shape, Label):
            color = ink if shape.over is None else ink_on(shape.over)
            align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
            ax.text(
                shape.x, shape.y + 0.35 * shape.size, shape.text, fontsize=shape.size * points, color=color,
                alpha=0.75 if shape.faint else 1, weight="bold" if shape.bold else "normal", ha=align, va="baseline",
                parse_math=False,
            )  # fmt: skip
        else:
            for x, y in [(shape.x, shape.y), *head(shape)]:
                ax.plot((x, shape.to_x), (y, shape.to_y), color=ink, alpha=0.75, linewidth=1.3 * points)
    return ax
