"""Functional collectives for PyTorch: pure functions with exact derivatives, emulated or on process groups."""

from fcoll import functional
from fcoll._version import __version__
from fcoll.errors import CollectiveTypeError, CollectiveValueError, FcollError, UnboundAxisError
from fcoll.functional import *
from fcoll.groups import WORLD, Group, group, subgroups
from fcoll.maps import vmap

__all__ = [
    "WORLD",
    "CollectiveTypeError",
    "CollectiveValueError",
    "FcollError",
    "Group",
    "UnboundAxisError",
    "__version__",
    "functional",
    "group",
    "subgroups",
    "vmap",
    *functional.__all__,
]
