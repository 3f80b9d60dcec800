"""The programs of `examples/patterns/` placed by hand, beside what fcoll.optimize makes of them as they are written.

By hand is as Megatron-LM and others do it, per rank, on the same global values: with `vary`, `split`, `invariant=True`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll import P
from fcoll.invariance import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVES, REDUCE_SCATTER

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
    specs: tuple[tuple[str, P], ...] = ()  # of what is placed otherwise than in the module


def cut(module: Any, values: Values, axis: str, specs: tuple[tuple[str, P], ...] = ()) -> Values:
    """Each rank's part of what its spec cuts."""
    found = {}
    for name, value in values.items():
        places = [i for i, names in enumerate({**module.SPECS, **dict(specs)}[name].entries) if names]
        found[name] = fcoll.split(value, axis, places[0]) if places else value
    return found


def mean(error: Tensor, axis: str) -> Tensor:
    """Over the ranks, the same on all: what most programs placed by hand end with."""
    return fcoll.all_reduce(error, axis, "mean", invariant=True)


def data_parallel_plain(module: Any, values: Values) -> Tensor:
    params = {"w": values["w"], "b": values["b"]}
    error: Tensor = module.error(params, values["x"], values["y"])
    return fcoll.all_reduce(error, "dp", "mean")


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


WHOLE = (("x", P()), ("target", P()))  # no sequence parallelism: every rank has all positions


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


def programs(row: Row) -> tuple[tuple[Callable[[Values], Any], Callable[[Values], Any]], Values]:
    """As a user writes it and as placed by hand: of global values; and these."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "patterns"))
    module = __import__(row.module)
    vars(module)["STEPS"] = 1
    mesh = fcoll.mesh(**{row.axis: N})
    program: Any = partial(row.program, module) if row.program else module.program
    mapped: Any = fcoll.shard_map(program, mesh, ({**module.SPECS, **dict(row.specs)},), P())
    by_hand = fcoll.bind(mesh)(lambda values: row.by_hand(module, values))
    return (lambda values: mapped(values), by_hand), module.inputs(N)


def traced(f: Callable[[Values], Any], values: Values) -> torch.fx.GraphModule:
    """The graph of a function, without marks."""
    return make_fx(f)(values)


def optimised(f: Callable[[Values], Any], values: Values) -> torch.fx.GraphModule:
    """What fcoll.optimize makes of it."""
    with fcoll.marked():
        graph = make_fx(f)(values)
    return fcoll.optimize(graph)


def gradient(f: Callable[[Values], Tensor], values: Values) -> Any:
    """And the value."""
    return torch.func.grad_and_value(lambda values: f(values))(values)


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
}
