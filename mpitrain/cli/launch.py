"""`mpitrain launch`: start the ranks with the MPI that belongs to this python.

Law of this file: whatever can be wrong with the command line is said here, once, before any rank exists.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.cli.parser import did_you_mean, natural, positive
from mpitrain.environment import is_rank, launched_size, usable_cores
from mpitrain.errors import UsageError

_DESCRIPTION = """\
Start N ranks of a command with the MPI that belongs to this python: srun inside
a Slurm allocation, else the mpirun installed beside it, else the one on the
PATH. `mpirun -n N mpitrain train ...` by hand does the same."""

_EPILOG = """\
COMMAND is `train ...`, `data pack ...`, `env`, or a script (`script.py ...`).
Options of launch come before it, options of the command after it.

examples:
  mpitrain launch -n 4 train jobs/digits.py --epochs 3
  mpitrain launch -n 4 my_loop.py --batch-size 64
  mpitrain launch -n 5 --ft ulfm train jobs/digits.py --strategy "async()"
  mpitrain launch -n 8 --host-args "--hostfile hosts" train jobs/digits.py
  mpitrain launch -n 4 --dry-run train jobs/digits.py      print the command"""

_RANKED = ("train", "env", "data")
_ALONE = ("simulate", "data stage", "data info")


def add_parser(commands: Any) -> None:
    """Add `launch` to the command's subparsers."""
    parser = commands.add_parser(
        "launch",
        help="start ranks with the MPI beside this python",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage="mpitrain launch -n N [options] COMMAND ...",
    )
    parser.add_argument("-n", type=positive, metavar="N", dest="num_ranks", help="number of ranks")
    parser.add_argument(
        "--mpi",
        choices=("auto", "openmpi", "mpich", "srun"),
        default="auto",
        help="which launcher: auto (default), openmpi, mpich or srun",
        metavar="KIND",
    )
    parser.add_argument(
        "--ft",
        choices=("none", "ulfm", "heartbeat"),
        default="none",
        help="survive the death of a worker. ulfm: Open MPI 5's mpirun; heartbeat: MPICH under srun, where a worker "
        "that has been silent for --heartbeat-s (an option of train) is given up",
        metavar="LEVEL",
    )
    parser.add_argument(
        "--host-args",
        default="",
        metavar="TEXT",
        help='further arguments for the launcher itself, such as "--hostfile FILE"',
    )
    parser.add_argument(
        "--max-restarts",
        type=natural,
        default=3,
        metavar="N",
        help="start a failed `train` again from its newest checkpoint, at most N times and only while there is "
        "progress (default 3)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command line instead of running it")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="COMMAND", help="what every rank runs")
    parser.set_defaults(run=run_launch)


def run_launch(arguments: argparse.Namespace) -> int:
    """Find the launcher, build the command, run it, and return its exit code, or what the result says."""
    from mpitrain.launch import completed, launch_command, relaunch, result_mark, run_launcher
    from mpitrain.launchers import find_launcher

    if is_rank():
        raise UsageError(
            "mpitrain launch starts ranks and cannot itself be one: run it without mpirun or srun"
        )
    num_ranks = _num_ranks(arguments)
    words = arguments.program[1:] if arguments.program[:1] == ["mpitrain"] else arguments.program
    inner = _parsed(words)
    if inner and getattr(inner, "dry_run", False):  # the plan of a run needs no ranks
        inner.ranks = inner.ranks or num_ranks
        return int(inner.run(inner))
    program = _program(words)
    launcher = find_launcher(arguments.mpi)
    trains = words[0] == "train"
    tolerant = arguments.ft != "none"
    run_dir = _run_dir(words, inner) if trains or tolerant else None
    extra = {"MPITRAIN_RUN_DIR": str(run_dir)} if run_dir else {}
    terminal = {} if arguments.dry_run else _terminal()
    command, env = launch_command(
        launcher,
        num_ranks,
        program,
        num_cores=usable_cores(),
        is_root=os.geteuid() == 0,
        fault_tolerance=arguments.ft,
        host_args=_split(arguments.host_args),
        environ={**os.environ, **extra, **terminal},
    )
    if arguments.dry_run:
        print(shell_line(command, env | extra))
        return 0

    def once(more: list[str]) -> int:
        before = result_mark(run_dir) if run_dir else None
        code = run_launcher([*command, *more], env | extra | terminal)
        judged = run_dir is not None and tolerant
        return completed(run_dir, before, code, promised=trains) if judged else code  # type: ignore[arg-type]

    return relaunch(once, run_dir, arguments.max_restarts) if trains and run_dir else once([])


def shell_line(command: list[str], env: Mapping[str, str]) -> str:
    """The command as one would type it."""
    return shlex.join([*(f"{name}={value}" for name, value in sorted(env.items())), *command])


def _num_ranks(arguments: argparse.Namespace) -> int:
    if arguments.num_ranks:
        return int(arguments.num_ranks)
    if "-n" in arguments.program:
        arguments.parser.error(
            f"-n comes before the command: mpitrain launch -n N {arguments.program[0]} ..."
        )
    if "SLURM_JOB_ID" in os.environ and (allocated := launched_size()):
        return allocated
    raise UsageError("how many ranks? mpitrain launch -n N COMMAND ...")


def _parsed(words: list[str]) -> argparse.Namespace | None:
    """Our own command's arguments: a wrong option is answered here, before N ranks repeat it."""
    if words[:1] and words[0] in _RANKED:
        from mpitrain.cli import parse

        return parse(words)
    return None


def _program(words: list[str]) -> list[str]:
    """What each rank runs: this python in every case, because the launcher was chosen for its MPI."""
    if not words:
        raise UsageError("launch what? For example: mpitrain launch -n 4 train jobs/digits.py")
    first = words[0]
    for alone in _ALONE:
        if words[: len(alone.split())] == alone.split():
            told = f"`{alone}` runs in one process and needs no ranks"
            raise UsageError(f"{told}: mpitrain {shlex.join(words)}")
    if first in _RANKED:
        return [sys.executable, *_safe_path(), "-m", "mpitrain", *words]
    if first in ("python", "python3"):
        return [sys.executable, *words[1:]]
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise UsageError(f"no script {first!r} (looked in {Path.cwd()})")
        return [sys.executable, *words]
    raise UsageError(
        f"cannot launch {first!r}{did_you_mean(first, _RANKED)}; launch takes train, data pack, data check, env or"
        " a script.py"
    )


def _terminal() -> dict[str, str]:
    """Tells rank 0 that its progress line ends on a terminal: mpirun's pipe hides it."""
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return {"MPITRAIN_TERMINAL": str(os.get_terminal_size(sys.stderr.fileno()).columns)}
    return {}


def _safe_path() -> list[str]:
    """`-P`, as the console script has it: a folder `mpitrain` in the working directory is not the package."""
    return [] if Path(__file__).parents[2] == Path.cwd() else ["-P"]


def _run_dir(words: list[str], inner: argparse.Namespace | None) -> Path:
    """Where `result.json` will be, fixed before the launch: under --ft that file says how the run ended."""
    from mpitrain.report import default_run_dir

    given = getattr(inner, "run_dir", None)
    if given:
        return Path(given).absolute()
    name = next((Path(word).stem for word in words if word.endswith(".py")), "run")
    return default_run_dir(name).absolute()


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--host-args {text!r}: {error}") from None
