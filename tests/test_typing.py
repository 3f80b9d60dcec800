"""What mypy and pyright infer, and what help, signatures and tab completion show."""

from __future__ import annotations

import ast
import inspect
import json
import pathlib
import pydoc
import re
import subprocess
import sys
import tomllib
from typing import Any

import mypy.api
import pytest

import fcoll
from fcoll import lax, regions, testing
from fcoll.compat import torch_nn

ROOT = pathlib.Path(__file__).parent.parent
TYPED = ROOT / "tests" / "typed.py"


def spoiled() -> tuple[str, list[int]]:
    """typed.py with every expected type another and every ignore gone, and which lines are wrong then."""
    text = TYPED.read_text()
    lines = [re.sub(r"  # type: ignore.*", "", line) for line in text.splitlines()]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "assert_type":
            lines[node.lineno - 1] = lines[node.lineno - 1][: node.args[1].col_offset] + "bytes)"
    pairs = enumerate(zip(lines, text.splitlines(), strict=True), start=1)
    return "\n".join(lines) + "\n", [number for number, (now, before) in pairs if now != before]


def test_the_lines_are_spoiled_one_by_one() -> None:
    text, wrong = spoiled()
    assert text.count(", bytes)") == TYPED.read_text().count("    assert_type(") > 40
    assert len(wrong) - text.count(", bytes)") == TYPED.read_text().count("# type: ignore[") > 10
    assert "ignore[" not in text


def test_typed_lines_cover_what_takes_a_tree() -> None:
    """Every collective of fcoll.functional."""
    text = TYPED.read_text()
    for name in fcoll.functional.__all__:
        assert f"assert_type(fcoll.{name}(" in text, name


def test_mypy_infers_what_typed_py_says(tmp_path: pathlib.Path) -> None:
    """And nothing else: with other types, each of its lines is an error."""
    text, wrong = spoiled()
    (tmp_path / "spoiled.py").write_text(text)
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    out, err, _ = mypy.api.run([*options, "--no-error-summary", str(TYPED), str(tmp_path / "spoiled.py")])
    assert not err
    found = re.findall(r"^(.*\.py):(\d+): error: ", out, re.MULTILINE)
    assert [line for file, line in found if file.endswith("typed.py")] == [], out
    assert sorted({int(line) for file, line in found}) == wrong, out


@pytest.mark.long  # at its first use it fetches node, if there is none, and itself
def test_pyright_infers_what_typed_py_says(tmp_path: pathlib.Path) -> None:
    text, wrong = spoiled()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    config = {**settings, "include": ["."], "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    (tmp_path / "spoiled.py").write_text(text)
    (tmp_path / "typed.py").write_text(TYPED.read_text())
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.startswith("{"), (
        f"pyright did not start; it needs the network once: run {sys.executable} -m pyright --version\n{done.stderr}"
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    said = [(pathlib.Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"]) for each in found]
    assert [each for each in said if each[0] == "typed.py"] == []
    assert sorted({line for _, line, _ in said}) == wrong, said


# ---- help, signatures, completion


def public() -> dict[str, Any]:
    """Everything public that is called, by its name."""
    modules = {"fcoll": fcoll, "fcoll.lax": lax, "fcoll.regions": regions, "fcoll.testing": testing}
    modules["fcoll.compat.torch_nn"] = torch_nn
    found = {f"{key}.{name}": getattr(module, name) for key, module in modules.items() for name in module.__all__}
    return {name: value for name, value in found.items() if callable(value)}


@pytest.mark.parametrize("name", sorted(public()))
def test_a_signature_fits_on_two_lines(name: str) -> None:
    """Names of types, as they were written, rather than what they stand for."""
    value = public()[name]
    if inspect.isclass(value) and issubclass(value, Exception):
        return
    text = str(inspect.signature(value))
    assert len(text) < 240, text
    assert not re.search(r"\b(typing|torch\.distributed|fcoll)\.", text), text
    for parameter in inspect.signature(value).parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, f"{name}: {parameter}"
        assert " object at 0x" not in str(parameter), text


def test_help_answers() -> None:
    text = pydoc.plain(pydoc.render_doc(fcoll.all_gather))
    for part in ("all_gather(tree: 'Tree', group: 'GroupLike', axis: 'int' = 0", "Per rank:", "Transpose:", "Args:"):
        assert part in text
    assert "Functional collectives for PyTorch" in pydoc.plain(pydoc.render_doc(fcoll))


def test_completion_shows_public_names_only() -> None:
    assert dir(fcoll) == sorted(fcoll.__all__)
    for module in (lax, regions, testing, torch_nn):
        assert {name for name in dir(module) if not name.startswith("_")} >= set(module.__all__)


def test_the_version_and_its_citation() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", fcoll.__version__)
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    keys = dict(line.split(": ", 1) for line in lines if re.match(r"[a-z-]+: ", line))
    assert keys["cff-version"] == "1.2.0"
    assert keys["version"] == fcoll.__version__
    assert keys["license"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    assert {"title", "message"} <= set(keys)
    assert f"## [{fcoll.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
