"""`start` and `wait`: the same results and derivatives as the collective itself, and what is computed meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from common import Pools, close, draw, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]

import fcoll
from fcoll.testing import Substrate

G = fcoll.WORLD


def later(f: Callable[..., Any], *args: Any, **options: Any) -> Callable[[Any, Any], Any]:
    """The collective in two steps."""
    return lambda tree, group: fcoll.wait(fcoll.start(f, tree, group, *args, **options))


ROWS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "all_reduce": (fcoll.all_reduce, ()),
    "mean": (fcoll.all_reduce, ("mean",)),
    "max": (fcoll.all_reduce, ("max",)),
    "prod": (fcoll.all_reduce, ("prod",)),
    "all_gather": (fcoll.all_gather, (1,)),
    "reduce_scatter": (fcoll.reduce_scatter, (1, "mean")),
    "reduce_scatter max": (fcoll.reduce_scatter, (1, "max")),
    "all_to_all": (fcoll.all_to_all, (1, 0)),
    "broadcast": (fcoll.broadcast, (1,)),
    "reduce": (fcoll.reduce, (1, "max")),
    "gather": (fcoll.gather, (1, 1)),
    "scatter": (fcoll.scatter, (1, 1)),
    "permute": (fcoll.permute, ([(0, 1)],)),
    "shift": (fcoll.shift, ()),
}


def test_each_collective(substrate: Substrate) -> None:
    """Trees of small leaves, of several dtypes, and their gradients."""

    def body(group: Any, x: Tensor) -> list[Any]:
        tree = {"a": x, "b": [x * 2, x.float(), torch.zeros_like(x[:, :0])]}
        results: list[list[Any]] = [[], []]
        for f, args in ROWS.values():
            ways: list[Any] = [later(f, *args), lambda t, at: f(t, at, *args)]  # noqa: B023
            for found, g in zip(results, ways, strict=True):

                def loss(x: Tensor, g: Any = g) -> Any:
                    return (g({"x": x, "y": x.sin()}, group)["y"] ** 2).sum()

                found.append([g(tree, group), grad(loss)(x)])
        return results

    n = substrate.n
    got, want = substrate.map(body, draw((n, 2, 2 * n)))
    close(got, want)


def compute(x: Tensor, w: Tensor, two_steps: bool, group: Any = G) -> Tensor:
    """A loss with work between start and wait; it weighs the ranks differently."""
    pending = fcoll.start(fcoll.all_gather, x, group) if two_steps else None
    meanwhile = (w @ w).sin().sum()
    gathered = fcoll.wait(pending) if pending is not None else fcoll.all_gather(x, group)
    return ((gathered @ w) ** 2).sum() * (1 + fcoll.axis_index(group)) + meanwhile


def test_derivatives_of_every_kind(ranks: Pools) -> None:
    def body() -> None:
        x, w = draw((2, 3), dist.get_rank()), draw((3, 3), 10 + dist.get_rank())

        def two(x: Tensor) -> Tensor:
            return compute(x, w, True)

        def one(x: Tensor) -> Tensor:
            return compute(x, w, False)

        transforms: dict[str, Callable[[Any], Any]] = {
            "grad": lambda f: grad(f)(x),
            "jvp": lambda f: jvp(f, (x,), (x.cos(),)),
            "jacrev": lambda f: jacrev(f)(x),
            "jacfwd": lambda f: jacfwd(f)(x),
            "hessian": lambda f: hessian(f)(x),
            "reverse over reverse": lambda f: jacrev(jacrev(f))(x),
            "forward over forward": lambda f: jacfwd(jacfwd(f))(x),
            "vmap": lambda f: vmap(f)(torch.stack([x, 2 * x])),
            "vmap of grad": lambda f: vmap(grad(f))(torch.stack([x, 2 * x])),
        }
        for name, transform in transforms.items():
            close(transform(two), transform(one), name)
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(two(leaf), leaf, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), leaf)
        close([first.detach(), second], [grad(one)(x), grad(lambda x: (grad(one)(x) ** 2).sum())(x)])
        for backend in ("aot_eager", "inductor"):
            torch.compiler.reset()
            compiled = torch.compile(compute, fullgraph=True, backend=backend)
            compiled(leaf, w, True).backward()
            close(leaf.grad, grad(one)(x), backend)
            leaf.grad = None
        torch.compiler.reset()
        gradient: Any = torch.compile(grad(two), fullgraph=True, backend="aot_eager")
        close(gradient(x), grad(one)(x))

    for n in (2, 3):
        ranks(n).run(body, timeout=110)


def test_graphs_hold_start_and_wait_apart(ranks: Pools) -> None:
    """Forward and backward, with the products between the two."""

    def body() -> list[str]:
        graphs = []

        def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            names = [str(node.target).split(".")[1] for node in graph.graph.nodes if node.op == "call_function"]
            graphs.append(" ".join(name for name in names if name in ("mm", *SHORT)))
            return make_boxed_func(graph.forward)

        torch.compiler.reset()
        compiled = torch.compile(compute, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
        x, w = draw((2, 3)).requires_grad_(), draw((3, 3)).requires_grad_()
        compiled(x, w, True).backward()
        return graphs

    SHORT = ("all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor")
    for graphs in ranks(2).run(body):
        assert graphs == [
            "all_gather_into_tensor mm wait_tensor mm",
            "mm mm reduce_scatter_tensor mm mm wait_tensor",
        ]


def test_order_of_eager_messages(ranks: Pools) -> None:
    """Backward, too, begins before it waits."""

    def body() -> list[str]:
        from fcoll import passage

        events: list[str] = []
        begun, received = passage.Passage.send, passage.Passage.receive

        def send(self: Any, x: Tensor) -> None:
            events.append(f"start {self.name}")
            begun(self, x)

        def receive(self: Any) -> Tensor:
            events.append(f"wait {self.name}")
            return received(self)

        def log(cotangent: Tensor) -> None:
            events.append("compute'")

        passage.Passage.send, passage.Passage.receive = send, receive  # type: ignore[method-assign]
        try:
            x = draw((2, 3)).requires_grad_()
            pending = fcoll.start(fcoll.all_gather, x, G)
            events.append("compute")
            other = x.sin()
            other.register_hook(log)
            (fcoll.wait(pending).sum() + other.sum()).backward()
        finally:
            passage.Passage.send, passage.Passage.receive = begun, received  # type: ignore[method-assign]
        return events

    for events in ranks(2).run(body):
        assert events[:3] == ["start all_gather", "compute", "wait all_gather"]
        assert events[3:] == ["start reduce_scatter", "compute'", "wait reduce_scatter"]


def test_misuse(ranks: Pools) -> None:
    def body(rank: int) -> list[str]:
        x = draw((2, 3), rank)
        said: list[str] = []

        def refused(kind: type[Exception], f: Callable[[], object]) -> None:
            with pytest.raises(kind) as caught:
                f()
            said.append(str(caught.value))

        # waited twice: the same result, and its gradient once for each use
        leaf = x.clone().requires_grad_()
        pending = fcoll.start(fcoll.all_reduce, leaf, G)
        assert fcoll.wait(pending) is fcoll.wait(pending)
        (fcoll.wait(pending) * fcoll.wait(pending)).sum().backward()
        close(leaf.grad, grad(lambda x: (fcoll.all_reduce(x, G) ** 2).sum())(x))

        # dropped: nothing is lost but the result, and others are not disturbed
        for _ in range(20):
            fcoll.start(fcoll.all_reduce, x, G)
            fcoll.start(fcoll.all_reduce, leaf, G)
        gc.collect()
        close(fcoll.all_reduce(x, G), fcoll.wait(fcoll.start(fcoll.all_reduce, x, G)))

        # in another order on each rank: right without derivatives, refused with them
        several = [fcoll.start(fcoll.all_reduce, x * i, G) for i in range(3)]
        for i in (0, 1, 2) if rank else (2, 0, 1):
            close(fcoll.wait(several[i]), fcoll.all_reduce(x, G) * 0 + i * sum(draw((2, 3), r) for r in (0, 1)))
        a, b = fcoll.start(fcoll.all_reduce, leaf, G), fcoll.start(fcoll.all_reduce, leaf * 2, G)
        fcoll.wait(b)
        refused(ValueError, lambda: fcoll.wait(a))

        # a copy, as of any tree
        as_tree: Any = fcoll.start(fcoll.all_reduce, x, G)
        copy: Any = optree.tree_map(lambda value: value, as_tree, namespace="fcoll")
        fcoll.wait(copy)
        refused(ValueError, lambda: fcoll.wait(as_tree))

        # inside a vmap that has ended
        kept: list[Any] = []
        vmap(lambda x: (kept.append(fcoll.start(fcoll.all_reduce, x, G)), x)[1])(x)  # type: ignore[func-returns-value]
        refused(ValueError, lambda: fcoll.wait(kept[0]))

        # across the border of a compiled function
        torch.compiler.reset()
        pending = fcoll.start(fcoll.all_reduce, x, G)
        refused(Exception, lambda: torch.compile(fcoll.wait, fullgraph=True, backend="aot_eager")(pending))
        return said

    for said in ranks(2).run(body, per_rank=[(0,), (1,)]):
        assert "was started before one that has been waited for" in said[0]
        assert "has been waited for already" in said[1]
        assert "was started inside a vmap that has ended" in said[2]
        assert said[3]


def test_what_cannot_be_started() -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match=r"start: f is one of fcoll\.all_reduce, .*, got vary"):
        fcoll.start(fcoll.vary, x, "i")
    with pytest.raises(TypeError, match="got sum"):
        fcoll.start(torch.sum, x, "i")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got int"):
        fcoll.start(3, x, "i")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start: all_gather with sizes cannot be started"):
        fcoll.start(fcoll.all_gather, x, "i", sizes=[1, 1])
    with pytest.raises(TypeError, match=r"wait: pending is what fcoll\.start returned, got Tensor"):
        fcoll.wait(x)  # type: ignore[arg-type]
    with pytest.raises(NameError, match="axis name 'i' is not bound"):
        fcoll.start(fcoll.all_gather, x, "i")
    assert fcoll.vmap(lambda x: fcoll.all_reduce(x, "i"), axis_name="i")(x).tolist() == [2, 2]  # starts nothing


def test_a_pending_says_what_it_is() -> None:
    seen = []

    def f(x: Tensor) -> Any:
        pending = fcoll.start(fcoll.all_reduce, {"a": x, "b": x}, "i")
        seen.append(repr(pending))
        return fcoll.wait(pending)

    fcoll.vmap(f, axis_name="i")(torch.ones(2))
    assert seen == ["fcoll.Pending(2 messages)"]


def test_traced_costs_are_those_of_the_collective(ranks: Pools) -> None:
    def body() -> list[Any]:
        one, two = (lambda x: fcoll.all_gather(x, G), lambda x: later(fcoll.all_gather)(x, G))
        return [fcoll.trace(grad(lambda x, f=f: f(x).sum()))(torch.ones(4, 3)).totals() for f in (one, two)]

    for one, two in ranks(2).run(body):
        assert one == two
        assert one
