"""What several test modules share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fcoll.testing import Ranks

Pools: TypeAlias = Callable[[int], Ranks]

# Their annotations do not follow `has_aux` and `argnums`.
grad: Any = torch.func.grad
hessian: Any = torch.func.hessian
jacfwd: Any = torch.func.jacfwd
jacrev: Any = torch.func.jacrev
jvp: Any = torch.func.jvp
vjp: Any = torch.func.vjp
vmap: Any = torch.func.vmap


def close(got: Any, want: Any, at: object = "", tolerance: float = 1e-10) -> None:
    """Equal but for rounding in float64; `at` says what was compared."""
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=lambda text: f"{at}: {text}")


def draw(shape: Any, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers, always the same."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
