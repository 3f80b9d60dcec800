"""For tests of collective code: local ranks, one test body for every substrate, and the adjoint identity.

    Ranks          a pool of local processes, the ranks of one torch.distributed world
    Emulated       run a per-rank function on an emulated axis ...
    Processes      ... or on the ranks of a pool: both with `map`, `vjp` and `jvp` of stacked values
    check_adjoint  that a function's VJP is the exact transpose of its JVP, over all ranks

A pool needs cloudpickle, which the extra `fcoll[testing]` installs.
"""

from __future__ import annotations

import abc
import functools
import zlib
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import optree
import torch
import torch.distributed as dist

import fcoll
from fcoll import trees
from fcoll._pool import Ranks

__all__ = ["Ranks", "Substrate", "Emulated", "Processes", "check_adjoint"]

Backend: TypeAlias = str | None  # of torch.compile; None: eager
How: TypeAlias = Literal["func", "backward"]


class Substrate(abc.ABC):
    """Where a per-rank function runs, so that one test body serves emulation and processes.

    The function is `f(group, *locals)`: `group` is what this substrate calls the group of all `n` ranks, and
    `locals` are this rank's values. Outside, values of all ranks are *stacks*: trees of tensors whose axis 0
    is the rank.

    `compile` names a backend of torch.compile. The whole call is then compiled as one graph
    (`fullgraph=True`), after `torch.compiler.reset()`, so that cases do not add up to a recompilation limit.

    Attributes:
        n: the number of ranks.
    """

    n: int

    @abc.abstractmethod
    def map(self, f: Callable[..., Any], *stacks: Any, compile: Backend = None) -> Any:
        """Call `f(group, *locals)` on every rank and return its results as a stack.

        Args:
            f: the per-rank function; it returns a tree of tensors and numbers.
            *stacks: one for each argument of f after the group.
            compile: a backend of torch.compile for the call; by default it runs eagerly.

        Raises:
            ValueError: an axis 0 that is not of size n, or results that differ in structure between the
                ranks.

        Example:
            >>> Emulated(2).map(lambda group, x: fcoll.all_reduce(x, group), torch.tensor([1.0, 2.0]))
            tensor([3., 3.])
        """

    @abc.abstractmethod
    def _backward(self, f: Callable[..., Any], stack: Any, cotangents: Any, compile: Backend) -> Any: ...

    def vjp(
        self,
        f: Callable[..., Any],
        stack: Any,
        cotangents: Any,
        *,
        how: How = "func",
        compile: Backend = None,
    ) -> Any:
        """Pull the stacked cotangents of `f(group, x)` back to a stack shaped like the input.

        Args:
            f: the per-rank function of the group and one tree.
            stack: the inputs.
            cotangents: a stack with the structure of f's result; what stands at an integer or bool leaf is
                ignored.
            how: "func" calls torch.func.vjp in each rank's program. "backward" calls
                torch.autograd.backward: in each process, or from outside the emulated axis.
            compile: see `Substrate`; with "backward" it is the forward function that is compiled.

        Returns:
            The stack of cotangents of the input, None in place of its integer and bool leaves.

        Raises:
            ValueError: cotangents that do not fit f's result, or an unknown `how`.

        Example:
            >>> double = lambda group, x: fcoll.all_reduce(x, group)
            >>> Emulated(2).vjp(double, torch.tensor([1.0, 2.0]), torch.tensor([10.0, 100.0]))
            tensor([110., 110.])
        """
        if how == "backward":
            return self._backward(f, stack, cotangents, compile)
        if how != "func":
            raise ValueError(f'how is "func" or "backward", got {how!r}')
        return self.map(functools.partial(_pull, f), stack, cotangents, compile=compile)

    def jvp(self, f: Callable[..., Any], stack: Any, tangents: Any, *, compile: Backend = None) -> tuple[Any, Any]:
        """Push stacked tangents through `f(group, x)` by torch.func.jvp in each rank's program.

        Args:
            f: the per-rank function of the group and one tree.
            stack: the inputs.
            tangents: a stack with the structure of the input; what stands at an integer or bool leaf is
                ignored.
            compile: see `Substrate`.

        Returns:
            The stack of results, and that of their tangents, None in place of integer and bool leaves.

        Raises:
            ValueError: tangents that do not fit the input.

        Example:
            >>> double = lambda group, x: fcoll.all_reduce(x, group)
            >>> Emulated(2).jvp(double, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
            (tensor([3., 3.]), tensor([1., 1.]))
        """
        out: tuple[Any, Any] = self.map(functools.partial(_push, f), stack, tangents, compile=compile)
        return out


class Emulated(Substrate):
    """n ranks in this process: the group is the name of an axis of `fcoll.vmap`.

    Args:
        n: how many ranks.
        axis_name: the name.
    """

    def __init__(self, n: int, axis_name: str = "ranks") -> None:
        self.n = n
        self.axis_name = axis_name

    def __repr__(self) -> str:
        return f"Emulated({self.n})"

    def map(self, f: Callable[..., Any], *stacks: Any, compile: Backend = None) -> Any:
        return _compiled(self._mapped(f), compile)(*stacks)

    def _backward(self, f: Callable[..., Any], stack: Any, cotangents: Any, compile: Backend) -> Any:
        return _backprop(_compiled(self._mapped(f), compile), stack, cotangents)

    def _mapped(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def local(*values: Any) -> Any:
            return f(self.axis_name, *values)

        return fcoll.vmap(local, axis_name=self.axis_name, axis_size=self.n)


class Processes(Substrate):
    """The ranks of a pool: the group is the world, or a process group of the pool's first m ranks.

    Results come back detached.

    Args:
        ranks: the pool.
        m: how many of its ranks take part; by default all do, and the group is
            `torch.distributed.group.WORLD`.

    Raises:
        ValueError: the pool has fewer than m ranks.
    """

    def __init__(self, ranks: Ranks, m: int | None = None) -> None:
        self.n: int = ranks.n if m is None else m
        self.ranks = ranks
        if not 1 <= self.n <= ranks.n:
            raise ValueError(f"m={m} is not between 1 and the {ranks.n} ranks of the pool")

    def __repr__(self) -> str:
        return f"Processes({self.n})"

    def map(self, f: Callable[..., Any], *stacks: Any, compile: Backend = None) -> Any:
        return self._run(_map_here, f, stacks, compile)

    def _backward(self, f: Callable[..., Any], stack: Any, cotangents: Any, compile: Backend) -> Any:
        return self._run(_backprop_here, f, (stack, cotangents), compile)

    def _run(self, here: Callable[..., Any], f: Callable[..., Any], stacks: tuple[Any, ...], compile: Backend) -> Any:
        for leaf in trees.flatten(stacks)[0]:
            if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0 or leaf.shape[0] != self.n:
                shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                raise ValueError(f"a stack for {self.n} ranks has size {self.n} along axis 0, got {shape}")
        return _stack(self.ranks.run(_on_member, here, self.n, f, stacks, compile)[: self.n])


def check_adjoint(
    f: Callable[[Any], Any],
    inputs: Any,
    group: Any,
    *,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Assert that the VJP of `f` is the exact transpose of its JVP, over all ranks of a group.

    With random tangents t and cotangents ȳ that differ on every rank, J the derivative at `inputs`, and real
    parts for complex values (whose cotangents follow torch's convention):

        Σ_r ⟨ȳ_r, (J t)_r⟩ = Σ_r ⟨(Jᵀ ȳ)_r, t_r⟩

    It holds for every collective whose gradient is that of the sum over the ranks. For `vary`, `split` and
    `invariant=True`, each alone, it fails, and has to: their transposes are declared, and count a value that
    all ranks share once, where the sums above count it n times. Check those in pairs whose conventions meet,
    such as `vary` before an `invariant=True` reduction. The identity says nothing about f's values.

    - With an axis name, `inputs` are stacked along axis 0, and f runs under `fcoll.vmap(f,
      axis_name=group)`, whatever the name means outside. Both are checked: the map differentiated from
      outside, and f differentiated inside it.
    - With a process group, a DeviceMesh, a `fcoll.Group` or anything else that is a group here, `inputs` are
      this rank's. Every rank of the group makes the call, and all of them raise or none does.

    Args:
        f: a function of one tree, which returns a tree. Integer and bool leaves have no tangent and take no
            part.
        inputs: where to differentiate.
        group: the group whose ranks are summed over; f itself knows the group that it communicates in.
        seed: of the tangents and cotangents. Rank r draws the same ones in emulation and in a group.
        rtol: the allowed difference, relative to the size of the terms (the root of the sum of their
            squares). By default what the least precise dtype of f's inputs and results affords.
        atol: the allowed difference on top of that; by default 0.

    Raises:
        AssertionError: the two sums differ; the message holds both, their relative error, and the group.
        ValueError: `inputs` for an axis name that are not stacked, or inputs without a tangent.

    Example:
        >>> check_adjoint(lambda x: fcoll.all_gather(x, "i"), torch.randn(4, 3), "i")
    """
    if not isinstance(group, str):
        rank, n = int(fcoll.axis_index(group)), fcoll.axis_size(group)
        terms, dtypes = _terms(f, inputs, _draw(seed, rank))
        _compare(fcoll.all_reduce(terms, group), dtypes, f"group {group} of {n}", rtol, atol)
        return

    sizes = {
        leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.ndim else None for leaf in trees.flatten(inputs)[0]
    }
    size = sizes.pop() if len(sizes) == 1 else None
    if not size:
        raise ValueError(f"check_adjoint over axis {group!r}: inputs are tensors with the ranks along axis 0")

    def draw(salt: str, like: list[torch.Tensor]) -> list[torch.Tensor]:
        per_rank = [_draw(seed, rank)(salt, [x[0] for x in like]) for rank in range(size or 0)]
        return [torch.stack(parts) for parts in zip(*per_rank, strict=True)]

    def mapped(tree: Any) -> Any:
        return fcoll.vmap(f, axis_name=group)(tree)

    where = f"axis {group!r} of {size}, differentiated "
    terms, dtypes = _terms(mapped, inputs, draw)
    _compare(terms, dtypes, where + "from outside the map", rtol, atol)

    out, _ = trees.flatten(mapped(inputs))
    tangents = draw("tangent", _differentiable(trees.flatten(inputs)[0]))
    cotangents = draw("cotangent", _differentiable(out))

    def local(tree: Any, t: list[torch.Tensor], c: list[torch.Tensor]) -> torch.Tensor:
        return _terms(f, tree, lambda salt, like: t if salt == "tangent" else c)[0]

    terms = fcoll.vmap(local, axis_name=group)(inputs, tangents, cotangents).sum(0)
    _compare(terms, dtypes, where + "inside the map", rtol, atol)


# ---- the adjoint identity

Draw: TypeAlias = Callable[[str, list[torch.Tensor]], list[torch.Tensor]]  # what for, and the tensors to be like

RTOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def _draw(seed: int, rank: int) -> Draw:
    """Random tensors of this rank: reproducible, and the same on every device."""

    def draw(salt: str, like: list[torch.Tensor]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {rank} {salt}".encode()))
        return [torch.randn(x.shape, dtype=_wide(x.dtype), generator=generator).to(x) for x in like]

    return draw


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _terms(f: Callable[[Any], Any], tree: Any, draw: Draw) -> tuple[torch.Tensor, list[torch.dtype]]:
    """This rank's ⟨ȳ, J t⟩ and ⟨Jᵀ ȳ, t⟩, the sums of the squares of their terms, and all dtypes."""
    g, primals = _flat(f, tree)
    if not primals:
        raise ValueError("check_adjoint: the inputs hold no tensor of floating-point or complex numbers")
    tangents = draw("tangent", primals)
    ys, pushed = _jvp(g, primals, tangents)
    cotangents = draw("cotangent", ys)
    pulled = _vjp(g, primals, lambda: cotangents)
    forward, backward = _products(cotangents, pushed), _products(pulled, tangents)
    sums = [forward.sum(), backward.sum(), forward.square().sum(), backward.square().sum()]
    return torch.stack(sums), [x.dtype for x in (*primals, *ys)]


def _products(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> torch.Tensor:
    """The terms of the real inner product, flat and in float64."""

    def real(x: torch.Tensor) -> torch.Tensor:
        parts = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        return parts.to(torch.float64).flatten()

    return torch.cat([real(x) * real(y) for x, y in zip(xs, ys, strict=True)])


def _compare(
    terms: torch.Tensor, dtypes: list[torch.dtype], where: str, rtol: float | None, atol: float | None
) -> None:
    forward, backward, *squares = terms.tolist()
    scale = max(squares) ** 0.5
    if rtol is None:
        rtol = max(RTOL.get(torch.empty((), dtype=dtype).real.dtype, 1e-10) for dtype in dtypes)
    error = abs(forward - backward)
    if not error <= (atol or 0.0) + rtol * scale:  # also where one of them is NaN
        raise AssertionError(
            f"the VJP is not the transpose of the JVP over {where}: "
            f"Σ⟨ȳ, J t⟩ = {forward:.12g}, Σ⟨Jᵀ ȳ, t⟩ = {backward:.12g}, "
            f"relative error {error / scale if scale else error:.3g}, allowed {rtol:.3g}"
        )


# ---- per-rank programs


def _pull(f: Callable[..., Any], group: Any, tree: Any, cotangents: Any) -> Any:
    """The cotangent of the input of f(group, tree), by torch.func.vjp."""
    g, primals = _flat(functools.partial(f, group), tree)
    given = _leaves(cotangents)
    results: list[Any] = []

    def recorded(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return g(*values, into=results)

    return _refill(tree, _vjp(recorded, primals, lambda: _paired(results, given)))


def _push(f: Callable[..., Any], group: Any, tree: Any, tangents: Any) -> tuple[Any, Any]:
    """The result of f(group, tree) and its tangent, by torch.func.jvp."""
    g, primals = _flat(functools.partial(f, group), tree)
    given = _paired(_leaves(tree), _leaves(tangents))
    ys, pushed = _jvp(g, primals, given)
    out = f(group, tree)  # once more, for its structure and what has no tangent
    return _refill(out, ys, keep=True), _refill(out, pushed)


def _backprop(f: Callable[[Any], Any], tree: Any, cotangents: Any) -> Any:
    """The cotangent of the input of f(tree), by torch.autograd.backward."""
    leaves, spec = trees.flatten(tree)
    leaves = [x.detach().requires_grad_() if _has_tangent(x) else x for x in leaves]
    tree = trees.unflatten(spec, leaves)
    out = _leaves(f(tree))
    given = _paired(out, _leaves(cotangents))
    pairs = [(y, c) for y, c in zip(_differentiable(out), given, strict=True) if y.requires_grad]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [c for _, c in pairs])
    xs = _differentiable(leaves)
    return _refill(tree, [torch.zeros_like(x) if x.grad is None else x.grad for x in xs])


# ---- on a process


def _on_member(here: Callable[..., Any], m: int, f: Callable[..., Any], stacks: Any, compile: Backend) -> Any:
    """This rank's result, if it belongs to the first m."""
    group, rank = _members(m), dist.get_rank()
    if rank >= m:
        return None
    leaves, spec = trees.flatten(stacks)
    values = trees.unflatten(spec, [leaf[rank] for leaf in leaves])
    out, spec = trees.flatten(here(functools.partial(f, group), values, compile))
    tensors = [x.detach() if isinstance(x, torch.Tensor) else torch.tensor(x) for x in out]
    return trees.unflatten(spec, tensors)


def _map_here(f: Callable[..., Any], values: tuple[Any, ...], compile: Backend) -> Any:
    return _compiled(f, compile)(*values)


def _backprop_here(f: Callable[..., Any], values: tuple[Any, ...], compile: Backend) -> Any:
    return _backprop(_compiled(f, compile), *values)


@functools.cache
def _members(m: int) -> Any:
    """The group of the first m ranks; the first time, every rank calls."""
    return dist.group.WORLD if m == dist.get_world_size() else dist.new_group(list(range(m)))


def _stack(results: list[Any]) -> Any:
    per_rank = [trees.flatten(result) for result in results]
    spec = per_rank[0][1]
    if any(other != spec for _, other in per_rank):
        raise ValueError(f"the ranks' results differ in structure: {[str(other) for _, other in per_rank]}")
    columns = zip(*(leaves for leaves, _ in per_rank), strict=True)
    return trees.unflatten(spec, [torch.stack(column) for column in columns])


# ---- trees of which only the floating-point leaves have tangents


def _compiled(f: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    if backend is None:
        return f
    torch.compiler.reset()
    return torch.compile(f, fullgraph=True, backend=backend)


def _has_tangent(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _differentiable(leaves: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if _has_tangent(leaf)]


def _leaves(tree: Any) -> list[Any]:
    """The leaves, None among them, as it may stand for the cotangent of an integer leaf."""
    trees.flatten(tree)  # registers dataclasses
    return optree.tree_leaves(tree, none_is_leaf=True, namespace=trees.NAMESPACE)


def _paired(leaves: list[Any], given: list[Any]) -> list[torch.Tensor]:
    """The tangents or cotangents given for those leaves that have one."""
    if len(leaves) != len(given):
        raise ValueError(f"{len(given)} tangents or cotangents for {len(leaves)} leaves")
    return [g for leaf, g in zip(leaves, given, strict=True) if _has_tangent(leaf)]


Flat: TypeAlias = Callable[..., tuple[torch.Tensor, ...]]


def _jvp(
    g: Flat, primals: list[torch.Tensor], tangents: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    out = torch.func.jvp(g, tuple(primals), tuple(tangents))
    return list(out[0]), list(out[1])


def _vjp(g: Flat, primals: list[torch.Tensor], cotangents: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    pull: Callable[..., Any] = torch.func.vjp(g, *primals)[1]
    return list(pull(tuple(cotangents())))


def _flat(f: Callable[[Any], Any], tree: Any) -> tuple[Flat, list[torch.Tensor]]:
    """f between floating-point leaves, and those of the tree; `into` receives all leaves of the result."""
    leaves, spec = trees.flatten(tree)

    def g(*values: torch.Tensor, into: list[Any] | None = None) -> tuple[torch.Tensor, ...]:
        rest = iter(values)
        out = _leaves(f(trees.unflatten(spec, [next(rest) if _has_tangent(x) else x for x in leaves])))
        if into is not None:
            into[:] = out
        return tuple(_differentiable(out))

    return g, _differentiable(leaves)


def _refill(tree: Any, values: list[torch.Tensor], keep: bool = False) -> Any:
    """The tree with these floating-point leaves; None in place of the others, unless they are to be kept."""
    leaves, spec = trees.flatten(tree)
    rest = iter(values)
    return trees.unflatten(spec, [next(rest) if _has_tangent(x) else (x if keep else None) for x in leaves])
