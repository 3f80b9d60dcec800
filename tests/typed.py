"""Lines that type checkers judge, and nobody runs: what the public functions are inferred to return.

`assert_type` fails where another type is inferred. A line with an `ignore` is wrong, and must be an error: both
checkers report an `ignore` that suppresses nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_type

import torch
from torch import Tensor

import fcoll
from fcoll import P, lax, regions


class Pair(NamedTuple):
    """A tree."""

    left: Tensor
    right: Tensor


@dataclass
class State:
    """A tree as well, once it is registered."""

    weight: Tensor


Params = dict[str, Tensor]


def same_tree_out(x: Tensor, params: Params, pair: Pair, state: State, rows: list[tuple[Tensor, None]]) -> None:
    """Whatever the tree is, the result is one of its type."""
    assert_type(fcoll.all_reduce(x, "i"), Tensor)
    assert_type(fcoll.all_reduce(params, "i", "mean"), Params)
    assert_type(fcoll.all_reduce(pair, ("dp", "tp")), Pair)
    assert_type(fcoll.all_reduce(state, fcoll.WORLD, invariant=True), State)
    assert_type(fcoll.all_reduce(rows, "i"), list[tuple[Tensor, None]])
    assert_type(fcoll.all_gather(params, "i", 1, tiled=False), Params)
    assert_type(fcoll.all_gather(x, "i", sizes=[1, 2]), Tensor)
    assert_type(fcoll.reduce_scatter(pair, "i", op="max"), Pair)
    assert_type(fcoll.all_to_all(state, "i", 0, 1), State)
    assert_type(fcoll.broadcast(params, "i", src=1), Params)
    assert_type(fcoll.reduce(pair, "i", dst=1), Pair)
    assert_type(fcoll.gather(state, "i"), State)
    assert_type(fcoll.scatter(params, "i"), Params)
    assert_type(fcoll.permute(pair, "i", [(0, 1)]), Pair)
    assert_type(fcoll.shift(state, "i", -1, wrap=False), State)
    assert_type(fcoll.vary(params, "i"), Params)
    assert_type(fcoll.split(pair, "i"), Pair)
    assert_type(fcoll.prefix_sum(state, "i"), State)
    assert_type(fcoll.argmax(params, "i"), Params)
    assert_type(fcoll.argmin(pair, "i"), Pair)
    assert_type(fcoll.ragged_all_to_all(x, x, [0], [1], [0], [1], "i"), Tensor)
    assert_type(fcoll.after(state, fcoll.token()), State)
    assert_type(fcoll.recv(params, "i", 0, fcoll.token()), tuple[Params, Tensor])
    assert_type(fcoll.send(params, "i", 0, fcoll.token()), Tensor)
    assert_type(fcoll.axis_index("i"), Tensor)
    assert_type(fcoll.axis_size("i"), int)
    assert_type(lax.psum(params, "i"), Params)
    assert_type(lax.ppermute(pair, "i", [(0, 1)]), Pair)
    assert_type(regions.copy_to(state, "i"), State)


def a_number_keeps_its_kind(mean: float) -> None:
    """To a checker, that is: the result is a 0-d tensor, except in fcoll.lax, where it stays a number as in JAX.

    Overloads for numbers would make mypy and pyright take what they know nothing of, such as the parameter of a
    lambda, for a number, and the result for a tensor.
    """
    assert_type(fcoll.all_reduce(mean, "i", "mean"), float)
    assert_type(fcoll.all_reduce(torch.tensor(mean), "i", "mean"), Tensor)
    assert_type(lax.psum(mean, "i"), float)


def what_is_unknown_stays_so(anything: Any) -> None:
    """Code without annotations is not told that its trees are tensors."""
    assert_type(fcoll.all_reduce(anything, "i"), Any)
    fcoll.vmap(lambda tree: fcoll.all_reduce(tree, "i"), axis_name="i")(anything)["w"].sum()
    torch.func.grad(lambda tree: fcoll.vary(tree, "i")["w"].sum())(anything)["w"].sum()


def loss(params: Params, x: Tensor, scale: float = 1.0) -> Tensor:
    """A program, for what follows."""
    return (params["w"] @ x).sum() * scale


def transforms_keep_the_signature(params: Params, x: Tensor) -> None:
    """Also of what a decorator returns."""
    mesh = fcoll.virtual_mesh(dp=2)
    assert_type(fcoll.vmap(loss, axis_name="i")(params, x, scale=2.0), Tensor)
    assert_type(fcoll.compile(loss)(params, x), Tensor)
    assert_type(fcoll.compile(backend="eager")(loss)(params, x), Tensor)
    assert_type(fcoll.checked()(loss)(params, x), Tensor)
    assert_type(fcoll.bind(mesh)(loss)(params, x), Tensor)
    assert_type(fcoll.shard_map(loss, mesh, P(), P())(params, x), Tensor)
    assert_type(fcoll.shard_map(loss, in_specs=P(), out_specs=P()).on(mesh)(params, x), Tensor)
    assert_type(fcoll.shard_map(mesh=mesh, in_specs=P(), out_specs=P())(loss)(params, x), Tensor)
    assert_type(fcoll.trace(loss, mesh)(params, x), fcoll.Trace)
    assert_type(fcoll.draw(loss, mesh)(params, x), fcoll.Picture)
    assert_type(fcoll.draw(fcoll.shift, n=2), fcoll.Picture)
    assert_type(fcoll.launch(loss, 2, params, x), list[Tensor])
    assert_type(fcoll.launch(nproc=2)(loss)(params, x), list[Tensor])
    fcoll.vmap(loss, axis_name="i")(x, x)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    fcoll.compile(loss)(params)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    fcoll.shard_map(loss, mesh)(params, "x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    fcoll.trace(loss)(params, x, 1, 2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def waits_give_what_was_started(params: Params, x: Tensor) -> None:
    """With the arguments of the collective."""
    pending = fcoll.start(fcoll.all_gather, params, "i", 1, tiled=False)
    assert_type(pending, fcoll.Pending[Params])
    assert_type(fcoll.wait(pending), Params)
    assert_type(fcoll.wait(fcoll.start(fcoll.reduce_scatter, x, "i")), Tensor)
    fcoll.wait(x)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def wrong_calls(x: Tensor) -> None:
    """Each is an error."""
    fcoll.all_reduce(x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    fcoll.all_reduce(x, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    fcoll.all_reduce(x, "i", op=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    fcoll.split(x, "i", "rows")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    fcoll.split(x, "i", 0, True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    fcoll.vmap(loss)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    fcoll.mesh(dp="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    fcoll.virtual_mesh(2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    fcoll.launch(loss, "2")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]


result: Callable[[Tensor, str], Tensor] = fcoll.all_reduce
wrong: Callable[[Tensor, str], int] = fcoll.all_reduce  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
