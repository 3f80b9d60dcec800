"""`fcoll.barrier`: wait for each other, without a message."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fcoll import checks, groups
from fcoll.engine import SIMULATED
from fcoll.errors import fail
from fcoll.groups import GroupLike, process_of


def barrier(group: GroupLike) -> None:
    """Wait until every rank of the group has come here.

    Per rank:
        returns after the last rank's call has begun; at once on an emulated axis, whose ranks never run apart

    For what torch does not see, such as a file that one rank writes and others read, or a stopwatch. No collective
    needs one: each waits for what it receives. It has no derivative, and returns nothing that one could depend on.

    Args:
        group: the ranks.

    Raises:
        ValueError: in compiled code, where nothing would keep it in its place.

    Example:
        >>> fcoll.vmap(lambda x: (fcoll.barrier("i"), x)[1], axis_name="i")(torch.tensor([5, 6]))
        tensor([5, 6])
    """
    layout = groups.resolve("barrier", group).layout
    if torch.compiler.is_compiling():
        fail("value", "barrier: in compiled code nothing would keep it in its place; call it outside")
    if not layout.process or layout.process.startswith(SIMULATED):
        return
    try:
        dist.barrier(group=process_of(layout).group())
    except RuntimeError as error:
        checks.explain(error, "barrier", torch.empty(0), layout)
        raise
