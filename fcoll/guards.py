"""Which guards a call of a function compiled by `fcoll.compile` verifies: not those on what nobody changes.

Dynamo guards on all that it has read, of libraries as well: hundreds of functions and constants, whose check takes
longer than a small collective. What the program itself can change is always verified: its variables, closures,
arguments and attributes, whatever they hold, and what libraries keep as state.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch


def needed(guards: Sequence[Any]) -> list[bool]:
    """Per guard, whether a call has to verify it."""
    modules = {guard.name: guard.value.__name__ for guard in guards if isinstance(guard.value, ModuleType)}
    own = tuple(f"{name}." for name, module in modules.items() if module.split(".")[0] in _OWN)
    known = tuple(f"{name}." for name, module in modules.items() if module.split(".")[0] in _KNOWN)
    return [not _settled(guard, own, known) for guard in guards]


def _settled(guard: Any, own: tuple[str, ...], known: tuple[str, ...]) -> bool:
    """Whether a guard is on something inside of a library, by its path, that stays as it is.

    `own` and `known` are the paths to what is inside of modules, as variables of the program have them.
    """
    path = _WRAPPED.sub("", guard.name, count=1)
    if path.endswith("'].Tensor") and guard.value is torch.Tensor:  # by whatever name Dynamo has torch there
        return True
    if "L[" in path or "._state" in path or "._scope" in path:
        return False
    if path.startswith(own) or _IN_OWN.match(path):
        return True
    return bool(path.startswith(known) or _IN_KNOWN.match(path)) and _is_code(guard.value)


def _is_code(value: object) -> bool:
    """Whether this is a module, class, function or code object."""
    return isinstance(value, (ModuleType, type, FunctionType, BuiltinFunctionType, CodeType))


_OWN = ("fcoll", "optree")  # which keep state in `_state` and `_scope` only
_KNOWN = ("torch", "builtins", "collections", "dataclasses", "functools", "itertools", "math", "operator", "typing")
_WRAPPED = re.compile(r"(?:(?!__import__)\w[\w.]*\()*")  # type(...), list(dict.keys(...
_IN_OWN = re.compile(
    r"G\['__import_(fcoll|optree)('|_dot_)"
    r"|G\['__import_torch_dot_(_functorch|_dynamo|utils_dot__pytree)"
    r"|__import__\('torch'\)\.utils\._pytree\."
    r"|G\['___unnamed_scope_\w+'\](\['_tuple_new'\]|$)"  # of namedtuples
)
_IN_KNOWN = re.compile(rf"G\['__import_({'|'.join(_KNOWN)})('|_dot_)|__import__\('torch'\)|G\['__builtins_dict__")
