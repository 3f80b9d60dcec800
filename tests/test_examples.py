"""examples/digits.py as a person runs it, in processes of its own: emulated, and on four ranks under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
LIMIT = 90  # seconds; alone it takes about ten


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run `python command`, and leave nothing of it behind: torchrun, when terminated, ends its ranks."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            out, err = process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        pytest.fail(f"{command} ran for more than {LIMIT} s\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def steps_of(out: str) -> dict[int, tuple[float, float]]:
    """step → loss and accuracy, as printed."""
    rows = re.findall(r"^step +(\d+) +loss ([\d.]+) +test accuracy ([\d.]+)%$", out, re.MULTILINE)
    assert len({step for step, _, _ in rows}) == len(rows), "more than one rank printed"
    return {int(step): (float(loss), float(accuracy) / 100) for step, loss, accuracy in rows}


def difference_of(out: str) -> float:
    (difference,) = re.findall(r"largest difference .*: (\S+)$", out, re.MULTILINE)
    return float(difference)


def test_digits_emulated() -> None:
    result = run("examples/digits.py")
    assert result.returncode == 0, result.stderr
    steps = steps_of(result.stdout)
    assert max(steps) == 200
    assert steps[200][0] < steps[20][0]
    assert steps[200][1] >= 0.97
    assert 0 < difference_of(result.stdout) <= 1e-10
    assert "100%" in result.stdout  # the progress bar
    assert result.stderr == ""


def test_digits_on_four_ranks() -> None:
    result = run(*TORCHRUN, "4", "examples/digits.py", "--steps", "60")
    assert result.returncode == 0, result.stderr
    steps = steps_of(result.stdout)
    assert list(steps) == [20, 40, 60]
    assert steps[60][1] >= 0.9
    assert 0 < difference_of(result.stdout) <= 1e-10
    assert "warn" not in result.stderr.lower()


def test_digits_on_another_number_of_ranks() -> None:
    result = run(*TORCHRUN, "2", "examples/digits.py")
    assert result.returncode != 0
    assert "there are 2 processes: use torchrun --nproc-per-node 4" in result.stderr
    assert result.stdout == ""
