"""Every row of docs/migrating.md: the call that it names gives what the other library's call means."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as nn
from common import Pools, close, draw, vjp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fcoll
from fcoll import regions

PAGE = Path(__file__).parent.parent / "docs" / "migrating.md"
SHAPE = (2, 2, 4)  # of the stack of the two ranks' x
SENT = [[1, 3], [2, 0]]  # rows from each rank to each


class Row(NamedTuple):
    """A row of the page."""

    section: str
    theirs: str
    here: str


def rows() -> list[Row]:
    found, section = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:].split(":")[0]
        elif line.startswith("| `"):
            theirs, here, _ = map(str.strip, line.strip("|").split("|"))
            found.append(Row(section, theirs, here))
    return found


ROWS = rows()

# ---- what the calls mean, on the stack of all ranks' x

Stack = Callable[[Tensor], Tensor]


def everywhere(f: Stack) -> Stack:
    return lambda xs: torch.stack([f(xs)] * 2)


def at(rank: int, f: Stack) -> Stack:
    return lambda xs: torch.stack([f(xs) * (rank == r) for r in range(2)])


def joined(axis: int) -> Stack:
    return lambda xs: torch.cat(list(xs), axis)


def identity(xs: Tensor) -> Tensor:
    return xs


def summed(xs: Tensor) -> Tensor:
    return xs.sum(0)


def blocks(axis: int, f: Stack = identity) -> Stack:
    """Block r of the r-th of f(xs), which are all the same if f reduces."""

    def g(xs: Tensor) -> Tensor:
        ys = f(xs)
        ys = ys if ys.ndim == 3 else torch.stack((ys, ys))
        return torch.stack([y.chunk(2, axis)[rank] for rank, y in enumerate(ys)])

    return g


def exchanged(split: int, concat: int) -> Stack:
    return lambda xs: torch.stack([torch.cat([x.chunk(2, split)[r] for x in xs], concat) for r in range(2)])


class Meaning(NamedTuple):
    """The values; and the gradient, on the stack of cotangents, if it is not that of the whole map."""

    value: Stack
    gradient: Stack | None = None


MEANINGS = {
    "sum": Meaning(everywhere(summed)),
    "mean": Meaning(everywhere(lambda xs: xs.mean(0))),
    "max": Meaning(everywhere(lambda xs: xs.amax(0))),
    "min": Meaning(everywhere(lambda xs: xs.amin(0))),
    "sum on 0": Meaning(at(0, summed)),
    "x of 0": Meaning(everywhere(lambda xs: xs[0])),
    "x of 1": Meaning(everywhere(lambda xs: xs[1])),
    "joined 0": Meaning(everywhere(joined(0))),
    "joined 1": Meaning(everywhere(joined(1))),
    "joined 1 on 0": Meaning(at(0, joined(1))),
    "stacked": Meaning(everywhere(identity)),
    "stacked on 0": Meaning(at(0, identity)),
    "other way round": Meaning(everywhere(lambda xs: torch.cat((xs[1], xs[0])))),
    "sum, blocks 0": Meaning(blocks(0, summed)),
    "sum, blocks 1": Meaning(blocks(1, summed)),
    "sum, rows": Meaning(summed),
    "blocks 1 of 0": Meaning(blocks(1, lambda xs: xs[0])),
    "rows of 0": Meaning(lambda xs: xs[0]),
    "exchanged 0 0": Meaning(exchanged(0, 0)),
    "exchanged 1 0": Meaning(exchanged(1, 0)),
    "exchanged 0 1": Meaning(exchanged(0, 1)),
    "rows exchanged": Meaning(lambda xs: xs.transpose(0, 1)),
    "swapped": Meaning(lambda xs: xs.flip(0)),
    "0 to 1": Meaning(lambda xs: torch.stack((torch.zeros_like(xs[0]), xs[0]))),
    "own": Meaning(identity),
    # counted once
    "copy": Meaning(identity, everywhere(summed)),
    "reduce": Meaning(everywhere(summed), identity),
    "split 0": Meaning(blocks(0), everywhere(joined(0))),
    "split -1": Meaning(blocks(-1), everywhere(joined(-1))),
    "gather 0": Meaning(everywhere(joined(0)), blocks(0)),
    "gather -1": Meaning(everywhere(joined(-1)), blocks(-1)),
    "gather 0 scaled": Meaning(everywhere(joined(0)), lambda cs: 2 * blocks(0)(cs)),
    "gather 0, summed": Meaning(everywhere(joined(0)), blocks(0, summed)),
    "gather -1, summed": Meaning(everywhere(joined(-1)), blocks(-1, summed)),
    "scatter 0": Meaning(blocks(0, summed), everywhere(joined(0))),
    "scatter -1": Meaning(blocks(-1, summed), everywhere(joined(-1))),
    "split of 0": Meaning(blocks(0, lambda xs: xs[0]), at(0, joined(0))),
    "gather on 0": Meaning(at(0, joined(0)), blocks(0, lambda cs: cs[0])),
}

M, T, F, G, R, J = (
    "MegEngine",
    "torch.distributed.nn.functional",
    "torch.distributed._functional_collectives",
    "Megatron-LM",
    "RLightning",
    "JAX",
)
MEANT: dict[tuple[str, str], str] = {  # section and their call → the meaning
    (M, "`reduce_sum(x)`"): "sum on 0",
    (M, "`broadcast(x)`"): "x of 0",
    (M, "`all_gather(x, axis=1)`"): "joined 1",
    (M, "`reduce_scatter_sum(x, axis=1)`"): "sum, blocks 1",
    (M, "`all_reduce_sum(x)`"): "sum",
    (M, "`all_reduce_max(x)`"): "max",
    (M, "`all_reduce_min(x)`"): "min",
    (M, "`gather(x, axis=1)`"): "joined 1 on 0",
    (M, "`scatter(x, axis=1)`"): "blocks 1 of 0",
    (M, "`all_to_all(x, split_axis=1, concat_axis=0)`"): "exchanged 1 0",
    (M, "`remote_send(x, 1 - rank)`, `remote_recv(1 - rank)`"): "swapped",
    (M, "`all_gather(x, Group([1, 0]))`"): "other way round",
    (M, '`all_gather(x, device="gpu0:1")`'): "joined 0",
    (T, "`nn.broadcast(x, 1)`"): "x of 1",
    (T, "`nn.gather(x, 0)`"): "stacked on 0",
    (T, "`nn.scatter(tensors, 0)`"): "rows of 0",
    (T, "`nn.reduce(x, 0)`"): "sum on 0",
    (T, "`nn.all_gather(x)`"): "stacked",
    (T, "`nn.all_to_all(outputs, tensors)`"): "rows exchanged",
    (T, "`nn.all_to_all_single(output, x)`"): "exchanged 0 0",
    (T, "`nn.reduce_scatter(output, tensors)`"): "sum, rows",
    (T, "`nn.all_reduce(x)`"): "sum",
    (T, "`nn.all_reduce(x, op=dist.ReduceOp.MAX)`"): "max",
    (F, '`funcol.all_reduce(x, "sum", world)`'): "sum",
    (F, '`funcol.all_reduce_coalesced(tensors, "sum", world)`'): "sum",
    (F, "`funcol.all_gather_tensor(x, 1, world)`"): "joined 1",
    (F, '`funcol.reduce_scatter_tensor(x, "sum", 1, world)`'): "sum, blocks 1",
    (F, "`funcol.broadcast(x, 1, world)`"): "x of 1",
    (F, "`funcol.permute_tensor(x.flatten(), [1, 0], world)`"): "swapped",
    (F, "`funcol.wait_tensor(funcol.all_gather_tensor(x, 1, world))`"): "joined 1",
    (G, "`copy_to_tensor_model_parallel_region(x)`"): "copy",
    (G, "`reduce_from_tensor_model_parallel_region(x)`"): "reduce",
    (G, "`scatter_to_tensor_model_parallel_region(x)`"): "split -1",
    (G, "`gather_from_tensor_model_parallel_region(x)`"): "gather -1",
    (G, "`scatter_to_sequence_parallel_region(x)`"): "split 0",
    (G, "`gather_from_sequence_parallel_region(x)`"): "gather 0, summed",
    (G, "`gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)`"): "gather 0",
    (G, "`reduce_scatter_to_sequence_parallel_region(x)`"): "scatter 0",
    (G, "`all_gather_last_dim_from_tensor_parallel_region(x)`"): "gather -1, summed",
    (G, "`reduce_scatter_last_dim_to_tensor_parallel_region(x)`"): "scatter -1",
    (G, "`all_to_all_sp2hp(x)`"): "exchanged 1 0",
    (G, "`all_to_all_hp2sp(x)`"): "exchanged 0 1",
    (R, "`scatter(x, dim=1)`"): "blocks 1 of 0",
    (R, "`broadcast(x, src=1)`"): "x of 1",
    (R, "`gather(x, dim=1)`"): "joined 1 on 0",
    (R, "`all_gather(x, dim=1)`"): "joined 1",
    (R, "`all_reduce(x)`"): "sum",
    (R, '`all_reduce(x, op="mean")`'): "mean",
    (R, "`all_to_all(x, scatter_dim=1, gather_dim=0)`"): "exchanged 1 0",
    (R, "`scatter_to_sequence_parallel_region(x, dim=0)`"): "split 0",
    (R, "`scatter_to_sequence_parallel_region(x, dim=0, rank0_only=True)`"): "split of 0",
    (R, "`gather_from_sequence_parallel_region(x, dim=0)`"): "gather 0",
    (R, "`gather_from_sequence_parallel_region(x, dim=0, rank0_only=True)`"): "gather on 0",
    (R, "`gather_from_sequence_parallel_region(x, dim=0)`, scaled by the group's size"): "gather 0 scaled",
    (R, "`all_reduce(x, async_op=True)`"): "sum",
    (R, '`all_reduce(x, group=get_group("tp"))`'): "sum",
    (J, '`jax.lax.psum(x, "tp")`'): "sum",
    (J, '`jax.lax.pmean(x, "tp")`'): "mean",
    (J, '`jax.lax.pmax(x, "tp")`'): "max",
    (J, '`jax.lax.all_gather(x, "tp")`'): "stacked",
    (J, '`jax.lax.psum_scatter(x, "tp", tiled=True)`'): "sum, blocks 0",
    (J, '`jax.lax.all_to_all(x, "tp", 1, 0, tiled=True)`'): "exchanged 1 0",
    (J, '`jax.lax.ppermute(x, "tp", [(0, 1)])`'): "0 to 1",
    (J, '`jax.lax.psum(x, "tp", axis_index_groups=[[0], [1]])`'): "own",
}
ON_PROCESSES = {"fcoll.group("}  # the rest of these rows run on an emulated axis as well

# What is no map from tensors to tensors: section and their call → what this rank has to get, as a check of it.


class Special(NamedTuple):
    """A check of what a rank got; `emulated` where that can be."""

    check: Callable[[Any, int], bool]
    emulated: bool = False


def whole(rank: int) -> Tensor:
    return inputs()[rank]


def uneven(y: Any, rank: int) -> bool:
    parts = [draw((4 - 2 * r, 2), r).split(SENT[r]) for r in range(2)]
    return torch.equal(y, torch.cat([parts[sender][rank] for sender in range(2)]))


SPECIAL: dict[tuple[str, str], Special] = {
    (M, "`remote_send(x, 1)`"): Special(lambda y, rank: rank == 1 or float(y) == 0),
    (M, "`remote_recv(0)`"): Special(lambda y, rank: rank == 0 or (torch.equal(y[0], whole(0)) and float(y[1]) == 0)),
    (M, "`group_barrier()`"): Special(lambda y, rank: y is None, emulated=True),
    (M, "`get_rank()`"): Special(lambda y, rank: int(y) == rank),
    (M, "`get_world_size()`"): Special(lambda y, rank: bool(y == 2), emulated=True),
    (T, "`nn.all_to_all_single(output, rows, recv, send)`"): Special(uneven),
    (F, "`funcol.all_to_all_single(rows, recv, send, world)`"): Special(uneven),
    (R, '`all_reduce_dict({"loss": x, "count": 12})`'): Special(
        lambda y, rank: torch.equal(y["loss"], summed(inputs())) and int(y["count"]) == 24, emulated=True
    ),
    (R, "`broadcast_object_list([obj], src=0)`"): Special(lambda y, rank: y == {"of": {0}}),
    (R, "`broadcast_object_list([state], src=0)`"): Special(
        lambda y, rank: y["step"] == 0 and y["name"] == "a" and torch.equal(y["x"], whole(0))
    ),
    (R, "`all_gather_object([state])`"): Special(
        lambda y, rank: [tree["step"] for tree in y] == [0, 1] and torch.equal(y[1]["x"], whole(1))
    ),
    (J, '`jax.lax.axis_index("tp")`'): Special(lambda y, rank: int(y) == rank),
}
IN_ONE_PROCESS: dict[tuple[str, str], Callable[[Any], bool]] = {
    (M, "`launcher(f)(x)`"): lambda y: len(y) == 2 and all(torch.equal(each, 2 * inputs()) for each in y),
    (J, '`jax.vmap(f, axis_name="i")(x)`'): lambda y: torch.equal(y, everywhere(summed)(inputs())),
    (J, '`jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P())(x)`'): lambda y: torch.allclose(
        y, inputs().sum()
    ),
}


def inputs() -> Tensor:
    return draw(SHAPE)


def code(cell: str) -> str:
    """The code of a cell, in backquotes."""
    found = re.match(r"`(.*?)`", cell)
    assert found is not None, cell
    return found.group(1)


def evaluate(text: str, rank: int, group: Any, x: Any) -> Any:
    """A call of the page, as one rank makes it."""
    recv = [row[rank] for row in SENT]
    scope = {
        "torch": torch, "fcoll": fcoll, "regions": regions, "funcol": funcol, "nn": nn, "dist": dist,
        "x": x, "g": group, "rank": rank, "world": dist.group.WORLD, "tensors": list(x), "obj": {"of": {rank}},
        "state": {"step": rank, "name": "ab"[rank], "x": x}, "send": SENT[rank], "recv": recv,
    }  # fmt: skip
    if "token" in text:
        scope["token"] = fcoll.token()
    if "rows" in text:
        scope["rows"] = draw((sum(SENT[rank]), 2), rank)
    if "output" in text:
        one = torch.empty_like(x[0])
        scope["outputs"] = [torch.empty_like(each) for each in x]
        scope["output"] = x.new_empty(sum(recv), 2) if "rows" in text else one if "tensors" in text else x.clone()
    result = eval(text, scope)
    lists = ("fcoll.all_reduce(tensors", "funcol.all_reduce_coalesced", "nn.gather", "nn.all_gather", "nn.all_to_all(")
    return torch.stack(list(result)) if text.startswith(lists) else result


KNOWN = [row for row in ROWS if (row.section, row.theirs) in MEANT]


def test_every_row_has_a_test() -> None:
    keys = [(row.section, row.theirs) for row in ROWS]
    assert len(set(keys)) == len(keys)
    assert set(keys) == set(MEANT) | set(SPECIAL) | set(IN_ONE_PROCESS)
    assert not set(MEANT) & set(SPECIAL)
    assert {section for section, _ in keys} == {M, T, F, G, R, J}
    assert set(MEANT.values()) == set(MEANINGS)


def meaning(row: Row) -> Meaning:
    return MEANINGS[MEANT[row.section, row.theirs]]


def pulled(row: Row, xs: Tensor, cs: Tensor) -> Any:
    gradient = meaning(row).gradient
    return gradient(cs) if gradient else vjp(meaning(row).value, xs)[1](cs)[0]


def cotangents(row: Row) -> Tensor:
    return draw(meaning(row).value(inputs()).shape, 2)


def test_on_processes(ranks: Pools) -> None:
    """Values and gradients of all rows that are maps of tensors; a mesh with the axis "tp" is bound."""

    def f(calls: list[tuple[str, Tensor]]) -> list[tuple[Any, Any]]:
        out = []
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with fcoll.bind(mesh):
            for text, cs in calls:
                y, pull = vjp(functools.partial(evaluate, text, rank, fcoll.WORLD), inputs()[rank])
                out.append((y, pull(cs[rank])[0]))
        return out

    got = ranks(2).run(f, [(code(row.here), cotangents(row)) for row in KNOWN])
    for i, row in enumerate(KNOWN):
        values, gradients = (torch.stack([mine[i][part] for mine in got]) for part in (0, 1))
        close(values, meaning(row).value(inputs()), row)
        close(gradients, pulled(row, inputs(), cotangents(row)), row)


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: row.here)
def test_emulated(row: Row) -> None:
    text = code(row.here)
    if any(name in text for name in ON_PROCESSES):
        with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
            evaluate(text, 0, "tp", inputs()[0])
        return

    def f(x: Tensor, c: Tensor) -> Any:
        y, pull = vjp(functools.partial(evaluate, text, 0, "tp"), x)
        return y, pull(c)[0]

    y, gradient = fcoll.vmap(f, axis_name="tp")(inputs(), cotangents(row))
    close(y, meaning(row).value(inputs()), row)
    close(gradient, pulled(row, inputs(), cotangents(row)), row)


def test_their_calls_where_torch_is_the_other_library(ranks: Pools) -> None:
    """Mean the same."""

    def f(calls: list[str]) -> list[Any]:
        rank = dist.get_rank()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = [evaluate(text, rank, None, inputs()[rank]) for text in calls]
        return [y.wait() if isinstance(y, funcol.AsyncCollectiveTensor) else y for y in out]

    of_torch = [row for row in KNOWN if row.section in (T, F)]
    for rank, results in enumerate(ranks(2).run(f, [code(row.theirs) for row in of_torch])):
        for row, y in zip(of_torch, results, strict=True):
            if rank == 0 or "nn.reduce(" not in row.theirs:
                want = meaning(row).value(inputs())[rank]
                close(y.view(want.shape), want, row)


def test_specials_on_processes(ranks: Pools) -> None:
    def f(calls: dict[tuple[str, str], str]) -> list[Any]:
        wrong, rank, x = [], dist.get_rank(), inputs()[dist.get_rank()]
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with fcoll.bind(mesh), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for key, text in calls.items():
                if "fcoll.send" in text or "fcoll.recv" in text:  # a message has two ends
                    text = [calls[M, "`remote_send(x, 1)`"], calls[M, "`remote_recv(0)`"]][rank]
                y = evaluate(text, rank, fcoll.WORLD, x)
                if not SPECIAL[key].check(y, rank):
                    wrong.append((key, y))
        return wrong

    special = [row for row in ROWS if (row.section, row.theirs) in SPECIAL]
    assert ranks(2).run(f, {(row.section, row.theirs): code(row.here) for row in special}) == [[], []]
    of_torch = [row for row in special if row.section in (T, F)]
    assert ranks(2).run(f, {(row.section, row.theirs): code(row.theirs) for row in of_torch}) == [[], []]


def test_specials_emulated() -> None:
    for row in ROWS:
        special = SPECIAL.get((row.section, row.theirs))
        if special is None or not special.emulated:
            continue
        got: list[Any] = []

        def f(x: Tensor, row: Row = row, got: list[Any] = got) -> Tensor:
            y = evaluate(code(row.here), 0, "tp", x)  # one call for both ranks
            got[:] = [y] if y is None or isinstance(y, int) else []
            return x if got else y

        y: Any = fcoll.vmap(f, axis_name="tp", out_dims=0)(inputs())
        for rank in range(2):
            mine = got[0] if got else {key: value[rank] for key, value in y.items()}
            assert special.check(mine, rank), row


@pytest.mark.parametrize("key", IN_ONE_PROCESS, ids=lambda key: key[1])
def test_calls_outside_of_ranks(key: tuple[str, str]) -> None:
    row = next(row for row in ROWS if (row.section, row.theirs) == key)
    scope = {"torch": torch, "fcoll": fcoll, "x": inputs(), "f": lambda x: fcoll.all_reduce(x, fcoll.WORLD)}
    assert IN_ONE_PROCESS[key](eval(code(row.here), scope))
