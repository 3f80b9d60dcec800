"""Pictures of meshes, and of tensors over meshes: which rank is where, and which ranks own what."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from fcoll import svg
from fcoll.errors import fail
from fcoll.svg import Box, Label, Line, Picture, Shape

RANKS = 64
"""The most ranks of a picture."""

_MARGIN = 14.0
_TOP = 46.0
_GAP = 30.0  # between boards


class Board(NamedTuple):
    """A table of cells, each with the ranks in it, with words on two sides."""

    title: str
    rows: list[str]
    columns: list[str]
    cells: list[list[list[int]]]


def mesh(names: Sequence[str], sizes: Sequence[int]) -> Picture:
    """The ranks of a mesh: its last axis from left to right, the one before it downwards, others board by board."""
    n = math.prod(sizes)
    _check("VirtualMesh.draw", n)
    *outer, down, across = (1, 1, *sizes)
    boards = []
    rank = itertools.count()
    for place in itertools.product(*map(range, outer)):
        cells = [[[next(rank)] for _ in range(across)] for _ in range(down)]
        title = ", ".join(f"{name} {i}" for name, i in zip(names, place[2:], strict=False))
        rows = [str(i) for i in range(down)] if len(sizes) > 1 else [""]
        boards.append(Board(title, rows, [str(i) for i in range(across)], cells))
    spelled = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
    return picture(f"VirtualMesh({spelled})", ["", *names][-2], names[-1], boards, (44.0, 36.0))


def tensor(title: str, shape: Sequence[int], counts: Sequence[int], owners: Sequence[Sequence[int]]) -> Picture:
    """A tensor cut into `counts` blocks along its axes, each with the ranks that own it, in row-major order."""
    *outer, down, across = (1, 1, *counts)
    spans = [
        [f"{i * size // count}:{(i + 1) * size // count}" for i in range(count)]
        for size, count in zip(shape, counts, strict=True)
    ]
    rows = spans[-2] if len(spans) > 1 else [""]
    columns = spans[-1] if spans else [""]
    left = iter(owners)
    boards = []
    for place in itertools.product(*map(range, outer)):
        cells = [[list(next(left)) for _ in range(across)] for _ in range(down)]
        at = [span[i] for span, i in zip(spans[: max(len(spans) - 2, 0)], place[2:], strict=True)]
        boards.append(Board(f"[{', '.join(at)}, …]" if at else "", rows, columns, cells))
    tall, wide = (1, 4, *shape)[-2:]
    scale = 240 / max(tall, wide, 1)  # like the tensor, as long as the words fit
    words = [svg.runs(ranks) for ranks in owners]
    room = max(svg.width_of(text) + 12 for text in [*words, *columns])
    cell = max(wide * scale / across, room, 40.0), max(tall * scale / down, 34.0)
    return picture(title, "", "", boards, cell)


def owners_fit(n: int, blocks: int) -> None:
    """That a picture of so many ranks and blocks can be read."""
    _check("P.draw", n)
    if blocks > RANKS:
        fail("value", "P.draw: {} blocks; a picture has room for {}", blocks, RANKS)


def _check(function: str, n: int) -> None:
    if n > RANKS:
        fail("value", "{}: {} ranks; a picture has room for {}, and shows the same with fewer", function, n, RANKS)


def picture(title: str, down: str, across: str, boards: list[Board], cell: tuple[float, float]) -> Picture:
    """Boards beside each other, `down` and `across` being the names of what they go along."""
    width, height = cell
    titled = any(board.title for board in boards)
    shapes: list[Shape] = []
    label = max(svg.width_of(row, 11) for board in boards for row in board.rows)
    left = _MARGIN + (svg.width_of(down) + 12 if down else 0) + (label + 8 if label else 0)
    top = _TOP + (24 if titled else 0) + (22 if across else 0) + (20 if any(boards[0].columns) else 0)
    begin = left
    for board in boards:
        wide, tall = width * len(board.columns), height * len(board.rows)
        heading = _TOP + 6
        if titled:
            shapes.append(Label(left + wide / 2, heading, board.title, faint=True))
            heading += 24
        if across:
            shapes += [
                Label(left, heading, across, "start", bold=True),
                Line(
                    left + svg.width_of(across) + 12,
                    heading,
                    left + max(wide, svg.width_of(across) + 28),
                    heading,
                    True,
                ),
            ]
        for i, text in enumerate(board.columns):
            shapes.append(Label(left + (i + 0.5) * width, top - 11, text, size=11, faint=True))
        for i, text in enumerate(board.rows):
            shapes.append(Label(left - 8, top + (i + 0.5) * height, text, "end", 11, faint=True))
        for i, j in itertools.product(range(len(board.rows)), range(len(board.columns))):
            ranks = board.cells[i][j]
            x, y = left + j * width, top + i * height
            words = svg.runs(ranks)
            shapes.append(Box(x, y, width, height, ranks, f"rank {words}"))
            if len(ranks) == 1:
                shapes.append(Label(x + width / 2, y + height / 2, words, bold=True, over=ranks[0]))
            else:
                shapes.append(Label(x + width / 2, y + 0.37 * height, words, bold=True))
        left += wide + _GAP + (label if label else 0)
    if down:
        shapes.append(Label(_MARGIN, top + 8, down, "start", bold=True))
        middle = _MARGIN + svg.width_of(down) / 2
        shapes.append(Line(middle, top + 20, middle, top + max(tall, 34), True))
    shapes.insert(0, Label(_MARGIN, _MARGIN + 8, title, "start", 15, bold=True))
    right = max(left - _GAP - label, begin + svg.width_of(across) + 28, svg.width_of(title, 16) + 2 * _MARGIN)
    return Picture(title, right + _MARGIN, top + max(tall, 34) + _MARGIN, shapes, _text(title, boards))


def _text(title: str, boards: list[Board]) -> str:
    lines = [title]
    for board in boards:
        lines += ["", board.title] if board.title else [""]
        table = [["", *board.columns]]
        for row, cells in zip(board.rows, board.cells, strict=True):
            table.append([row, *(svg.runs(ranks) for ranks in cells)])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join(lines)
