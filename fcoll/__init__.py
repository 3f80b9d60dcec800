"""Functional collectives for PyTorch: pure functions with exact derivatives, emulated or on process groups."""

from fcoll import functional, lax
from fcoll._version import __version__
from fcoll.compiling import compile
from fcoll.errors import CollectiveTypeError, CollectiveValueError, FcollError, UnboundAxisError
from fcoll.functional import *
from fcoll.groups import WORLD, Group, GroupLike, group, subgroups
from fcoll.maps import vmap
from fcoll.meshes import VirtualMesh, bind, mesh, virtual_mesh
from fcoll.sharding import shard_map
from fcoll.specs import P
from fcoll.tracing import Trace, trace

__all__ = [
    "WORLD",
    "CollectiveTypeError",
    "CollectiveValueError",
    "FcollError",
    "Group",
    "GroupLike",
    "P",
    "Trace",
    "UnboundAxisError",
    "VirtualMesh",
    "__version__",
    "bind",
    "compile",
    "functional",
    "group",
    "lax",
    "mesh",
    "shard_map",
    "subgroups",
    "trace",
    "virtual_mesh",
    "vmap",
    *functional.__all__,
]
