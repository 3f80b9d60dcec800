"""`fcoll.vmap`: torch.func.vmap whose axis has a name, and so is a group of emulated ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from fcoll import _torch, axes, trees
from fcoll.errors import beyond_int64, check_callable, fail

Params = ParamSpec("Params")
Result = TypeVar("Result")


def vmap(
    f: Callable[Params, Result],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str = "error",
    *,
    axis_name: str,
    axis_size: int | None = None,
) -> Callable[Params, Result]:
    """Map `f` over an axis that has a name: collectives in `f` communicate over it, as if each slice were a rank.

    Per rank: f sees slice r of every mapped argument; result r is what f returns there.

    Args:
        f: a function of trees of tensors. Rank-dependent behaviour comes from `fcoll.axis_index`: Python control
            flow is the same for all ranks.
        in_dims: which axis of each argument is mapped; an int, None (the same on all ranks), or a tuple of trees
            that are prefixes of the arguments.
        out_dims: where the ranks go in each result; None for a result that is the same on all ranks, which is then
            returned once. A prefix of what f returns.
        randomness: "error", "same" or "different", as in torch.func.vmap.
        axis_name: the name by which collectives call the group.
        axis_size: the number of ranks; needed only where no argument is mapped.

    Returns:
        A function of the same arguments. Keyword arguments are passed on as they are, unmapped.

    Raises:
        ValueError: sizes that disagree, an axis out of range, `out_dims=None` for a result that varies, or no size.
        TypeError: something else than a tensor is mapped.

    Example:
        >>> total = fcoll.vmap(lambda x: x / fcoll.all_reduce(x, "i"), axis_name="i")
        >>> total(torch.tensor([1.0, 1.0, 2.0]))
        tensor([0.2500, 0.2500, 0.5000])
    """
    check_callable("vmap", f)
    if randomness not in ("error", "same", "different"):
        fail("value", "vmap: randomness is error, same or different, got {!r}", randomness)
    if not isinstance(axis_name, str):
        fail("type", "vmap: axis_name is a string, got {}", type(axis_name).__name__)

    @functools.wraps(f, updated=())  # what f carries, compiled or a module, stays with it
    def mapped(*args: Params.args, **kwargs: Params.kwargs) -> Any:
        leaves, spec = trees.flatten(args)
        dims = _prefix("in_dims", tuple(in_dims) if isinstance(in_dims, list) else in_dims, args, leaves, "arguments")
        n = _size(leaves, dims, args, axis_size)
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        structure: list[Any] = []
        once: list[torch.Tensor] = []  # results that no rank has of its own: torch refuses them if an outer vmap does

        def body(token: torch.Tensor, *values: Any) -> list[torch.Tensor]:
            with axes.bound([axes.Named(axis_name, n, token)]):
                out = f(*trees.unflatten(spec, list(values)), **kwargs)
            flat, out_spec = trees.flatten(out)
            places = _prefix("out_dims", out_dims, out, flat, "result")
            structure[:] = [out_spec, places]
            results = [
                _result(y, place, out, i, axis_name) for i, (y, place) in enumerate(zip(flat, places, strict=True))
            ]
            once[:] = [y for y, place in zip(results, places, strict=True) if place is None]
            return [y for y, place in zip(results, places, strict=True) if place is not None]

        run = torch.func.vmap(body, in_dims=(0, *dims), randomness=randomness)
        stacked = iter(run(torch.arange(n, device=device), *leaves))
        out_spec, places = structure
        single = iter(once)
        moved = [next(single) if place is None else _move(next(stacked), place) for place in places]
        return trees.unflatten(out_spec, moved)

    return _torch.with_own_code(mapped)


def _prefix(name: str, prefix: Any, tree: Any, leaves: list[Any], what: str) -> list[int | None]:
    """Per leaf of the tree, the dim that the prefix has for it."""
    if prefix is None or type(prefix) is int:
        return [prefix] * len(leaves)
    try:
        dims = trees.broadcast_prefix(prefix, tree, lambda node: node is None or isinstance(node, int))
    except (ValueError, TypeError):
        dims, problem = None, str(prefix)
    if dims is None:
        fail("value", "vmap: {}={} is no prefix of the tree of {}s", name, problem, what.rstrip("s"))
    for dim in dims:
        if dim is not None and type(dim) is not int:
            fail("type", "vmap: {} holds integers and None, got {}", name, type(dim).__name__)
    return dims


def _size(leaves: list[Any], dims: list[int | None], args: Any, axis_size: int | None) -> int:
    n = axis_size
    if n is not None and type(n) is not int:
        fail("type", "vmap: axis_size is an integer, got {}", type(n).__name__)
    if n is not None and n < 0:
        fail("value", "vmap: axis_size={} is negative", n)
    for i, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None:
            continue
        if not isinstance(leaf, torch.Tensor):
            fail(
                "type",
                "vmap: {} is a {}, which has no axis to map; give it in_dims None",
                trees.path(args, i, "args"),
                type(leaf).__name__,
            )
        if leaf.is_nested:
            fail("type", "vmap: {} is a nested tensor, whose rows differ in shape; pad it", trees.path(args, i, "args"))
        if not -leaf.ndim <= dim < leaf.ndim:
            fail("value", "vmap: {} of shape {} has no axis {} to map", trees.path(args, i, "args"), leaf.shape, dim)
        if n is None:
            n = leaf.shape[dim]
        elif leaf.shape[dim] != n:
            fail(
                "value", "vmap: {} of shape {} has size {} along axis {}, others have {}",
                trees.path(args, i, "args"), leaf.shape, leaf.shape[dim], dim, n,
            )  # fmt: skip
    if n is None:
        fail("value", "vmap: no argument is mapped; give axis_size")
    if n == 0:
        fail("value", "vmap: the mapped axis has size 0; a group has at least one rank")
    return n


def _result(value: Any, place: int | None, out: Any, i: int, axis_name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, (bool, int, float, complex)):
            fail(
                "type",
                "vmap: {} of the result is a {}; f returns tensors, numbers and None",
                trees.path(out, i, "out"),
                type(value).__name__,
            )
        if beyond_int64(value):
            fail("value", "vmap: {} of the result is {}, which no int64 tensor holds; make it a float",
                 trees.path(out, i, "out"), value)  # fmt: skip
        return torch.tensor(value)
    if place is None:
        if unvarying(value):
            return value
        return replicated(
            value,
            "vmap: out_dims=None for {}, which varies over {!r} (as what invariant=True or vary gives does here); "
            "reduce it over that axis, or set its axis in out_dims",
            trees.path(out, i, "out"), axis_name,
        )  # fmt: skip
    if not -value.ndim - 1 <= place <= value.ndim:
        fail(
            "value",
            "vmap: {} has shape {}, so the ranks cannot go to axis {}",
            trees.path(out, i, "out"), value.shape, place,
        )  # fmt: skip
    return value


def unvarying(value: torch.Tensor) -> bool:
    """Whether it is known, without `replicated`, that `value` is the same all along the innermost vmap's axis."""
    return not torch.compiler.is_compiling() and not _torch.batched(value)


@_torch.allow_in_graph  # Dynamo knows no batch axes; here it runs this while it traces
def replicated(value: torch.Tensor, template: str, *details: str) -> torch.Tensor:
    """`value`, or the error if it varies over the innermost vmap's axis."""
    if _torch.batched(value):
        fail("value", template, *details, about="A result that is called replicated, and varies")
    return value


def _move(value: torch.Tensor, place: int) -> torch.Tensor:
    return value.movedim(0, place) if place else value
