"""Functional collectives for PyTorch: pure functions with exact derivatives, emulated or on process groups."""

from fcoll import functional, lax, regions
from fcoll._version import __version__
from fcoll.barriers import barrier
from fcoll.checks import checked
from fcoll.compiling import compile
from fcoll.drawing import draw
from fcoll.errors import (
    CollectiveTypeError,
    CollectiveValueError,
    CommunicationError,
    DisagreementError,
    FcollError,
    UnboundAxisError,
)
from fcoll.functional import *
from fcoll.groups import WORLD, Group, GroupLike, group, subgroups
from fcoll.launching import launch
from fcoll.maps import vmap
from fcoll.marks import marked
from fcoll.meshes import VirtualMesh, bind, mesh, virtual_mesh
from fcoll.objects import all_gather_object, all_gather_tree, broadcast_object, broadcast_tree
from fcoll.optimizing import Plan, optimize
from fcoll.p2p import after, recv, send, token
from fcoll.pending import Pending, start, wait
from fcoll.sharding import shard_map
from fcoll.specs import P
from fcoll.svg import Picture
from fcoll.tracing import Trace, trace

__all__ = [
    "WORLD",
    "CollectiveTypeError",
    "CollectiveValueError",
    "CommunicationError",
    "DisagreementError",
    "FcollError",
    "Group",
    "GroupLike",
    "P",
    "Pending",
    "Picture",
    "Plan",
    "Trace",
    "UnboundAxisError",
    "VirtualMesh",
    "__version__",
    "after",
    "all_gather_object",
    "all_gather_tree",
    "barrier",
    "bind",
    "broadcast_object",
    "broadcast_tree",
    "checked",
    "compile",
    "draw",
    "functional",
    "group",
    "launch",
    "lax",
    "marked",
    "mesh",
    "optimize",
    "recv",
    "regions",
    "send",
    "shard_map",
    "start",
    "subgroups",
    "token",
    "trace",
    "virtual_mesh",
    "vmap",
    "wait",
    *functional.__all__,
]


def __dir__() -> list[str]:
    return sorted(__all__)  # what completion offers: the modules behind the names are no part of it
