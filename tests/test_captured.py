"""A function that is mapped over processes must be given what it is differentiated by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import Pools, close, grad
from torch import Tensor

import fcoll
from fcoll import P

REFUSED = "depends on a tensor that f closes over and that needs a gradient"


def test_virtual_meshes_differentiate_captured_tensors() -> None:
    def loss(w: Tensor) -> Any:
        f = fcoll.shard_map(lambda x: fcoll.all_reduce((x @ w).sum(), "i"), fcoll.virtual_mesh(i=2), P("i"), P())
        return f(torch.arange(12.0).view(4, 3))

    close(grad(loss)(torch.ones(3)), torch.tensor([18.0, 22.0, 26.0]), tolerance=1e-6)


def test_meshes_of_processes_refuse_them(ranks: Pools) -> None:
    def f() -> None:
        mesh, x = fcoll.mesh(i=2), torch.arange(12.0).view(4, 3)

        def mapped(use: Any) -> Any:
            return fcoll.shard_map(lambda x: fcoll.all_reduce(use(x).sum(), "i"), mesh, P("i"), P())

        needy, layer = torch.ones(3, requires_grad=True), torch.nn.Linear(3, 1)
        for use in (lambda x: x @ needy, layer):
            with pytest.raises(ValueError, match=f"shard_map: out {REFUSED}"):
                mapped(use)(x)
        with torch.no_grad():
            close(mapped(lambda x: x @ needy)(x), x.sum())
        with pytest.raises(ValueError, match=REFUSED):
            grad(lambda w: mapped(lambda x: x @ w)(x))(torch.ones(3))
        close(mapped(lambda x: x @ torch.ones(3))(x), x.sum())

        def given(values: dict[str, Tensor], x: Tensor) -> Tensor:  # the module is captured, its values are not
            y: Tensor = torch.func.functional_call(layer, values, (x,))
            return fcoll.all_reduce(y.sum(), "i")

        values = {name: value.detach() for name, value in layer.named_parameters()}
        gradient = grad(fcoll.shard_map(given, mesh, (P(), P("i")), P()))(values, x)
        close(gradient["weight"], x.sum(0, keepdim=True), tolerance=1e-6)

    ranks(2).run(f)
