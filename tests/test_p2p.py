"""send and recv between processes: values, derivatives of every order and their order, against dense computations."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import Pools, close, draw, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch import Tensor

import fcoll
from fcoll.testing import Ranks

# Two programs: there and back between the ends of a pair, and a pipeline through all ranks that returns to rank 0.


def there_and_back(x: Tensor) -> Any:
    """Rank 0 sends x², and gets sin(x²) times the x of rank 1."""
    group, token = fcoll.WORLD, fcoll.token(x)
    if dist.get_rank() == 0:
        token = fcoll.send(x**2, group, 1, token)
        z, token = fcoll.recv(x, group, 1, token)
        return fcoll.after((z * x).sum(), token)
    y, token = fcoll.recv(x, group, 0, token)
    token = fcoll.send(y.sin() * x, group, 0, token)
    return fcoll.after((y * x).sum(), token)


def there_and_back_dense(xs: Tensor) -> Tensor:
    y = xs[0] ** 2
    return (y.sin() * xs[1] * xs[0]).sum() + (y * xs[1]).sum()


def pipeline(w: Tensor) -> Any:
    """Every rank multiplies what it gets by its w; rank 0 has two micro-batches, and gets them back."""
    group, n, rank = fcoll.WORLD, dist.get_world_size(), dist.get_rank()
    token = fcoll.token(w)
    outputs: list[Tensor] = []
    if rank == 0:
        for i in range(2):
            token = fcoll.send({"h": w * (i + 1), "n": torch.tensor(i)}, group, 1 % n, token)
    for i in range(2):
        got, token = fcoll.recv({"h": w, "n": torch.tensor(0)}, group, (rank - 1) % n, token)
        outputs.append(torch.tanh(got["h"] * w) + got["n"])
        if rank:
            token = fcoll.send({"h": outputs[-1], "n": got["n"]}, group, (rank + 1) % n, token)
        assert outputs[-1].shape == w.shape, i
    return fcoll.after(torch.stack(outputs).square().sum(), token)


def pipeline_dense(ws: Tensor) -> Tensor:
    total = torch.zeros((), dtype=ws.dtype)
    for i in range(2):
        h = ws[0] * (i + 1)
        for rank in [*range(1, len(ws)), 0]:
            h = torch.tanh(h * ws[rank]) + i
            total = total + h.square().sum()
    return total


PROGRAMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "there and back": (there_and_back, there_and_back_dense),
    "pipeline": (pipeline, pipeline_dense),
}

direction = 0.5  # of second derivatives: v on rank r is direction · (r + 1)


def along(f: Callable[[Tensor], Any], v: Any) -> Callable[[Tensor], Any]:
    """The derivative of f's gradient along v, by reverse mode over reverse mode."""
    return grad(lambda x: (grad(f)(x) * v).sum())  # type: ignore[no-any-return]


def backward(f: Callable[[Tensor], Any], x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    f(x).backward()
    return x.grad


def twice_backward(f: Callable[[Tensor], Any], x: Tensor, v: Any) -> Any:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    (first * v).sum().backward()
    return x.grad


def every_way(name: str, xs: Tensor, compiled: bool) -> dict[str, Any]:
    """What this rank gets of the program, eagerly or as one graph."""
    torch.compiler.reset()
    f, rank = PROGRAMS[name][0], dist.get_rank()
    x, v = xs[rank], direction * (rank + 1)

    def run(g: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(g, fullgraph=True, backend="aot_eager") if compiled else g

    batch = torch.stack((x, 2 * x))
    with torch.no_grad():
        value = run(f)(x)
    out = {
        "value": value,
        "backward": backward(run(f), x),
        "second": run(along(f, v))(x),
        "vmap of grad": run(vmap(grad(f)))(batch),
    }
    if compiled:  # takes seconds for each
        return out
    return out | {
        "grad": grad(f)(x),
        "twice backward": twice_backward(f, x, v),
        "vmap": vmap(f)(batch),
        "grad of vmap": grad(lambda batch: vmap(f)(batch).sum())(batch),
    }


@pytest.mark.parametrize(
    ("name", "n", "compiled"),
    [("there and back", 2, False), ("there and back", 2, True), ("pipeline", 4, False), ("pipeline", 3, True)],
)
def test_against_dense(name: str, n: int, compiled: bool, ranks: Pools) -> None:
    dense = PROGRAMS[name][1]
    xs = draw((n, 2))
    v = direction * torch.arange(1.0, n + 1).view(n, 1)
    got = ranks(n).run(every_way, name, xs, compiled)
    gradients = torch.stack((grad(dense)(xs), grad(dense)(2 * xs)), 1)
    second = along(dense, v)(xs)
    close(sum(mine["value"] for mine in got), dense(xs), "value")
    if not compiled:
        close(sum(mine["vmap"] for mine in got), torch.stack((dense(xs), dense(2 * xs))), "vmap")
    for way in set(got[0]) - {"value", "vmap"}:
        want = gradients if "vmap" in way else second if way in ("second", "twice backward") else grad(dense)(xs)
        close(torch.stack([mine[way] for mine in got]), want, way)


def relay(schedule: list[tuple[int, int]], w: Tensor) -> Any:
    """Messages as scheduled, each of which its receiver mixes into its state; all final states count."""
    rank, h, token = dist.get_rank(), w, fcoll.token(w)
    for source, destination in schedule:
        if rank == source:
            token = fcoll.send(h, fcoll.WORLD, destination, token)
        elif rank == destination:
            y, token = fcoll.recv(h, fcoll.WORLD, source, token)
            h = torch.tanh(h * w + y)
    return fcoll.after((h**2 * (rank + 1)).sum(), token)


def relay_dense(schedule: list[tuple[int, int]], ws: Tensor) -> Tensor:
    hs = list(ws)
    for source, destination in schedule:
        hs[destination] = torch.tanh(hs[destination] * ws[destination] + hs[source])
    total = torch.zeros((), dtype=ws.dtype)
    for rank, h in enumerate(hs):
        total = total + (h**2 * (rank + 1)).sum()
    return total


def test_any_schedule(ranks: Pools) -> None:
    """Gradients and second derivatives of messages between random pairs: backward is the reverse of any order."""
    generator, n, xs = random.Random(0), 4, draw((4, 2))
    pairs = [(s, d) for s in range(n) for d in range(n) if s != d]
    schedules = [[generator.choice(pairs) for _ in range(length)] for length in (3, 6, 12, 12)]
    v = direction * torch.arange(1.0, n + 1).view(n, 1)

    def f() -> list[Any]:
        rank = dist.get_rank()
        programs = [functools.partial(relay, schedule) for schedule in schedules]
        return [(backward(g, xs[rank]), along(g, direction * (rank + 1))(xs[rank])) for g in programs]

    got = ranks(n).run(f)
    for i, schedule in enumerate(schedules):
        dense = functools.partial(relay_dense, schedule)
        close(torch.stack([mine[i][0] for mine in got]), grad(dense)(xs), schedule)
        close(torch.stack([mine[i][1] for mine in got]), along(dense, v)(xs), schedule)


def test_inductor_keeps_the_messages(ranks: Pools) -> None:
    """Also one whose token nobody looks at."""

    def unseen(x: Tensor) -> Tensor:
        token = fcoll.token(x)
        if dist.get_rank() == 0:
            fcoll.send(x, fcoll.WORLD, 1, token)
            return x
        return fcoll.recv(x, fcoll.WORLD, 0, token)[0]

    def f(xs: Tensor) -> tuple[Any, Any]:
        torch.compiler.reset()
        x = xs[dist.get_rank()]
        with torch.no_grad():
            sent = torch.compile(unseen, fullgraph=True)(x)
        return sent, backward(torch.compile(there_and_back, fullgraph=True), x)

    xs = draw((2, 3))
    got = ranks(2).run(f, xs)
    for sent, _ in got:
        close(sent, xs[0])
    close(torch.stack([gradient for _, gradient in got]), grad(there_and_back_dense)(xs))


def test_messages_of_a_graph_are_in_order(ranks: Pools) -> None:
    """Of different shapes, so that another order would fail, in a graph whose results are wanted in another one."""

    def three(x: Tensor) -> Any:
        token = fcoll.token(x)
        if dist.get_rank() == 0:
            for k in (1, 2, 3):
                token = fcoll.send(x.expand(k), fcoll.WORLD, 1, token)
            return fcoll.after(x, token)
        got = []
        for k in (1, 2, 3):
            y, token = fcoll.recv(x.expand(k), fcoll.WORLD, 0, token)
            got.append((y * k).sum())
        return got[2] + 10 * got[0] + 100 * got[1]

    def f() -> list[Any]:
        torch.compiler.reset()
        x = torch.tensor(2.0)
        compiled = torch.compile(three, fullgraph=True, backend="aot_eager")
        return [compiled(x.clone().requires_grad_()).detach(), backward(compiled, x), backward(three, x)]

    sender, receiver = ranks(2).run(f)
    assert [float(y) for y in sender] == [2, 1 + 10 + 400 + 9, 420]
    assert [float(y) for y in receiver] == [18 + 20 + 800, 0, 0]


def test_backward_runs_in_the_reverse_order(ranks: Pools) -> None:
    """Whatever autograd would do first, and told as backward of the line that sent."""
    from fcoll import recorder

    def f() -> list[tuple[str, int, bool]]:
        told: list[tuple[str, int, bool]] = []

        def listen(name: str, x: Tensor, layout: Any, source: str, backward: bool, *_: Any) -> None:
            assert source.split(":")[0] not in ("p2p.py", "recorder.py", "function.py", "engine_p2p.py")
            told.append((name, x.numel(), backward))

        with recorder.listening(listen):
            x = torch.ones(1, requires_grad=True)
            token = fcoll.token()
            if dist.get_rank() == 0:
                token = fcoll.send(x.expand(1), fcoll.WORLD, 1, token)
                y, token = fcoll.recv(x.expand(2), fcoll.WORLD, 1, token)
                token = fcoll.send(x.expand(3), fcoll.WORLD, 1, token)
                fcoll.after(y.sum(), token).backward()
            else:
                a, token = fcoll.recv(x.expand(1), fcoll.WORLD, 0, token)
                token = fcoll.send(x.expand(2), fcoll.WORLD, 0, token)
                b, token = fcoll.recv(x.expand(3), fcoll.WORLD, 0, token)
                (a.sum() + b.sum()).backward()  # the order of the sum does not matter
        return told

    zero, one = ranks(2).run(f)
    assert zero[:3] == [("send", 1, False), ("recv", 2, False), ("send", 3, False)]
    assert zero[3:] == [("recv", 3, True), ("send", 2, True), ("recv", 1, True)]
    assert one == [("send" if name == "recv" else "recv", size, back) for name, size, back in zero]


def test_dtypes_shapes_and_orders(ranks: Pools) -> None:
    """Each dtype arrives as it was, within groups of any order, and has its gradient if it has one."""
    dtypes = [
        torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64,
        torch.complex64, torch.float8_e4m3fn,
    ]  # fmt: skip

    def f(compiled: bool) -> bool:
        torch.compiler.reset()
        if dist.get_rank() == 1:
            return True
        group = fcoll.group([2, 0])
        tree = [torch.tensor([[0.5, 1.0], [2.0, 3.0]]).to(dtype).t() for dtype in dtypes]
        tree += [torch.zeros(0, 3), torch.tensor(7.0)]

        def send(tree: Any) -> Any:
            return fcoll.send(tree, group, 1, fcoll.token(tree[-1]))

        def recv(like: Any) -> Any:
            return fcoll.recv(like, group, 0, fcoll.token(like[-1]))[0]

        here: Callable[[Any], Any] = recv if fcoll.axis_index(group) else send
        with torch.no_grad():
            if compiled:
                tree = tree[:1] + tree[5:]
            run = torch.compile(here, fullgraph=True, backend="aot_eager") if compiled else here
            if here is send:
                return float(run(tree)) == 0
            got = run([torch.empty_like(x) for x in tree])
        same = [y.dtype == x.dtype and torch.equal(y.double(), x.double()) for x, y in zip(tree, got, strict=True)
                if not x.is_complex()]  # fmt: skip
        return all(same) and torch.equal(got[-4], tree[-4])

    for compiled in (False, True):
        assert ranks(3).run(f, compiled) == [True] * 3


def test_complex_and_half_gradients(ranks: Pools) -> None:
    def f(dtype: torch.dtype) -> Any:
        x = (torch.tensor([1.0, 2.0]) * (1 + dist.get_rank())).to(dtype)
        if dtype.is_complex:
            x = x * (1 + 2j)

        def loss(x: Tensor) -> Any:
            token = fcoll.token(x)
            if dist.get_rank() == 0:
                return fcoll.after(x.abs().sum() * 0, fcoll.send(x, fcoll.WORLD, 1, token))
            y, token = fcoll.recv(x, fcoll.WORLD, 0, token)
            return (y * x).abs().square().sum()

        return grad(loss)(x)

    for dtype in (torch.complex128, torch.bfloat16):
        unit = torch.tensor([1.0, 2.0], dtype=torch.float64)
        z = unit * (1 + 2j) if dtype.is_complex else unit
        want = grad(lambda z, w: (z * w).abs().square().sum())(z, 2 * z)
        close(ranks(2).run(f, dtype)[0], want.to(dtype))


def test_zeros_come_back_for_what_is_not_used_and_nothing_for_integers(ranks: Pools) -> None:
    def f() -> Any:
        x = torch.ones(2, requires_grad=True)
        if dist.get_rank() == 0:
            token = fcoll.send((x, torch.tensor([3])), fcoll.WORLD, 1, fcoll.token())
            fcoll.after(x.sum(), token).backward()
        else:
            (_, n), token = fcoll.recv((x, torch.tensor([0])), fcoll.WORLD, 0, fcoll.token())
            assert n.tolist() == [3]
            assert not n.requires_grad
            fcoll.after((x * n).sum(), token).backward()
        return x.grad

    zero, one = ranks(2).run(f)
    assert zero.tolist() == [1, 1]
    assert one.tolist() == [3, 3]


def test_jacrev_sends_a_batch_of_cotangents(ranks: Pools) -> None:
    def f(xs: Tensor) -> Any:
        x = xs[dist.get_rank()]

        def g(x: Tensor) -> Any:
            token = fcoll.token(x)
            if dist.get_rank() == 0:
                return fcoll.after(x.sin(), fcoll.send(x**2, fcoll.WORLD, 1, token))
            return fcoll.recv(x, fcoll.WORLD, 0, token)[0] * x

        return jacrev(g)(x)

    xs = draw((2, 3))
    zero, one = ranks(2).run(f, xs)
    close(zero, torch.diag(xs[0].cos() + 2 * xs[0] * xs[1]))
    close(one, torch.diag(xs[0] ** 2))


def test_plain_backward_needs_nothing_that_requires_grad(ranks: Pools) -> None:
    """A rank that only passes values on has no parameters; the token records its messages."""

    def f() -> Any:
        rank, group = dist.get_rank(), fcoll.WORLD
        x = torch.tensor(3.0, requires_grad=rank == 0)
        token = fcoll.token()
        if rank == 0:
            fcoll.after(x * 0, fcoll.send(x, group, 1, token)).backward()
            return float(x.grad or 0)
        y, token = fcoll.recv(x, group, rank - 1, token)
        if rank == 1:
            token = fcoll.send(y * 5, group, 2, token)
            fcoll.after(torch.tensor(0.0), token).backward()
        else:
            (y**2).backward()
        return 0.0

    assert ranks(3).run(f)[0] == 2 * 15 * 5


# ---- bad calls


def message(f: Callable[[], Any]) -> str:
    try:
        f()
    except Exception as error:
        return f"{type(error).__mro__[1].__name__}: {str(error).splitlines()[0]}"
    return "nothing raised"


def test_bad_calls_of_processes(ranks: Pools) -> None:
    def f() -> dict[str, str]:
        torch.compiler.reset()
        group, x = fcoll.group([0, 1]), torch.ones(2)
        token, rank = fcoll.token(), dist.get_rank()

        def compiled(g: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(g, fullgraph=True, backend="aot_eager")

        def to_itself(x: Tensor) -> Any:
            return fcoll.send(x, group, rank, fcoll.token(x))

        return {
            "itself": message(lambda: to_itself(x)).replace(f"dst={rank}", "dst=r"),
            "itself, compiled": message(lambda: compiled(to_itself)(x)).replace(f"dst={rank}", "dst=r"),
            "outside": message(lambda: fcoll.recv(x, group, 2, token)),
            "kind": message(lambda: fcoll.recv(x, group, "0", token)),  # type: ignore[arg-type]
            "token": message(lambda: fcoll.send(x, group, 1 - rank, x)),
            "no token": message(lambda: fcoll.send(x, group, 1 - rank, None)),  # type: ignore[arg-type]
            "leaf": message(lambda: fcoll.send([x, "a"], group, 1 - rank, token)),
            "forward": message(lambda: jvp(lambda x: fcoll.send(x, group, 1 - rank, fcoll.token(x)), (x,), (x,))),
            "jacfwd": message(lambda: jacfwd(lambda x: fcoll.recv(x, group, 1 - rank, fcoll.token(x))[0])(x)),
            "hessian": message(lambda: hessian(lambda x: fcoll.recv(x, group, 1 - rank, fcoll.token(x))[0].sum())(x)),
            "nothing given": message(lambda: grad(lambda x: fcoll.send(x, group, 1 - rank, fcoll.token()))(x)),
            "nothing given, compiled": message(lambda: compiled(lambda: fcoll.token())()),
            "after": message(lambda: fcoll.after(torch.tensor(1), token)),
        }

    label = "process group '0'"
    for got in ranks(2).run(f):
        label = got["outside"].split("of ")[1].split(":")[0]
        none = "token is what fcoll.token() makes and send and recv return"
        forward = "send and recv have no forward-mode derivative (jvp, jacfwd, hessian): the other rank would have"
        assert got["jacfwd"].startswith(f"RuntimeError: {forward}"), got["jacfwd"]
        assert got["hessian"] == got["forward"] == got["jacfwd"]
        assert {name: text for name, text in got.items() if text != got["jacfwd"]} == {
            "itself": "FcollError: send: dst=r is this rank itself; a message goes to another",
            "itself, compiled": "CollectiveValueError: send: dst=r is this rank itself; a message goes to another",
            "outside": f"FcollError: recv: src=2 is not a rank of {label}: they go from 0 to 1, counted within the "
            "group",
            "kind": "FcollError: recv: src is an integer, got str",
            "token": f"FcollError: send: {none}",
            "no token": f"FcollError: send: {none}",
            "leaf": "FcollError: send: tree[1] is a str; leaves are tensors, numbers and None",
            "nothing given": "FcollError: token: inside torch.func.grad and its like, give what is differentiated: "
            "fcoll.token(x)",
            "nothing given, compiled": "CollectiveValueError: token: in compiled code, give what is differentiated: "
            "fcoll.token(x)",
            "after": "FcollError: after: no leaf has a derivative, so none can bring the backward to the messages; "
            "give the loss",
        }


def test_checked_ends_that_do_not_agree(ranks: Pools) -> None:
    """Both raise, eagerly and compiled, in derivatives too; what agrees passes."""

    def f(compiled: bool) -> list[str]:
        torch.compiler.reset()
        rank, group = dist.get_rank(), fcoll.WORLD

        def exchange(x: Tensor) -> Any:
            token = fcoll.token(x)
            if rank == 0:
                return fcoll.send(x, group, 1, token)
            return fcoll.recv(x, group, 0, token)[0]

        run = torch.compile(exchange, fullgraph=True, backend="aot_eager") if compiled else exchange
        with fcoll.checked(), torch.no_grad():
            run(torch.ones(2, 2))
            texts = [
                message(lambda: run(torch.ones(2, 3 - rank))),
                message(lambda: run(torch.ones(3, dtype=(torch.float32, torch.int32)[rank]))),
            ]
        with fcoll.checked():
            x = torch.ones(2, requires_grad=True)
            run(x).sum().backward()
        return [*texts, str(x.grad)]

    for compiled in (False, True):
        zero, one = ranks(2).run(f, compiled)
        start = "FcollError: send to rank 1 of the group: this rank's is "
        assert zero[0] == f"{start}float32[2, 3], that one receives float32[2, 2]"
        assert zero[1] == f"{start}float32[3], that one receives int32[3]"
        start = "FcollError: recv from rank 0 of the group: this rank's is "
        assert one[0] == f"{start}float32[2, 2], that one sends float32[2, 3]"
        assert one[1] == f"{start}int32[3], that one sends float32[3]"
        assert zero[2] == "tensor([1., 1.])"


def test_a_rank_that_dies_is_a_communication_error(tmp_path: Path) -> None:
    """In forward and in backward; the message names what failed, and of which call it is the derivative."""

    def f(path: Path, receives: bool) -> None:
        x = torch.ones(2, requires_grad=True)
        token = fcoll.token()
        with fcoll.checked():  # so that backward knows the line
            if dist.get_rank() == 1:
                if receives:
                    fcoll.recv(x, fcoll.WORLD, 0, token)
                os._exit(1)
            try:
                token = fcoll.send(x, fcoll.WORLD, 1, token)
                fcoll.after(x.sum(), token).backward()
            except fcoll.CommunicationError as error:
                path.write_text(str(error))

    with Ranks(2) as own:
        for receives in (False, True):
            path = tmp_path / str(receives)
            with pytest.raises(RuntimeError, match="rank 1 died"):
                own.run(f, path, receives)
            text = path.read_text()
            assert text.startswith("recv from 1 over" if receives else "send to 1 over"), text
            assert ("in the backward pass of send at" in text) == receives, text


def test_an_emulated_axis_shows_the_permute_to_write() -> None:
    def told(n: int, f: Callable[[Any], Any]) -> str:
        return message(lambda: fcoll.vmap(f, axis_name="i")(torch.ones(n, 2)))

    start = "is an emulated axis, on which all ranks make one call; write fcoll.permute(tree, 'i', "
    token = fcoll.token()
    assert told(2, lambda x: fcoll.send(x, "i", 0, token)) == f"FcollError: send: 'i' {start}[(1, 0)])"
    assert told(2, lambda x: fcoll.recv(x, "i", 0, token)) == f"FcollError: recv: 'i' {start}[(0, 1)])"
    assert told(4, lambda x: fcoll.send(x, "i", 3, token)) == (
        f"FcollError: send: 'i' {start}[(s, 3)]) for each sender s among the 4 ranks"
    )
    assert told(4, lambda x: fcoll.recv(x, "i", 1, token)) == (
        f"FcollError: recv: 'i' {start}[(1, d)]) for each receiver d among the 4 ranks"
    )
    written = fcoll.vmap(lambda x: fcoll.permute(x, "i", [(1, 0)]), axis_name="i")(torch.tensor([5, 6]))
    assert written.tolist() == [6, 0]


def test_what_is_traced() -> None:
    """As one rank of a mesh that nobody has."""

    def loss(x: Tensor) -> Any:
        token = fcoll.send(x, "pp", 3, fcoll.token(x))
        y, token = fcoll.recv(x, "pp", 3, token)
        return fcoll.after(y.sum(), token)

    found = fcoll.trace(grad(loss), fcoll.virtual_mesh(pp=8))(torch.ones(5))
    assert [(r.collective, r.axis, r.n, r.payload, r.phase) for r in found] == [
        ("send", "pp", 8, 20, "forward"),
        ("recv", "pp", 8, 20, "forward"),
        ("send", "pp", 8, 20, "backward"),
        ("recv", "pp", 8, 20, "backward"),
    ]
    assert {r.source.split(":")[0] for r in found} == {"test_p2p.py"}


def test_vjp_outside_reaches_the_sender(ranks: Pools) -> None:
    """By torch.func.vjp of a function that returns its token."""

    def f() -> Any:
        x = torch.tensor([1.0, 2.0]) + dist.get_rank()

        def g(x: Tensor) -> Any:
            token = fcoll.token(x)
            if dist.get_rank() == 0:
                return fcoll.send(x, fcoll.WORLD, 1, token)
            return fcoll.recv(x, fcoll.WORLD, 0, token)[0]

        y, pull = vjp(g, x)
        return pull(torch.full_like(y, 7.0))[0]

    zero, one = ranks(2).run(f)
    assert zero.tolist() == [7, 7]
    assert one.tolist() == [0, 0]
