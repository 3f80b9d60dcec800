"""The notebooks run, say nothing on stderr, and give the outputs that are checked in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import execute
import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

QUICK = ("01_first_steps.ipynb", "02_gradient_pairs.ipynb")  # the others run by `make thorough`
PATHS = [
    pytest.param(path, id=path.stem, marks=[] if path.name in QUICK else [pytest.mark.long])
    for path in execute.notebooks()
]


@pytest.mark.parametrize("path", PATHS)
def test_a_notebook_gives_the_outputs_that_are_checked_in(path: Path) -> None:
    stored = execute.read(path)
    found = execute.differences(stored, execute.run(stored))
    assert not found, "make notebooks writes the outputs anew:\n\n" + "\n\n".join(found)


@pytest.mark.parametrize("path", execute.notebooks(), ids=lambda path: path.stem)
def test_a_notebook_is_normalised(path: Path) -> None:
    stored = execute.read(path)
    nbformat.validate(stored)
    assert stored == execute.normalised(stored)
    assert all(cell.execution_count for cell in stored.cells if cell.cell_type == "code"), "it has not been run"


def test_the_quick_ones_are_there() -> None:
    assert set(QUICK) <= {path.name for path in execute.notebooks()}


# ---- what runs them


def notebook(*sources: str, tags: dict[int, str] | None = None) -> Any:
    make: Any = nbformat.v4
    cells = [make.new_code_cell(source) for source in sources]
    for at, tag in (tags or {}).items():
        cells[at].metadata.tags = [tag]
    return make.new_notebook(cells=cells)


def test_what_a_run_leaves() -> None:
    sources = [
        "print(1)\nprint(2, flush=True)\nprint(3)",
        "import os, fcoll\n[name for name in ('RANK', 'PYTEST_CURRENT_TEST') if name in os.environ]",
        "raise ValueError('why')",
        "import time\ntime.perf_counter()",
        "fcoll.virtual_mesh(i=2)",
        "fcoll.trace(lambda x: fcoll.all_reduce(x, 'i'), fcoll.virtual_mesh(i=2))(1.0).records[0].source",
    ]
    tags = {2: "raises-exception", 3: execute.UNSTABLE}
    once = execute.run(notebook(*sources, tags=tags))
    printed, names, error, _, picture, line = (cell.outputs for cell in once.cells)
    assert [output.text for output in printed] == ["1\n2\n3\n"]
    assert names[0].data["text/plain"] == "[]"
    assert (error[0].ename, error[0].traceback) == ("ValueError", ["ValueError: why"])
    assert sorted(picture[0].data) == ["text/html", "text/plain"]
    assert line[0].data["text/plain"] == "'In[6]:1'"
    assert [cell.execution_count for cell in once.cells] == [1, 2, 3, 4, 5, 6]
    assert all(not cell.metadata or list(cell.metadata) == ["tags"] for cell in once.cells)

    again: Any = nbformat.from_dict(once)
    assert execute.differences(once, again) == []
    again.cells[4].outputs[0].data["text/html"] += " "
    again.cells[3].outputs = []
    assert [text.split("\n")[:2] for text in execute.differences(once, again)] == [
        ["cell 3:", "import time"],
        ["cell 4:", "fcoll.virtual_mesh(i=2)"],
    ]


def test_a_run_is_written_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sum.ipynb"
    execute.write(execute.normalised(notebook("1 + 1")), path)
    execute.main([str(path)])
    assert capsys.readouterr().out.startswith("sum.ipynb ")
    (cell,) = execute.read(path).cells
    assert cell.outputs[0].data["text/plain"] == "2"


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("import warnings\nwarnings.warn('mind')", RuntimeError, "mind"),
        ("import os\nos.write(2, b'from below')", RuntimeError, "from below"),
        ("1 / 0", CellExecutionError, "ZeroDivisionError"),
    ],
)
def test_what_a_run_refuses(source: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        execute.run(notebook(source))
