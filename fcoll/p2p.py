"""Messages between two ranks of a process group, differentiable, in an order that tokens carry.

A token is a 0-d tensor of zero. It says what a message comes after: `send` and `recv` take one and return the next, so
that a chain of tokens is the order of this rank's messages. Derivatives run the chain backwards: the transpose of
`send` is `recv` from the rank it went to, the transpose of `recv` is `send` to the rank it came from. Backward
therefore blocks only where forward would.

    token = fcoll.token(x)                           # x: what is differentiated
    token = fcoll.send(x, group, 1, token)           # rank 0
    loss = fcoll.after(loss, token)                  # a last send: so that the backward of loss reaches it

    token = fcoll.token(w)                           # rank 1
    x, token = fcoll.recv(like, group, 0, token)

The k-th message that a rank sends to another is the k-th that the other receives from it, one message for each leaf.
If the two do not expect the same shape and dtype, gloo fills a part of a larger buffer and aborts on a smaller one;
under `fcoll.checked()` both ranks raise instead. A message that nobody receives blocks until the group's timeout.
Where all ranks take part at once, `permute` and `shift` are shorter, cannot deadlock, and run on an emulated axis too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fcoll import _torch, checks, engine_p2p, recorder
from fcoll.calls import Call
from fcoll.engine import SIMULATED, Process
from fcoll.errors import fail
from fcoll.groups import GroupLike, Layout, process_of

__all__ = ["after", "recv", "send", "token"]

Tree = TypeVar("Tree")


def token(*after: Any) -> Tensor:
    """The start of a chain of messages, which come after the computation of `after`.

    Derivatives pass through a token as through any tensor: those of the messages that follow run where something is
    differentiated with respect to `after` or what it was made from. With plain autograd the token requires grad in any
    case, so that `.backward()` sends the cotangents of what is received, whatever else requires grad.

    Args:
        after: trees of tensors of any shape and dtype. Inside `torch.func.grad` and its like, and in compiled code,
            give what is differentiated, a floating-point tensor.

    Returns:
        Zero, a 0-d float32 tensor.

    Raises:
        ValueError: nothing given where derivatives would miss the messages.
        NotImplementedError: forward-mode derivatives, of which other ranks could not know.

    Example:
        >>> fcoll.token()
        tensor(0., requires_grad=True)
    """
    tied = [leaf for leaf in Call("token", after, (), alike=False).leaves if _differentiable(leaf)]
    kinds, compiled = _torch.transforms(), torch.compiler.is_compiling()
    if "Jvp" in kinds:
        _no_forward_mode()
    if not tied and torch.is_grad_enabled():
        if "Grad" in kinds:
            fail("value", "token: inside torch.func.grad and its like, give what is differentiated: fcoll.token(x)")
        if compiled:
            fail("value", "token: in compiled code, give what is differentiated: fcoll.token(x)")
    made = torch.zeros((), requires_grad=torch.is_grad_enabled() and "Grad" not in kinds and not compiled)
    for leaf in tied:
        made = made + _wait(leaf, 0)
    return made


def send(tree: Tree, group: GroupLike, dst: int, token: Tensor) -> Tensor:
    """Send a tree to one rank of the group, which calls `recv`.

    Per rank:
        on `dst`, the y of recv is this x

    Transpose: `recv` from dst: x̄ is what dst sends then. The backward of a last message runs if the loss knows of it:
    `loss = fcoll.after(loss, token)`.

    It returns when dst has received it or the backend has taken it over. Two ranks that both send first may wait for
    each other: let one receive first, or use `permute`.

    Args:
        tree: leaves of any dtype, each a message of its own; their shapes and dtypes are those that dst expects.
        group: the ranks; not an emulated axis, where all ranks make one call: use `permute`.
        dst: index within the group, of another rank.
        token: what this message comes after.

    Returns:
        The token for what comes after this message.

    Raises:
        ValueError: a dst that is this rank itself or none of the group, or an emulated axis.
        TypeError: a token that is none.
        NotImplementedError: forward-mode derivatives, of which the other rank could not know.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.send(x, "i", 1, fcoll.token()), axis_name="i")(torch.ones(2))
        Traceback (most recent call last):
        fcoll.errors.CollectiveValueError: send: 'i' is an emulated axis, on which all ranks make one call; write \
fcoll.permute(tree, 'i', [(0, 1)])
    """
    call = Call("send", tree, group, alike=False)
    layout = _layout(call, "dst", dst)
    token = _checked(call, token)
    for leaf in call.leaves:
        token = _send(leaf, token, dst, *layout)
    return token


def recv(like: Tree, group: GroupLike, src: int, token: Tensor) -> tuple[Tree, Tensor]:
    """Receive a tree from one rank of the group, which calls `send`.

    Per rank:
        y_r = x_src, the tree that src sends

    Transpose: `send` to src: the cotangent of y goes there, if the loss depends on y or on a later token; zeros where y
    was not used.

    Args:
        like: leaves of the shapes and dtypes that src sends; their values do not matter, and they get no gradient.
        group: the ranks; not an emulated axis, where all ranks make one call: use `permute`.
        src: index within the group, of another rank.
        token: what this message comes after.

    Returns:
        The tree, and the token for what comes after this message.

    Raises:
        ValueError: a src that is this rank itself or none of the group, or an emulated axis.
        TypeError: a token that is none.
        NotImplementedError: forward-mode derivatives, of which the other rank could not know.

    Example:
        >>> fcoll.vmap(lambda x: fcoll.recv(x, "i", 0, fcoll.token())[0], axis_name="i")(torch.ones(2))
        Traceback (most recent call last):
        fcoll.errors.CollectiveValueError: recv: 'i' is an emulated axis, on which all ranks make one call; write \
fcoll.permute(tree, 'i', [(0, 1)])
    """
    call = Call("recv", like, group, alike=False)
    layout = _layout(call, "src", src)
    token = _checked(call, token)
    results = []
    for leaf in call.leaves:
        y, token = _recv(leaf.detach(), token, src, *layout)
        results.append(y)
    return call.rebuild(results), token


def after(tree: Tree, token: Tensor) -> Tree:
    """A tree that comes after a token's messages, so that its backward runs through them.

    Per rank:
        y_r = x_r

    Transpose: the identity, before the backward of the messages.

    Args:
        tree: leaves of any dtype; those of integers and booleans have no backward to tie.
        token: of the last message.

    Raises:
        ValueError: no leaf of floating-point or complex numbers.
        TypeError: a token that is none.

    Example:
        >>> fcoll.after(torch.tensor(3.0), fcoll.token())
        tensor(3., grad_fn=<...>)
    """
    call = Call("after", tree, (), alike=False)
    token = _checked(call, token)
    if not any(map(_differentiable, call.leaves)):
        fail("value", "after: no leaf has a derivative, so none can bring the backward to the messages; give the loss")
    return call.rebuild([_tie(leaf, token) if _differentiable(leaf) else leaf for leaf in call.leaves])


# ---- checks


def _layout(call: Call[Any], name: str, peer: int) -> Layout:
    """The process group of a message, to or from another rank."""
    call._even()
    peer = call.root(name, peer)
    layout, n, label = call.axis.layout, call.axis.n, call.axis.label
    if not layout.process:
        sends = name == "dst"
        other = str(1 - peer) if n == 2 else "s" if sends else "d"
        pair = f"[({other}, {peer})]" if sends else f"[({peer}, {other})]"
        fail(
            "value",
            "{}: {} is an emulated axis, on which all ranks make one call; write fcoll.permute(tree, {}, {}){}",
            call.function, label, label, pair,
            "" if n == 2 else f" for each {'sender s' if sends else 'receiver d'} among the {n} ranks",
        )  # fmt: skip
    if _here(layout.process, n, layout.order) == peer:
        fail("value", "{}: {}={} is this rank itself; a message goes to another", call.function, name, peer)
    return layout


@_torch.assume_constant_result
def _here(name: str, n: int, order: tuple[int, ...]) -> int:
    """This process's index; in a trace, where there is none, no rank's."""
    return -1 if name.startswith(SIMULATED) else Process(name, n, order).here()


def _checked(call: Call[Any], token: Tensor) -> Tensor:
    if "Jvp" in _torch.transforms():
        _no_forward_mode()
    if not isinstance(token, Tensor) or token.ndim or token.dtype != torch.float32:
        fail("type", "{}: token is what fcoll.token() makes and send and recv return", call.function)
    return token


@_torch.allow_in_graph  # raises while Dynamo traces its caller
def _no_forward_mode() -> None:
    raise NotImplementedError(
        "send and recv have no forward-mode derivative (jvp, jacfwd, hessian): the other rank would have to send and "
        "receive tangents, and cannot know; use reverse mode (grad, vjp, jacrev), or permute"
    )


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


# ---- derivatives: send and recv are each other's transposes, and so are tie and wait
#
# Under vmap a batch travels as one message. A token is batched if what it comes after is, and then all that
# follows is, so that both ends of a message agree; the batch axes are in front, and a token has no other axes.
# A message of backward also comes after the token of its forward: the second backward finds the way to the first's.


class _Static:
    """What is not a tensor, in one piece: torch takes containers apart at every level."""

    __slots__ = ("layout", "peer")

    def __init__(self, peer: int, layout: tuple[Any, ...]) -> None:
        self.peer, self.layout = peer, Layout(*layout)


@_torch.allow_in_graph  # Dynamo would drop the vmap rule of a Function that it traces into
def _send(x: Tensor, token: Tensor, peer: int, *layout: Any) -> Tensor:
    return _apply_send(x, token, _Static(peer, layout))


@_torch.allow_in_graph
def _recv(like: Tensor, token: Tensor, peer: int, *layout: Any) -> tuple[Tensor, Tensor]:
    return _apply_recv(like, token, _Static(peer, layout))


@_torch.allow_in_graph
def _tie(x: Tensor, token: Tensor) -> Tensor:
    return _apply_tie(x, token)


@_torch.allow_in_graph
def _wait(x: Tensor, batches: int) -> Tensor:
    return _apply_wait(x, batches)


def _arguments(static: _Static) -> tuple[int, Process, bool]:
    return static.peer, process_of(static.layout), bool(static.layout.check)


def _source(static: _Static) -> str:
    """Where the message was called for, if somebody may ask."""
    return recorder.source() if recorder.active() or static.layout.check else ""


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, token: Tensor, static: _Static) -> Tensor:
        recorder.tell("send", x, static.layout, (static.peer,))
        try:
            return engine_p2p.send(x, token, *_arguments(static))
        except RuntimeError as error:
            checks.explain(error, f"send to {static.peer}", x, static.layout)
            raise

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, ctx.static = inputs
        ctx.shape, ctx.dtype, ctx.device = x.shape, x.dtype, x.device
        ctx.source = _source(ctx.static)
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        (sent,) = ctx.saved_tensors
        like = sent.new_empty((), dtype=ctx.dtype, device=ctx.device)
        if not _differentiable(like):
            return None, token, None
        with recorder.derivative(ctx.source, "send"):
            x, token = _apply_recv(like.expand(ctx.shape), token + sent, ctx.static)
        return x, token, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, token: Tensor, static: _Static) -> Any:
        x, token = _batched(info, in_dims, x, token)
        return _apply_send(x, token, static), 0


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(like: Tensor, token: Tensor, static: _Static) -> tuple[Tensor, Tensor]:
        recorder.tell("recv", like, static.layout, (static.peer,))
        try:
            return engine_p2p.recv(like, token, *_arguments(static))
        except RuntimeError as error:
            checks.explain(error, f"recv from {static.peer}", like, static.layout)
            raise

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.static = inputs[-1]
        ctx.source = _source(ctx.static)
        ctx.differentiable = _differentiable(output[0])
        if not ctx.differentiable:
            ctx.mark_non_differentiable(output[0])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, y: Tensor, token: Tensor) -> Any:
        if ctx.differentiable:
            with recorder.derivative(ctx.source, "recv"):
                (received,) = ctx.saved_tensors
                token = _apply_send(y, token + received, ctx.static)
        return None, token, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], like: Tensor, token: Tensor, static: _Static) -> Any:
        like, token = _batched(info, in_dims, like, token)
        return _apply_recv(like, token, static), (0, 0)


class _Tie(torch.autograd.Function):
    """x, after a token."""

    @staticmethod
    def forward(x: Tensor, token: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.batches = inputs[1].ndim

    @staticmethod
    def backward(ctx: Any, y: Tensor) -> Any:
        return y, _apply_wait(y, ctx.batches)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, token: Tensor) -> Any:
        x, token = _batched(info, in_dims, x, token)
        return _apply_tie(x, token), 0


class _Wait(torch.autograd.Function):
    """A token after x, whose first axes are those of batches."""

    @staticmethod
    def forward(x: Tensor, batches: int) -> Tensor:
        return torch.zeros(x.shape[:batches])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _ = inputs
        ctx.shape, ctx.dtype, ctx.device = x.shape, x.dtype, x.device

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        zero = token.new_zeros((), dtype=ctx.dtype, device=ctx.device)
        return _apply_tie(zero.expand(ctx.shape), token), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, batches: int) -> Any:
        return _apply_wait(x.movedim(in_dims[0], 0), batches + 1), 0


def _batched(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor) -> list[Tensor]:
    """All of them with the batch axis in front."""
    return [
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, in_dims, strict=False)
    ]


_apply_send: Callable[..., Tensor] = _Send.apply
_apply_recv: Callable[..., tuple[Tensor, Tensor]] = _Recv.apply
_apply_tie: Callable[..., Tensor] = _Tie.apply
_apply_wait: Callable[..., Tensor] = _Wait.apply
