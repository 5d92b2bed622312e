"""ULFM where Slurm's PMIx plugin has started the ranks of Open MPI, and no launcher of Open MPI has prepared it.

Three things are missing there. Open MPI's settings for ULFM, which its launcher takes from a file (`ft-mpi`), come from
here; and ranks of one node talk by TCP too, since a connection that closes is all that tells of a death. Open MPI tells
Slurm of each rank that has died, upon which the plugin ends the step: a library of one function that does nothing takes
the place of PMIx's, and has to be loaded before MPI is. It is built by the C compiler of the node when it is needed,
and is gone as soon as it is loaded, so that nodes share no file. And the plugin ends the step when a rank's connection
to it closes, as that of a rank that is killed on a node that lives: a process that sleeps shares it.

Open MPI's detector of silent ranks stays off. Without its thread it takes a rank for dead that computes for longer than
its patience between two calls of MPI; with it, one start in 22 crashed in `MPI_Init` (5.0.11, six ranks; 0 of 22
without it), and `MPI_Finalize` never returned. This file imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

# What `mpirun --with-ft ulfm` takes from Open MPI's own file, but for the transports.
_SETTINGS = {
    "mpi_ft_enable": "1", "pml": "ob1", "btl": "tcp,self", "coll": "^hcoll,portals4", "mtl": "^ofi,portals4,psm2",
    "btl_base_warn_peer_error": "0",
}  # fmt: skip
_DETECTOR = "OMPI_MCA_mpi_ft_detector"
# As in pmix.h: PMIx_Notify_event(status, source, range, info, number of infos, callback, its data).
_SOURCE = """\
int PMIx_Notify_event(int status, const void *source, unsigned char range, const void *info, unsigned long num_infos,
                      void *callback, void *data)
{
    (void)status, (void)source, (void)range, (void)info, (void)num_infos, (void)callback, (void)data;
    return 0;
}
"""
_SLEEPS = "trap '' HUP INT TERM USR1 USR2; exec sleep infinity"  # what the ranks are asked, it is not
_COMPILER_S = 30  # on a slow file system

_why_not = ""
_sharing: subprocess.Popen[bytes] | None = None


def is_from_slurm() -> bool:
    """Whether Slurm's PMIx plugin has started this rank, and not a launcher of Open MPI inside a job of Slurm."""
    return os.environ.get("PMIX_NAMESPACE", "").startswith("slurm.")


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Before MPI is loaded: set what nobody has set, and keep Open MPI of this process from telling Slurm of a death.
    `why_not()` says afterwards whether that has come about."""
    global _why_not
    for name, value in _SETTINGS.items():
        environ.setdefault(f"OMPI_MCA_{name}", value)
    if "mpi4py.MPI" in sys.modules:
        _why_not = "the program imports mpi4py.MPI before mpitrain, and MPI has found Slurm's PMIx by then"
        return
    compiler = shlex.split(environ.get("CC", "")) or ["cc"]
    try:
        _load(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        _why_not = f"{compiler[0]} builds no library here that keeps the word of a death from Slurm ({error})"


def _load(compiler: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="mpitrain-") as folder:
        source, library = Path(folder, "no_notice.c"), Path(folder, "no_notice.so")
        source.write_text(_SOURCE)
        command = [*compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_S)
        if run.returncode:
            raise OSError(" ".join([f"exit code {run.returncode}", *run.stderr.strip().splitlines()[-1:]]))
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def share_connection(environ: Mapping[str, str] = os.environ) -> None:
    """Once MPI has started: have a process that sleeps share this rank's connection to Slurm's PMIx server. The server
    takes a connection that closes for an abort, and ends the step; of a rank that is killed it stays open so, until the
    step ends and Slurm ends all that is left of it. `leave` ends that process with the rank."""
    global _sharing
    ports = [int(port) for uri in _server_uris(environ) if (port := uri.rpartition(":")[2]).isdigit()]
    found = [number for number in _open_sockets() if _port_of_peer(number) in ports]
    if found:
        nowhere = subprocess.DEVNULL  # srun waits for the rank's own streams to close
        _sharing = subprocess.Popen(
            ["sh", "-c", _SLEEPS], stdin=nowhere, stdout=nowhere, stderr=nowhere, pass_fds=found
        )


def _server_uris(environ: Mapping[str, str]) -> list[str]:
    return [value for name, value in environ.items() if name.startswith("PMIX_SERVER_URI")]


def _open_sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


def _port_of_peer(number: int) -> int | None:
    """Of a connection over IP."""
    try:
        with socket.socket(fileno=os.dup(number)) as one:
            return int(one.getpeername()[1])
    except (OSError, IndexError, TypeError, ValueError):
        return None


def leave() -> None:
    """At the orderly end of this rank."""
    if _sharing is not None:
        _sharing.kill()


def why_not() -> str:
    """Why Slurm would be told of a death all the same, and end the step; empty where it would not, or need not."""
    return _why_not


def hangs_in_finalize() -> bool:
    """Whether `MPI_Finalize` would never return: beside the detector, where the user has turned it on, it does not, not
    even where nobody has died (Open MPI 5.0.11, 2 of 2 runs; 0 of 3 without the detector)."""
    return is_from_slurm() and os.environ.get(_DETECTOR, "0").lower() in ("1", "true", "yes", "enabled")
