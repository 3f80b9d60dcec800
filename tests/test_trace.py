"""`fcoll.trace`: what is listed, byte by byte, for programs whose messages are counted by hand."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import Pools, grad, jvp, vjp, vmap
from places import made, whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll import P, recorder
from fcoll.tracing import Record

HERE = "test_trace.py"


def line(f: Callable[..., Any], code: str) -> str:
    """Where in this file `f` says `code`."""
    lines, first = inspect.getsourcelines(f)
    (number,) = (max(first, 1) + i for i, text in enumerate(lines) if code in text)
    return f"{HERE}:{number}"


def short(found: fcoll.Trace) -> list[tuple[Any, ...]]:
    return [(r.collective, r.axis, r.n, r.shape, r.phase) for r in found]


# ---- a Megatron MLP


def loss(w1: Tensor, w2: Tensor, x: Tensor, t: Tensor) -> Tensor:
    y = fcoll.all_reduce(torch.relu(x @ w1) @ w2, "tp")
    return fcoll.all_reduce(((y - t) ** 2).mean(), "dp", "mean")


SPECS = (P(None, "tp"), P("tp"), P("dp"), P("dp"))


def megatron(mesh: Any) -> Any:
    return fcoll.shard_map(loss, mesh, SPECS, P())


def megatron_arguments() -> list[Tensor]:
    return [torch.ones(shape) for shape in ((8, 16), (16, 8), (12, 8), (12, 8))]


def gradients(mapped: Any) -> Any:
    return lambda *args: grad(mapped, (0, 1))(*args)  # the call


def expected() -> list[Record]:
    """On a mesh of dp=2, tp=4. Per rank: 6 rows, 4 hidden units."""
    tp, dp = line(loss, '"tp")'), line(loss, '"dp"')
    call = line(gradients, "# the call")
    ahead, back = "forward", "backward"
    return [
        Record("all_reduce", "tp", 4, (6, 8), "float32", 192, 288, 576, ahead, tp),
        Record("all_reduce", "dp", 2, (), "float32", 4, 4, 4, ahead, dp),
        Record("all_reduce", "dp", 2, (), "float32", 4, 4, 4, back, dp),
        Record("all_reduce", "tp", 4, (6, 8), "float32", 192, 288, 576, back, tp),
        Record("all_reduce", "dp", 2, (4, 8), "float32", 128, 128, 128, back, call),  # w2 is replicated over dp,
        Record("all_gather", "tp", 4, (4, 8), "float32", 128, 384, 384, back, call),  # and comes back whole
        Record("all_reduce", "dp", 2, (8, 4), "float32", 128, 128, 128, back, call),  # w1
        Record("all_gather", "tp", 4, (8, 4), "float32", 128, 384, 384, back, call),
    ]


def test_the_gradient_of_a_megatron_mlp() -> None:
    mapped = megatron(fcoll.virtual_mesh(dp=2, tp=4))
    found = fcoll.trace(gradients(mapped))(*megatron_arguments())
    assert found.records == expected()
    assert list(found) == found.records
    assert len(found) == 8
    assert found.totals() == {
        "tp": {"collectives": 4, "payload": 640, "ring": 1344, "direct": 1920},
        "dp": {"collectives": 4, "payload": 264, "ring": 264, "direct": 264},
    }


def test_of_processes_one_rank_alone_can_ask(ranks: Pools) -> None:
    """Nothing is sent: the other ranks do not take part."""

    def body() -> Any:
        mesh = made(dp=2, tp=2)
        if dist.get_rank():
            return None
        found = fcoll.trace(gradients(megatron(mesh)))(*megatron_arguments())
        return short(found), found.totals()

    (got, totals), *others = ranks(4).run(body)
    assert others == [None] * 3
    virtual = fcoll.trace(gradients(megatron(fcoll.virtual_mesh(dp=2, tp=2))))(*megatron_arguments())
    assert got == short(virtual)
    assert totals == virtual.totals()


def test_of_processes_groups_need_not_be_there(ranks: Pools) -> None:
    def body() -> Any:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
        if dist.get_rank():
            return None

        def f(x: Tensor) -> Tensor:
            return fcoll.all_gather(fcoll.all_reduce(x, ("a", "b")), ("b", "c"))

        found = short(fcoll.trace(f, mesh)(torch.ones(3)))
        with fcoll.bind(mesh):
            assert short(fcoll.trace(f)(torch.ones(3))) == found
        assert short(fcoll.trace(fcoll.bind(mesh)(f))(torch.ones(3))) == found
        mapped = fcoll.shard_map(lambda x: fcoll.all_reduce(x, ("c", "b")), mesh, P(("c", "b")), P())
        return found, short(fcoll.trace(mapped)(torch.ones(4)))

    (direct, mapped), *_ = ranks(4).run(body)
    assert direct == [("all_reduce", "a,b", 2, (3,), "forward"), ("all_gather", "b,c", 2, (3,), "forward")]
    assert mapped == [("all_reduce", "c,b", 2, (2,), "forward")]


def test_backward_calls() -> None:
    def step(*args: Tensor) -> None:
        megatron(fcoll.virtual_mesh(dp=2, tp=4))(*args).backward()

    args = [x.requires_grad_(i == 1) for i, x in enumerate(megatron_arguments())]
    found = fcoll.trace(step)(*args)
    assert [(r.collective, r.axis, r.phase) for r in found] == [
        ("all_reduce", "tp", "forward"), ("all_reduce", "dp", "forward"), ("all_reduce", "dp", "backward"),
        ("all_reduce", "tp", "backward"), ("all_reduce", "dp", "backward"), ("all_gather", "tp", "backward"),
    ]  # fmt: skip
    assert all(x.grad is None for x in args)


def test_a_cluster_in_a_notebook() -> None:
    """4,096 ranks, and matrices that would not fit anywhere."""
    mapped = megatron(fcoll.virtual_mesh(dp=512, tp=8))
    width, rows = 2**16, 2**20
    args = [
        torch.zeros(()).expand(shape)
        for shape in ((width, 4 * width), (4 * width, width), (rows, width), (rows, width))
    ]
    found = fcoll.trace(gradients(mapped))(*args)
    assert short(found)[0] == ("all_reduce", "tp", 8, (rows // 512, width), "forward")
    payload = rows // 512 * width * 4
    assert (found.records[0].payload, found.records[0].ring) == (payload, 2 * payload * 7 // 8)
    assert [r.n for r in found] == [8, 512, 512, 8, 512, 8, 512, 8]
    assert found.records[4].payload == width * (width // 2) * 4


# ---- every collective


COLLECTIVES: dict[str, tuple[Callable[[Tensor], Any], tuple[int, int, int] | None, str]] = {
    # of 8 float32 on each of 4 ranks: (payload, ring, direct), and what its gradient communicates
    "all_reduce": (lambda x: fcoll.all_reduce(x, "i"), (32, 48, 96), "all_reduce"),
    "all_reduce mean": (lambda x: fcoll.all_reduce(x, "i", "mean"), (32, 48, 96), "all_reduce"),
    "all_reduce max": (lambda x: fcoll.all_reduce(x, "i", "max"), (32, 48, 96), "all_reduce"),
    "all_reduce invariant": (lambda x: fcoll.all_reduce(x, "i", invariant=True), (32, 48, 96), ""),
    "all_gather": (lambda x: fcoll.all_gather(x, "i"), (32, 96, 96), "reduce_scatter"),
    "all_gather invariant": (lambda x: fcoll.all_gather(x, "i", invariant=True), (32, 96, 96), ""),
    "reduce_scatter": (lambda x: fcoll.reduce_scatter(x, "i"), (32, 24, 24), "all_gather"),
    "all_to_all": (lambda x: fcoll.all_to_all(x, "i"), (32, 48, 24), "all_to_all"),
    "broadcast": (lambda x: fcoll.broadcast(x, "i", src=1), (32, 32, 96), "reduce"),
    "reduce": (lambda x: fcoll.reduce(x, "i"), (32, 32, 32), "broadcast"),
    "gather": (lambda x: fcoll.gather(x, "i", dst=2), (32, 96, 32), "scatter"),
    "scatter": (lambda x: fcoll.scatter(x, "i"), (32, 24, 24), "gather"),
    "permute": (lambda x: fcoll.permute(x, "i", [(0, 3), (2, 1)]), (32, 32, 32), "permute"),
    "permute as shift": (lambda x: fcoll.shift(x, "i", 2), (32, 32, 32), "permute"),
    "vary": (lambda x: fcoll.vary(x, "i"), None, "all_reduce"),
    "split": (lambda x: fcoll.split(x, "i"), None, "all_gather"),
    "axis_index": (lambda x: x * fcoll.axis_index("i"), None, ""),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective(name: str) -> None:
    f, sizes, backward = COLLECTIVES[name]
    mesh = fcoll.virtual_mesh(i=4)
    x = torch.ones(8)
    forward = [(name.split()[0], "i", 4, (8,), "float32", *sizes, "forward")] if sizes else []

    def fields(found: fcoll.Trace) -> list[tuple[Any, ...]]:
        return [tuple(r.__dict__.values())[:-1] for r in found]

    assert fields(fcoll.trace(f, mesh)(x)) == forward
    assert fields(fcoll.trace(fcoll.shard_map(f, mesh, P(), P("i")))(x)) == forward
    assert fields(fcoll.trace(fcoll.vmap(f, axis_name="i"))(x.expand(4, 8))) == forward

    found = fcoll.trace(lambda x: vjp(f, x)[1](f(x).detach()), mesh)(x)
    assert {r.source for r in found} <= {line(sys.modules[__name__], f'"{name}": (lambda')}  # type: ignore[arg-type]
    assert [r.collective for r in found if r.phase == "backward"] == ([backward] if backward else [])
    assert len(found) == 2 * bool(sizes) + bool(backward)


def test_dtypes_and_shapes() -> None:
    def f(tree: Any) -> Any:
        return fcoll.all_gather(tree, "i", tiled=False)

    tree = {
        "a": torch.ones(2, 3, dtype=torch.bfloat16),
        "b": [torch.ones(5, dtype=torch.bool), torch.ones((), dtype=torch.complex128)],
        "c": None, "d": 3, "e": torch.ones(0, 4),
    }  # fmt: skip
    found = fcoll.trace(f, fcoll.virtual_mesh(i=2))(tree)
    assert [(r.shape, r.dtype, r.payload) for r in found] == [
        ((2, 3), "bfloat16", 12), ((5,), "bool", 5), ((), "complex128", 16), ((), "int64", 8), ((0, 4), "float32", 0),
    ]  # fmt: skip


def test_small_leaves_travel_together_on_processes() -> None:
    """As they do when it runs; emulated axes have no messages to save."""
    tree = [torch.ones(2), torch.ones(3, 4), torch.ones(2**19), torch.ones(1, dtype=torch.float64)]
    found = fcoll.trace(lambda x: fcoll.all_reduce(x, "i"), fcoll.virtual_mesh(i=2))(tree)
    assert [(r.shape, r.dtype) for r in found] == [((14,), "float32"), ((2**19,), "float32"), ((1,), "float64")]
    stacks = [x.expand(2, *x.shape) for x in tree]
    found = fcoll.trace(fcoll.vmap(lambda x: fcoll.all_reduce(x, "i"), axis_name="i"))(stacks)
    assert [r.shape for r in found] == [(2,), (3, 4), (2**19,), (1,)]


def test_constants_are_not_sent(ranks: Pools) -> None:
    """torch's tracers compute what follows from constants as they go: the other rank would have to take part."""

    def body() -> Any:
        if dist.get_rank():
            return None

        def f(x: Tensor) -> Tensor:
            y = fcoll.all_reduce(torch.tensor(1.0), fcoll.WORLD) + fcoll.all_gather(torch.tensor([True]), fcoll.WORLD)
            y = y + fcoll.shift(torch.tensor([2]), fcoll.WORLD) + fcoll.broadcast(3, fcoll.WORLD)
            return x * y + fcoll.reduce(torch.tensor(1), fcoll.WORLD)

        graph = make_fx(f, tracing_mode="fake")(torch.ones(2)).graph
        sent = [node.target.__name__ for node in graph.nodes if "_c10d_functional" in str(node.target)]
        return [r.collective for r in fcoll.trace(f)(torch.ones(2))], sent

    (traced, sent), _ = ranks(2).run(body)
    assert traced == ["all_reduce", "all_gather", "permute", "broadcast", "reduce"]
    kinds = [name for name in sent if not name.startswith("wait")]
    assert kinds == [
        "all_reduce.default", "all_gather_into_tensor.default", "all_to_all_single.default", "broadcast.default",
        "all_reduce.default",
    ]  # fmt: skip


# ---- which groups, which functions


def test_groups() -> None:
    mesh = fcoll.virtual_mesh(a=2, b=3, c=1)
    pairs = fcoll.subgroups(("a", "b"), [[0, 1, 2, 3], [4, 5]])
    threes = fcoll.subgroups("b", [[0, 2], [1]])

    def f(x: Tensor) -> Tensor:
        x = fcoll.all_reduce(x, ("b", "a"))
        x = fcoll.all_reduce(x, pairs)  # unequal: the largest
        x = fcoll.broadcast(x, threes)
        x = fcoll.all_reduce(x, ("a", "c"))
        for nobody in ("c", (), ("c",)):
            x = fcoll.all_reduce(x, nobody)
        return x

    found = fcoll.trace(fcoll.shard_map(f, mesh, P(), P(("a", "b")), check=False))(torch.ones(6))
    assert [(r.collective, r.axis, r.n) for r in found] == [
        ("all_reduce", "b,a", 6), ("all_reduce", "a,b", 4), ("broadcast", "b", 2), ("all_reduce", "a,c", 2),
    ]  # fmt: skip


def test_emulated_axes() -> None:
    def f(x: Tensor) -> Tensor:
        return fcoll.all_reduce(fcoll.all_gather(x, "i"), ("i", "j"))

    nested = fcoll.vmap(fcoll.vmap(f, axis_name="i"), axis_name="j")
    found = fcoll.trace(nested)(torch.ones(3, 4, 5))
    assert short(found) == [("all_gather", "i", 4, (5,), "forward"), ("all_reduce", "i,j", 12, (20,), "forward")]
    derivative = fcoll.trace(lambda x: grad(lambda x: nested(x).sin().sum())(x))(torch.ones(3, 4, 5))
    assert short(derivative)[:2] == short(found)


def test_a_virtual_map_within_a_map() -> None:
    inner = fcoll.shard_map(lambda x: fcoll.all_reduce(x, "k"), fcoll.virtual_mesh(k=4), P("k"), P())
    outer = fcoll.shard_map(lambda x: fcoll.all_reduce(inner(x), "i"), fcoll.virtual_mesh(i=2), P("i"), P())
    assert short(fcoll.trace(outer)(torch.ones(16))) == [
        ("all_reduce", "k", 4, (2,), "forward"), ("all_reduce", "i", 2, (2,), "forward")
    ]  # fmt: skip


def test_a_batch_is_part_of_the_message() -> None:
    mapped = fcoll.shard_map(lambda x: fcoll.all_reduce(x, "i"), fcoll.virtual_mesh(i=2), P("i"), P())
    assert short(fcoll.trace(vmap(mapped))(torch.ones(5, 6))) == [("all_reduce", "i", 2, (5, 3), "forward")]
    pushed = fcoll.trace(lambda x: jvp(mapped, (x,), (x,)))(torch.ones(6))
    assert [r.shape for r in pushed] == [(3,), (3,)]  # the value and its tangent


def test_arguments_pass_through() -> None:
    def f(x: Tensor, *, times: int, tree: Any) -> Any:
        for _ in range(times):
            x = fcoll.all_reduce(x + tree["y"], "i")
        return x

    found = fcoll.trace(f, fcoll.virtual_mesh(i=2))(torch.ones(2), times=3, tree={"y": torch.ones(3, 1)})
    assert [r.shape for r in found] == [(3, 2)] * 3


def test_arguments_are_not_touched() -> None:
    x = torch.ones(3, requires_grad=True)
    calls: list[Tensor] = []

    def f(x: Tensor) -> None:
        calls.append(x)
        fcoll.all_reduce(x.mul(2), "i").sum().backward()

    fcoll.trace(f, fcoll.virtual_mesh(i=2))(x)
    assert len(calls) == 1
    assert calls[0] is not x
    assert x.grad is None
    assert x.tolist() == [1, 1, 1]
    state = torch.get_rng_state()
    fcoll.trace(lambda x: fcoll.all_reduce(x + torch.rand(3), "i"), fcoll.virtual_mesh(i=2))(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_communicated() -> None:
    mapped = fcoll.shard_map(lambda x: x * 2, fcoll.virtual_mesh(i=4), P("i"), P("i"))
    for found in (fcoll.trace(mapped)(torch.ones(4)), fcoll.trace(lambda x: x)(torch.ones(4))):
        assert (found.records, found.to_dicts()) == ([], [])
        assert found.totals() == {}
        assert found.time() == 0
        assert str(found).splitlines()[-1] == "nothing is communicated"
        assert "<tbody></tbody></table><p>nothing is communicated</p>" in found._repr_html_()


def test_a_program_that_fails_leaves_no_recorder_on() -> None:
    mesh = fcoll.virtual_mesh(i=2)

    def f(x: Tensor) -> Tensor:
        fcoll.all_reduce(x, "i")
        raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        fcoll.trace(f, mesh)(torch.ones(2))
    assert not recorder.active()
    with pytest.raises(NameError):
        fcoll.axis_size("i")
    with pytest.raises(RuntimeError):
        fcoll.trace(lambda x: x if x.sum() > 0 else -x)(torch.ones(2))
    with pytest.raises(fcoll.CollectiveTypeError) as raised:
        fcoll.trace(f, "dp")  # type: ignore[arg-type]
    assert str(raised.value).startswith("trace: a mesh is what fcoll.mesh, ")
    with pytest.raises(fcoll.CollectiveValueError, match="but varies over it"):  # the check of the map
        fcoll.trace(fcoll.shard_map(lambda x: x, mesh, P("i"), P()))(torch.ones(2))


def test_traces_do_not_mix() -> None:
    """One inside another; and a run that is not traced."""
    mesh = fcoll.virtual_mesh(i=2)
    inner: list[fcoll.Trace] = []

    def g(x: Tensor) -> Tensor:
        return fcoll.all_gather(x, "i")

    def f(x: Tensor) -> Tensor:
        x = fcoll.all_reduce(x, "i")
        inner.append(fcoll.trace(g, mesh)(x))
        return fcoll.shift(x, "i")

    assert [r.collective for r in fcoll.trace(f, mesh)(torch.ones(2))] == ["all_reduce", "permute"]
    assert [r.collective for r in inner[0]] == ["all_gather"]


# ---- what is made of the records


def test_time_by_hand() -> None:
    mesh = fcoll.virtual_mesh(dp=2, tp=4)

    def f(x: Tensor) -> Tensor:
        x = fcoll.all_reduce(x, "tp")  # 4,000,000 bytes
        return fcoll.all_gather(x, "dp")

    found = fcoll.trace(f, mesh)(torch.ones(1_000_000))
    alpha, beta = 1e-3, 1e9
    ring = 6 * alpha + 6e6 / beta, 1 * alpha + 4e6 / beta
    direct = 1 * alpha + 12e6 / beta, 1 * alpha + 4e6 / beta
    assert found.time(alpha, beta, algorithm="ring") == pytest.approx(sum(ring), rel=1e-12)
    assert found.time(alpha, beta, algorithm="direct") == pytest.approx(sum(direct), rel=1e-12)
    assert found.time(alpha, beta) == pytest.approx(ring[0] + ring[1], rel=1e-12)
    assert found.time(4e-3, beta) == pytest.approx(4e-3 + 12e-3 + 4e-3 + 4e-3, rel=1e-12)  # direct, with its one round
    per_axis = found.time({"dp": 0.5, "tp": 0.25}, {"dp": 8e6, "tp": 6e6}, algorithm="ring")
    assert per_axis == pytest.approx(6 * 0.25 + 1 + 0.5 + 0.5, rel=1e-12)
    assert found.time() == pytest.approx(6 * 5e-6 + 6e6 / 25e9 + 5e-6 + 4e6 / 25e9, rel=1e-12)
    with pytest.raises(ValueError, match=r"^algorithm is ring, direct or best, got 'tree'$"):
        found.time(algorithm="tree")
    with pytest.raises(KeyError, match="dp"):
        found.time({"tp": 1.0})


MODEL = """
def step(x, w):
    y = fcoll.all_gather(x @ w, "tp", 1)
    return fcoll.all_reduce(y.sum(), ("dp", "tp"), "mean")
"""


def model(name: str) -> Any:
    scope: dict[str, Any] = {"fcoll": fcoll}
    exec(compile(MODEL, name, "exec"), scope)
    return scope["step"]


def test_as_text() -> None:
    found = fcoll.trace(model("/a/path/model.py"), fcoll.virtual_mesh(dp=16, tp=8))(
        torch.ones(1024, 3), torch.ones(3, 640)
    )
    assert repr(found) == str(found)
    assert str(found) == "\n".join(
        (
            "   collective  axis   ranks  puts in             payload  ring      direct    phase    source",
            "─" * 97,
            "0  all_gather  tp     8      float32[1024, 640]  2.5 MiB  17.5 MiB  17.5 MiB  forward  model.py:3",
            "1  all_reduce  dp,tp  128    float32[]           4 B      8 B       508 B     forward  model.py:4",
            "tp: 1 collective, payload 2.5 MiB, sent per rank 17.5 MiB (ring) or 17.5 MiB (direct)",
            "dp,tp: 1 collective, payload 4 B, sent per rank 8 B (ring) or 508 B (direct)",
        )
    )


def test_as_html() -> None:
    found = fcoll.trace(model('<cell & "1">'), fcoll.virtual_mesh(dp=2, tp=2))(torch.ones(4, 3), torch.ones(3, 8))
    page = found._repr_html_()
    assert page.startswith("<table><thead><tr><th></th><th>collective</th><th>axis</th><th>ranks</th><th>puts in</th>")
    row = "<tr><td>0</td><td>all_gather</td><td>tp</td><td>2</td><td>float32[4, 8]</td><td>128 B</td><td>128 B</td>"
    assert row + "<td>128 B</td><td>forward</td><td>&lt;cell &amp; &quot;1&quot;&gt;:3</td></tr>" in page
    assert "<cell" not in page
    assert page.count("<tr>") == 3
    assert "dp,tp: 1 collective, payload 4 B, sent per rank 6 B (ring) or 12 B (direct)</p><svg" in page


def test_as_dicts() -> None:
    found = fcoll.trace(model("model.py"), fcoll.virtual_mesh(dp=2, tp=2))(torch.ones(4, 3), torch.ones(3, 8))
    first, second = found.to_dicts()
    assert first == {
        "collective": "all_gather", "axis": "tp", "n": 2, "shape": (4, 8), "dtype": "float32",
        "payload": 128, "ring": 128, "direct": 128, "phase": "forward", "source": "model.py:3",
    }  # fmt: skip
    assert second["source"] == "model.py:4"


def test_bytes_are_rounded_for_reading_only() -> None:
    x = torch.ones(()).expand(2**20, 2**12, 2**8)  # 4 TiB
    found = fcoll.trace(lambda x: fcoll.all_gather(x, "i"), fcoll.virtual_mesh(i=3))(x)
    assert found.records[0].ring == 2 * 2**42
    assert "4 TiB" in str(found)
    assert "8 TiB" in str(found)


def test_compiled_functions_are_not_compiled_for_it() -> None:
    mapped = fcoll.shard_map(lambda x: fcoll.all_reduce(x, "i"), fcoll.virtual_mesh(i=2), P("i"), P())
    for f in (whole(mapped), fcoll.compile(mapped)):
        assert short(fcoll.trace(f)(torch.ones(4))) == [("all_reduce", "i", 2, (2,), "forward")]


def foreseen(f: Any, mesh: Any, *args: Any) -> tuple[int, int, tuple[str, ...]]:
    found = fcoll.trace(f, mesh, optimize=True)(*args)
    assert found.optimized is not None
    return len(found), len(found.optimized), found.reasons


def test_what_is_left_of_compiled_functions_and_of_those_that_write() -> None:
    mesh, x = fcoll.virtual_mesh(i=2), torch.ones(4)

    def twice(x: Tensor) -> Tensor:
        return fcoll.all_reduce(fcoll.all_reduce(x, "i"), "i")

    def stepped(x: Tensor) -> Tensor:
        y = x.add_(twice(x)).mul_(2)  # the argument itself
        return fcoll.all_reduce(torch.zeros(4).add_(y.sin()), "i")

    def branched(x: Tensor) -> Tensor:
        y: Tensor = torch.cond(x.sum() > 0, lambda x: fcoll.all_reduce(x, "i"), lambda x: x.clone(), (x,))
        return y + twice(x)

    needless = "#1: what it takes is the same on all ranks of the group"
    for f in (twice, whole(twice), fcoll.compile(twice)):
        assert foreseen(f, mesh, x) == (2, 1, (needless,))
    assert foreseen(stepped, mesh, x) == (3, 2, (needless,))
    assert x.tolist() == [1.0] * 4
    why = "the graph has operations that hold graphs of their own: cond"
    assert foreseen(branched, mesh, x) == (3, 3, (why,))


def test_what_is_not_listed_has_no_reasons() -> None:
    def f(x: Tensor) -> Tensor:
        y = fcoll.all_reduce(fcoll.all_reduce(x, "j"), "i")  # along i, every rank is alone
        return fcoll.all_reduce(y, "i") + fcoll.all_reduce(y.sin(), "i")

    assert foreseen(f, fcoll.virtual_mesh(i=1, j=2), torch.ones(4)) == (1, 1, ())
