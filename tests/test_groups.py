"""Everything that a group may be: each row of the table over it, values and gradients, in the order of the group."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import Pools, close, draw, grad, jvp, vjp, vmap
from table import DIFFERENTIABLE, TABLE, TRANSPOSED, Row
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fcoll
from fcoll import P


def my(part: list[list[int]]) -> list[int]:
    return next(members for members in part if dist.get_rank() in members)


def made(part: list[list[int]]) -> Any:
    """torch's own group of this rank. All ranks make all groups: torch counts them."""
    return [dist.new_group(members) for members in part][part.index(my(part))]


# Per kind of group: how each of 4 ranks makes its own, and the lists of ranks that belong together, in their order.
KINDS: dict[str, tuple[Callable[[], Any], list[list[int]]]] = {
    "WORLD": (lambda: fcoll.WORLD, [[0, 1, 2, 3]]),
    "torch's world": (lambda: dist.group.WORLD, [[0, 1, 2, 3]]),
    "a process group": (lambda: made([[1, 3], [0, 2]]), [[1, 3], [0, 2]]),
    "all ranks, listed": (lambda: fcoll.group([2, 0, 3, 1]), [[2, 0, 3, 1]]),
    "without rank 0, listed": (lambda: fcoll.group(my([[3, 1, 2], [0]])), [[3, 1, 2], [0]]),
    "two pairs, listed": (lambda: fcoll.group(my([[3, 0], [1, 2]])), [[3, 0], [1, 2]]),
    "subgroups": (lambda: fcoll.subgroups(fcoll.WORLD, [[2, 1], [0, 3]]), [[2, 1], [0, 3]]),
    "subgroups of a listed group": (
        lambda: fcoll.subgroups(fcoll.group([2, 0, 3, 1]), [[0, 3], [2, 1]]),
        [[2, 1], [3, 0]],
    ),
    "subgroups of a process group": (
        lambda: fcoll.subgroups(made([[0, 1], [2, 3]]), [[1, 0]]),
        [[1, 0], [3, 2]],
    ),
    "subgroups of a mesh": (
        lambda: fcoll.subgroups(DeviceMesh("cpu", [[3, 1], [0, 2]]), [[1, 2], [3, 0]]),
        [[1, 0], [2, 3]],
    ),
    "a mesh": (lambda: init_device_mesh("cpu", (4,)), [[0, 1, 2, 3]]),
    "a mesh of two axes": (lambda: init_device_mesh("cpu", (2, 2)), [[0, 1, 2, 3]]),
    "a permuted mesh": (lambda: DeviceMesh("cpu", [3, 1, 0, 2]), [[3, 1, 0, 2]]),
    "a permuted mesh of two axes": (lambda: DeviceMesh("cpu", [[3, 1], [0, 2]]), [[3, 1, 0, 2]]),
    "the rows of a mesh": (lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"], [[0, 1], [2, 3]]),
    "the columns of a mesh": (
        lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"],
        [[0, 2], [1, 3]],
    ),
    "two axes of three": (
        lambda: init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))["a", "c"],
        [[0, 1], [2, 3]],
    ),
}


VARIANTS = {"min", "mean", "any", "all", "untiled", "-1", "none", "out"}
ROWS = [row for row in TABLE if not VARIANTS & set(row.name.split()[1:])]  # of which a group can make no difference


def locals_of(row: Row, part: list[list[int]]) -> dict[int, tuple[Tensor, Tensor]]:
    """Inputs and cotangents of each rank; their shapes depend on the size of its group."""
    out: dict[int, tuple[Tensor, Tensor]] = {}
    for members in part:
        x = row.inputs(len(members))
        c = draw(row.values(x).shape, len(out))
        out.update({rank: (x[i], c[i]) for i, rank in enumerate(members)})
    return out


def test_every_kind_of_group(ranks: Pools) -> None:
    values = {kind: {row.name: locals_of(row, part) for row in ROWS} for kind, (_, part) in KINDS.items()}

    def f(values: Any) -> Any:
        rank = dist.get_rank()
        out: dict[Any, Any] = {}
        for kind, (make, _) in KINDS.items():
            group = make()
            for row in ROWS:
                x, c = values[kind][row.name][rank]
                y = row.call(x, group)
                pulled = vjp(row.on(group), x)[1](c)[0] if row.vjp else None
                out[kind, row.name] = y, pulled
            out[kind] = int(fcoll.axis_index(group)), fcoll.axis_size(group)
        return out

    got = ranks(4).run(f, values)
    for kind, (_, part) in KINDS.items():
        for members in part:
            assert [got[rank][kind] for rank in members] == [(i, len(members)) for i in range(len(members))], kind
            for row in ROWS:
                x, c = (torch.stack([values[kind][row.name][rank][i] for rank in members]) for i in (0, 1))
                at = f"{row.name} over {kind}"
                close(torch.stack([got[rank][kind, row.name][0] for rank in members]), row.values(x), at)
                if row.vjp:
                    close(torch.stack([got[rank][kind, row.name][1] for rank in members]), row.pull(x, c), at)


PARTS = [
    [[0, 1, 2, 3]],
    [[2, 0, 3, 1]],
    [[0, 1], [2, 3]],
    [[3, 0], [1, 2]],
    [[2], [0], [3], [1]],
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_subgroups_of_a_name(part: list[list[int]]) -> None:
    group = fcoll.subgroups("i", part)
    sent = torch.tensor(part).flatten()

    def to_ranks(stack: Tensor) -> Tensor:
        """From one subgroup after the other to the order of ranks."""
        return torch.empty_like(stack).index_copy(0, sent, stack)

    for row in TABLE:
        n = len(part[0])
        pieces = [row.inputs(n, seed) for seed in range(len(part))]
        x, want = to_ranks(torch.cat(pieces)), to_ranks(torch.cat([row.values(piece) for piece in pieces]))
        close(fcoll.vmap(row.on(group), axis_name="i")(x), want, row.name)
        if row.vjp:
            c = draw(want.shape)
            cs = c.index_select(0, sent).split(n)
            pulled = to_ranks(torch.cat([row.pull(piece, c) for piece, c in zip(pieces, cs, strict=True)]))

            def pull(x: Tensor, c: Tensor, row: Row = row) -> Any:
                return vjp(lambda x: row.call(x, group), x)[1](c)[0]

            close(fcoll.vmap(pull, axis_name="i")(x, c), pulled, row.name)
            outside = vjp(fcoll.vmap(row.on(group), axis_name="i"), x)[1](c)[0]
            close(outside, pulled, row.name)

    index = fcoll.vmap(lambda: fcoll.axis_index(group), axis_name="i", axis_size=4)()
    assert index.index_select(0, sent).tolist() == list(range(len(part[0]))) * len(part)


def test_subgroups_of_unequal_size_are_refused_alike(ranks: Pools) -> None:
    """By the collectives whose result would have another shape in each: emulation cannot have that."""
    calls: dict[str, Callable[[Tensor, Any], Any]] = {
        "all_gather": lambda x, g: fcoll.all_gather(x, g),
        "axis_size": lambda x, g: x + fcoll.axis_size(g),
        "shift": lambda x, g: fcoll.shift(x, g),
    }
    parts = [[3, 0, 1], [2]]

    def f(name: str) -> str:
        with pytest.raises(ValueError, match="different sizes") as caught:
            calls[name](torch.ones(3), fcoll.subgroups(fcoll.WORLD, parts))
        return str(caught.value).split(":")[0]

    for name, call in calls.items():
        assert ranks(4).run(f, name) == [name] * 4
        with pytest.raises(ValueError, match=f"{name}: the subgroups of 'i' have different sizes"):
            fcoll.vmap(lambda x, call=call: call(x, fcoll.subgroups("i", parts)), axis_name="i")(torch.ones(4, 3))
    sums = ranks(4).run(lambda: fcoll.all_reduce(float(dist.get_rank()), fcoll.subgroups(fcoll.WORLD, parts)))
    assert [float(y) for y in sums] == [4.0, 4.0, 2.0, 4.0]


def test_subgroups_of_unequal_size_of_a_name() -> None:
    group, x = fcoll.subgroups("i", [[3, 0, 1], [2]]), torch.tensor([1.0, 2.0, 3.0, 4.0])

    def f(x: Tensor) -> Any:
        return {
            "sum": fcoll.all_reduce(x, group),
            "max": fcoll.all_reduce(x, group, "max"),
            "broadcast": fcoll.broadcast(x, group),
            "reduce": fcoll.reduce(x, group),
            "vary": fcoll.vary(x, group),
            "grad": grad(lambda x: fcoll.all_reduce(x, group) ** 2)(x),
        }

    got = {name: value.tolist() for name, value in fcoll.vmap(f, axis_name="i")(x).items()}
    assert got == {
        "sum": [7, 7, 3, 7],
        "max": [4, 4, 3, 4],
        "broadcast": [4, 4, 3, 4],
        "reduce": [0, 0, 3, 7],
        "vary": [1, 2, 3, 4],
        "grad": [42, 42, 6, 42],
    }


def test_a_group_is_shown_with_what_it_is(ranks: Pools) -> None:
    assert repr(fcoll.WORLD) == "fcoll.WORLD"
    assert repr(fcoll.subgroups("i", [[1, 0], [2]])) == "fcoll.Group('i' in [[1, 0], [2]])"
    shown = ranks(2).run(lambda: repr(fcoll.group([1, 0])))
    assert shown[0].startswith("fcoll.Group(process group '")
    assert shown[0].endswith("' of 2)")


def test_groups_of_the_same_ranks_share_one_process_group(ranks: Pools) -> None:
    def f() -> bool:
        made = {str(fcoll.group(my([[0, 2], [1]])).process.name) for _ in range(3)}  # type: ignore[union-attr]
        made |= {str(fcoll.group(my([[2, 0], [1]])).process.name)}  # type: ignore[union-attr]
        return len(made) == 1

    assert ranks(3).run(f) == [True] * 3


# ---- tuples of names


def nested(f: Callable[[Any], Any], sizes: dict[str, int]) -> Callable[[Any], Any]:
    """f mapped over axes, the first outermost."""
    for name in reversed(sizes):
        f = fcoll.vmap(f, axis_name=name)
    return f


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")], ids="-".join)
def test_a_tuple_of_names_is_row_major(order: tuple[str, str]) -> None:
    sizes = {"a": 2, "b": 3}

    def to_mesh(stack: Tensor) -> Tensor:
        stack = stack.unflatten(0, [sizes[name] for name in order])
        return stack if order == ("a", "b") else stack.transpose(0, 1)

    for row in TABLE:
        x = row.inputs(6)
        f = nested(row.on(order), sizes)
        close(f(to_mesh(x)), to_mesh(row.values(x)), row.name)
        if row.vjp:
            c = draw(row.values(x).shape)
            want = to_mesh(row.pull(x, c))
            close(vjp(f, to_mesh(x))[1](to_mesh(c))[0], want, f"{row.name}, from outside")

            def pull(pair: Any, row: Row = row) -> Any:
                return vjp(row.on(order), pair[0])[1](pair[1])[0]

            close(nested(pull, sizes)((to_mesh(x), to_mesh(c))), want, f"{row.name}, inside")


def test_one_name_of_two_is_one_axis() -> None:
    for row in TABLE:
        x = torch.stack([row.inputs(3, seed) for seed in range(2)])
        for group in ("b", ("b",)):
            f = nested(row.on(group), {"a": 2, "b": 3})
            close(f(x), torch.stack([row.values(part) for part in x]), row.name)
            g = nested(row.on(group), {"b": 3, "a": 2})
            close(g(x.transpose(0, 1)), f(x).transpose(0, 1), row.name)


def test_three_names_in_any_order() -> None:
    x = draw((2, 3, 2, 4))
    f = nested(lambda x: fcoll.all_gather(x, ("c", "a", "b")), {"a": 2, "b": 3, "c": 2})
    want = x.permute(2, 0, 1, 3).flatten()
    close(f(x), want.expand(2, 3, 2, -1))
    index = nested(lambda x: fcoll.axis_index(("c", "a")), {"a": 2, "b": 3, "c": 2})(x)
    assert index.tolist() == [[[0, 2]] * 3, [[1, 3]] * 3]
    gradient = nested(grad(lambda x: (fcoll.all_reduce(x, ("a", "c")) ** 2).sum()), {"a": 2, "b": 3, "c": 2})(x)
    close(gradient, (8 * x.sum((0, 2), keepdim=True)).expand_as(x))


def test_no_name_is_a_group_of_one() -> None:
    for row in TABLE:
        x = row.inputs(1)
        close(row.call(x[0], ()), row.values(x)[0], row.name)
        assert row.call(x[0], ()).data_ptr() != x.data_ptr(), row.name
        close(fcoll.vmap(row.on(()), axis_name="i")(x), row.values(x), row.name)
        if row.vjp:
            c = draw(row.values(x).shape)
            close(vjp(row.on(()), x[0])[1](c[0])[0], row.pull(x, c)[0], row.name)
    assert int(fcoll.axis_index(())) == 0
    assert fcoll.axis_size(()) == 1


def test_subgroups_of_a_tuple_of_names() -> None:
    pairs = fcoll.subgroups(("a", "b"), [[0, 3], [2, 1]])
    x = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    got = nested(lambda x: fcoll.all_gather(x, pairs, tiled=False), {"a": 2, "b": 2})(x)
    assert got.tolist() == [[[1, 1000], [100, 10]], [[100, 10], [1, 1000]]]
    gradient = nested(grad(lambda x: fcoll.all_reduce(x, pairs) ** 2), {"a": 2, "b": 2})(x)
    assert gradient.tolist() == [[4004, 440], [440, 4004]]


# ---- one axis emulated, the other a process group


def test_an_emulated_axis_and_a_process_group_in_one_function(ranks: Pools) -> None:
    """Against both of them emulated."""

    def programs(row: Row, i: Any, j: Any) -> dict[str, Callable[[Any], Any]]:
        def first(x: Tensor) -> Any:
            return fcoll.all_reduce(torch.sin(row.call(x, i)), j)

        def then(x: Tensor) -> Any:
            return row.call(torch.sin(fcoll.all_reduce(x, i)), j)

        def loss(x: Tensor) -> Any:
            return (then(x) ** 3 * (1 + fcoll.axis_index(i) + 2 * fcoll.axis_index(j))).sum()

        return {"first": first, "then": then, "grad": grad(loss), "first grad": grad(lambda x: first(x).sum())}

    def on_rank(x: Any) -> Any:
        mine = {name: v[dist.get_rank()] for name, v in x.items()}
        out = {}
        for row in DIFFERENTIABLE:
            for name, f in programs(row, "i", fcoll.WORLD).items():
                out[row.name, name] = fcoll.vmap(f, axis_name="i")(mine[row.name])
        return out

    x = {row.name: torch.stack([row.inputs(3, seed) for seed in range(3)]) for row in DIFFERENTIABLE}
    got = ranks(3).run(on_rank, x)
    for row in DIFFERENTIABLE:
        for name, f in programs(row, "i", "j").items():
            want = nested(f, {"j": 3, "i": 3})(x[row.name])
            close(torch.stack([mine[row.name, name] for mine in got]), want, f"{row.name}, {name}")


def summed(row: Row) -> Callable[[Any], Any]:
    return lambda x: fcoll.all_reduce(row.call(x, "i"), "j")


def test_both_axes_emulated_against_the_table() -> None:
    """What the test above compares with: an all_reduce over one axis around each row over the other."""
    for row in TRANSPOSED:
        x = torch.stack([row.inputs(3, seed) for seed in range(2)])
        f = nested(summed(row), {"j": 2, "i": 3})
        want = torch.stack([row.values(part) for part in x]).sum(0)
        close(f(x), torch.stack((want, want)), row.name)


LISTED = [
    "all_reduce", "all_reduce max", "all_reduce prod", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
    "reduce", "gather", "scatter", "shift", "split",
]  # fmt: skip


def derived(rows: list[Row], group: Any, xs: dict[str, Any]) -> dict[str, Any]:
    """Batches, gradients and, of the linear, tangents of collectives over a group."""
    out: dict[str, Any] = {}
    for row in rows:
        f, x = row.on(group), xs[row.name]

        def penalty(x: Tensor, f: Any = f) -> Any:
            weight = 1 + fcoll.axis_index(group)
            return (weight * f(x) ** 3).sum()

        out[row.name] = {
            "batch": vmap(f)(torch.stack((x, 2 * x))),
            "grad": vmap(grad(penalty))(torch.stack((x, 2 * x))),
            "jvp": jvp(f, (x,), (x.cos(),))[1],
        }
    return out


def test_listed_groups_and_subgroups_under_transforms_and_compiled(ranks: Pools) -> None:
    """Of processes, against the same partition of an emulated axis; the emulation itself against the table above."""
    part = [[3, 0], [1, 2]]
    rows = [next(row for row in TABLE if row.name == name or row.name.startswith(f"{name} ")) for name in LISTED]
    xs = {row.name: torch.cat([row.inputs(2, seed) for seed in range(2)]) for row in rows}
    emulated = fcoll.subgroups("i", part)
    names = list(xs)

    def here(compiled: bool) -> list[Any]:
        torch.compiler.reset()
        mine = {name: x[dist.get_rank()] for name, x in xs.items()}
        made = [fcoll.group(my(part)), fcoll.subgroups(fcoll.WORLD, part)]
        run = torch.compile(derived, fullgraph=True, backend="aot_eager") if compiled else derived
        return [run(rows[::2], made[0], mine)] if compiled else [run(rows, group, mine) for group in made]

    want = fcoll.vmap(lambda xs: derived(rows, emulated, xs), axis_name="i")(xs)
    inside = torch.compile(
        fcoll.vmap(lambda xs: derived(rows[:4], emulated, xs), axis_name="i"), fullgraph=True, backend="aot_eager"
    )({name: xs[name] for name in names[:4]})
    for name, ways in inside.items():
        for way, value in ways.items():
            close(value, want[name][way], f"{name}, {way}, emulated and compiled")
    for compiled in (False, True):
        for rank, results in enumerate(ranks(4).run(here, compiled)):
            for got in results:
                assert len(got) == len(rows[::2] if compiled else rows)
                for name in got:
                    for way, value in got[name].items():
                        close(value, want[name][way][rank], f"{name}, {way}, compiled={compiled}")


def test_unequal_subgroups_of_processes_as_in_emulation(ranks: Pools) -> None:
    part, x = [[3, 0, 1], [2]], torch.tensor([1.0, 2.0, 3.0, 4.0])

    def program(x: Tensor, group: Any) -> dict[str, Any]:
        return {
            "max": grad(lambda x: fcoll.all_reduce(x, group, "max") ** 2)(x),
            "broadcast": grad(lambda x: fcoll.broadcast(x, group) ** 2)(x),
            "reduce": grad(lambda x: fcoll.reduce(x, group, 0, "mean") ** 2)(x),
            "vary": grad(lambda x: fcoll.vary(x, group) ** 2)(x),
            "jvp": jvp(lambda x: fcoll.all_reduce(x, group), (x,), (x**2,))[1],
            "batch": vmap(lambda x: fcoll.all_reduce(x, group))(torch.stack((x, -x))),
        }

    def f(compiled: bool) -> Any:
        torch.compiler.reset()
        run = torch.compile(program, fullgraph=True, backend="aot_eager") if compiled else program
        return run(x[dist.get_rank()], fcoll.subgroups(fcoll.WORLD, part))

    emulated = fcoll.subgroups("i", part)
    want = fcoll.vmap(lambda x: program(x, emulated), axis_name="i")(x)
    assert want["max"].tolist() == [0, 0, 6, 24]
    assert want["broadcast"].tolist() == [0, 0, 6, 24]
    assert want["vary"].tolist() == [14, 14, 6, 14]
    for compiled in (False, True):
        for rank, got in enumerate(ranks(4).run(f, compiled)):
            for name, value in got.items():
                close(value, want[name][rank], name, 1e-6)


def test_groups_are_made_by_members_with_different_pasts(ranks: Pools) -> None:
    """Each rank makes only its own, as often as it likes; groups that overlap, in one order for all."""

    def f() -> tuple[list[float], int]:
        rank = dist.get_rank()
        wanted = [ranks for ranks in ([0, 1], [2, 0], [0, 1], [1, 0, 2], [2, 1]) if rank in ranks]
        sums = [float(fcoll.all_reduce(10.0**rank, fcoll.group(ranks))) for ranks in wanted]
        names = {fcoll.group(ranks).process.name for _ in range(20) for ranks in wanted}  # type: ignore[union-attr]
        return sums, len(names)

    got = ranks(3).run(f)
    assert [sums for sums, _ in got] == [[11, 101, 11, 111], [11, 11, 111, 110], [101, 111, 110]]
    assert [count for _, count in got] == [3, 3, 3]


def test_a_barrier_waits_for_all(ranks: Pools) -> None:
    def f(rank: int) -> tuple[float, float, str]:
        group = fcoll.group(my([[2, 0], [1]]))

        def waiting(x: Tensor) -> Tensor:
            fcoll.barrier(group)
            return x

        time.sleep(0.2 * rank)
        came = time.time()
        fcoll.barrier(group)
        left = time.time()
        with pytest.raises(ValueError, match="barrier: in compiled code") as caught:
            torch.compile(waiting, fullgraph=True, backend="eager")(torch.ones(1))
        return came, left, str(caught.value).splitlines()[0]

    (came0, left0, _), (came1, left1, _), (came2, left2, _) = ranks(3).run(f, per_rank=[(rank,) for rank in range(3)])
    assert min(left0, left2) >= max(came0, came2)
    assert left1 - came1 < left0 - came0
    assert fcoll.trace(lambda x: fcoll.barrier("i"), fcoll.virtual_mesh(i=8))(torch.ones(1)).records == []
    with pytest.raises(NameError, match="barrier: axis name 'j' is not bound"):
        fcoll.barrier("j")


def test_subgroups_of_the_names_of_a_mesh(ranks: Pools) -> None:
    """Of processes as in emulation, bound or mapped, eager and compiled."""
    parts: dict[Any, list[list[int]]] = {"b": [[1], [0]], ("a", "b"): [[3, 0], [1, 2]], ("b", "a"): [[0, 1], [2, 3]]}
    x = draw((4, 2))

    def program(x: Tensor) -> list[Tensor]:
        groups = [fcoll.subgroups(names, part) for names, part in parts.items()]
        return [
            y * 10 + fcoll.axis_index(group) + fcoll.axis_size(group)
            for group in groups
            for y in (
                fcoll.all_reduce(x, group),
                fcoll.all_gather(x, group, tiled=False).sum(0) + fcoll.shift(x, group),
            )
        ]

    def f() -> tuple[Any, Any, Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mine = x[dist.get_rank()]
        mapped: Any = fcoll.shard_map(program, mesh, P(("a", "b")), P(("a", "b")))
        with fcoll.bind(mesh):
            eager = program(mine)
            compiled = torch.compile(program, fullgraph=True, backend="aot_eager")(mine)
        return eager, compiled, [y.full_tensor() for y in mapped(x)]

    virtual = fcoll.shard_map(program, fcoll.virtual_mesh(a=2, b=2), P(("a", "b")), P(("a", "b")))
    want = virtual(x)
    for rank, (eager, compiled, whole) in enumerate(ranks(4).run(f)):
        close(eager, [y[rank] for y in want], "eager")
        close(compiled, [y[rank] for y in want], "compiled")
        close(whole, want, "mapped")


def test_means_over_subgroups_of_unequal_size() -> None:
    group = fcoll.subgroups("i", [[2], [0, 1, 3]])
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    reduced = fcoll.vmap(lambda x: fcoll.reduce(x, group, 0, "mean"), axis_name="i")
    close(reduced(x), torch.tensor([7 / 3, 0.0, 3.0, 0.0]), tolerance=1e-6)
    close(vjp(reduced, x)[1](torch.ones(4))[0], torch.tensor([1 / 3, 1 / 3, 1.0, 1 / 3]), tolerance=1e-6)
