"""`python -m fcoll.bench`: what it prints and saves, on local ranks and under torchrun."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from fcoll import bench

ROOT = pathlib.Path(__file__).parent.parent

FACTORS = {  # of nccl-tests, with 4 ranks
    "all_reduce": 1.5,
    "all_gather": 0.75,
    "reduce_scatter": 0.75,
    "all_to_all": 0.75,
    "broadcast": 1.0,
    "reduce": 1.0,
    "gather": 0.75,
    "scatter": 0.75,
    "shift": 1.0,
}


def check(report: dict[str, Any], collectives: list[str], sizes: list[int]) -> None:
    """One row for each collective and size, whose rates fit together."""
    rows = report["rows"]
    assert [(row["collective"], row["size"]) for row in rows] == [
        (name, size) for name in collectives for size in sizes
    ]
    for row in rows:
        assert row["calls"] >= 2
        for way in (row["fcoll"], row["torch"]):
            assert way["seconds"] > 0
            assert way["algbw"] == pytest.approx(row["size"] / way["seconds"] / 1e9)
            factor = {1.5: 1.0, 0.75: 0.5, 1.0: 1.0}[FACTORS[row["collective"]]]  # with 2 ranks
            assert way["busbw"] == pytest.approx(way["algbw"] * factor)
    machine = report["machine"]
    assert (machine["ranks"], machine["backend"]) == (2, "gloo")


def test_the_bandwidths_are_those_of_nccl_tests() -> None:
    assert list(FACTORS) == list(bench.COLLECTIVES)
    for name, factor in FACTORS.items():
        assert bench.rate(name, 3_000_000, 4, 0.002) == pytest.approx((0.002, 1.5, 1.5 * factor))


def test_every_collective_on_local_ranks(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    file = tmp_path / "report.json"
    assert bench.main(["--nproc", "2", "--sizes", "1", "1K", "--seconds", "0.001", "--json", str(file)]) == 0
    check(json.loads(file.read_text()), list(FACTORS), [8, 1024])  # a block of one element is the least
    out = capsys.readouterr().out
    assert out.startswith("2 ranks, gloo, cpu; sizes in bytes, times in µs, bandwidths in GB/s\n")
    assert out.count("busbw = algbw") == len(FACTORS)  # the first rank prints, the other does not
    assert "all_reduce, busbw = algbw · 2(n-1)/n = algbw · 1" in out


def test_some_collectives_under_torchrun(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "report.json"
    options = ["--collectives", "shift", "all_gather", "--sizes", "64KiB", "--seconds", "0.001", "--json", str(file)]
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*launcher, "-m", "fcoll.bench", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("busbw = algbw") == 2
    check(json.loads(file.read_text()), ["shift", "all_gather"], [65536])


def test_without_ranks_it_says_how_to_have_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert bench.main([]) == 2
    assert "torchrun --nproc-per-node 2 -m fcoll.bench\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--sizes", "1X"], "a size is like 4096, 64K or 1M, got '1X'"),
        (["--nproc", "1"], "--nproc: a collective takes two ranks at least"),
        (["--collectives", "all_shrink"], "invalid choice: 'all_shrink'"),
    ],
)
def test_bad_options(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(options)
    assert text in capsys.readouterr().err


def test_without_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(SystemExit):
        bench.main(["--nproc", "2"])
    assert "fcoll.bench prints with rich: pip install 'fcoll[bench]'" in capsys.readouterr().err


def test_sizes() -> None:
    assert list(map(bench.size, ("4096", "64K", "1M", "2GiB", "3kb"))) == [4096, 65536, 1 << 20, 1 << 31, 3072]
