"""How `fcoll.optimize` gets into the backends of torch.compile: where forward and backward are still one graph.

A graph of the backward alone does not show what its inputs are, which the forward has saved for it.
"""

from __future__ import annotations

from typing import Any

from fcoll import _torch
from fcoll.errors import fail
from fcoll.optimizing import optimize


def optimized(options: dict[str, Any]) -> dict[str, Any]:
    """The options of torch.compile, with a backend that optimises first.

    Raises:
        ValueError: a backend that does not work on graphs of ATen operations made by AOTAutograd.
    """
    backend = options.pop("backend", "inductor")
    if backend == "inductor":
        chosen = {**_torch.mode_options(options.pop("mode", None)), **(options.get("options") or {})}
        others = _torch.passes(chosen.get("joint_custom_pre_pass"))
        chosen["joint_custom_pre_pass"] = [_torch.graph_pass(optimize), *others]
        return {**options, "backend": backend, "options": chosen}
    found = _torch.with_joint_pass(backend, optimize)
    if found is None:
        fail(
            "value",
            "compile: optimize=True is for the backends inductor and aot_eager and those of aot_autograd, got {!r}; "
            "call fcoll.optimize in the backend, on the graph that it gets of AOTAutograd",
            backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__),
        )
    return {**options, "backend": found}
