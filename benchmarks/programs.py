"""Programs on an emulated axis of 4 ranks, compiled: forward and gradients, against JAX's jit of vmap on the same CPU.

Every program is one function of an array library and of the collectives, so both sides run the same text.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fcoll
from benchmarks import peers
from benchmarks.contest import OURS, Row, Samples, Settings, apart, compare, contest, missing

N = 4
JAX = "JAX, jit of vmap"
HAND = "torch.compile by hand"
SIZES: dict[str, dict[str, tuple[int, ...]]] = {  # per rank; those in SHARED are the same on all
    "Megatron MLP": {"w1": (128, 128), "w2": (128, 128), "x": (64, 128)},
    "attention": {"wq": (128, 32), "wk": (128, 32), "wv": (128, 32), "wo": (32, 128), "x": (64, 128)},
    "contrastive loss": {"wa": (64, 64), "wb": (64, 64), "a": (32, 64), "b": (32, 64)},
    "ring attention": {"q": (32, 64), "k": (32, 64), "v": (32, 64)},
}
SHARED = {"Megatron MLP": {"x"}, "attention": {"x"}, "contrastive loss": {"wa", "wb"}, "ring attention": set[str]()}


class Torch:
    """What the programs need, from torch and fcoll."""

    tanh, exp, log_softmax = torch.tanh, torch.exp, staticmethod(lambda x: torch.log_softmax(x, -1))
    softmax = staticmethod(lambda x: torch.softmax(x, -1))
    psum = staticmethod(lambda x: fcoll.all_reduce(x, "i"))
    all_gather = staticmethod(lambda x: fcoll.all_gather(x, "i"))
    shift = staticmethod(lambda x: fcoll.shift(x, "i"))
    axis_index = staticmethod(lambda: fcoll.axis_index("i"))
    arange = torch.arange

    @staticmethod
    def at(x: Tensor, columns: Tensor) -> Tensor:
        """Element `columns[i]` of row i."""
        return x.gather(1, columns[:, None])[:, 0]


class Jax:
    """The same from JAX."""

    def __init__(self) -> None:
        jax: Any = peers.installed("jax")
        jnp = jax.numpy
        self.tanh, self.exp, self.arange = jnp.tanh, jnp.exp, jnp.arange
        self.softmax, self.log_softmax = jax.nn.softmax, jax.nn.log_softmax
        self.psum = lambda x: jax.lax.psum(x, "i")
        self.all_gather = lambda x: jax.lax.all_gather(x, "i", tiled=True)
        self.shift = lambda x: jax.lax.ppermute(x, "i", [(rank, (rank + 1) % N) for rank in range(N)])
        self.axis_index = lambda: jax.lax.axis_index("i")
        self.at = lambda x, columns: jnp.take_along_axis(x, columns[:, None], 1)[:, 0]


def _mlp(lib: Any, v: Any) -> Any:
    return (lib.psum(lib.tanh(v["x"] @ v["w1"]) @ v["w2"]) ** 2).mean()


def _attention(lib: Any, v: Any) -> Any:
    q, k, value = v["x"] @ v["wq"], v["x"] @ v["wk"], v["x"] @ v["wv"]
    return (lib.psum(lib.softmax(q @ k.T / math.sqrt(32)) @ value @ v["wo"]) ** 2).mean()


def _contrastive(lib: Any, v: Any) -> Any:
    a, b = lib.tanh(v["a"] @ v["wa"]), lib.tanh(v["b"] @ v["wb"])
    labels = lib.axis_index() * 32 + lib.arange(32)
    by_a = lib.at(lib.log_softmax(a @ lib.all_gather(b).T), labels)
    by_b = lib.at(lib.log_softmax(b @ lib.all_gather(a).T), labels)
    return -lib.psum((by_a + by_b).mean()) / N


def _ring(lib: Any, v: Any) -> Any:
    q, k, value = v["q"], v["k"], v["v"]
    total: Any = 0.0
    output: Any = 0.0
    for step in range(N):
        weights = lib.exp(q @ k.T / 64)
        total, output = total + weights.sum(-1), output + weights @ value
        if step + 1 < N:
            k, value = lib.shift(k), lib.shift(value)
    return lib.psum(((output / total[:, None]) ** 2).mean())


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "Megatron MLP": _mlp,
    "attention": _attention,
    "contrastive loss": _contrastive,
    "ring attention": _ring,
}


def rows(settings: Settings) -> list[Row]:
    """Each program against JAX; a sum alone against compiled torch and JAX. On one core, then on all."""
    result = []
    settled = ("one core", "all cores") if hasattr(os, "sched_setaffinity") else ("all cores",)
    for cores in settled[:1] if settings.quick else settled:
        for name in ("Megatron MLP",) if settings.quick else PROGRAMS:
            what = f"{name}, {N} ranks, forward and gradients, {cores}"
            samples = apart(_program, name, cores, settings)
            result.append(compare(what, samples, JAX, 1.0) if JAX in samples else missing(what, JAX))
        samples = apart(_lone, cores, settings)
        what = f"all_reduce alone, 8 ranks, 32 KiB in all, {cores}"
        result.append(compare(what, samples, HAND, 1.1))
        result.append(compare(what, samples, JAX) if JAX in samples else missing(what, JAX))
    return result


def _use(cores: str) -> None:
    """Before JAX starts its threads, which are as many as the process has cores."""
    if cores == "one core":
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _program(name: str, cores: str, settings: Settings) -> Samples:
    _use(cores)
    torch.manual_seed(0)
    shapes, program = SIZES[name], PROGRAMS[name]
    dims = {key: None if key in SHARED[name] else 0 for key in shapes}
    values = {
        key: torch.randn(*([] if dims[key] is None else [N]), *shape) / math.sqrt(shape[0])
        for key, shape in shapes.items()
    }

    def loss(v: Any) -> Any:
        return program(Torch, v)

    step = fcoll.compile(
        fcoll.vmap(torch.func.grad_and_value(loss), in_dims=(dims,), axis_name="i"),
        backend="aot_eager" if settings.quick else "inductor",
        dynamic=False,
    )
    contestants: dict[str, Callable[[], object]] = {OURS: lambda: step(values)}
    jax: Any = peers.installed("jax")
    if jax is not None:
        lib = Jax()
        theirs = jax.jit(jax.vmap(jax.value_and_grad(lambda v: program(lib, v)), in_axes=(dims,), axis_name="i"))
        arrays = {key: jax.numpy.asarray(value.numpy()) for key, value in values.items()}
        contestants[JAX] = lambda: jax.block_until_ready(theirs(arrays))
        gradients, _ = step(values)
        _, other = theirs(arrays)
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, torch.tensor(other[key].tolist()), rtol=1e-3, atol=1e-4)
    return contest(contestants, settings)


def _lone(cores: str, settings: Settings) -> Samples:
    _use(cores)
    x = torch.randn(8, 1024)
    backend = "aot_eager" if settings.quick else "inductor"
    ours = fcoll.compile(fcoll.vmap(lambda x: fcoll.all_reduce(x, "i"), axis_name="i"), backend=backend)
    by_hand = torch.compile(lambda x: x.sum(0).expand(x.shape), backend=backend)
    contestants: dict[str, Callable[[], object]] = {OURS: lambda: ours(x), HAND: lambda: by_hand(x)}
    jax: Any = peers.installed("jax")
    if jax is not None:
        array = jax.numpy.asarray(x.numpy())
        theirs = jax.jit(jax.vmap(lambda x: jax.lax.psum(x, "i"), axis_name="i"))
        contestants[JAX] = lambda: jax.block_until_ready(theirs(array))
    return contest(contestants, settings)
