"""Errors that name a section of docs/errors.md name one that there is, in a note that every way of calling keeps."""

from __future__ import annotations

import ast
import pathlib
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import Pools

import fcoll
from fcoll import P, errors

ROOT = pathlib.Path(__file__).parent.parent
HEADINGS = re.findall(r"^## (.*)$", (ROOT / errors.PAGE).read_text(), re.MULTILINE)
OF_TORCH = "Errors of torch"


def sections(path: pathlib.Path) -> set[str]:
    """The texts that a module gives as `about` in `fail`, by way of a name or not, and to `explained`."""
    texts: list[ast.expr] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            texts += [keyword.value for keyword in node.keywords if keyword.arg == "about"]
            texts += node.args[1:] if getattr(node.func, "id", "") == "explained" else []
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "about":
            texts.append(node.value)
    found = set()
    for text in texts:
        given = [text.body, text.orelse] if isinstance(text, ast.IfExp) else [text]
        found |= {each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return found - {""}


def test_each_section_that_an_error_names_exists_and_the_other_way_round() -> None:
    named = set().union(*(sections(path) for path in (ROOT / "fcoll").rglob("*.py")))
    assert named == set(HEADINGS) - {OF_TORCH}
    assert len(HEADINGS) == len(set(HEADINGS))


def note(f: Callable[[], Any]) -> str:
    """The section that the error of f names."""
    with pytest.raises(fcoll.FcollError) as raised:
        f()
    (text,) = raised.value.__notes__
    match = re.fullmatch(r'see docs/errors\.md, "(.*)"', text)
    assert match is not None, text
    assert text in "".join(traceback.format_exception(raised.value))
    return match[1]


def emulated(f: Callable[[Any], Any], x: Any) -> Callable[[], Any]:
    return lambda: fcoll.vmap(f, axis_name="i")(x)


MESH = fcoll.virtual_mesh(i=2)
CALLS: dict[str, Callable[[], Any]] = {
    "An axis name that is not bound": lambda: fcoll.all_reduce(1.0, "i"),
    "No process group yet": lambda: fcoll.all_reduce(1.0, fcoll.WORLD),
    "Subgroups of different sizes": emulated(
        lambda x: fcoll.all_gather(x, fcoll.subgroups("i", [[0, 1], [2]])), torch.ones(3, 1)
    ),
    "A size that the ranks do not divide": emulated(lambda x: fcoll.split(x, "i"), torch.ones(2, 3)),
    "A dtype that the operation is not defined for": emulated(
        lambda x: fcoll.all_reduce(x, "i"), torch.tensor([True, False])
    ),
    "A result that is called replicated, and varies": lambda: fcoll.shard_map(lambda x: x, MESH, P("i"), P())(
        torch.ones(2)
    ),
}


@pytest.mark.parametrize("section", CALLS)
def test_the_note_names_the_section(section: str) -> None:
    assert note(CALLS[section]) == section
    assert note(lambda: torch.compile(CALLS[section], fullgraph=True, backend="eager")()) == section


@pytest.mark.parametrize(
    "f", [lambda x: x if x > 0 else -x, lambda x: x.item(), torch.rand_like], ids=["if", "item", "random"]
)
def test_torch_says_what_the_page_quotes(f: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError) as raised:
        emulated(f, torch.ones(2))()
    quotes = re.findall(r"^\| `(vmap: .*?)` \|", (ROOT / errors.PAGE).read_text(), re.MULTILINE)
    assert sum(str(raised.value).startswith(quote) for quote in quotes) == 1


def test_the_notes_of_processes(ranks: Pools) -> None:
    def disagree() -> str:
        with fcoll.checked(timeout=20):
            return note(lambda: fcoll.all_reduce(torch.ones(1 + dist.get_rank()), fcoll.WORLD))

    assert ranks(2).run(disagree) == ["Ranks that disagree"] * 2


def test_an_error_without_a_section_has_no_note() -> None:
    with pytest.raises(fcoll.CollectiveValueError) as raised:
        fcoll.group([0, 0])
    assert not hasattr(raised.value, "__notes__")
