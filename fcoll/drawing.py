"""`fcoll.draw`: which rank's numbers end up where, forward and backward, found by running the real thing."""

from __future__ import annotations

import functools
import inspect
import itertools
import string
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, overload

import torch

from fcoll import meshes, provenance, svg
from fcoll.errors import CollectiveValueError, check_callable, fail
from fcoll.meshes import Mesh
from fcoll.provenance import Leaf, Origin
from fcoll.svg import Box, Label, Line, Picture, Shape

Params = ParamSpec("Params")


@overload
def draw(f: Callable[Params, Any], mesh: Mesh) -> Callable[Params, Picture]: ...
@overload
def draw(f: Callable[..., Any], *, n: int, shape: Sequence[int] | None = None, **options: Any) -> Picture: ...
def draw(
    f: Callable[..., Any],
    mesh: Mesh | None = None,
    *,
    n: int | None = None,
    shape: Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """Draw which rank's numbers end up where, and whose cotangents each rank's gradient has.

    `draw(f, n=4)` draws a collective, `f(x, group, **options)`; `draw(f, mesh)(*args)` one rank's program, with all the
    collectives in it. Either is run on emulated ranks, with one number after the other changed, between -7.5 and 7.5:
    the picture shows what happened. One colour and one number per rank, one letter per element: 2a is the first element
    of rank 2.

    Args:
        f: a collective, or with a mesh one rank's program, as for `fcoll.trace`.
        mesh: whose axis names are bound; its ranks are emulated, also those of a DeviceMesh.
        n: the number of ranks.
        shape: of x on each rank; by default the smallest that the collective takes.
        options: of the collective.

    Returns:
        A `Picture`, or with a mesh a function that returns one. Its arguments are those of one rank; only the shapes
        and dtypes of floating-point tensors matter, others are passed on, the same on every rank.

    Raises:
        ValueError: more than 16 ranks, or more than 64 elements on one rank or 256 on all; neither a mesh nor n, or
            both; a result that is always NaN; what the collective itself refuses.
        TypeError: a function without a floating-point argument, or with results that are no real tensors.
        RuntimeError: Python control flow that depends on a tensor, as under `fcoll.vmap`.

    Example:
        >>> fcoll.draw(fcoll.all_to_all, n=2)
        all_to_all(x, 'i'), i=2
        <BLANKLINE>
              forward            backward
        rank  x           y      ȳ            x̄
        0     0a 0b    →  0a 1a  0a 0b     →  0a 1a
        1     1a 1b    →  0b 1b  1a 1b     →  0b 1b
        <BLANKLINE>
        1a = element a of rank 1 · backward: cotangents
        >>> def step(x):
        ...     return fcoll.shift(fcoll.all_reduce(x, "tp"), "dp")
        >>> fcoll.draw(step, fcoll.virtual_mesh(dp=2, tp=2))(torch.ones(1))
        step(x), dp=2, tp=2
        <BLANKLINE>
                          forward            backward
        rank              x         y        ȳ         x̄
        0     dp 0, tp 0  0      →  Σ 2,3    0      →  Σ 2,3
        1     dp 0, tp 1  1      →  Σ 2,3    1      →  Σ 2,3
        2     dp 1, tp 0  2      →  Σ 0,1    2      →  Σ 0,1
        3     dp 1, tp 1  3      →  Σ 0,1    3      →  Σ 0,1
        <BLANKLINE>
        2 = the element of rank 2 · backward: cotangents · Σ sum
    """
    check_callable("draw", f)
    if (mesh is None) == (n is None):
        fail("value", "draw: give n for a collective, as in draw(fcoll.all_gather, n=4), or a mesh for one rank's "
             "program, as in draw(f, mesh)(*args)")  # fmt: skip
    if mesh is None:
        assert n is not None
        return _collective(f, n, shape, options)
    if shape is not None or options:
        extra = ", ".join((*options, *([] if shape is None else ["shape"])))
        fail("value", "draw: {}: only with n; with a mesh, give arguments to the function that draw returns", extra)
    named = meshes.shape_of("draw", mesh)
    axes = list(zip(named.axis_names, named.sizes, strict=True))

    def drawn(*args: Any) -> Picture:
        names = _parameters(f)
        flow = provenance.follow(f, axes, args, names)
        return _picture(f"{_name(f)}({', '.join(names[: len(args)])})", axes, flow)

    return drawn


def _collective(f: Callable[..., Any], n: int, shape: Sequence[int] | None, options: dict[str, Any]) -> Picture:
    if type(n) is not int:
        fail("type", "draw: n is an integer, got {}", type(n).__name__)
    if n < 1:
        fail("value", "draw: n is at least 1, got {}", n)
    if shape is not None and not (isinstance(shape, (tuple, list)) and all(type(size) is int for size in shape)):
        fail("type", "draw: shape is a tuple of integers, got {}", shape)
    if shape is not None and min(shape, default=1) < 1:
        fail("value", "draw: the sizes in shape are at least 1, got {}", shape)
    given = "".join(f", {key}={value!r}" for key, value in options.items())
    axes = [("i", n)]

    def program(x: Any) -> Any:
        return f(x, "i", **options)

    # The numbers that each rank needs depend on the collective; it says itself what it doesn't take.
    shapes = [(1,), (n,), (n, 1), (1, n), (n, n)] if shape is None else [tuple(shape)]
    for candidate in shapes:
        try:
            flow = provenance.follow(program, axes, (torch.zeros(candidate, dtype=torch.float64),), ["x"])
        except CollectiveValueError:
            if candidate == shapes[-1]:
                raise
        else:
            return _picture(f"{_name(f)}(x, 'i'{given})", axes, flow)
    raise AssertionError


def _name(f: Callable[..., Any]) -> str:
    while isinstance(f, functools.partial):
        f = f.func
    name = getattr(f, "__name__", type(f).__name__)
    return "f" if name == "<lambda>" else str(name)


def _parameters(f: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # as some functions in C, which have none
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


# ---- words: what stands in a cell


def _letter(number: int) -> str:
    letters = string.ascii_letters
    return letters[number] if number < len(letters) else "aa" + letters[number - len(letters)]


def _size(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")


_WORDS = {"product": "Π", "other": "ƒ"}


class _Words:
    """The words for the cells of one panel, whose ranks have `width` numbers each."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.used: set[str] = set()

    def of(self, rank: int, number: int) -> str:
        """One number."""
        return f"{rank}{_letter(number)}" if self.width > 1 else f"{rank}"

    def short(self, origin: Origin) -> str:
        """What fits into a cell."""
        terms = origin.terms
        if not terms:
            return f"= {_size(origin.offset)}" if origin.offset else "zero"
        names = self._names(terms)
        factors = {term.factor for term in terms}
        if origin.kind != "sum":
            word = _WORDS.get(origin.kind, origin.kind)
            self.used.add(word)
            return f"{word} {names}"
        if origin.depends:
            self.used.add("ƒ′")
            return f"ƒ′ {names}" if len(terms) == 1 else f"ƒ′ Σ {names}"
        factor = factors.pop()
        if factors:
            self.used |= {"Σ", "w"}
            text = f"wΣ {names}"
        elif len(terms) > 1 and abs(factor * len(terms) - 1) < 1e-3:
            text = f"mean {names}"
        else:
            self.used |= {"Σ"} if len(terms) > 1 else set()
            text = names if len(terms) == 1 else f"Σ {names}"
            if factor != 1:
                text = f"−{text}" if factor == -1 else f"{_size(factor)}·{text}"
        return text + (f"{origin.offset:+.3g}".replace("-", "−") if origin.offset else "")

    def _names(self, terms: Sequence[provenance.Term]) -> str:
        ranks = sorted({term.rank for term in terms})
        numbers = sorted({term.number for term in terms})
        if len(terms) == len(ranks) * len(numbers):  # all of these numbers on all of these ranks
            letters = svg.runs(numbers, _letter) if self.width > 1 else ""
            return svg.runs(ranks, str) + (letters if len(terms) == 1 else f" {letters}".rstrip())
        if len(terms) <= 4:
            return ",".join(self.of(term.rank, term.number) for term in terms)
        return f"{len(terms)} of {svg.runs(ranks, str)}"

    def full(self, origin: Origin) -> str:
        """All of it."""
        if not origin.terms:
            return _size(origin.offset) if origin.offset else "zero: nothing comes here"
        names = ", ".join(self.of(term.rank, term.number) for term in origin.terms)
        if origin.kind != "sum":
            return f"{origin.kind.replace('other', 'some function')} of {names}"
        if origin.depends:
            return f"{names}, each times what depends on the inputs"
        parts = [
            ("" if term.factor == 1 else f"{_size(term.factor)}·") + self.of(term.rank, term.number)
            for term in origin.terms
        ]
        return " + ".join(parts + ([_size(origin.offset)] if origin.offset else []))


_LEGEND = {
    "Σ": "Σ sum",
    "w": "w with different weights",
    "Π": "Π product",
    "ƒ": "ƒ some function",
    "ƒ′": "ƒ′ times what depends on the inputs",
}


# ---- cells in their places

_HEIGHT = 32.0
_MARGIN = 14.0
_GAP = 14.0  # between two tensors of one rank


class _Tensors(NamedTuple):
    """One column of the picture: the same leaves for every rank, and the origins of their numbers."""

    leaves: list[Leaf]
    rows: list[list[Origin]]
    words: _Words

    def widths(self) -> list[float]:
        """Of the cells of each leaf."""
        found, at = [], 0
        for leaf in self.leaves:
            texts = [self.words.short(origin) for row in self.rows for origin in row[at : at + leaf.numbers]]
            at += leaf.numbers
            found.append(max([36.0, *(svg.width_of(text) + 10 for text in texts)]))
        return found


Axes = Sequence[tuple[str, int]]
Panels = list[tuple[str, list[_Tensors]]]
BAR = "\u0304"  # over the letter before it


def _grid(leaf: Leaf) -> tuple[int, int]:
    """Rows and columns of cells; of more than two axes the first ones are below each other, long rows are broken."""
    columns = leaf.shape[-1] if leaf.shape and leaf.numbers else 1
    if len(leaf.shape) < 2:
        columns = min(columns, 16)
    return -(-max(leaf.numbers, 1) // columns), columns


def _picture(title: str, axes: Axes, flow: provenance.Flow) -> Picture:
    cotangents = [leaf for leaf in flow.outputs if leaf.differentiable]
    x, c = _Words(_count(flow.inputs)), _Words(_count(cotangents))
    n = len(flow.forward)
    panels: Panels = [
        ("forward", [_Tensors(flow.inputs, _itself(n, flow.inputs), x), _Tensors(flow.outputs, flow.forward, x)])
    ]
    if cotangents:
        before = _Tensors(_barred(cotangents), _itself(n, cotangents), c)
        panels.append(("backward", [before, _Tensors(_barred(flow.inputs), flow.backward, c)]))
    title = f"{title}, {', '.join(f'{name}={size}' for name, size in axes)}"
    ranks = list(itertools.product(*(range(size) for _, size in axes)))
    height = max(_grid(leaf)[0] for _, pair in panels for tensors in pair for leaf in tensors.leaves) * _HEIGHT
    middles = []
    top = _MARGIN + 78
    for place in ranks:
        if any(place):
            top += 8 if len(axes) < 2 or place[-1] else 22  # a new row of the mesh
        middles.append(top + height / 2)
        top += height
    shapes: list[Shape] = []
    left = _chips(shapes, axes, ranks, middles)
    shapes.append(Label(_MARGIN, _MARGIN + 62, "rank", "start", 12, faint=True))
    for heading, pair in panels:
        left = _panel(shapes, heading, pair, left, middles, _MARGIN + 62)
    legend = _legend(panels, min(2, len(ranks) - 1))
    shapes.append(Label(_MARGIN, _MARGIN + 8, title, "start", 15, bold=True))
    shapes.append(Label(_MARGIN, top + 22, legend, "start", 11, faint=True))
    width = max(left - 40, svg.width_of(title, 16) + _MARGIN, svg.width_of(legend, 11) + _MARGIN) + _MARGIN
    return Picture(title, width, top + 40, shapes, _text(title, axes, panels, legend))


def _spelled(axes: Axes, place: Sequence[int]) -> str:
    return ", ".join(f"{name} {i}" for (name, _), i in zip(axes, place, strict=True))


def _chips(shapes: list[Shape], axes: Axes, ranks: list[tuple[int, ...]], middles: list[float]) -> float:
    """The column of ranks; returns where the next one begins."""
    notes = [_spelled(axes, place) if len(axes) > 1 else "" for place in ranks]
    for rank, (note, middle) in enumerate(zip(notes, middles, strict=True)):
        shapes.append(Box(_MARGIN, middle - 11, 28, 22, (rank,), f"rank {rank}"))
        shapes.append(Label(_MARGIN + 14, middle, str(rank), bold=True, over=rank))
        if note:
            shapes.append(Label(_MARGIN + 36, middle, note, "start", 11, faint=True))
    return _MARGIN + 52 + max(svg.width_of(note, 11) for note in notes)


def _panel(
    shapes: list[Shape], heading: str, pair: list[_Tensors], left: float, middles: list[float], names: float
) -> float:
    """Before, an arrow, and after; returns where the next panel begins."""
    begin = left
    for i, tensors in enumerate(pair):
        if i == 1:
            shapes.extend(Line(left + 9, middle, left + 33, middle, arrow=True) for middle in middles)
            left += 42
        at = 0
        for k, (leaf, cell) in enumerate(zip(tensors.leaves, tensors.widths(), strict=True)):
            rows, columns = _grid(leaf)
            width = max(columns * cell, svg.width_of(leaf.name))
            left += _GAP if k else 0
            shapes.append(Label(left + width / 2, names, leaf.name, bold=True))
            for middle, row in zip(middles, tensors.rows, strict=True):
                x, y = left + (width - columns * cell) / 2, middle - rows * _HEIGHT / 2
                for j, origin in enumerate(row[at : at + leaf.numbers]):
                    place = x + j % columns * cell, y + j // columns * _HEIGHT
                    shapes.extend(_cell(origin, tensors.words, *place, cell))
            at += leaf.numbers
            left += width
    shapes.append(Label((begin + left) / 2, names - 26, heading))
    shapes.append(Line(begin, names - 14, left, names - 14))
    return left + 40


def _cell(origin: Origin, words: _Words, x: float, y: float, width: float) -> list[Shape]:
    colors = sorted({term.rank for term in origin.terms})
    text, middle = words.short(origin), x + width / 2
    label = Label(middle, y + _HEIGHT / 2, text)
    if not colors:
        label = label._replace(size=11, faint=True)
    elif len(colors) == 1:
        label = label._replace(over=colors[0])
    else:  # above the bar
        label = label._replace(y=y + 0.37 * _HEIGHT)
    return [Box(x, y, width, _HEIGHT, colors, words.full(origin), dashed=not colors), label]


def _count(leaves: Sequence[Leaf]) -> int:
    return sum(leaf.numbers for leaf in leaves)


def _itself(n: int, leaves: Sequence[Leaf]) -> list[list[Origin]]:
    """The numbers before anything has happened."""
    return [[Origin("sum", (provenance.Term(rank, k, 1.0),)) for k in range(_count(leaves))] for rank in range(n)]


def _barred(leaves: Sequence[Leaf]) -> list[Leaf]:
    """x̄ for x, and weights.grad for weights."""

    def barred(name: str) -> str:
        bar = unicodedata.normalize("NFC", name[0] + BAR)
        return bar + name[1:] if len(name.split("[")[0]) == 1 else f"{name}.grad"

    return [leaf._replace(name=barred(leaf.name)) for leaf in leaves]


def _legend(panels: Panels, r: int) -> str:
    """What the words mean, said of rank r."""
    used = set().union(*(t.words.used for _, pair in panels for t in pair))
    widths = {t.words.width > 1 for _, pair in panels for t in pair}
    lines = [f"{r} = the element of rank {r}"] if False in widths else []
    lines += [f"{r}a = element a of rank {r}"] if True in widths else []
    lines += ["backward: cotangents"] if len(panels) > 1 else []
    return " · ".join([*lines, *(text for word, text in _LEGEND.items() if word in used)])


def _text(title: str, axes: Axes, panels: Panels, legend: str) -> str:
    """The picture as a table."""
    ranks = list(itertools.product(*(range(size) for _, size in axes)))
    columns = [["", "rank", *map(str, range(len(ranks)))]]
    if len(axes) > 1:
        columns.append(["", "", *(_spelled(axes, place) for place in ranks)])
    for heading, pair in panels:
        for i, tensors in enumerate(pair):
            if i == 1:
                columns.append(["", "", *["→"] * len(ranks)])
            at = 0
            for k, leaf in enumerate(tensors.leaves):
                cells = [
                    [tensors.words.short(origin) for origin in row[at : at + leaf.numbers]] for row in tensors.rows
                ]
                at += leaf.numbers
                width = max((len(cell) for row in cells for cell in row), default=0)
                lines = [" ".join(cell.ljust(width) for cell in row) for row in cells]
                columns.append([heading if i == k == 0 else "", leaf.name, *lines])
    widths = [max(len(text.replace(BAR, "")) for text in column) for column in columns]
    lines = [
        "  ".join(text + " " * (width - len(text.replace(BAR, ""))) for text, width in zip(row, widths, strict=True))
        for row in zip(*columns, strict=True)
    ]
    return "\n".join([title, "", *map(str.rstrip, lines), "", legend])
