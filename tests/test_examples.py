"""The examples as a person runs them, in processes of their own: emulated, and on four ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import fcoll

ROOT = Path(__file__).parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
LIMIT = 90  # seconds; alone it takes about ten


def run(*command: str, limit: int = LIMIT) -> subprocess.CompletedProcess[str]:
    """Run `python command`, and leave nothing of it behind: torchrun, when terminated, ends its ranks."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            out, err = process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        pytest.fail(f"{command} ran for more than {limit} s\n{out}\n{err}")
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


def matches_of(out: str) -> list[str]:
    """The kind of mesh of each line that `examples/transformer.py` prints; any other line is a failure."""
    lines = [re.fullmatch(r"(\w+): the gradients of 11 parameters match, to \d\.\de-\d\d", x) for x in out.splitlines()]
    assert all(lines), out
    return [line[1] for line in lines if line]


def test_transformer_emulated() -> None:
    result = run("examples/transformer.py")
    assert (result.returncode, result.stderr) == (0, "")
    assert matches_of(result.stdout) == ["VirtualMesh"]


@pytest.mark.long
@pytest.mark.parametrize("option", [[], ["--compile"]])
@pytest.mark.parametrize("ways", ["launch", "torchrun"])
def test_transformer_on_four_ranks(ways: str, option: list[str]) -> None:
    launched = ways == "launch"
    start = [] if launched else [*TORCHRUN, "4"]
    result = run(*start, "examples/transformer.py", *["--launch"] * launched, *option, limit=220)
    assert result.returncode == 0, result.stderr
    assert matches_of(result.stdout) == ["DeviceMesh"] * (4 if launched else 1)


def test_transformer_notices_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum where there is to be a mean, which no shape and no spec tells."""
    spec = importlib.util.spec_from_file_location("transformer", ROOT / "examples" / "transformer.py")
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def wrong(p: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        value: Tensor = example.loss(p, tokens, targets, total=lambda y: fcoll.all_reduce(y, "tp"))
        return fcoll.all_reduce(value, "dp")

    monkeypatch.setattr(example, "rank_loss", wrong)
    monkeypatch.setattr(sys, "argv", ["transformer.py"])
    with pytest.raises(SystemExit, match=r"^VirtualMesh: the gradient of \w+ differs by \d\.\de-0\d$"):
        example.main()
