"""Sphinx's settings. A build needs no network: `make docs` ends at the first thing that is not right."""

from __future__ import annotations

import os
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
os.environ.setdefault("OMP_NUM_THREADS", "1")  # pictures are small
os.environ["COLUMNS"] = "80"  # of what commands print
sys.path.insert(0, str(HERE / "_ext"))

import fcoll  # noqa: E402

project = "fcoll"
author = "The fcoll authors"
project_copyright = f"{author}. Apache License 2.0"
version = release = fcoll.__version__
language = "en"
extensions = ["myst_nb", "sphinx_copybutton", "links", "reference"]
exclude_patterns = ["_build", "_ext"]
smartquotes = False  # what the pages quote is often code

# Pages are Markdown and notebooks; the tests run both, so here notebooks are shown as they are checked in.
nb_execution_mode = "off"
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_block", "deflist"]
myst_html_meta = {
    "description": "Functional collectives for PyTorch: pure functions on trees of tensors, with exact derivatives."
}

python_maximum_signature_line_length = 72
python_use_unqualified_type_names = True
maximum_signature_line_length = 72

html_theme = "furo"
html_title = f"fcoll {release}"
html_static_path = ["_static"]
html_css_files = ["fcoll.css"]
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5c94", "color-brand-content": "#0b5c94"},
    "dark_css_variables": {"color-brand-primary": "#7cc4f0", "color-brand-content": "#7cc4f0"},
    "navigation_with_keys": False,
}
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"


def copy_notebooks() -> None:
    """Into this folder, where they are pages; their links to pages of this folder lead on."""
    target = HERE / "notebooks"
    target.mkdir(exist_ok=True)
    sources = {path.name: path for path in sorted((HERE.parent / "notebooks").glob("[0-9]*.ipynb"))}
    for old in set(target.glob("*.ipynb")):
        if old.name not in sources:
            old.unlink()
    for name, source in sources.items():
        text = re.sub(r"\]\((?:\.\./)+docs/", "](../", source.read_text(encoding="utf-8"))
        if not (target / name).exists() or (target / name).read_text(encoding="utf-8") != text:
            (target / name).write_text(text, encoding="utf-8")


copy_notebooks()
