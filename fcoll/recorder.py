"""What runs, and where it was called: `fcoll.trace` listens to it, and checks and errors name the lines."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor

from fcoll import _torch

Listener = Callable[..., None]
"""(name of the record, x, layout, source, whether backward) -> None"""


class _State(threading.local):
    listener: Listener | None = None
    source: str = ""  # where the user called the collective whose derivative runs
    backward: bool = False
    of: str = ""  # that collective


_state = _State()


def active() -> bool:
    """Whether a recorder is on."""
    return _state.listener is not None


def tell(name: str, x: Tensor, layout: Any, params: tuple[Any, ...]) -> None:
    """Report one collective."""
    if _state.listener is not None:
        _state.listener(name, x, layout, _state.source or source(), _state.backward)


def backward() -> bool:
    """Whether what runs is the backward pass of a collective."""
    return _state.backward


def backward_of() -> str:
    """Of which collective."""
    return _state.of


def source() -> str:
    """The innermost line, outside this package and torch, of what runs: where the user called."""
    if _state.source:
        return _state.source
    for file, line in reversed(_torch.traced_lines()):
        if not file.startswith(_INSIDE):
            return _spelled(file, line)
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return _spelled(frame.f_code.co_filename, frame.f_lineno)


def _spelled(file: str, line: int) -> str:
    """train.py:12, or In[3]:2 in a notebook, whose cells are files with numbers for names."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = shell and shell.compile.format_code_name(file)  # as in IPython's tracebacks
    return f"{cell[1] if cell else os.path.basename(file)}:{line}"


_INSIDE = (
    *(os.path.dirname(str(path)) + os.sep for path in (__file__, optree.__file__, torch.__file__)),
    "<eval_with_key>",  # code that torch.fx has generated
)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Turn a recorder on."""
    before = _state.listener
    _state.listener = listener
    try:
        yield
    finally:
        _state.listener = before


@contextmanager
def paused() -> Iterator[None]:
    """What happens here is not part of the program."""
    before = _state.listener
    _state.listener = None
    try:
        yield
    finally:
        _state.listener = before


class derivative:
    """What happens in this context is the backward pass of a collective that was called there."""

    def __init__(self, called: str, collective: str = "") -> None:
        self.called, self.collective = called, collective

    def __enter__(self) -> None:
        self.before = _state.source, _state.backward, _state.of
        _state.source, _state.backward, _state.of = self.called, True, self.collective

    def __exit__(self, *_: object) -> None:
        _state.source, _state.backward, _state.of = self.before
