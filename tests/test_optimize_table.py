"""The table of docs/optimize.md: messages of the patterns as they are written, optimised, and placed by hand."""

from __future__ import annotations

import pathlib
from functools import partial
from typing import Any

import pytest
from common import Pools, close

from benchmarks.placed import ROWS, N, Row, cost, gradient, optimised, programs, traced

ROOT = pathlib.Path(__file__).parent.parent

Cost = tuple[tuple[int, int], tuple[int, int]]
"""Of the value alone, and of value and gradient."""


def costs(rows: list[Row]) -> list[tuple[dict[str, Any], dict[str, Cost]]]:
    """Of each row, gradients and costs: as written, optimised, by hand."""
    found = []
    for row in rows:
        (written, by_hand), values = programs(row)
        results, spent = {}, {}
        for name, f, way in (
            ("written", written, traced),
            ("optimised", written, optimised),
            ("by hand", by_hand, traced),
        ):
            value, both = way(f, values), way(partial(gradient, f), values)
            results[name], spent[name] = both(values), (cost(value), cost(both))
        found.append((results, spent))
    return found


def line(title: str, spent: dict[str, Cost]) -> str:
    cells = []
    for (count, size), (all_counts, all_sizes) in spent.values():
        cells.append(f"{count} + {all_counts - count}, {size:,} + {all_sizes - size:,} B")
    return f"| {title} | {' | '.join(cells)} |"


@pytest.mark.parametrize(
    "rows", [ROWS[::3], pytest.param([row for row in ROWS if row not in ROWS[::3]], marks=pytest.mark.long)]
)
def test_optimised_is_no_worse_than_by_hand(ranks: Pools, rows: list[Row]) -> None:
    documented = (ROOT / "docs" / "optimize.md").read_text().splitlines()
    for row, (results, spent) in zip(rows, ranks(N).run(costs, rows, timeout=250)[0], strict=True):
        for name, result in results.items():
            close(result, results["written"], f"{row.title}, {name}")
        for least, by_hand in zip(spent["optimised"], spent["by hand"], strict=True):
            assert least[0] <= by_hand[0], (row.title, spent)
            assert least[1] <= by_hand[1], (row.title, spent)
        assert line(row.title, spent) in documented, line(row.title, spent)
