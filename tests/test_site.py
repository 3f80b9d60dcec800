"""The documentation's site: it builds without a warning or a network, has every public name, and no link is broken."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import fcoll

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MODULES = ("fcoll", "fcoll.lax", "fcoll.regions", "fcoll.testing", "fcoll.compat.torch_nn")
COMMANDS = ("fcoll.bench", "fcoll.env", "fcoll.selfcheck")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html", str(DOCS)]
    done = subprocess.run(
        [*command, str(out / "html"), "-d", str(out / "doctrees")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "html"


class Page(HTMLParser):
    """The anchors and links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}


def broken(found: dict[Path, Page]) -> Iterator[str]:
    """Links within the site that lead nowhere."""
    for path, page in found.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{path.name}: {link}: no such file"
            elif parts.fragment and target in found and unquote(parts.fragment) not in found[target].anchors:
                yield f"{path.name}: {link}: no such anchor"


def described(site: Path) -> set[str]:
    """The names that have an entry, from the inventory that the site offers to others."""
    lines = (site / "objects.inv").read_bytes().split(b"\n", 4)
    return {line.split(" ")[0] for line in zlib.decompress(lines[4]).decode().splitlines() if " py:" in line}


def test_no_link_is_broken(site: Path) -> None:
    found = pages(site)
    assert len(found) > 30
    assert not list(broken(found))


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="here"><a href="b.html">1</a><a href="#there">2</a><a href="#here">3</a>')
    path = (tmp_path / "a.html").resolve()
    assert list(broken({path: Page(path)})) == ["a.html: b.html: no such file", "a.html: #there: no such anchor"]


def test_every_public_name_has_an_entry(site: Path) -> None:
    public = {f"{name}.{each}" for name in MODULES for each in importlib.import_module(name).__all__}
    missing = (public | set(MODULES[1:]) | set(COMMANDS)) - described(site)
    assert not missing


def test_sections_of_docstrings_are_recognised(site: Path) -> None:
    for path in (site / "reference").glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<p>(Per rank|Args|Attributes|Returns|Raises|Example):</?", text), path.name
    text = (site / "reference" / "reductions.html").read_text(encoding="utf-8")
    assert text.count('<p class="part-title">Arguments</p>') >= 6


def test_code_is_highlighted(site: Path) -> None:
    """Sphinx has another element for blocks that it leaves plain, since they are not as they were written."""
    assert not [path.name for path in pages(site) if '<pre class="literal-block">' in path.read_text(encoding="utf-8")]


def test_every_collective_is_drawn(site: Path) -> None:
    """In its own entry, and backward where it has a derivative."""
    entries: dict[str, str] = {}
    for path in (site / "reference").glob("*.html"):
        _, *parts = re.split(r'<dt class="sig sig-object py" id="fcoll\.(\w+)">', path.read_text(encoding="utf-8"))
        entries |= dict(zip(parts[::2], parts[1::2], strict=True))
    for name in sorted(set(fcoll.functional.__all__) - {"axis_index", "axis_size"}):
        picture = re.search(r'<svg[^>]* class="fcoll-picture".*?</svg>', entries[name], re.DOTALL)
        assert picture, name
        assert ">forward<" in picture[0], name
        assert (">backward<" in picture[0]) == (name not in ("argmax", "argmin")), name


def test_a_new_collective_gets_an_entry_by_itself() -> None:
    """So that adding one takes no edit here."""
    text = (DOCS / "reference" / "exchanges.md").read_text()
    assert text.endswith("```{api-others}\n```\n")
    sys.path.insert(0, str(DOCS / "_ext"))
    try:
        from reference import unlisted
    finally:
        sys.path.remove(str(DOCS / "_ext"))
    assert unlisted(["fcoll.all_gather", "fcoll.rotate"], text) == ["fcoll.rotate"]


def test_every_notebook_and_pattern_is_there(site: Path) -> None:
    for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"):
        assert (site / "notebooks" / f"{path.stem}.html").exists(), path.name
    text = (DOCS / "patterns.md").read_text()
    shown = re.findall(r"^```\{pattern\} (\w+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted(
        path.stem for path in (ROOT / "examples" / "patterns").glob("*.py") if path.stem != "against_dense"
    )


def test_names_link_to_pages_of_other_projects(site: Path) -> None:
    """`torch.func.grad` in the text of a page becomes a link, by the inventories in docs/inventories."""
    links = {link for page in pages(site).values() for link in page.links}
    assert "https://docs.pytorch.org/docs/stable/generated/torch.func.grad.html#torch.func.grad" in links
    assert "https://docs.jax.dev/en/latest/_autosummary/jax.lax.psum.html#jax.lax.psum" in links
    assert "https://optree.readthedocs.io/en/latest/index.html" in links


@pytest.mark.parametrize("project", ["optree", "torch"])
def test_inventories_hold_names_that_exist(project: str) -> None:
    lines = (DOCS / "inventories" / f"{project}.txt").read_text().splitlines()
    names = [line.split()[0] for line in lines if " py:" in line]
    assert names
    for name in names:
        if name == "torchrun":
            continue  # a command
        thing: Any = importlib.import_module(project)
        for part in name.split(".")[1:]:
            thing = getattr(thing, part)


def test_pages_say_what_they_are(site: Path) -> None:
    for path in pages(site):
        text = path.read_text(encoding="utf-8")
        assert re.search(r"<title>.+</title>", text), path.name
        assert 'icon" href=' in text, path.name
    assert 'name="description"' in (site / "index.html").read_text(encoding="utf-8")
    assert json.loads((site / "searchindex.js").read_text()[len("Search.setIndex(") : -1])["titles"]
