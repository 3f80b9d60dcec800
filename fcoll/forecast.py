"""What `fcoll.optimize` would leave of a program, for `fcoll.trace`: on fake tensors, for a mesh of any size.

The program runs into a graph whose groups are simulated: the ranks of the mesh are the world, and all have this graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx

from fcoll import _torch, marks, meshes, optimizing, recorder, trees
from fcoll.engine import MOVE
from fcoll.invariance import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, COLLECTIVES, REDUCE_SCATTER, WAIT

_PUBLIC = {
    ALL_REDUCE: "all_reduce",
    ALL_GATHER: "all_gather",
    REDUCE_SCATTER: "reduce_scatter",
    ALL_TO_ALL: "all_to_all",
    BROADCAST: "broadcast",
}


class Message(NamedTuple):
    """A collective that is left.

    Attributes:
        of: the number of the one that the program asked for, whose group and kind it has.
        new: whether it stands for others. Then there is also
        x: what a rank puts in, a fake tensor.
        collective: its public name.
    """

    of: int
    new: bool = False
    x: Tensor | None = None
    collective: str = ""


def forecast(
    run: Callable[[list[Any]], Any], leaves: list[Any], current: Callable[[], int], count: Callable[[], int]
) -> tuple[list[Message], list[str]]:
    """What is left of the collectives of a program, and why the others are not.

    Args:
        run: the program.
        leaves: its arguments; the tensors are fake.
        current: while it runs, the number of the collective that sends now; -1 for one that is not listed.
        count: how many are listed.
    """
    numbers: list[int] = []  # of the collectives of the graph; -1 for what is not part of the program
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def program(given: list[Tensor]) -> list[Tensor]:
        filled = list(leaves)
        for i, x in zip(tensors, given, strict=True):
            filled[i] = x
        with _torch.observed(COLLECTIVES, lambda: numbers.append(current() if recorder.active() else -1)):
            out = run(filled)
        flat = [leaf for leaf in trees.flatten(out)[0] if isinstance(leaf, Tensor)]
        return [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in flat]

    given = [leaves[i] for i in tensors]
    with marks.marked(), _torch.into_compiled():
        made = make_fx(program)(given)
    if optimizing.hindrance(made.graph) and not any(_torch.is_higher_order(node.target) for node in made.graph.nodes):
        made = make_fx(torch.func.functionalize(made))(given)  # compilers take writes out, as this does
    graph = made.graph
    why = optimizing.hindrance(graph)
    if why:
        return [Message(number) for number in range(count())], [why]
    asked = dict(zip((node for node in graph.nodes if node.target in COLLECTIVES), numbers, strict=True))
    names = {node.name: f"#{number}" if number >= 0 else "" for node, number in asked.items()}
    others = {node.name for node in graph.nodes} - names.keys()
    for node, number in asked.items():
        for each in (node, *(user for user in node.users if user.target == WAIT)):
            each.meta["fcoll"] = number  # which is handed on to what takes their place
    with _torch.plain():
        reasons = _rewritten(graph)
    of_group = {node.args[-1]: number for node, number in reversed(asked.items())}
    left = [Message(number) for number in set(range(count())) - set(asked.values())]  # such as a send, which stays
    for node in graph.nodes:
        if node in asked:
            left.append(Message(asked[node]))
        elif node.target in COLLECTIVES:
            number = node.meta.get("fcoll", of_group.get(node.args[-1], 0))
            public = node.args[1] if node.target == MOVE else _PUBLIC[node.target]
            left.append(Message(number, True, node.args[0].meta["val"], public))
    others |= {node.name for node in graph.nodes} - names.keys()
    left = sorted((message for message in left if message.of >= 0), key=lambda message: message.of)
    told = [_told(reason, names, others) for reason in reasons]
    return left, [reason for reason in told if reason[0] not in ":,"]  # those of what is not listed


def _told(reason: str, names: dict[str, str], others: set[str]) -> str:
    """A reason, with the collectives by their numbers instead of names of the graph."""
    told = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), reason)
    about, colon, text = told.partition(": ")
    first, _, rest = text.partition(" ")
    return f"{about}{colon}what it takes {rest}" if first in others and about.startswith("#") else told


def _rewritten(graph: torch.fx.Graph) -> list[str]:
    """Optimise the graph, on a mesh that all simulated groups are of."""
    _, groups = optimizing.spelled(graph)
    found = [meshes.simulated(group) for group in groups if isinstance(group, str)]
    keys = {each[0] for each in found if each}
    if len(keys) != 1:
        return [f"the program has groups of {'several meshes' if keys else 'no mesh'}"] if groups else []
    (key,) = keys
    return optimizing.rewrite(graph, *meshes.simulated_groups(key, groups))
