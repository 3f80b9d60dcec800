"""examples/patterns: each program is its dense one, in loss and gradients, on emulated ranks and on processes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_examples import TORCHRUN, run
from torch import Tensor

import fcoll
from fcoll.testing import Ranks

PATTERNS = Path(__file__).parent.parent / "examples" / "patterns"
HELPER = "against_dense"
NAMES = sorted(path.stem for path in PATTERNS.glob("*.py") if path.stem != HELPER)
TOLERANCE = 1e-10

each_pattern = pytest.mark.parametrize("name", NAMES)


def load(directory: Path, name: str) -> ModuleType:
    """The module as `python examples/patterns/name.py` has it: with its helper beside it."""
    if name != HELPER and HELPER not in sys.modules:
        sys.modules[HELPER] = load(directory, HELPER)
    spec = importlib.util.spec_from_file_location(f"pattern_{name}", directory / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def axis_of(module: ModuleType) -> str:
    (name,) = {name for spec in module.SPECS.values() for name in spec.names}
    return str(name)


def differences(module: ModuleType, mesh: Any) -> tuple[float, float]:
    """Of the mapped program from its dense one, differentiated from outside."""
    n = mesh.size()
    mapped = fcoll.shard_map(module.program, mesh, in_specs=(module.SPECS,), out_specs=fcoll.P())
    found: tuple[float, float] = sys.modules[HELPER].differences(mapped, partial(module.dense, n=n), module.inputs(n))
    return found


def on_mesh(directory: Path, name: str, n: int) -> tuple[float, float]:
    module = load(directory, name)
    return differences(module, fcoll.mesh(**{axis_of(module): n}))


def on_group(directory: Path, name: str, n: int) -> tuple[float, float]:
    """The same, without a map: this rank's program, on a process group, differentiated inside."""
    module = load(directory, name)
    rank = int(fcoll.axis_index(fcoll.WORLD))

    def block(name: str, x: Tensor) -> Tensor:
        axes = [axis for axis, names in enumerate(module.SPECS[name].entries) if names]
        return x.chunk(n, axes[0])[rank] if axes else x

    values = module.inputs(n)
    local = {name: block(name, x) for name, x in values.items()}
    gradients, loss = torch.func.grad_and_value(module.program)(local, fcoll.WORLD)
    expected, expected_loss = torch.func.grad_and_value(module.dense)(values, n)
    largest = 0.0
    for name, gradient in gradients.items():
        if not module.SPECS[name].names:
            gradient = fcoll.all_reduce(gradient, fcoll.WORLD)
        # a gradient inside is that of the sum of the ranks' losses, and they all have the same loss
        largest = max(largest, float((gradient / n - block(name, expected[name])).abs().max()))
    return float((loss - expected_loss).abs()), largest


def test_patterns_are_found() -> None:
    assert len(NAMES) == 11


@each_pattern
@pytest.mark.parametrize("n", [1, 2, 4])
def test_emulated(name: str, n: int) -> None:
    module = load(PATTERNS, name)
    mesh = fcoll.virtual_mesh(**{axis_of(module): n})
    assert max(differences(module, mesh)) <= TOLERANCE


@each_pattern
def test_every_gradient_counts(name: str) -> None:
    module = load(PATTERNS, name)
    for value, gradient in torch.func.grad(module.dense)(module.inputs(4), 4).items():
        assert gradient.abs().max() > 1e-3, value


@each_pattern
@pytest.mark.parametrize("where", [on_mesh, on_group])
def test_on_processes(name: str, where: Callable[..., Any], ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(4).run(where, PATTERNS, name, 4):
        assert max(found) <= TOLERANCE


@each_pattern
def test_as_a_program(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as ended:
        load(PATTERNS, name).main()
    assert ended.value.code == 0
    assert "4 emulated ranks: differs from dense by" in capsys.readouterr().out


def test_under_torchrun() -> None:
    result = run(*TORCHRUN, "4", "examples/patterns/ring_attention.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("ring attention, 4 processes: differs from dense by")
    assert result.stdout.count("\n") == 1
