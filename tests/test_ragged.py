"""ragged_all_to_all, beyond its row of the table: what travels, sizes that differ within a vmap, and bad calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from common import Pools, close, draw, grad, vmap
from torch import Tensor

import fcoll

# Of each rank: where its rows for the others begin, how many, and where they are to go. Rank 1 sends nothing, and
# nothing reaches rank 2.
FIRST = torch.tensor([[2, 0, 0], [0, 0, 0], [1, 3, 0]])
SIZE = torch.tensor([[1, 2, 0], [0, 0, 0], [3, 1, 0]])
PLACE = torch.tensor([[4, 1, 0], [0, 0, 0], [1, 0, 0]])


def expected(x: Tensor, output: Tensor) -> Tensor:
    y = output.clone()
    for sender in range(3):
        for receiver in range(3):
            first, size, place = (int(numbers[sender, receiver]) for numbers in (FIRST, SIZE, PLACE))
            y[receiver, place : place + size] = x[sender, first : first + size]
    return y


def call(x: Any, output: Any, first: Any, size: Any, place: Any, arriving: Any, group: Any) -> Any:
    return fcoll.ragged_all_to_all(x, output, first, size, place, arriving, group)


def test_both_forms_agree_with_a_loop(ranks: Pools) -> None:
    """Emulated and compiled, where every rank sees all operands, and on processes; derivatives of both inputs."""
    x, output, c = draw((3, 4, 2)), draw((3, 5, 2), 2), draw((3, 5, 2), 3)

    def loss(x: Tensor, output: Tensor, c: Tensor, *rest: Any) -> Tensor:
        total: Tensor = (call(x, output, *rest) ** 3 * c).sum()
        return total

    def f() -> dict[str, Any]:
        rank = dist.get_rank()
        rest = (FIRST[rank], SIZE[rank].tolist(), PLACE[rank].to(torch.int32), SIZE[:, rank], fcoll.WORLD)
        own = x[rank], output[rank]
        tensors = (FIRST[rank], SIZE[rank], PLACE[rank], SIZE[:, rank], fcoll.WORLD)
        compiled: Any = torch.compile(grad(loss, (0, 1)), fullgraph=True, backend="aot_eager")
        leaf = own[0].clone().requires_grad_()
        loss(leaf, own[1], c[rank], *rest).backward()
        return {
            "value": call(*own, *rest),
            "grad": grad(loss, (0, 1))(*own, c[rank], *rest),
            "backward": leaf.grad,
            "compiled": compiled(*own, c[rank], *tensors),
            "columns": vmap(lambda x, y: call(x, y, *rest), -1, -1)(*own),
        }

    want = expected(x, output)
    by_x, by_output = grad(lambda x, y: (expected(x, y) ** 3 * c).sum(), (0, 1))(x, output)
    for rank, got in enumerate(ranks(3).run(f)):
        close(got["value"], want[rank], "value")
        close(got["columns"], want[rank], "columns")
        close(got["backward"], by_x[rank], "backward")
        for what in ("grad", "compiled"):
            close(got[what], (by_x[rank], by_output[rank]), what)

    emulated = fcoll.vmap(
        lambda x, y, first, size, place, back: call(x, y, first, size, place, back, "i"), axis_name="i"
    )
    numbers = (FIRST, SIZE, PLACE, SIZE.t())
    close(emulated(x, output, *numbers), want)
    inside = fcoll.vmap(lambda x, y, c, *rest: grad(loss, (0, 1))(x, y, c, *rest, "i"), axis_name="i")
    close(inside(x, output, c, *numbers), (by_x, by_output))
    pairs = torch.stack((x, 2 * x)), torch.stack((output, output))
    several = vmap(emulated, (0, 0, 0, None, None, None))(*pairs, torch.stack((FIRST, FIRST)), *numbers[1:])
    close(several, torch.stack((want, expected(2 * x, output))))


def test_sizes_may_differ_within_a_vmap_of_processes(ranks: Pools) -> None:
    x, output = draw((3, 4, 2)), draw((3, 5, 2), 2)

    def f() -> Any:
        rank = dist.get_rank()
        sizes = torch.stack((SIZE[rank], 0 * SIZE[rank]))
        arriving = torch.stack((SIZE[:, rank], 0 * SIZE[rank]))

        def one(size: Tensor, arriving: Tensor) -> Any:
            return call(x[rank], output[rank], FIRST[rank], size, PLACE[rank], arriving, fcoll.WORLD)

        return vmap(one)(sizes, arriving)

    for rank, got in enumerate(ranks(3).run(f)):
        close(got, torch.stack((expected(x, output)[rank], output[rank])))


def test_rows_travel_once(ranks: Pools) -> None:
    """On processes a rank puts in the rows that it sends, not all that it has."""

    def f() -> tuple[list[str], list[int]]:
        seen: list[tuple[str, int]] = []
        recorder = __import__("fcoll.recorder").recorder
        rank, x = dist.get_rank(), torch.ones(4, 2)
        with recorder.listening(lambda name, x, *_: seen.append((name, x.shape[0]))):
            call(x, torch.zeros(5, 2), FIRST[rank], SIZE[rank], PLACE[rank], SIZE[:, rank], fcoll.WORLD)
        return [name for name, _ in seen], [rows for _, rows in seen]

    for rank, (names, rows) in enumerate(ranks(3).run(f)):
        assert names == ["all_to_all", "all_to_all_uneven"]
        assert rows == [3, int(SIZE[rank].sum())]


def test_trees_and_subgroups() -> None:
    """Leaves may have different numbers of rows; offsets are within the subgroup."""
    pairs = fcoll.subgroups("i", [[2, 0], [1, 3]])
    x = {"a": torch.arange(4).view(4, 1), "b": torch.arange(8.0).view(4, 2, 1), "none": torch.zeros(4, 0)}
    output = {"a": torch.full((4, 3), -1), "b": torch.full((4, 2, 1), -1.0), "none": torch.ones(4, 1)}

    def f(x: Any, output: Any) -> Any:
        here = fcoll.axis_index(pairs)
        first, size = torch.zeros(2, dtype=torch.int64), torch.stack((1 - here, 1 - here))
        got = call(
            {"a": x["a"], "b": x["b"]}, {"a": output["a"], "b": output["b"]}, first, size, first + 1, size, pairs
        )
        return got, call(x["none"], output["none"], first, 0 * size, first, 0 * size, pairs)

    got, kept = fcoll.vmap(f, axis_name="i")(x, output)
    assert got["a"].tolist() == [[-1, 2, -1], [-1, 1, -1], [-1, 2, -1], [-1, 1, -1]]
    assert got["b"].flatten(1).tolist() == [[-1, 4], [-1, 2], [-1, 4], [-1, 2]]
    assert torch.equal(kept, output["none"])


def test_wrong_recv_sizes(ranks: Pools) -> None:
    """One rank is wrong about what it receives: it says so, and the other has its rows."""

    def f() -> str:
        rank, x = dist.get_rank(), torch.ones(2)
        try:
            call(x, torch.zeros(2), [0, 0], [1, 1], [rank, rank], [1, 1 + rank], fcoll.WORLD)
        except ValueError as error:
            return str(error)
        return "right"

    assert ranks(2).run(f) == ["right", "ragged_all_to_all: recv_sizes are (1, 2), and what arrived (1, 1)"]


class Bad(NamedTuple):
    call: Callable[[Tensor], Any]  # of a 3 by 2 tensor, on the axis "i" of two ranks
    kind: type[Exception]
    message: str


BAD = {
    "other ranks": Bad(
        lambda x: call(x, x, [0, 0], [1, 1, 1], [0, 1], [1, 1], "i"),
        ValueError,
        "ragged_all_to_all: send_sizes have shape (3,); there is one for each of the 2 ranks of 'i'",
    ),
    "beyond the operand": Bad(
        lambda x: call(x, x, [0, 2], torch.tensor([3, 2]), [0, 1], [1, 1], "i"),
        ValueError,
        "ragged_all_to_all: tree goes with 3 input rows; input_offsets (0, 2) and send_sizes (3, 2) reach beyond",
    ),
    "negative": Bad(
        lambda x: call(x, x, [0, 0], [1, 1], [0, 1], (1, -1), "i"),
        ValueError,
        "ragged_all_to_all: recv_sizes are not negative, got (1, -1)",
    ),
    "floats": Bad(
        lambda x: call(x, x, [0, 0.5], [1, 1], [0, 1], [1, 1], "i"),
        TypeError,
        "ragged_all_to_all: input_offsets are a sequence or a tensor of integers, got [0, 0.5]",
    ),
    "a tensor of floats": Bad(
        lambda x: call(x, x, [0, 0], [1, 1], torch.zeros(2), [1, 1], "i"),
        TypeError,
        "ragged_all_to_all: output_offsets are integers, got torch.float32",
    ),
    "another structure": Bad(
        lambda x: call([x], (x,), [0, 0], [1, 1], [0, 1], [1, 1], "i"),
        ValueError,
        "ragged_all_to_all: output and operand are trees of the same structure",
    ),
    "a number for a leaf": Bad(
        lambda x: call([x], [1.0], [0, 0], [1, 1], [0, 1], [1, 1], "i"),
        TypeError,
        "ragged_all_to_all: output[0] is a float; leaves are tensors",
    ),
    "another dtype": Bad(
        lambda x: call({"a": x}, {"a": x.double()}, [0, 0], [1, 1], [0, 1], [1, 1], "i"),
        ValueError,
        "ragged_all_to_all: output['a'] is torch.float64 of shape (3, 2), and the operand torch.float32 of shape "
        "(3, 2); only the number of rows may differ",
    ),
    "no rows": Bad(
        lambda x: call(x.sum(), x.sum(), [0, 0], [1, 1], [0, 1], [1, 1], "i"),
        ValueError,
        "ragged_all_to_all: tree has no axis of rows",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name: str) -> None:
    bad, kind, message = BAD[name]
    with pytest.raises(kind) as raised:
        fcoll.vmap(bad, axis_name="i")(torch.ones(2, 3, 2))
    assert str(raised.value) == message
    assert isinstance(raised.value, fcoll.FcollError)
