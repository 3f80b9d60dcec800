"""The command line: which topics to run, and the table, the JSON and the plots that come of it."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import sys
import time
import traceback
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.contest import QUICK, Row, Settings

TOPICS = {
    "eager": "Eager calls, no communication",
    "layers": "Where the time of an eager call goes",
    "transforms": "torch.func.grad around one collective",
    "leaves": "Many leaves",
    "messages": "Messages of 4 MiB",
    "small": "Small messages",
    "lowerings": "Ways of a message on gloo",
    "overlap": "Communication beside computation",
    "compiled": "Compiled, on process groups",
    "programs": "Compiled programs on an emulated axis",
    "emulated": "Eager calls on an emulated axis",
    "scaling": "Compilation against the number of emulated ranks",
    "placement": "Patterns, optimised",
    "memory": "Memory of a tree call",
}
"""Module → heading."""

RESULTS = Path(__file__).parent / "results" / "latest.json"


def main(arguments: list[str] | None = None) -> int:
    """Run the topics and return the exit status: 1 where one could not be measured."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py",
        description="fcoll beside its peers. Each figure is a ratio of times taken side by side; less is better.",
    )
    parser.add_argument("--only", action="append", choices=TOPICS, metavar="TOPIC", help=f"one of {', '.join(TOPICS)}")
    parser.add_argument(
        "--quick", action="store_true", help="tiny counts: shows that everything runs, measures nothing"
    )
    parser.add_argument("--rounds", type=int, default=Settings.rounds, help="how often the contestants take turns")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="where the figures go")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="the tables once more, as docs/figures.md has them"
    )
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the figures as SVG")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error("--rounds: the spread needs 2 at least")
    settings = QUICK if options.quick else Settings(rounds=options.rounds)

    console = Console(width=None if sys.stdout.isatty() else 150)
    results: dict[str, list[Row]] = {}
    failed = []
    report: dict[str, Any] = {"machine": machine(), "quick": options.quick, "rounds": settings.rounds, "topics": {}}
    topics = list(options.only or TOPICS)
    for number, topic in enumerate(topics, start=1):
        start = time.monotonic()
        try:
            with console.status(f"measuring {topic}, {number} of {len(topics)}"):  # on terminals only
                results[topic] = importlib.import_module(f"benchmarks.{topic}").rows(settings)
        except Exception:
            failed.append(topic)
            console.print(f"{topic} failed", style="bold red")
            traceback.print_exc()
            continue
        console.print(table(TOPICS[topic], results[topic]))
        report["topics"][topic] = {
            "seconds": round(time.monotonic() - start, 1),
            "rows": [{**vars(row), "met": row.met} for row in results[topic]],
        }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    console.print(f"saved {options.json}")
    drawn: dict[str, Path] = {}
    if options.plots:
        from benchmarks.plots import draw

        drawn = draw(results, options.plots)
        console.print(f"saved {options.plots}")
    if options.markdown:
        pictures = {topic: path.relative_to(options.markdown.parent) for topic, path in drawn.items()}
        options.markdown.write_text(page(report, results, pictures))
        console.print(f"saved {options.markdown}")
    bars = [row.met for rows in results.values() for row in rows if row.met is not None]
    console.print(f"{sum(bars)} of {len(bars)} bars met" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    versions = {}
    for package in ("torch", "optree", "jax", "spmd_types"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": _cpu(),
        "system": platform.system(),
        "python": platform.python_version(),
        "load": [round(load, 1) for load in os.getloadavg()] if hasattr(os, "getloadavg") else [],
        "backends": "gloo between processes; torch's fake backend for pure overhead",
        "threads": torch.get_num_threads(),
        **versions,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(heading: str, rows: list[Row]) -> Table:
    """The rows of one topic, for people."""
    result = Table(title=heading, title_justify="left", title_style="bold")
    for column in ("what", "peer"):
        result.add_column(column)
    for column in ("fcoll", "of the peer", "ratio", "quartiles", "bar", "met"):
        result.add_column(column, justify="right")
    for row in rows:
        met = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[row.met]
        if row.ratio is None:
            result.add_row(row.what, row.peer, "", "", row.note, "", "", "")
            continue
        spread = "" if row.low == row.high else f"{number(row.low)} … {number(row.high)}"
        bar = "" if row.bar is None else f"≤ {number(row.bar)}"
        result.add_row(
            row.what, row.peer, quantity(row.ours, row.unit), quantity(row.theirs, row.unit), number(row.ratio),
            spread, bar, met,
        )  # fmt: skip
    return result


def page(report: dict[str, Any], results: dict[str, list[Row]], pictures: dict[str, Path]) -> str:
    """All tables and pictures as a document."""
    about = report["machine"]
    where = f"{about['cores']} cores ({about['cpu']}), torch {about['torch']}, Python {about['python']}"
    lines = [
        "# Figures",
        "",
        "What `make bench` printed and drew; [Performance](performance.md) says what it means. A dot is the median of",
        "fcoll's time over the peer's, its line goes from quartile to quartile, the black mark is the bar. Green is",
        "met, red is missed, grey has no bar.",
        "",
        f"{where}; {report['rounds']} rounds.",
        "",
    ]
    for topic, rows in results.items():
        picture = f"![{TOPICS[topic]}: ratios]({pictures[topic]})\n" if topic in pictures else ""
        lines += [f"## {TOPICS[topic]}", "", *([picture] if picture else []), markdown(rows)]
    return "\n".join(lines)


def markdown(rows: list[Row]) -> str:
    """The rows of one topic, for a document."""
    lines = [
        "| what | peer | fcoll | of the peer | ratio | quartiles | bar |",
        "|" + " --- |" * 7,
    ]
    for row in rows:
        if row.ratio is None:
            lines.append(f"| {row.what} | {row.peer} | | | {row.note} | | |")
            continue
        spread = "" if row.low == row.high else f"{number(row.low)} … {number(row.high)}"
        bar = "" if row.bar is None else f"≤ {number(row.bar)}, {'met' if row.met else 'missed'}"
        ours, theirs = quantity(row.ours, row.unit), quantity(row.theirs, row.unit)
        lines.append(f"| {row.what} | {row.peer} | {ours} | {theirs} | {number(row.ratio)} | {spread} | {bar} |")
    return "\n".join([*lines, ""])


def number(value: float | None) -> str:
    """A ratio, with what is significant of it."""
    if value is None:
        return ""
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.3f}"


def quantity(value: float | None, unit: str) -> str:
    """A measured value in a unit that suits its size."""
    if value is None or math.isinf(value):
        return ""
    if unit == "s":
        for scale, name in ((1.0, "s"), (1e-3, "ms")):
            if value >= scale:
                return f"{value / scale:.3g} {name}"
        return f"{value * 1e6:.3g} µs"
    return f"{value / 2**20:.1f} MiB" if unit == "bytes" else f"{value:g}"
