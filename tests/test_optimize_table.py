"""The table of docs/optimize.md: messages of the patterns as they are written, optimised, and placed by hand.

By hand is as Megatron-LM and others do it, per rank, on the same global values: with `vary`, `split`, `invariant=True`.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import Pools, close
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll import P
from fcoll.engine import MOVE
from fcoll.invariance import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVES, REDUCE_SCATTER

ROOT = pathlib.Path(__file__).parent.parent
N = 4
Values = dict[str, Tensor]


Program = Callable[[Values], Tensor]


class Row(NamedTuple):
    """A pattern, its module, the name of its axis, and its program placed by hand."""

    title: str
    module: str
    axis: str
    by_hand: Callable[[Any, Values], Tensor]
    program: Callable[[Any, Values], Tensor] | None = None  # where it is not the module's own
    specs: dict[str, P] = {}  # noqa: RUF012 of what is placed otherwise than in the module


def cut(module: Any, values: Values, axis: str, specs: dict[str, P] | None = None) -> Values:
    """Each rank's part of what its spec cuts."""
    found = {}
    for name, value in values.items():
        places = [i for i, names in enumerate({**module.SPECS, **(specs or {})}[name].entries) if names]
        found[name] = fcoll.split(value, axis, places[0]) if places else value
    return found


def mean(error: Tensor, axis: str) -> Tensor:
    """Over the ranks, the same on all: what most programs placed by hand end with."""
    return fcoll.all_reduce(error, axis, "mean", invariant=True)


def data_parallel_plain(module: Any, values: Values) -> Tensor:
    params = {"w": values["w"], "b": values["b"]}
    return fcoll.all_reduce(module.error(params, values["x"], values["y"]), "dp", "mean")


def data_parallel(module: Any, values: Values) -> Tensor:
    own = cut(module, values, "dp")
    params = fcoll.vary({"w": own["w"], "b": own["b"]}, "dp")
    return mean(module.error(params, own["x"], own["y"]), "dp")


def data_parallel_steps(module: Any, values: Values) -> Tensor:
    own = cut(module, values, "dp")
    params = {"w": own["w"], "b": own["b"]}
    for _ in range(module.STEPS):
        gradients = torch.func.grad(module.error)(fcoll.vary(params, "dp"), own["x"], own["y"])
        gradients = fcoll.all_reduce(gradients, "dp", "mean", invariant=True)
        params = {name: p - module.RATE * gradients[name] for name, p in params.items()}
    return mean(module.error(fcoll.vary(params, "dp"), own["x"], own["y"]), "dp")


def zero(module: Any, values: Values) -> Tensor:
    own = cut(module, values, "dp")
    parts, x, y = {name: own[name] for name in ("w1", "w2")}, own["x"], own["y"]
    momentum = {name: torch.zeros_like(part) for name, part in parts.items()}
    for _ in range(module.STEPS):
        gradients = torch.func.grad(module.error)(parts, x, y, "dp")
        momentum = {name: module.MOMENTUM * momentum[name] + g / N for name, g in gradients.items()}
        parts = {name: part - module.RATE * momentum[name] for name, part in parts.items()}
    return mean(module.error(parts, x, y, "dp"), "dp")


def mlp(module: Any, values: Values) -> Tensor:
    own = cut(module, values, "tp")
    hidden = torch.tanh(fcoll.vary(own["x"], "tp") @ own["w1"] + own["b1"])
    output = fcoll.all_reduce(hidden @ own["w2"], "tp", invariant=True) + own["b2"]
    return (output - own["target"]).square().mean()


WHOLE = {"x": P(), "target": P()}  # no sequence parallelism: every rank has all positions


def layers(module: Any, count: int) -> list[tuple[str, Callable[[Tensor, Values], Tensor]]]:
    return [("norm1", module.attention), ("norm2", module.feed_forward)][:count]


def plain(count: int, module: Any, values: Values) -> Tensor:
    x = values["x"]
    for norm, layer in layers(module, count):
        x = x + fcoll.all_reduce(layer(module.normalise(x, values[norm]), values), "tp")
    return (x - values["target"]).square().mean()


def by_pairs(count: int, module: Any, values: Values) -> Tensor:
    own = cut(module, values, "tp", WHOLE)
    x = own["x"]
    for norm, layer in layers(module, count):
        normalised = fcoll.vary(module.normalise(x, own[norm]), "tp")
        x = x + fcoll.all_reduce(layer(normalised, own), "tp", invariant=True)
    return (x - own["target"]).square().mean()


def sequence_parallel(module: Any, values: Values) -> Tensor:
    own = cut(module, values, "tp")
    x = own["x"]
    norms = fcoll.vary({name: own[name] for name in ("norm1", "norm2")}, "tp")
    for norm, layer in layers(module, 2):
        gathered = fcoll.all_gather(module.normalise(x, norms[norm]), "tp")
        x = x + fcoll.reduce_scatter(layer(gathered, own), "tp")
    return mean((x - own["target"]).square().mean(), "tp")


def ulysses(module: Any, values: Values) -> Tensor:
    own = cut(module, values, "sp")
    q, k, v = fcoll.all_to_all((own["q"], own["k"], own["v"]), "sp", split_axis=0, concat_axis=1)
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    output = fcoll.all_to_all(output, "sp", split_axis=1, concat_axis=0)
    return mean((output - own["target"]).square().mean(), "sp")


def ring(module: Any, values: Values) -> Tensor:
    own = cut(module, values, "sp")
    output = module.attention(own["q"], own["k"], own["v"], "sp")
    return mean((output - own["target"]).square().mean(), "sp")


def contrastive(module: Any, values: Values) -> Tensor:
    own = cut(module, values, "dp")
    own |= fcoll.vary({name: own[name] for name in ("w_image", "w_text", "scale")}, "dp")
    images, texts = module.features(own)
    all_images, all_texts = fcoll.all_gather((images, texts), "dp")
    labels = fcoll.axis_index("dp") * len(images) + torch.arange(len(images))
    scale, score = own["scale"].exp(), torch.nn.functional.cross_entropy
    by_image, by_text = score(scale * images @ all_texts.T, labels), score(scale * texts @ all_images.T, labels)
    return mean((by_image + by_text) / 2, "dp")


def moe(module: Any, values: Values) -> Tensor:
    own = cut(module, values, "ep")
    output = module.output({**own, "router": fcoll.vary(own["router"], "ep")}, "ep")
    return mean((output - own["target"]).square().mean(), "ep")


def batch_norm(module: Any, values: Values) -> Tensor:
    own = cut(module, values, "dp")
    params = fcoll.vary({name: own[name][:, None, None] for name in ("scale", "offset")}, "dp")
    output = torch.tanh(module.normalise(own["x"], "dp") * params["scale"] + params["offset"])
    return mean((output - own["target"]).square().mean(), "dp")


ROWS = [
    Row("data parallel", "data_parallel", "dp", data_parallel, data_parallel_plain),
    Row("data parallel, a step and the loss", "data_parallel", "dp", data_parallel_steps),
    Row("ZeRO, a step and the loss", "zero", "dp", zero),
    Row("Megatron MLP", "megatron_mlp", "tp", mlp),
    Row("attention", "megatron_block", "tp", partial(by_pairs, 1), partial(plain, 1), WHOLE),
    Row("transformer block", "megatron_block", "tp", partial(by_pairs, 2), partial(plain, 2), WHOLE),
    Row("transformer block, sequence parallel", "megatron_block", "tp", sequence_parallel),
    Row("Ulysses", "ulysses", "sp", ulysses),
    Row("ring attention", "ring_attention", "sp", ring),
    Row("contrastive loss", "contrastive", "dp", contrastive),
    Row("mixture of experts", "moe", "ep", moe),
    Row("synchronised batch norm", "sync_batch_norm", "dp", batch_norm),
]


def cost(graph: torch.fx.GraphModule) -> tuple[int, int]:
    """Messages, and the bytes that a rank sends if reductions go round a ring."""
    count = total = 0.0
    for node in graph.graph.nodes:
        if node.target in COLLECTIVES:
            count += 1
            total += node.args[0].meta["val"].nbytes * FACTOR[node.target](node)
    return int(count), int(total)


def exchanged(node: Any) -> float:
    """What part of the rows goes to other ranks."""
    sizes, own = node.args[2], dist.get_rank()
    return 1 - sizes[own] / sum(sizes) if any(sizes) else 0


FACTOR: dict[Any, Callable[[Any], float]] = {
    ALL_REDUCE: lambda node: 2 * (N - 1) / N,
    ALL_GATHER: lambda node: N - 1,
    REDUCE_SCATTER: lambda node: (N - 1) / N,
    ALL_TO_ALL: exchanged,
    MOVE: lambda node: 1,  # a permute here, by which every rank sends
}


def gradient(f: Callable[[Values], Tensor], values: Values) -> Any:
    return torch.func.grad_and_value(lambda values: f(values))(values)


Cost = tuple[tuple[int, int], tuple[int, int]]
"""Of the value alone, and of value and gradient."""


def programs(row: Row) -> tuple[dict[str, Callable[[Values], Any]], Values]:
    """As a user writes it and as placed by hand: of global values; and these."""
    sys.path.insert(0, str(ROOT / "examples" / "patterns"))
    module = __import__(row.module)
    vars(module)["STEPS"] = 1
    mesh = fcoll.mesh(**{row.axis: N})
    program: Any = partial(row.program, module) if row.program else module.program
    mapped: Any = fcoll.shard_map(program, mesh, ({**module.SPECS, **row.specs},), P())
    by_hand = fcoll.bind(mesh)(lambda values: row.by_hand(module, values))
    return {"written": lambda values: mapped(values), "by hand": by_hand}, module.inputs(N)


def traced(f: Callable[[Values], Any], values: Values) -> dict[str, torch.fx.GraphModule]:
    """The graphs of value, and of value and gradient."""
    with fcoll.marked():
        return {"value": make_fx(f)(values), "gradient": make_fx(partial(gradient, f))(values)}


def costs(rows: list[Row]) -> list[tuple[dict[str, Any], dict[str, Cost]]]:
    """Of each row, gradients and costs: as written, optimised, by hand."""
    found = []
    for row in rows:
        both, values = programs(row)
        written, placed = (traced(f, values) for f in both.values())
        results, spent = {}, {}
        for name, graphs in (("written", written), ("optimised", written), ("by hand", placed)):
            if name == "optimised":
                written = {kind: fcoll.optimize(graph) for kind, graph in graphs.items()}
            spent[name] = cost(graphs["value"]), cost(graphs["gradient"])
            results[name] = graphs["gradient"](values)
        found.append((results, spent))
    return found


def line(title: str, spent: dict[str, Cost]) -> str:
    cells = []
    for (count, size), (all_counts, all_sizes) in spent.values():
        cells.append(f"{count} + {all_counts - count}, {size:,} + {all_sizes - size:,} B")
    return f"| {title} | {' | '.join(cells)} |"


def test_optimised_is_no_worse_than_by_hand(ranks: Pools) -> None:
    documented = (ROOT / "docs" / "optimize.md").read_text().splitlines()
    for row, (results, spent) in zip(ROWS, ranks(N).run(costs, ROWS, timeout=100)[0], strict=True):
        for name, result in results.items():
            close(result, results["written"], f"{row.title}, {name}")
        for optimised, by_hand in zip(spent["optimised"], spent["by hand"], strict=True):
            assert optimised[0] <= by_hand[0], (row.title, spent)
            assert optimised[1] <= by_hand[1], (row.title, spent)
        assert line(row.title, spent) in documented, line(row.title, spent)
