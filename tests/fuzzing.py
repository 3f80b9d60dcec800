"""Generated calls, as Python code: wrong ones for `test_fuzz.py`, each wrong in one known place, and right ones.

In the code, g is the group, n its size and t(*shape, dtype) a tensor with other values on every rank; `mesh` is a mesh
with one axis "a" of size n.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fcoll
from fcoll import P, lax, regions

T = TypeVar("T")


class Wrong(NamedTuple):
    """A call that raises."""

    code: str
    path: str = ""  # of the leaf that is at fault; "" if none is


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Head:
    weight: Any
    bias: Any = None


def tensor(rank: Any, *shape: int, dtype: str) -> Tensor:
    """Small integers: exact in every dtype, and so are their sums."""
    kind: torch.dtype = getattr(torch, dtype)
    x = (torch.arange(math.prod(shape)).view(shape) * 3 + rank * 5) % 7 - 3
    if kind.is_complex:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of complex32
            z: Tensor = torch.complex(x.double(), (x + rank).double()).to(kind)
        return z
    y: Tensor = (x if kind.is_signed or kind.is_floating_point else x.abs()).to(kind)
    return y


def scope(g: Any, n: int, rank: Any, mesh: Any = None, w: Any = None) -> dict[str, Any]:
    """What the names in the code mean; w is a factor of every t that has a derivative."""

    def t(*shape: int, dtype: str = "float32") -> Tensor:
        x = tensor(rank, *shape, dtype=dtype)
        return x if w is None or dtype not in SMOOTH else x * w

    return {
        "fcoll": fcoll, "lax": lax, "regions": regions, "torch": torch, "np": np, "P": P, "Pair": Pair, "Head": Head,
        "OrderedDict": collections.OrderedDict, "f": lambda x: x, "g": g, "n": n, "t": t, "mesh": mesh,
    }  # fmt: skip


def run(code: str, *where: Any, **more: Any) -> Any:
    return eval(code, scope(*where, **more))


SMOOTH = ("float32", "float64", "complex64", "complex128")
REAL = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
WHOLE = ("uint8", "int8", "int16", "int32", "int64")
MOVED = (*REAL, *COMPLEX, *WHOLE, "bool", "uint16", "uint32", "uint64", "complex32",
         "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")  # fmt: skip


# ---- what an argument may be, right and wrong


class Slot(NamedTuple):
    right: tuple[str, ...]
    wrong: tuple[str, ...]


NOT_INTEGERS = (
    "None", "'0'", "0.0", "True", "False", "[0]", "(0,)", "{}", "1j", "b'0'", "torch.tensor(0)", "np.int64(0)", "f",
)  # fmt: skip
FLAG = Slot(
    ("True", "False"),
    ("None", "0", "1", "'no'", "1.0", "[]", "torch.ones(2)", "torch.tensor(True)", "np.True_", "np.ones(2)", "f"),
)
OPS = ("'avg'", "'SUM'", "''", "None", "1", "['sum']", "{'sum': 1}", "b'sum'", "torch.distributed.ReduceOp.SUM",
       "np.ones(2)", "torch.ones(2)", "max", "('sum', 'max')", "True")  # fmt: skip
OP = Slot(("'sum'", "'mean'", "'max'", "'min'", "'prod'"), OPS)
SCATTERED = Slot(("'sum'", "'mean'", "'max'", "'min'"), (*OPS, "'prod'", "'any'", "'all'"))
AXIS = Slot(("0", "1", "-1", "-2"), ("3", "-4", "5", "-9", "1 << 70", "-(1 << 70)", *NOT_INTEGERS))  # of two
RANK = Slot(("0", "n - 1"), ("n", "-1", "-n", "n + 5", "1 << 70", *NOT_INTEGERS))
OFFSET = Slot(("1", "-1", "0", "n", "1 << 70"), NOT_INTEGERS)
BYTES = Slot(("0", "1", "1 << 20", "1 << 80"), ("-1", "-(1 << 70)", *NOT_INTEGERS))
PERM = Slot(
    ("[]", "[(0, 0)]", "((n - 1, 0),)", "[[0, n - 1]]"),
    (
        "None", "0", "'01'", "1.0", "{0: 0}", "{(0, 0)}", "[0]", "[None]", "['01']", "[(0,)]", "[(0, 0, 0)]", "[()]",
        "[(0, None)]", "[(0, 0.0)]", "[('0', 0)]", "[(True, 0)]", "[(0, n)]", "[(n, 0)]", "[(-1, 0)]", "[(0, -1)]",
        "[(0, 0), (0, n - 1)]", "[(0, 0), (n - 1, 0)]", "[(0, 0), (0, 0)]", "[(0, 1 << 70)]", "np.zeros((1, 2))",
        "torch.zeros(1, 2)", "range(2)", "[(0, 0), None]", "[(torch.tensor(0), 0)]", "f",
    ),
)  # fmt: skip
NUMBERS = (
    "5", "'x'", "1.0", "{}", "{0, 1}", "f", "range(n)", "[]", "[0]", "[0] * (n + 1)", "[1.0] * n", "['1'] * n",
    "[None] * n", "[True] * n", "[-1] * n", "[1 << 70] * n", "[[1]] * n", "np.ones(n)", "torch.ones(n)",
    "torch.ones(n, dtype=torch.bool)", "torch.ones(n, dtype=torch.complex64)", "torch.ones(n, n, dtype=torch.int64)",
    "torch.ones((), dtype=torch.int64)", "-torch.ones(n, dtype=torch.int64)",
    "torch.ones(n, dtype=torch.int64, device='meta')", "torch.ones(0, dtype=torch.int64)",
)  # fmt: skip
GATHERED_SIZES = Slot(("None", "[n] * n", "'exchange'"), (*NUMBERS, "[n + 1] * n", "'EXCHANGE'", "b'exchange'"))
SCATTERED_SIZES = Slot(("None", "[1] * n", "torch.ones(n, dtype=torch.int64)"), (*NUMBERS, "[2] * n", "'exchange'"))
GROUPS = (
    "None", "0", "1.5", "True", "b'i'", "[g]", "{0: g}", "object()", "torch.ones(2)", "torch.device('cpu')",
    "np.ones(2)", "'j'", "''", "('j',)", "('j', 'j')", "(None,)", "(0,)", "fcoll", "f", "fcoll.Group",
    "fcoll.virtual_mesh(i=2)",
    "P('i')", "fcoll.subgroups('j', [[0]])", "fcoll.subgroups('j', [[0, 1]])",
)  # fmt: skip
LISTS = (
    "5", "'01'", "f", "{}", "{0: [0]}", "[0]", "[0, 1]", "[[0], 1]", "['0', '1']", "[]", "[[]]", "[[0], []]",
    "[[0.0]]", "[[None]]", "[['0']]", "[[True]]", "[[0, 0]]", "[[0], [0]]", "[[1]]", "[[0, 2]]", "[[-1, 0]]",
    "torch.tensor([[0]])", "np.zeros((1, 1))", "[{0}]", "[range(1)]",
)  # fmt: skip

LEAVES = (
    "'s'", "b''", "object()", "{0}", "range(3)", "f", "Exception", "torch.float32", "torch.device('cpu')", "print",
    "np.ones(2)", "np.float32(1)", "np.int64(1)", "np.True_", "torch.eye(2).to_sparse()",
    "1 << 70", "-(1 << 64)", "torch.empty(2, dtype=torch.bits8)", "torch.empty(2, dtype=torch.int4)",
    "torch.empty(2, dtype=torch.uint1)", "torch.Generator()", "slice(1)", "...", "NotImplemented", "fcoll.WORLD",
    "torch.nn.Identity()", "frozenset()", "memoryview(b'')", "iter(())",
)  # fmt: skip
ADDED = ("t(n, n) > 0", "t(n, n, dtype='uint16')", "t(n, n, dtype='uint64')", "t(n, n, dtype='float8_e5m2')",
         "t(n, n, dtype='complex32')", "True", "torch.empty(2, dtype=torch.float8_e8m0fnu)")  # fmt: skip
ORDERED = ("t(n, n, dtype='complex64')", "1j", "t(n, dtype='uint32')", "t(n, dtype='float8_e4m3fn')")
AVERAGED = ("t(n, n, dtype='int32')", "t(n, dtype='uint8')", "3", "t(n) > 0")
UNEVEN = ("t(n + 1, n)", "t(2 * n + 1)", "t(1)", "t(n - 1, 2)")  # along the first axis, of two ranks or more
FLAT = ("t()", "1.0", "t(n, n).sum()", "True")


NOTHING: dict[str, Any] = {}


class Function(NamedTuple):
    """A function of a tree and a group."""

    slots: dict[str, Slot] = NOTHING
    leaves: dict[str, tuple[str, ...]] = NOTHING  # keyword arguments → further leaves that are wrong with them
    startable: bool = False


_SUMS = {"": ADDED, "op='sum'": ADDED, "op='max'": ORDERED, "op='mean'": AVERAGED}
_CUTS = {"": (*UNEVEN, *FLAT), "tiled=True": UNEVEN}
FUNCTIONS = {
    "fcoll.all_reduce": Function({"op": OP, "invariant": FLAG, "bucket_size": BYTES}, _SUMS, True),
    "fcoll.all_gather": Function(
        {"axis": AXIS, "tiled": FLAG, "invariant": FLAG, "bucket_size": BYTES}, {"": FLAT, "axis=1": ("t(n)",)}, True
    ),
    "fcoll.all_gather ": Function({"sizes": GATHERED_SIZES}, {"sizes=[n] * n": ("t(n + 1)", *FLAT)}),
    "fcoll.reduce_scatter": Function(
        {"axis": AXIS, "op": SCATTERED, "tiled": FLAG, "bucket_size": BYTES},
        {**_CUTS, "op='max'": ORDERED, "op='mean'": AVERAGED},
        True,
    ),
    "fcoll.reduce_scatter ": Function({"sizes": SCATTERED_SIZES}, {"sizes=[1] * n": ("t(n + 1)", *ADDED)}),
    "fcoll.all_to_all": Function(
        {"split_axis": AXIS, "concat_axis": AXIS, "tiled": FLAG, "bucket_size": BYTES}, _CUTS, True
    ),
    "fcoll.all_to_all ": Function(
        {"send_sizes": SCATTERED_SIZES, "recv_sizes": SCATTERED_SIZES}, {"send_sizes=[1] * n": ("t(n + 1)", *FLAT)}
    ),
    "fcoll.broadcast": Function({"src": RANK, "bucket_size": BYTES}, startable=True),
    "fcoll.reduce": Function({"dst": RANK, "op": OP, "bucket_size": BYTES}, _SUMS, True),
    "fcoll.gather": Function({"dst": RANK, "axis": AXIS, "tiled": FLAG}, {"": FLAT}, True),
    "fcoll.scatter": Function({"src": RANK, "axis": AXIS, "tiled": FLAG}, _CUTS, True),
    "fcoll.permute": Function({"perm": PERM, "bucket_size": BYTES}, startable=True),
    "fcoll.shift": Function({"offset": OFFSET, "wrap": FLAG, "bucket_size": BYTES}, startable=True),
    "fcoll.vary": Function(),
    "fcoll.split": Function({"axis": AXIS, "tiled": FLAG}, _CUTS),
    "fcoll.prefix_sum": Function({"inclusive": FLAG, "reverse": FLAG}, {"": ADDED}),
    "fcoll.argmax": Function(leaves={"": ORDERED}),
    "fcoll.argmin": Function(leaves={"": ORDERED}),
    "regions.copy_to": Function(),
    "regions.reduce_from": Function(leaves={"": ADDED}),
    "regions.scatter_to": Function({"axis": AXIS, "rank0_only": FLAG}, {"axis=0": UNEVEN, "": FLAT}),
    "regions.gather_from": Function(
        {"axis": AXIS, "rank0_only": FLAG, "tensor_parallel_output_grad": FLAG}, {"": FLAT}
    ),
    "regions.reduce_scatter_to": Function({"axis": AXIS}, {"": (*UNEVEN, *FLAT)}),
    "lax.psum": Function(leaves={"": ("t(n, dtype='uint16')", "t(n, dtype='complex32')")}),
    "lax.pmean": Function(leaves={"": ("t(n, dtype='float8_e5m2')",)}),
    "lax.pmax": Function(leaves={"": ORDERED}),
    "lax.pmin": Function(leaves={"": ORDERED}),
    "lax.pbroadcast": Function({"source": RANK}),
    "lax.ppermute": Function({"perm": PERM}),
    "lax.pswapaxes": Function({"axis": AXIS}, {"axis=0": (*UNEVEN, *FLAT)}),
    "lax.all_to_all": Function({"split_axis": AXIS, "concat_axis": AXIS, "tiled": FLAG}),
    "lax.all_gather": Function({"axis": AXIS, "tiled": FLAG}),
    "lax.psum_scatter": Function({"scatter_dimension": AXIS, "tiled": FLAG}, {"": (*UNEVEN, *FLAT)}),
    "lax.pvary": Function(),
}
NEEDED = {  # arguments that have no default
    "fcoll.permute": ("perm",), "lax.ppermute": ("perm",), "lax.pbroadcast": ("source",), "lax.pswapaxes": ("axis",),
    "lax.all_to_all": ("split_axis", "concat_axis"), "fcoll.all_to_all ": ("send_sizes",),
}  # fmt: skip


# ---- trees with one leaf in a known place

GOOD = "t(n, n)"
PLACES = {  # LEAF is the leaf, and what follows is where it is
    "LEAF": "",
    "[LEAF]": "[0]",
    f"[{GOOD}, LEAF]": "[1]",
    f"(LEAF, {GOOD})": "[0]",
    "[None, LEAF]": "[1]",
    f"{{'a': {GOOD}, 'b': LEAF}}": "['b']",
    "{'k': LEAF}": "['k']",
    f"{{2: {GOOD}, 1: LEAF}}": "[1]",
    f"OrderedDict(z={GOOD}, a=LEAF)": "['a']",
    f"Pair({GOOD}, LEAF)": ".second",
    f"Head(LEAF, {GOOD})": ".weight",
    "Head(None, LEAF)": ".bias",
}


def choice(options: Iterable[T]) -> st.SearchStrategy[T]:
    return st.sampled_from(list(options))


@st.composite
def trees(draw: Callable[..., Any], leaf: str) -> tuple[str, str]:
    """The code of a tree around a leaf, and the leaf's path."""
    code, path = "LEAF", ""
    for _ in range(draw(choice((0, 1, 1, 2)))):
        around = draw(choice(PLACES))
        code, path = around.replace("LEAF", code), PLACES[around] + path
    return code.replace("LEAF", leaf), path


@st.composite
def wrong_collectives(draw: Callable[..., Any]) -> Wrong:
    """One wrong argument, leaf or group; the other arguments are right by themselves."""
    name = draw(choice(FUNCTIONS))
    function = FUNCTIONS[name]
    needed = NEEDED.get(name, ())
    what = draw(choice([*function.slots, *function.slots, "a leaf", "the group"]))
    given = {key: draw(choice(function.slots[key].right)) for key in function.slots if key in needed}
    leaf, group, more = GOOD, "g", ""
    if what == "a leaf":
        kind = draw(choice([None, *function.leaves]))
        folds = ("1 << 70", "-(1 << 64)") if name in ("lax.psum", "lax.pmean") else ()  # without a tensor
        common = [code for code in LEAVES if code not in folds]
        leaf = draw(choice(common if kind is None else function.leaves[kind]))
        more = f", {kind}" if kind else ""
        given = {key: value for key, value in given.items() if not kind or not kind.startswith(key + "=")}
    elif what == "the group":
        taken = ("[g]", "0", "True", "(0,)") if name.startswith("lax") else ()  # lists and axes have a meaning there
        group = draw(choice([code for code in GROUPS if code not in taken]))
    else:
        slot = function.slots[what]
        others = [key for key in function.slots if key != what and "sizes" not in key]
        given |= {key: draw(choice(function.slots[key].right)) for key in others if draw(st.booleans())}
        given[what] = draw(choice(slot.wrong))
    tree, path = draw(trees(leaf))
    call, arguments = name.strip(), "".join(f", {key}={value}" for key, value in given.items()) + more
    if function.startable and draw(choice((False, False, True))):
        return Wrong(f"fcoll.start({call}, {tree}, {group}{arguments})", f"tree{path}" if what == "a leaf" else "")
    return Wrong(f"{call}({tree}, {group}{arguments})", f"tree{path}" if what == "a leaf" else "")


VECTORS = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


@st.composite
def wrong_ragged(draw: Callable[..., Any]) -> Wrong:
    given = dict.fromkeys(VECTORS, "[0] * n")
    leaf, output, group, at = GOOD, GOOD, "g", ""
    what = draw(choice([*VECTORS, "a leaf", "the output", "the group", "rows"]))
    if what == "rows":  # beyond what there are
        given["send_sizes"] = "[1] * n"
        given[draw(choice(("input_offsets", "output_offsets")))] = draw(choice(("[n] * n", "[1 << 62] * n")))
    elif what == "a leaf":
        leaf, at = draw(choice((*LEAVES, *FLAT))), "tree"
    elif what == "the output":
        output = draw(choice(("t()", "t(n, n + 1)", "t(n)", "t(n, n, dtype='int8')", "'s'", "1.0", "np.ones(2)")))
        at = "output"
    elif what == "the group":
        group = draw(choice(GROUPS))
    else:
        given[what] = draw(choice([code for code in NUMBERS if code not in ("[0]", "range(n)")]))
    around = draw(choice(PLACES))
    tree, other = around.replace("LEAF", leaf), around.replace("LEAF", output)
    vectors = ", ".join(given.values())
    return Wrong(f"fcoll.ragged_all_to_all({tree}, {other}, {vectors}, {group})", at and at + PLACES[around])


OTHERS: dict[str, Iterable[str]] = {
    "fcoll.axis_index(ARG)": GROUPS,
    "fcoll.axis_size(ARG)": GROUPS,
    "lax.axis_index(ARG)": [code for code in GROUPS if code != "[g]"],
    "lax.axis_size([ARG])": ("0", "None", "'j'", "object()", "True"),
    "fcoll.barrier(ARG)": GROUPS,
    "fcoll.send(t(n), ARG, 0, fcoll.token())": GROUPS,
    "fcoll.recv(t(n), ARG, 0, fcoll.token())": GROUPS,
    "fcoll.send([t(n), ARG], g, 0, fcoll.token())": LEAVES,
    "fcoll.broadcast_object(1, ARG)": GROUPS,
    "fcoll.all_gather_object(1, ARG)": GROUPS,
    "fcoll.broadcast_tree(t(n), g, ARG)": RANK.wrong,
    "fcoll.broadcast_object(1, g, ARG)": RANK.wrong,
    "fcoll.wait(ARG)": ("None", "t(n)", "[]", "5", "'x'", "f", "fcoll.start", "fcoll.Pending"),
    "fcoll.start(ARG, t(n), g)": (
        "None", "5", "f", "'all_reduce'", "fcoll.vary", "fcoll.split", "fcoll.argmax", "fcoll.prefix_sum", "lax.psum",
        "regions.copy_to", "torch.sum", "fcoll.start", "fcoll.axis_index", "fcoll.all_gather_tree", "lambda t, g: t",
    ),
    "fcoll.start(fcoll.all_gather, t(n), g, sizes=ARG)": (*NUMBERS, "[n] * n", "'exchange'"),
    "fcoll.start(fcoll.all_to_all, t(n), g, send_sizes=ARG)": (*NUMBERS, "[1] * n"),
    "fcoll.all_to_all(t(n), g, recv_sizes=ARG)": ("[1] * n", "5", "'x'"),
    "fcoll.all_to_all(t(n), g, send_sizes=[1] * n, tiled=ARG)": (*FLAG.wrong, "False"),
    "fcoll.all_gather(t(n), g, sizes='exchange', bucket_size=ARG)": BYTES.wrong,
    "fcoll.all_gather(t(n), g, sizes='exchange', tiled=ARG)": (*FLAG.wrong, "False"),
    "fcoll.all_gather(t(n), g, sizes='exchange', invariant=ARG)": FLAG.wrong,
    "fcoll.subgroups(g, ARG)": LISTS,
    "fcoll.subgroups(ARG, [[0], [1]])": [code for code in GROUPS if "'" not in code and code != "(None,)"
                                         and code != "(0,)"],  # names are looked up when they are used
    "lax.psum(t(n), g, axis_index_groups=ARG)": LISTS,
    "lax.all_gather(t(n), g, axis_index_groups=ARG)": LISTS,
    "lax.psum_scatter(t(n), g, axis_index_groups=ARG)": (*LISTS, "[[0], [1, 2]]"),
    "lax.psum(t(n), ARG)": ("1", "-2", "(0, 0)", "(0, -1)", "(5,)", "[9]", "1 << 70", "True"),
    "lax.pmean([1.0, t(n)], (ARG,))": ("0", "-1", "7"),
    "lax.pmax(t(n, 0), ARG)": ("1", "-1", "(0, 1)", "2"),
    "lax.pshuffle(t(n), g, ARG)": (
        "5", "None", "'01'", "[]", "[0] * n", "[0]", "[0.0] * n", "[None] * n", "['0', '1']", "[n] * n", "range(9)",
        "[True, False]", "torch.arange(n)", "np.arange(n)", "[-1, 0]", "{0: 1}",
    ),
    "lax.all_gather(t(n), g, to=ARG)": ("None", "''", "'vary'", "['varying']", "1"),
    "lax.pcast(t(n), g, to=ARG)": ("None", "''", "'invarying'", "['varying']", "1"),
    "regions.scale_gradient(t(n), ARG)": ("None", "'2'", "1j", "True", "[2]", "torch.tensor(2)", "np.float32(2)", "f"),
    "regions.gather_from(t(n), g, rank0_only=ARG, tensor_parallel_output_grad=True)": ("True", *FLAG.wrong),
    "fcoll.group(ARG)": ("5", "None", "f", "{0}", "[]", "[0, 0]", "[-1]", "[99]", "'01'", "[0.0]", "[None]", "[True]"),
}  # fmt: skip
ABOUT_PROCESSES = (
    "fcoll.group(",
    "fcoll.broadcast_tree(t(n), g",
    "fcoll.broadcast_object(1, g",
)
"""What an emulated axis refuses for another reason."""

_MESHES = ("5", "None", "'a'", "P('a')", "f", "object()", "[2]", "torch.ones(2)")
_SPECS = ("5", "'a'", "('a',)", "P('b')", "(P('b'),)", "{'x': 'a'}", "[P('a'), 5]", "object()", "f")
MAPS: dict[str, Iterable[str]] = {
    "P(ARG)": ("5", "['a']", "('a', 5)", "('a', None)", "b'a'", "P('a')", "('a', 'a')", "1.5", "f", "{'a'}"),
    "P('a', ARG)": ("'a'", "('a',)", "('b', 'a')", "5", "['b']"),
    "fcoll.virtual_mesh(a=ARG)": ("0", "-1", "'2'", "True", "2.0", "None", "[2]", "torch.tensor(2)", "np.int64(2)"),
    "fcoll.virtual_mesh(a=2, b=ARG)": ("0", "-5", "None", "1j", "f"),
    "fcoll.mesh(a=ARG)": ("0", "-1", "'2'", "True", "2.0", "None"),
    "fcoll.bind(ARG)": (*_MESHES, "fcoll.virtual_mesh(a=2)"),
    "fcoll.shard_map(ARG, mesh, P('a'), P('a'))": ("5", "'f'", "P()", "[f]"),
    "fcoll.shard_map(f, ARG, P('a'), P('a'))(t(n))": _MESHES,
    "fcoll.shard_map(f, mesh, P('a'), P('a')).on(ARG)(t(n))": [code for code in _MESHES if code != "None"],
    "fcoll.shard_map(f, mesh, ARG, P('a'))": _SPECS,
    "fcoll.shard_map(f, mesh, P('a'), ARG)": _SPECS,
    "fcoll.shard_map(f, mesh, P('a'), P('a'), check=ARG)": FLAG.wrong,
    "fcoll.shard_map(f, mesh, ARG, P('a'))(t(n))": (
        "(P('a'), P('a'))", "()", "({'x': P('a')},)", "(P(None, 'a'),)", "([P('a')],)", "(Pair(P('a'), P()),)",
    ),
    "fcoll.shard_map(f, mesh, P('a'), ARG)(t(n))": ("(P('a'), P('a'))", "{'x': P('a')}", "P(None, 'a')", "P()", "None"),
    "fcoll.shard_map(lambda x: ARG, mesh, P('a'), P('a'))(t(n))": (
        "'s'", "object()", "x.sum()", "fcoll.all_reduce(x, 'b')", "fcoll.all_reduce(x > 0, 'a')", "[x, 's']",
        "fcoll.all_reduce(x, 'a', 'avg')", "fcoll.split(x, 'a', 1)", "fcoll.vary(x, ('a', 'a'))", "1 << 70", "1.0",
    ),
    "fcoll.shard_map(lambda x: ARG, mesh, P('a'), P())(t(n))": ("x", "2 * x", "[x]", "fcoll.shift(x, 'a')"),
    "fcoll.vmap(ARG, axis_name='j')": ("5", "None", "'f'", "[f]"),
    "fcoll.vmap(f, axis_name=ARG)": ("5", "None", "b'j'", "('j',)", "f", "1.5"),
    "fcoll.vmap(f, axis_name='j', axis_size=ARG)(t(2))": ("3", "-2", "0", "'2'", "True", "2.0", "[2]", "1 << 70"),
    "fcoll.vmap(f, in_dims=None, axis_name='j', axis_size=ARG)(t(2))": ("None", "0", "-1", "2.0", "torch.tensor(2)"),
    "fcoll.vmap(f, in_dims=ARG, axis_name='j')(t(2, 3))": (
        "2", "-3", "1 << 70", "None", "'0'", "0.5", "True", "(0, 0)", "()", "{'a': 0}", "({'a': 0},)", "([0],)",
        "torch.tensor(0)", "(None,)", "((0, 1),)", "f", "('0',)", "(True,)",
    ),
    "fcoll.vmap(f, out_dims=ARG, axis_name='j')(t(2, 3))": (
        "2", "-3", "1 << 70", "None", "'0'", "0.5", "True", "(0, 0)", "{'a': 0}", "[0, 0]", "torch.tensor(0)", "f",
    ),
    "fcoll.vmap(f, randomness=ARG, axis_name='j')": ("None", "5", "'SAME'", "['same']", "True", "f"),
    "fcoll.vmap(f, axis_name='j')(ARG)": ("'s'", "5.0", "t()", "t(0)", "None", "object()", "[]", "[t(2), t(3)]"),
    "fcoll.vmap(lambda x: ARG, axis_name='j')(t(2))": ("'s'", "object()", "1 << 70", "np.ones(2)", "[x, b'']", "f"),
    "fcoll.compile(ARG)": ("5", "'f'", "[f]"),
    "fcoll.trace(ARG)": ("5", "'f'", "[f]"),
    "fcoll.checked(ARG)": ("'x'", "5", "['all']", "True"),
    "fcoll.checked(timeout=ARG)": ("0", "-1", "'x'", "None", "True", "float('nan')", "[1]"),
    "fcoll.launch(ARG, 2)": ("5", "'f'", "[f]"),
    "fcoll.launch(f, ARG)": ("0", "-1", "'2'", "None", "True", "2.0"),
}  # fmt: skip
LEAVES_OF_MAPS = {  # the path's root, and what is around the tree
    "args[0]": "fcoll.shard_map(f, mesh, P(), P())(TREE)",
    "args[1]": "fcoll.shard_map(lambda x, y: x, mesh, P(), P())(t(2), TREE)",
    "out": "fcoll.shard_map(lambda x: TREE, mesh, P(), P())(t(2))",
}


@st.composite
def wrong_others(draw: Callable[..., Any], templates: dict[str, Iterable[str]]) -> Wrong:
    template = draw(choice(templates))
    return Wrong(template.replace("ARG", draw(choice(templates[template]))))


@st.composite
def wrong_leaves_of_maps(draw: Callable[..., Any]) -> Wrong:
    tensors = ("to_sparse", "dtype=torch")  # which f may hand through
    leaf = draw(choice([code for code in LEAVES if not any(word in code for word in tensors)]))
    tree, path = draw(trees(leaf))
    root = draw(choice(LEAVES_OF_MAPS))
    return Wrong(LEAVES_OF_MAPS[root].replace("TREE", tree), root + path)


# ---- right calls

SQUARE = (  # n by n
    "t(n, nD)", "t(n, nD).mT", "t(2 * n, nD)[::2]", "t(n, n, 3D)[..., 1]", "t(1, nD).expand(n, n)",
    "t(nD).expand(n, n)", "t(n, 2 * nD)[:, n:]", "t(n, 1, n, 1D).permute(3, 2, 1, 0)[0, :, 0]",
)  # fmt: skip
TILES = ("t(2 * n, 3 * nD)", "t(n, 0D)", "t(0, nD)", "t(0, 0D)", "t(n, 2 * n, 2D)[..., 0]")
SHAPES = ("t(D)", "t(0D)", "t(5D)", "t(2, 0, 3D)", "t(2, 1, 4D)", "t(3, 2, 4D).permute(2, 0, 1)", "t(1D).expand(7)")
OPERANDS = {"sum": (*REAL, *COMPLEX, *WHOLE), "prod": (*REAL, *COMPLEX, *WHOLE), "mean": (*REAL, *COMPLEX),
            "max": (*REAL, *WHOLE, "bool"), "min": (*REAL, *WHOLE, "bool"), "any": MOVED, "all": MOVED}  # fmt: skip
LATE = ("fcoll.vary", "fcoll.split", "fcoll.prefix_sum", "fcoll.argmax", "fcoll.argmin")  # cannot be started


@st.composite
def right_calls(draw: Callable[..., Any]) -> str:
    name = draw(choice([name for name in FUNCTIONS if name.startswith("fcoll")]))
    function, call = FUNCTIONS[name], name.strip()
    given = {
        key: draw(choice(slot.right))
        for key, slot in function.slots.items()
        if key in NEEDED.get(name, ()) or (key != "recv_sizes" and draw(st.booleans()))
    }
    op = given.get("op", "'sum'").strip("'")
    if op in ("sum", "max", "min") and "op" in given and call != "fcoll.reduce_scatter" and draw(choice((0, 0, 1))):
        op = draw(choice(("any", "all")))
        given["op"] = repr(op)
    dtypes: tuple[str, ...] = MOVED
    if call in ("fcoll.all_reduce", "fcoll.reduce", "fcoll.reduce_scatter", "fcoll.prefix_sum"):
        dtypes = OPERANDS[op]
    elif call in ("fcoll.argmax", "fcoll.argmin"):
        dtypes = OPERANDS["max"]
    cut = any("axis" in key or "sizes" in key for key in function.slots)
    shapes: tuple[str, ...] = SQUARE if cut else (*SQUARE, *SHAPES)
    if cut and "sizes" not in name + "".join(function.slots) and given.get("tiled") != "False":
        shapes += TILES
    leaves = []
    for _ in range(draw(st.integers(1, 3))):
        dtype = draw(choice(dtypes))
        leaf = draw(choice(shapes)).replace("(D", f"(dtype='{dtype}'").replace("D", f", dtype='{dtype}'")
        conj = dtype in COMPLEX and draw(st.booleans())
        leaves.append(leaf + ".conj()" * conj)
    if not cut and op in ("sum", "max", "any") and call != "fcoll.argmax" and draw(choice((False, False, True))):
        leaves.append(draw(choice(("2.5", "3", "torch.tensor(1.5)"))))
    many = ", ".join(leaves)
    tree = draw(choice((f"[{many}]", f"{{'a': ({many},), 'b': None}}", f"Head([{many}])")))
    if len(leaves) == 1 and draw(st.booleans()):
        tree = many
    arguments = "".join(f", {key}={value}" for key, value in given.items())
    late = call in LATE or "sizes" in arguments or "sizes" in name
    if not late and draw(choice((False, False, True))):
        return f"fcoll.wait(fcoll.start({call}, {tree}, g{arguments}))"
    return f"{call}({tree}, g{arguments})"


def drawn(strategy: st.SearchStrategy[T], count: int) -> list[T]:
    """So many different examples, always the same."""
    found: dict[T, None] = {}

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def collect(example: T) -> None:
        found[example] = None

    collect()
    return list(found)


@functools.cache
def wrong_calls() -> list[Wrong]:
    """Of groups."""
    others = [Wrong(template.replace("ARG", code)) for template, codes in OTHERS.items() for code in codes]
    return [*drawn(wrong_collectives(), 5000), *drawn(wrong_ragged(), 400), *others]


@functools.cache
def right() -> list[str]:
    return drawn(right_calls(), 360)


@functools.cache
def wrong_maps() -> list[Wrong]:
    """Of maps, meshes and specs."""
    plain = [Wrong(template.replace("ARG", code)) for template, codes in MAPS.items() for code in codes]
    return [*plain, *drawn(wrong_leaves_of_maps(), 300)]
