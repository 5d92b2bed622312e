"""Does the site file's launch line fit this machine: is there such a launcher, has Slurm the plugin that it asks for,
and does it belong to the MPI that mpi4py loads? Here that takes a second; otherwise it shows after a wait in the queue,
as N ranks that each believe to be alone.

Invariants: the file is sourced as a batch script does it, in a shell of its own; parsing what Slurm prints is a pure
function. No MPI is started.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from mpitrain.doctor.checks import Check
from mpitrain.launch.discover import installed_library, launcher_flavour

# Plugins by which the ranks of an MPI find each other. Others may do, but nobody here has seen it.
_SUITS = {"openmpi": ("pmix",), "mpich": ("pmi2", "cray_shasta", "pmix")}
# In a container it is the container's mpitrain that runs.
_ASK = """\
source "$1" >/dev/null
printf "%s\\0" "${CONTAINER[0]:-mpitrain}" "$(command -v "${CONTAINER[0]:-mpitrain}")" "${LAUNCH[@]}"
"""


def examine_site(path: Path) -> list[Check]:
    """What a batch script that sources `path` would meet."""
    run = subprocess.run(["bash", "-e", "-c", _ASK, "-", str(path)], capture_output=True, text=True)
    if run.returncode:
        said = " ".join(run.stderr.split())[-300:] or f"exit code {run.returncode}"
        return [Check("site file", False, f"{path} fails: {said}")]
    wanted, command, *launch = run.stdout.split("\0")[:-1]
    found = [Check("site file", True, f"{path} can be sourced")]
    found.append(
        Check(wanted, True, command)
        if command
        else Check(wanted, False, f"no {wanted} on the PATH after {path}: load its environment there")
    )
    if not launch:
        return [*found, Check("launcher", False, f"{path} sets no LAUNCH, such as LAUNCH=(srun --mpi=pmix)")]
    program = shutil.which(launch[0])
    if program is None:
        return [*found, Check("launcher", False, f"there is no {launch[0]} on the PATH: {' '.join(launch)}")]
    return [*found, _srun(launch) if Path(program).name == "srun" else _own_launcher(program)]


def _srun(launch: Sequence[str]) -> Check:
    listed = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True)
    plugins = parse_mpi_list(listed.stdout + listed.stderr)
    if not plugins:
        said = " ".join((listed.stderr or listed.stdout).split())[-200:]
        return Check("launcher", False, f"srun --mpi=list tells no plugin: {said or 'it is silent'}")
    default = None
    if not any(word.startswith("--mpi") for word in launch):
        shown = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True).stdout
        found = re.search(r"^MpiDefault\s*=\s*(\S+)", shown, re.MULTILINE)
        default = found[1] if found else None
    return judge_srun(launch, plugins, default, installed_library()[0])


def judge_srun(
    launch: Sequence[str], plugins: Sequence[str], default: str | None, library: str | None
) -> Check:
    """Whether `srun` has what is asked of it.

    Args:
        launch: the launch line.
        plugins: what this Slurm has.
        default: its MpiDefault, for a line that asks for none.
        library: `"openmpi"` or `"mpich"`, which mpi4py loads; `None`: unknown.
    """
    line, have = " ".join(launch), ", ".join(plugins)
    words = [
        word.partition("=")[2] or following for word, following in pairwise([*launch, ""]) if _is_mpi(word)
    ]
    asked = words[-1] if words else default
    if asked is None or asked == "none":
        return Check("launcher", False, f"{line} asks for no MPI plugin: say --mpi=NAME, of {have}")
    if asked not in plugins:
        return Check("launcher", False, f"{line}: this Slurm has no plugin {asked}; it has {have}")
    kind = re.sub(r"_v\d+$", "", asked)
    if library and kind not in _SUITS[library]:
        suits = " or ".join(f"--mpi={name}" for name in _SUITS[library])
        return Check("launcher", False, f"{line}: mpi4py loads {library} here, which wants {suits}")
    return Check("launcher", True, f"{line}: Slurm has {have}")


def _is_mpi(word: str) -> bool:
    return word == "--mpi" or word.startswith("--mpi=")


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


def _own_launcher(program: str) -> Check:
    library, flavour = installed_library()[0], launcher_flavour(program)
    if library and flavour and library != flavour:
        text = f"{program} is {flavour}, and mpi4py loads {library}: each rank would believe that it is alone"
        return Check("launcher", False, text)
    return Check("launcher", True, f"{program} ({flavour or 'whose MPI it is, it does not tell'})")
