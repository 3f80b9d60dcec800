"""Read golden.json: `load()` gives the cases, with tensors for the encoded arrays."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import torch

HERE = pathlib.Path(__file__).parent


def decode(node: Any) -> Any:
    """Arrays become tensors, trees become dicts, tuples and lists; everything else stays."""
    if isinstance(node, list):
        return [decode(each) for each in node]
    if not isinstance(node, dict):
        return node
    if "@" in node:
        return _tensor(node["@"], node["s"], node["d"])
    if node.keys() == {"dict"}:
        node = node["dict"]
    elif node.keys() == {"tuple"}:
        return tuple(decode(each) for each in node["tuple"])
    elif node.keys() == {"list"}:
        return [decode(each) for each in node["list"]]
    return {key: decode(value) for key, value in node.items()}


def _tensor(name: str, shape: list[int], data: list[Any]) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, name)
    if dtype.is_complex:  # interleaved
        pairs = torch.tensor([float(value) for value in data], dtype=torch.float64).view(-1, 2)
        return torch.view_as_complex(pairs).to(dtype).view(shape)
    if dtype.is_floating_point:  # "nan" and "inf" are strings
        return torch.tensor([float(value) for value in data], dtype=torch.float64).to(dtype).view(shape)
    return torch.tensor(data, dtype=dtype).view(shape)


@functools.cache
def _document() -> dict[str, Any]:
    with open(HERE / "golden.json") as file:
        document: dict[str, Any] = json.load(file)
    return document


@functools.cache
def load() -> list[dict[str, Any]]:
    """All cases."""
    return [decode(case) for case in _document()["cases"]]


def tolerances() -> dict[str, float]:
    """rtol and atol by dtype name; "int/bool" for all that is exact."""
    found: dict[str, float] = _document()["meta"]["rtol_atol_by_dtype"]
    return found
