"""`fcoll.checked`: whoever disagrees is named on every rank, in eager and compiled code, forward and backward."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import Pools, close, grad, jvp
from torch import Tensor

import fcoll
from fcoll import _torch, checks
from fcoll.errors import CollectiveValueError, DisagreementError
from fcoll.testing import check_adjoint

W: Any = fcoll.WORLD
Program = Callable[[int], Any]  # of a rank

# ---- calls that differ: the program, and what every rank's error says


def leaf(rank: int, needs: bool = True) -> Tensor:
    return torch.full((2,), rank + 1.0, requires_grad=needs)


def other_branch(rank: int) -> Any:
    x = torch.ones(2)
    if rank == 0:
        return fcoll.all_reduce(x, W)
    return fcoll.all_reduce(x, W)


def one_result_used(rank: int) -> None:
    """Case 21."""
    x, z = leaf(rank), leaf(rank)
    a, b = fcoll.all_reduce(x, W), fcoll.all_gather(z, W)
    (b if rank else a).sum().backward()


def order_of_calls(rank: int) -> None:
    calls: list[Callable[[], Tensor]] = [
        lambda: fcoll.all_reduce(torch.ones(2), W),
        lambda: fcoll.broadcast(torch.ones(2), W),
    ]
    for call in calls[:: 1 if rank else -1]:
        call()


def no_grad_on_one(rank: int) -> Any:
    with torch.set_grad_enabled(rank != 1):
        return fcoll.all_reduce(leaf(rank), W)


def constant_on_one(rank: int) -> Any:
    """Under torch.func.jvp: only one rank's value has a tangent."""
    x = torch.ones(2)

    def f(x: Tensor) -> Tensor:
        return fcoll.all_gather(fcoll.all_reduce(torch.ones(2) if rank else x, W), W)

    return jvp(f, (x,), (x,))


def wrong_number_of_sizes(rank: int) -> None:
    with pytest.raises(CollectiveValueError, match="all_to_all: send_sizes"):
        fcoll.all_to_all(torch.ones(2), W, send_sizes=[2], recv_sizes=[2])
    fcoll.all_to_all(torch.ones(2), W, send_sizes=[2] if rank == 1 else [1, 1], recv_sizes=[1, 1])


DISAGREE: dict[str, tuple[Program, list[str]]] = {
    "shape": (
        lambda r: fcoll.all_reduce(torch.ones(2 + (r == 0)), W),
        ["tree: rank 0 has float32[3] on cpu; rank", "float32[2] on cpu", "call: ranks 0, 1", "test_checks.py:"],
    ),
    "empty shape": (
        lambda r: fcoll.all_gather(torch.ones(4 + 2 * (r == 1), 0), W),
        ["float32[4, 0] on cpu; rank 1 has float32[6, 0]"],
    ),
    "dtype": (lambda r: fcoll.all_reduce(torch.ones(2).double() if r == 1 else torch.ones(2), W), ["float64[2]"]),
    "op": (lambda r: fcoll.all_reduce(torch.ones(2), W, "max" if r == 1 else "sum"), ["op: ", "rank 1 has 'max'"]),
    "function": (
        lambda r: (fcoll.all_gather if r == 1 else fcoll.all_reduce)(torch.ones(2), W),
        ["rank 1 has test_checks.py:", "all_gather", "all_reduce"],
    ),
    "keys": (
        lambda r: fcoll.all_reduce({"a": torch.ones(2), "c" if r == 1 else "b": torch.ones(3)}, W),
        ["tree['b']: rank", "tree['c']: rank", "rank 1 has nothing", "rank 1 has float32[3]"],
    ),
    "a key's shape": (
        lambda r: fcoll.all_reduce({"a": [torch.ones(2 + (r == 1))]}, W),
        ["tree['a'][0]: rank", "rank 1 has float32[3]"],
    ),
    "root": (lambda r: fcoll.broadcast(torch.ones(2), W, src=int(r == 1)), ["src: ", "rank 1 has 1"]),
    "axis": (lambda r: fcoll.all_gather(torch.ones(2, 2), W, int(r == 1)), ["axis: ", "rank 1 has 1"]),
    "permutation": (
        lambda r: fcoll.permute(torch.ones(2), W, [(0, 1)] if r else [(1, 0)]),
        ["perm: rank 0 has [(1, 0)]"],
    ),
    "line": (other_branch, ["call: rank 0 has test_checks.py:", "all_reduce; rank"]),
    "an argument that one rank refuses": (lambda r: fcoll.all_gather(torch.ones(2), W, 5 * (r == 1)), ["rank 1 has 5"]),
    "requires_grad": (
        lambda r: fcoll.all_reduce(leaf(r, r == 0), W),
        ["rank 0 has float32[2] on cpu that requires a gradient", "x.requires_grad_() makes it"],
    ),
    "the mode of gradients": (no_grad_on_one, ["rank 1 has float32[2] on cpu\n"]),
    "requires_grad in a tree, with large leaves": (
        lambda r: fcoll.all_reduce([torch.ones(1 << 18, requires_grad=r == i) for i in range(2)], W),
        ["tree[0]: rank 0 has float32[262144] on cpu that requires a gradient"],
    ),
    "requires_grad of an extremum": (
        lambda r: fcoll.all_reduce(leaf(r, r == 0), W, "max", invariant=True),
        ["x.requires_grad_() makes it"],
    ),
    "rows that one rank lacks, and with them the gradient": (
        lambda r: fcoll.all_gather(torch.ones(2 if r else 0, 3, requires_grad=r > 0), W, sizes="exchange"),
        ["rank 0 has float32[·, 3] on cpu; rank", "requires a gradient"],
    ),
    "backward of one result": (
        one_result_used,
        ["rank 0 has backward of test_checks.py:", "all_reduce('sum'); rank", "reduce_scatter(0, True)"],
    ),
    "order": (order_of_calls, ["rank 0 has test_checks.py:", "broadcast; rank", "all_reduce"]),
    "number of sizes": (wrong_number_of_sizes, ["number of send_sizes: rank", "rank 1 has 1"]),
    "sizes": (
        lambda r: fcoll.all_to_all(torch.ones(2), W, send_sizes=[1, 1], recv_sizes=[1, 1 + (r == 1)]),
        ["sizes: rank 1 sends 1 to rank 1, which expects 2"],
    ),
}  # fmt: skip


def told(program: Callable[[], Any]) -> str:
    try:
        program()
    except DisagreementError as error:
        return str(error)
    return ""


def disagree(rank: int) -> dict[str, str]:
    found = {}
    for name, (program, _) in DISAGREE.items():
        if name == "sizes" and dist.get_world_size() > 2:
            continue
        with fcoll.checked(timeout=20):
            found[name] = told(functools.partial(program, rank))
    with fcoll.checked(timeout=20):  # still in step
        close(
            fcoll.all_reduce(torch.tensor([rank + 1.0]), W), torch.tensor([6.0 if dist.get_world_size() > 2 else 3.0])
        )
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_every_rank_says_who_differs_in_what(ranks: Pools, n: int) -> None:
    found = ranks(n).run(disagree, per_rank=[(rank,) for rank in range(n)])
    for name, text in found[0].items():
        assert all(own[name] == text for own in found), name
        for word in DISAGREE[name][1]:
            assert word in text, f"{name}: {text}"


# ---- ranks that do not come


def warm_up() -> None:
    """The first check connects to the store, which may take longer than the limits below."""
    with fcoll.checked(timeout=30):
        fcoll.all_reduce(torch.ones(1), W)


def skip_a_call(rank: int) -> tuple[list[str], float, Any]:
    warm_up()
    x = torch.ones(2, requires_grad=True)
    with fcoll.checked(timeout=1.5):
        y = fcoll.all_reduce(x, W)
        begin = time.monotonic()
        if rank == 1:
            time.sleep(2.5)  # busy with something else
        else:
            first = told(lambda: fcoll.broadcast(x, W))  # which rank 1 does not make
        seconds = time.monotonic() - begin
        if rank == 1:  # comes to another call, too late
            first = told(lambda: y.sum().backward())
        x.grad = None
        fcoll.all_gather(x, W).sum().backward()  # from here on all do the same
    return [first], seconds, x.grad


def test_who_does_not_come_is_named(ranks: Pools) -> None:
    found = ranks(3).run(skip_a_call, per_rank=[(0,), (1,), (2,)])
    (text,) = found[0][0]
    assert text.startswith("after 1.5 s, rank 1 had not come to call "), text
    assert "rank 1 was last seen at test_checks.py:" in text
    assert "all_reduce, call " in text
    assert "rank 0 waits at test_checks.py:" in text
    assert "broadcast" in text
    for own, seconds, gradient in found:
        assert own == [text]
        assert seconds < 4
        close(gradient, torch.full((2,), 3.0))


def disjoint(rank: int) -> str:
    """Each waits in a group of its own for somebody who waits in another."""
    warm_up()
    pairs = [dist.new_group([0, 1]), dist.new_group([0, 2]), dist.new_group([1, 2])]
    with fcoll.checked(timeout=1.5):
        group = [pairs[0], pairs[2], pairs[1]][rank]
        return told(lambda: fcoll.all_reduce(torch.ones(1), group))


def test_ranks_that_wait_in_different_groups_see_where_the_others_are(ranks: Pools) -> None:
    found = ranks(3).run(disjoint, per_rank=[(0,), (1,), (2,)])
    for rank, other in enumerate([1, 2, 0]):
        assert f"rank {other} was last seen at test_checks.py:" in found[rank], found[rank]
        assert f"rank {rank} waits at" in found[rank]


# ---- what works


def invariant(rank: int) -> Any:
    """Backward sends nothing, so each rank may do without."""
    total = 3.0
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: fcoll.all_reduce(x, W, invariant=True),
        lambda x: fcoll.all_gather(x, W, invariant=True),
    ]
    for call in calls:
        x = leaf(rank, rank == 0)
        y = call(x)
        close(y, torch.full((2,), total) if len(y) == 2 else torch.tensor([1.0, 1.0, 2.0, 2.0]))
        if rank == 0:
            (y * y).sum().backward()
            close(x.grad, torch.full((2,), 2 * (total if len(y) == 2 else 1.0)))
    tree = [leaf(rank, rank == i) for i in range(2)]  # small leaves travel together, and so do their gradients
    fcoll.all_reduce(tree, W)[rank].sum().backward()
    close(tree[rank].grad, torch.ones(2))
    return told(lambda: fcoll.all_reduce(leaf(rank, rank == 0), W, "any"))


def without_lines(rank: int) -> Any:
    with fcoll.checked(timeout=20, lines=False):
        return other_branch(rank)


def remedies(rank: int) -> Any:
    """What docs/reliability.md says to do: case 12, a rank without rows, and a result that is not used (case 21)."""
    x = leaf(rank, rank == 0)
    y = fcoll.all_reduce(x if x.requires_grad else x.detach().requires_grad_(), W)
    (y * y).sum().backward()
    rows = torch.ones(2 * (rank == 0), 3, requires_grad=True)
    send, receive = ([0, 2], [0, 0]) if rank == 0 else ([0, 0], [2, 0])
    fcoll.all_to_all(rows, W, send_sizes=send, recv_sizes=receive).sum().backward()
    u, v = leaf(rank), leaf(rank)
    a, b = fcoll.all_reduce(u, W), fcoll.all_gather(v, W)
    ((b if rank else a).sum() + 0 * (a if rank else b).sum()).backward()
    close([u.grad, v.grad], [torch.ones(2), torch.ones(2)])
    return x.grad, rows.grad


def values_under_check(rank: int) -> None:
    x = torch.arange(4.0, dtype=torch.float64) + rank
    with fcoll.checked(timeout=20):
        for backend in (None, "aot_eager"):

            def f(x: Tensor) -> Tensor:
                y = fcoll.all_reduce({"a": x, "b": x.sin()}, W)
                return fcoll.reduce_scatter(y["a"] * fcoll.shift(y["b"], W), W, op="mean") + fcoll.all_gather(x, W)[:2]

            g = f if backend is None else torch.compile(f, fullgraph=True, backend=backend)
            want = f(x)
            close(g(x), want)
            if backend is None:
                check_adjoint(g, x, W)
            derivative = grad(lambda x: (f(x) ** 2).sum())
            close((derivative if backend is None else torch.compile(derivative, backend=backend))(x), derivative(x))
            leaf = x.clone().requires_grad_()
            (g(leaf) ** 2).sum().backward()
            close(leaf.grad, derivative(x))
        mesh, whole = fcoll.mesh(dp=2), torch.arange(4.0)
        summed = fcoll.shard_map(lambda x: fcoll.all_reduce(x, "dp"), mesh, fcoll.P("dp"), fcoll.P())
        close(summed(whole), whole[:2] + whole[2:])


def uneven_under_check(rank: int) -> None:
    """Sizes that belong to a rank are not taken for a disagreement, in derivatives either."""
    rows, sizes = torch.ones(3 - rank, 2, requires_grad=True), torch.tensor([1 - rank, 2])
    programs: list[Callable[[Tensor], Tensor]] = [
        lambda x: fcoll.all_gather(x, W, sizes=[3, 2]),
        lambda x: fcoll.all_gather(x, W, -2, sizes="exchange"),
        lambda x: fcoll.all_to_all(x, W, send_sizes=[1 - rank, 2], recv_sizes=[1, 0] if rank == 0 else [2, 2]),
        lambda x: fcoll.all_to_all(x, W, send_sizes=sizes),
        lambda x: fcoll.all_to_all(x, W, -1, 0, send_sizes=[1, 1], recv_sizes=[3, 2]),
    ]
    with fcoll.checked(timeout=20):
        for program in programs:
            program(rows).sum().backward()
        torch.compile(programs[2], fullgraph=True, backend="aot_eager")(rows).sum().backward()
        close(rows.grad, torch.full_like(rows, 8.0))


def what_one_rank_knows(rank: int) -> None:
    """Contents may differ, and so may trees and objects that travel with a description."""
    only = {"a": torch.ones(3)} if rank == 0 else None
    close(fcoll.broadcast_tree(only, W), {"a": torch.ones(3)})
    assert fcoll.all_gather_object("x" * rank, W) == ["", "x"]
    fcoll.ragged_all_to_all(torch.ones(2 + rank), torch.zeros(2), [0, 1], [1, 1], [rank, rank], [1, 1], W)
    close(fcoll.wait(fcoll.start(fcoll.all_gather, torch.tensor([rank]), W)), torch.tensor([0, 1]))
    fcoll.barrier(W)


def good(rank: int) -> Any:
    with fcoll.checked(timeout=20):
        text = invariant(rank)
        what_one_rank_knows(rank)
        gradients = remedies(rank)
        assert told(lambda: constant_on_one(rank)) or dist.get_rank() < 0
        fcoll.all_reduce(torch.ones(1), W)
    without_lines(rank)
    values_under_check(rank)
    uneven_under_check(rank)
    return text, gradients


def test_what_is_right_stays_right(ranks: Pools) -> None:
    (text, (x, rows)), (other, (none, no_rows)) = ranks(2).run(good, per_rank=[(0,), (1,)])
    assert text == other == ""
    close(x, torch.full((2,), 12.0))
    assert none is None
    close(rows, torch.ones(2, 3))
    assert no_rows.shape == (0, 3)


# ---- compiled code


def chain(x: Tensor, op: str) -> Tensor:
    return fcoll.all_gather(fcoll.all_reduce(x, W, op), W)


def squares(x: Tensor, op: str) -> Tensor:
    return (chain(x, op) ** 2).sum()


def own_graph(x: Tensor, rank: int) -> Tensor:
    return fcoll.all_reduce(x, W) if rank else fcoll.all_gather(x, W)


def checked_within(x: Tensor, op: str) -> Tensor:
    with fcoll.checked(timeout=20):
        return fcoll.all_reduce(x, W, op)


def unused(x: Tensor, rank: int) -> Tensor:
    """A compiler drops what a rank does not use, but not under check."""
    a, b = fcoll.all_reduce(x, W), fcoll.all_gather(x, W)
    return (b if rank else a).sum()


def compiled(rank: int, backend: str) -> Any:
    torch.compiler.reset()
    f: Any = torch.compile(chain, fullgraph=True, backend=backend)
    g: Any = torch.compile(grad(squares), fullgraph=True, backend=backend)
    x = torch.ones(2, requires_grad=True)
    f(x, "sum")  # not checked
    op = "max" if rank else "sum"
    texts = {}
    with fcoll.checked(timeout=20):
        texts["op"] = told(lambda: f(x, op))
        if backend != "inductor":  # which takes long
            texts["op in a gradient"] = told(lambda: g(x.detach(), op))
            texts["graph"] = told(lambda: torch.compile(own_graph, fullgraph=True, backend=backend)(x.detach(), rank))
            texts["within"] = told(lambda: torch.compile(checked_within, fullgraph=True, backend=backend)(x, op))
        y = f(x, "sum")
        right = g(x.detach(), "sum")
        one = torch.compile(unused, fullgraph=True, backend=backend)(x, rank)
        close(one, torch.tensor(4.0))
        texts["unused"] = told(one.backward)
    z = f(x, "sum")  # not checked, with the first graph
    if rank == 0:
        texts["gradient"] = told(lambda: y.sum().backward())  # in its own time: the context has ended
    else:
        with fcoll.checked(timeout=20):
            texts["gradient"] = told(lambda: fcoll.all_reduce(x, W))
    return texts, z, right, x.grad


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_is_checked_too(ranks: Pools, backend: str) -> None:
    words = {
        "op": ["test_checks.py:", "rank 0 has test_checks.py:", "all_reduce('sum')", "all_reduce('max')"],
        "op in a gradient": ["all_reduce('max')"],
        "graph": ["rank 0 has test_checks.py:", "all_gather(0, True); rank 1 has test_checks.py:", "all_reduce('sum')"],
        "within": ["all_reduce('max')"],
        "unused": [
            "rank 0 has backward of test_checks.py:",
            "all_reduce('sum'); rank 1 has",
            "reduce_scatter(0, True)",
        ],
        "gradient": ["rank 0 has backward of test_checks.py:", "reduce_scatter(0, True)"],
    }
    found = ranks(2).run(compiled, backend, per_rank=[(0,), (1,)])
    for texts, y, gradient, kept in found:
        for name, text in texts.items():
            assert text == found[0][0][name], name
            assert all(word in text for word in words[name]), f"{name}: {text}"
        close(y, torch.full((4,), 2.0))
        close(gradient, torch.full((2,), 16.0))
        assert kept is None
    ours = {line for line in found[0][0]["op"].split() if line.startswith("test_checks.py:")}
    assert ours == {f"test_checks.py:{chain.__code__.co_firstlineno + 1}:"}


def toggled(rank: int, compile: Any) -> tuple[int, int]:
    torch.compiler.reset()
    counts = []

    def count(graph: Any, inputs: Any) -> Any:
        counts.append(sum("check" in str(node.target) for node in graph.graph.nodes))
        return graph

    f = compile(chain, fullgraph=True, backend=count)
    for _ in range(2):
        f(torch.ones(2), "sum")
        with fcoll.checked(timeout=20):
            f(torch.ones(2), "sum")
    return len(counts), dist.get_rank()


@pytest.mark.parametrize("compile", [torch.compile, fcoll.compile], ids=["torch", "fcoll"])
def test_turning_it_on_compiles_once_more_and_turning_it_off_not_again(ranks: Pools, compile: Any) -> None:
    assert ranks(2).run(toggled, compile, per_rank=[(0,), (1,)]) == [(2, 0), (2, 1)]


def dynamic(rank: int) -> int:
    torch.compiler.reset()
    graphs = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def f(x: Tensor) -> Tensor:
        return fcoll.checked(timeout=19.5)(chain)(x, "sum") * 2

    decorated = fcoll.checked(timeout=20)(f)

    def twice(x: Tensor) -> Tensor:
        return decorated(x) + decorated(x)

    compiled: Any = torch.compile(twice, fullgraph=True, backend=keep, dynamic=True)
    for size in (2, 3, 5):
        close(compiled(torch.ones(size)), torch.full((2 * size,), 8.0))
        with fcoll.checked(timeout=18.5):
            fcoll.all_reduce(torch.ones(size), W)
    return len(graphs)


def test_sizes_that_change_do_not_compile_again(ranks: Pools) -> None:
    assert ranks(2).run(dynamic, per_rank=[(0,), (1,)]) == [1, 1]


# ---- how often, where, at what cost


def first_only(rank: int) -> tuple[list[int], str]:
    store = _torch.default_store()
    written: list[int] = []

    @fcoll.checked("first", timeout=20)
    def step(x: Tensor, op: str) -> Tensor:
        return fcoll.all_reduce(x, W, op)

    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        before = store.get(f"fcoll/at/{rank}") if store.check([f"fcoll/at/{rank}"]) else b""
        step(x, "sum").sum().backward()
        written.append(int(store.get(f"fcoll/at/{rank}") != before))
    fcoll.all_reduce(x, W)
    return written, told(
        lambda: fcoll.checked("first", timeout=20)(lambda: fcoll.all_reduce(x, W, "max" if rank else "min"))()
    )


def test_first_checks_each_line_once(ranks: Pools) -> None:
    for written, text in ranks(2).run(first_only, per_rank=[(0,), (1,)]):
        assert written == [1, 0, 0]
        assert "op: rank 0 has 'min'; rank 1 has 'max'" in text


def keys(rank: int) -> tuple[int, int]:
    store = _torch.default_store()
    x = torch.ones(2, requires_grad=True)
    counts = []
    for _ in range(2):
        with fcoll.checked(timeout=20):
            for _ in range(20):
                fcoll.all_reduce({"a": x}, W)["a"].sum().backward()
                told(lambda: fcoll.all_reduce(x, W, "max" if rank else "min"))
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts[0], counts[1]


def test_keys_do_not_pile_up(ranks: Pools) -> None:
    for first, second in ranks(2).run(keys, per_rank=[(0,), (1,)]):
        assert second <= first + 2


def silent(rank: int) -> bool:
    """Off, nothing is written."""
    store = _torch.default_store()
    key = f"fcoll/at/{dist.get_rank()}"
    with fcoll.checked(timeout=20):
        fcoll.all_reduce(torch.ones(2), W)
    before = store.get(key)
    x = torch.ones(2, requires_grad=True)
    fcoll.all_reduce(x, W).sum().backward()
    with fcoll.checked(timeout=20), fcoll.checked(timeout=20):
        pass
    fcoll.all_reduce(x, W)
    return bool(store.get(key) == before)


def test_off_it_writes_nothing(ranks: Pools) -> None:
    assert ranks(2).run(silent, per_rank=[(0,), (1,)]) == [True, True]


def in_two_threads(rank: int) -> list[str]:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    texts: list[list[str]] = [[], []]

    def work(i: int) -> None:
        with fcoll.checked(timeout=20):
            for step in range(30):
                x = torch.full((i + 1,), rank + 1.0, requires_grad=True)
                (fcoll.all_reduce(x, groups[i]) * x).sum().backward()
                close(x.grad, torch.full((i + 1,), 6.0))
                if step % 10 == 9:
                    texts[i].append(told(functools.partial(fcoll.all_reduce, x, groups[i], "max" if rank else "min")))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads if rank else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    return texts[0] + texts[1]


def test_groups_in_two_threads_do_not_wait_for_each_other(ranks: Pools) -> None:
    found = ranks(2).run(in_two_threads, per_rank=[(0,), (1,)])
    assert found[0] == found[1]
    assert len(found[0]) == 6
    for i, text in enumerate(found[0]):
        assert "op: rank 0 has 'min'; rank 1 has 'max'" in text
        assert text.splitlines()[0].endswith(f"disagree on call {[21, 42, 63][i % 3]}")


def reordered(rank: int) -> str:
    with fcoll.checked(timeout=20):
        return (
            told(lambda: fcoll.all_gather(torch.ones(1), fcoll.group([0, 2] if rank == 0 else [2, 0])))
            if rank != 1
            else ""
        )


def test_the_order_of_a_group_is_compared(ranks: Pools) -> None:
    first, _, last = ranks(3).run(reordered, per_rank=[(0,), (1,), (2,)])
    assert first == last
    assert "ranks of the group: rank 0 has [0, 2]; rank 2 has [2, 0]" in first


def test_emulated_axes_are_left_alone() -> None:
    with fcoll.checked(timeout=0.001):
        y = fcoll.vmap(lambda x: fcoll.all_reduce(x, "i"), axis_name="i")(torch.tensor([1.0, 2.0]))
        traced = fcoll.trace(lambda x: fcoll.all_reduce(x, "dp"), fcoll.virtual_mesh(dp=8))(torch.ones(2))
    close(y, torch.tensor([3.0, 3.0]))
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("value", "limit", "expected"),
    [("1", "7", ("all", "7.0", True, False)), ("first", "", ("first", "30.0", True, False)), ("0", "", ())],
)
def test_the_environment_turns_it_on_for_every_thread(
    monkeypatch: pytest.MonkeyPatch, value: str, limit: str, expected: Any
) -> None:
    monkeypatch.setenv("FCOLL_CHECK", value)
    if limit:
        monkeypatch.setenv("FCOLL_CHECK_TIMEOUT", limit)
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(checks.wanted()))  # its first look at the settings
    thread.start()
    thread.join()
    assert seen == [expected]


def test_what_it_refuses() -> None:
    with pytest.raises(CollectiveValueError, match='checked: which is "all" or "first", got 1'):
        fcoll.checked(1)  # type: ignore[arg-type]
    for timeout in (0, -1.0, True, "3"):
        with pytest.raises(CollectiveValueError, match="checked: timeout is a positive number of seconds"):
            fcoll.checked(timeout=timeout)  # type: ignore[arg-type]


def test_contexts_nest_and_end() -> None:
    outer = fcoll.checked("first", timeout=1)
    assert checks.wanted() == ()
    with outer, outer:
        with fcoll.checked(timeout=2):
            assert checks.wanted()[:2] == ("all", "2.0")
        assert checks.wanted()[:2] == ("first", "1.0")
        assert outer(checks.wanted)()[:2] == ("first", "1.0")
    assert checks.wanted() == ()
