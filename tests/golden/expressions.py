"""The expressions of the golden cases, which are JAX source, evaluated with `fcoll.lax`.

`evaluate` reads them as JAX does under `vmap` and `check_vma=False`. `evaluate_typed` reads them as `check_vma=True`
does: it knows which values vary between the ranks, lets those that do not count once, and puts `vary` where an
invariant value meets a varying one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fcoll
from fcoll import lax
from golden.cases import Groups

COLLECTIVES: list[Callable[..., Any]] = [
    lax.psum,
    lax.pmean,
    lax.pmax,
    lax.ppermute,
    lax.pshuffle,
    lax.pswapaxes,
    lax.psum_scatter,
    lax.all_gather,
    lax.all_to_all,
    lax.pcast,
]


def evaluate(expression: str, groups: Groups, **values: Any) -> Any:
    """The value, on this rank."""
    names: dict[str, Any] = {
        "axis_index": lambda name: lax.axis_index(groups(name)),
        "axis_size": lambda name: lax.axis_size(groups(name)),
        "stop_gradient": Tensor.detach,
        "grad": torch.func.grad,
        "exp": torch.exp,
        "sqrt": torch.sqrt,
        "where": torch.where,
    }
    for collective in COLLECTIVES:
        names[collective.__name__] = functools.partial(_call, collective, groups)
    return eval(expression, names | values)


def _call(
    collective: Callable[..., Any], groups: Callable[[Any], Any], x: Any, name: Any, *args: Any, **kw: Any
) -> Any:
    return collective(x, groups(name), *args, **kw)


class Typed:
    """A value, and whether it varies over the group."""

    def __init__(self, value: Tensor, varies: bool, group: Any) -> None:
        self.value, self.varies, self.group = value, varies, group

    def varying(self) -> Tensor:
        return self.value if self.varies else fcoll.vary(self.value, self.group)

    def same(self, value: Tensor) -> Typed:
        return Typed(value, self.varies, self.group)

    def _with(self, op: Callable[[Any, Any], Any], other: Any) -> Typed:
        if not isinstance(other, Typed):
            return self.same(op(self.value, other))
        if self.varies == other.varies:
            return self.same(op(self.value, other.value))
        return Typed(op(self.varying(), other.varying()), True, self.group)

    def __add__(self, other: Any) -> Typed:
        return self._with(operator.add, other)

    def __sub__(self, other: Any) -> Typed:
        return self._with(operator.sub, other)

    def __mul__(self, other: Any) -> Typed:
        return self._with(operator.mul, other)

    def __truediv__(self, other: Any) -> Typed:
        return self._with(operator.truediv, other)

    def __pow__(self, other: Any) -> Typed:
        return self._with(operator.pow, other)

    def equals(self, other: Any) -> Typed:
        return self._with(operator.eq, other)

    __eq__ = equals  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def evaluate_typed(expression: str, group: Any, x: Tensor, w: Tensor) -> Typed:
    """The value on this rank; x varies, and w is the same on all ranks."""

    def once(op: str) -> Callable[..., Typed]:
        return lambda v, _: Typed(fcoll.all_reduce(v.varying(), group, op, invariant=True), False, group)

    def moved(collective: Callable[..., Tensor]) -> Callable[..., Typed]:
        return lambda v, _, *args: Typed(collective(v.varying(), group, *args), True, group)

    def elementwise(f: Callable[[Tensor], Tensor]) -> Callable[[Typed], Typed]:
        return lambda v: v.same(f(v.value))

    def all_gather(v: Typed, _: Any, to: str = "varying") -> Typed:
        return Typed(lax.all_gather(v.varying(), group, to=to), to == "varying", group)

    def where(condition: Typed, v: Typed, other: float) -> Typed:
        return Typed(torch.where(condition.varying(), v.varying(), other), True, group)

    names: dict[str, Any] = {
        "psum": once("sum"),
        "pmean": once("mean"),
        "pmax": once("max"),
        "all_gather": all_gather,
        "all_to_all": moved(lax.all_to_all),
        "ppermute": moved(lax.ppermute),
        "pcast": lambda v, _, to: Typed(v.varying(), True, group),
        "axis_index": lambda _: Typed(lax.axis_index(group), True, group),
        "stop_gradient": elementwise(Tensor.detach),
        "exp": elementwise(torch.exp),
        "sqrt": elementwise(torch.sqrt),
        "where": where,
    }
    value: Typed = eval(expression, names | {"x": Typed(x, True, group), "w": Typed(w, False, group)})
    return value
