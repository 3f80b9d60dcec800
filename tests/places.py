"""Where a test of a map runs: on a virtual mesh here, or on the ranks of a pool."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import optree
import torch
from common import Pools, close
from torch.distributed.tensor import DTensor

import fcoll

Body = Callable[..., None]


class Place:
    """`place(body, *args, **sizes)` calls `body(mesh, *args)` where the mesh of these sizes is."""

    def __init__(self, kind: str, pools: Pools) -> None:
        self.kind, self.pools = kind, pools

    def __call__(self, body: Body, *args: Any, **sizes: int) -> None:
        if self.kind == "virtual":
            torch.compiler.reset()
            body(fcoll.virtual_mesh(**sizes), *args)
        else:
            self.pools(math.prod(sizes.values())).run(on_rank, body, sizes, args, timeout=110)  # compilers are slow


def on_rank(body: Body, sizes: dict[str, int], args: tuple[Any, ...]) -> None:
    torch.compiler.reset()
    body(made(**sizes), *args)


@functools.cache
def made(**sizes: int) -> Any:
    """A mesh of processes, made once on each rank."""
    return fcoll.mesh(**sizes)


def whole(f: Callable[..., Any], backend: str | None = "aot_eager") -> Callable[..., Any]:
    """f as one compiled graph; as it is, without a backend."""
    return torch.compile(f, fullgraph=True, backend=backend) if backend else f


def full(tree: Any) -> Any:
    """The global values of DTensors."""
    return optree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


def close_to(got: Any, want: Any, at: object = "") -> None:
    """`close`, for global values."""
    close(full(got), want, at)


def said(error: BaseException) -> str:
    """The message, without the place in the compiled code that Dynamo adds."""
    return str(error).split("\n\nfrom user code")[0]
