"""The tables as pictures: one per topic, ratios on a logarithmic axis, with the bars that they should stay below."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from benchmarks.contest import Row
from benchmarks.report import TOPICS


def draw(results: dict[str, list[Row]], folder: Path) -> dict[str, Path]:
    """Draw one SVG per topic, and return their paths."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fcoll"  # the same figures give the same file
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    ticker: Any = importlib.import_module("matplotlib.ticker")
    folder.mkdir(parents=True, exist_ok=True)
    paths: dict[str, Path] = {}
    for topic, rows in results.items():
        measured = [row for row in rows if row.ratio]
        if not measured:
            continue
        figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.26 * len(measured)), layout="constrained")
        places = range(len(measured))
        colours = [{True: "tab:green", False: "tab:red", None: "tab:gray"}[row.met] for row in measured]
        ratios = [row.ratio or 0.0 for row in measured]
        spread = [
            [max(0.0, r - (row.low or r)) for r, row in zip(ratios, measured, strict=True)],
            [max(0.0, (row.high or r) - r) for r, row in zip(ratios, measured, strict=True)],
        ]
        axes.errorbar(ratios, places, xerr=spread, fmt="none", ecolor=colours, elinewidth=1.5)
        axes.scatter(ratios, places, c=colours, s=24, zorder=3, label="median and quartiles")
        bars = [(row.bar, place) for row, place in zip(measured, places, strict=True) if row.bar is not None]
        if bars:
            axes.scatter(*zip(*bars, strict=True), marker="|", s=140, c="black", zorder=2, label="bar")
        axes.axvline(1.0, color="lightgray", linewidth=1, zorder=0)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.set_yticks(list(places), [f"{row.what}  /  {row.peer}" for row in measured], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("fcoll / peer; less is better")
        axes.set_title(TOPICS[topic], loc="left")
        axes.legend(fontsize=7)
        path = folder / f"{topic}.svg"
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        paths[topic] = path
    return paths
