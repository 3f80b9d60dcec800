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
from fcoll.engine import MOVE, RANK
from fcoll.invariance import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    COLLECTIVES,
    REDUCE_SCATTER,
    WAIT,
    Family,
    Invariance,
    alike,
    key,
)  # fmt: skip
from fcoll.marks import COTANGENT

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
    return node.meta.get("val")


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
    if len(users) != 1 or users[0].target != WAIT or not (shown(node) and shown(users[0]) and shown(node.args[0])):
        return None
    return users[0], family


def shown(node: Any) -> bool:
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
    if not found or not alike(known[node.args[0]], found[1]):  # type: ignore[index]
        return None
    (wait, family), x = found, node.args[0]
    new = _BY_ONESELF[node.target](node, wait, x, len(family[0]))
    if new is None:
        return None
    name = node.name
    replace(wait, new)
    return f"{name}: {x} is the same on all ranks of the group"


def _all_reduced(node: Node, wait: Node, x: Any, n: int) -> Node | None:
    """n times x is the sum; x the mean and the extrema."""
    if node.args[1] == "sum":
        return emit(wait, aten.mul.Tensor, x, n)
    return emit(wait, aten.clone.default, x) if node.args[1] in ("avg", "max", "min") else None


def _all_gathered(node: Node, wait: Node, x: Any, n: int) -> Node:
    """x again and again."""
    return emit(wait, aten.repeat.default, x, [n] + [1] * (x.meta["val"].ndim - 1))


def _reduce_scattered(node: Node, wait: Node, x: Any, n: int) -> Node | None:
    """The own block of n times x, or of x."""
    if node.args[1] not in ("sum", "avg"):
        return None
    own = _own_block(node, wait, x, n)
    return emit(wait, aten.mul.Tensor, own, n) if node.args[1] == "sum" else own


def _exchanged(node: Node, wait: Node, x: Any, n: int) -> Node | None:
    """What each has for this rank: the own block, from everyone."""
    if not even(node):
        return None
    return emit(wait, aten.repeat.default, _own_block(node, wait, x, n), [n] + [1] * (x.meta["val"].ndim - 1))


def _broadcast(node: Node, wait: Node, x: Any, n: int) -> Node:
    """x, which is that of the root."""
    return emit(wait, aten.clone.default, x)


def _moved(node: Node, wait: Node, x: Any, n: int) -> Node:
    """x where it is sent to, n times x at a root, the own block of it: and zeros elsewhere."""
    args: Any = node.args
    kind, ranks = args[1], args[2][1:]
    if kind == "scatter":
        return emit(wait, aten.squeeze.dim, _own_block(node, wait, x, n), 0)
    at = ranks[:1] if kind == "gather" else ranks[1::2]
    y = emit(wait, aten.repeat.default, x, [n] + [1] * x.meta["val"].ndim) if kind == "gather" else x
    if len(at) == n:
        return emit(wait, aten.clone.default, y)
    rank, value = _rank(node, wait, x), y.meta["val"]
    zero = emit(wait, aten.full.default, [], 0, dtype=value.dtype, device=value.device)
    new = zero
    for each in at:
        new = emit(wait, aten.where.self, emit(wait, aten.eq.Scalar, rank, each), y, new)
    return emit(wait, aten.clone.default, emit(wait, aten.expand.default, new, list(value.shape)))


_BY_ONESELF: dict[Any, Callable[[Node, Node, Any, int], Node | None]] = {
    ALL_REDUCE: _all_reduced,
    ALL_GATHER: _all_gathered,
    REDUCE_SCATTER: _reduce_scattered,
    ALL_TO_ALL: _exchanged,
    BROADCAST: _broadcast,
    MOVE: _moved,
}


def _rank(node: Node, wait: Node, x: Any) -> Node:
    """This rank in the group of a collective, where x is."""
    rank, device = emit(wait, RANK, node.args[-1]), x.meta["val"].device
    return rank if device.type == "cpu" else emit(wait, aten._to_copy.default, rank, device=device)


def _own_block(node: Node, wait: Node, x: Any, n: int) -> Node:
    """This rank's of the n blocks of x."""
    size, *rest = x.meta["val"].shape
    blocks = emit(wait, aten.reshape.default, x, [n, size // n, *rest])
    index = emit(wait, aten.reshape.default, _rank(node, wait, x), [1])
    return emit(wait, aten.squeeze.dim, emit(wait, aten.index.Tensor, blocks, [index]), 0)  # see _own


def even(node: Node) -> bool:
    """Whether all blocks of an all_to_all have one size."""
    sizes: list[Any] = [*node.args[1], *node.args[2]]  # type: ignore[misc]
    return all(type(size) is int and size == sizes[0] for size in sizes)


def of_partly_invariant(node: Node, known: Invariance) -> str | None:
    """Each piece of a concatenation travels on its own; those that every member has already need not."""
    found = message(node, known)
    if not found or node.target not in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER):
        return None
    wait, family = found
    cat: Any = node.args[0]
    stacked = cat.target == aten.unsqueeze.default and cat.args[1] == 0
    cat = cat.args[0] if stacked else cat
    if not isinstance(cat, Node) or cat.target != aten.cat.default or not all(map(shown, cat.args[0])):  # type: ignore[arg-type]
        return None
    pieces: Any = cat.args[0]
    ndim = cat.meta["val"].ndim
    if any(piece.meta["val"].ndim != ndim or piece.meta["val"].dtype != cat.meta["val"].dtype for piece in pieces):
        return None
    axis = (cat.args[1] if len(cat.args) > 1 else 0) % ndim + stacked
    fixed = [piece for piece in pieces if alike(known[piece], family)]
    rest = [piece for piece in pieces if piece not in fixed]
    if not fixed or not rest or (axis == 0 and node.target != ALL_REDUCE):
        return None
    if node.target != ALL_GATHER and node.args[1] not in ("sum", "avg", "max", "min"):
        return None

    def sent(x: Node) -> Node:
        x = emit(wait, aten.unsqueeze.default, x, 0) if stacked else x
        return emit(wait, WAIT, emit(wait, node.target, x, *node.args[1:]))

    together, start, results = sent(emit(wait, aten.cat.default, rest, axis - stacked)), 0, []
    for piece in pieces:
        if piece in fixed:  # of_invariant comes to it
            results.append(sent(piece))
        else:
            end = start + piece.meta["val"].shape[axis - stacked]
            results.append(emit(wait, aten.slice.Tensor, together, axis, start, end))
            start = end
    name = node.name
    replace(wait, emit(wait, aten.cat.default, results, axis))
    return f"{name}: a part of {cat} is the same on all ranks of the group"


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
        and tame(node.args[1])
    )


def tame(number: Any) -> bool:
    """Whether a literal may scale before or after a sum: it is neither 0 nor infinite, nor what keeps a sum finite."""
    return type(number) in (int, float) and 1e-6 < abs(number) < 1e6


def wide(value: Any) -> bool:
    """Whether a sum may be scaled before or after: in halves it could overflow, integers would be rounded."""
    return isinstance(value, Tensor) and value.dtype in (
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )


def unscaled(node: Node, alone: bool = False) -> tuple[Node, list[Node]]:
    """What a node is a multiple of, and the steps to it, last first. If `alone`, no step has another user."""
    steps = []
    while _scale(node) and wide(_value(node)) and wide(_value(node.args[0])) and not (alone and len(node.users) > 1):  # type: ignore[arg-type]
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
    args: Any = node.args
    if node.target == aten.index_select.default and len(args) == 3 and args[1] == 0:
        index = args[2]
    elif node.target == aten.index.Tensor and len(args[1]) == 1:  # as inductor has it
        index = args[1][0]
    else:
        return None
    if not shown(node):
        return None
    while isinstance(index, Node) and index.target in (aten._to_copy.default, *_MOVEMENTS):
        index = index.args[0]
    if not isinstance(index, Node) or index.target != RANK or not shown(node.args[0]):
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


def agreed(node: Node, known: Invariance) -> str | None:
    """A number that comes back from outside of the graph, as the cotangent of a loss, is made the same by one message.

    All ranks hold one function of the arguments, so cotangents c_r of it give what their mean gives; and of what
    follows from the mean nothing needs to be sent.
    """
    family = known.families.get(key(node)) if node.target == COTANGENT else None
    x: Any = node.args[0] if node.args else None
    if family is None or alike(known[x], family) or len({len(group) for group in family}) != 1:
        return None
    if not (shown(x) and wide(_value(x)) and x.meta["val"].numel() == 1 and _sends(node)):
        return None
    part = emit(node, aten.div.Tensor, x, len(family[0]))
    new = emit(node, WAIT, emit(node, ALL_REDUCE, part, "sum", node.args[1]))
    name = node.name
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return f"{name}: sends the mean of what comes from outside, so that it is the same on all ranks of the group"


def _sends(node: Node) -> bool:
    """Whether something is sent that depends on a node."""
    reached = {node}
    for each in list(node.graph.nodes):
        if not reached.isdisjoint(each.all_input_nodes):
            if each.target in COLLECTIVES:
                return True
            reached.add(each)
    return False


RULES: tuple[Rule, ...] = (
    agreed,
    of_invariant,
    of_partly_invariant,
    own_of_gathered,
    once,
    of_sum,
    own_of_reduced,
    gathered_of_scattered,
)
