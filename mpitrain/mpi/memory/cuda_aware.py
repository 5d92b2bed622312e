"""Can this MPI read and write device memory itself? A ladder that stops at the first firm answer.

A wrong yes crashes or, worse, sends garbage; a wrong no costs a copy. So only a firm yes counts, everything
else means staging through pinned host memory. `MPITRAIN_GPU_BUFFERS=on|off|auto` overrides. `make gpu` proves Open
MPI's answers, yes and no; of the other libraries none was run with a GPU.
"""

import ctypes
import functools
import os
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.mpi.bindings import MPI

_ENV_SWITCHES = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "PSP_CUDA")  # Cray MPICH, MVAPICH2, ParaStation
_SWITCH = "MPITRAIN_GPU_BUFFERS"
FORCED = f"{_SWITCH}=on"
SILENT = "the MPI library does not say, so device tensors go through pinned host memory"
_QUERIES = ("MPIX_Query_cuda_support", "MPIX_Query_rocm_support")


@functools.cache
def gpu_aware() -> tuple[bool, str]:
    """(verdict, why). Call after MPI is initialised; asked once, then remembered (`gpu_aware.cache_clear`)."""
    for ask in (_override, _alloc_kinds, _query_library, _environment):
        answer = ask()
        if answer is not None:
            return answer
    return False, SILENT


def _override() -> tuple[bool, str] | None:
    value = os.environ.get(_SWITCH, "auto").lower()
    if value not in ("on", "off", "auto"):
        raise UsageError(f"{_SWITCH}={value} is not known; set it to on, off or auto")
    return None if value == "auto" else (value == "on", FORCED if value == "on" else f"{_SWITCH}={value}")


def _alloc_kinds() -> tuple[bool, str] | None:
    """MPI 4.1: the memory kinds that were granted, such as "system,mpi,cuda:device"."""
    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds")
    if kinds is None:
        return None
    return grants_device(kinds), f"mpi_memory_alloc_kinds={kinds}"


def grants_device(kinds: str) -> bool:
    """True if a list of memory kinds names a GPU's device memory ("cuda", "cuda:device", not "cuda:host")."""
    granted = {kind.strip() for kind in kinds.split(",")}
    return bool(granted & {"cuda", "cuda:device", "rocm", "rocm:device"})


def _query_library() -> tuple[bool, str] | None:
    """Open MPI's own function, in the library this process has mapped (it is not visible without its path)."""
    for path in _mapped_mpi_libraries():
        library = ctypes.CDLL(path)
        found = [name for name in _QUERIES if hasattr(library, name)]
        granted = [name for name in found if getattr(library, name)() == 1]
        if found:
            return bool(granted), f"{(granted or found)[0]}()={int(bool(granted))} in {path}"
    return None


def _mapped_mpi_libraries() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/libmpi" in line)
    return list(
        dict.fromkeys(path for path in paths if Path(path).name.startswith(("libmpi.so", "libmpich.so")))
    )


def _environment() -> tuple[bool, str] | None:
    for name in _ENV_SWITCHES:
        value = os.environ.get(name)
        if value is not None:
            return value == "1", f"{name}={value}"
    return None
