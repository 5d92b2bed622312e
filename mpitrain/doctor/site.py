"""Does the site file's launch line fit this machine: is there such a launcher, has Slurm the plugin that it asks for,
does it belong to the MPI that mpi4py loads, and does a rank start by it? Here that takes seconds; otherwise it shows
after a wait in the queue, as N ranks that each believe to be alone.

Invariants: the file is sourced as a batch script does it, in a shell of its own, and one rank is started with the very
words of a batch script; judging what is there and what the rank tells is a pure function. Only srun outside of an
allocation starts nothing, for it would wait in the queue: there Slurm itself is asked what it says of the line.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from mpitrain.doctor.checks import Check
from mpitrain.launch.discover import installed_library, launcher_flavour
from mpitrain.launch.srun_plugins import SUITS, kind_of, listed, protocol
from mpitrain.system.launched.launch_variables import batch_system, is_rank

# In a container it is the container's mpitrain that runs.
_ASK = """\
source "$1" >/dev/null
printf "%s\\0" "${CONTAINER[0]:-mpitrain}" "$(command -v "${CONTAINER[0]:-mpitrain}")" "${#LAUNCH[@]}" \
    "${LAUNCH[@]}" "${BIND[@]}"
"""
# The words of a batch script for one rank, which says what it has met, as JSON.
_START = """\
source "$1" >/dev/null
shift
exec "${LAUNCH[@]}" "$@" "${BIND[@]}" "${CONTAINER[@]}" mpitrain env
"""
_DEADLINE_S = 300.0


def examine_site(path: Path) -> list[Check]:
    """What a batch script that sources `path` would meet."""
    run = subprocess.run(["bash", "-e", "-c", _ASK, "-", str(path)], capture_output=True, text=True)
    if run.returncode:
        said = " ".join(run.stderr.split())[-300:] or f"exit code {run.returncode}"
        return [Check("site file", False, f"{path} fails: {said}")]
    wanted, command, num_words, *words = run.stdout.split("\0")[:-1]
    launch, bind = words[: int(num_words)], words[int(num_words) :]
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
    is_srun = Path(program).name == "srun"
    found.append(_srun(launch) if is_srun else _own_launcher(program))
    if command and found[-1].ok:
        waits = is_srun and batch_system() != "slurm"
        found.append(_asked_of_slurm(launch, bind) if waits else _one_rank(path, launch, bind, is_srun))
    return found


def _srun(launch: Sequence[str]) -> Check:
    plugins, said = listed()
    if not plugins:
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
    if library and protocol(asked) not in SUITS[library]:
        suits = " or ".join(f"--mpi={name}" for name in SUITS[library])
        return Check("launcher", False, f"{line}: mpi4py loads {library} here, which wants {suits}")
    return Check("launcher", True, f"{line}: Slurm has {have}")


def _is_mpi(word: str) -> bool:
    return word == "--mpi" or word.startswith("--mpi=")


def _own_launcher(program: str) -> Check:
    library, flavour = installed_library()[0], launcher_flavour(program)
    if library and flavour and library != flavour:
        text = f"{program} is {flavour}, and mpi4py loads {library}: each rank would believe that it is alone"
        return Check("launcher", False, text)
    return Check("launcher", True, f"{program} ({flavour or 'whose MPI it is, it does not tell'})")


# ---- the rank


def _asked_of_slurm(launch: Sequence[str], bind: Sequence[str]) -> Check:
    """What srun says of the line where there is no allocation; it starts nothing."""
    line = [*launch, *_one_of("srun"), *bind]
    asked = subprocess.run([*line, "--test-only", "true"], capture_output=True, text=True)
    said = " ".join(asked.stderr.split())[-300:]
    text = "no rank was started, since this is no allocation: salloc, then the same command, starts one"
    if 'Try "srun --help"' in asked.stderr:
        return Check("one rank", False, f"{shlex.join(line)}: {said}")
    return Check(
        "one rank", True, text if asked.returncode == 0 else f"{text}; srun --test-only says: {said}"
    )


def _one_of(name: str) -> list[str]:
    return ["--nodes=1", "--ntasks=1"] if name == "srun" else ["-n", "1"]


def _one_rank(path: Path, launch: Sequence[str], bind: Sequence[str], is_srun: bool) -> Check:
    """Start one rank as a batch script would."""
    options = _one_of("srun" if is_srun else "")
    line = shlex.join([*launch, *options, *bind])
    if is_rank():
        return Check("one rank", True, "no rank was started, since this is one: ask without a launcher")
    try:
        run = subprocess.run(
            ["bash", "-c", _START, "-", str(path), *options],
            capture_output=True, text=True, timeout=_DEADLINE_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Check("one rank", False, f"{line} mpitrain env: no end within {_DEADLINE_S:g} s")
    try:
        told = json.loads(run.stdout[run.stdout.index("{") :])
    except ValueError:
        told = None
    if run.returncode or told is None:
        lines = [
            " ".join(line.split())[:200] for line in (run.stderr or run.stdout).splitlines() if line.strip()
        ]
        said = " ... ".join(lines[:1] + lines[1:][-1:]) or "it is silent"
        where = "" if batch_system() else "; some launchers start ranks inside a job of their system only"
        return Check("one rank", False, f"{line} mpitrain env ended with {run.returncode}: {said}{where}")
    return judge_rank(line, told)


def judge_rank(line: str, told: Mapping[str, Any]) -> Check:
    """Whether a rank's MPI and the launcher that has started it belong together, by what `mpitrain env` of it says. Of
    others such ranks would each believe to be alone."""
    library = " ".join(told["mpi"]["library"].splitlines()[0].partition(",")[0].split())
    launcher = told["launch"]["launcher"]
    if launcher is None:
        text = f"{line}: the rank finds no launcher, and each of several would believe that it is alone"
        return Check("one rank", False, text)
    kind = kind_of(library)
    of_open_mpi = launcher in ("Open MPI", "PMIx")
    if (kind == "openmpi") != of_open_mpi and (kind == "openmpi" or launcher == "Open MPI"):
        text = (
            f"{line}: the rank loads {library} and was started by {launcher}: each of several would be alone"
        )
        return Check("one rank", False, text)
    return Check("one rank", True, f"{line} starts one: {library}, by {launcher}")
