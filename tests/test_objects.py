"""Trees that only the source knows, and objects: values, errors on every rank, and headers that cannot run code."""

from __future__ import annotations

import collections
import contextlib
import json
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from common import Pools
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fcoll
from fcoll import headers, objects
from fcoll.headers import DTYPES, Malformed, Unfit

# torch warns once about complex32, in the test and on the ranks, which have its filters
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def same(got: Any, want: Any) -> None:
    """Equal to the bit, of the same types, keys in the same order."""
    assert type(got) is (Tensor if isinstance(want, Tensor) else type(want))
    if isinstance(want, Tensor):
        assert (got.dtype, got.shape, got.requires_grad) == (want.dtype, want.shape, False)
        assert got.is_contiguous()
        assert torch.equal(got.to(torch.complex128), want.detach().to(torch.complex128))
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for each in zip(got, want, strict=True):
            same(*each)
    else:
        assert repr(got) == repr(want)  # NaN and -0.0 too


def every_kind(seed: int) -> dict[str | int, Any]:
    """A tree with everything that a header can hold."""
    torch.manual_seed(seed)
    z = torch.randn(3, dtype=torch.complex64)
    tree: dict[str | int, Any] = {
        "z": torch.randn(2, 3).t(),
        3: [1, -(10**50), True, None, "größer \ud800", b"\x00\xff", 1 - 2j],
        "floats": [2.5, -0.0, float("inf"), float("nan"), 0.1, complex("nan-infj")],
        "a": collections.OrderedDict(y=torch.tensor(seed), x=(), w=[[], {}]),
        "views": (z.conj(), z.conj().imag, torch.arange(6)[::2], torch.ones(1).expand(4)),
        "empty": [torch.empty(0, 3), torch.empty(0, dtype=torch.float8_e5m2)],
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "large": torch.randn(700, 700),
    }
    whole = torch.arange(1, 6) + seed
    tree |= {
        name: (whole.to(torch.complex64) if dtype.is_complex else whole).to(dtype) for name, dtype in DTYPES.items()
    }
    return tree


# ---- headers


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.zeros(shape, dtype=torch.int8))
)
TREES = st.recursive(
    LEAVES,
    lambda each: (
        st.lists(each)
        | st.lists(each).map(tuple)
        | st.dictionaries(st.text() | st.integers(), each)
        | st.dictionaries(st.text(), each).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=100, database=None)
@given(TREES)
def test_a_header_holds_a_tree(tree: Any) -> None:
    data, tensors = headers.write(tree)
    header = headers.read(data)
    assert [(slot.dtype, slot.shape) for slot in header.slots] == [(x.dtype, tuple(x.shape)) for x in tensors]
    same(headers.fill(header, tensors), tree)


class Pair(NamedTuple):
    first: Any
    second: Any


x = torch.ones(2)
HOLDS = "leaves are tensors, numbers, str, bytes and None, in dicts, lists and tuples; see broadcast_object"
UNFIT = {
    f"tree['a'][1] is a set; {HOLDS}": {"a": (x, {1})},
    f"tree[0][-3] is a Pair; {HOLDS}": [{-3: Pair(x, x)}],
    f"tree is a function; {HOLDS}": lambda: x,
    f"tree['k'] is a Size; {HOLDS}": {"k": x.shape},
    f"tree[0] is a defaultdict; {HOLDS}": [collections.defaultdict(int)],
    f"tree[0] is a device; {HOLDS}": [x.device],
    "tree['w'] has the key 1.5, a float; keys are str and int": {"w": {1.5: x}},
    "tree has the key True, a bool; keys are str and int": {True: x},
    "tree['s'] is torch.sparse_coo; only strided tensors can be sent: use .to_dense()": {"s": torch.eye(2).to_sparse()},
    "tree[0] is torch.bits8, which cannot be sent; convert it": [torch.empty(2, dtype=torch.bits8)],
    "tree is on the meta device, and has no values to send": torch.empty(2, device="meta"),
    "tree[0] is an integer of 8193 bits, more than 8192": [1 << 8192],
}


@pytest.mark.parametrize("text", UNFIT)
def test_what_a_header_cannot_hold_is_named(text: str) -> None:
    with pytest.raises(Unfit) as caught:
        headers.write(UNFIT[text])
    assert str(caught.value) == text


def test_a_tree_that_is_too_large_or_too_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: list[Any] = []
    endless: list[Any] = deep
    for _ in range(99):
        deep = [deep]
    same(headers.fill(headers.read(headers.write(deep)[0]), []), deep)
    endless.append(deep)
    with pytest.raises(Unfit, match="tree is nested more than 100 deep"):
        headers.write(deep)
    with monkeypatch.context() as patch:
        patch.setattr(headers, "MAX_HEADER", 20)
        with pytest.raises(Unfit, match=r"43 bytes of structure and plain leaves, more than 20; send them as tensors"):
            headers.write("x" * 20)
    monkeypatch.setattr(headers, "MAX_TENSORS", 7)
    with pytest.raises(Unfit, match="more than 7 bytes of tensors"):
        headers.write([x])


MALFORMED = [
    b"",
    b"\xff",
    b"{",
    b"null",
    b"[" * 100_000,
    b'{"tree":1}',
    b'{"tree":1,"version":2}',
    b'{"tree":1,"version":1,"more":2}',
    b'{"refusal":"","version":1}',
    b'{"refusal":["x"],"version":1}',
    b'{"version":1,"tree":' + b"9" * 10_000 + b"}",
    *(
        json.dumps({"tree": node, "version": 1}).encode()
        for node in (
            {},
            {"a": 1},
            [],
            [1],
            ["set", 1],
            ["list", ["object", "os.system"]],
            ["complex", 1, 2],
            ["complex", 1.0],
            ["bytes", "A"],
            ["bytes", "é"],
            ["dict", 1],
            ["dict", ["a"]],
            ["dict", [1.5, 1]],
            ["dict", [True, 1]],
            ["dict", ["a", 1], ["a", 2]],
            ["tensor"],
            ["tensor", "float32"],
            ["tensor", "float33", "cpu"],
            ["tensor", "__class__", "cpu"],
            ["tensor", "float32", "meta"],
            ["tensor", "float32", "cpu:0; import os"],
            ["tensor", "float32", "cpu", -1],
            ["tensor", "float32", "cpu", 1.0],
            ["tensor", "float32", "cpu", True],
            ["tensor", "float32", "cpu", 1 << 50],
            ["tensor", "float32", "cpu", 0, 1 << 50],
            ["tensor", "float32", "cpu", *[1] * 65],
            ["list", *[["tensor", "float64", "cpu", 1 << 41]] * 2],
        )
    ),
]


@pytest.mark.parametrize("data", MALFORMED, ids=lambda data: data[:40].decode("latin1"))
def test_what_is_no_header(data: bytes) -> None:
    with pytest.raises(Malformed):
        headers.read(data)


_events: list[str] = []
_listening = False


def _hook(event: str, _: Any) -> None:
    if _listening and event.split(".")[0] in _CODE:
        _events.append(event)


_CODE = {"compile", "exec", "import", "pickle", "marshal", "open", "os", "subprocess", "socket", "ctypes", "code"}


@contextlib.contextmanager
def no_code_runs() -> Iterator[None]:
    """The interpreter reports no event of running, importing or opening anything."""
    global _listening
    sys.addaudithook(_hook)  # for good: there is no way to take it off
    _listening = True
    with pytest.raises(SyntaxError):
        compile("the hook hears this)", "", "exec")
    assert _events.pop() == "compile"
    yield
    _listening = False
    assert _events == []


def test_tampered_headers_run_no_code() -> None:
    """Any change of bytes gives an error, or another tree of plain values."""
    tree = {"a": [1, 2.5, "text", b"bytes", 1j, None], "b": ({}, torch.ones(2, 3)), "c": collections.OrderedDict(k=x)}
    original, _ = headers.write(tree)
    poisons = [pickle.dumps(Pair(1, 2)), b"__import__('os').system('true')", b'["tensor"', b'{"tree":', b"],[", b'"']
    draw = random.Random(0)
    tampered: list[bytes] = []
    for _ in range(3000):
        data = bytearray(original)
        for _ in range(draw.choice((1, 1, 3))):
            at = draw.randrange(len(data))
            match draw.randrange(4):
                case 0:
                    data[at] = draw.randrange(32, 127)
                case 1:
                    del data[at : at + draw.randint(1, 9)]
                case 2:
                    data[at:at] = draw.choice(poisons)
                case 3:
                    other = draw.randrange(len(data))
                    data[at : at + 5] = data[other : other + 5]
        tampered.append(bytes(data))
    trees: list[Any] = []
    with no_code_runs():
        for each in tampered:
            with contextlib.suppress(Malformed):
                header = headers.read(each)
                trees.append(headers.fill(header, [x] * len(header.slots)))
    assert 20 < len(trees) < 2000
    for tree in trees:
        headers.write(tree)  # it is made of what headers hold


# ---- on ranks


def failure(call: Callable[[], Any]) -> str:
    try:
        return f"returned {call()}"
    except fcoll.FcollError as error:
        return f"{type(error).__name__}: {error}"


def test_broadcast_tree(ranks: Pools) -> None:
    def f() -> None:
        rank = dist.get_rank()
        mine = every_kind(rank)
        for src in (0, 2):
            got = fcoll.broadcast_tree(mine if rank == src else object(), fcoll.WORLD, src)
            same(got, every_kind(src))
        assert fcoll.broadcast_tree(rank, fcoll.WORLD) == 0
        if rank == 2:  # which was the last source: what it got is its own
            for key in ("large", "parameter", "int8"):
                before = mine[key].clone()
                got[key].add_(1)
                assert torch.equal(mine[key], before)
            got[3].append(1)
            assert len(mine[3]) == 7

    ranks(3).run(f)


def test_all_gather_tree(ranks: Pools) -> None:
    def f() -> None:
        rank = dist.get_rank()
        mine = every_kind(rank)
        got = fcoll.all_gather_tree(mine, fcoll.WORLD)
        for source in range(3):
            same(got[source], every_kind(source))
        for y in got:
            y["large"].zero_()
            assert y["large"].untyped_storage().nbytes() == y["large"].nbytes

        def of(rank: int) -> Any:
            return [{"loss": 0.5 * rank, "n": torch.arange(rank)}, torch.full((2,), rank, dtype=torch.int32)][rank:]

        same(fcoll.all_gather_tree(of(rank), fcoll.WORLD), [of(0), of(1), of(2)])

    ranks(3).run(f)


def test_the_order_of_a_group(ranks: Pools) -> None:
    def f() -> None:
        rank = dist.get_rank()
        if rank == 1:
            return
        group = fcoll.group([2, 0])
        tree = {"rank": rank, "x": torch.tensor([rank])}
        two, zero = [{"rank": r, "x": torch.tensor([r])} for r in (2, 0)]
        same(fcoll.broadcast_tree(tree, group, 0), two)
        same(fcoll.broadcast_tree(tree, group, 1), zero)
        same(fcoll.all_gather_tree(tree, group), [two, zero])
        assert fcoll.broadcast_object({rank}, group, 1) == {0}
        assert fcoll.all_gather_object({rank}, group) == [{2}, {0}]

    ranks(3).run(f)


def test_subgroups(ranks: Pools) -> None:
    def f() -> list[Any]:
        pairs, uneven = (fcoll.subgroups(fcoll.WORLD, each) for each in ([[2, 0], [1, 3]], [[0, 1], [2], [3]]))
        rank = dist.get_rank()
        return [
            fcoll.broadcast_tree(rank, pairs, 1),
            fcoll.all_gather_tree(rank, pairs),
            fcoll.broadcast_tree(rank, uneven),
            failure(lambda: fcoll.all_gather_tree(rank, uneven)),
        ]

    for rank, (root, pair, first, uneven) in enumerate(ranks(4).run(f)):
        assert (root, pair) == ((0, [2, 0]) if rank in (0, 2) else (3, [1, 3]))
        assert first == (0, 0, 2, 3)[rank]
        assert uneven.startswith("CollectiveValueError: all_gather_tree: the subgroups of ")
        assert uneven.endswith(" have different sizes")


def test_three_messages_whatever_the_number_of_tensors(ranks: Pools) -> None:
    def f() -> int:
        calls = []
        real = fcoll.broadcast

        def counted(tree: Any, *args: Any) -> Any:
            calls.append(tree)
            return real(tree, *args)

        vars(objects)["broadcast"] = counted
        try:
            fcoll.broadcast_tree([torch.ones(3)] * 200, fcoll.WORLD)
        finally:
            vars(objects)["broadcast"] = real
        return len(calls)

    assert ranks(2).run(f) == [3, 3]


def test_a_tree_that_cannot_be_sent_is_an_error_on_every_rank(ranks: Pools) -> None:
    def f() -> list[str]:
        rank = dist.get_rank()
        good, bad = {"a": [torch.ones(2)]}, {"a": [{1}]}
        return [
            failure(lambda: fcoll.broadcast_tree(bad if rank == 1 else good, fcoll.WORLD, 1)),
            failure(lambda: fcoll.all_gather_tree(bad if rank == 1 else good, fcoll.WORLD)),
            failure(lambda: fcoll.broadcast_object(f if rank else lambda: 0, fcoll.WORLD)),
            failure(lambda: fcoll.all_gather_object(sys._getframe() if rank else 0, fcoll.WORLD)),
            failure(lambda: fcoll.broadcast_tree([], fcoll.WORLD, 2)),
            failure(lambda: fcoll.all_gather_tree(rank, fcoll.WORLD)),
        ]

    want = [
        f"CollectiveTypeError: broadcast_tree: tree['a'][0] is a set; {HOLDS}",
        f"CollectiveTypeError: all_gather_tree: on rank 1, tree['a'][0] is a set; {HOLDS}",
        "CollectiveTypeError: broadcast_object: the object cannot be pickled: ",
        "CollectiveTypeError: all_gather_object: on rank 1, the object cannot be pickled: ",
        "CollectiveValueError: broadcast_tree: src=2 is not a rank of process group",
        "returned [0, 1]",
    ]
    for got in ranks(2).run(f):
        for text, start in zip(got, want, strict=True):
            assert text.startswith(start)


def test_what_is_no_header_is_an_error_on_every_rank(ranks: Pools) -> None:
    """A source sends bytes that are no header, a device that no rank has, no header at all; a rank cannot read it."""

    def f() -> list[str]:
        read, write, most, rank = headers.read, headers.write, headers.MAX_HEADER, dist.get_rank()
        found = []

        def call() -> None:
            found.append(failure(lambda: fcoll.broadcast_tree(1, fcoll.WORLD, 1)))

        def refuse(_: bytes) -> Any:
            raise Malformed("for the test")

        try:
            for node in (["os.system"], ["tensor", "float32", "cuda", 2]):
                data = json.dumps({"tree": node, "version": headers.VERSION}).encode()
                vars(headers)["write"] = lambda _, data=data: (data, [torch.ones(2)])
                call()
            vars(headers).update(write=write, VERSION=2 if rank == 1 else 1)
            call()
            vars(headers).update(VERSION=1, MAX_HEADER=0)
            call()
            vars(headers).update(MAX_HEADER=most, read=refuse if rank == 2 else read)
            call()
        finally:
            vars(headers).update(read=read, write=write, VERSION=1, MAX_HEADER=most)
        call()
        return found

    value = "CollectiveValueError: broadcast_tree: "
    for rank, (malformed, device, version, size, reader, after) in enumerate(ranks(3).run(f)):
        assert malformed == value + "the header of rank 1 is malformed: ['os.system'] is no part of a tree"
        assert device.startswith(value + f"rank {rank} cannot make a tensor on cuda: ")
        if rank == 1:
            assert version == value + "it failed on ranks [0, 2], whose errors say why"
        else:
            said = "it is of version 2, and this fcoll reads 1"
            assert version == value + f"the header of rank 1 is malformed: {said}"
        assert size == value + "no header came from rank 1; do all ranks make this call?"
        if rank == 2:
            assert reader == value + "the header of rank 1 is malformed: for the test"
        else:
            assert reader == value + "it failed on ranks [2], whose errors say why"
        assert after == "returned 1"


def test_trees_are_never_pickled(ranks: Pools) -> None:
    def f() -> list[Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise AssertionError("pickled")

        kept = pickle.loads, pickle.dumps, pickle.Unpickler, pickle.Pickler
        pickle.loads = pickle.dumps = pickle.Unpickler = pickle.Pickler = refuse  # type: ignore[assignment, misc]
        try:
            got = fcoll.broadcast_tree(every_kind(0), fcoll.WORLD), fcoll.all_gather_tree(every_kind(1), fcoll.WORLD)
        finally:
            pickle.loads, pickle.dumps, pickle.Unpickler, pickle.Pickler = kept  # type: ignore[misc]
        return [len(got[0]), len(got[1])]

    assert ranks(2).run(f) == [[len(every_kind(0)), 2]] * 2


def test_objects(ranks: Pools) -> None:
    def f() -> None:
        rank = dist.get_rank()
        mine = {"set": {rank}, "size": torch.Size([rank]), "tensor": torch.full((rank + 1,), rank)}
        got = [fcoll.broadcast_object(mine, fcoll.WORLD, 1), *fcoll.all_gather_object(mine, fcoll.WORLD)]
        for source, each in zip((1, 0, 1), got, strict=True):
            assert (each["set"], each["size"], each["tensor"].tolist()) == (
                {source}, torch.Size([source]), [source] * (source + 1)
            )  # fmt: skip
            assert each["set"] is not mine["set"]

    ranks(2).run(f)


@pytest.mark.parametrize("name", objects.__all__)
def test_where_they_cannot_be_called(name: str) -> None:
    f = getattr(fcoll, name)
    with pytest.raises(TypeError, match=f"{name}: 'i' is an emulated axis, whose ranks share their Python objects"):
        fcoll.vmap(lambda x: f({"x": x}, "i"), axis_name="i")(x)
    with pytest.raises(NameError, match=f"{name}: axis name 'j' is not bound"):
        f(1, "j")
    with pytest.raises(ValueError, match=f"{name}: torch.distributed is not initialised"):
        f(1, fcoll.WORLD)


def test_what_does_not_know_values(ranks: Pools) -> None:
    def f() -> list[str]:
        def call(x: Any) -> Any:
            return fcoll.broadcast_tree({"x": x}, fcoll.WORLD)["x"]

        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        functions = (torch.func.grad(call), compiled, fcoll.trace(call))
        return [failure(lambda each=each: each(torch.tensor(1.0))).split("\n")[0] for each in functions]  # type: ignore[misc]

    text = "it needs values, which transforms, compilers and traces do not have; call it outside of them"
    for got in ranks(2).run(f):
        assert got == [f"CollectiveValueError: broadcast_tree: {text}"] * 3


def test_gradients_end_here(ranks: Pools) -> None:
    def f() -> tuple[bool, bool]:
        x = torch.ones(2, requires_grad=True)
        tree = {"x": 2 * x}
        return fcoll.broadcast_tree(tree, fcoll.WORLD)["x"].requires_grad, tree["x"].requires_grad

    assert ranks(2).run(f) == [(False, True)] * 2
