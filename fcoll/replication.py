"""The check that results are replicated where specs say so: f is evaluated once on fake tensors, before it runs.

torch's own batch bookkeeping answers: a result that comes back batched over a mesh axis varies over it. No data, no
communication, any size of mesh.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll import _torch, axes, recorder, trees
from fcoll.engine import SIMULATED
from fcoll.errors import FcollError
from fcoll.specs import Entries

Run = Callable[[list[Tensor], Any, list[Entries]], None]
"""(fake global leaves, their structure, their specs) -> None, or the error"""

Around = Sequence[tuple[str, int, str]]
"""See `axes.sizes`."""

_runs: dict[str, Run] = {}
_verified: dict[str, dict[Any, str]] = {}  # by arguments, why there was no check, or ""
_warned: set[str] = set()
_labels = itertools.count()


def enlist(name: str, run: Run) -> str:
    """A label for a check, by which a graph can refer to it; "" where it is made while tracing, and cannot be."""
    if torch.compiler.is_compiling():
        return ""
    label = f"{name}#{next(_labels)}"
    _runs[label], _verified[label] = run, {}
    return label


def keep_with(mapped: Callable[..., Any], label: str) -> None:
    """Forget the check when the function that it is for has gone."""

    def forget() -> None:
        _runs.pop(label)
        _verified.pop(label)
        _warned.discard(label)

    weakref.finalize(mapped, forget)


def verify(label: str, entries: list[Entries], args: tuple[Any, ...], leaves: Sequence[Tensor]) -> str:
    """Run the check, unless it was run for such arguments before. Returns why it cannot run, for `warn`."""
    around = axes.sizes()
    if not torch.compiler.is_compiling():
        return _verify(label, entries, args, leaves, around)
    if label and _plain(args):
        _in_graph(label, tuple(entries), args, around)
        return ""
    return "it is made, or called with other containers than dicts, lists and tuples, in compiled code"


@_torch.allow_in_graph  # so that it runs, on Dynamo's fake tensors, while Dynamo traces its caller
def _in_graph(label: str, entries: Any, args: Any, around: Any) -> Tensor:
    args = _thawed(args)
    leaves = [leaf if isinstance(leaf, Tensor) else torch.tensor(leaf) for leaf in trees.flatten(args)[0]]
    _verify(label, list(entries), args, leaves, around)  # what cannot be evaluated, Dynamo cannot trace either
    return torch.zeros(())


def _thawed(tree: Any) -> Any:
    """The tree without the immutable containers of a graph, which optree does not know."""
    if isinstance(tree, dict):
        return {key: _thawed(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(_thawed, tree))
    if isinstance(tree, (list, tuple)):
        return (list if isinstance(tree, list) else tuple)(map(_thawed, tree))
    return tree


def _verify(label: str, entries: list[Entries], args: Any, leaves: Sequence[Tensor], around: Around) -> str:
    _, structure = trees.flatten(args)
    looks = tuple((tuple(map(_torch.hint, leaf.shape)), leaf.dtype, leaf.device) for leaf in leaves)
    around = tuple((name, _torch.hint(n), mesh) for name, n, mesh in around)
    key = (tuple(entries), structure, looks, around)
    if key in _verified[label]:
        return _verified[label][key]

    def run() -> None:
        fake = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in looks]
        _runs[label](fake, structure, entries)

    reason = ""
    try:
        with _torch.fakes(), recorder.paused():
            _within(around, run)
    except FcollError:
        raise
    except Exception as error:  # what f does with data, it may not be able to do without
        name, first = label.split("#")[0], str(error).split("\n")[0]
        reason = f"{name} cannot be evaluated on fake tensors ({type(error).__name__}: {first})"
    _verified[label][key] = reason
    return reason


def _within(around: Around, run: Callable[[], None]) -> None:
    """Run with the axes that are in scope around the map: the emulated ones are levels of their own here."""
    if not around:
        return run()
    (name, n, mesh), *inner = around

    def level(token: Tensor) -> Tensor:
        with axes.bound([axes.Named(name, n, None if mesh else token, mesh and SIMULATED + mesh)]):
            _within(inner, run)
        return token

    if mesh:
        level(torch.empty(()))
    else:
        torch.func.vmap(level, randomness="different")(torch.arange(n))


def _plain(tree: Any) -> bool:
    """Whether a graph can take the tree as an argument."""
    if isinstance(tree, dict):
        return all(map(_plain, tree.values()))
    if isinstance(tree, (list, tuple)):
        return all(map(_plain, tree))
    return tree is None or isinstance(tree, (Tensor, bool, int, float, complex))


@_torch.assume_constant_result
def warn(label: str, reason: str) -> bool:
    """Say once that a map runs without a check."""
    if label not in _warned:
        _warned.add(label)
        warnings.warn(f"shard_map: what out_specs says is replicated is not checked: {reason}", stacklevel=2)
    return True
