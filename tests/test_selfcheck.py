"""`python -m fcoll.selfcheck` finds what is wrong, and `python -m fcoll.env` tells what there is."""

from __future__ import annotations

import builtins
import os
import pathlib
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import Pools
from torch import Tensor

import fcoll
from fcoll import env, selfcheck
from fcoll.primitives import PRIMITIVES

ROOT = pathlib.Path(__file__).parent.parent
NO_COMMUNICATION = {"axis_index", "axis_size"}


def test_every_collective_has_a_row() -> None:
    assert {name.split()[0] for name in selfcheck.ROWS} == set(fcoll.functional.__all__) - NO_COMMUNICATION


def test_emulated_ranks_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert selfcheck.main(["--only", "s", "--ranks", "3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == " ".join(selfcheck.COLUMNS).split()
    assert printed[1].split() == ["scatter", *["ok"] * 6]
    assert printed[3].split() == ["split", "ok", "ok", "ok", "-", "ok", "ok"]
    assert printed[-1].startswith("all 3 collectives are right on 3 emulated ranks, cpu, in ")


def wrong_value(x: Tensor, *_: Any) -> Tensor:
    return x.sum(0) * 1.001


def wrong_transpose(op: str) -> tuple[Any, ...]:
    return "scale", op


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"on_stack": wrong_value}, {"values", "compiled", "gradient", "tangent", "its gradient"}),
        ({"transpose": wrong_transpose}, {"gradient", "adjoint", "its gradient"}),
    ],
    ids=["value", "gradient"],
)
def test_a_wrong_record_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: dict[str, Any], wrong: set[str]
) -> None:
    monkeypatch.setitem(PRIMITIVES, "all_reduce", replace(PRIMITIVES["all_reduce"], **change))
    monkeypatch.setitem(selfcheck.ROWS, "all_reduce", selfcheck.ROWS["all_reduce"])
    for name in [name for name in selfcheck.ROWS if name.startswith("all_reduce ")]:
        monkeypatch.delitem(selfcheck.ROWS, name)
    assert selfcheck.main(["--only", "all_reduce", "--ranks", "3"]) == 1
    printed = capsys.readouterr().out
    row = printed.splitlines()[1].split()[1:]
    assert {column for column, mark in zip(selfcheck.COLUMNS, row, strict=True) if mark == "WRONG"} == wrong
    assert "1 of 1 collectives are wrong on 3 emulated ranks" in printed
    assert "Mismatched elements" in printed or "Scalars are not close" in printed


def check_here(rank: int, wrong: bool) -> tuple[int, bool]:
    """In a world that there is already; only rank 1's record is wrong."""
    if wrong and rank == 1:
        original = PRIMITIVES["broadcast"]
        PRIMITIVES["broadcast"] = replace(
            original, on_process=lambda x, process, src: original.on_process(x + 1, process, src)
        )
    try:
        return selfcheck.main(["--only", "broadcast"]), dist.is_initialized()
    finally:
        if wrong and rank == 1:
            PRIMITIVES["broadcast"] = original


def test_every_rank_fails_if_one_does(ranks: Pools) -> None:
    per_rank = [(0,), (1,)]
    assert ranks(2).run(check_here, False, per_rank=per_rank) == [(0, True), (0, True)]
    assert ranks(2).run(check_here, True, per_rank=per_rank) == [(1, True), (1, True)]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *arguments],
        env=path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_under_torchrun() -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = command(*launcher, "fcoll.selfcheck", "--only", "all_to_all")
    assert done.returncode == 0, done.stderr
    assert "all 2 collectives are right on 2 ranks, gloo, cpu, in " in done.stdout
    assert done.stdout.count("values") == 1  # one rank prints


@pytest.mark.parametrize("installed", [True, False], ids=["rich", "plain"])
def test_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installed: bool) -> None:
    original = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    if not installed:
        monkeypatch.setattr(builtins, "__import__", absent)
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    names = ["all_gather", "shift"]
    place = selfcheck.Place("ranks", 2, None, torch.device("cpu"))
    assert list(selfcheck._progress(names, place)) == names
    text = capsys.readouterr().err
    assert ("1/2 all_gather" in text) == (not installed)
    assert list(selfcheck._progress(names, place._replace(rank=1))) == names
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--ranks", "1"]])
def test_what_cannot_be_checked_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        selfcheck.main(arguments)
    assert exit.value.code == 2
    assert "no such collective; there are all_reduce" in capsys.readouterr().err or "--ranks" in arguments


def test_the_report_of_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SOME_TOKEN", "hidden")
    env.main()
    printed = capsys.readouterr().out
    lines = dict(line.split(None, 1) for line in printed.splitlines())
    assert lines["fcoll"] == fcoll.__version__
    assert lines["torch"].startswith(torch.__version__)
    assert "gloo" in lines["backends"]
    assert lines["devices"].startswith("cpu")
    assert lines["NCCL_DEBUG"] == "INFO"
    assert "hidden" not in printed
