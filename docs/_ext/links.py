"""Links that nobody has to write: `torch.func.grad` in the text of a page leads to where it is described.

Inline code that is the name of something public of fcoll, or one in `docs/inventories`, becomes a link, with arguments
behind it or without. So pages stay plain Markdown, and a name that is gone is a warning, which ends the build.

The inventories are short lists of names of other projects' documentation, as objects.inv holds all of them; they are
written as such files for intersphinx, so that a build needs no network.
"""

from __future__ import annotations

import functools
import importlib
import pathlib
import re
import zlib

from docutils import nodes
from sphinx.addnodes import desc, pending_xref
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.transforms import SphinxTransform
from sphinx.util.typing import ExtensionMetadata

import fcoll

INVENTORIES = pathlib.Path(__file__).parents[1] / "inventories"
MODULES = ("fcoll", "fcoll.lax", "fcoll.regions", "fcoll.testing", "fcoll.compat.torch_nn")
COMMANDS = ("fcoll.bench", "fcoll.env", "fcoll.selfcheck")
ELSEWHERE = ("migrating",)  # pages on which a name without a module may be another library's


def inventory(path: pathlib.Path) -> tuple[str, list[tuple[str, str, str]]]:
    """The base address in a list, and its lines: a name, its role, and the path of the page."""
    base, *lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return base, [(name, role, page.replace("$", name)) for name, role, page in map(str.split, lines)]


def public() -> list[str]:
    """Every public name, with its module."""
    return [
        *MODULES, "fcoll.functional", *COMMANDS,
        *(f"{name}.{each}" for name in MODULES for each in importlib.import_module(name).__all__),
    ]  # fmt: skip


@functools.cache
def targets() -> dict[str, str]:
    """What a piece of code may say, and the name that it means."""
    found = {name: name for name in public() if name not in ("fcoll", "fcoll.__version__")}
    found |= {name: name for path in INVENTORIES.glob("*.txt") for name, _, _ in inventory(path)[1]}
    found |= {name.removeprefix("fcoll."): name for name in found if name.startswith(("fcoll.lax.", "fcoll.regions."))}
    return found | {name: f"fcoll.{name}" for name in fcoll.__all__ if _telling(name)}


def _telling(name: str) -> bool:
    """Names that mean fcoll's without a module before them; `mesh` means an argument, `shard_map` perhaps JAX's."""
    long = ("_" in name and name != "shard_map") or (name[0].isupper() and name not in ("P", "Group"))
    return name in fcoll.functional.__all__ or name in ("start", "wait", "send", "recv") or long


class CodeLinks(SphinxTransform):
    """Inline code that is a known name becomes a reference to it."""

    default_priority = 500

    def apply(self, **kwargs: object) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            name = re.sub(r"\(.*\)$", "", literal.astext(), flags=re.DOTALL)
            target = targets().get(name)
            if target is None or (self.env.docname in ELSEWHERE and "." not in name):
                continue
            above = _ancestors(literal)
            if any(isinstance(node, (nodes.title, nodes.reference, nodes.term, pending_xref)) for node in above):
                continue
            if any(target in sign["ids"] for node in above if isinstance(node, desc) for sign in node[:-1]):
                continue  # in its own entry
            reference = pending_xref(
                "", refdomain="py", reftype="obj", reftarget=target, refexplicit=True, refwarn=True,
                refdoc=self.env.docname,
            )  # fmt: skip
            literal.replace_self(reference)
            reference += literal


class Subscripts(SphinxTransform):
    """x_r, Σ_s and x_{n-1} in running text get their subscripts, which docstrings and plain Markdown cannot have."""

    default_priority = 510
    pattern = re.compile(r"(?<![\w.])((?:[A-Za-zȳẏẋ]|Σ|Π)[\u0304\u0307]?)_(\{[^}]+\}|src|dst|source|[a-z0-9])(?!\w)")
    kept = (nodes.literal, nodes.literal_block, nodes.raw, nodes.title, nodes.comment, nodes.math)

    def apply(self, **kwargs: object) -> None:
        for text in list(self.document.findall(nodes.Text)):
            if not self.pattern.search(text) or any(isinstance(node, self.kept) for node in _ancestors(text)):
                continue
            made: list[nodes.Node] = []
            at = 0
            for match in self.pattern.finditer(text):
                made.append(nodes.Text(text[at : match.start(2) - 1]))
                made.append(nodes.subscript("", match[2].strip("{}")))
                at = match.end()
            text.parent.replace(text, [*made, nodes.Text(text[at:])])


def _ancestors(node: nodes.Node) -> list[nodes.Element]:
    found: list[nodes.Element] = []
    while node.parent is not None:
        node = node.parent
        found.append(node)
    return found


def write_inventories(app: Sphinx, config: Config) -> None:
    """As intersphinx reads them, beside the other files that a build keeps."""
    app.doctreedir.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for path in sorted(INVENTORIES.glob("*.txt")):
        base, lines = inventory(path)
        body = "".join(f"{name} {role} 1 {page} -\n" for name, role, page in lines)
        head = f"# Sphinx inventory version 2\n# Project: {path.stem}\n# Version: \n# The rest is compressed by zlib.\n"
        file = app.doctreedir / f"{path.stem}.inv"
        file.write_bytes(head.encode() + zlib.compress(body.encode()))
        mapping[path.stem] = (base, str(file))
    config["intersphinx_mapping"] = mapping


def setup(app: Sphinx) -> ExtensionMetadata:
    app.setup_extension("sphinx.ext.intersphinx")
    app.connect("config-inited", write_inventories, priority=100)
    app.add_transform(CodeLinks)
    app.add_transform(Subscripts)
    return {"parallel_read_safe": True}
