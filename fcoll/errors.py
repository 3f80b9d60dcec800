"""The exceptions that fcoll raises, and the one way to raise those that come before any communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from fcoll import _torch


class FcollError(Exception):
    """What every exception of fcoll is."""


class CollectiveValueError(FcollError, ValueError):
    """An argument of the right kind has a value that cannot be: an axis, a size, a rank, a permutation."""


class CollectiveTypeError(FcollError, TypeError):
    """An argument is of the wrong kind: a leaf that is no tensor, a dtype that the operation is not defined for."""


class UnboundAxisError(FcollError, NameError):
    """An axis name that no enclosing `fcoll.vmap` binds."""


class DisagreementError(FcollError, RuntimeError):
    """The ranks do not make the same call, as `fcoll.checked` has found; raised on all of them."""


class CommunicationError(FcollError, RuntimeError):
    """The backend could not complete a collective: a rank has died, is stuck, or makes other calls."""


PAGE = "docs/errors.md"
"""Where errors are explained. Each that has a section there names it in a note, which is shown below the message."""

Raised = TypeVar("Raised", bound=Exception)


def explained(error: Raised, about: str) -> Raised:
    """`error`, which then names the section of `PAGE` that is about it."""
    error.add_note(f'see {PAGE}, "{about}"')
    return error


_KINDS: dict[str, type[FcollError]] = {
    "value": CollectiveValueError,
    "type": CollectiveTypeError,
    "name": UnboundAxisError,
}


@_torch.allow_in_graph  # so that it runs, and raises, while Dynamo traces its caller
def fail(kind: str, template: str, *details: object, about: str = "") -> NoReturn:
    """Raise the error of this `kind` ("value", "type" or "name"), with `details` put into the braces of `template`.

    Details may be sizes that are symbols in a compiled function, which is why the caller does not format them. `about`
    is the section of `PAGE` that explains the error, if there is one.
    """
    error: Exception = _KINDS[kind](template.format(*map(_concrete, details)))
    if torch.compiler.is_compiling():
        error = _torch.traced_error(type(error))(str(error))
    raise explained(error, about) if about else error


def beyond_int64(value: object) -> bool:
    """Whether a number is an integer that no tensor holds."""
    if not isinstance(value, int):
        return False
    can: Callable[[Any], bool] = _torch.possible if torch.compiler.is_compiling() else bool  # of a symbol, who knows
    return not (can(value >= -(1 << 63)) and can(value < 1 << 63))


def kind_of(value: object) -> str:
    """The name of its type, for `fail`: `__name__` is no constant to Dynamo where that is list or dict."""
    return str(type(value)).removesuffix("'>").rpartition("'")[2].rpartition(".")[2]


def check_flag(function: str, name: str, value: object) -> bool:
    """`value`, which must be True or False: a "no" would be taken for a yes."""
    if not isinstance(value, bool):
        fail("type", "{}: {} is True or False, got {}", function, name, kind_of(value))
    return value


def check_callable(function: str, f: object) -> None:
    """That what `function` transforms is a function."""
    if not callable(f):
        fail("type", "{}: f is a function, got {}", function, kind_of(f))


def _concrete(detail: object) -> object:
    if isinstance(detail, torch.SymInt):
        return int(detail)
    if isinstance(detail, (tuple, list, torch.Size)):
        return tuple(map(_concrete, detail))
    return detail
