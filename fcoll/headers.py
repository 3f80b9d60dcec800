"""Headers: the structure, shapes, dtypes and plain leaves of a tree as bytes, and back. No communication.

A header is JSON of a few known forms, and reading it makes nothing but plain Python values: whatever the bytes are, no
code of theirs runs. A tree is written as

    None, bool, int, float, str    themselves
    complex, bytes                 ["complex", real, imaginary], ["bytes", base64]
    a tensor                       ["tensor", dtype, kind of device, size, ...]
    list, tuple                    ["list", item, ...], ["tuple", item, ...]
    dict, OrderedDict              ["dict", [key, value], ...], ["OrderedDict", [key, value], ...]

in {"tree": ..., "version": 1}; where there is none to send, {"refusal": "why", "version": 1} stands in its place.
"""

from __future__ import annotations

import base64
import collections
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

VERSION = 1  # of what is said above
MAX_HEADER = 1 << 28  # bytes
MAX_DEPTH = 100  # containers within containers
MAX_BITS = 8192  # of an integer
MAX_AXES = 64
MAX_TENSORS = 1 << 42  # bytes, of all tensors of a tree

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.uint16, torch.uint32, torch.uint64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex32, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    )
}  # fmt: skip


class Unfit(Exception):
    """A tree that no header can hold; the text names the leaf."""


class Malformed(Exception):
    """Bytes that are no header."""


class Slot(NamedTuple):
    """A tensor that has yet to come."""

    dtype: torch.dtype
    device: str
    shape: tuple[int, ...]


class Header(NamedTuple):
    """What was read."""

    node: Any  # the tree, as written
    slots: list[Slot]  # its tensors, in order
    refusal: str  # why the sender has no tree to send; "" if it has


def write(tree: Any) -> tuple[bytes, list[Tensor]]:
    """The header of a tree, and its tensors in order.

    Raises:
        Unfit: it holds something else than the module says.
    """
    tensors: list[Tensor] = []
    try:
        data = _json("tree", _node(tree, "tree", 0, tensors))
    except RecursionError:
        raise Unfit("tree is nested too deeply") from None
    if len(data) > MAX_HEADER:
        raise Unfit(
            f"tree has {len(data)} bytes of structure and plain leaves, more than {MAX_HEADER}; send them as tensors"
        )
    if sum(tensor.nbytes for tensor in tensors) > MAX_TENSORS:
        raise Unfit(f"tree holds more than {MAX_TENSORS} bytes of tensors")
    return data, tensors


def refuse(text: str) -> bytes:
    """A header that says why there is no tree."""
    return _json("refusal", text)


def read(data: bytes) -> Header:
    """What a header says.

    Raises:
        Malformed: it is none.
    """
    try:
        top = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no JSON: {error}") from None
    match top:
        case {"version": version} if version != VERSION:
            raise Malformed(f"it is of version {version}, and this fcoll reads {VERSION}")
        case {"refusal": str(text), "version": _} if len(top) == 2 and text:
            return Header(None, [], text)
        case {"tree": node, "version": _} if len(top) == 2:
            slots: list[Slot] = []
            _tree(node, 0, slots, None)
            if sum(math.prod(slot.shape) * slot.dtype.itemsize for slot in slots) > MAX_TENSORS:
                raise Malformed(f"more than {MAX_TENSORS} bytes of tensors")
            return Header(node, slots, "")
    raise Malformed("neither a tree nor a refusal")


def fill(header: Header, tensors: Sequence[Tensor]) -> Any:
    """The tree, with these tensors in its slots."""
    return _tree(header.node, 0, [], iter(tensors))


# ---- writing


def _json(kind: str, what: Any) -> bytes:
    return json.dumps({kind: what, "version": VERSION}, separators=(",", ":")).encode("ascii")


def _node(tree: Any, path: str, depth: int, tensors: list[Tensor]) -> Any:
    kind: type[Any] = type(tree)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _tensor(tree, path, tensors)
    if tree is None or kind in (bool, float, str):
        return tree
    if kind is int:
        if tree.bit_length() > MAX_BITS:
            raise Unfit(f"{path} is an integer of {tree.bit_length()} bits, more than {MAX_BITS}")
        return tree
    if kind is complex:
        return ["complex", tree.real, tree.imag]
    if kind is bytes:
        return ["bytes", base64.b64encode(tree).decode("ascii")]
    if kind not in (list, tuple, dict, collections.OrderedDict):
        remedy = "send its .full_tensor() or .to_local()" if kind.__name__ == "DTensor" else _HOLDS
        raise Unfit(f"{path} is a {kind.__name__}; {remedy}")
    if depth == MAX_DEPTH:
        raise Unfit(f"tree is nested more than {MAX_DEPTH} deep")
    if kind in (list, tuple):
        return [kind.__name__, *(_node(item, f"{path}[{i}]", depth + 1, tensors) for i, item in enumerate(tree))]
    for key in tree:
        if type(key) not in (str, int):
            raise Unfit(f"{path} has the key {key!r}, a {type(key).__name__}; keys are str and int")
    items = [[key, _node(value, f"{path}[{key!r}]", depth + 1, tensors)] for key, value in tree.items()]
    return [kind.__name__, *items]


_HOLDS = "leaves are tensors, numbers, str, bytes and None, in dicts, lists and tuples; see broadcast_object"


def _tensor(leaf: Tensor, path: str, tensors: list[Tensor]) -> Any:
    name = str(leaf.dtype).removeprefix("torch.")
    if leaf.layout != torch.strided:
        raise Unfit(f"{path} is {leaf.layout}; only strided tensors can be sent: use .to_dense()")
    if name not in DTYPES:
        raise Unfit(f"{path} is {leaf.dtype}, which cannot be sent; convert it")
    if leaf.ndim > MAX_AXES:
        raise Unfit(f"{path} has {leaf.ndim} axes, more than {MAX_AXES}")
    if leaf.device.type == "meta":
        raise Unfit(f"{path} is on the meta device, and has no values to send")
    tensors.append(leaf)
    return ["tensor", name, leaf.device.type, *leaf.shape]


# ---- reading


def _tree(node: Any, depth: int, slots: list[Slot], tensors: Iterator[Tensor] | None) -> Any:
    """The tree that is written as `node`. Its tensors are appended to `slots`, and, if given, taken from `tensors`."""
    match node:
        case None | bool() | int() | float() | str():
            return node
        case ["complex", float(real), float(imaginary)]:
            return complex(real, imaginary)
        case ["bytes", str(text)]:
            try:
                return base64.b64decode(text.encode("ascii"), validate=True)
            except ValueError:
                _malformed(node)
        case ["tensor", str(dtype), str(device), *shape]:
            slots.append(_slot(node, dtype, device, shape))
            return None if tensors is None else next(tensors)
        case ["list" | "tuple" as kind, *nodes] if depth < MAX_DEPTH:
            items = [_tree(item, depth + 1, slots, tensors) for item in nodes]
            return items if kind == "list" else tuple(items)
        case ["dict" | "OrderedDict" as kind, *pairs] if depth < MAX_DEPTH:
            found: dict[Any, Any] = {} if kind == "dict" else collections.OrderedDict()
            for pair in pairs:
                match pair:
                    case [str() | int() as key, value] if type(key) is not bool and key not in found:
                        found[key] = _tree(value, depth + 1, slots, tensors)
                    case _:
                        _malformed(pair)
            return found
    _malformed(node)


def _slot(node: Any, dtype: str, device: str, shape: list[Any]) -> Slot:
    sizes = len(shape) <= MAX_AXES and all(type(size) is int and size >= 0 for size in shape)
    if not sizes or math.prod(size or 1 for size in shape) > MAX_TENSORS or dtype not in DTYPES or device == "meta":
        _malformed(node)
    try:
        torch.device(device)
    except RuntimeError:
        _malformed(node)
    return Slot(DTYPES[dtype], device, tuple(shape))


def _malformed(node: Any) -> NoReturn:
    text = repr(node)
    raise Malformed(f"{text if len(text) < 100 else text[:100] + '…'} is no part of a tree")
