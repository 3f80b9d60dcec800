"""Each layer knows only those below it, and private names of torch are in one file."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest
import torch

import fcoll

PACKAGE = pathlib.Path(fcoll.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))

# From top to bottom: a module imports from those below it only. Modules on one line do not know each other.
LAYERS: list[set[str]] = [
    {"__init__"},
    {"lax"},
    {"functional"},
    {"bind"},
    {"primitives"},
    {"engine"},
]
FORBIDDEN = {  # module -> what it must not import, even though it stands below
    "functional": {"primitives", "engine"},
    "lax": {"primitives", "engine"},
    "regions": {"primitives", "engine", "bind"},
    "primitives": {"groups", "axes", "trees"},
    "engine": {"groups", "axes", "trees", "errors"},
    "axes": {"groups", "engine", "trees", "errors"},
    "objects": {"bind", "primitives", "engine"},
    "headers": set(MODULES),  # bytes and trees, nothing else
    "_rank": set(MODULES),  # the fork server imports it
}
TESTS_ONLY = {"testing"}


def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text())


def imports(module: str) -> set[str]:
    """The modules of this package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "fcoll":
                found |= {alias.name for alias in node.names if alias.name in MODULES}
            elif node.module.startswith("fcoll."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fcoll.")}
    return found


def test_the_scan_sees_what_there_is() -> None:
    assert {"bind", "groups"} <= imports("functional") | imports("calls")
    assert "primitives" in imports("bind")
    assert "engine" in imports("primitives")


def test_no_module_imports_one_above_it() -> None:
    for depth, layer in enumerate(LAYERS):
        above = set().union(*LAYERS[:depth])
        for module in layer:
            assert not imports(module) & (above | layer), module


@pytest.mark.parametrize("module", FORBIDDEN)
def test_no_module_reaches_around_the_one_below(module: str) -> None:
    assert not imports(module) & FORBIDDEN[module]


def test_no_import_is_circular() -> None:
    seen: list[str] = []

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " imports ".join((*path, module))
        if module not in seen:
            for other in sorted(imports(module)):
                visit(other, (*path, module))
            seen.append(module)

    for module in MODULES:
        visit(module, ())


def test_the_package_does_not_import_what_is_for_tests() -> None:
    for module in set(MODULES) - TESTS_ONLY:
        assert not imports(module) & TESTS_ONLY, module


def test_importing_the_package_starts_nothing() -> None:
    """No world, no test helpers, no compiler."""
    code = (
        "import sys, fcoll, torch.distributed as dist; "
        "assert not dist.is_initialized(); "
        "assert not {'fcoll.testing', 'cloudpickle', 'hypothesis', 'pytest', 'numpy.testing'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


# ---- private names of torch


def torch_names(module: ast.Module) -> set[str]:
    """Names in a module that stand for torch or for something imported from it."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_torch(module: ast.Module) -> set[str]:
    """Private torch names: in imports, behind a torch module, or as torch's methods on tensors."""
    names, found = torch_names(module), set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names_here = [alias.name for alias in node.names if alias.name.startswith("torch.")]
            found |= {name for name in names_here if any(map(private, name.split(".")))}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found |= {part for part in parts if private(part)}
        elif isinstance(node, ast.Attribute) and private(node.attr):
            if hasattr(torch.Tensor, node.attr):
                found.add(node.attr)
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in names:
                found.add(ast.unparse(node))
    return found


OPERATORS = {"torch.ops._c10d_functional"}  # the operators that compilers know: their namespace is spelled like this


def test_the_scan_finds_private_names() -> None:
    lines = [
        "import torch",
        "from torch._C import _x",
        "torch.a._b.c",
        "self._d",
        "import torch._e as e",
        "x._is_view()",
    ]
    found = private_torch(ast.parse("\n".join(lines)))
    assert found == {"_C", "_x", "torch.a._b", "torch._e", "_is_view"}


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"_torch"}))
def test_private_torch_names_are_in_one_file(module: str) -> None:
    if module == "_rank":  # sets an option of inductor, which has no public way
        assert private_torch(tree(module)) <= {"torch._inductor"}
    else:
        assert private_torch(tree(module)) <= OPERATORS
