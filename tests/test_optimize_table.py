"""The table of docs/optimize.md: messages of the patterns as they are written, optimised, and placed by hand.

By hand is as Megatron-LM and others do it, per rank, on the same global values: with `vary`, `split`, `invariant=True`.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from common import Pools, close
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll import P
from fcoll.invariance import ALL_GATHER, ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER

ROOT = pathlib.Path(__file__).parent.parent
N = 4
Values = dict[str, Tensor]


class Row(NamedTuple):
    """A pattern, the name of its axis, and its program placed by hand, if there is one."""

    title: str
    module: str
    axis: str
    by_hand: Callable[[Any, Values], Tensor] | None = None
    program: Callable[[Values], Tensor] | None = None  # where it is not the module's own
    more: int = 0  # the bytes by which it is worse than by hand, see the page


def cut(module: Any, values: Values, axis: str) -> Values:
    """Each rank's part of what its spec cuts."""
    found = {}
    for name, value in values.items():
        places = [i for i, names in enumerate(module.SPECS[name].entries) if names]
        found[name] = fcoll.split(value, axis, places[0]) if places else value
    return found


def data_parallel(module: Any, values: Values) -> Tensor:
    own = cut(module, values, "dp")
    params = {"w": own["w"], "b": own["b"]}
    for _ in range(module.STEPS):
        gradients = torch.func.grad(module.error)(fcoll.vary(params, "dp"), own["x"], own["y"])
        gradients = fcoll.all_reduce(gradients, "dp", "mean", invariant=True)
        params = {name: p - module.RATE * gradients[name] for name, p in params.items()}
    error: Tensor = module.error(fcoll.vary(params, "dp"), own["x"], own["y"])
    return fcoll.all_reduce(error, "dp", "mean", invariant=True)


def mlp(module: Any, values: Values) -> Tensor:
    own = cut(module, values, "tp")
    hidden = torch.tanh(fcoll.vary(own["x"], "tp") @ own["w1"] + own["b1"])
    output = fcoll.all_reduce(hidden @ own["w2"], "tp", invariant=True) + own["b2"]
    return (output - own["target"]).square().mean()


def attention_plain(values: Values) -> Tensor:
    import megatron_block as module

    whole = fcoll.all_gather({name: values[name] for name in ("x", "target")}, "tp")  # no sequence parallelism
    y = fcoll.all_reduce(module.attention(module.normalise(whole["x"], values["norm1"]), values), "tp")
    error: Tensor = whole["x"] + y - whole["target"]
    return error.square().mean()


def attention(module: Any, values: Values) -> Tensor:
    own = cut(module, values, "tp")
    whole = fcoll.all_gather({name: own[name] for name in ("x", "target")}, "tp", invariant=True)
    normalised = module.normalise(whole["x"], own["norm1"])
    y = fcoll.all_reduce(module.attention(fcoll.vary(normalised, "tp"), own), "tp", invariant=True)
    error: Tensor = whole["x"] + y - whole["target"]
    return error.square().mean()


def block(module: Any, values: Values) -> Tensor:
    own = cut(module, values, "tp")
    x = own["x"]
    norms = fcoll.vary({name: own[name] for name in ("norm1", "norm2")}, "tp")
    for norm, layer in (("norm1", module.attention), ("norm2", module.feed_forward)):
        gathered = fcoll.all_gather(module.normalise(x, norms[norm]), "tp")
        x = x + fcoll.reduce_scatter(layer(gathered, own), "tp")
    return fcoll.all_reduce((x - own["target"]).square().mean(), "tp", "mean", invariant=True)


def batch_norm(module: Any, values: Values) -> Tensor:
    own = cut(module, values, "dp")
    params = fcoll.vary({name: own[name][:, None, None] for name in ("scale", "offset")}, "dp")
    output = torch.tanh(module.normalise(own["x"], "dp") * params["scale"] + params["offset"])
    return fcoll.all_reduce((output - own["target"]).square().mean(), "dp", "mean", invariant=True)


ROWS = [
    Row("data parallel, 3 steps and their gradient", "data_parallel", "dp", data_parallel),
    Row("Megatron MLP", "megatron_mlp", "tp", mlp),
    Row("Megatron attention", "megatron_block", "tp", attention, attention_plain, more=288),
    Row("Megatron block, sequence parallel", "megatron_block", "tp", block),
    Row("synchronised batch norm", "sync_batch_norm", "dp", batch_norm),
]


def cost(graph: torch.fx.GraphModule) -> tuple[int, int]:
    """Messages, and the bytes that a rank sends if they go round a ring."""
    count = total = 0.0
    for node in graph.graph.nodes:
        if node.target in COLLECTIVES:
            size = node.args[0].meta["val"].nbytes
            count += 1
            factor = {ALL_REDUCE: 2 * (N - 1) / N, ALL_GATHER: N - 1, REDUCE_SCATTER: (N - 1) / N}
            total += size * factor.get(node.target, 1)
    return int(count), int(total)


def gradient(f: Callable[[Values], Tensor], values: Values) -> Any:
    return torch.func.grad_and_value(lambda values: f(values))(values)


def costs(rows: list[Row]) -> list[tuple[dict[str, Any], dict[str, tuple[int, int]]]]:
    """Of each row, gradients and costs: as written, optimised, by hand."""
    sys.path.insert(0, str(ROOT / "examples" / "patterns"))
    found = []
    for row in rows:
        module = __import__(row.module)
        mesh, values = fcoll.mesh(**{row.axis: N}), module.inputs(N)
        program: Any = row.program or module.program
        mapped: Any = fcoll.shard_map(program, mesh, (module.SPECS,), P())
        with fcoll.marked():
            written = make_fx(functools.partial(gradient, mapped))(values)
        spent = {"written": cost(written)}
        results = {"written": written(values)}
        fcoll.optimize(written)
        spent["optimised"], results["optimised"] = cost(written), written(values)
        if row.by_hand:
            with fcoll.bind(mesh):
                placed = make_fx(functools.partial(gradient, functools.partial(row.by_hand, module)))(values)
            spent["by hand"], results["by hand"] = cost(placed), placed(values)
        found.append((results, spent))
    return found


def line(title: str, spent: dict[str, tuple[int, int]]) -> str:
    cells = [f"{count}, {size:,} B" for count, size in spent.values()]
    return f"| {title} | {' | '.join(cells)} |"


def test_optimised_is_no_worse_than_by_hand(ranks: Pools) -> None:
    documented = (ROOT / "docs" / "optimize.md").read_text().splitlines()
    for row, (results, spent) in zip(ROWS, ranks(N).run(costs, ROWS)[0], strict=True):
        for name, result in results.items():
            close(result, results["written"], f"{row.title}, {name}")
        messages, size = spent["by hand"]
        assert spent["optimised"] <= (messages, size + row.more), (row.title, spent)
        assert spent["optimised"][1] <= size + row.more, (row.title, spent)
        assert line(row.title, spent) in documented, line(row.title, spent)
