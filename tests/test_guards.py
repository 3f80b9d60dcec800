"""A function compiled by `fcoll.compile` never gives a result of what its program was before."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from common import Pools, close, grad
from torch import Tensor

import fcoll
from fcoll import guards

ACTIVATION: Any = torch.sin
FACTOR = 2.0
X = torch.tensor([[0.5], [1.0], [3.0]])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    globals().update(ACTIVATION=torch.sin, FACTOR=2.0)


def over_ranks(f: Callable[[Tensor], Tensor]) -> Tensor:
    mapped: Tensor = fcoll.vmap(lambda x: fcoll.all_reduce(f(x), "i"), axis_name="i")(X)
    return mapped


def follows(f: Callable[..., Tensor], *changes: Callable[[], object]) -> None:
    """The compiled f gives what f gives, before and after each change."""
    compiled: Any = fcoll.compile(f, backend="eager")
    seen = []
    for i, change in enumerate([lambda: None, *changes]):
        change()
        seen.append(f())
        close(compiled(), seen[-1], i)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen)), "the changes change nothing"


def test_globals() -> None:
    follows(
        lambda: over_ranks(lambda x: ACTIVATION(x) * FACTOR),
        lambda: globals().update(ACTIVATION=torch.cos),
        lambda: globals().update(ACTIVATION=lambda x: x * 3),
        lambda: globals().update(FACTOR=5.0),
        lambda: globals().update(ACTIVATION=torch.nn.functional.silu),
    )


def test_attributes_and_containers() -> None:
    config = SimpleNamespace(f=torch.sin, table={"f": torch.sin}, listed=[torch.sin], kind=int, at=torch.nn)

    def f() -> Tensor:
        where = 1.0 if config.kind is int else 2.0
        return over_ranks(
            lambda x: config.f(x) + config.table["f"](x) + config.listed[0](x) + where + hasattr(config.at, "Linear")
        )

    follows(
        f,
        lambda: setattr(config, "f", torch.cos),
        lambda: config.table.update(f=torch.cos),
        lambda: config.listed.__setitem__(0, torch.cos),
        lambda: setattr(config, "kind", float),
        lambda: setattr(config, "at", torch),
    )


def test_modules() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.op, self.kind = torch.sin, "sum", torch.nn.ReLU

        def forward(self) -> Tensor:
            scale = 1.0 if self.kind is torch.nn.ReLU else 2.0
            out: Tensor = fcoll.vmap(lambda x: fcoll.all_reduce(self.f(x), "i", self.op) * scale, axis_name="i")(X)
            return out

    net = Net()
    follows(
        net,
        lambda: setattr(net, "f", torch.cos),
        lambda: setattr(net, "op", "max"),
        lambda: setattr(net, "kind", torch.nn.Tanh),
    )


def test_closures_and_defaults() -> None:
    activation: Any = torch.sin

    def become(f: Any) -> None:
        nonlocal activation
        activation = f

    follows(
        lambda: over_ranks(lambda x: activation(x)),
        lambda: become(torch.cos),
        lambda: become(torch.nn.functional.gelu),
    )

    def f(a: Any = torch.sin, *, b: Any = torch.exp) -> Tensor:
        return over_ranks(lambda x: a(x) + b(x))

    follows(
        f,
        lambda: setattr(f, "__defaults__", (torch.cos,)),
        lambda: setattr(f, "__kwdefaults__", {"b": torch.tanh}),
    )


def test_arguments() -> None:
    compiled: Any = fcoll.compile(lambda f: over_ranks(f), backend="eager")
    for f in (torch.sin, torch.cos, torch.nn.functional.relu, torch.nn.Tanh(), torch.nn.Sigmoid()):
        close(compiled(f), over_ranks(f), f)

    def communicate(f: Any) -> Any:
        return fcoll.vmap(lambda x: f(x, "i"), axis_name="i")(X)

    compiled = fcoll.compile(communicate, backend="eager")
    for collective in (fcoll.all_reduce, fcoll.shift, fcoll.broadcast, fcoll.lax.psum, fcoll.lax.pmax):
        close(compiled(collective), communicate(collective), collective.__name__)

    def of_kind(kind: Any) -> Tensor:
        return over_ranks(lambda x: x * (2 if kind is list else 3 if kind is max else 4))

    compiled = fcoll.compile(of_kind, backend="eager")
    for kind in (list, tuple, max, torch, torch.Tensor):
        close(compiled(kind), of_kind(kind), kind)


def test_code_run_in_a_namespace_of_its_own() -> None:
    """As in notebooks, and on the ranks of `fcoll.launch`."""
    namespace: dict[str, Any] = {"torch": torch, "fcoll": fcoll, "X": X}
    exec(
        "activation = torch.sin\n"
        "def inner(x): return fcoll.all_reduce(activation(x), 'i')\n"
        "def f(): return fcoll.vmap(inner, axis_name='i')(X)",
        namespace,
    )
    follows(
        lambda: namespace["f"](),
        lambda: namespace.update(activation=torch.cos),
        lambda: namespace.update(inner=functools.partial(fcoll.all_reduce, group="i", op="max")),
    )


def test_the_axes_in_scope() -> None:
    f = fcoll.compile(lambda x: fcoll.all_reduce(x, "i"), backend="eager")
    with pytest.raises(NameError, match="not bound"):
        f(X)  # type: ignore[no-untyped-call]

    def outer(x: Tensor) -> Any:
        return fcoll.vmap(lambda x: fcoll.all_reduce(x, "i"), axis_name="i")(x)

    compiled: Any = fcoll.compile(outer, backend="eager")
    for x in (X, X[:2], X.double(), X.t(), X[:1]):
        close(compiled(x), outer(x))


def test_subgroups_as_arguments() -> None:
    """Their ranks, which are never the same, are not sizes to be compiled for once and for all."""

    def f(x: Tensor, group: Any) -> Any:
        return fcoll.vmap(lambda x: fcoll.all_reduce(x, group), axis_name="i")(x)

    compiled: Any = fcoll.compile(f, backend="eager")
    x = torch.arange(8.0).view(4, 2)
    for lists in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 0], [2, 1]], [[0], [1], [2, 3]]):
        want = torch.stack([next(x[ranks].sum(0) for ranks in lists if r in ranks) for r in range(4)])
        close(compiled(x, fcoll.subgroups("i", lists)), want, lists)


def test_permutations_as_arguments() -> None:
    def f(x: Tensor, perm: Any) -> Any:
        return fcoll.vmap(lambda x: fcoll.permute(x, "i", perm), axis_name="i")(x)

    compiled: Any = fcoll.compile(f, backend="eager")
    for perm in ([(0, 1)], [(1, 2)], [(2, 0)], [(0, 1), (1, 0)]):
        want = torch.zeros_like(X)
        for source, destination in perm:
            want[destination] = X[source]
        close(compiled(X, perm), want, perm)


def test_groups_of_processes(ranks: Pools) -> None:
    def body(rank: int) -> None:
        torch.compiler.reset()
        x = torch.tensor([1.0, 10.0]) * (rank + 1)
        compiled: Any = fcoll.compile(lambda x, group: fcoll.all_gather(x, group), backend="eager")
        pair = fcoll.subgroups(fcoll.WORLD, [[1, 0], [2]])
        groups: list[Any] = [fcoll.WORLD, fcoll.group([1, 0, 2]), fcoll.group([2, 0, 1]), fcoll.mesh(a=3), fcoll.WORLD]
        reduced: Any = fcoll.compile(lambda x, group: fcoll.all_reduce(x, group), backend="eager")
        for group in (*groups, pair):
            assert torch.equal(reduced(x, group), fcoll.all_reduce(x, group))
        for group in groups:
            assert torch.equal(compiled(x, group), fcoll.all_gather(x, group))
        named: Any = fcoll.compile(lambda x: fcoll.all_gather(x, "a"), backend="eager")
        with fcoll.bind(fcoll.mesh(a=3)):
            assert torch.equal(named(x), fcoll.all_gather(x, "a"))
        with pytest.raises(NameError):
            named(x)

    ranks(3).run(body, per_rank=[(0,), (1,), (2,)])


def test_few_guards_are_left() -> None:
    """That is what they are filtered for."""
    counts = []

    def count(given: Any) -> list[bool]:
        kept = guards.needed(given)
        counts.append((len(kept), sum(kept)))
        return kept

    def f(x: Tensor) -> Any:
        return fcoll.vmap(grad(lambda x: fcoll.all_reduce({"a": x}, "i")["a"].sum()), axis_name="i")(x)

    fcoll.compile(f, backend="eager", options={"guard_filter_fn": count})(X)
    ((given, kept),) = counts
    assert given > 200
    assert kept < 40
