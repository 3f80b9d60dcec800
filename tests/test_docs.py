"""Examples run: in the docstring of every public name, in README.md and in docs/."""

from __future__ import annotations

import ast
import doctest
import inspect
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fcoll
from fcoll import errors, lax, regions, testing
from fcoll.compat import torch_nn

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

NOT_CALLED = {"functional", "lax", "regions", "WORLD", "GroupLike", "__version__"}  # modules, constants and types
MADE_BY_OTHERS = {"Group", "VirtualMesh", "Trace"}  # classes whose objects come from a function that has the example
EXCEPTIONS = {name for name in errors.__dict__ if name.endswith("Error")}


def with_examples() -> dict[str, Any]:
    """Everything public that is called, by its name."""
    names = set(fcoll.__all__) - NOT_CALLED - MADE_BY_OTHERS - EXCEPTIONS
    found: dict[str, Any] = {f"fcoll.{name}": getattr(fcoll, name) for name in names}
    found |= {f"fcoll.lax.{name}": getattr(lax, name) for name in lax.__all__}
    found |= {f"fcoll.regions.{name}": getattr(regions, name) for name in regions.__all__}
    found |= {f"fcoll.compat.torch_nn.{name}": getattr(torch_nn, name) for name in torch_nn.__all__}
    found["fcoll.testing.check_adjoint"] = testing.check_adjoint
    for kind in (testing.Ranks, testing.Emulated, testing.Substrate):
        found[f"fcoll.testing.{kind.__name__}"] = kind
    return found


FOUND = with_examples()


def run(text: str, name: str, scope: dict[str, Any]) -> int:
    """Run the examples of a text; the number of them."""
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    test.globs = scope
    scope.setdefault("__name__", "__main__")  # which torch.compile asks for
    out: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=out.append, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0, "".join(out)
    return len(test.examples)


def docstrings(thing: Any) -> str:
    """Of a class, those of its public methods too."""
    texts = [inspect.getdoc(thing) or ""]
    if inspect.isclass(thing):
        methods = [value for name, value in vars(thing).items() if callable(value) and not name.startswith("_")]
        texts += [inspect.getdoc(method) or "" for method in methods]
    return "\n\n".join(texts)


@pytest.mark.parametrize("name", sorted(FOUND))
def test_docstrings_have_an_example_that_runs(name: str) -> None:
    scope = {
        "torch": torch,
        "fcoll": fcoll,
        "lax": lax,
        "regions": regions,
        "torch_nn": torch_nn,
        **{key: getattr(testing, key) for key in testing.__all__},
    }
    assert run(docstrings(FOUND[name]), name, scope) > 0, f"{name} has no example"


def test_everything_public_has_a_docstring() -> None:
    for name in fcoll.__all__:
        if name not in ("__version__", "WORLD", "GroupLike"):
            assert inspect.getdoc(getattr(fcoll, name)), name


def test_everything_public_can_be_had() -> None:
    assert len(set(fcoll.__all__)) == len(fcoll.__all__)
    for module in (fcoll, fcoll.functional, lax, testing):
        for name in module.__all__:
            assert hasattr(module, name), name


def test_every_parameter_of_a_collective_is_described() -> None:
    """Where there is more than a group."""
    for name in fcoll.functional.__all__:
        function: Callable[..., Any] = getattr(fcoll, name)
        text = inspect.getdoc(function) or ""
        parameters = list(inspect.signature(function).parameters)
        if parameters != ["group"]:
            for parameter in parameters:
                assert re.search(rf"^    {parameter}: ", text, re.MULTILINE), f"{name}: {parameter}"


# ---- pages


def blocks(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_pages_have_blocks() -> None:
    assert all(blocks(page) for page in ("README.md", "docs/api.md", "docs/concepts.md"))


@pytest.mark.parametrize("page", PAGES)
def test_interactive_blocks_of_a_page(page: str) -> None:
    """One after the other, in one scope, as a reader would type them."""
    scope: dict[str, Any] = {}
    for i, block in enumerate(blocks(page)):
        if block.startswith(">>>"):
            run(block, f"{page}, block {i}", scope)


@pytest.mark.parametrize("page", PAGES)
def test_other_blocks_of_a_page_are_python(page: str) -> None:
    for block in blocks(page):
        if not block.startswith(">>>"):
            ast.parse(block)


def test_the_first_file_of_the_readme(tmp_path: pathlib.Path) -> None:
    """What it says about `torchrun first.py` is what it prints."""
    readme = (ROOT / "README.md").read_text()
    (program,) = [block for block in blocks("README.md") if "init_process_group" in block]
    match = re.search(r"^\$ torchrun (.*) first.py\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert match is not None
    options, printed = match.groups()
    (tmp_path / "first.py").write_text(program)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", *options.split()]
    path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": ""}
    done = subprocess.run(
        [*command, str(tmp_path / "first.py")], env=path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed
