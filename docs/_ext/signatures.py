"""Signatures as text that reads well, from what Python knows of a function."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any


def signatures(thing: Callable[..., Any], *, bound: bool = False) -> list[str]:
    """From the opening bracket on: one, or those of overloads that differ in more than types.

    `bound` leaves out self.
    """
    found: dict[tuple[str, ...], inspect.Signature] = {}
    for overload in typing.get_overloads(thing) or [thing]:
        signature = inspect.signature(overload)
        names = tuple(signature.parameters)
        before = found.get(names)
        first = before.parameters[names[0]].annotation if before and names else None
        if before is None or first in ("None", "complex"):  # a decorator without its function; numbers
            found[names] = signature
    return [_signature(signature, thing, bound) for signature in found.values()]


def _signature(signature: inspect.Signature, thing: Any, bound: bool) -> str:
    parameters = list(signature.parameters.values())[bound:]
    texts, keyword_only = [], False
    for parameter in parameters:
        kind = parameter.kind
        if kind is parameter.KEYWORD_ONLY and not keyword_only:
            texts.append("*")
        keyword_only |= kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = "*" * (kind is parameter.VAR_POSITIONAL) + "**" * (kind is parameter.VAR_KEYWORD)
        text = stars + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}"
        texts.append(text)
    result = ""
    if not inspect.isclass(thing) and signature.return_annotation is not signature.empty:
        result = f" -> {_annotation(signature.return_annotation)}"
    return f"({', '.join(texts)}){result}"


def _annotation(annotation: Any) -> str:
    for attribute in ("__forward_arg__", "__name__"):
        annotation = getattr(annotation, attribute, annotation)
    return re.sub(r"(?<![\w.])Tensor\b", "torch.Tensor", str(annotation))


def _default(value: Any) -> str:
    if type(value).__name__ == "RedOpType":
        return f"dist.ReduceOp.{value.name}"
    return repr(value)
