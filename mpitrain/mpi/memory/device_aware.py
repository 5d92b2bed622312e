"""Can this MPI read and write the memory of this process's accelerator itself? A ladder that stops at the first firm
answer.

A wrong yes crashes or, worse, sends garbage; a wrong no costs a copy. So only a firm yes counts, everything
else means staging through pinned host memory. `MPITRAIN_GPU_BUFFERS=on|off|auto` overrides. It is asked by kind of
memory, as MPI calls them ("cuda", "rocm", "level_zero"): a library that reads one kind knows nothing of another.
`make gpu` proves Open MPI's answers for CUDA, yes and no; of the other libraries and kinds none was run with a GPU.
"""

import ctypes
import functools
import os
from collections.abc import Iterable
from pathlib import Path

from mpitrain.devices import accelerator
from mpitrain.errors import UsageError
from mpitrain.mpi.bindings import MPI

_SWITCH = "MPITRAIN_GPU_BUFFERS"
FORCED = f"{_SWITCH}=on"
SILENT = "the MPI library does not say, so device tensors go through pinned host memory"
KINDS = ("cuda", "rocm", "level_zero")
# Open MPI's questions by kind, and MPICH's, which Cray's and Intel's libraries have, too.
_QUERIES = {
    "cuda": ("MPIX_Query_cuda_support",),
    "rocm": ("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),
    "level_zero": ("MPIX_Query_ze_support",),
}
_GENERAL_QUERY, _NUMBERS = "MPIX_GPU_query_support", {"cuda": 0, "level_zero": 1, "rocm": 2}
# Cray MPICH, MVAPICH2, ParaStation; Intel MPI stands in `_environment`.
_ENV_SWITCHES = {
    "MPICH_GPU_SUPPORT_ENABLED": KINDS,
    "MV2_USE_CUDA": ("cuda",),
    "MV2_USE_ROCM": ("rocm",),
    "PSP_CUDA": ("cuda",),
}
_Answer = tuple[bool, str] | None


def is_forced() -> bool:
    """Whether the environment has MPI read device memory, whatever the library says of itself."""
    return os.environ.get(_SWITCH, "").lower() == "on"


@functools.cache
def gpu_aware() -> tuple[bool, str]:
    """(verdict, why). Call after MPI is initialised; asked once, then remembered (`gpu_aware.cache_clear`). Where this
    process sees no accelerator, whether MPI reads the memory of any."""
    if (answer := _override()) is not None:
        return answer
    kind = accelerator.kind()
    asked = KINDS if kind is None else (accelerator.memory_kind(kind),)
    if asked == ("",):
        return False, f"MPI knows no memory of {kind!r} devices, so their tensors go through host memory"
    for ask in (_alloc_kinds, _query_library, _environment):
        if (answer := ask(asked)) is not None:
            return answer
    return False, SILENT


def _override() -> _Answer:
    value = os.environ.get(_SWITCH, "auto").lower()
    if value not in ("on", "off", "auto"):
        raise UsageError(f"{_SWITCH}={value} is not known; set it to on, off or auto")
    return None if value == "auto" else (value == "on", FORCED if value == "on" else f"{_SWITCH}={value}")


def _alloc_kinds(asked: Iterable[str]) -> _Answer:
    """MPI 4.1: the memory kinds that were granted, such as "system,mpi,cuda:device". Which are not asked for at the
    start need not stand there, so that is no answer."""
    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds")
    if kinds is None or not grants_device(kinds, asked):
        return None
    return True, f"mpi_memory_alloc_kinds={kinds}"


def grants_device(kinds: str, asked: Iterable[str] = KINDS) -> bool:
    """True if a list of memory kinds names a device's memory ("cuda", "cuda:device", not "cuda:host")."""
    granted = {kind.strip() for kind in kinds.split(",")}
    return any({kind, f"{kind}:device"} & granted for kind in asked)


def _query_library(asked: Iterable[str]) -> _Answer:
    """The library's own functions, in the one that this process has mapped (it is not visible without its path)."""
    for path in _mapped_mpi_libraries():
        said = [said for kind in asked for said in answers(ctypes.CDLL(path), kind)]
        if said:
            name, able = max(said, key=lambda one: one[1])
            return able, f"{name}={int(able)} in {path}"
    return None


def answers(library: ctypes.CDLL, kind: str) -> list[tuple[str, bool]]:
    """What the functions of an MPI library say of a kind of memory: (call, answer) of those that it has."""
    found = [
        (f"{name}()", getattr(library, name)() == 1) for name in _QUERIES[kind] if hasattr(library, name)
    ]
    if not found and hasattr(library, _GENERAL_QUERY):
        able = ctypes.c_int(0)
        if getattr(library, _GENERAL_QUERY)(ctypes.c_int(_NUMBERS[kind]), ctypes.byref(able)) == MPI.SUCCESS:
            found.append((f"{_GENERAL_QUERY}({kind})", able.value == 1))
    return found


def _mapped_mpi_libraries() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/libmpi" in line)
    return list(
        dict.fromkeys(path for path in paths if Path(path).name.startswith(("libmpi.so", "libmpich.so")))
    )


def _environment(asked: Iterable[str]) -> _Answer:
    for name, kinds in _ENV_SWITCHES.items():
        value = os.environ.get(name)
        if value is not None and any(kind in kinds for kind in asked):
            return value == "1", f"{name}={value}"
    return _intels(asked)


def _intels(asked: Iterable[str]) -> _Answer:
    """Intel MPI's switch, off by default, is of its own devices unless I_MPI_OFFLOAD_MODE names others."""
    value, mode = os.environ.get("I_MPI_OFFLOAD"), os.environ.get("I_MPI_OFFLOAD_MODE", "level_zero")
    if value is None:
        return None
    reads = "level_zero" if mode == "auto" else mode
    return value != "0" and reads in asked, f"I_MPI_OFFLOAD={value}, I_MPI_OFFLOAD_MODE={mode}"
