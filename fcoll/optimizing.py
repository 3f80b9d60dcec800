"""`fcoll.optimize`: traced programs without the messages that invariance proves needless.

Ranks that rewrite differently would wait for each other for good, and what is concluded here about values on other
ranks holds only if they have the same graph. So the ranks compare their graphs first, and leave them alone if they
differ: as when Python that asks for the rank was traced into them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor

from fcoll import _torch, checks, deferred, fusing, hoisting, rewrites, tidying
from fcoll.engine import RANK
from fcoll.errors import CommunicationError, explained, fail
from fcoll.invariance import COLLECTIVES, WAIT, Families, Invariance, constant, function_of_arguments, key, literal
from fcoll.marks import COTANGENT, INVARIANT


class Plan(NamedTuple):
    """What `optimize` did, in the `meta["fcoll"]` of its result.

    Attributes:
        digest: of the graph before; the same on all ranks if anything was done.
        before: the number of collectives in the graph.
        after: the same, in the result.
        reasons: a line for each rule applied, in order; or why nothing was done.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> fcoll.optimize(make_fx(torch.sin)(torch.ones(2))).meta["fcoll"]
        Plan(digest='', before=0, after=0, reasons=('there are no processes',))
    """

    digest: str
    before: int
    after: int
    reasons: tuple[str, ...]


def optimize(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Drop and merge the messages of a traced program, as far as it can be proved that the results stay the same.

    All ranks of torch.distributed's world call it, on their graphs of one program, in the same order: they compare
    the graphs, and leave them alone if they are not the same but for the names of groups. In the result

    - a collective of a value that is the same on all ranks of the group is a local operation;
    - the same collective of the same value happens once, and a sum of reductions is one reduction;
    - of a gather of which only the own part is used nothing is left, of such a reduction a reduce_scatter;
    - small reductions that do not need each other's results travel together.

    What is the same is found from what `fcoll.shard_map` says of its arguments and results while something traces
    within `fcoll.marked`, from literals, and from the collectives themselves. Everything else may differ: other inputs,
    random numbers, results of operations that are not torch's own, groups that are not of a mesh. Floating-point
    results may differ by rounding.

    Args:
        graph_module: what make_fx or a backend of torch.compile holds: ATen operations, none in place, and
            `torch.ops._c10d_functional`. It is changed.

    Returns:
        The same graph module, without marks; its `meta["fcoll"]` is a `Plan`, which says what was done.

    Raises:
        TypeError: something else than a GraphModule.
        CommunicationError: other ranks did not call it within the time limit of the world's store.
        DisagreementError: under `fcoll.checked`, ranks that did not do the same.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> graph_module = fcoll.optimize(make_fx(torch.sin)(torch.ones(2)))
        >>> graph_module.meta["fcoll"].reasons
        ('there are no processes',)
    """
    if not isinstance(graph_module, torch.fx.GraphModule):
        fail("type", "optimize: graph_module is a torch.fx.GraphModule, got {}", type(graph_module).__name__)
    graph = graph_module.graph
    before = _count(graph)
    digest, reasons = "", ["there are no processes"]
    with _torch.plain():
        if dist.is_initialized() and dist.get_backend() == "fake":
            reasons = ["the processes are fake"]
        elif dist.is_initialized():
            digest, groups = spelled(graph)
            families = agreed(digest, groups)
            if families is None:
                reasons = ["the ranks have different graphs"]
            else:
                why = hindrance(tidying.out_of_place(graph))
                reasons = [why] if why else rewrite(graph, dist.get_world_size(), families)
        _unmark(graph)
        plan = Plan(digest, before, _count(graph), tuple(reasons))
        if dist.is_initialized() and checks.wanted():
            checks.plan(plan.reasons)
    graph_module.recompile()
    graph_module.meta["fcoll"] = plan
    return graph_module


def optimize_together(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """`optimize`, if all ranks of the world are sure to come here with this program: it communicates, and calls a
    `shard_map` over all of them, which they have to call together.
    """
    graph = graph_module.graph
    world = dist.get_world_size() if dist.is_initialized() else 0
    if _count(graph) and any(len(node.args[1]) == world for node in _marks(graph, INVARIANT)):  # type: ignore[arg-type]
        return optimize(graph_module)
    with _torch.plain():
        _unmark(graph)
    graph_module.recompile()
    return graph_module


def _marks(graph: torch.fx.Graph, *kinds: Any) -> list[torch.fx.Node]:
    return [node for kind in kinds for node in graph.find_nodes(op="call_function", target=kind)]


def _unmark(graph: torch.fx.Graph) -> None:
    """Take the marks away. A result must not turn into a view of an argument: there, a copy stays. And what reads the
    same on all ranks becomes what this one does.
    """
    for node in _marks(graph, INVARIANT, COTANGENT):
        x: Any = node.args[0]
        node.replace_all_uses_with(rewrites.emit(node, rewrites.aten.clone.default, x) if _escapes(node) else x)
        graph.erase_node(node)
    deferred.settle(graph)


def _escapes(node: torch.fx.Node) -> bool:
    """Whether a result of the graph is, or is a view of, this value."""
    return any(
        user.op == "output" or (user.op == "call_function" and _torch.is_view(user.target) and _escapes(user))
        for user in node.users
    )


def rewrite(graph: torch.fx.Graph, world: int, families: Families) -> list[str]:
    """Apply all rules until none applies; returns the reasons. The graph is the same on all ranks of the world."""
    reasons: list[str] = []
    done = -1
    while done != len(reasons):
        done = len(reasons)
        known = Invariance(graph, world, families)
        for node in graph.nodes:
            for rule in rewrites.RULES:
                reason = rule(node, known)
                if reason:
                    reasons.append(reason)
                    break
        reasons += tidying.unused(graph, _removable)
        if done == len(reasons):
            reasons += hoisting.hoist(graph, Invariance(graph, world, families))
    if all(map(_movable, graph.nodes)):
        reasons += fusing.fuse(graph, Invariance(graph, world, families))
    graph.lint()
    return reasons + [
        f"{node.name}: is left alone, since the graph does not say of what size it is"
        for node in graph.nodes
        if node.target in COLLECTIVES and not rewrites.shown(node)
    ]


def hindrance(graph: torch.fx.Graph) -> str:
    """Why a graph is left alone, whatever its groups; "" if it is not."""
    node = _writer(graph)
    if node is None:
        return ""
    if _torch.is_higher_order(node.target):
        return f"the graph has operations that hold graphs of their own: {node.name}"
    return f"the graph has operations that may work in place: {node.name}"


def _removable(node: torch.fx.Node) -> bool:
    return node.target in (*COLLECTIVES, RANK, WAIT) or function_of_arguments(node.target)


def _movable(node: torch.fx.Node) -> bool:
    """Whether the order of a node among others is free, which that of messages of unknown operations is not."""
    return (
        node.op != "call_function"
        or node.target in (*COLLECTIVES, RANK, WAIT, INVARIANT, COTANGENT)
        or function_of_arguments(node.target)
    )


def _writer(graph: torch.fx.Graph) -> torch.fx.Node | None:
    """The first node that may change a value; inputs may be written to at the end."""
    written = False
    for node in graph.nodes:
        if node.target == torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            written = True
        elif node.op in ("call_method", "call_module") or (
            node.op == "call_function" and (written or not _writes_nothing(node.target))
        ):
            return node  # type: ignore[no-any-return]
    return None


def _writes_nothing(target: Any) -> bool:
    """Whether an operation says that it changes no argument: Python functions say nothing."""
    return (_torch.is_operator(target) and not _torch.is_mutable(target)) or function_of_arguments(target)


def _count(graph: torch.fx.Graph) -> int:
    return sum(node.target in COLLECTIVES for node in graph.nodes)


# ---- the comparison


def spelled(graph: torch.fx.Graph) -> tuple[str, list[str | tuple[int, ...]]]:
    """A digest of the graph that is the same for graphs that do the same, whatever their groups; and these groups."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    groups: dict[str | tuple[int, ...], int] = {}
    digest = hashlib.blake2b(digest_size=16)

    def spell(value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            return f"%{number[value]}"
        if isinstance(value, (list, tuple)):
            return f"[{','.join(map(spell, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{name}:{spell(each)}' for name, each in value.items())}}}"
        if isinstance(value, slice):
            return spell([value.start, value.stop, value.step])
        if isinstance(value, torch.device):
            return value.type
        return f"{type(value).__name__}:{value!r}"

    for node in graph.nodes:
        target = node.target if node.op == "call_function" else node.op
        args = list(node.args)
        if _grouped(node):
            args[-1] = f"group {groups.setdefault(key(node), len(groups))}"
        held = constant(node).tolist() if node.op == "get_attr" and literal(node) else ""  # type: ignore[union-attr]
        looks = _look(node.meta.get("val"))
        digest.update(f"{target}{spell(args)}{spell(node.kwargs)}{looks}{held}\n".encode())
    return digest.hexdigest(), list(groups)


def _grouped(node: torch.fx.Node) -> bool:
    """Whether the last argument of a node is a group."""
    return node.target in (*COLLECTIVES, RANK, INVARIANT, COTANGENT) and not node.kwargs


def _look(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_look, value))}]"
    if not isinstance(value, Tensor):
        return str(value)
    return f"{tuple(value.shape)}{value.dtype}{value.device.type}"


_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # of each world


def agreed(digest: str, groups: Sequence[str | tuple[int, ...]]) -> Families | None:
    """The families of the groups; None if the ranks of the world have different graphs. The first rank compares."""
    rank, n, world = dist.get_rank(), dist.get_world_size(), _torch.world()
    _calls[world] = _calls.get(world, 0) + 1
    store = dist.PrefixStore(f"fcoll/optimize/{_calls[world]}", _torch.default_store())  # type: ignore[attr-defined]
    try:
        store.set(str(rank), json.dumps([digest, [_members(group) for group in groups]]))
        if rank == 0:
            told = [json.loads(store.get(str(other))) for other in range(n)]
            same = all(other == digest for other, _ in told)
            columns = zip(*[members for _, members in told], strict=False)  # of one length where it matters
            store.set("all", json.dumps([_family(members) for members in columns] if same else None))
        families = json.loads(store.get("all"))
    except dist.DistError as error:
        text = (
            "fcoll.optimize: not all ranks optimize this program now; they compare the graphs, so all ranks of the "
            "world have to, in the same order. fcoll.compile(..., optimize=False) does not compare"
        )
        raise explained(CommunicationError(text), "Ranks that compile different programs") from error
    if families is None:
        return None
    return {g: tuple(map(tuple, family)) for g, family in zip(groups, families, strict=True) if family is not None}


def _members(group: str | tuple[int, ...]) -> list[int]:
    """The ranks of a group, in its order."""
    return dist.get_process_group_ranks(_torch.process_group(group)) if isinstance(group, str) else list(group)


def _family(members: Sequence[list[int]]) -> list[list[int]] | None:
    """The groups, of what each rank says is its own; None unless all members of each say the same."""
    if any(rank not in group or any(members[other] != group for other in group) for rank, group in enumerate(members)):
        return None
    return [group for rank, group in enumerate(members) if group[0] == rank]
