"""Directives of the reference: entries from docstrings, pictures by `fcoll.draw`, tables by `fcoll.trace`.

{api}  entries for the names of its argument; its content is pictures of the (one) name, a blank line between them
{api-of-module}  a module's docstring, and entries for all its names
{api-others}  entries for collectives that no {api} names
{draw}  the picture that its content, Python, ends in
{pattern}  a module in examples/patterns, and what its program sends
{command}  what a command of fcoll says on --help
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import docstrings
import signatures
import torch
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

import fcoll
from fcoll.charts import bytes_of

PAGES = pathlib.Path(__file__).parents[1] / "reference"
PATTERNS = pathlib.Path(__file__).parents[2] / "examples" / "patterns"
TITLES = {"Per rank": "Per rank", "Args": "Arguments", "Attributes": "Attributes", "Returns": "Returns",
          "Raises": "Raises", "Example": "Example"}  # fmt: skip


def find(name: str) -> tuple[str, str, Any]:
    """A public thing by its dotted name: its module, its name there, and itself."""
    module, _, rest = name.rpartition(".")
    return module, rest, getattr(importlib.import_module(module), rest)


def evaluated(source: str) -> Any:
    """Run a few lines of Python; the value of the last one."""
    scope: dict[str, Any] = {"torch": torch, "fcoll": fcoll, "P": fcoll.P}
    *lines, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        raise ValueError(f"the last line is no expression: {ast.unparse(last)}")
    exec(compile(ast.Module(lines, []), "<docs>", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "<docs>", "eval"), scope)


def picture(source: str) -> list[nodes.Node]:
    """The picture as part of the page, whose colour of text it takes, above the line that makes it."""
    drawn = evaluated(source)
    # It shrinks to what can still be read, and then scrolls within itself.
    style = f'style="min-width: {round(0.8 * drawn.width)}px; max-width: 100%; height: auto"'
    svg = drawn._repr_html_().replace('style="max-width: 100%; height: auto"', style)
    if style not in svg:
        raise ValueError("a picture no longer has the style that is replaced here")
    frame = nodes.container(classes=["picture"])
    frame += nodes.raw("", f'<div class="picture-frame" tabindex="0" role="group">{svg}</div>', format="html")
    code = nodes.literal_block(source, source, language="python", classes=["picture-code"])
    frame += code
    return [frame]


class Draw(SphinxDirective):
    """A picture, by the Python that makes it."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        return picture("\n".join(self.content))


class Api(SphinxDirective):
    """The entries of public names, from their signatures and docstrings."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {"unsigned": directives.flag}

    def run(self) -> list[nodes.Node]:
        names = (self.arguments[0]).split()
        if self.content and len(names) > 1:
            raise self.error("pictures belong to one name")
        pictures = [source for source in "\n".join(self.content).split("\n\n") if source]
        return [node for name in names for node in self.entry(name, pictures)]

    def entry(self, name: str, pictures: Sequence[str] = ()) -> list[nodes.Node]:
        """One name: its signature, the parts of its docstring, its pictures, and its members."""
        module, short, thing = find(name)
        if inspect.isclass(thing) and not short[0].islower():
            kind = "exception" if issubclass(thing, BaseException) else "class"
        else:
            kind = "function"
        signed = "unsigned" not in self.options and kind != "exception"
        heads = [short + text for text in signatures.signatures(thing)] if signed else [short]
        made, content = self.described(kind, heads, module)
        if kind == "exception":
            bases = " and ".join(f"`{base.__name__}`" for base in thing.__bases__)
            content += self.parse_text_to_nodes(f"A kind of {bases}.")
        content += self.body(inspect.getdoc(thing) or "")
        # Pictures stand after what they show: the specification and the transpose.
        places = [i for i, node in enumerate(content) if "arguments" in node.get("classes", [])]
        at = places[0] if places else len(content)
        content[at:at] = [node for source in pictures for node in picture(source)]
        if kind == "class":
            for member, value in vars(thing).items():
                if not (member.startswith("_") or any(hasattr(base, member) for base in thing.__bases__)):
                    content += self.member(module, short, member, value)
        return made

    def member(self, module: str, owner: str, name: str, value: Any) -> list[nodes.Node]:
        if not (callable(value) or isinstance(value, property)):
            return []
        kind = "property" if isinstance(value, property) else "method"
        heads = [name] if kind == "property" else [name + text for text in signatures.signatures(value, bound=True)]
        made, content = self.described(kind, heads, module, owner)
        content += self.body(inspect.getdoc(value) or "")
        return made

    def described(
        self, kind: str, heads: list[str], module: str, owner: str | None = None
    ) -> tuple[list[nodes.Node], nodes.Element]:
        """An empty entry of Sphinx's domain for Python, and where its content goes."""
        context = self.env.ref_context
        saved = dict(context)
        context.update({"py:module": module, "py:class": owner} if owner else {"py:module": module})
        if not owner:
            context.pop("py:class", None)
        source = f"```{{py:{kind}}} {heads[0]}\n" + "".join(f"{' ' * 4}{head}\n" for head in heads[1:]) + "```\n"
        if len(heads) > 1:
            source = f"````{{eval-rst}}\n.. py:{kind}:: " + "\n                 ".join(heads) + "\n````\n"
        made = self.parse_text_to_nodes(source)
        context.clear()
        context.update(saved)
        content = next(iter(node for each in made for node in each.findall(lambda n: n.tagname == "desc_content")))
        return made, content

    def body(self, docstring: str) -> list[nodes.Node]:
        made: list[nodes.Node] = []
        for part in docstrings.parts(docstring):
            made += getattr(self, f"_{part.name.lower().replace(' ', '_') or 'text'}")(part)
        return made

    def _text(self, part: docstrings.Part) -> list[nodes.Node]:
        made = self.parse_text_to_nodes(part.text)
        for node in made:  # "Transpose: ...", with the words marked
            first = node[0] if isinstance(node, nodes.paragraph) and len(node) else None
            if isinstance(first, nodes.Text):
                word, colon, rest = first.partition(":")
                if colon and word in ("Per rank", "Transpose", "Derivative"):
                    node.replace(first, [nodes.strong("", f"{word}:"), nodes.Text(rest)])
        return made

    def _titled(self, part: docstrings.Part, *children: nodes.Node) -> list[nodes.Node]:
        title = TITLES[part.name]
        frame = nodes.container(classes=["part", title.lower().replace(" ", "-")])
        frame += nodes.paragraph("", title, classes=["part-title"])
        frame += children
        return [frame]

    def _per_rank(self, part: docstrings.Part) -> list[nodes.Node]:
        return self._titled(part, self._list(docstrings.rows(part.text)))

    def _args(self, part: docstrings.Part) -> list[nodes.Node]:
        return self._titled(part, self._list(docstrings.items(part.text), code=True))

    _attributes = _raises = _args

    def _returns(self, part: docstrings.Part) -> list[nodes.Node]:
        return self._titled(part, *self.parse_text_to_nodes(part.text))

    def _example(self, part: docstrings.Part) -> list[nodes.Node]:
        return self._titled(part, nodes.literal_block(part.text, part.text, language="pycon"))

    def _list(self, pairs: list[tuple[str, str]], code: bool = False) -> nodes.Node:
        if [name for name, _ in pairs] == [""]:
            return nodes.paragraph("", "", *self.parse_inline(pairs[0][1])[0])
        made = nodes.definition_list(classes=["pairs"])
        for name, text in pairs:
            term = nodes.term("", "", *([nodes.literal("", name)] if code else self.parse_inline(name)[0]))
            rest = nodes.definition("", nodes.paragraph("", "", *self.parse_inline(text)[0]))
            made += nodes.definition_list_item("", term, rest)
        return made


class Module(Api):
    """All of a module; the flag `alone` leaves out the entries of its names, which are elsewhere."""

    has_content = False
    option_spec: ClassVar[dict[str, Any]] = {"alone": directives.flag}

    def run(self) -> list[nodes.Node]:
        (name,) = self.arguments
        module = importlib.import_module(name)
        made = self.parse_text_to_nodes(f"```{{py:module}} {name}\n```\n\n{inspect.getdoc(module)}")
        names = [] if "alone" in self.options else module.__all__
        return made + [node for each in names for node in self.entry(f"{name}.{each}")]


class Others(Api):
    """Collectives that no page has an entry for yet, drawn as they are: so that a new one needs no edit here."""

    required_arguments = 0
    has_content = False

    def run(self) -> list[nodes.Node]:
        pages = "".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
        names = unlisted([f"fcoll.{name}" for name in fcoll.functional.__all__], pages)
        return [node for name in names for node in self.entry(name, [f"fcoll.draw({name}, n=3)"])]


def unlisted(names: list[str], text: str) -> list[str]:
    """Those that have no entry in the text of a page."""
    listed = set(" ".join(re.findall(r"^```\{api\} (.*)$", text, re.MULTILINE)).split())
    return [name for name in names if name not in listed]


class Pattern(SphinxDirective):
    """A module in examples/patterns: its docstring, its program, and what that and its gradient send on four ranks."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        if str(PATTERNS) not in sys.path:
            sys.path.append(str(PATTERNS))
        module = importlib.import_module(name)
        self.env.note_dependency(str(PATTERNS / f"{name}.py"))
        text = inspect.getsource(module)
        text = re.split(r"^from fcoll.groups import GroupLike$", text, flags=re.MULTILINE)[1]
        text = re.split(r"^def dense", text, flags=re.MULTILINE)[0].strip("\n")
        code = nodes.literal_block(text, text, language="python")
        made = self.parse_text_to_nodes(inspect.getdoc(module) or "")
        return [*made, code, *self.sends(module)]

    def sends(self, module: Any) -> list[nodes.Node]:
        """A table: what is sent how often, forward and backward."""
        (axis,) = {name for spec in module.SPECS.values() for name in spec.names}
        mesh = fcoll.virtual_mesh(**{axis: 4})
        mapped = fcoll.shard_map(module.program, mesh, in_specs=(module.SPECS,), out_specs=fcoll.P())
        trace = fcoll.trace(torch.func.grad(mapped))(module.inputs(4))
        kinds = Counter((r.phase, r.collective, f"{r.dtype}{list(r.shape)}", r.ring) for r in trace.records)
        cells = [["", "collective", "each rank puts in", "and sends, in a ring", "times"]]
        cells += [
            [phase, name, what, bytes_of(ring), str(n)]
            for (phase, name, what, ring), n in sorted(kinds.items(), key=lambda kind: kind[0][0] != "forward")
        ]
        return [nodes.paragraph("", "Sent with its gradient, on four ranks:"), table(cells)]


def table(cells: list[list[str]]) -> nodes.Node:
    """The first row is the head."""
    made, group = nodes.table(), nodes.tgroup(cols=len(cells[0]))
    made += group
    group += [nodes.colspec(colwidth=1) for _ in cells[0]]
    for kind, lines in ((nodes.thead, cells[:1]), (nodes.tbody, cells[1:])):
        part = kind()
        group += part
        for line in lines:
            part += nodes.row("", *(nodes.entry("", nodes.paragraph("", cell)) for cell in line))
    return made


class Command(SphinxDirective):
    """What `python -m NAME --help` says."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        text = helped(self.arguments[0])
        return [nodes.literal_block(text, text, language="text")]


class Trimmed(SphinxTransform):
    """Code ends at its last line; blocks that are tested have an empty one behind it."""

    default_priority = 520

    def apply(self, **kwargs: object) -> None:
        for block in self.document.findall(nodes.literal_block):
            text = block.astext()
            if text.endswith("\n") and len(block) == 1:
                block[0] = nodes.Text(text.rstrip("\n"))
                block.rawsource = block.astext()  # Sphinx highlights only what is as it was written


@functools.cache
def helped(name: str) -> str:
    """The help of a command."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        importlib.import_module(name).main(["--help"])
    return said.getvalue().rstrip()


def setup(app: Sphinx) -> ExtensionMetadata:
    for name, directive in (
        ("draw", Draw),
        ("api", Api),
        ("api-of-module", Module),
        ("api-others", Others),
        ("pattern", Pattern),
        ("command", Command),
    ):
        app.add_directive(name, directive)
    app.add_transform(Trimmed)
    return {"parallel_read_safe": True}
