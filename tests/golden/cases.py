"""A golden case of one collective as a function of one rank, the maps around it, and what is compared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fcoll
from fcoll import lax
from golden.load_golden import load, tolerances

Case = dict[str, Any]
Function = Callable[..., Any]
Groups = Callable[[Any], Any]
"""What the ranks are called in one place: axis_name as the case has it → a group."""

WHOLE = ("constant", "error", "grad_context", "program", "quirk")  # families that are not one collective
QUANTITIES = ("out", "vjp", "jvp", "gg_x", "gg_ct")
LIKE_INPUT = ("vjp", "gg_x")  # the others are like the output
Arguments = tuple[Any, ...]


class Level(NamedTuple):
    """One vmap around the collective; it has a name where its axis holds the ranks."""

    name: str | None
    n: int
    in_axis: int | None
    out_axis: int | None


# ---- the cases


def single() -> list[Case]:
    """Every case of one collective, and what follows from its further fields, as cases of their own."""
    cases = [_levels(case) for case in load() if case["family"] not in WHOLE]
    return [derived for case in cases for derived in (_corrected(case), *_invariant(case), *_unshared(case))]


def families(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """By family and collective."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(f"{case['family']}-{case['op']}", []).append(case)
    return found


def ranks_of(case: Case) -> int:
    """How many there are."""
    n = 1
    for level in case["levels"]:
        n *= level.n if level.name else 1
    return n


def wanted(case: Case) -> list[str]:
    """Which quantities the case holds."""
    return [name for name in QUANTITIES if name in case]


def together(cases: Sequence[Case]) -> list[Case]:
    """Cases within the same maps and with the same quantities as one case each, a list of functions of lists: a
    transform or a compilation of all costs little more than that of one."""
    batches: dict[Any, list[Case]] = {}
    for case in cases:
        batches.setdefault((str(case["levels"]), *wanted(case), "vjp_global" in case), []).append(case)
    return [merged(batch) for batch in batches.values()]


def merged(batch: list[Case]) -> Case:
    """One case of several within the same maps."""
    keys = [key for key in ("in", "ct", "tan", *QUANTITIES, "vjp_global") if key in batch[0]]
    return {"parts": batch, "levels": batch[0]["levels"], **{key: [case[key] for case in batch] for key in keys}}


def _levels(case: Case) -> Case:
    """The mesh as a nest of maps; `in` without mesh dims is mapped over nowhere."""
    if "nest" not in case:
        unmapped = case.get("in_layout") == []
        levels = [Level(name, n, None if unmapped else 0, 0) for name, n in case["axes"]]
        renamed = {"vjp": case["vjp_ranked"]} if "vjp_ranked" in case else {}
        return {**case, **renamed, "levels": levels}
    levels, shape = [], list(optree.tree_leaves(case["in"])[0].shape)
    for level in case["nest"]:
        levels.append(Level(level["axis_name"], shape.pop(level["in_axes"]), level["in_axes"], level["out_axes"]))
    return {**case, "levels": levels}


def _corrected(case: Case) -> Case:
    """With fcoll's answer where JAX's own is one that no library should copy."""
    if case["family"] == "nan":  # a NaN wins; JAX ignores it in one of its modes
        return {**case, "out": torch.where(case["in"].isnan().any(0), torch.nan, case["out"])}
    if case["op"] == "pcast":  # JAX untyped: the identity; fcoll always: all ranks' uses of x count
        return {**case, "vjp": case["vjp_global"].expand(case["vjp"].shape)}
    groups = case["params"].get("axis_index_groups") or [[]]
    if case["op"] == "pmean" and len(set(map(len, groups))) > 1:  # JAX divides by the first group's size
        scale = torch.ones(ranks_of(case), 1, dtype=case["in"].dtype)
        for ranks in groups:
            scale[ranks] = len(groups[0]) / len(ranks)
        powers = {"out": 1, "vjp": 1, "jvp": 1, "gg_x": 4, "gg_ct": 2}
        return {**case, **{name: case[name] * scale**power for name, power in powers.items()}}
    return case


def _invariant(case: Case) -> list[Case]:
    """The result counts once: every rank has the same cotangent, and the same result."""
    if "inv" not in case:
        return []
    inv, names = case["inv"], [name for name, _ in case["axes"]]

    def everywhere(tree: Any, layout: Sequence[str]) -> Any:
        def spread(x: Tensor) -> Tensor:
            for k, (name, n) in enumerate(case["axes"]):
                if name not in layout:
                    x = x.unsqueeze(k).expand(*x.shape[:k], n, *x.shape[k:])
            return x

        return optree.tree_map(spread, tree)

    once = {name: everywhere(inv[name], inv["out_layout"]) for name in ("out", "ct", "jvp", "gg_ct") if name in inv}
    ranked = {name: everywhere(inv[name], names) for name in ("vjp", "gg_x") if name in inv}
    kept = {key: value for key, value in case.items() if key not in (*QUANTITIES, "ct", "vjp_global", "vjp_ranked")}
    if "vjp_global" in inv:  # of a value that all ranks share: each rank's share is the whole gradient
        ranked["vjp"] = everywhere(inv["vjp_global"], [])
        ranked["vjp_global"] = inv["vjp_global"]
    return [{**kept, **once, **ranked, "id": case["id"] + " (inv)", "invariant": True}]


def _unshared(case: Case) -> list[Case]:
    """all_gather(to="invarying") whose ranks' cotangents differ."""
    if "vjp_novma" not in case:
        return []
    kept = {key: value for key, value in case.items() if key not in ("gg_x", "gg_ct")}
    return [{**kept, "vjp": case["vjp_novma"], "id": case["id"] + " (vjp_novma)", "invariant": True}]


# ---- the collective


def by_name(axis_name: Any) -> Any:
    """The groups of an emulated mesh."""
    return axis_name


def local(case: Case, groups: Groups = by_name) -> Function:
    """The collective, as one rank calls it."""
    if "parts" in case:
        fs = [local(part, groups) for part in case["parts"]]
        return lambda xs: [f(x) for f, x in zip(fs, xs, strict=True)]
    params = {key: value for key, value in case["params"].items() if key != "axis_name"}
    group = groups(case["params"]["axis_name"])
    op = case["op"]
    if op in ("pargmax", "pargmin"):  # no part of jax.lax: composed here
        largest = op == "pargmax"
        return lambda x: _arg_extremum(lax.all_gather(x, group), largest)
    if op == "axis_index":
        batched = case["family"] == "batched"  # says the case's note
        return lambda x: x - lax.axis_index(group) if batched else lax.axis_index(group)
    if op == "axis_size":
        return lambda x: lax.axis_size(group)
    if case.get("invariant") and op != "all_gather":
        return _counting_once(op, group, params, unmapped=case.get("in_layout") == [], typed=_typed(case))
    call = functools.partial(getattr(lax, op), axis_name=group, **params)
    if case["family"] == "invarying" and not case.get("invariant"):
        return lambda x: lax.pcast(call(x), group, to="varying")
    return call


def _typed(case: Case) -> bool:
    """Whether fcoll.all_reduce takes the leaves as they are, without the dtype rules of JAX."""
    dtypes = {x.dtype for x in optree.tree_leaves(case["in"])}
    if case["op"] == "pmean":
        return all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
    return torch.bool not in dtypes


def _counting_once(op: str, group: Any, params: dict[str, Any], *, unmapped: bool, typed: bool) -> Function:
    if not typed:
        return functools.partial(getattr(lax, op), axis_name=group, **params)
    reduction = {"psum": "sum", "pmean": "mean", "pmax": "max", "pmin": "min"}[op]
    group = tuple(group) if isinstance(group, list) else group

    def f(x: Any) -> Any:
        return fcoll.all_reduce(fcoll.vary(x, group) if unmapped else x, group, reduction, invariant=True)

    return f


def _arg_extremum(gathered: Tensor, largest: bool) -> Tensor:
    return (gathered.argmax(0) if largest else gathered.argmin(0)).to(torch.int32)


# ---- what is computed of a function


def measure(f: Function, names: Sequence[str], x: Any, ct: Any = None, tan: Any = None) -> tuple[Any, ...]:
    """The quantities of f by their names, "out" among them; see README.md for what they are."""
    if "vjp" not in names:
        return (f(x),)
    leaves, cts, tans = _flat(x), _flat(ct), _flat(tan)  # torch.func takes no None

    def g(leaves: list[Tensor]) -> list[Tensor]:
        return _flat(f(_filled(x, iter(leaves))))

    found: dict[str, Any] = {}
    for name in names:
        match name:
            case "vjp":
                primal = torch.func.vjp(g, leaves)
                found["out"], found["vjp"] = primal[0], primal[1](cts)[0]
            case "jvp":
                found["jvp"] = torch.func.jvp(g, (leaves,), (tans,))[1]
            case "gg_x":
                found["gg_x"] = torch.func.grad(lambda leaves: _squares(_pull(_half_square(g), leaves, cts)))(leaves)
            case "gg_ct":
                found["gg_ct"] = torch.func.grad(lambda cts: _squares(_pull(g, leaves, cts)))(cts)
    return tuple(_filled(x if name in LIKE_INPUT else ct, iter(found[name])) for name in names)


def _flat(tree: Any) -> list[Tensor]:
    """The leaves, dicts by sorted keys. Dynamo traces this in a fraction of the time that general trees take."""
    if tree is None:
        return []
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for child in _children(tree) for leaf in _flat(child)]


def _filled(like: Any, leaves: Iterator[Tensor]) -> Any:
    """The tree of other leaves."""
    if like is None:
        return None
    if isinstance(like, Tensor):
        return next(leaves)
    children = [_filled(child, leaves) for child in _children(like)]
    return dict(zip(sorted(like), children, strict=True)) if isinstance(like, dict) else type(like)(children)


def _children(tree: Any) -> Sequence[Any]:
    return [tree[key] for key in sorted(tree)] if isinstance(tree, dict) else tree


def _pull(g: Function, leaves: list[Tensor], cts: list[Tensor]) -> list[Tensor]:
    cotangents: list[Tensor] = torch.func.vjp(g, leaves)[1](cts)[0]
    return cotangents


def _half_square(g: Function) -> Function:
    return lambda leaves: [0.5 * y**2 for y in g(leaves)]


def _squares(tensors: list[Tensor]) -> Tensor:
    return torch.stack([(v**2).sum() for v in tensors]).sum()


# ---- the maps around it


def mapped(f: Function, level: Level, in_dims: Any, out_dims: Any) -> Function:
    """One level of the nest."""
    if level.name is None:
        return torch.func.vmap(f, in_dims, out_dims)
    return fcoll.vmap(f, in_dims, out_dims, axis_name=level.name, axis_size=level.n)


def outside(case: Case, names: Sequence[str]) -> tuple[Function, Arguments, dict[str, Any]]:
    """A program that differentiates the whole map, its arguments, and what it should give."""
    f = local(case)
    for level in reversed(case["levels"]):
        f = mapped(f, level, level.in_axis, level.out_axis)
    want = {name: case[name] for name in names}
    if "vjp" in names and "vjp_global" in case:
        want["vjp"] = case["vjp_global"]
    return functools.partial(measure, f, names), _arguments(case, names), want


def inside(case: Case, names: Sequence[str]) -> tuple[Function, Arguments, dict[str, Any]]:
    """The same, with the differentiation in each rank's program."""
    case = _ranked(case)
    f: Function = functools.partial(measure, local(case), names)
    for level in reversed(case["levels"]):
        given = (level.in_axis, level.out_axis, level.in_axis)[: len(_arguments(case, names))]
        like_input = 0 if level.in_axis is None else level.in_axis
        f = mapped(f, level, given, tuple(like_input if name in LIKE_INPUT else level.out_axis for name in names))
    return f, _arguments(case, names), {name: case[name] for name in names}


def _arguments(case: Case, names: Sequence[str]) -> Arguments:
    return (case["in"], case["ct"], case["tan"]) if "vjp" in names else (case["in"],)


def per_rank(case: Case) -> tuple[list[Case], list[dict[str, Any]]]:
    """For processes: each rank's part of the case, and what the rank should get. Levels without a name are in front."""
    case = _ranked(case)
    levels: list[Level] = case["levels"]
    ins, outs = [level.in_axis for level in levels], [level.out_axis for level in levels]
    ranked = [0 if axis is None else axis for axis in ins]
    axes: dict[str, Sequence[int | None]] = {"in": ins, "tan": ins, "vjp": ranked, "gg_x": ranked}
    axes.update(ct=outs, out=outs, jvp=outs, gg_ct=outs)
    common = {key: value for key, value in case.items() if key in ("id", "op", "family", "params", "levels")}
    common |= {key: value for key, value in case.items() if key in ("in_layout", "invariant")}
    parts: list[Case] = []
    wants: list[dict[str, Any]] = []
    for place in _places(levels):

        def part(name: str, place: tuple[Any, ...] = place) -> Any:
            return optree.tree_map(lambda x: _front(x, axes[name], levels)[place], case[name])

        parts.append({**common, **{name: part(name) for name in ("in", "ct", "tan") if name in case}})
        wants.append({name: part(name) for name in wanted(case)})
    return parts, wants


def on_process(case: Case, names: Sequence[str]) -> tuple[Function, Arguments]:
    """The program of one process, which has the unnamed levels, and its arguments."""
    f = local(case, of_world(case))
    for level in reversed(case["levels"]):
        if level.name is None:
            f = torch.func.vmap(f)
    return functools.partial(measure, f, names), _arguments(case, names)


def of_world(case: Case) -> Groups:
    """The groups of a mesh of all processes: a DeviceMesh, or ranks that are listed where the names are in an order
    of their own."""
    levels = [level for level in case["levels"] if level.name]
    return functools.partial(_group_of, tuple(level.name for level in levels), tuple(level.n for level in levels))


def _group_of(names: tuple[str, ...], sizes: tuple[int, ...], axis_name: Any) -> Any:
    asked = tuple(axis_name) if isinstance(axis_name, list) else (axis_name,)
    array_axes = [part for part in asked if isinstance(part, int)]
    asked = tuple(part for part in asked if not isinstance(part, int))
    if array_axes:
        return [*array_axes, _group_of(names, sizes, list(asked))]
    return _made(names, sizes, asked)


@functools.cache
def _made(names: tuple[str, ...], sizes: tuple[int, ...], asked: tuple[str, ...]) -> Any:
    if names == asked and len(names) == 1:
        return fcoll.WORLD
    if names == asked or len(asked) == 1:
        mesh = _mesh(names, sizes)
        return mesh if names == asked else mesh[asked[0]]
    ranks = torch.arange(dist.get_world_size()).view(sizes)
    kept = [axis for axis, name in enumerate(names) if name not in asked]
    rows = ranks.permute(*kept, *(names.index(name) for name in asked)).flatten(len(kept)).view(-1, ranks.numel())
    (mine,) = (row for row in rows.tolist() if dist.get_rank() in row)
    return fcoll.group(mine)


@functools.cache
def _mesh(names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def _ranked(case: Case) -> Case:
    """A result that is returned once, spread over the ranks: one of them has its cotangent, the others none."""
    if "parts" in case:
        return merged([_ranked(part) for part in case["parts"]])
    levels: list[Level] = case["levels"]
    if all(level.out_axis is not None for level in levels):
        return case
    (k,) = (k for k, level in enumerate(levels) if level.out_axis is None)
    assert k == 0, "an outer level would move the ranks' axis"
    n = levels[0].n
    spread: Case = {name: case[name].expand(n, *case[name].shape) for name in ("out", "jvp", "gg_ct") if name in case}
    ct = torch.cat((case["ct"].unsqueeze(0), torch.zeros(n - 1, *case["ct"].shape, dtype=case["ct"].dtype)))
    return {**case, **spread, "ct": ct, "levels": [levels[0]._replace(out_axis=0), *levels[1:]]}


def _front(x: Tensor, axes: Sequence[int | None], levels: Sequence[Level]) -> Tensor:
    """With the levels' axes in front, outermost first."""
    for k, (axis, level) in enumerate(zip(axes, levels, strict=True)):
        if axis is None:
            x = x.unsqueeze(k).expand(*x.shape[:k], level.n, *x.shape[k:])
        else:
            x = x.movedim(k + axis % (x.ndim - k), k)
    return x


def _places(levels: Sequence[Level]) -> list[tuple[Any, ...]]:
    """Per rank, row-major, its index into axes that are in front."""
    places: list[tuple[Any, ...]] = [()]
    for level in levels:
        steps = range(level.n) if level.name else [slice(None)]
        places = [(*place, step) for place in places for step in steps]
    return places


# ---- comparison


def differences(got: Any, want: Any, label: str) -> list[str]:
    """What differs between two trees, leaf by leaf; dtypes count."""
    if isinstance(want, Tensor):
        return _unlike(got, want, label)
    if type(got) is not type(want):
        return [f"{label}: got {got!r}, expected {want!r}"]
    if isinstance(want, dict):
        if got.keys() != want.keys():
            return [f"{label}: got {list(got)}, expected {list(want)}"]
        return [problem for key in want for problem in differences(got[key], want[key], f"{label}[{key!r}]")]
    if isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return [f"{label}: got {len(got)} values, expected {len(want)}"]
        return [
            problem
            for i, (one, other) in enumerate(zip(got, want, strict=True))
            for problem in differences(one, other, f"{label}[{i}]")
        ]
    return [] if got == want else [f"{label}: got {got!r}, expected {want!r}"]


def _unlike(got: Any, want: Tensor, label: str) -> list[str]:
    got = torch.as_tensor(got)
    if got.dtype != want.dtype or got.shape != want.shape:
        return [
            f"{label}: got {got.dtype} of shape {tuple(got.shape)}, expected {want.dtype} of shape {tuple(want.shape)}"
        ]
    limits = tolerances()
    tolerance = limits.get(str(want.dtype).removeprefix("torch."), limits["int/bool"])
    if torch.allclose(got.detach(), want, rtol=tolerance, atol=tolerance, equal_nan=True):
        return []
    return [f"{label}: got {got.tolist()}, expected {want.tolist()}"]
