"""Every private torch name that fcoll needs, each with its reason. Tried on torch 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _functorch, _len_torch_dispatch_stack  # see `transforming`, `batched`, `tracing`


def process_group(name: str) -> dist.ProcessGroup:
    """The process group called `name`: a graph carries names, and torch has no public way back."""
    resolve: Callable[[str], dist.ProcessGroup] = vars(dist.distributed_c10d)["_resolve_process_group"]
    return resolve(name)


def world() -> dist.ProcessGroup:
    """The process group of all ranks, once there is one (public, but said to be None perhaps)."""
    group = dist.group.WORLD
    assert group is not None
    return group


Function = TypeVar("Function", bound=Callable[..., Any])


def allow_in_graph(f: Function) -> Function:
    """torch.compiler.allow_in_graph (public, without annotations)."""
    allowed: Function = torch.compiler.allow_in_graph(f)
    return allowed


def assume_constant_result(f: Function) -> Function:
    """torch.compiler.assume_constant_result (public, without annotations)."""
    constant: Function = torch.compiler.assume_constant_result(f)
    return constant


def unwrap_opaque(group: Any) -> Any:
    """Dynamo shows a DeviceMesh argument as an opaque stand-in; the mesh is behind it."""
    return getattr(group, "real_obj", group)


def tracing(x: torch.Tensor) -> bool:
    """Whether what is done to `x` is being recorded, by compile, export, make_fx or fake tensors."""
    return torch.compiler.is_compiling() or _len_torch_dispatch_stack() > 0 or type(x) not in _PLAIN


def transforming() -> bool:
    """Whether a torch.func transform or a forward-mode level is active."""
    return (
        _functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch.compiler.is_compiling()
    )


def batched(x: torch.Tensor) -> bool:
    """Whether `x` carries the batch axis of the innermost vmap (public torch shows no batch axes)."""
    level: int = _functorch.maybe_get_level(x)
    current = _functorch.maybe_current_level()
    return _functorch.is_batchedtensor(x) and level == current


def traced_error(kind: type[Exception]) -> type[Exception]:
    """`kind`, in a form that Dynamo lets through.

    Dynamo turns an exception of traced code into its own `Unsupported`, but re-raises an `Unsupported` as it is; a
    class that is both reaches the caller of the compiled function as the error that eager code would have given.
    """
    from torch._dynamo.exc import Unsupported

    def __init__(self: Exception, message: str) -> None:
        Unsupported.__init__(self, message)  # type: ignore[arg-type]

    return type(kind.__name__, (kind, Unsupported), {"__init__": __init__, "__module__": kind.__module__})


_PLAIN = (torch.Tensor, torch.nn.Parameter)
