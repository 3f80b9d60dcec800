"""A tree of 200 leaves of 256 floats, on gloo with 2 ranks: one message against one per leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fcoll
from benchmarks import peers
from benchmarks.contest import OURS, Row, Samples, Settings, compare, contest, slowest
from fcoll.testing import Ranks

LEAVES, SIZE = 200, 256
LOOP, HAND = "one call per leaf", "cat, one call, split"


def rows(settings: Settings) -> list[Row]:
    """Each fused collective against a loop and against fusion by hand."""
    names = ("all_reduce",) if settings.quick else ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    result = []
    with Ranks(2, timeout=300) as ranks:
        for name in names:
            samples = slowest(ranks.run(_measure, name, settings))
            what = f"{name} of {LEAVES} × {SIZE} floats, gloo, 2 ranks"
            result += [compare(what, samples, LOOP, 1 / 25), compare(what, samples, HAND, 1.15)]
    return result


def _measure(name: str, settings: Settings) -> Samples:
    n = dist.get_world_size()
    tree = {f"leaf {i}": torch.randn(SIZE) for i in range(LEAVES)}
    one = next(iter(peers.by_hand(name, n).values()))
    functions: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda tree: fcoll.all_reduce(tree, fcoll.WORLD),
        "all_gather": lambda tree: fcoll.all_gather(tree, fcoll.WORLD),
        "reduce_scatter": lambda tree: fcoll.reduce_scatter(tree, fcoll.WORLD),
        "broadcast": lambda tree: fcoll.broadcast(tree, fcoll.WORLD),
    }
    ours = functions[name]

    def by_hand() -> dict[str, Tensor]:
        leaves: list[Any] = list(tree.values())
        if name == "reduce_scatter":  # block r of each leaf goes to rank r
            sent = torch.cat([leaf.view(n, -1) for leaf in leaves], 1)
            flat: Any = one(sent).view(-1)
            parts = list(flat.split([leaf.numel() // n for leaf in leaves]))
        elif name == "all_gather":
            received: Any = one(torch.cat(leaves)[None])
            parts = [part.reshape(-1) for part in received.split([leaf.numel() for leaf in leaves], 1)]
        else:
            whole: Any = one(torch.cat(leaves))
            parts = list(whole.split([leaf.numel() for leaf in leaves]))
        return dict(zip(tree, parts, strict=True))

    def loop() -> dict[str, Tensor]:
        return {key: one(leaf) for key, leaf in tree.items()}

    contestants: dict[str, Callable[[], dict[str, Tensor]]] = {OURS: lambda: ours(tree), LOOP: loop, HAND: by_hand}
    results = [f() for f in contestants.values()]
    for result in results[1:]:
        for key, leaf in result.items():
            torch.testing.assert_close(leaf, results[0][key])
    return contest(contestants, settings)
