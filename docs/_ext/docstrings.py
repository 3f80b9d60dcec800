"""The docstrings of fcoll, taken apart: one line, paragraphs, and sections of Google's style.

Within a paragraph they are Markdown. A section is a word and a colon on a line, and what is indented below it.
"""

from __future__ import annotations

import re
import textwrap
from typing import NamedTuple

SECTIONS = ("Per rank", "Args", "Attributes", "Returns", "Raises", "Example")
_HEAD = re.compile(rf"({'|'.join(SECTIONS)}):")


class Part(NamedTuple):
    """A section by its name, or Markdown outside of all sections, whose name is empty."""

    name: str
    text: str


def parts(docstring: str) -> list[Part]:
    """The parts in their order. Text between two sections is one part, with its paragraphs."""
    found: list[Part] = []
    name, lines = "", list[str]()

    def end() -> None:
        text = textwrap.dedent("\n".join(lines)).strip("\n")
        if text:
            found.append(Part(name, text))
        lines.clear()

    for line in docstring.splitlines():
        head = _HEAD.fullmatch(line)
        if head:
            end()
            name = head[1]
        elif name and line and not line.startswith(" "):
            end()
            name = ""
            lines.append(line)
        else:
            lines.append(line)
    end()
    return found


def items(text: str) -> list[tuple[str, str]]:
    """Of a section like Args: names, and what they are."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith(" "):
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
        else:
            name, _, rest = line.partition(":")
            found.append((name, rest.strip()))
    return found


def rows(text: str) -> list[tuple[str, str]]:
    """Of a specification per rank: cases, and what holds in them. Without columns it is one row, without a case."""
    lines = text.splitlines()
    if not any(re.search(r"\S {2,}\S", line) for line in lines):
        return [("", " ".join(line.strip() for line in lines))]
    found: list[tuple[str, str]] = []
    for line in lines:
        if line.startswith(" "):
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
        else:
            case, _, rest = (
                part.strip() for part in re.sub(r"(?<=\S) {2,}(?=\S)", "\0", line, count=1).partition("\0")
            )
            found.append((case, rest))
    return found
