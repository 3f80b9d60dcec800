"""Every dtype through every collective: what is defined agrees with plain torch, what is not is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import close, draw, grad, jvp, vjp
from table import DIFFERENTIABLE, TABLE, Row
from torch import Tensor

import fcoll
from fcoll.testing import Substrate, check_adjoint

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
EIGHTS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
ARITHMETIC = {"axis_index", "axis_size", "argmax", "argmin"}  # rows whose result has another dtype, or no meaning
REDUCTIONS = {"all_reduce", "prefix_sum", "reduce", "reduce_scatter"}
MOVING = [row for row in TABLE if row.name.split()[0] not in REDUCTIONS | ARITHMETIC]
REDUCING = [row for row in TABLE if row.name.split()[0] in REDUCTIONS]


def stack_of(row: Row, n: int, dtype: torch.dtype) -> Tensor:
    """Small integers, exact in every dtype; with imaginary parts where there are any."""
    random = torch.Generator().manual_seed(n)
    x = torch.randint(-3, 4, (n, *row.shape(n)), generator=random)
    if dtype.is_complex:
        return torch.complex(x.double(), torch.flip(x, (0,)).double()).to(dtype)
    signed = dtype.is_floating_point or (dtype.is_signed and dtype != torch.bool)
    return (x if signed else x.abs()).to(dtype)


def op(row: Row) -> str:
    """The row's reduction."""
    words = row.name.split()[1:]
    return next((word for word in ("mean", "max", "min", "prod", "any", "all") if word in words), "sum")


def defined(row: Row, dtype: torch.dtype) -> bool:
    reduction = op(row)
    if dtype == torch.bool:
        return reduction in ("any", "all", "max", "min")
    if dtype.is_complex:
        return reduction not in ("max", "min")
    return reduction != "mean" or dtype.is_floating_point


def same(got: Tensor, want: Tensor, at: str) -> None:
    assert got.dtype == want.dtype, f"{at}: {got.dtype}, not {want.dtype}"
    assert torch.equal(got, want), f"{at}: {got} != {want}"


def wide(row: Row, stack: Tensor) -> Tensor:
    """The reference in a dtype that holds all results, then rounded or wrapped once."""
    dtype = stack.dtype
    if op(row) in ("any", "all") and row in REDUCING:
        return row.values(stack)
    exact = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    return row.values(stack.to(exact)).to(dtype)


KINDS = {"float": FLOATS, "complex": COMPLEX, "integer": INTEGERS, "bool": [torch.bool]}


@pytest.mark.parametrize("dtypes", KINDS.values(), ids=KINDS)
def test_reductions(substrate: Substrate, dtypes: list[torch.dtype]) -> None:
    cases = {(row.name, str(dtype)): (row, dtype) for row in REDUCING for dtype in dtypes if defined(row, dtype)}

    def f(group: Any, xs: Any) -> Any:
        return {key: cases[key][0].call(x, group) for key, x in xs.items()}

    n = substrate.n
    got = substrate.map(f, {key: stack_of(row, n, dtype) for key, (row, dtype) in cases.items()})
    for key, (row, dtype) in cases.items():
        want = wide(row, stack_of(row, n, dtype))
        if op(row) == "mean":
            assert got[key].dtype == want.dtype
            tolerance = 1e-6 if dtype not in (torch.float16, torch.bfloat16) else torch.finfo(dtype).eps
            close(got[key], want, key, tolerance)
        else:
            same(got[key], want, str(key))


ALL = [*FLOATS, *COMPLEX, *INTEGERS, *UNSIGNED, *EIGHTS, torch.bool]


def test_movements(substrate: Substrate) -> None:
    """Of any dtype, bit by bit."""
    cases = {(row.name, str(dtype)): (row, dtype) for row in MOVING for dtype in ALL}

    def f(group: Any, xs: Any) -> Any:
        out = {}
        for key, x in xs.items():
            row, dtype = cases[key]
            y = row.call(x.to(dtype), group)
            assert y.dtype == dtype, key
            out[key] = y.to(x.dtype)
        return out

    def plain(dtype: torch.dtype) -> torch.dtype:
        """One in which torch can stack and compare the same values."""
        return torch.float32 if dtype in EIGHTS else torch.int64 if dtype in UNSIGNED else dtype

    n = substrate.n
    stacks = {key: stack_of(row, n, dtype).to(plain(dtype)) for key, (row, dtype) in cases.items()}
    got = substrate.map(f, stacks)
    for key, (row, dtype) in cases.items():
        exact = stacks[key].long() if dtype == torch.bool else stacks[key]
        same(got[key], row.values(exact).to(plain(dtype)), str(key))


def test_integers_wrap(substrate: Substrate) -> None:
    n = substrate.n

    def f(group: Any, xs: Any) -> Any:
        return {
            name: [fcoll.all_reduce(x, group), fcoll.reduce_scatter(x.expand(n), group), fcoll.reduce(x, group)]
            for name, x in xs.items()
        }

    got = substrate.map(f, {str(dtype): torch.full((n, 1), torch.iinfo(dtype).max, dtype=dtype) for dtype in INTEGERS})
    for dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        total = n * limits.max
        wrapped = (total - limits.min) % (limits.max - limits.min + 1) + limits.min
        for y in got[str(dtype)][:2]:
            assert y.dtype == dtype
            assert y.flatten().tolist() == [wrapped] * n
        assert got[str(dtype)][2].flatten().tolist() == [wrapped] + [0] * (n - 1)


def test_half_precision_is_rounded_once(substrate: Substrate) -> None:
    """256 + 1 + 1 is 258, in whatever order: 257 has no place in bfloat16."""
    n = substrate.n
    top = {torch.bfloat16: 256.0, torch.float16: 2048.0}
    xs = {str(dtype): torch.tensor([[x]] + [[1.0]] * (n - 1)).to(dtype) for dtype, x in top.items()}

    def f(group: Any, xs: Any) -> Any:
        return {
            dtype: (fcoll.all_reduce(x, group), fcoll.reduce_scatter(x.expand(n), group), fcoll.reduce(x, group, n - 1))
            for dtype, x in xs.items()
        }

    for compile in (None, "aot_eager"):
        got = substrate.map(f, xs, compile=compile)
        for dtype, x in top.items():
            want = torch.tensor(x + n - 1, dtype=torch.float64).to(dtype).item()
            everywhere, scattered, at_root = got[str(dtype)]
            assert everywhere.flatten().tolist() == [want] * n, (dtype, compile)
            assert scattered.flatten().tolist() == [want] * n, (dtype, compile)
            assert at_root[n - 1].item() == want, (dtype, compile)


def test_the_mean_of_half_precision_does_not_overflow(substrate: Substrate) -> None:
    x = torch.full((substrate.n, 1), 60000.0, dtype=torch.float16)
    got = substrate.map(lambda group, x: fcoll.all_reduce(x, group, "mean"), x)
    assert torch.equal(got, x)


def test_derivatives_keep_the_dtype(substrate: Substrate) -> None:
    rows = [row for row in DIFFERENTIABLE if row.name.split()[0] not in ARITHMETIC]

    def f(group: Any, xs: Any) -> Any:
        out = {}
        for (name, dtype), x in xs.items():
            row = next(row for row in rows if row.name == name)
            y, pull = vjp(row.on(group), x)
            pushed = jvp(row.on(group), (x,), (torch.ones_like(x),))[1]
            out[name, dtype] = y, pull(torch.ones_like(y))[0], pushed
        return out

    n = substrate.n
    dtypes = (torch.bfloat16, torch.float32)
    stacks = {(row.name, str(dtype)): stack_of(row, n, dtype) for row in rows for dtype in dtypes}
    for key, values in substrate.map(f, stacks).items():
        assert {value.dtype for value in values} == {stacks[key].dtype}, key


# ---- complex numbers


def complex_like(shape: Any, seed: int = 1) -> Tensor:
    return draw(shape, seed, torch.complex128)


COMPLEX_ROWS = [row for row in DIFFERENTIABLE if op(row) not in ("max", "min")]


def test_complex_derivatives(substrate: Substrate) -> None:
    """Values, tangents and cotangents, also through lazily conjugated views."""
    n = substrate.n

    def f(group: Any, stacks: Any) -> Any:
        out = {}
        for row in COMPLEX_ROWS:
            x, c, t = stacks[row.name]

            call = row.on(group)
            out[row.name] = {
                "value": call(x),
                "conj": call(x.conj()),
                "vjp": vjp(call, x)[1](c)[0],
                "vjp conj": vjp(call, x)[1](c.conj())[0],
                "jvp": jvp(call, (x,), (t,))[1],
                "jvp conj": jvp(call, (x,), (t.conj(),))[1],
                "imag": call(x.imag),
            }
        return out

    stacks = {}
    for row in COMPLEX_ROWS:
        x = complex_like((n, *row.shape(n)))
        stacks[row.name] = x, complex_like(row.values(x).shape, 2), complex_like(x.shape, 3)
    got = substrate.map(f, stacks)
    for row in COMPLEX_ROWS:
        x, c, t = stacks[row.name]
        linear = row.pull if row.linear else lambda x, c, row=row: row.pull(x.conj().resolve_conj(), c)
        want = {
            "value": row.values(x),
            "conj": row.values(x.conj().resolve_conj()),
            "vjp": linear(x, c),
            "vjp conj": linear(x, c.conj().resolve_conj()),
            "jvp": jvp(row.values, (x,), (t,))[1],
            "jvp conj": jvp(row.values, (x,), (t.conj().resolve_conj(),))[1],
            "imag": row.values(x.imag.clone()),
        }
        for how, value in want.items():
            close(got[row.name][how], value, f"{row.name}, {how}")


def test_complex_adjoint_identity() -> None:
    for row in COMPLEX_ROWS:
        if not row.once:
            check_adjoint(row.on("i"), complex_like((3, *row.shape(3))), "i")


def test_complex_second_order(substrate: Substrate) -> None:
    n = substrate.n
    z = complex_like((n, 2))

    def loss(y: Tensor) -> Any:
        return (y * y.conj()).real.sum() ** 2

    def f(group: Any, z: Tensor) -> Any:
        def penalty(z: Tensor) -> Any:
            g = grad(lambda z: loss(fcoll.all_reduce(z, group, "prod")))(z)
            return (g * g.conj()).real.sum()

        return grad(penalty)(z)

    def reference(z: Tensor) -> Any:
        g = grad(lambda z: n * loss(z.prod(0)))(z)
        return (g * g.conj()).real.sum()

    close(substrate.map(f, z), grad(reference)(z))


# ---- what is refused, whatever the group


REFUSED: list[tuple[torch.dtype, str, str]] = [
    *((torch.bool, op, f"is bool, which has no {op}") for op in ("sum", "mean", "prod")),
    *((dtype, "mean", f"is {dtype}, which has no mean") for dtype in INTEGERS),
    *((dtype, op, f"is {dtype}, which has no order and so no {op}") for dtype in COMPLEX for op in ("max", "min")),
    *((dtype, "sum", f"is {dtype}, which torch can move but not reduce") for dtype in (*UNSIGNED, *EIGHTS)),
    *((dtype, "max", f"is {dtype}, which torch can move but not reduce") for dtype in (*UNSIGNED, *EIGHTS)),
]


@pytest.mark.parametrize(("dtype", "op", "text"), REFUSED, ids=str)
def test_refused(dtype: torch.dtype, op: str, text: str) -> None:
    x = torch.zeros(2, 2).to(dtype)
    calls: list[Callable[[], Any]] = [
        lambda: fcoll.vmap(lambda x: fcoll.all_reduce(x, "i", op), axis_name="i")(x),
        lambda: fcoll.vmap(lambda x: fcoll.reduce(x, "i", 0, op), axis_name="i")(x),
    ]
    if op != "prod":
        calls.append(lambda: fcoll.vmap(lambda x: fcoll.reduce_scatter(x, "i", 0, op), axis_name="i")(x))
    for call in calls:
        with pytest.raises(TypeError, match=text):
            call()
