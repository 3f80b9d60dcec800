"""The rules by which `fcoll.optimize` drops and merges messages, one function each.

A rule looks at one node of a graph and either leaves it alone (None) or rewrites the graph and says why. It applies to
collectives whose only user is their wait, of groups that are known, all of one size. What decides is in the graph and
in the families of its groups, so that all ranks rewrite alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fcoll import _torch
from fcoll.engine import RANK
from fcoll.invariance import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    COLLECTIVES,
    REDUCE_SCATTER,
    WAIT,
    Family,
    Invariance,
    alike,
    key,
)  # fmt: skip

aten = torch.ops.aten

Rule = Callable[[Node, Invariance], "str | None"]


def emit(before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new operation in front of a node, of which it takes the place, and its value on fake tensors."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    node.meta = {
        key: value for key, value in before.meta.items() if key not in ("val", "tensor_meta", "eager_input_vals")
    }
    values = torch.fx.map_arg((args, kwargs), _value)
    node.meta["val"] = _torch.fake_result(before.meta["val"], target, *values)
    return node


def _value(node: Node) -> Any:
    return node.meta["val"]


def replace(node: Node, new: Node) -> None:
    """Use `new` instead of a wait, whose collective goes too, or of another node."""
    node.replace_all_uses_with(new)
    collective = node.args[0]
    node.graph.erase_node(node)
    if node.target == WAIT:
        assert isinstance(collective, Node)
        collective.graph.erase_node(collective)


def message(node: Node, known: Invariance) -> tuple[Node, Family] | None:
    """The wait and the groups of a collective that rules apply to."""
    family = known.family(node)
    if family is None or len({len(group) for group in family}) != 1:
        return None
    users = list(node.users)
    if len(users) != 1 or users[0].target != WAIT or not (_shown(node) and _shown(users[0]) and _shown(node.args[0])):
        return None
    return users[0], family


def _shown(node: Any) -> bool:
    """Whether the graph says what a node's value looks like, in literal sizes."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(type(size) is int for size in value.shape)


def waited(node: Any, target: Any, known: Invariance) -> tuple[Node, Family] | None:
    """The collective of this kind that a node is the wait of, and its groups."""
    if not isinstance(node, Node) or node.target != WAIT or not isinstance(node.args[0], Node):
        return None
    collective = node.args[0]
    found = message(collective, known) if collective.target == target else None
    return (collective, found[1]) if found else None


# ---- what is the same on all ranks of the group


def of_invariant(node: Node, known: Invariance) -> str | None:
    """A collective of a value that every member has already is computed by each for itself."""
    found = message(node, known)
    if not found or node.target not in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST):
        return None
    wait, family = found
    x: Any = node.args[0]
    if not alike(known[x], family):
        return None
    n = len(family[0])
    if node.target == ALL_REDUCE:
        if node.args[1] == "sum":
            new = emit(wait, aten.mul.Tensor, x, n)
        elif node.args[1] in ("avg", "max", "min"):
            new = emit(wait, aten.clone.default, x)
        else:
            return None
    elif node.target == ALL_GATHER:
        new = emit(wait, aten.repeat.default, x, [n] + [1] * (x.meta["val"].ndim - 1))
    elif node.target == REDUCE_SCATTER:
        if node.args[1] not in ("sum", "avg"):
            return None
        size, *rest = x.meta["val"].shape
        rank = emit(wait, RANK, node.args[-1])
        if x.meta["val"].device.type != "cpu":
            rank = emit(wait, aten._to_copy.default, rank, device=x.meta["val"].device)
        blocks = emit(wait, aten.reshape.default, x, [n, size // n, *rest])
        new = emit(wait, aten.index_select.default, blocks, 0, emit(wait, aten.reshape.default, rank, [1]))
        new = emit(wait, aten.squeeze.dim, new, 0)
        if node.args[1] == "sum":
            new = emit(wait, aten.mul.Tensor, new, n)
    else:
        new = emit(wait, aten.clone.default, x)
    name = node.name
    replace(wait, new)
    return f"{name}: {x} is the same on all ranks of the group"


# ---- sums and scales

_SCALES = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
_COPIES = (aten.clone.default, aten.alias.default, aten.detach.default)


def _scale(node: Node) -> bool:
    """Whether a node scales a floating value by a literal, or only copies it."""
    if node.target in _COPIES or node.target == aten.neg.default:
        return True
    return (
        node.target in _SCALES
        and len(node.args) == 2
        and not node.kwargs
        and isinstance(node.args[0], Node)
        and type(node.args[1]) in (int, float)
    )


def _wide(node: Node) -> bool:
    """Whether a sum may be scaled before or after: in halves it could overflow, integers would be rounded."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )


def unscaled(node: Node, alone: bool = False) -> tuple[Node, list[Node]]:
    """What a node is a multiple of, and the steps to it, last first. If `alone`, no step has another user."""
    steps = []
    while _scale(node) and _wide(node) and _wide(node.args[0]) and not (alone and len(node.users) > 1):  # type: ignore[arg-type]
        if node.meta["val"].dtype != node.args[0].meta["val"].dtype:  # type: ignore[union-attr]
            break
        steps.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return node, steps


def rescale(before: Node, x: Node, steps: Sequence[Node]) -> Node:
    """The steps again, of another value."""
    for step in reversed(steps):
        if step.target not in _COPIES:
            x = emit(before, step.target, x, *step.args[1:])
    return x


def once(node: Node, known: Invariance) -> str | None:
    """The same collective of the same value, or of a multiple if it is a sum, was done before."""
    found = message(node, known)
    if not found:
        return None
    linear = node.target == ALL_REDUCE and node.args[1] in ("sum", "avg")
    base, steps = _stripped(node, linear)
    for other in node.graph.nodes:
        if other is node:
            return None
        if other.target != node.target or other.args[1:] != node.args[1:] or not message(other, known):
            continue
        other_base, other_steps = _stripped(other, linear)
        if other_base is not base:
            continue
        (other_wait, _), (wait, _) = message(other, known), found  # type: ignore[misc]
        if wait < other_wait:  # the later message is waited for earlier
            continue
        if any(step.target not in _COPIES for step in other_steps):
            sent = emit(other, node.target, base, *node.args[1:])
            first = emit(other, WAIT, sent)
            replace(other_wait, rescale(other_wait, first, other_steps))
        else:
            first = other_wait
        new = rescale(wait, first, steps)
        name = node.name
        replace(wait, emit(wait, aten.clone.default, first) if new is first else new)
        return f"{name}: sends what {other.name} sends"
    return None


def _stripped(node: Node, linear: bool) -> tuple[Node, list[Node]]:
    base: Any = node.args[0]
    if linear:
        return unscaled(base)
    while base.target in _COPIES and not base.kwargs:
        base = base.args[0]
    return base, []


def of_sum(node: Node, known: Invariance) -> str | None:
    """The sum of two reductions is the reduction of the sum."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor) or len(node.args) != 2 or node.kwargs:
        return None
    if not all(isinstance(arg, Node) for arg in node.args) or node.args[0] is node.args[1]:
        return None
    parts = [unscaled(arg, alone=True) for arg in node.args]  # type: ignore[arg-type]
    reductions = [each for wait, _ in parts if (each := waited(wait, ALL_REDUCE, known))]
    if len(reductions) != 2:
        return None
    (first, _), (second, _) = reductions
    if first is second or first.args[1:] != second.args[1:] or first.args[1] not in ("sum", "avg"):
        return None
    looks = {(arg.meta["val"].shape, arg.meta["val"].dtype) for arg in (first, second, node)}
    if len(looks) != 1 or any(len(wait.users) > 1 for wait, _ in parts):
        return None
    terms = [rescale(node, r.args[0], steps) for r, (_, steps) in zip((first, second), parts, strict=True)]  # type: ignore[arg-type]
    total = emit(node, node.target, *terms)
    new = emit(node, WAIT, emit(node, ALL_REDUCE, total, *first.args[1:]))
    name = node.name
    node.replace_all_uses_with(new)
    _erase_unused(node)
    return f"{name}: reduces the sum of what {first.name} and {second.name} reduce"


def _erase_unused(node: Node) -> None:
    """Erase a node, and what only it used."""
    todo = [node]
    while todo:
        each = todo.pop()
        if not each.users and each.op == "call_function" and not getattr(each, "_erased", False):
            inputs = each.all_input_nodes
            each.graph.erase_node(each)
            todo += inputs


# ---- the own slice

_MOVEMENTS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, *_COPIES,
}  # fmt: skip


def moved(node: Any, alone: bool = False) -> tuple[Any, list[Node]]:
    """What a node has the elements of, and the movements of them, last first. If `alone`, without other users."""
    steps = []
    while isinstance(node, Node) and node.target in _MOVEMENTS and not (alone and len(node.users) > 1):
        if node.all_input_nodes != [node.args[0]]:  # a size that is computed
            break
        steps.append(node)
        node = node.args[0]
    return node, steps


def _own(node: Node, known: Invariance) -> Family | None:
    """Whether a node selects, along its first axis, by the rank in a group: the groups."""
    if node.target != aten.index_select.default or len(node.args) != 3 or node.args[1] != 0 or not _shown(node):
        return None
    index = node.args[2]
    while isinstance(index, Node) and index.target in (aten._to_copy.default, *_MOVEMENTS):
        index = index.args[0]
    if not isinstance(index, Node) or index.target != RANK or not _shown(node.args[0]):
        return None
    family = known.families.get(key(index))
    if family is None or any(len(group) != node.args[0].meta["val"].shape[0] for group in family):  # type: ignore[union-attr]
        return None
    return family


def own_of_gathered(node: Node, known: Invariance) -> str | None:
    """The own slice of what has been gathered is what the rank had."""
    family = _own(node, known)
    if not family:
        return None
    start, steps = moved(node.args[0])
    found = waited(start, ALL_GATHER, known)
    if not found or found[1] != family:
        return None
    gather = found[0]
    x: Any = gather.args[0]
    value, n = x.meta["val"], len(family[0])
    if value.numel() * n > 1 << 24:
        return None
    places = torch.arange(n * value.numel()).view(n, *value.shape)
    numbers = places.view(n * value.shape[0], *value.shape[1:])
    for step in reversed(steps):
        numbers = step.target(numbers, *step.args[1:], **step.kwargs)  # type: ignore[operator]
    for rank in range(n):  # is each slice the rank's own elements, in their order?
        if not torch.equal(numbers[rank].reshape(-1), places[rank].reshape(-1)):
            return None
    name, result = node.name, list(node.meta["val"].shape)
    new = emit(node, aten.reshape.default, x, result)
    replace(node, emit(node, aten.clone.default, new))
    return f"{name}: the own part of what {gather.name} gathers"


def own_of_reduced(node: Node, known: Invariance) -> str | None:
    """The own slice of a reduction that nothing else uses needs no other rank's."""
    family = _own(node, known)
    if not family:
        return None
    start, steps = moved(node.args[0], alone=True)
    found = waited(start, ALL_REDUCE, known)
    if not found or found[1] != family or len(start.users) > 1:
        return None
    reduction = found[0]
    if reduction.args[1] not in ("sum", "avg"):
        return None
    x: Any = reduction.args[0]
    for step in reversed(steps):
        x = emit(node, step.target, x, *step.args[1:], **step.kwargs)
    x = emit(node, aten.clone.default, x, memory_format=torch.contiguous_format)
    sent = emit(node, REDUCE_SCATTER, x, reduction.args[1], len(family[0]), reduction.args[2])
    name, before = node.name, reduction.name
    new = emit(node, WAIT, sent)
    node.replace_all_uses_with(new)
    _erase_unused(node)
    return f"{name}: only the own part of {before} is used"


def gathered_of_scattered(node: Node, known: Invariance) -> str | None:
    """Gathering what was scattered is a reduction for all."""
    found = message(node, known) if node.target == ALL_GATHER else None
    if not found:
        return None
    start, steps = moved(node.args[0], alone=True)
    scatter = waited(start, REDUCE_SCATTER, known)
    if not scatter or scatter[1] != found[1] or len(start.users) > 1:
        return None
    numbers = torch.arange(math.prod(start.meta["val"].shape)).view(start.meta["val"].shape)
    for step in reversed(steps):
        numbers = step.target(numbers, *step.args[1:], **step.kwargs)  # type: ignore[operator]
    if not torch.equal(numbers.reshape(-1), torch.arange(numbers.numel())):
        return None
    if scatter[0].args[1] not in ("sum", "avg"):
        return None
    wait = found[0]
    reduced = emit(wait, WAIT, emit(wait, ALL_REDUCE, scatter[0].args[0], scatter[0].args[1], node.args[-1]))
    new = emit(wait, aten.reshape.default, reduced, list(wait.meta["val"].shape))
    name, before = node.name, scatter[0].name
    wait.replace_all_uses_with(new)
    _erase_unused(wait)
    return f"{name}: gathers what {before} has scattered"


RULES: tuple[Rule, ...] = (
    of_invariant,
    own_of_gathered,
    once,
    of_sum,
    own_of_reduced,
    gathered_of_scattered,
)


def unused(graph: torch.fx.Graph, removable: Callable[[Node], bool]) -> list[str]:
    """Erase what nothing uses, collectives too; returns these."""
    gone = []
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and removable(node):
            if node.target in COLLECTIVES:
                gone.append(f"{node.name}: nothing uses it")
            graph.erase_node(node)
    return gone
