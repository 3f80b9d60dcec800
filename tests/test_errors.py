"""Bad calls: the same exception and message in emulation, on a process group and compiled, and nothing is sent."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from common import Pools
from torch import Tensor

import fcoll
from fcoll.testing import Ranks


class Bad(NamedTuple):
    """A call by one of two ranks, and what it raises."""

    call: Callable[[Tensor, Any], Any]  # (a 3 by 2 tensor of float32, group)
    kind: type[Exception]
    message: str  # <group> stands for the group's description

    def on(self, group: Any) -> Callable[[Any], Any]:
        return lambda x: self.call(x, group)


KINDS = "a group is an axis name, a tuple of names, a ProcessGroup, a DeviceMesh, a fcoll.Group or fcoll.WORLD"
SHAPE = "tree has shape (3, 2)"
BAD = {
    # operations
    "unknown op": Bad(
        lambda x, g: fcoll.all_reduce(x, g, "avg"),
        ValueError,
        "all_reduce: op is one of sum, mean, max, min, prod, any, all, got 'avg'",
    ),
    "op of another kind": Bad(
        lambda x, g: fcoll.reduce(x, g, op=None),  # type: ignore[arg-type]
        ValueError,
        "reduce: op is one of sum, mean, max, min, prod, any, all, got None",
    ),
    "op that cannot be scattered": Bad(
        lambda x, g: fcoll.reduce_scatter(torch.cat((x, x)), g, 0, "prod"),
        ValueError,
        "reduce_scatter: op is one of sum, mean, max, min, got 'prod'",
    ),
    # axes
    "axis out of range": Bad(
        lambda x, g: fcoll.all_gather(x, g, 2),
        ValueError,
        f"all_gather: {SHAPE}: axis=2 is out of range; use one from -2 to 1",
    ),
    "negative axis out of range": Bad(
        lambda x, g: fcoll.gather(x, g, 0, -3),
        ValueError,
        f"gather: {SHAPE}: axis=-3 is out of range; use one from -2 to 1",
    ),
    "inserted axis out of range": Bad(
        lambda x, g: fcoll.all_gather(x, g, 3, tiled=False),
        ValueError,
        f"all_gather: {SHAPE}: axis=3 is out of range; use one from -3 to 2",
    ),
    "split_axis out of range": Bad(
        lambda x, g: fcoll.all_to_all(x, g, 5, 0),
        ValueError,
        f"all_to_all: {SHAPE}: split_axis=5 is out of range; use one from -2 to 1",
    ),
    "concat_axis out of range": Bad(
        lambda x, g: fcoll.all_to_all(x, g, 1, -4),
        ValueError,
        f"all_to_all: {SHAPE}: concat_axis=-4 is out of range; use one from -2 to 1",
    ),
    "no axis to concatenate": Bad(
        lambda x, g: fcoll.all_gather(x.sum(), g),
        ValueError,
        "all_gather: tree has shape (): axis=0 is out of range; a 0-d tensor has no axis; use tiled=False",
    ),
    "axis of another kind": Bad(
        lambda x, g: fcoll.all_gather(x, g, 1.0),  # type: ignore[arg-type]
        TypeError,
        "all_gather: axis is an integer, got float",
    ),
    "axis as a truth value": Bad(
        lambda x, g: fcoll.split(x, g, True),
        TypeError,
        "split: axis is an integer, got bool",
    ),
    # sizes
    "reduce_scatter of an uneven size": Bad(
        lambda x, g: fcoll.reduce_scatter(x, g),
        ValueError,
        f"reduce_scatter: {SHAPE}: size 3 along axis=0 is not a multiple of the 2 ranks of <group>; pad it",
    ),
    "all_to_all of an uneven size": Bad(
        lambda x, g: fcoll.all_to_all(x, g, -2, 1),
        ValueError,
        f"all_to_all: {SHAPE}: size 3 along split_axis=0 is not a multiple of the 2 ranks of <group>; pad it",
    ),
    "scatter of an uneven size": Bad(
        lambda x, g: fcoll.scatter(x, g),
        ValueError,
        f"scatter: {SHAPE}: size 3 along axis=0 is not a multiple of the 2 ranks of <group>; pad it",
    ),
    "split of an uneven size": Bad(
        lambda x, g: fcoll.split(x, g),
        ValueError,
        f"split: {SHAPE}: size 3 along axis=0 is not a multiple of the 2 ranks of <group>; pad it",
    ),
    "untiled, where the size is not n": Bad(
        lambda x, g: fcoll.split(x, g, tiled=False),
        ValueError,
        f"split: {SHAPE}: size 3 along axis=0 must be 2, the number of ranks of <group>; or use tiled=True",
    ),
    # sizes of each rank
    "sizes for other ranks": Bad(
        lambda x, g: fcoll.all_gather(x, g, sizes=[3]),
        ValueError,
        "all_gather: sizes are 1 numbers for the 2 ranks of <group>",
    ),
    "not this rank's size": Bad(
        lambda x, g: fcoll.all_gather({"a": x, "b": x.t()}, g, sizes=[3, 3]),
        ValueError,
        "all_gather: tree['b'] has shape (2, 3): size 2 along axis=0 is not 3, this rank's of sizes",
    ),
    "sizes that do not add up": Bad(
        lambda x, g: fcoll.reduce_scatter(x, g, -1, sizes=(2, 2)),
        ValueError,
        f"reduce_scatter: {SHAPE}: sizes (2, 2) add up to 4, not to the 2 along axis=-1",
    ),
    "recv_sizes without what this rank keeps": Bad(
        lambda x, g: fcoll.all_to_all(torch.cat((x, x)), g, send_sizes=[3, 3], recv_sizes=[2, 2]),
        ValueError,
        "all_to_all: tree has shape (6, 2): this rank keeps 3 along concat_axis=0, not the 2 of recv_sizes",
    ),
    "a size of another kind": Bad(
        lambda x, g: fcoll.all_to_all(x, g, send_sizes=[1.5, 1.5]),  # type: ignore[list-item]
        TypeError,
        "all_to_all: send_sizes are integers, got float",
    ),
    "ragged rows beyond the output": Bad(
        lambda x, g: fcoll.ragged_all_to_all(x, x[:1], [0, 0], [1, 1], [0, 1], [1, 1], g),
        ValueError,
        "ragged_all_to_all: tree goes with 1 output rows; output_offsets (0, 1) and send_sizes (1, 1) reach beyond",
    ),
    "a ragged output of another shape": Bad(
        lambda x, g: fcoll.ragged_all_to_all([x], [x.t()], [0, 0], [1, 1], [0, 1], [1, 1], g),
        ValueError,
        "ragged_all_to_all: output[0] is torch.float32 of shape (2, 3), and the operand torch.float32 of shape (3, 2); "
        "only the number of rows may differ",
    ),
    # ranks
    "src outside the group": Bad(
        lambda x, g: fcoll.broadcast(x, g, 2),
        ValueError,
        "broadcast: src=2 is not a rank of <group>: they go from 0 to 1, counted within the group",
    ),
    "negative dst": Bad(
        lambda x, g: fcoll.reduce(x, g, -1),
        ValueError,
        "reduce: dst=-1 is not a rank of <group>: they go from 0 to 1, counted within the group",
    ),
    "dst outside the group": Bad(
        lambda x, g: fcoll.gather(x, g, 7),
        ValueError,
        "gather: dst=7 is not a rank of <group>: they go from 0 to 1, counted within the group",
    ),
    "scatter from outside the group": Bad(
        lambda x, g: fcoll.scatter(x, g, 2, -1),
        ValueError,
        "scatter: src=2 is not a rank of <group>: they go from 0 to 1, counted within the group",
    ),
    "src of another kind": Bad(
        lambda x, g: fcoll.broadcast(x, g, "0"),  # type: ignore[arg-type]
        TypeError,
        "broadcast: src is an integer, got str",
    ),
    "source outside the group": Bad(
        lambda x, g: fcoll.permute(x, g, [(2, 0)]),
        ValueError,
        "permute: source 2 in perm is not a rank of <group>: they go from 0 to 1",
    ),
    "destination outside the group": Bad(
        lambda x, g: fcoll.permute(x, g, [(0, 1), (1, -1)]),
        ValueError,
        "permute: destination -1 in perm is not a rank of <group>: they go from 0 to 1",
    ),
    "source twice": Bad(
        lambda x, g: fcoll.permute(x, g, [(0, 0), (0, 1)]),
        ValueError,
        "permute: each source in perm occurs once, got ((0, 0), (0, 1))",
    ),
    "destination twice": Bad(
        lambda x, g: fcoll.permute(x, g, [(0, 1), (1, 1)]),
        ValueError,
        "permute: each destination in perm occurs once, got ((0, 1), (1, 1))",
    ),
    "a pair of three": Bad(
        lambda x, g: fcoll.permute(x, g, [(0, 1, 2)]),  # type: ignore[list-item]
        TypeError,
        "permute: perm holds pairs of integers (source, destination), got (0, 1, 2)",
    ),
    "a pair of floats": Bad(
        lambda x, g: fcoll.permute(x, g, [(0.5, 1)]),  # type: ignore[list-item]
        TypeError,
        "permute: perm holds pairs of integers (source, destination), got (0.5, 1)",
    ),
    "perm as a number": Bad(
        lambda x, g: fcoll.permute(x, g, 1),  # type: ignore[arg-type]
        TypeError,
        "permute: perm lists (source, destination) pairs, got int",
    ),
    "offset of another kind": Bad(
        lambda x, g: fcoll.shift(x, g, 0.5),  # type: ignore[arg-type]
        TypeError,
        "shift: offset is an integer, got float",
    ),
    # dtypes
    "sum of bool": Bad(
        lambda x, g: fcoll.all_reduce(x > 0, g),
        TypeError,
        "all_reduce: tree is bool, which has no sum; use any or all, or convert it",
    ),
    "mean of bool": Bad(
        lambda x, g: fcoll.reduce(x > 0, g, 0, "mean"),
        TypeError,
        "reduce: tree is bool, which has no mean; use any or all, or convert it",
    ),
    "product of bool": Bad(
        lambda x, g: fcoll.all_reduce(True, g, "prod"),
        TypeError,
        "all_reduce: tree is bool, which has no prod; use any or all, or convert it",
    ),
    "mean of integers": Bad(
        lambda x, g: fcoll.reduce_scatter(x.long(), g, 1, "mean"),
        TypeError,
        "reduce_scatter: tree is torch.int64, which has no mean; convert it to a floating dtype",
    ),
    "maximum of complex numbers": Bad(
        lambda x, g: fcoll.all_reduce(x * 1j, g, "max"),
        TypeError,
        "all_reduce: tree is torch.complex64, which has no order and so no max",
    ),
    "minimum of complex numbers": Bad(
        lambda x, g: fcoll.reduce_scatter(x * 1j, g, 1, "min"),
        TypeError,
        "reduce_scatter: tree is torch.complex64, which has no order and so no min",
    ),
    "sum of what can only be moved": Bad(
        lambda x, g: fcoll.all_reduce(x.to(torch.float8_e4m3fn), g),
        TypeError,
        "all_reduce: tree is torch.float8_e4m3fn, which torch can move but not reduce; convert it",
    ),
    # leaves
    "a string": Bad(
        lambda x, g: fcoll.all_reduce({"a": [x, "b"]}, g),
        TypeError,
        "all_reduce: tree['a'][1] is a str; leaves are tensors, numbers and None",
    ),
    "a second leaf": Bad(
        lambda x, g: fcoll.split({"a": x.t(), "b": (x.t(), x)}, g),
        ValueError,
        "split: tree['b'][1] has shape (3, 2): size 3 along axis=0 is not a multiple of the 2 ranks of <group>; pad it",
    ),
    # groups
    "no group": Bad(
        lambda x, g: fcoll.all_reduce(x, None),  # type: ignore[arg-type]
        TypeError,
        f"all_reduce: {KINDS}, got NoneType",
    ),
    "a list of names": Bad(
        lambda x, g: fcoll.axis_size(["i"]),  # type: ignore[arg-type]
        TypeError,
        f"axis_size: {KINDS}, got list",
    ),
    "a tuple of something else": Bad(
        lambda x, g: fcoll.axis_index((0, 1)),  # type: ignore[arg-type]
        TypeError,
        "axis_index: a tuple of groups holds axis names, got 0",
    ),
}


class Told(NamedTuple):
    kinds: list[str]
    message: str


def told(f: Callable[[], Any]) -> Told:
    """The exception that f raises: what it is, and its first line (torch adds lines on where it was traced)."""
    try:
        f()
    except Exception as error:
        kinds = [k for k in (fcoll.FcollError, ValueError, TypeError, NameError) if isinstance(error, k)]
        return Told([k.__name__ for k in kinds], str(error).splitlines()[0])
    return Told([], "nothing raised")


def tell_all(compile: bool, run: Callable[[Callable[[Any], Any]], Callable[[Any], Any]], group: Any) -> dict[str, Told]:
    out = {}
    for name, bad in BAD.items():
        f = run(bad.on(group))
        if compile:
            torch.compiler.reset()
            f = torch.compile(f, fullgraph=True, backend="eager")
        out[name] = told(functools.partial(f, torch.ones(2, 3, 2)))
    return out


def expected(group: str) -> dict[str, Told]:
    return {
        name: Told(["FcollError", bad.kind.__name__], bad.message.replace("<group>", group))
        for name, bad in BAD.items()
    }


def emulated(compile: bool) -> dict[str, Told]:
    return tell_all(compile, lambda f: fcoll.vmap(f, axis_name="i"), "i")


def test_in_emulation() -> None:
    assert emulated(False) == expected("'i'")


def test_in_compiled_emulation() -> None:
    with Ranks(1) as own:  # a failed compile can leave functorch's stack dirty
        assert own.run(emulated, True) == [expected("'i'")]


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_on_a_process_group(ranks: Pools, compile: bool) -> None:
    """One rank after the other, while the other waits: whoever sent anything would hang. Then a sum still works."""

    def f() -> tuple[dict[str, Told], str, float]:
        out = {}
        for turn in range(2):
            if dist.get_rank() == turn:
                out = tell_all(compile, lambda f: lambda stack: f(stack[0]), fcoll.WORLD)
            dist.barrier()
        return out, dist.group.WORLD.group_name, float(fcoll.all_reduce(1.0, fcoll.WORLD))  # type: ignore[union-attr]

    for got, name, total in ranks(2).run(f):
        assert got == expected(f"process group {name!r}")
        assert total == 2.0


# ---- names and groups


def nested(f: Callable[[Any], Any]) -> Any:
    return fcoll.vmap(fcoll.vmap(f, axis_name="inner"), axis_name="outer")(torch.ones(2, 3))


def test_unbound_names() -> None:
    outside = "all_reduce: axis name 'i' is not bound; call it inside fcoll.vmap(..., axis_name=...)"
    assert told(lambda: fcoll.all_reduce(torch.ones(1), "i")) == (["FcollError", "NameError"], outside)
    inside = "axis_size: axis name 'i' is not bound; bound here: ['inner', 'outer']"
    assert told(lambda: nested(lambda x: fcoll.axis_size("i"))) == (["FcollError", "NameError"], inside)
    assert told(lambda: nested(lambda x: fcoll.axis_size(("inner", "i")))) == (["FcollError", "NameError"], inside)
    subgroups = fcoll.subgroups("i", [[0], [1]])
    assert told(lambda: fcoll.vary(torch.ones(1), subgroups)).message.startswith("vary: axis name 'i' is not bound")
    with pytest.raises(NameError, match="axis name 'i' is not bound"):
        torch.compile(lambda x: fcoll.all_reduce(x, "i"), fullgraph=True, backend="eager")(torch.ones(1))


def test_unbound_names_in_a_process(ranks: Pools) -> None:
    got = ranks(2).run(lambda: told(lambda: fcoll.all_reduce(torch.ones(1), "i")))
    assert got == [told(lambda: fcoll.all_reduce(torch.ones(1), "i"))] * 2


def test_a_name_twice() -> None:
    text = "all_gather: axis names must be distinct, got ('inner', 'inner')"
    twice = ("inner", "inner")
    assert told(lambda: nested(lambda x: fcoll.all_gather(x, twice))) == (["FcollError", "ValueError"], text)


def test_no_world() -> None:
    text = "is not initialised: start it, or name an axis of an enclosing fcoll.vmap"
    for call, function in (
        (lambda: fcoll.all_reduce(torch.ones(1), fcoll.WORLD), "all_reduce"),
        (lambda: fcoll.group([0]), "group"),
        (lambda: fcoll.subgroups(fcoll.WORLD, [[0]]), "subgroups"),
    ):
        assert told(call) == (["FcollError", "ValueError"], f"{function}: torch.distributed {text}")


def test_bad_subgroups() -> None:
    def bad(ranks: Any) -> str:
        kinds, message = told(lambda: fcoll.subgroups("i", ranks))
        assert kinds == ["FcollError", "ValueError"]
        return message

    start = "subgroups: the lists must hold each rank exactly once, got "
    assert bad([[0, 1], [1, 2]]) == start + "((0, 1), (1, 2))"
    assert bad([[0, 1], [3]]) == start + "((0, 1), (3,))"
    assert bad([[0, 1], []]) == start + "((0, 1), ())"
    assert told(lambda: fcoll.subgroups("i", [[0, 1.5]])) == (  # type: ignore[list-item]
        ["FcollError", "TypeError"],
        "subgroups: the lists must hold integers, got ((0, 1.5),)",
    )


def test_subgroups_that_do_not_fit_the_axis() -> None:
    pairs = fcoll.subgroups("inner", [[0, 1], [2, 3]])
    assert told(lambda: nested(lambda x: fcoll.all_reduce(x, pairs))) == (
        ["FcollError", "ValueError"],
        "all_reduce: subgroups of 'inner' must hold each of its 3 ranks exactly once, got ((0, 1), (2, 3))",
    )


@pytest.mark.parametrize(
    ("name", "call"),
    {
        "all_gather": lambda x, g: fcoll.all_gather(x, g),
        "reduce_scatter": lambda x, g: fcoll.reduce_scatter(x, g),
        "all_to_all": lambda x, g: fcoll.all_to_all(x, g),
        "gather": lambda x, g: fcoll.gather(x, g),
        "scatter": lambda x, g: fcoll.scatter(x, g),
        "permute": lambda x, g: fcoll.permute(x, g, []),
        "shift": lambda x, g: fcoll.shift(x, g),
        "split": lambda x, g: fcoll.split(x, g),
        "axis_size": lambda x, g: fcoll.axis_size(g),
    }.items(),
)
def test_subgroups_of_unequal_size(name: str, call: Callable[[Any, Any], Any]) -> None:
    uneven = fcoll.subgroups("i", [[0, 1], [2]])
    assert told(lambda: fcoll.vmap(lambda x: call(x, uneven), axis_name="i")(torch.ones(3, 6))) == (
        ["FcollError", "ValueError"],
        f"{name}: the subgroups of 'i' have different sizes",
    )


def test_bad_groups_of_processes(ranks: Pools) -> None:
    def f() -> dict[str, Told]:
        alone = dist.new_group([0])
        return {
            "repeated": told(lambda: fcoll.group([1, 1])),
            "kind": told(lambda: fcoll.group(["0", 1])),  # type: ignore[list-item]
            "none": told(lambda: fcoll.group([])),
            "outside": told(lambda: fcoll.group([0, 1, 2])),
            "not a member": told(lambda: fcoll.group([1 - dist.get_rank()])),
            "subgroups": told(lambda: fcoll.subgroups(fcoll.WORLD, [[0], [1], [2]])),
            "other's": told(lambda: fcoll.all_reduce(1.0, alone)) if dist.get_rank() else Told([], ""),
        }

    value, kind = ["FcollError", "ValueError"], ["FcollError", "TypeError"]
    for rank, got in enumerate(ranks(2).run(f)):
        assert got == {
            "repeated": (value, "group: ranks must be distinct, got (1, 1)"),
            "kind": (kind, "group: ranks must be integers, got ('0', 1)"),
            "none": (value, "group: ranks must be among 0 to 1, at least one, got ()"),
            "outside": (value, "group: ranks must be among 0 to 1, at least one, got (0, 1, 2)"),
            "not a member": (value, f"group: rank {rank} is not among ({1 - rank},); only members make a group"),
            "subgroups": (value, "subgroups: the lists must hold each of 2 ranks exactly once, got ((0,), (1,), (2,))"),
            "other's": (value, "all_reduce: this rank is not in the group") if rank else ([], ""),
        }


# ---- a leaf's place in the tree


@dataclasses.dataclass
class Head:
    weight: Any
    bias: Any = None


class Pair(NamedTuple):
    first: Any
    second: Any


x, bad = torch.ones(2), "no tensor"
PLACES = {
    "tree": bad,
    "tree[1]": [x, bad],
    "tree['a'][0].weight": {"a": [Head(bad)]},
    "tree[0].bias": (Head(x, bad), x),
    "tree.second": Pair(None, bad),
    "tree.second['k']": Pair(x, {"k": bad}),
    "tree[2][0]": (x, None, [bad]),
    "tree['b']": collections.OrderedDict(c=x, b=bad),
    "tree[3]": {1: x, 3: bad},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_leaf_is_named_by_python_code(place: str) -> None:
    text = f"all_reduce: {place} is a str; leaves are tensors, numbers and None"
    assert told(lambda: fcoll.all_reduce(PLACES[place], ())) == (["FcollError", "TypeError"], text)
    assert eval(place, {"tree": PLACES[place]}) == bad  # it is code


def test_a_leaf_is_named_in_a_process_and_compiled(ranks: Pools) -> None:
    def f() -> list[str]:
        tree = {"a": [Head(torch.ones(2), torch.ones(3))]}

        def call() -> Any:
            return fcoll.split(tree, fcoll.WORLD)

        return [told(call).message, told(torch.compile(call, fullgraph=True, backend="eager")).message]

    for messages in ranks(2).run(f):
        for message in messages:
            assert message.startswith("split: tree['a'][0].bias has shape (3,): size 3 along axis=0 is not a multiple")


@pytest.mark.parametrize("leaf", [{1, 2}, object(), b"", range(3), lambda: 0], ids=lambda leaf: type(leaf).__name__)
def test_what_is_no_leaf(leaf: Any) -> None:
    kind = type(leaf).__name__
    text = f"vary: tree[0] is a {kind}; leaves are tensors, numbers and None"
    assert told(lambda: fcoll.vary([leaf], ())) == (["FcollError", "TypeError"], text)


def test_sparse_tensors() -> None:
    text = "broadcast: tree['s'] is torch.sparse_coo; only strided tensors can be sent: use .to_dense()"
    tree = {"s": torch.eye(2).to_sparse()}
    assert told(lambda: fcoll.broadcast(tree, ())) == (["FcollError", "TypeError"], text)


def test_the_exceptions() -> None:
    assert issubclass(fcoll.CollectiveValueError, fcoll.FcollError)
    assert issubclass(fcoll.CollectiveTypeError, fcoll.FcollError)
    assert issubclass(fcoll.UnboundAxisError, fcoll.FcollError)
    assert told(lambda: None) == ([], "nothing raised")


def test_sizes_in_a_dynamic_graph_are_numbers_in_the_message(ranks: Pools) -> None:
    def f() -> str:
        run = torch.compile(lambda x: fcoll.split(x, fcoll.WORLD), fullgraph=True, dynamic=True, backend="eager")
        run(torch.ones(4, 3))
        return told(lambda: run(torch.ones(5, 3))).message

    for message in ranks(2).run(f):
        assert message.startswith("split: tree has shape (5, 3): size 5 along axis=0 is not a multiple of the 2 ranks")
