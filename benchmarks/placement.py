"""A step of each pattern, value and gradient, on 4 gloo ranks: optimised, beside as written and placed by hand."""

from __future__ import annotations

from functools import partial

from benchmarks.contest import OURS, Row, Samples, Settings, compare, contest, counted, slowest
from benchmarks.placed import ROWS, N, cost, gradient, optimised, programs, traced
from fcoll.testing import Ranks

WRITTEN, HAND = "as written", "by hand"


def rows(settings: Settings) -> list[Row]:
    """Times, messages and bytes of the graphs, which run operation by operation."""
    result = []
    with Ranks(N, timeout=600) as ranks:
        for number, row in enumerate(ROWS[:1] if settings.quick else ROWS):
            found = ranks.run(_measure, number, settings)
            samples, costs = slowest([samples for samples, _ in found]), found[0][1]
            what = f"{row.title}, gloo, {N} ranks"
            result += [compare(what, samples, WRITTEN), compare(what, samples, HAND)]
            for i, unit in enumerate(("messages", "B")):
                ours, theirs = costs[OURS][i], costs[HAND][i]
                result.append(counted(f"{row.title}: {unit}", HAND, ours, theirs, unit, 1.0))
    return result


def _measure(number: int, settings: Settings) -> tuple[Samples, dict[str, tuple[int, int]]]:
    """On a rank."""
    (written, by_hand), values = programs(ROWS[number])
    graphs = {
        OURS: optimised(partial(gradient, written), values),
        WRITTEN: traced(partial(gradient, written), values),
        HAND: traced(partial(gradient, by_hand), values),
    }
    samples = contest({name: partial(graph, values) for name, graph in graphs.items()}, settings)
    return samples, {name: cost(graph) for name, graph in graphs.items()}
