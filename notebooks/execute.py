"""Run the notebooks and write their outputs back: `python notebooks/execute.py [file ...]`, or `make notebooks`.

The tests run them with the same function, and compare what comes out with what the files hold. So the files hold
nothing that differs between two runs or two machines: no times, no paths, no metadata but tags. A cell whose output
does differ, such as a duration, has the tag "unstable". One that is to raise has the tag "raises-exception".
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

HERE = Path(__file__).parent
UNSTABLE = "unstable"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}
LIMIT = 120  # seconds for one cell
# what the kernel must not take from who runs it: a launcher's ranks, and pytest's capture
FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_CURRENT_TEST")


def notebooks() -> list[Path]:
    """The files, in the order of reading."""
    return sorted(HERE.glob("[0-9]*.ipynb"))


def read(path: Path) -> Any:
    """The notebook in a file."""
    return nbformat.read(path, as_version=4)


def write(notebook: Any, path: Path) -> None:
    """Write it, as it is."""
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def run(notebook: Any) -> Any:
    """The notebook as a fresh kernel of this Python leaves it, normalised.

    Raises:
        CellExecutionError: a cell raised.
        RuntimeError: a cell has written to stderr, as warnings do.
    """
    fresh = nbformat.from_dict(notebook)
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    env["OMP_NUM_THREADS"] = "1"  # the order of a sum may depend on the number of threads
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), env.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as scratch:
        # by way of files rather than ports, and the kernel of this Python, whatever others are installed
        specs = KernelSpecManager(kernel_dirs=[])
        manager = AsyncKernelManager(transport="ipc", ip=f"{scratch}/kernel", kernel_spec_manager=specs)
        client = NotebookClient(fresh, km=manager, timeout=LIMIT, resources={"metadata": {"path": str(HERE)}})
        client.execute(env=env, cleanup_kc=True)  # or the kernel would go on
    for cell in fresh.cells:
        for output in cell.get("outputs", ()):
            if output.output_type == "stream" and output.name == "stderr":
                raise RuntimeError(f"a cell wrote to stderr:\n\n{cell.source}\n\n{output.text}")
    return normalised(fresh)


def normalised(notebook: Any) -> Any:
    """A copy without what says when, where and by what it was run; cells are numbered."""
    cells = []
    for i, given in enumerate(notebook.cells):
        cell = {"cell_type": given.cell_type, "id": f"cell-{i:02}", "metadata": {}, "source": given.source.strip("\n")}
        if given.metadata.get("tags"):
            cell["metadata"] = {"tags": sorted(given.metadata["tags"])}
        if given.cell_type == "code":
            cell["execution_count"] = given.execution_count
            cell["outputs"] = _outputs(given.outputs, given.execution_count)
        cells.append(cell)
    return nbformat.from_dict({"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5})


def _outputs(given: list[Any], count: int | None) -> list[Any]:
    """The same outputs: streams joined, errors without their traceback, HTML without a second picture."""
    found: list[Any] = []
    for output in given:
        new = dict(output)
        if "data" in new:
            svg_twice = "text/html" in new["data"]
            new["data"] = {k: v for k, v in new["data"].items() if not (svg_twice and k == "image/svg+xml")}
            new["metadata"] = {}
        if new["output_type"] == "execute_result":
            new["execution_count"] = count
        if new["output_type"] == "error":  # a traceback is of one machine
            new["traceback"] = [f"{new['ename']}: {new['evalue']}"]
        previous = found[-1] if found else {}
        if new["output_type"] == "stream" and previous.get("name") == new["name"]:
            previous["text"] += new["text"]
        else:
            found.append(new)
    return found


def differences(stored: Any, fresh: Any) -> list[str]:
    """What is not the same in two normalised notebooks, cell by cell; of unstable cells, the kinds of outputs."""
    if len(stored.cells) != len(fresh.cells):
        return [f"{len(stored.cells)} cells, and now {len(fresh.cells)}"]
    found = []
    for i, (old, new) in enumerate(zip(stored.cells, fresh.cells, strict=True)):
        unstable = UNSTABLE in old.metadata.get("tags", ())
        before, after = _compared(old, unstable), _compared(new, unstable)
        if before != after:
            found.append(f"cell {i}:\n{old.source}\n--- stored\n{_short(before)}\n--- now\n{_short(after)}")
    return found


def _compared(cell: Any, unstable: bool) -> Any:
    if not unstable or cell.cell_type != "code":
        return cell
    kinds = [(output.output_type, output.get("name"), sorted(output.get("data", ()))) for output in cell.outputs]
    return {**cell, "outputs": kinds}


def _short(compared: Any) -> str:
    return re.sub(r"<svg.*?</svg>", "<svg>", str(compared.get("outputs", compared)), flags=re.DOTALL)


def main(names: list[str]) -> None:
    """Run the notebooks that are named, or all."""
    for path in [Path(name) for name in names] or notebooks():
        print(f"{path.name} ", end="", flush=True)
        begin = time.monotonic()
        write(run(read(path)), path)
        print(f"{time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
