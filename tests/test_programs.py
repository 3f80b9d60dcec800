"""The golden whole programs as maps over a mesh, differentiated from outside: they are their dense programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import close, grad
from golden.cases import by_name
from golden.load_golden import load
from golden.programs import Case, Values, program
from places import Place, full, whole
from torch import Tensor

import fcoll
from fcoll import P

CASES = {case["id"].removeprefix("program/"): case for case in load() if case["family"] == "program"}
MEASURED = [name for name, case in CASES.items() if "wrt" in case]

each_program = pytest.mark.parametrize("name", MEASURED)


def sizes(name: str) -> dict[str, int]:
    return dict(CASES[name]["axes"])


def specs(layouts: dict[str, list[str]]) -> dict[str, P]:
    """The arrays of a case have the mesh axes that they are cut along in front."""
    return {name: P(*layout) for name, layout in layouts.items()}


def inputs(case: Case) -> tuple[dict[str, P], Values]:
    given = case["inputs"].items()
    return specs({name: x["layout"] for name, x in given}), {name: x["value"] for name, x in given}


def mapped(case: Case, mesh: Any) -> Callable[[Values], tuple[Tensor, Values]]:
    """Values with mesh axes in front → the loss, and the further outputs with mesh axes in front."""
    f, (cuts, _) = program(case, by_name), inputs(case)
    layouts = case["aux_layouts"]

    def local(v: Values) -> tuple[Tensor, Values]:
        loss, aux = f({name: x.squeeze(tuple(range(len(cuts[name])))) for name, x in v.items()})
        return loss, {name: y[(None,) * len(layouts[name])] for name, y in aux.items()}

    found: Callable[[Values], tuple[Tensor, Values]] = fcoll.shard_map(local, mesh, (cuts,), (P(), specs(layouts)))
    return found


def loss_of(f: Callable[[Values], tuple[Tensor, Values]], case: Case) -> Callable[[Values], Tensor]:
    """The loss as a function of what it is differentiated by."""
    _, v = inputs(case)
    return lambda chosen: f({**v, **chosen})[0]


def chosen(case: Case) -> Values:
    return {name: case["inputs"][name]["value"] for name in case["wrt"]}


def test_all_programs_are_here() -> None:
    assert len(CASES) == 14
    assert {name for name in CASES if name not in MEASURED} == {"dp_sgd_trajectory/n4"}
    assert max(torch.tensor(list(sizes(name).values())).prod() for name in CASES) == 4


@each_program
def test_values_and_gradients(place: Place, name: str) -> None:
    def body(mesh: Any, name: str) -> None:
        case, dense = CASES[name], CASES[name]["dense"]
        f = mapped(case, mesh)
        loss, aux = f(inputs(case)[1])
        close(loss, dense["loss"], "loss")
        assert set(aux) == set(dense["aux"])
        for key, y in full(aux).items():
            close(y.to(torch.float64), dense["aux"][key].to(torch.float64), key)

        of = loss_of(f, case)
        close(grad(of)(chosen(case)), dense["grads"], "gradients")
        squares = grad(lambda v: torch.stack([(g**2).sum() for g in grad(of)(v).values()]).sum())
        close(squares(chosen(case)), dense["gg"], "second order")

        leaves = {key: x.clone().requires_grad_() for key, x in chosen(case).items()}
        of(leaves).backward()
        close({key: x.grad for key, x in leaves.items()}, dense["grads"], "backward")

    place(body, name, **sizes(name))


def test_a_trajectory_of_steps(place: Place) -> None:
    """Gradients are taken inside, and averaged."""

    def body(mesh: Any) -> None:
        case = CASES["dp_sgd_trajectory/n4"]
        f, (cuts, v) = program(case, by_name), inputs(case)

        def local(v: Values) -> Any:
            return f({name: x.squeeze(0) if cuts[name].names else x for name, x in v.items()})

        close(fcoll.shard_map(local, mesh, (cuts,), P())(v), case["dense"]["trajectory"])

    place(body, dp=4)


COMPILED = ("megatron_mlp/n2", "moe_all_to_all/n2-E2-T4-C3", "sync_batch_norm_one_pass/n2")


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(place: Place, name: str) -> None:
    def body(mesh: Any, name: str) -> None:
        case = CASES[name]
        of = loss_of(mapped(case, mesh), case)
        loss, gradients = whole(lambda v: (of(v), grad(of)(v)))(chosen(case))
        close(loss, case["dense"]["loss"], "loss")
        close(gradients, case["dense"]["grads"], "gradients")

    place(body, name, **sizes(name))
