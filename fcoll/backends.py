"""How `fcoll.optimize` gets into the backends of torch.compile: where forward and backward are still one graph.

A graph of the backward alone does not show what its inputs are, which the forward has saved for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx

from fcoll import _torch
from fcoll.errors import FcollError, fail
from fcoll.optimizing import optimize, optimize_together


def optimize_first(options: dict[str, Any], always: bool, version: str) -> bool:
    """Change these options of torch.compile so that its backend optimises first; says whether it can.

    Args:
        options: to change.
        always: `optimize` every graph, rather than those that all ranks have; and nothing is cached.
        version: of this package. What is cached is found by the same only.

    Raises:
        ValueError: if `always`, a backend that does not work on graphs of ATen operations made by AOTAutograd.
    """
    rewrite = _always if always else _together
    backend = options.get("backend", "inductor")
    if backend == "inductor":
        chosen = options["options"]
        others = _torch.passes(chosen.get("joint_custom_pre_pass"))
        chosen["joint_custom_pre_pass"] = [_torch.graph_pass(rewrite, None if always else version), *others]
        return True
    found = _torch.with_joint_pass(backend, rewrite)
    if found is None and always:
        fail(
            "value",
            "compile: optimize=True is for the backends inductor and aot_eager and those of aot_autograd, got {!r}; "
            "call fcoll.optimize in the backend, on the graph that it gets of AOTAutograd",
            backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__),
        )
    options["backend"] = found or backend
    return found is not None


def _always(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    return _rewritten(optimize, graph_module)


def _together(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    return _rewritten(optimize_together, graph_module)


def _rewritten(rewrite: Callable[..., Any], graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """What is rewritten; errors reach the caller of the compiled function as they are, not as those of a backend."""
    try:
        return rewrite(graph_module)  # type: ignore[no-any-return]
    except FcollError as error:
        raise _torch.backend_error(error) from error.__cause__
