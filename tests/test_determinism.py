"""Which results are the same bits: on every rank, from run to run, in emulation. `docs/reliability.md` states it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from common import Pools, grad
from torch import Tensor

import fcoll
from fcoll.testing import Ranks

HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SIZES = (12, 12_000)  # of gloo, below and above what is gathered
LARGE = 1_200_000  # above what goes in two steps, in float32

Calls = dict[str, Callable[[Tensor, Any], Any]]


def real(x: Tensor) -> Tensor:
    return (x.real if x.is_complex() else x).sum()


REPLICATED: Calls = {
    "sum": lambda x, g: fcoll.all_reduce(x, g),
    "mean": lambda x, g: fcoll.all_reduce(x, g, "mean"),
    "prod": lambda x, g: fcoll.all_reduce(x, g, "prod"),
    "max": lambda x, g: fcoll.all_reduce(x, g, "max"),
    "min": lambda x, g: fcoll.all_reduce(x, g, "min"),
    "any": lambda x, g: fcoll.all_reduce(x > 1, g, "any"),
    "invariant": lambda x, g: fcoll.all_reduce(x, g, invariant=True),
    "together": lambda x, g: fcoll.all_reduce({"a": x, "b": [x[:7], 2.5]}, g),
    "started": lambda x, g: fcoll.wait(fcoll.start(fcoll.all_reduce, x, g)),
    "gather": lambda x, g: fcoll.all_gather(x, g),
    "broadcast": lambda x, g: fcoll.broadcast(x, g, 1),
    "argmax": lambda x, g: fcoll.argmax(x, g),
    "gradient": lambda x, g: grad(lambda w: real(fcoll.vary(w, g) * x))(torch.ones_like(x)),
}
OTHERS: Calls = {
    "reduce": lambda x, g: fcoll.reduce(x, g, 1),
    "reduce_scatter": lambda x, g: fcoll.reduce_scatter(x, g),
    "scattered mean": lambda x, g: fcoll.reduce_scatter(x, g, op="mean"),
    "prefix_sum": lambda x, g: fcoll.prefix_sum(x, g),
    "gradient of max": lambda x, g: grad(lambda x: real(fcoll.all_reduce(x, g, "max") * x))(x),
    "gradient of prod": lambda x, g: grad(lambda x: real(fcoll.all_reduce(x, g, "prod") * x))(x),
    "gradient of gather": lambda x, g: grad(lambda x: real(fcoll.all_gather(x, g, tiled=False) * x))(x),
}
MOVEMENTS: Calls = {
    "gather": REPLICATED["gather"],
    "broadcast": REPLICATED["broadcast"],
    "shift": lambda x, g: fcoll.shift(x, g),
    "all_to_all": lambda x, g: fcoll.all_to_all(x, g),
    "scatter": lambda x, g: fcoll.scatter(x, g, 1),
    "max": REPLICATED["max"],
    "min": REPLICATED["min"],
}
UNORDERED = ("max", "min", "any", "argmax", "gradient of max")  # not for complex numbers


def data(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Of very different sizes, so that the order of a sum shows."""
    random = torch.Generator().manual_seed(rank + 1)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 127, (count,), generator=random).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x = torch.randn(count, dtype=wide, generator=random)
    return (x * torch.exp(torch.randn(count, dtype=torch.float64, generator=random))).to(dtype)


def defined(name: str, dtype: torch.dtype) -> bool:
    return not (dtype.is_complex and name in UNORDERED)


def digest(tree: Any) -> str:
    """Of all bits."""
    found = hashlib.sha256()
    for x in optree.tree_leaves(tree):
        found.update(f"{x.dtype} {tuple(x.shape)}".encode())
        found.update(x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digests(calls: Calls, cases: list[tuple[int, torch.dtype]], repeat: int, backend: str | None) -> dict[Any, str]:
    """Of each call; if it does not give the same bits each time, of them all."""
    out = {}
    for count, dtype in cases:
        x = data(dist.get_rank(), count, dtype)
        for name, call in calls.items():
            if not defined(name, dtype):
                continue
            run: Any = lambda x, call=call: call(x, fcoll.WORLD)  # noqa: E731
            if backend:
                torch.compiler.reset()
                run = torch.compile(run, fullgraph=True, backend=backend)
            found = {digest(run(x)) for _ in range(repeat)}
            out[name, count, dtype] = " ".join(sorted(found))
    return out


CASES = [(count, dtype) for count in SIZES for dtype in (*FLOATS, *COMPLEX)] + [(LARGE, torch.float32)]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_on_every_rank(ranks: Pools, n: int) -> None:
    """Whatever way a message takes, and what travels with it."""
    first, *others = ranks(n).run(digests, REPLICATED, CASES, 1, None)
    for other in others:
        assert other == first


def test_on_every_rank_compiled(ranks: Pools) -> None:
    few = {name: REPLICATED[name] for name in ("sum", "mean", "max", "together", "gradient")}
    first, *others = ranks(3).run(digests, few, [(count, torch.float32) for count in SIZES], 1, "aot_eager")
    for other in others:
        assert other == first


def test_from_run_to_run(ranks: Pools) -> None:
    """In one process group, and in another one of new processes."""
    calls, n = {**REPLICATED, **OTHERS, **MOVEMENTS}, 3
    before = ranks(n).run(digests, calls, CASES, 3, None)
    for each in before:
        assert not [key for key, found in each.items() if " " in found]
    with Ranks(n) as others:
        assert others.run(digests, calls, CASES, 1, None) == before


# ---- emulation and groups


def on_a_group(calls: Calls, cases: list[tuple[int, torch.dtype]]) -> list[Any]:
    rank = dist.get_rank()
    return [
        [call(data(rank, count, dtype), fcoll.WORLD) for name, call in calls.items() if defined(name, dtype)]
        for count, dtype in cases
    ]


def emulated(calls: Calls, cases: list[tuple[int, torch.dtype]], n: int) -> list[Any]:
    out = []
    for count, dtype in cases:
        stack = torch.stack([data(rank, count, dtype) for rank in range(n)])
        some = [call for name, call in calls.items() if defined(name, dtype)]
        out.append([fcoll.vmap(lambda x, call=call: call(x, "i"), axis_name="i")(stack) for call in some])
    return out


def differences(ranks: Pools, n: int, calls: Calls, cases: list[tuple[int, torch.dtype]]) -> list[Any]:
    """(name, count, dtype, rank, result on the group, in emulation) wherever the bits are not the same."""
    here, found = emulated(calls, cases, n), []
    for rank, there in enumerate(ranks(n).run(on_a_group, calls, cases)):
        for (count, dtype), mine, all_of_them in zip(cases, there, here, strict=True):
            names = [name for name in calls if defined(name, dtype)]
            for name, got, stack in zip(names, mine, all_of_them, strict=True):
                want = stack[rank]
                assert (got.dtype, got.shape) == (want.dtype, want.shape)
                if digest(got) != digest(want):
                    found.append((name, count, dtype, rank, got, want))
    return found


def test_bits_of_emulation(ranks: Pools) -> None:
    """Movements, maxima and integers; of two ranks, sums as well."""
    exact = [(count, dtype) for count in SIZES for dtype in INTEGERS]
    whole = {name: REPLICATED[name] for name in ("sum", "prod", "argmax")} | {
        name: OTHERS[name] for name in ("reduce", "reduce_scatter", "prefix_sum")
    }
    moved = [(count, dtype) for count in SIZES for dtype in (*FLOATS, *COMPLEX, *INTEGERS)]
    sums = {name: REPLICATED[name] for name in ("sum", "mean")} | {
        name: OTHERS[name] for name in ("reduce", "reduce_scatter", "scattered mean", "prefix_sum")
    }
    assert not differences(ranks, 3, MOVEMENTS, [*moved, (LARGE, torch.float32)])
    assert not differences(ranks, 3, whole, exact)
    assert not differences(ranks, 2, sums, CASES)


ROUNDED = {name: REPLICATED[name] for name in ("sum", "mean", "prod")} | {
    name: OTHERS[name] for name in ("reduce", "reduce_scatter", "scattered mean", "prefix_sum")
}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_emulation_but_for_rounding(ranks: Pools, n: int) -> None:
    """By no more than n units in the last place of the sum of what was added, or of the product."""
    for name, count, dtype, rank, got, want in differences(ranks, n, ROUNDED, CASES):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        stack = torch.stack([data(r, count, dtype) for r in range(n)]).to(wide).abs()
        scale = stack.prod(0) if name == "prod" else stack.sum(0)
        if name.endswith("mean"):
            scale = scale / n
        if name in ("reduce_scatter", "scattered mean"):
            scale = scale.view(n, -1)[rank]
        limits = torch.finfo(dtype)
        error = (got.to(wide) - want.to(wide)).abs()
        assert (error <= n * (limits.eps * scale + limits.smallest_normal * limits.eps)).all(), (name, count, dtype)
