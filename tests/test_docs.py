"""Examples run: in every docstring that has one, of every public name, and on every Markdown page."""

from __future__ import annotations

import ast
import doctest
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from table import Row

import fcoll
from fcoll import errors, lax, primitives, regions, testing
from fcoll.compat import torch_nn

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in folder.rglob("*.md"))]
    if "_build" not in path.parts
)
PARTS = {"CONTRIBUTING.md"}  # whose blocks are lines to insert into files, as a test of its own does

NOT_CALLED = {"functional", "lax", "regions", "WORLD", "GroupLike", "__version__"}  # modules, constants and types
MADE_BY_OTHERS = {"Group"}  # classes whose objects come from a function that has the example
EXCEPTIONS = {name for name in errors.__dict__ if name.endswith("Error")}


def with_examples() -> dict[str, Any]:
    """Everything public that is called, by its name."""
    names = set(fcoll.__all__) - NOT_CALLED - MADE_BY_OTHERS - EXCEPTIONS
    found: dict[str, Any] = {f"fcoll.{name}": getattr(fcoll, name) for name in names}
    found |= {f"fcoll.lax.{name}": getattr(lax, name) for name in lax.__all__}
    found |= {f"fcoll.regions.{name}": getattr(regions, name) for name in regions.__all__}
    found |= {f"fcoll.compat.torch_nn.{name}": getattr(torch_nn, name) for name in torch_nn.__all__}
    return found | {f"fcoll.testing.{name}": getattr(testing, name) for name in testing.__all__}


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


def with_prompts(node: ast.AST, name: str = "") -> set[str]:
    """The dotted names below a node whose docstring has an example."""
    found = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            full = f"{name}.{child.name}"
            found |= with_prompts(child, full) | ({full} if ">>>" in (ast.get_docstring(child) or "") else set())
        else:
            found |= with_prompts(child, name)
    return found


def test_no_docstring_with_an_example_is_left_out() -> None:
    """What is run is chosen by public names; here, what is written is found in the sources."""
    chosen = {f"{thing.__module__}.{thing.__qualname__}" for thing in FOUND.values()}
    for path in sorted((ROOT / "fcoll").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        tree = ast.parse(path.read_text())
        assert ">>>" not in (ast.get_docstring(tree) or ""), module
        for name in with_prompts(tree, module):
            assert name in chosen or name.rpartition(".")[0] in chosen, f"the example of {name} is not run"


def test_a_wrong_example_is_noticed() -> None:
    with pytest.raises(AssertionError, match="Expected:"):
        run(">>> 1 + 1\n3\n", "wrong", {})


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
    return re.findall(r"^```(?:python|pycon)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def interactive(page: str) -> list[str]:
    return [block for block in blocks(page) if block.startswith(">>>")]


def test_the_pages_have_blocks() -> None:
    assert all(interactive(page) for page in ("README.md", "docs/api.md", "docs/concepts.md"))
    assert "docs/reference/choosing.md" in PAGES  # folders within are searched as well


@pytest.mark.parametrize("page", sorted(set(PAGES) - PARTS))
def test_no_prompt_of_a_page_is_left_out(page: str) -> None:
    """As in a block with another language, or one that begins with something else."""
    prompts = re.compile(r"^\s*>>> ", re.MULTILINE)
    assert len(prompts.findall((ROOT / page).read_text())) == len(prompts.findall("".join(interactive(page))))


@pytest.mark.parametrize("page", PAGES)
def test_interactive_blocks_of_a_page(page: str) -> None:
    """One after the other, in one scope, as a reader would type them."""
    scope: dict[str, Any] = {}
    for i, block in enumerate(interactive(page)):
        run(block, f"{page}, interactive block {i}", scope)


def resolve(node: ast.expr) -> Any:
    """What `fcoll.lax.psum` and the like stand for; None if the line begins with another name."""
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value)
        return None if owner is None else getattr(owner, node.attr)
    roots = {"fcoll": fcoll, "torch": torch, "dist": dist, "lax": lax, "regions": regions}
    return roots.get(node.id) if isinstance(node, ast.Name) else None


@pytest.mark.parametrize("page", sorted(set(PAGES) - PARTS))
def test_other_blocks_of_a_page_could_run(page: str) -> None:
    """They are Python, the names exist that they take from fcoll and torch, and fcoll takes these arguments."""
    for block in set(blocks(page)) - set(interactive(page)):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute):
                resolve(node)
            if isinstance(node, ast.Call) and getattr(resolve(node.func), "__module__", "").startswith("fcoll"):
                named = {keyword.arg: None for keyword in node.keywords if keyword.arg}
                spread = any(isinstance(a, ast.Starred) for a in node.args) or len(named) < len(node.keywords)
                if not spread and not any(isinstance(a, ast.Constant) and a.value is ... for a in node.args):
                    inspect.signature(resolve(node.func)).bind(*node.args, **named)


@pytest.mark.parametrize("page", PAGES)
def test_names_in_the_text_of_a_page_exist(page: str) -> None:
    """`fcoll.something`, in the text between the blocks."""
    for name in re.findall(r"`fcoll\.([A-Za-z_.]*[A-Za-z_])", (ROOT / page).read_text()):
        try:
            pkgutil.resolve_name(f"fcoll.{name}")
        except (AttributeError, ModuleNotFoundError):
            pytest.fail(f"fcoll.{name}")


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


def test_the_collective_that_contributing_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record, function and row are put where they belong, and the row holds, with its derivative."""
    record, function, row = blocks("CONTRIBUTING.md")
    made: dict[str, primitives.Primitive] = eval(f"{{{record}}}", dict(vars(primitives)))
    monkeypatch.setitem(primitives.PRIMITIVES, *made.popitem())
    scope = dict(vars(fcoll.functional))
    exec(function, scope)
    monkeypatch.setattr(fcoll, "rotate", scope["rotate"], raising=False)
    assert run(docstrings(scope["rotate"]), "rotate", {"torch": torch, "fcoll": fcoll}) == 1
    added: Row = eval(row, {"fcoll": fcoll, "Row": Row})
    x, cotangents = added.inputs(3), added.inputs(3, seed=1)
    y, pull_back, *_ = torch.func.vjp(fcoll.vmap(added.on("i"), axis_name="i"), x)
    torch.testing.assert_close(y, added.values(x))
    torch.testing.assert_close(pull_back(cotangents)[0], added.pull(x, cotangents))
