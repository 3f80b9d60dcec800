"""Trees by optree: dicts, lists, tuples, namedtuples, dataclasses, None, and whatever is registered with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import optree
import torch

from fcoll import _torch
from fcoll.errors import fail

NAMESPACE = "fcoll"  # for dataclasses that nobody registered; optree adds what is registered globally


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves, and the structure around them. None is structure."""
    if torch.compiler.is_compiling():
        leaves, spec = optree.tree_flatten(_boxed(tree), namespace=NAMESPACE)
        leaves = [leaf.value if isinstance(leaf, _Box) else leaf for leaf in leaves]
    else:
        try:
            leaves, spec = optree.tree_flatten(tree, namespace=NAMESPACE)
        except RecursionError:
            fail("value", "a tree holds itself, or is nested too deeply")
    unknown = [kind for kind in dict.fromkeys(map(type, leaves)) if dataclasses.is_dataclass(kind)]
    if unknown:
        for kind in unknown:
            _register(kind)
        return flatten(tree)
    return leaves, spec


class _Box:
    """A number that Dynamo takes for no constant: it would make one of a dict of nothing but constants, and with it of
    what optree keeps of the dict, which it cannot hold."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _boxed(tree: Any) -> Any:
    if type(tree) is dict:
        return {key: _boxed(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_boxed, tree))
    return _Box(tree) if isinstance(tree, (bool, int, float, complex)) else tree


def unflatten(spec: optree.PyTreeSpec, leaves: list[Any]) -> Any:
    """The tree with these leaves."""
    return optree.tree_unflatten(spec, leaves)


def map_leaves(f: Callable[[Any], Any], tree: Any) -> Any:
    """The tree of `f(leaf)`."""
    flat, spec = flatten(tree)
    return unflatten(spec, list(map(f, flat)))


def leaves(tree: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """The leaves of a tree of something else than tensors; `is_leaf` tells them, None perhaps among them."""
    found: list[Any] = optree.tree_leaves(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    return found


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """Per leaf of `tree`, the leaf of `prefix` above it; `is_leaf` tells a leaf of the prefix.

    Raises:
        ValueError: `prefix` is no prefix of `tree`.
    """

    def spread(value: Any, subtree: Any) -> list[Any]:
        return [value] * len(flatten(subtree)[0])

    if is_leaf(prefix):
        return spread(prefix, tree)
    flatten(tree)  # registers dataclasses
    parts = optree.tree_map(spread, prefix, tree, none_is_leaf=True, is_leaf=is_leaf, namespace=NAMESPACE)
    return [
        value for part in leaves(parts, lambda node: isinstance(node, list) and _flat(node, is_leaf)) for value in part
    ]


def _flat(part: list[Any], is_leaf: Callable[[Any], bool]) -> bool:
    return all(map(is_leaf, part))


def path(tree: Any, index: int, root: str = "tree") -> str:
    """Leaf `index` as Python code. Only for messages: it costs more than a collective."""
    _, spec = flatten(tree)
    return str(spec.accessors()[index].codify(root))


_registered: set[type[Any]] = set()


@_torch.assume_constant_result  # while tracing too, registration happens for good
def _register(kind: type[Any]) -> bool:
    if kind in _registered:  # twice in one tree
        return True
    names = [field.name for field in dataclasses.fields(kind)]

    def children(value: Any) -> tuple[list[Any], list[str], list[str]]:
        return [getattr(value, name) for name in names], names, names

    def rebuild(_: Any, values: Any) -> Any:
        value = object.__new__(kind)
        for name, child in zip(names, values, strict=True):
            object.__setattr__(value, name, child)
        return value

    _registered.add(kind)
    register: Any = optree.register_pytree_node  # its types know collections only
    register(kind, children, rebuild, namespace=NAMESPACE, path_entry_type=optree.GetAttrEntry)
    _torch.restart_trace("a dataclass was registered")  # what was read of the registry before is kept in a trace
    return True
