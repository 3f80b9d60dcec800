"""What `fcoll.trace` listens to: while a recorder is on, each collective that runs tells it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Listener = Callable[..., None]
"""(name, x, params, layout, rank axes in front of x, source) -> None"""


class _State(threading.local):
    listener: Listener | None = None
    source: str = ""  # where the user called the collective whose derivative runs
    backward: bool = False


_state = _State()


def active() -> bool:
    """Whether a recorder is on."""
    return _state.listener is not None


def tell(*what: Any) -> None:
    """Report one collective."""
    if _state.listener is not None:
        _state.listener(*what, _state.source, _state.backward)


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


@contextmanager
def derivative(source: str) -> Iterator[None]:
    """What happens here is the backward pass of a collective called at `source`."""
    before = _state.source, _state.backward
    _state.source, _state.backward = source, True
    try:
        yield
    finally:
        _state.source, _state.backward = before
