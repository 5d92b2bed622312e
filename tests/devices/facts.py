"""What `make gpu` writes down of the machine: a line of JSON, from a process that has begun with torch and MPI."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import mpi4py
import numpy
import torch
import torch.distributed as dist
from mpi4py import MPI

from mpitrain.devices import accelerator
from mpitrain.mpi.memory.device_aware import gpu_aware
from mpitrain.reporting.environment import git_revision
from tests.devices import tested

HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# Where a driver says its version, by the kind that torch calls its devices.
DRIVERS = {
    "nvidia": Path("/proc/driver/nvidia/version"),
    "amdgpu": Path("/sys/module/amdgpu/version"),
    "xe": Path("/sys/module/xe/srcversion"),
    "i915": Path("/sys/module/i915/srcversion"),
}


def why_none() -> str:
    """Why torch sees no accelerator."""
    built = [name for name in ("cuda", "hip", "xpu") if getattr(torch.version, name, None)]
    if not built:
        return f"torch {torch.__version__} is built for the host alone"
    hidden = ", ".join(f"{name}={os.environ[name]}" for name in HIDING if name in os.environ)
    told = f"torch {torch.__version__}, built for {', '.join(built)}, sees no device"
    return f"{told}; {hidden or 'none is hidden'}; {driver()}"


def driver() -> str:
    """What the drivers that are loaded say of themselves."""
    told = []
    for name, path in DRIVERS.items():
        if path.exists():
            told.append(f"{name} {path.read_text().splitlines()[0].strip()}")
    return ", ".join(told) or "no driver that says its version"


def facts() -> dict[str, Any]:
    """For `tests/gpu.py`: `kind`, `num_devices` and the `lines` that head its file; or why there is no accelerator."""
    kind = tested.kind()
    if kind is None:
        return {"kind": None, "why": why_none()}
    device, count = torch.device(kind, 0), accelerator.num_devices()
    size = accelerator.memory_bytes_of(device)
    memory = "memory not told" if size is None else f"{size / 2**30:.0f} GiB each"
    version, *_ = MPI.Get_library_version().splitlines()
    able, why = gpu_aware()
    own = dist.Backend.default_device_backend_map.get(kind, "none")
    built = f"built for CUDA {torch.version.cuda}, ROCm {torch.version.hip}"
    lines = [
        f"{accelerator.name_of(device)} torch {torch.__version__} {version.split(',')[0]}",
        *(["a REHEARSAL on a simulated accelerator: no GPU took part"] if tested.is_simulated() else []),
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, commit {git_revision(Path(__file__).parents[2])}",
        f"{count} device(s) that torch calls {kind}, {memory}; {driver()}",
        f"Python {platform.python_version()}, NumPy {numpy.__version__}, mpi4py {mpi4py.__version__}; torch is {built}",
        f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Linux {platform.release()}",
        f"MPI reads the device's memory: {'yes' if able else 'no'}: {why}",
        f"torch's own back end for it: {own}, {'built' if dist.is_backend_available(own) else 'not built'}",
    ]
    return {"kind": kind, "num_devices": count, "lines": lines}


if __name__ == "__main__":
    print(json.dumps(facts()), flush=True)
