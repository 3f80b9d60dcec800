"""Drawn programs compute the same when optimised, what is said of their values is so, and wrong rules are caught.

`python tests/optimize_soak.py 2000` does it with thousands of programs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import drawn
import pytest
import torch
from common import Pools
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll import P, deferred, engine, fusing, hoisting, invariance, optimizing, rewrites

COUNT = 18


def test_optimised_programs_compute_the_same(ranks: Pools) -> None:
    wide = (("reduced_wide", 0, 1, "dp", 2), ("reduced_wide", 3, 0, "tp", 0))  # one sum is linear in the other
    chosen = drawn.Program((P("dp"), P("tp"), P()), wide, (4,), 1, True)
    results = ranks(4).run(drawn.differences, [chosen, *drawn.drawn(COUNT)])
    assert [text for texts, _ in results for text in texts] == []
    plans = results[0][1]
    assert len(plans) == COUNT + 1
    assert sum(plan.after < plan.before for plan in plans) > COUNT // 3, "too few were rewritten to show anything"
    for _, others in results:
        assert [plan[1:] for plan in others] == [plan[1:] for plan in plans]


def values(programs: list[drawn.Program]) -> list[list[tuple[str, invariance.Classes, Tensor]]]:
    """Of each program, what is claimed of every value on the ranks, and this rank's value."""
    mesh = fcoll.mesh(dp=2, tp=2)
    found = []
    for program in programs:
        graph, args = drawn.traced(program, mesh)
        families = optimizing.agreed(*optimizing.spelled(graph.graph))
        if families is None:
            continue
        known = invariance.Invariance(graph.graph, 4, families)
        seen: list[tuple[str, invariance.Classes, Tensor]] = []

        class Watched(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node) -> Any:
                value = super().run_node(n)
                if isinstance(value, Tensor) and n.op != "output" and n.target not in invariance.COLLECTIVES:
                    seen.append((f"{n.target} in {program}", known[n], torch.as_tensor(value).clone()))  # noqa: B023
                return value

        Watched(graph).run(*args)
        found.append(seen)
    return found


def test_what_is_said_to_be_alike_is(ranks: Pools) -> None:
    results = ranks(4).run(values, drawn.drawn(COUNT + 16)[COUNT:])
    claims = 0
    for nodes in zip(*[itertools.chain.from_iterable(each) for each in results], strict=True):
        name, classes, _ = nodes[0]
        for rank, number in enumerate(classes):
            first = classes.index(number)
            claims += first != rank
            assert torch.equal(nodes[rank][2], nodes[first][2]) or nodes[rank][2].isnan().any(), name
    assert claims > 500


# ---- each fault makes one rule, or what it rests on, wrong

Fault = Callable[[], Any]


def everything_alike() -> Any:
    return rewrites, "alike", lambda x, family: True


def same_everywhere() -> Any:
    return invariance, "gathered", lambda x, family, placed: (0,) * len(x)


def inputs_alike() -> Any:
    return invariance.Invariance, "varying", property(lambda self: (0,) * 4, lambda self, value: None)


def scale_forgotten() -> Any:
    emit = rewrites.emit
    mul = torch.ops.aten.mul.Tensor

    def wrong(before: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if target == mul:
            return emit(before, torch.ops.aten.clone.default, args[0])
        return emit(before, target, *args, **kwargs)

    return rewrites, "emit", wrong


def scales_ignored() -> Any:
    return rewrites, "rescale", lambda before, x, steps: x


def any_slice_is_the_own() -> Any:
    return torch, "equal", lambda a, b: True


def pieces_exchanged() -> Any:
    emit = rewrites.emit

    def wrong(before: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if target == torch.ops.aten.cat.default:
            args = (args[0][::-1], *args[1:])
        return emit(before, target, *args, **kwargs)

    return fusing, "emit", wrong


def function_of_sum() -> Any:
    return hoisting, "_FIRST", hoisting._FIRST | {torch.ops.aten.tanh.default}


def coefficients_alike() -> Any:
    linear = hoisting.linear
    return (
        hoisting,
        "linear",
        lambda node, known, family: [0] if node.target == torch.ops.aten.mul.Tensor else linear(node, known, family),
    )


def count_forgotten() -> Any:
    emit = rewrites.emit
    mul, clone = torch.ops.aten.mul.Tensor, torch.ops.aten.clone.default
    return (
        hoisting,
        "emit",
        lambda before, target, x, *args, **kwargs: (
            emit(before, clone, x) if target == mul and args == (2,) else emit(before, target, x, *args, **kwargs)
        ),
    )


def pieces_confused() -> Any:
    emit = rewrites.emit

    def wrong(before: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if target == torch.ops.aten.slice.Tensor:  # always the first piece
            args = (args[0], args[1], 0, args[3] - args[2])
        return emit(before, target, *args, **kwargs)

    return rewrites, "emit", wrong


def first_block_is_the_own() -> Any:
    emit = rewrites.emit
    return (
        rewrites,
        "_own_block",
        lambda node, wait, x, n: emit(wait, torch.ops.aten.slice.Tensor, x, 0, 0, x.meta["val"].shape[0] // n),
    )


def source_ignored() -> Any:
    return invariance, "received", lambda x, family, source: (0,) * len(x)


def root_ignored() -> Any:
    emit = rewrites.emit
    where, clone = torch.ops.aten.where.self, torch.ops.aten.clone.default
    return (
        rewrites,
        "emit",
        lambda before, target, *args, **kwargs: (
            emit(before, clone, args[1]) if target == where else emit(before, target, *args, **kwargs)
        ),
    )


def sent_backwards() -> Any:
    moving = engine.moving
    return (
        deferred,
        "moving",
        lambda x, kind, places, group: moving(
            x, kind, [places[0], *places[:0:-1]] if kind == "permute" else places, group
        ),
    )


CUT, BOTH = (P("dp"), P("dp"), P()), ("dp", "tp")
FAULTS: list[tuple[Fault, drawn.Program]] = [
    (everything_alike, drawn.Program(CUT, (("all_reduce", 0, 0, "dp", 0),), (3,), 0, True)),
    (same_everywhere, drawn.Program(CUT, (("by_rank", 2, 2, "tp", 0), ("all_reduce", 3, 3, "tp", 0)), (4,), 0, True)),
    (inputs_alike, drawn.Program(CUT, (("all_reduce", 0, 0, "dp", 0),), (3,), 0, False)),
    (scale_forgotten, drawn.Program(CUT, (("all_reduce", 2, 2, "tp", 0),), (3,), 0, True)),
    (scales_ignored, drawn.Program(CUT, (("same_reduction", 0, 0, "dp", 1),), (3,), 0, True)),
    (any_slice_is_the_own, drawn.Program(CUT, (("other_of_gathered", 0, 0, "dp", 0),), (3,), 0, True)),
    (pieces_exchanged, drawn.Program(CUT, (("product", 0, 1, "dp", 0),), (3,), 1, True)),
    (function_of_sum, drawn.Program(CUT, (("reduced_function", 0, 2, "dp", 0),), (3,), 0, True)),
    (coefficients_alike, drawn.Program(CUT, (("reduced_rows", 0, 1, "dp", 0),), (3,), 0, True)),
    (count_forgotten, drawn.Program(CUT, (("reduced_wide", 0, 2, "dp", 2),), (3,), 0, True)),
    (pieces_confused, drawn.Program(CUT, (("partly_gathered", 0, 1, "dp", 0),), (3,), 0, True)),
    (first_block_is_the_own, drawn.Program(CUT, (("all_to_all", 2, 2, "dp", 1),), (3,), 0, True)),
    (source_ignored, drawn.Program(CUT, (("permute", 0, 0, "dp", 0), ("all_reduce", 3, 3, "dp", 0)), (4,), 0, True)),
    (root_ignored, drawn.Program(CUT, (("gather_at_root", 2, 2, "dp", 0), ("by_rank", 3, 3, "dp", 0)), (4,), 0, True)),
    (
        sent_backwards,
        drawn.Program(CUT, (("permute", 0, 0, ("dp", "tp"), 1), ("by_rank", 3, 3, "dp", 0)), (4,), 0, True),
    ),
]
"""And a program that shows it."""


@contextmanager
def made(fault: Fault) -> Iterator[None]:
    where, name, wrong = fault()
    right = where.__dict__.get(name)
    setattr(where, name, wrong)
    try:
        yield
    finally:
        if right is None:
            delattr(where, name)
        else:
            setattr(where, name, right)


def caught(fault: Fault | None, program: drawn.Program) -> str:
    """How the program differs on this rank with the fault, "" if it does not."""
    mesh = fcoll.mesh(dp=2, tp=2)
    with made(fault) if fault else nullcontext():
        return drawn.difference(program, mesh)[0]


def all_caught() -> list[tuple[str, str]]:
    return [(caught(fault, program), caught(None, program)) for fault, program in FAULTS]


def test_wrong_rules_are_caught(ranks: Pools) -> None:
    results = ranks(4).run(all_caught)
    for i, (fault, _) in enumerate(FAULTS):
        assert any(result[i][0] for result in results), f"nobody notices {fault.__name__}"
        assert not any(result[i][1] for result in results)


def two_of_one_sum() -> list[Tensor]:
    x = torch.arange(4.0).view(2, 2)
    group = fcoll.WORLD
    graph = make_fx(lambda x: (fcoll.all_reduce(x, group), fcoll.all_reduce(x.t(), group)))(x)
    first, second = fcoll.optimize(graph)(x)
    assert graph.meta["fcoll"].after == 1
    first.add_(100)
    return [second]


def test_results_that_come_of_one_message_share_no_memory(ranks: Pools) -> None:
    for (second,) in ranks(2).run(two_of_one_sum):
        assert second.tolist() == [[0, 4], [2, 6]]


def reasons() -> dict[str, tuple[int, str]]:
    """Of programs that are left alone, for each: how many of the two messages are left, and why."""
    group = fcoll.WORLD

    def of(f: Callable[[Tensor], Any], **options: Any) -> tuple[int, str]:
        def program(x: Tensor) -> Any:
            return fcoll.all_reduce(fcoll.all_reduce(f(x), group, "mean"), group, "mean")

        with fcoll.marked():
            graph = fcoll.optimize(make_fx(program, **options)(torch.ones(3, 2)))
        plan = graph.meta["fcoll"]
        return plan.after, " ".join(plan.reasons)

    def written_through_a_view(x: Tensor) -> Tensor:
        y = x.sin()
        y[0].mul_(2)
        return y

    def branch(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    return {
        "fine": of(torch.sin),
        "written": of(lambda x: (y := x.sin()).mul_(2) + y),
        "view": of(written_through_a_view),
        "sizes": of(torch.sin, tracing_mode="symbolic"),
        "higher order": of(branch),
    }


def test_what_is_left_alone_says_why(ranks: Pools) -> None:
    for found in ranks(2).run(reasons):
        for name in ("fine", "written"):
            assert found[name][0] == 1
        for name, reason in (
            ("view", "may work in place: mul_"),
            ("sizes", "does not say of what size it is"),
            ("higher order", "hold graphs of their own: cond"),
        ):
            assert found[name][0] == 2, name
            assert reason in found[name][1], found[name]


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "local"])
def test_programs_are_of_all_kinds(mapped: bool) -> None:
    programs = [program for program in drawn.drawn(500) if program.mapped == mapped]
    assert {program.order for program in programs} == {0, 1, 2}
    used = {name for program in programs for name, *_ in program.steps}
    assert not mapped or used >= set(drawn.STEPS)
