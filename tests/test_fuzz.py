"""Generated calls: wrong ones raise before anything is sent, right ones agree between emulation and process groups."""

from __future__ import annotations

import functools
import random
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest import mock

import fuzzing
import pytest
import torch
import torch.distributed as dist
from common import Pools, grad
from fuzzing import Wrong
from places import made
from torch import Tensor

import fcoll
from fcoll import _torch, recorder, trees
from fcoll.testing import Ranks

KINDS = (ValueError, TypeError, NameError)


class Told(NamedTuple):
    """What became of a call."""

    kinds: tuple[str, ...]
    message: str  # the first line, without what must differ between the substrates
    sent: int  # collectives that have run


def told(f: Callable[[], Any], *labels: str) -> Told:
    sent: list[str] = []

    def tell(name: str, x: Tensor, *_: Any) -> None:
        if not _torch.tracing(x):  # shard_map tries f out on fake tensors
            sent.append(name)

    with mock.patch.object(recorder, "tell", tell):
        try:
            f()
        except Exception as error:
            kinds = [kind.__name__ for kind in (fcoll.FcollError, *KINDS) if isinstance(error, kind)]
            text = (str(error).splitlines() or [""])[0]
            for label in labels:
                text = text.replace(label, "<group>")
            text = re.sub("is not bound; .*", "is not bound", text)  # what is bound follows
            text = re.sub(" at 0x[0-9a-f]+", "", text)
            return Told(tuple(kinds) or (type(error).__name__,), text, len(sent))
    return Told((), "nothing raised", len(sent))


def emulated(code: str, n: int) -> Told:
    def call(rank: Tensor) -> None:
        fuzzing.run(code, "i", n, rank)

    return told(lambda: fcoll.vmap(call, axis_name="i")(torch.arange(n)), "'i'")


def on_a_group(codes: Iterable[str], n: int) -> list[Told]:
    rank, name = dist.get_rank(), f"process group {fcoll.groups.resolve('', fcoll.WORLD).layout.process!r}"
    return [told(functools.partial(fuzzing.run, code, fcoll.WORLD, n, rank), name) for code in codes]


def of_maps(codes: Iterable[str], n: int, mesh: Any) -> list[Told]:
    return [told(functools.partial(fuzzing.run, code, None, n, 0, mesh)) for code in codes]


def unlike(wrong: Wrong, got: Told, *others: Told) -> list[str]:
    """What is wrong with the answer to a wrong call."""
    documented = len(got.kinds) == 2 and got.kinds[0] == "FcollError"
    named = not wrong.path or f" {wrong.path} " in got.message
    if documented and named and not got.sent and all(other == got for other in others):
        return []
    return [f"{wrong.code}\n" + "".join(f"    {answer}\n" for answer in (got, *others))]


def report(problems: Iterable[list[str]]) -> None:
    found = [problem for some in problems for problem in some]
    assert not found, f"{len(found)} answers\n" + "".join(found[:30])


def about_groups() -> list[Wrong]:
    return [wrong for wrong in fuzzing.wrong_calls() if not wrong.code.startswith(fuzzing.ABOUT_PROCESSES)]


@functools.cache
def in_emulation(n: int) -> list[Told]:
    return [emulated(wrong.code, n) for wrong in about_groups()]


def test_wrong_calls_in_emulation() -> None:
    assert len(about_groups()) + len(fuzzing.wrong_maps()) > 5000
    report(map(unlike, about_groups(), in_emulation(2)))


def test_wrong_calls_on_groups(ranks: Pools) -> None:
    """Every rank says the same, and what emulation says; then a sum still works."""
    for n, wrongs in ((2, fuzzing.wrong_calls()), (3, fuzzing.wrong_calls()[::7])):
        codes = [wrong.code for wrong in wrongs]

        def f(codes: list[str] = codes, n: int = n) -> tuple[list[Told], float]:
            return on_a_group(codes, n), float(fcoll.all_reduce(1.0, fcoll.WORLD))

        answers = ranks(n).run(f, timeout=150)
        assert [total for _, total in answers] == [n] * n
        here = dict(zip(about_groups(), in_emulation(2), strict=True)) if n == 2 else {}
        problems = []
        for i, wrong in enumerate(wrongs):
            everywhere = [told[i] for told, _ in answers]
            if not wrong.code.startswith(fuzzing.ABOUT_PROCESSES):
                everywhere.append(here.get(wrong) or emulated(wrong.code, n))
            problems.append(unlike(wrong, *everywhere))
        report(problems)


def test_wrong_calls_on_the_fake_backend() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=store, rank=1, world_size=2)
    try:
        got = on_a_group([wrong.code for wrong in about_groups()], 2)
    finally:
        dist.destroy_process_group()
    report(map(unlike, about_groups(), got, in_emulation(2)))


def test_wrong_maps(ranks: Pools) -> None:
    """On a virtual mesh, and on one of processes."""
    wrongs = fuzzing.wrong_maps()
    codes = [wrong.code for wrong in wrongs]

    def f() -> list[Told]:
        return of_maps(codes, 2, made(a=2))

    report(map(unlike, wrongs, of_maps(codes, 2, fcoll.virtual_mesh(a=2)), *ranks(2).run(f)))


def compilable(wrongs: list[Wrong], count: int) -> list[Wrong]:
    """A sample of what Dynamo can make in a graph."""
    simple = re.compile(r"[\w\s\[\](){}.,:'=+*<>-]*")
    words = (
        "np.",
        "object",
        "float8",
        "complex32",
        "sparse",
        "torch.",
        "token",
        "iter",
        " f)",
        " f,",
        "(f,",
        "Exc",
        "print",
    )
    found = [w for w in wrongs if simple.fullmatch(w.code) and not any(word in w.code for word in words)]
    return random.Random(0).sample(found, count)


def compiled(codes: list[str], n: int, group: Any, wrap: bool) -> list[Told]:
    """The same calls in whole graphs."""
    out = []
    for code in codes:
        torch.compiler.reset()
        call: Callable[..., Any] = eval(f"lambda rank: {code}", scope(n, group))
        run = torch.compile(fcoll.vmap(call, axis_name="i") if wrap else call, fullgraph=True, backend="eager")
        argument = torch.arange(n) if wrap else torch.tensor(dist.get_rank())
        name = "'i'" if wrap else f"process group {fcoll.groups.resolve('', group).layout.process!r}"
        out.append(told(functools.partial(run, argument), name))
    return out


def scope(n: int, group: Any) -> dict[str, Any]:
    names = fuzzing.scope(group, n, 0)
    names["t"] = lambda *shape, dtype="float32": torch.ones(shape, dtype=getattr(torch, dtype))
    return names


def test_compiled_wrong_calls_say_the_same(ranks: Pools) -> None:
    wrongs = compilable(about_groups(), 40)
    codes = [wrong.code for wrong in wrongs]
    with Ranks(1) as own:  # a failed compile can leave functorch's stack dirty
        (here,) = own.run(compiled, codes[:20], 2, "i", True)
    there = ranks(2).run(compiled, codes[20:], 2, fcoll.WORLD, False)
    want = [emulated(code, 2) for code in codes]
    report(map(unlike, wrongs[:20], here, want[:20]))
    report(map(unlike, wrongs[20:], *there, want[20:]))


# ---- what no generated code holds


def test_tensors_that_are_no_plain_ones(ranks: Pools) -> None:
    """Quantized tensors crashed the process, nested ones looked like a rank that has died."""

    def body() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of its own prototypes
            x = torch.ones(2)
            quantized = torch.quantize_per_tensor(x, 1.0, 0, torch.quint8)
            nested = torch.nested.nested_tensor([x, torch.ones(3)])
            jagged = torch.nested.nested_tensor([x, torch.ones(3)], layout=torch.jagged)
        for leaf, text in (
            (quantized, "is torch.quint8, which torch can neither move nor reduce"),
            (nested, "is a nested tensor, whose rows differ in shape"),
            (jagged, "is torch.jagged; only strided tensors"),
        ):
            for call in (fcoll.all_reduce, fcoll.all_gather, fcoll.broadcast, fcoll.shift):
                with pytest.raises(TypeError, match=re.escape(f"{call.__name__}: tree['a'] {text}")):
                    call({"a": leaf}, fcoll.WORLD if dist.is_initialized() else ())
            with pytest.raises(TypeError):
                fcoll.vmap(lambda x: x, axis_name="i")(nested)

    body()
    ranks(2).run(body)


def test_trees_without_an_end() -> None:
    ring: list[Any] = []
    ring.append(ring)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for tree in (ring, deep):
        with pytest.raises(ValueError, match="a tree holds itself, or is nested too deeply"):
            fcoll.all_reduce(tree, ())


# ---- right calls


class Leaf(NamedTuple):
    """A tensor in a form that can be pickled, whatever its dtype, and compared bit by bit."""

    dtype: str
    shape: tuple[int, ...]
    values: Tensor


def plain(x: Tensor) -> Leaf:
    y = x.detach().resolve_conj().contiguous()
    if x.dtype not in _COMPARED:
        y = (torch.view_as_real(y) if x.is_complex() else y).unsqueeze(-1).clone().view(torch.uint8)
    return Leaf(str(x.dtype), tuple(x.shape), y)


_COMPARED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def outcome(code: str, group: Any, n: int, rank: Any) -> list[Tensor]:
    """The leaves of the result, and the derivative of a weighted sum of them with respect to a factor of all inputs."""

    def loss(w: Tensor) -> Tensor:
        total = 0 * w
        for leaf in trees.flatten(fuzzing.run(code, group, n, rank, w=w))[0]:
            if leaf.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
                weights = torch.arange(leaf.numel()).view(leaf.shape) % 5 + 1 + rank
                total = total + (leaf.real if leaf.is_complex() else leaf).mul(weights).sum()
        return total

    return [*trees.flatten(fuzzing.run(code, group, n, rank))[0], grad(loss)(torch.tensor(1.0))]


def same(got: list[Leaf], want: list[Leaf], at: str) -> None:
    """Bit by bit, but for means and derivatives."""
    assert [leaf[:2] for leaf in got] == [leaf[:2] for leaf in want], at
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        exact = i < len(want) - 1 and "'mean'" not in at
        rough = 0.0 if exact else 1e-2 if a.values.dtype.itemsize == 2 else 1e-5
        text = f"{at}, leaf {i}: {a.values} != {b.values}"
        torch.testing.assert_close(a.values, b.values, rtol=rough, atol=rough, equal_nan=True, msg=text)


def here(code: str, size: int) -> list[list[Leaf]]:
    """In emulation, per rank."""
    out = fcoll.vmap(lambda rank: outcome(code, "i", size, rank), axis_name="i")(torch.arange(size))
    return [[plain(y[rank]) for y in out] for rank in range(size)]


def test_right_calls_of_no_axis() -> None:
    """An empty tuple of names is a group of one rank."""
    for code in fuzzing.right()[::3]:
        same(list(map(plain, outcome(code, (), 1, torch.tensor(0)))), here(code, 1)[0], code)


@pytest.mark.parametrize("n", [2, 3])
def test_right_calls(ranks: Pools, n: int) -> None:
    """Every dtype, layout and odd shape; on the world, on a group in another order, and on groups of one rank."""
    codes = fuzzing.right()[n::2]

    def f() -> list[tuple[int, int, list[list[Leaf]]]]:
        backwards = fcoll.group(list(reversed(range(n))))
        alone = fcoll.group([dist.get_rank()])
        out = []
        for group, some in ((fcoll.WORLD, codes), (backwards, codes[::2]), (alone, codes[::2])):
            size, rank = fcoll.axis_size(group), int(fcoll.axis_index(group))
            out.append((size, rank, [list(map(plain, outcome(code, group, size, rank))) for code in some]))
        return out

    want = {(code, size): here(code, size) for code in codes for size in {n, 1}}
    for answers in ranks(n).run(f, timeout=150):
        for which, (size, rank, results) in enumerate(answers):
            for code, got in zip(codes[:: 2 if which else 1], results, strict=True):
                same(got, want[code, size][rank], f"{code} on rank {rank} of {size}")
