"""Values of every row of the table, on every substrate, for any layout of the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import close, vjp
from table import DIFFERENTIABLE, TABLE, Row
from torch import Tensor

import fcoll
from fcoll.testing import Emulated, Processes, Ranks, Substrate

EVERYWHERE = [("emulated", n) for n in (1, 2, 3, 4, 8)] + [("gloo", n) for n in (1, 2, 3, 4)]


@pytest.fixture(params=EVERYWHERE, ids=lambda p: f"{p[0]}-{p[1]}")
def everywhere(request: pytest.FixtureRequest, ranks: Callable[[int], Ranks]) -> Substrate:
    kind, n = request.param
    if kind == "emulated":
        return Emulated(n)
    return Processes(ranks(n)) if n > 1 else Processes(ranks(2), 1)


def inputs(rows: list[Row], n: int) -> dict[str, Tensor]:
    return {row.name: row.inputs(n) for row in rows}


def test_every_public_function_has_rows() -> None:
    assert {row.name.split()[0] for row in TABLE} == set(fcoll.functional.__all__)


def test_names_of_rows_are_distinct() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_table_agrees_with_itself(n: int) -> None:
    """`vjp` is what torch derives from `value`, except where it is declared to be something else."""
    for row in DIFFERENTIABLE:
        stack = row.inputs(n)
        values, pull = vjp(row.values, stack)
        cotangents = torch.randn_like(values)
        torch.testing.assert_close(values, row.values(stack))
        same = torch.allclose(pull(cotangents)[0], row.pull(stack, cotangents))
        assert same == (not row.once or n == 1), row.name


def test_values(everywhere: Substrate) -> None:
    def f(group: Any, xs: dict[str, Tensor]) -> dict[str, Any]:
        return {row.name: row.call(xs[row.name], group) for row in TABLE}

    n = everywhere.n
    got = everywhere.map(f, inputs(TABLE, n))
    torch.testing.assert_close(got, {row.name: row.values(row.inputs(n)) for row in TABLE}, rtol=1e-13, atol=0)


def test_inputs_stay_as_they_are_and_results_are_new(everywhere: Substrate) -> None:
    def f(group: Any, xs: dict[str, Tensor]) -> dict[str, Any]:
        out = {}
        for row in TABLE:
            x = xs[row.name].clone()
            y = row.call(x, group)
            same = x == xs[row.name]
            before = y.clone()
            x.add_(1)  # seen in y if that is a view of x
            out[row.name] = {"same": same, "before": before, "after": y.clone()}
        return out

    for name, seen in everywhere.map(f, inputs(TABLE, everywhere.n)).items():
        assert seen["same"].all(), name
        assert torch.equal(seen["before"], seen["after"]), name


def test_a_result_can_be_written_to(everywhere: Substrate) -> None:
    """Of collectives whose results are no zero-stride expansions."""
    rows = [row for row in DIFFERENTIABLE if row.name.split()[0] not in ("reduce", "gather", "permute", "shift")]

    def f(group: Any, xs: dict[str, Tensor]) -> dict[str, Any]:
        return {row.name: (row.call(xs[row.name], group).mul_(2), xs[row.name]) for row in rows}

    n = everywhere.n
    want = {row.name: (2 * row.values(row.inputs(n)), row.inputs(n)) for row in rows}
    torch.testing.assert_close(everywhere.map(f, inputs(rows, n)), want, rtol=1e-13, atol=0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every other column": lambda x: torch.stack((x, -x), -1)[..., 0],
    "turned": lambda x: x.movedim(0, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 0),
    "behind an offset": lambda x: torch.cat((x[:1] - 7, x))[1:],
    "expanded along axis 0": lambda x: x[:1].expand_as(x),
    "expanded along axis -1": lambda x: x[..., :1].expand_as(x),
    "one number": lambda x: x.flatten()[0].expand_as(x),
}


def test_any_layout_is_fine(everywhere: Substrate) -> None:
    def f(group: Any, xs: dict[str, Tensor]) -> dict[str, Any]:
        return {
            layout: {row.name: row.call(view(xs[row.name]), group) for row in TABLE} for layout, view in LAYOUTS.items()
        }

    n = everywhere.n
    got = everywhere.map(f, inputs(TABLE, n))
    for layout, view in LAYOUTS.items():
        for row in TABLE:
            laid_out = torch.stack([view(x) for x in row.inputs(n)])
            close(got[layout][row.name], row.values(laid_out), f"{row.name}, {layout}")


def test_the_layouts_are_what_they_are_called() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert not any(view(x).is_contiguous() for name, view in LAYOUTS.items() if "offset" not in name)
    assert LAYOUTS["behind an offset"](x).storage_offset()
    others = ("expanded along axis 0", "expanded along axis -1", "one number")
    assert all(torch.equal(view(x), x) for name, view in LAYOUTS.items() if name not in others)


def test_zeros_of_a_root_take_no_memory(ranks: Callable[[int], Ranks]) -> None:
    """Where the specification says zeros, a process holds one number."""

    def f() -> dict[str, int]:
        x, group = torch.ones(64, 4), fcoll.WORLD
        ys = {
            "gather": fcoll.gather(x, group, 1),
            "reduce": fcoll.reduce(x, group, 1),
            "permute": fcoll.permute(x, group, [(0, 1), (1, 2)]),
            "shift": fcoll.shift(x, group, wrap=False),
        }
        return {name: y.untyped_storage().nbytes() // y.element_size() for name, y in ys.items()}

    rank_0, rank_1, rank_2 = ranks(3).run(f)
    assert rank_0 == {"gather": 1, "reduce": 1, "permute": 1, "shift": 1}
    assert rank_1 == {"gather": 768, "reduce": 256, "permute": 256, "shift": 256}
    assert rank_2 == {"gather": 1, "reduce": 1, "permute": 256, "shift": 256}
