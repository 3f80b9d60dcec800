"""Short runs of `soak.py`: memory stays flat, no thread is left over, nothing is said at the end."""

from __future__ import annotations

from typing import Any

import pytest
import soak
from soak import Sample


def test_a_short_soak() -> None:
    reports, errors = soak.soak(120, 20)
    assert not errors
    assert list(reports) == ["calls", "steps"]
    for name, report in reports.items():
        assert report.growth <= 0.02, (name, report)
        assert report.threads <= 0, (name, report)


@pytest.mark.parametrize("grows", ["memory", "threads", "python_threads"])
def test_what_grows_is_seen(grows: str) -> None:
    flat = Sample(100 << 20, 8, 3)
    samples = [flat._replace(**{grows: int(getattr(flat, grows) * (1 + i / 20))}) for i in range(40)]
    report = soak.report([[flat] * 40, samples])
    assert report.growth > 0.02 or report.threads > 0
    assert soak.report([[flat] * 40])[::2] == (0, 0)


def test_what_a_rank_says_is_heard() -> None:
    count: Any = "no number"
    reports, errors = soak.soak(count, 1)
    assert not reports
    assert errors.count("invalid int value: 'no number'") == soak.RANKS
    assert errors.count("ended with 2") == soak.RANKS
