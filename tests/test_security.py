"""What SECURITY.md promises: where pickles are read, no shell, no shared files, sockets on the loopback interface."""

from __future__ import annotations

import ast
import os
import pathlib
from contextlib import suppress

import pytest
from common import Pools

import fcoll

PACKAGE = pathlib.Path(fcoll.__file__).parent
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
UNPICKLES = {"objects.py", "_pool.py", "_rank.py"}
FORBIDDEN = {
    "eval",
    "exec",
    "system",
    "popen",
    "mktemp",
    "mkstemp",
    "mkdtemp",
    "NamedTemporaryFile",
    "TemporaryDirectory",
}


def calls(file: str) -> list[ast.Call]:
    tree = ast.parse((PACKAGE / file).read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def unpickles(call: ast.Call) -> bool:
    """`loads` and `load` of anything but json."""
    return name(call) in ("loads", "load", "Unpickler") and "json" not in ast.unparse(call.func)


@pytest.mark.parametrize("file", FILES)
def test_nothing_is_run_or_written_that_others_can_reach(file: str) -> None:
    for call in calls(file):
        assert name(call) not in FORBIDDEN, ast.unparse(call)
        assert not any(word.arg == "shell" for word in call.keywords), ast.unparse(call)
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse((PACKAGE / file).read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert not imported & {"subprocess", "tempfile"}


def test_pickles_are_read_where_it_is_said() -> None:
    assert {file for file in FILES if any(map(unpickles, calls(file)))} == UNPICKLES


def listening() -> list[str]:
    """The addresses, in the kernel's hexadecimal, that this process listens at."""
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].split(":")[0])
    return found


def test_ranks_and_their_store_listen_on_the_loopback_interface(ranks: Pools) -> None:
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    per_rank = ranks(2).run(listening)
    assert all(per_rank)  # gloo listens
    for addresses in [*per_rank, listening()]:  # the store is in this process
        assert set(addresses) <= loopback
