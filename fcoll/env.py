"""`python -m fcoll.env`: what a bug report needs: versions, backends, devices, and the settings that matter."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

import torch
import torch.distributed as dist

import fcoll

PACKAGES = ("optree", "cloudpickle", "numpy", "rich")
SETTINGS = ("FCOLL_", "TORCH", "NCCL_", "GLOO_", "UCC_", "CUDA_VISIBLE", "HIP_VISIBLE", "OMP_", "MKL_NUM", "PYTORCH_")
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def report() -> dict[str, str]:
    """What there is, by what it is called."""
    found = {
        "fcoll": fcoll.__version__,
        "torch": f"{torch.__version__}, git {torch.version.git_version}",
        "python": sys.version.replace("\n", " "),
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
    }
    found |= {name: _version(name) for name in PACKAGES}
    found["threads"] = f"{torch.get_num_threads()} in an operation, {torch.get_num_interop_threads()} operations"
    found["backends"] = ", ".join(_backends()) or "none"
    found["devices"] = ", ".join(_devices())
    if torch.cuda.is_available():
        found["cuda"] = f"{torch.version.cuda or torch.version.hip}"
        found["cudnn"] = str(torch.backends.cudnn.version())
        if dist.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found |= {name: value for name, value in sorted(os.environ.items()) if name in RANKS or name.startswith(SETTINGS)}
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _backends() -> list[str]:
    if not dist.is_available():
        return []
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "ucc": dist.is_ucc_available(),
        "mpi": dist.is_mpi_available(),
        "xccl": dist.is_xccl_available(),
    }
    return [name for name, there in available.items() if there]


def _devices() -> list[str]:
    devices = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        for index in range(torch.accelerator.device_count()):
            name = f" {torch.cuda.get_device_name(index)}" if kind.type == "cuda" else ""
            devices.append(f"{kind.type}:{index}{name}")
    return devices


def main() -> None:
    """Print it."""
    found = report()
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name.ljust(width)}  {value}")


if __name__ == "__main__":
    main()
