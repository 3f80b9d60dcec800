"""Messages between two ranks on a process group: no derivatives, no trees.

While something traces, a message is an operation of its own, `fcoll::send` or `fcoll::recv`, which compilers neither
drop nor reorder; otherwise it is `dist.send` or `dist.recv`. Tokens are zeros whose only meaning is what they come
after.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import _torch
from fcoll.engine import Process
from fcoll.errors import DisagreementError, explained
from fcoll.wire import movable


def send(x: Tensor, token: Tensor, dst: int, process: Process, check: bool) -> Tensor:
    """Send x to rank dst; the token that comes after. With `check`, both ends compare first what they expect."""
    wire, _ = movable(x)
    arguments = process.rank(dst), process.name, check
    if _torch.tracing(x):
        after: Tensor = torch.ops.fcoll.send(_torch.unknown(wire), token, *arguments)
        return after
    return _send(wire, token, *arguments)


def recv(like: Tensor, token: Tensor, src: int, process: Process, check: bool) -> tuple[Tensor, Tensor]:
    """What rank src sends, of the shape and dtype of `like`; the token that comes after."""
    wire, back = movable(torch.empty(like.shape, dtype=like.dtype, device="meta"))
    arguments = token, wire.shape, wire.dtype, like.device, process.rank(src), process.name, check
    y, after = torch.ops.fcoll.recv(*arguments) if _torch.tracing(like) else _recv(*arguments)
    return back(y), after


def _send(x: Tensor, token: Tensor, dst: int, group: str, check: bool) -> Tensor:
    if check:
        _compare("send", x.shape, x.dtype, x.device, dst, group)
    dist.send(x, group=_torch.process_group(group), group_dst=dst)
    return torch.zeros_like(token)


def _recv(
    token: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device, src: int, group: str, check: bool
) -> tuple[Tensor, Tensor]:
    if check:
        _compare("recv", shape, dtype, device, src, group)
    y = torch.empty(shape, dtype=dtype, device=device)
    dist.recv(y, group=_torch.process_group(group), group_src=src)
    return y, torch.zeros_like(token)


_send_op = torch.library.custom_op("fcoll::send", _send, mutates_args=())
_recv_op = torch.library.custom_op("fcoll::recv", _recv, mutates_args=())


@_send_op.register_fake
def _(x: Tensor, token: Tensor, dst: int, group: str, check: bool) -> Tensor:
    return torch.zeros_like(token)


@_recv_op.register_fake
def _(
    token: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device, src: int, group: str, check: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty(shape, dtype=dtype, device=device), torch.zeros_like(token)


_torch.keep_in_order(_send_op)
_torch.keep_in_order(_recv_op)

_FACTS = 256  # bytes of a message that says what the next one is


def _compare(
    function: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, peer: int, group: str
) -> None:
    """Both ends raise if they do not expect the same; a backend would fill a part of the buffer, or abort."""
    mine = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    pg = _torch.process_group(group)
    ours = torch.tensor(list(mine.encode()[:_FACTS].ljust(_FACTS)), dtype=torch.uint8, device=device)
    theirs = torch.empty_like(ours)
    if function == "send":
        dist.send(ours, group=pg, group_dst=peer)
        dist.recv(theirs, group=pg, group_src=peer)
    else:
        dist.recv(theirs, group=pg, group_src=peer)
        dist.send(ours, group=pg, group_dst=peer)
    said = bytes(theirs.tolist()).decode().rstrip()
    if said != mine:
        way, other = ("to", "receives") if function == "send" else ("from", "sends")
        text = f"{function} {way} rank {peer} of the group: this rank's is {mine}, that one {other} {said}"
        raise explained(DisagreementError(text), "Ranks that disagree")
