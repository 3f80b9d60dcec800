"""Derivatives of every row of the table: all modes, orders and compositions, against plain torch on the stack."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import Pools, close, draw, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from table import DIFFERENTIABLE, TRANSPOSED, Row
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fcoll
from fcoll.testing import Emulated, Processes, Substrate, check_adjoint

NAMED = {row.name: row for row in DIFFERENTIABLE}


@pytest.fixture(params=["emulated", "gloo"])
def three(request: pytest.FixtureRequest, ranks: Pools) -> Substrate:
    """Three ranks, for what takes long: the fewest on which a permutation and its inverse differ."""
    return Emulated(3) if request.param == "emulated" else Processes(ranks(3))


def like(row: Row, n: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, cotangents of the results, and tangents of the inputs, different on every rank."""
    stack = row.inputs(n)
    return stack, draw(row.values(stack).shape, seed), draw(stack.shape, seed + 1)


def local(stacks: dict[str, Any]) -> list[tuple[Row, Any]]:
    """This rank's values for each row."""
    return [(NAMED[name], values) for name, values in stacks.items()]


def strided(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def push(row: Row, stack: Tensor, tangents: Tensor) -> Tensor:
    """The tangents of the results: of all rows, declared or not, those of the map of all ranks."""
    out: Tensor = jvp(row.values, (stack,), (tangents,))[1]
    return out


# ---- first order


def test_vjp(substrate: Substrate) -> None:
    def f(group: Any, stacks: Any) -> Any:
        out = {}
        for row, (x, c, _) in local(stacks):
            call = row.on(group)
            y, pull = vjp(call, x)
            out[row.name] = {
                "value": y,
                "vjp": pull(c)[0],
                "strided": pull(strided(c))[0],
                "expanded": pull(c[..., :1].expand_as(c))[0],
                "of a strided input": vjp(call, strided(x))[1](c)[0],
                "grad": grad(lambda x, call=call, c=c: (call(x) * c).sum())(x),
                "grad of the sum": grad(lambda x, call=call: call(x).sum())(x),  # its cotangent is a constant
            }
        return out

    n = substrate.n
    stacks = {row.name: like(row, n) for row in DIFFERENTIABLE}
    got = substrate.map(f, stacks)
    for name, (x, c, _) in stacks.items():
        row = NAMED[name]
        want = row.pull(x, c)
        close(got[name]["value"], row.values(x), name)
        for how in ("vjp", "strided", "of a strided input", "grad"):
            close(got[name][how], want, f"{name}, {how}")
        close(got[name]["expanded"], row.pull(x, c[..., :1].expand_as(c)), f"{name}, expanded")
        close(got[name]["grad of the sum"], row.pull(x, torch.ones_like(c)), f"{name}, grad of the sum")


def test_backward(substrate: Substrate) -> None:
    def f(group: Any, xs: Any) -> Any:
        return {name: NAMED[name].call(x, group) for name, x in xs.items()}

    stacks = {row.name: like(row, substrate.n) for row in DIFFERENTIABLE}
    inputs = {name: x for name, (x, _, _) in stacks.items()}
    want = {name: NAMED[name].pull(x, c) for name, (x, c, _) in stacks.items()}
    for lay_out in (torch.clone, strided):
        cotangents = {name: lay_out(c) for name, (_, c, _) in stacks.items()}
        got = substrate.vjp(f, inputs, cotangents, how="backward")
        for name in want:
            close(got[name], want[name], name)


def test_jvp(substrate: Substrate) -> None:
    def f(group: Any, stacks: Any) -> Any:
        out = {}
        for row, (x, _, t) in local(stacks):
            call = row.on(group)
            out[row.name] = (*jvp(call, (x,), (t,)), jvp(call, (strided(x),), (strided(t),))[1])
        return out

    stacks = {row.name: like(row, substrate.n) for row in DIFFERENTIABLE}
    got = substrate.map(f, stacks)
    for name, (x, _, t) in stacks.items():
        want = push(NAMED[name], x, t)
        close(got[name], (NAMED[name].values(x), want, want), name)


def basis(shape: Any, n: int) -> Tensor:
    """All unit vectors of a shape, each given to all n ranks alike, as jacrev and jacfwd do."""
    units = torch.eye(torch.Size(shape).numel(), dtype=torch.float64).view(-1, 1, *shape)
    return units.expand(-1, n, *shape)


def test_jacobians(three: Substrate) -> None:
    def f(group: Any, stacks: Any) -> Any:
        out = {}
        for row, (x, _, _) in local(stacks):
            call = row.on(group)
            out[row.name] = {"jacrev": jacrev(call)(x), "jacfwd": jacfwd(call)(x)}
        return out

    n = three.n
    stacks = {row.name: like(row, n) for row in DIFFERENTIABLE}
    got = three.map(f, stacks)
    for name, (x, c, _) in stacks.items():
        row = NAMED[name]
        pulled = torch.stack([row.pull(x, unit) for unit in basis(c.shape[1:], n)], 1)  # rank, result, input
        pushed = torch.stack([push(row, x, unit) for unit in basis(x.shape[1:], n)], -1)  # rank, result, input
        jacobian = (*c.shape, *x.shape[1:])
        close(got[name]["jacrev"], pulled.reshape(jacobian), f"{name}, jacrev")
        close(got[name]["jacfwd"], pushed.reshape(jacobian), f"{name}, jacfwd")


def adjoint(row: Row, x: Tensor, group: Any) -> None:
    try:
        check_adjoint(row.on(group), x, group)
        check_adjoint(grad_of(row, group), x, group)
    except AssertionError as error:
        error.add_note(f"the row {row.name!r}")
        raise


def test_adjoint_identity(ranks: Pools) -> None:
    def on_rank(n: int) -> None:
        rank = int(fcoll.axis_index(fcoll.WORLD))
        for row in TRANSPOSED:
            adjoint(row, row.inputs(n)[rank], fcoll.WORLD)

    for n in (1, 3):
        for row in TRANSPOSED:
            adjoint(row, row.inputs(n), "i")
    ranks(3).run(on_rank, 3)


def grad_of(row: Row, group: Any) -> Callable[[Any], Any]:
    out: Callable[[Any], Any] = grad(lambda x: (row.call(x, group) ** 3).sum())
    return out


# ---- second order


def objective(row: Row, n: int, weights: Tensor) -> Callable[[Tensor], Tensor]:
    """What the ranks' losses (w·y³).sum() add up to, with results that count once counted once."""

    def of_stack(stack: Tensor) -> Tensor:
        terms = weights * row.values(stack) ** 3
        return terms[0].sum() if row.once == "result" else terms.sum()

    def of_one(x: Tensor) -> Tensor:
        return of_stack(x.expand(n, *x.shape))

    return of_one if row.once == "input" else of_stack


def second(row: Row, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and weights, where what counts once is the same on all ranks; and where to differentiate the objective."""
    x, w, _ = like(row, n)
    if row.once == "result":
        w = w[:1].expand_as(w).clone()
    if row.once == "input":
        x = x[:1].expand_as(x).clone()
    return x, w, x[0] if row.once == "input" else x


def twice(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Forward over forward, of what is not linear in x."""

    def once(x: Tensor) -> Any:
        return jvp(lambda x: f(torch.sin(x)), (x,), (torch.cos(x),))[1]

    out: Tensor = jvp(once, (x,), (torch.cos(x),))[1]
    return out


def test_second_order(three: Substrate) -> None:
    """Reverse over reverse, forward over reverse, forward over forward, and hessians."""

    def f(group: Any, stacks: Any) -> Any:
        out = {}
        for row, (x, w) in local(stacks):

            def loss(x: Tensor, row: Row = row, w: Tensor = w) -> Tensor:
                total: Tensor = (w * row.call(x, group) ** 3).sum()
                return total

            out[row.name] = {
                "rev rev": grad(lambda x, loss=loss: (grad(loss)(x) * torch.cos(x)).sum())(x),
                "fwd rev": jvp(grad(loss), (x,), (torch.cos(x),))[1],
                "fwd fwd": twice(row.on(group), x),
                "hessian": hessian(loss)(x).flatten(x.ndim).sum(-1),
                "jacrev jacrev": jacrev(jacrev(loss))(x).flatten(x.ndim).sum(-1),
                "vmap grad": vmap(grad(loss))(torch.stack((x, 2 * x)))[1],
                "grad vmap": grad(lambda x, loss=loss: vmap(loss)(torch.stack((x, 2 * x)))[1])(x),
                "vmap jvp grad": vmap(lambda x, loss=loss: jvp(grad(loss), (x,), (torch.cos(x),))[1])(
                    torch.stack((x, 2 * x))
                )[1],
            }
        return out

    n = three.n
    stacks = {row.name: second(row, n)[:2] for row in DIFFERENTIABLE}
    got = three.map(f, stacks)
    for row in DIFFERENTIABLE:
        x, w, at = second(row, n)
        total = objective(row, n, w)
        want = {
            "fwd fwd": twice(row.values, x),
            "rev rev": grad(lambda x, total=total: (grad(total)(x) * torch.cos(x)).sum())(at),
            "fwd rev": jvp(grad(total), (at,), (torch.cos(at),))[1],
            "hessian": jvp(grad(total), (at,), (torch.ones_like(at),))[1],
            "vmap grad": grad(total)(2 * at),
            "grad vmap": 2 * grad(total)(2 * at),
            "vmap jvp grad": jvp(grad(total), (2 * at,), (torch.cos(2 * at),))[1],
        }
        want["jacrev jacrev"] = want["hessian"]
        for how, value in want.items():
            close(got[row.name][how], value.expand_as(got[row.name][how]), f"{row.name}, {how}")


def test_reverse_over_forward(three: Substrate) -> None:
    def f(group: Any, stacks: Any) -> Any:
        out = {}
        for row, (x, w, t) in local(stacks):

            def loss(x: Tensor, row: Row = row, w: Tensor = w) -> Tensor:
                total: Tensor = (w * row.call(x, group) ** 3).sum()
                return total

            out[row.name] = grad(lambda x, t, loss=loss: jvp(loss, (x,), (t,))[1], argnums=(0, 1))(x, t)
        return out

    n = three.n
    stacks = {}
    for row in DIFFERENTIABLE:
        x, w, at = second(row, n)
        t = draw(at.shape, 3)
        stacks[row.name] = (x, w, t.expand_as(x).clone())
    got = three.map(f, stacks)
    for row in DIFFERENTIABLE:
        _, w, at = second(row, n)
        total = objective(row, n, w)
        t = draw(at.shape, 3)
        pushed: Callable[..., Any] = lambda x, t, total=total: jvp(total, (x,), (t,))[1]  # noqa: E731
        for mine, want in zip(got[row.name], grad(pushed, argnums=(0, 1))(at, t), strict=True):
            close(mine, want.expand_as(mine), row.name)


def test_second_order_backward(three: Substrate) -> None:
    """create_graph and backward through it, in each process, or from outside the emulated axis."""
    stacks = {row.name: like(row, three.n) for row in TRANSPOSED}

    def penalty(call: Callable[[Tensor], Tensor], x: Tensor, c: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(call(x) ** 3, x, c, create_graph=True)
        out: Tensor = torch.autograd.grad((g * torch.cos(x)).sum(), x)[0]
        return out

    if isinstance(three, Emulated):
        got = {row.name: penalty(fcoll.vmap(row.on("i"), axis_name="i"), x, c) for row, (x, c, _) in local(stacks)}
    else:

        def on_rank(group: Any, stacks: Any) -> Any:
            return {row.name: penalty(row.on(group), x, c) for row, (x, c, _) in local(stacks)}

        got = three.map(on_rank, stacks)
    for row, (x, c, _) in local(stacks):
        close(got[row.name], penalty(row.values, x, c), row.name)


# ---- with unnamed vmaps


def test_vmap(three: Substrate) -> None:
    """Unnamed vmaps inside the rank's program, at several axes, around values and derivatives."""

    def f(group: Any, stacks: Any) -> Any:
        out = {}
        for row, (x, c, t) in local(stacks):
            call = row.on(group)

            def pull(x: Tensor, c: Tensor, call: Any = call) -> Any:
                return vjp(call, x)[1](c)[0]

            def push(x: Tensor, t: Tensor, call: Any = call) -> Any:
                return jvp(call, (x,), (t,))[1]

            xs, cs, ts = (torch.stack((v, 2 * v), 1) for v in (x, c, t))
            out[row.name] = {
                "value": vmap(call, 1, 1)(xs),
                "value, axis -1": vmap(call, -1, -1)(xs.movedim(1, -1)).movedim(-1, 1),
                "twice": vmap(vmap(call, 1, 1), -1, -1)(torch.stack((xs, 3 * xs), -1))[..., 0],
                "vjp": vmap(pull, 1, 1)(xs, cs),
                "vjp, x the same": vmap(pull, (None, 1), 1)(x, cs),
                "vjp of vmap": vjp(vmap(call, 1, 1), xs)[1](cs)[0],
                "jvp": vmap(push, 1, 1)(xs, ts),
                "jvp, x the same": vmap(push, (None, 1), 1)(x, ts),
                "jvp of vmap": jvp(vmap(call, 1, 1), (xs,), (ts,))[1],
            }
        return out

    n = three.n
    stacks = {row.name: like(row, n) for row in DIFFERENTIABLE}
    got = three.map(f, stacks)
    for row, (x, c, t) in local(stacks):
        value = torch.stack((row.values(x), row.values(2 * x)), 2)
        pulled = torch.stack((row.pull(x, c), row.pull(2 * x, 2 * c)), 2)
        pushed = torch.stack((push(row, x, t), push(row, 2 * x, 2 * t)), 2)
        want = {
            "value": value,
            "value, axis -1": value,
            "twice": value,
            "vjp": pulled,
            "vjp, x the same": torch.stack((row.pull(x, c), row.pull(x, 2 * c)), 2),
            "vjp of vmap": pulled,
            "jvp": pushed,
            "jvp, x the same": torch.stack((push(row, x, t), push(row, x, 2 * t)), 2),
            "jvp of vmap": pushed,
        }
        for how in want:
            close(got[row.name][how], want[how], f"{row.name}, {how}")


# ---- emulation, differentiated from outside


@pytest.mark.parametrize("n", [1, 2, 3])
def test_from_outside_the_map(n: int) -> None:
    for row in DIFFERENTIABLE:
        x, c, t = like(row, n)
        f = fcoll.vmap(row.on("i"), axis_name="i")
        close(vjp(f, x)[1](c)[0], row.pull(x, c), row.name)
        close(jvp(f, (x,), (t,))[1], push(row, x, t), row.name)
        xs, cs, ts = (torch.stack((v, 2 * v), -1) for v in (x, c, t))
        want = torch.stack((row.values(x), row.values(2 * x)), -1)
        close(vmap(f, -1, -1)(xs), want, row.name)
        close(vmap(lambda x, c, f=f: vjp(f, x)[1](c)[0], -1, -1)(xs, cs)[..., 1], row.pull(2 * x, 2 * c), row.name)
        close(vmap(lambda x, t, f=f: jvp(f, (x,), (t,))[1], -1, -1)(xs, ts)[..., 1], push(row, 2 * x, 2 * t), row.name)
        if not row.once:
            close(jacrev(f)(x), jacrev(row.values)(x), row.name)
            close(jacfwd(f)(x), jacfwd(row.values)(x), row.name)
            close(hessian(lambda x, f=f: f(x).pow(3).sum())(x), hessian(lambda x, r=row: r.values(x).pow(3).sum())(x))


def test_gradcheck() -> None:
    for row in TRANSPOSED:
        x = row.inputs(2).requires_grad_()
        f = fcoll.vmap(row.on("i"), axis_name="i")
        assert torch.autograd.gradcheck(f, x, check_forward_ad=True, check_batched_grad=True), row.name
        assert torch.autograd.gradgradcheck(f, x), row.name


# ---- where functions are not smooth


def test_ties_of_an_extremum_are_shared_evenly(substrate: Substrate) -> None:
    n = substrate.n
    x = torch.tensor([[5.0, 5.0, 1.0]] * (n - 1) + [[5.0, 7.0, 0.0]]).double()

    def f(group: Any, x: Tensor) -> Any:
        scale = fcoll.axis_index(group) + 1
        return {
            "max": grad(lambda x: (scale * fcoll.all_reduce(x, group, "max")).sum())(x),
            "min": grad(lambda x: (scale * fcoll.all_reduce(x, group, "min")).sum())(x),
            "invariant": grad(lambda x: fcoll.all_reduce(x, group, "max", invariant=True).sum())(x),
            "reduce": grad(lambda x: (scale * fcoll.reduce(x, group, 1, "max")).sum())(x),
            "jvp": jvp(lambda x: fcoll.all_reduce(x, group, "max"), (x,), (x * scale,))[1],
        }

    got = substrate.map(f, x)
    total, last = n * (n + 1) / 2, n - 1
    first = [[1 / n, 0.0, 1 / last]] * last + [[1 / n, 1.0, 0.0]]
    least = [[1 / n, 1 / last, 0.0]] * last + [[1 / n, 0.0, 1.0]]
    mean = (total - n) / last  # of 1 to n-1
    close(got["max"], total * torch.tensor(first, dtype=torch.float64))
    close(got["min"], total * torch.tensor(least, dtype=torch.float64))
    close(got["invariant"], torch.tensor(first, dtype=torch.float64))
    close(got["reduce"], 2 * torch.tensor(first, dtype=torch.float64))
    close(got["jvp"], torch.tensor([[5 * total / n, 7.0 * n, mean]] * n, dtype=torch.float64))


@pytest.mark.parametrize("invariant", [False, True])
def test_second_order_at_ties(substrate: Substrate, invariant: bool) -> None:
    """As torch.amax has it on the stack, with a result that counts n times, or once."""
    n = substrate.n
    x = torch.tensor([[5.0, 5.0, 1.0]] * (n - 1) + [[5.0, 7.0, 0.0]], dtype=torch.float64)

    def f(group: Any, x: Tensor) -> Any:
        weight = fcoll.axis_index(group) + 1

        def gradient(x: Tensor) -> Any:
            return grad(lambda x: (fcoll.all_reduce(x, group, "max", invariant=invariant) ** 3).sum())(x)

        reverse = grad(lambda x: (weight * gradient(x)).sum())(x)
        return reverse, jvp(gradient, (x,), (x * weight,))[1]

    def gradient(x: Tensor) -> Any:
        return grad(lambda x: (1 if invariant else n) * (x.amax(0) ** 3).sum())(x)

    weight = torch.arange(1.0, n + 1, dtype=torch.float64).view(n, 1)
    want = grad(lambda x: (weight * gradient(x)).sum())(x), jvp(gradient, (x,), (x * weight,))[1]
    close(substrate.map(f, x), want)


def test_nan_propagates_through_extrema(substrate: Substrate) -> None:
    """To the result on every rank, whichever rank has it; and into the gradient."""
    n, nan = substrate.n, float("nan")
    x = torch.ones(n, n, 2) * torch.arange(1.0, n + 1).view(n, 1, 1)
    x[range(n), range(n), 0] = nan  # NaN on rank r in row r
    x[range(n), range(n), 1] = -nan

    def f(group: Any, x: Tensor) -> Any:
        return {
            (op, invariant): (
                fcoll.all_reduce(x, group, op, invariant=invariant),
                torch.stack([fcoll.all_reduce(row, group, op, invariant=invariant) for row in x[:, 0]]),
                fcoll.reduce(x, group, n - 1, op),
                fcoll.reduce_scatter(x, group, 0, op),
                grad(lambda x, op=op, once=invariant: fcoll.all_reduce(x, group, op, invariant=once).sum())(x),
            )
            for op in ("max", "min")
            for invariant in (False, True)
        }

    for key, (everywhere, singly, at_root, block, gradient) in substrate.map(f, x).items():
        assert everywhere.isnan().all(), key
        assert singly.isnan().all(), key  # backends take another path there
        assert at_root[n - 1].isnan().all(), key
        assert block.isnan().all(), key
        assert gradient.isnan().all(), key


def test_infinities_and_signed_zeros_of_extrema(substrate: Substrate) -> None:
    n, inf = substrate.n, float("inf")
    x = torch.tensor([[inf, -inf, 0.0, 1e-310, -3.5]] + [[-inf, -inf, -0.0, -1e-310, -3.25]] * (n - 1)).double()
    got = substrate.map(lambda group, x: [fcoll.all_reduce(x, group, op) for op in ("max", "min")], x)
    assert torch.equal(got[0], x.amax(0).expand(n, 5))
    assert torch.equal(got[1], x.amin(0).expand(n, 5))


@pytest.mark.parametrize("invariant", [False, True])
def test_products_with_zeros_have_all_derivatives(substrate: Substrate, invariant: bool) -> None:
    """None, one and two zeros: three orders, against torch.prod on the stack."""
    n = substrate.n
    x = draw((n, 3), 5)
    x[0, 1] = x[0, 2] = x[n - 1, 2] = 0.0

    def orders(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], list[Tensor]]:
        def next_one(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda x: (grad(f)(x) * torch.sin(x + 1)).sum()

        return lambda x: [grad(loss)(x), grad(next_one(loss))(x), grad(next_one(next_one(loss)))(x)]

    def f(group: Any, x: Tensor) -> Any:
        def loss(x: Tensor) -> Tensor:
            return torch.exp(fcoll.all_reduce(x, group, "prod", invariant=invariant)).sum()

        return orders(loss)(x)

    want = orders(lambda x: (1 if invariant else n) * torch.exp(x.prod(0)).sum())(x)
    got = substrate.map(f, x)
    assert all(value.isfinite().all() for value in want)
    for order, (mine, value) in enumerate(zip(got, want, strict=True), 1):
        close(mine, value, f"order {order}")


# ---- the graph outlives what made it


def names_are_unbound() -> bool:
    try:
        fcoll.axis_size("i")
    except NameError:
        return True
    return False


def losses(f: Callable[[Row, Tensor], Tensor], stacks: Any) -> list[tuple[Row, Tensor, Tensor]]:
    """Per row an input that requires grad and the scalar (c·f(row, x)).sum()."""
    out = []
    for row, (x, c, _) in local(stacks):
        x = x.detach().clone().requires_grad_()
        out.append((row, x, (f(row, x) * c).sum()))
    return out


def emulated(row: Row, x: Tensor) -> Tensor:
    out: Tensor = fcoll.vmap(lambda x: row.call(x, "i"), axis_name="i")(x)
    return out


def on_another_thread(f: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            f()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("threaded", [False, True])
def test_backward_after_the_scope_has_gone(threaded: bool) -> None:
    stacks = {row.name: like(row, 3) for row in DIFFERENTIABLE}
    for row, x, loss in losses(emulated, stacks):
        assert names_are_unbound()
        with torch.autograd.set_multithreading_enabled(False):
            on_another_thread(loss.backward) if threaded else loss.backward()
        close(x.grad, row.pull(x.detach(), stacks[row.name][1]), row.name)


def test_vjp_after_the_scope_has_gone() -> None:
    for row in DIFFERENTIABLE:
        x, c, _ = like(row, 3)
        pull = vjp(fcoll.vmap(row.on("i"), axis_name="i"), x)[1]
        fcoll.vmap(lambda z: fcoll.all_reduce(z, "i"), axis_name="i")(torch.ones(5))  # the name means 5 ranks now
        assert names_are_unbound()
        close(pull(c)[0], row.pull(x, c), row.name)


def test_backward_on_another_thread_of_a_process(ranks: Pools) -> None:
    stacks = {row.name: like(row, 2) for row in DIFFERENTIABLE}

    def f(stacks: Any) -> Any:
        rank = int(fcoll.axis_index(fcoll.WORLD))
        mine = {name: [v[rank] for v in values] for name, values in stacks.items()}
        out = {}
        for row, x, loss in losses(lambda row, x: row.call(x, fcoll.WORLD), mine):
            on_another_thread(loss.backward)
            out[row.name] = x.grad
        return out

    got = ranks(2).run(f, stacks)
    for row, (x, c, _) in local(stacks):
        close(torch.stack([mine[row.name] for mine in got]), row.pull(x, c), row.name)


def test_checkpoint(three: Substrate) -> None:
    """Around the collective in each process, and around the named vmap in emulation. (torch has none inside a vmap.)"""
    stacks = {row.name: like(row, three.n) for row in DIFFERENTIABLE}

    def recomputed(f: Callable[[Row, Tensor], Tensor]) -> Callable[[Row, Tensor], Tensor]:
        def run(row: Row, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(lambda x: f(row, torch.sin(x)), x, use_reentrant=False)
            return out

        return run

    def gradients(f: Callable[[Row, Tensor], Tensor], stacks: Any) -> Any:
        out = {}
        for row, x, loss in losses(recomputed(f), stacks):
            loss.backward()
            out[row.name] = x.grad
        return out

    if isinstance(three, Emulated):
        got = gradients(emulated, stacks)
    else:
        got = three.map(lambda group, mine: gradients(lambda row, x: row.call(x, group), mine), stacks)
    for row, (x, c, _) in local(stacks):
        close(got[row.name], row.pull(torch.sin(x), c) * torch.cos(x), row.name)


# ---- torch.autograd's other modes


def each(substrate: Substrate, f: Callable[[Callable[[Tensor], Tensor], Row, Any], Any], stacks: Any) -> Any:
    """f(call, row, values) per row: in each process; in emulation from outside, where `call` maps stacks."""
    if isinstance(substrate, Emulated):
        return {name: f(functools.partial(emulated, row), row, stacks[name]) for name, row in names(stacks)}

    def on_rank(group: Any, mine: Any) -> Any:
        return {name: f(row.on(group), row, mine[name]) for name, row in names(mine)}

    return substrate.map(on_rank, stacks)


def names(stacks: Any) -> list[tuple[str, Row]]:
    return [(name, NAMED[name]) for name in stacks]


def test_a_graph_can_be_used_twice(three: Substrate) -> None:
    def f(call: Any, row: Row, values: Any) -> Any:
        x, c = values[0].detach().clone().requires_grad_(), values[1]
        y = call(x)
        y.backward(c.clone(), retain_graph=True)  # torch may add to what it is given here
        first = x.grad.clone()
        y.backward(2 * c)
        return first, x.grad

    stacks = {row.name: like(row, three.n) for row in DIFFERENTIABLE}
    got = each(three, f, stacks)
    for row, (x, c, _) in local(stacks):
        close(got[row.name], (row.pull(x, c), 3 * row.pull(x, c)), row.name)


def test_dual_numbers(three: Substrate) -> None:
    def f(call: Any, row: Row, values: Any) -> Any:
        with forward_ad.dual_level():
            primal, tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(values[0], values[2])))
            return primal, tangent if tangent is not None else torch.zeros_like(primal)

    stacks = {row.name: like(row, three.n) for row in DIFFERENTIABLE}
    got = each(three, f, stacks)
    for row, (x, _, t) in local(stacks):
        close(got[row.name], (row.values(x), push(row, x, t)), row.name)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(three: Substrate, mode: Any) -> None:
    def f(call: Any, row: Row, values: Any) -> Any:
        x = values[0].detach().clone().requires_grad_()
        with mode():
            y = call(x)
            assert not y.requires_grad, row.name
            return y.clone()

    stacks = {row.name: like(row, three.n) for row in DIFFERENTIABLE}
    got = each(three, f, stacks)
    for row, (x, _, _) in local(stacks):
        close(got[row.name], row.values(x), row.name)


def test_only_some_leaves_require_grad(substrate: Substrate) -> None:
    n = substrate.n
    stack = {"a": draw((n, 2), 1), "b": draw((n, 3), 2), "k": torch.arange(n)}

    def run(call: Any, tree: Any) -> Any:
        tree = {**tree, "a": tree["a"].detach().requires_grad_(), "b": tree["b"].detach()}
        y = call(tree)
        assert [y[k].requires_grad for k in "abk"] == [True, False, False]
        ((y["a"] * y["b"].sum()).sum() * (1 + y["k"].sum())).backward()
        assert tree["b"].grad is None
        return tree["a"].grad

    if isinstance(substrate, Emulated):
        total = fcoll.vmap(lambda t: fcoll.all_reduce(t, "i"), axis_name="i")
        got = run(total, stack)
        scale = (n * stack["b"].sum()) * (1 + n * stack["k"].sum())
    else:
        got = substrate.map(lambda group, t: run(lambda t: fcoll.all_reduce(t, group), t), stack)
        scale = stack["b"].sum() * (1 + stack["k"].sum())
    close(got, (n * scale).expand(n, 2))
