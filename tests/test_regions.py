"""fcoll.regions: forward and gradient are what Megatron-LM's mappings do, with values that differ on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from common import Pools, close, draw, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch import Tensor

import fcoll
from fcoll import regions
from fcoll.testing import Emulated, Processes, Substrate

Stack = Callable[[Tensor], Tensor]
"""What a mapping does to the stack of all ranks' tensors."""


def identity(xs: Tensor) -> Tensor:
    return xs


def reduced(xs: Tensor) -> Tensor:
    return xs.sum(0).expand_as(xs)


def own_block(axis: int) -> Stack:
    return lambda xs: torch.stack([x.chunk(len(xs), axis)[rank] for rank, x in enumerate(xs)])


def gathered(axis: int) -> Stack:
    return lambda xs: torch.stack([torch.cat(list(xs), axis)] * len(xs))


def reduce_scattered(axis: int) -> Stack:
    return lambda xs: own_block(axis)(reduced(xs))


def exchanged(split: int, concat: int) -> Stack:
    return lambda xs: torch.stack([torch.cat([x.chunk(len(xs), split)[r] for x in xs], concat) for r in range(len(xs))])


def only_rank_0(f: Stack) -> Stack:
    def g(xs: Tensor) -> Tensor:
        ys = f(xs)
        return torch.cat((ys[:1], torch.zeros_like(ys[1:])))

    return g


def from_rank_0(f: Stack) -> Stack:
    return lambda xs: f(xs[:1].expand_as(xs))


class Mapping(NamedTuple):
    """A mapping as Megatron-LM's source has it: what its forward and its backward do."""

    call: Callable[[Tensor, Any], Any]
    forward: Stack
    backward: Stack


MAPPINGS = {
    "copy_to_tensor_model_parallel_region(x)": Mapping(lambda x, g: regions.copy_to(x, g), identity, reduced),
    "reduce_from_tensor_model_parallel_region(x)": Mapping(lambda x, g: regions.reduce_from(x, g), reduced, identity),
    "scatter_to_tensor_model_parallel_region(x)": Mapping(
        lambda x, g: regions.scatter_to(x, g), own_block(-1), gathered(-1)
    ),
    "gather_from_tensor_model_parallel_region(x)": Mapping(
        lambda x, g: regions.gather_from(x, g), gathered(-1), own_block(-1)
    ),
    "scatter_to_sequence_parallel_region(x)": Mapping(
        lambda x, g: regions.scatter_to(x, g, 0), own_block(0), gathered(0)
    ),
    "gather_from_sequence_parallel_region(x)": Mapping(
        lambda x, g: regions.gather_from(x, g, 0, tensor_parallel_output_grad=True), gathered(0), reduce_scattered(0)
    ),
    "gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)": Mapping(
        lambda x, g: regions.gather_from(x, g, 0), gathered(0), own_block(0)
    ),
    "reduce_scatter_to_sequence_parallel_region(x)": Mapping(
        lambda x, g: regions.reduce_scatter_to(x, g), reduce_scattered(0), gathered(0)
    ),
    "all_gather_last_dim_from_tensor_parallel_region(x)": Mapping(
        lambda x, g: regions.gather_from(x, g, tensor_parallel_output_grad=True), gathered(-1), reduce_scattered(-1)
    ),
    "reduce_scatter_last_dim_to_tensor_parallel_region(x)": Mapping(
        lambda x, g: regions.reduce_scatter_to(x, g, -1), reduce_scattered(-1), gathered(-1)
    ),
    "all_to_all_sp2hp(x)": Mapping(lambda x, g: fcoll.all_to_all(x, g, 1, 0), exchanged(-1, 0), exchanged(0, -1)),
    "all_to_all_hp2sp(x)": Mapping(lambda x, g: fcoll.all_to_all(x, g, 0, 1), exchanged(0, -1), exchanged(-1, 0)),
    "scatter, rank0_only": Mapping(
        lambda x, g: regions.scatter_to(x, g, 1, rank0_only=True), from_rank_0(own_block(1)), only_rank_0(gathered(1))
    ),
    "gather, rank0_only": Mapping(
        lambda x, g: regions.gather_from(x, g, 1, rank0_only=True), only_rank_0(gathered(1)), from_rank_0(own_block(1))
    ),
    "scaled by n": Mapping(
        lambda x, g: regions.scale_gradient(regions.gather_from(x, g, 0), fcoll.axis_size(g)),
        gathered(0),
        lambda cs: own_block(0)(cs) * len(cs),
    ),
    "scaled by 1/n": Mapping(
        lambda x, g: regions.scale_gradient(regions.scatter_to(x, g, 0), 1 / fcoll.axis_size(g)),
        own_block(0),
        lambda cs: gathered(0)(cs) / len(cs),
    ),
}
N = 3


@pytest.fixture(params=["emulated", "gloo"])
def both(request: pytest.FixtureRequest, ranks: Pools) -> Substrate:
    return Emulated(N) if request.param == "emulated" else Processes(ranks(N))


def called(mapping: Mapping) -> Callable[[Any, Any], Any]:
    return lambda group, x: mapping.call(x, group)


def test_every_row_of_the_table_is_tested() -> None:
    rows = re.findall(r"^\| (.*?) \|", regions.__doc__ or "", re.MULTILINE)
    assert len(rows) == 14
    assert set(rows[2:]) <= set(MAPPINGS)


@pytest.mark.parametrize("how", ["func", "backward"])
def test_forward_and_gradient_are_those_of_the_mapping(both: Substrate, how: Any) -> None:
    xs = draw((N, N, 2 * N))
    for name, mapping in MAPPINGS.items():
        ys = mapping.forward(xs)
        cs = draw(ys.shape, 2)
        close(both.map(called(mapping), xs), ys, name)
        close(both.vjp(called(mapping), xs, cs, how=how), mapping.backward(cs), name)


def all_compiled(group: Any, x: Tensor) -> Any:
    """All in one graph, with their gradients at cubes."""
    return [
        grad(lambda x, mapping=mapping: (mapping.call(x, group) ** 3).sum())(x) for mapping in MAPPINGS.values()
    ] + [mapping.call(x, group) for mapping in MAPPINGS.values()]


def test_compiled(both: Substrate) -> None:
    xs = draw((N, N, 2 * N))
    got = both.map(all_compiled, xs, compile="aot_eager")
    for (name, mapping), gradient, value in zip(MAPPINGS.items(), got, got[len(MAPPINGS) :], strict=False):
        ys = mapping.forward(xs)
        close(value, ys, name)
        close(gradient, mapping.backward(3 * ys**2), name)


def test_second_order_and_batches(both: Substrate) -> None:
    """Of Megatron-LM's mappings only the first order exists: here the gradient's gradient by the same rules."""
    xs, v = draw((N, N, 2 * N)), draw((N, N, 2 * N), 3)

    def second(mapping: Mapping) -> Callable[..., Any]:
        def f(group: Any, pair: Any) -> Any:
            x, v = pair
            return grad(lambda x: (grad(lambda x: (mapping.call(x, group) ** 3).sum())(x) * v).sum())(x)

        return f

    def batched(mapping: Mapping) -> Callable[..., Any]:
        return lambda group, x: vmap(lambda x: mapping.call(x, group), in_dims=2, out_dims=2)(torch.stack((x, -x), 2))

    for name in ("copy_to_tensor_model_parallel_region(x)", "reduce_from_tensor_model_parallel_region(x)"):
        mapping = MAPPINGS[name]
        ys = mapping.forward(xs)
        # x̄ = B(3 F(x)²), whose own transpose along v is F' then B again: B is declared, so its transpose is F
        want = mapping.backward(6 * ys * mapping.forward(v))
        close(both.map(second(mapping), (xs, v)), want, name)
    for name, mapping in MAPPINGS.items():
        ys = mapping.forward(xs)
        close(both.map(batched(mapping), xs), torch.stack((ys, -ys), 3), name)


def test_a_column_then_row_parallel_layer() -> None:
    """copy_to and reduce_from around two layers cut along the hidden axis, against the dense layers."""
    x, w, u = draw(4), draw((4, 6), 2), draw((6, 5), 3)

    def dense(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        return (torch.tanh(x @ w) @ u).square().sum()

    def parallel(x: Tensor, w: Tensor, u: Tensor) -> Any:
        return (regions.reduce_from(torch.tanh(regions.copy_to(x, "tp") @ w) @ u, "tp")).square().sum()

    ws, us = w.unflatten(1, (N, -1)).movedim(1, 0), u.unflatten(0, (N, -1))
    mapped = fcoll.vmap(grad(parallel, argnums=(0, 1, 2)), in_dims=(None, 0, 0), axis_name="tp")
    gx, gw, gu = mapped(x, ws, us)
    want = grad(dense, argnums=(0, 1, 2))(x, w, u)
    close(gx, want[0].expand(N, -1))
    close(gw.movedim(0, 1).flatten(1, 2), want[1])
    close(gu.flatten(0, 1), want[2])


def test_scale_gradient_in_every_mode() -> None:
    def f(x: Any) -> Any:
        return (regions.scale_gradient(x, 4) ** 3).sum()

    x = draw(3)
    x[0] = float("inf")
    assert torch.equal(regions.scale_gradient(x, 4), x)
    x = draw(3)
    close(grad(f)(x), 12 * x**2)
    close(jvp(f, (x,), (torch.ones_like(x),))[1], (12 * x**2).sum())
    close(hessian(f)(x), torch.diag(96 * x))
    close(jacrev(jacrev(f))(x), torch.diag(96 * x))
    close(jacfwd(jacfwd(lambda x: regions.scale_gradient(x**3, 4).sum()))(x), torch.diag(24 * x))
    close(jacfwd(lambda x: vmap(lambda x: regions.scale_gradient(x, 0.5))(x))(x), torch.eye(3, dtype=x.dtype) / 2)
    tree = {"a": x, "n": torch.tensor(3), "s": "text"}
    scaled = regions.scale_gradient(tree, 2.0)
    assert scaled["n"] is tree["n"]
    assert scaled["s"] == "text"
    torch.compiler.reset()
    compiled = torch.compile(lambda x: vmap(grad(f))(x), fullgraph=True, backend="aot_eager")
    close(compiled(x), 12 * x**2)
    with pytest.raises(TypeError, match="scale_gradient: factor is a number, got str"):
        regions.scale_gradient(x, "n")  # type: ignore[arg-type]


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="gather_from: with rank0_only the gradient is rank 0's"):
        regions.gather_from(torch.ones(2), "g", rank0_only=True, tensor_parallel_output_grad=True)
