"""fcoll.lax: JAX's names, argument order, defaults, dtype rules and errors. Its numbers are in test_golden.py."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fcoll
from fcoll import lax
from fcoll.testing import Ranks

Pools = Callable[[int], Ranks]

SIGNATURES = {  # of JAX 0.10; pvary as JAX had it before pcast
    "psum": "(x, axis_name, *, axis_index_groups=None)",
    "pmean": "(x, axis_name, *, axis_index_groups=None)",
    "pmax": "(x, axis_name, *, axis_index_groups=None)",
    "pmin": "(x, axis_name, *, axis_index_groups=None)",
    "pbroadcast": "(x, axis_name, source)",
    "ppermute": "(x, axis_name, perm)",
    "pshuffle": "(x, axis_name, perm)",
    "pswapaxes": "(x, axis_name, axis, *, axis_index_groups=None)",
    "all_to_all": "(x, axis_name, split_axis, concat_axis, *, axis_index_groups=None, tiled=False)",
    "all_gather": "(x, axis_name, *, axis_index_groups=None, axis=0, tiled=False, to='varying')",
    "psum_scatter": "(x, axis_name, *, scatter_dimension=0, axis_index_groups=None, tiled=False)",
    "axis_index": "(axis_name)",
    "axis_size": "(axis_name)",
    "pcast": "(x, axis_name, *, to)",
    "pvary": "(x, axis_name)",
    "ragged_all_to_all": "(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name, "
    "axis_index_groups=None)",
}


def over(n: int, f: Callable[..., Any], **kwargs: Any) -> Any:
    """f of each rank's index, the results stacked."""
    return fcoll.vmap(f, axis_name="i", **kwargs)(torch.arange(n))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_jax(name: str) -> None:
    signature = inspect.signature(getattr(lax, name))
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


def test_the_table_names_everything() -> None:
    assert sorted(lax.__all__) == sorted(SIGNATURES)


# ---- dtypes


@pytest.mark.parametrize(
    ("given", "summed", "averaged"),
    [
        (torch.bool, torch.int32, torch.float32),
        (torch.uint8, torch.uint8, torch.float32),
        (torch.int8, torch.int8, torch.float32),
        (torch.int16, torch.int16, torch.float32),
        (torch.int32, torch.int32, torch.float32),
        (torch.int64, torch.int64, torch.float64),
        (torch.float16, torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),
        (torch.complex64, torch.complex64, torch.complex64),
        (torch.complex128, torch.complex128, torch.complex128),
    ],
)
def test_dtypes_of_sum_and_mean(given: torch.dtype, summed: torch.dtype, averaged: torch.dtype) -> None:
    x = torch.tensor([[1, 0], [1, 1], [1, 0], [0, 0]]).to(given)
    total = fcoll.vmap(lambda x: lax.psum(x, "i"), axis_name="i", out_dims=None)(x)
    mean = fcoll.vmap(lambda x: lax.pmean(x, "i"), axis_name="i", out_dims=None)(x)
    torch.testing.assert_close(total, torch.tensor([3, 1]).to(summed))
    torch.testing.assert_close(mean, torch.tensor([0.75, 0.25]).to(averaged))


def test_sums_wrap_in_their_own_dtype_and_means_do_not() -> None:
    x = torch.tensor([200, 200], dtype=torch.uint8)
    assert fcoll.vmap(lambda x: lax.psum(x, "i"), axis_name="i", out_dims=None)(x).item() == 144
    assert fcoll.vmap(lambda x: lax.pmean(x, "i"), axis_name="i", out_dims=None)(x).item() == 200


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16])
def test_maximum_and_minimum_keep_the_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([[1, 0], [0, 0], [1, 1]]).to(dtype)
    high, low = fcoll.vmap(lambda x: (lax.pmax(x, "i"), lax.pmin(x, "i")), axis_name="i", out_dims=None)(x)
    torch.testing.assert_close(high, torch.tensor([1, 1]).to(dtype))
    torch.testing.assert_close(low, torch.tensor([0, 0]).to(dtype))


def test_the_index_is_int32() -> None:
    torch.testing.assert_close(over(3, lambda _: lax.axis_index("i")), torch.arange(3, dtype=torch.int32))


# ---- numbers, which need no communication


def test_numbers_stay_numbers() -> None:
    seen: dict[str, Any] = {}

    def f(x: Tensor) -> Tensor:
        groups = [[0, 1], [2, 3]]
        seen["sum"] = lax.psum({"one": 1, "half": 0.5, "true": True, "none": None, "x": x}, "i")
        seen["mean"] = lax.pmean((2, 0.5), ["i"])
        seen["groups"] = lax.psum(1, "i", axis_index_groups=groups), lax.pmean(3, "i", axis_index_groups=groups)
        seen["nowhere"] = lax.psum(1, [])
        total: Tensor = seen["sum"].pop("x")
        return total

    assert over(4, f).tolist() == [6, 6, 6, 6]
    assert seen == {
        "sum": {"one": 4, "half": 2.0, "true": 4, "none": None},
        "mean": (2.0, 0.5),
        "groups": (2, 3.0),
        "nowhere": 1,
    }
    assert type(seen["sum"]["one"]) is int
    assert type(seen["mean"][0]) is float


def test_a_number_summed_in_groups_of_several_sizes_differs_between_ranks() -> None:
    sizes = over(3, lambda _: lax.psum(1, "i", axis_index_groups=[[0], [1, 2]]))
    assert sizes.tolist() == [1, 2, 2]


# ---- names


def test_lists_are_tuples_and_their_order_counts() -> None:
    def f(x: Tensor) -> Any:
        return (
            lax.psum(x, ["a", "b"]),
            lax.axis_index(["a", "b"]),
            lax.axis_index(("b", "a")),
            lax.axis_size(["a", "b"]),
            lax.all_gather(x, ["b", "a"]),
        )

    x = torch.arange(6).view(2, 3)
    inner = fcoll.vmap(f, axis_name="b")
    total, ab, ba, size, gathered = fcoll.vmap(inner, axis_name="a")(x)
    assert total.unique().tolist() == [15]
    assert ab.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert ba.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert size.unique().tolist() == [6]
    assert gathered[0, 0].tolist() == [0, 3, 1, 4, 2, 5]


def test_no_names_are_the_identity() -> None:
    x = torch.tensor([1.0, 2.0])
    for f in (lax.psum, lax.pmean, lax.pmax, lax.pmin):
        torch.testing.assert_close(f(x, []), x)
        torch.testing.assert_close(f(x, ()), x)
    assert lax.axis_size(()) == 1


def test_integers_among_the_names_are_array_axes() -> None:
    x = torch.arange(24.0).view(4, 3, 2)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return lax.psum(x, (0, "i")), lax.pmean(x, ["i", -2]), lax.pmax(x, (0, "i", 1)), lax.pmin({"x": x}, (1,))["x"]

    total, mean, high, low = fcoll.vmap(f, axis_name="i", out_dims=(None, None, None, 0))(x)
    torch.testing.assert_close(total, x.sum((0, 1)))
    torch.testing.assert_close(mean, x.mean((0, 1)))
    torch.testing.assert_close(high, x.amax())
    torch.testing.assert_close(low, x.amin(2))


def test_groups_on_processes_eager_and_compiled(ranks: Pools) -> None:
    def f(x: Tensor) -> tuple[Any, ...]:
        pairs, crossed = [[0, 1], [2, 3]], [[0, 2], [3, 1]]
        return (
            lax.psum(x, fcoll.WORLD, axis_index_groups=pairs),
            lax.psum(1, fcoll.WORLD, axis_index_groups=pairs),
            lax.all_gather(x, fcoll.WORLD, axis_index_groups=crossed),
            lax.axis_index(fcoll.WORLD),
        )

    def on_rank(x: Tensor) -> list[tuple[Any, ...]]:
        compiled: Callable[..., Any] = torch.compile(f, fullgraph=True, backend="aot_eager")
        return [f(x), compiled(x)]

    for rank, results in enumerate(ranks(4).run(on_rank, per_rank=[(torch.tensor(float(r)),) for r in range(4)])):
        for total, two, gathered, index in results:
            assert total.item() == [1, 1, 5, 5][rank]
            assert two == 2
            assert gathered.tolist() == ([0, 2] if rank in (0, 2) else [3, 1])
            assert index.item() == rank


# ---- errors


ERRORS: list[tuple[Callable[[Tensor], Any], type[Exception], str]] = [
    (lambda x: lax.psum(x, "k"), NameError, "'k' is not bound"),
    (lambda x: lax.axis_index(["i", "k"]), NameError, "'k' is not bound"),
    (lambda x: lax.psum({"w": [x, "no"]}, "i"), TypeError, r"tree\['w'\]\[1\] is a str"),
    (lambda x: lax.psum({"n": 1, "w": "no", "x": x}, "i"), TypeError, r"tree\['w'\] is a str"),
    (lambda x: lax.pmax(x * 1j, "i"), TypeError, "complex"),
    (lambda x: lax.psum_scatter(x > 0, "i"), TypeError, "bool"),
    (lambda x: lax.psum_scatter(x, "i"), ValueError, "must be 4"),
    (lambda x: lax.psum_scatter(x, "i", tiled=True), ValueError, "not a multiple of the 4 ranks"),
    (lambda x: lax.all_to_all(x.new_zeros(4), "i", 0, 2), ValueError, "concat_axis=2 is out of range"),
    (lambda x: lax.pswapaxes(x, "i", 0), ValueError, "must be 4"),
    (lambda x: lax.all_gather(x, "i", axis=2), ValueError, "axis=2 is out of range"),
    (lambda x: lax.all_gather(x, "i", to="reduced"), ValueError, "to is .*'reduced'"),
    (lambda x: lax.pcast(x, "i", to="invarying"), ValueError, "to is .*'invarying'"),
    (lambda x: lax.ppermute(x, "i", [(0, 4)]), ValueError, "destination 4"),
    (lambda x: lax.ppermute(x, "i", [(0, 1), (0, 2)]), ValueError, "each source"),
    (lambda x: lax.pshuffle(x, "i", [0, 1, 2]), ValueError, "each of 4 ranks once"),
    (lambda x: lax.pbroadcast(x, "i", 4), ValueError, "src=4"),
    (lambda x: lax.psum(x, (1, "i")), ValueError, "x has shape .* no axis 1"),
    (lambda x: lax.psum({"n": 1, "x": x}, (0, "i")), ValueError, r"x\['n'\] has shape"),
    (lambda x: lax.psum(x, (0, "i"), axis_index_groups=[[0, 1], [2, 3]]), ValueError, "names only"),
    (lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1], [1, 2]]), ValueError, "exactly once"),
    (lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1]]), ValueError, "each of its 4 ranks"),
    (lambda x: lax.all_gather(x, "i", axis_index_groups=[[0], [1, 2, 3]]), ValueError, "of one size"),
    (lambda x: lax.all_to_all(x, "i", 0, 0, axis_index_groups=[[0], [1, 2, 3]]), ValueError, "of one size"),
    (lambda x: lax.psum_scatter(x, "i", axis_index_groups=[[0], [1, 2, 3]]), ValueError, "of one size"),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS, ids=[message for _, _, message in ERRORS])
def test_errors(call: Callable[[Tensor], Any], kind: type[Exception], message: str) -> None:
    f = fcoll.vmap(call, axis_name="i")
    with pytest.raises(kind, match=message) as eager:
        f(torch.zeros(4, 3))
    assert isinstance(eager.value, fcoll.FcollError)
    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(f, fullgraph=True, backend="eager")
    with pytest.raises(kind, match=message):
        compiled(torch.zeros(4, 3))


# ---- porting

JAX_SOURCE = """
def layer_statistics(x, axis_name):
    n = lax.psum(x.shape[0], axis_name)
    mean = lax.psum(x.sum(0), axis_name) / n
    spread = lax.psum(((x - mean) ** 2).sum(0), axis_name) / n
    return mean, spread

def attention(q, k, v, axis_name):
    every_k = lax.all_gather(k, axis_name, axis=0, tiled=True)
    every_v = lax.all_gather(v, axis_name, axis=0, tiled=True)
    weights = exp(q @ every_k.T)
    return (weights @ every_v) / weights.sum(-1)[:, None]

def model(x, w, axis_name):
    mean, spread = layer_statistics(x, axis_name)
    h = (x - mean) / (spread + 1e-5) ** 0.5
    rank, size = lax.axis_index(axis_name), lax.axis_size(axis_name)
    ring = [(i, (i + 1) % size) for i in range(size)]
    h = attention(h @ w, lax.ppermute(h, axis_name, perm=ring), h, axis_name) * (rank + 1)
    return lax.pmean((h ** 2).mean(), axis_name)
"""


def dense_model(x: Tensor, w: Tensor) -> Tensor:
    """The same with all ranks' rows at hand: rank, row, feature."""
    n = x.shape[0]
    rows = x.flatten(0, 1)
    h = (x - rows.mean(0)) / (rows.var(0, correction=0) + 1e-5) ** 0.5
    k, v = h.roll(1, 0).flatten(0, 1), h.flatten(0, 1)
    scaled = torch.softmax(h @ w @ k.T, -1) @ v * torch.arange(1, n + 1).view(n, 1, 1)
    return (scaled**2).mean()


def test_a_jax_function_ports_by_changing_its_import() -> None:
    namespace: dict[str, Any] = {"lax": lax, "exp": torch.exp}
    exec(textwrap.dedent(JAX_SOURCE), namespace)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 5, dtype=torch.float64, generator=generator)
    w = torch.randn(5, 5, dtype=torch.float64, generator=generator) / 5

    def model(x: Tensor, w: Tensor) -> Tensor:
        value: Tensor = fcoll.vmap(lambda x: namespace["model"](x, w, "i"), axis_name="i", out_dims=None)(x)
        return value

    torch.testing.assert_close(model(x, w), dense_model(x, w))
    for ours, dense in zip(
        torch.func.grad(model, (0, 1))(x, w), torch.func.grad(dense_model, (0, 1))(x, w), strict=True
    ):
        torch.testing.assert_close(ours, dense)
