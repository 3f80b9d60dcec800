"""Each benchmark once, at its smallest: that it runs and says what it should. The figures mean nothing at that size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contest import OURS, against_fastest, compare, missing
from benchmarks.report import TOPICS, number, quantity

ROOT = Path(__file__).parent.parent
LIMIT = 110  # seconds


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/run.py", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=LIMIT,
    )  # fmt: skip


@pytest.mark.parametrize("topic", ["eager", "leaves"])  # together the topics take minutes
def test_topic(topic: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = run("--quick", "--only", topic, "--json", str(file))
    assert result.returncode == 0, result.stdout + result.stderr
    assert TOPICS[topic] in result.stdout
    report: dict[str, Any] = json.loads(file.read_text())
    assert {"date", "cores", "cpu", "torch", "backends"} <= report["machine"].keys()
    rows = report["topics"][topic]["rows"]
    assert rows
    for row in rows:
        assert row["note"] == "not installed" or row["ratio"] > 0, row


def test_unknown_topic_names_the_known_ones() -> None:
    result = run("--only", "nothing")
    assert result.returncode == 2
    assert all(topic in result.stderr for topic in TOPICS)


def test_ratios_are_taken_within_a_round() -> None:
    samples = {OURS: [1.0, 10.0, 2.0], "slow": [2.0, 20.0, 4.0], "fast": [1.0, 5.0, 1.0]}
    row = compare("call", samples, "slow", 0.5)
    assert (row.ratio, row.low, row.high) == (0.5, 0.5, 0.5)
    assert row.met
    fastest = against_fastest("call", samples, 1.5)
    assert fastest.peer == "fast"
    assert fastest.ratio == 2.0
    assert fastest.met is False
    assert missing("call", "peer").met is None


def test_numbers_keep_what_is_significant() -> None:
    assert [number(x) for x in (1.234, 0.5, 0.0412, None)] == ["1.23", "0.50", "0.041", ""]
    assert [quantity(x, "s") for x in (2.5, 0.0123, 4.56e-6)] == ["2.5 s", "12.3 ms", "4.56 µs"]
    assert quantity(2**20, "bytes") == "1.0 MiB"
    assert quantity(7, "nodes") == "7"
