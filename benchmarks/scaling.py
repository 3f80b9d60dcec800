"""Compilation of forward and gradient against the number n of emulated ranks: it should not depend on n."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

import fcoll
from benchmarks.contest import Row, Settings, apart, counted
from benchmarks.graphs import graphs_of, nodes

SIZES = (2, 16, 128, 1024, 4096)
FLAT = 1.25  # of times, which vary
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {  # of a vector of one element per rank
    "all_reduce": lambda x: fcoll.all_reduce(x, "i"),
    "all_gather": lambda x: fcoll.all_gather(x[0], "i", tiled=False),
    "all_gather, tiled": lambda x: fcoll.all_gather(x[:1], "i"),
    "reduce_scatter": lambda x: fcoll.reduce_scatter(x, "i"),
    "all_to_all": lambda x: fcoll.all_to_all(x, "i"),
    "broadcast": lambda x: fcoll.broadcast(x, "i"),
    "reduce": lambda x: fcoll.reduce(x, "i"),
    "gather": lambda x: fcoll.gather(x[:1], "i"),
    "scatter": lambda x: fcoll.scatter(x, "i"),
    "shift": lambda x: fcoll.shift(x, "i"),
}


def rows(settings: Settings) -> list[Row]:
    """Nodes and seconds at each n beside those at n = 2; then the whole compiler, C++ included, on one program."""
    names = ("all_reduce", "all_gather, tiled") if settings.quick else tuple(FUNCTIONS)
    sizes = (2, 8) if settings.quick else SIZES
    result = []
    for name in names:
        found = apart(_graphs, name, sizes)
        (count, seconds), last = found[sizes[0]], max(found)
        result += [
            counted(f"{name}: nodes, n = {n}", f"n = {sizes[0]}", nodes_of, count, "nodes", 1.0)
            for n, (nodes_of, _) in found.items()
            if n in (sizes[-2], last) and n != sizes[0]
        ]
        what = f"{name}: tracing, n = {last}"
        result.append(counted(what, f"n = {sizes[0]}", found[last][1], seconds, "s", FLAT))
    if not settings.quick:
        few, many = apart(_inductor, SIZES[0]), apart(_inductor, SIZES[-1])
        what = f"all_reduce and a matmul: inductor, n = {SIZES[-1]}"
        result.append(counted(what, f"n = {SIZES[0]}", many, few, "s", FLAT))
    return result


def _graphs(name: str, sizes: tuple[int, ...]) -> dict[int, tuple[int, float]]:
    """Per n: operations in the graph, and the seconds that it took to make it."""
    f = FUNCTIONS[name]
    gradient = torch.func.grad(lambda x: (f(x) ** 2).sum())

    def program(x: Tensor) -> Tensor:
        y: Tensor = fcoll.vmap(gradient, axis_name="i")(x)
        return y

    graphs_of(program, torch.ones(3, 3))  # imports, and whatever else happens once
    result = {}
    for n in sizes:
        x = torch.ones(n, n)
        repeated = [graphs_of(program, x) for _ in range(1 if n > 128 else 3)]
        seconds = [captured[-1].seconds for captured in repeated]
        result[n] = (nodes(repeated[0]), min(seconds))
        if seconds[0] > 20:  # the rest would take minutes, and shows nothing more
            break
    return result


def _inductor(n: int) -> float:
    torch._inductor.config.force_disable_caches = True

    def loss(w: Tensor, x: Tensor) -> Tensor:
        y: Tensor = fcoll.all_reduce(torch.tanh(x @ w), "i")
        return (y**2).sum()

    for size in (3, n):  # the first one pays for the start of the compiler
        step = fcoll.compile(fcoll.vmap(torch.func.grad(loss), in_dims=(None, 0), axis_name="i"), dynamic=False)
        w, x = torch.randn(8, 8), torch.randn(size, 4, 8)
        start = time.perf_counter()
        step(w, x)
        seconds = time.perf_counter() - start
    return seconds
