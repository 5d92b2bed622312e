"""`mpitrain launch`: start the ranks with the MPI that belongs to this python.

Invariants: whatever can be wrong with the command line is said here, once, before any rank exists.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.cli.common.options import command, option, switch
from mpitrain.cli.common.parser import did_you_mean
from mpitrain.errors import EXIT_OK, UsageError
from mpitrain.system.files.run_directory import is_same_start, new_attempt_id
from mpitrain.system.files.run_lock import LAUNCH_LOCK_FILE, RunLock
from mpitrain.system.launched.launch_variables import launched_size, usable_cores, why_no_launching
from mpitrain.system.number_texts import natural, positive, rate
from mpitrain.system.saying import say, tell

if TYPE_CHECKING:
    from mpitrain.launch.supervision import Outcome, Requests

_DESCRIPTION = """\
Start N ranks of a command with the MPI that belongs to this python: srun inside
a Slurm allocation, flux inside one of Flux, else the mpirun installed beside
it, else the one on the PATH, which inside a PBS or LSF job takes the job's
hosts. `mpirun -n N mpitrain train ...` by hand does the same."""

_EPILOG = """\
COMMAND is `train ...`, `sweep ...`, `predict ...`, `ensemble ...`,
`data pack ...`, `env`, or a script (`script.py ...`). Options of launch come
before it, those of the command after.

Ctrl-C ends the ranks (exit code 130). SIGTERM, SIGHUP and SIGUSR1 ask `train`
for a checkpoint, then end it (75); a second SIGTERM after 5 s ends it at once
(143), but not inside a batch job. Nothing is started again after any of them.
SIGQUIT (Ctrl-\\) writes the stacks of all ranks, which go on.

examples:
  mpitrain launch -n 4 train jobs/digits.py --epochs 3
  mpitrain launch -n 4 my_loop.py --batch-size 64
  mpitrain launch -n 5 --ft ulfm train jobs/digits.py --strategy "async()"
  mpitrain launch -n 8 --host-args "--hostfile hosts" train jobs/digits.py
  mpitrain launch -n 4 --dry-run train jobs/digits.py      print the command"""

_RANKED = ("train", "sweep", "predict", "ensemble", "data", "env")
_ALONE = ("simulate", "report", "runs", "data stage", "data info")


def add_parser(commands: Any) -> None:
    """Add `launch` to the command's subparsers."""
    parser = command(
        commands,
        "launch",
        "start ranks with the MPI beside this python",
        run_launch,
        _DESCRIPTION,
        _EPILOG,
        usage="mpitrain launch -n N [options] COMMAND ...",
    )
    option(parser, "-n", "N", "number of ranks", positive, dest="num_ranks")
    option(
        parser, "--mpi", "KIND",
        "which launcher: auto (default), openmpi, mpich, srun, flux, or pals (HPE Cray's mpiexec)",
        default="auto", choices=("auto", "openmpi", "mpich", "srun", "flux", "pals"),
    )  # fmt: skip
    option(
        parser, "--ft", "LEVEL",
        "survive the death of a worker. ulfm: Open MPI 5, mpirun or srun; heartbeat: MPICH under srun, where a worker "
        "that has been silent for --heartbeat-s (an option of train) is evicted",
        default="none", choices=("none", "ulfm", "heartbeat"),
    )  # fmt: skip
    option(
        parser, "--host-args", "TEXT",
        'further arguments for the launcher itself, such as "--hostfile FILE"',
        default="",
    )  # fmt: skip
    option(
        parser, "--interface", "NAME",
        "network interface that ranks listen and talk on, such as ib0 (default: shared memory alone on one node, "
        "MPI's choice over several)",
        default="",
    )  # fmt: skip
    _add_patience(parser)
    switch(parser, "--dry-run", "print the command line instead of running it")
    option(parser, "program", "COMMAND", "what every rank runs", nargs=argparse.REMAINDER)


def _add_patience(parser: argparse.ArgumentParser) -> None:
    """How often, and after how long, a launch is given up."""
    option(
        parser, "--max-restarts", "N",
        "start a failed `train` again from its newest checkpoint, at most N times and only while there is "
        "progress (default 3)",
        natural, 3,
    )  # fmt: skip
    option(
        parser, "--start-timeout-s", "S",
        "end the launch with exit code 1 when a rank has not begun to train after so long: imports, MPI's start "
        "and a first look at the data; in a script, not come as far as MPI's start; 0 is never (default 600)",
        rate, 600.0,
    )  # fmt: skip
    option(
        parser, "--host-timeout-s", "S",
        "end the MPI launcher when nothing was heard of a host for so long, and no other rank gets on; 0 is "
        "never (default 120)",
        rate, 120.0,
    )  # fmt: skip


def run_launch(arguments: argparse.Namespace) -> int:
    """Find the launcher, build the command, run it, and return its exit code, or what the result says."""
    from mpitrain.launch.supervision import Requests

    if why_not := why_no_launching("launch"):
        raise UsageError(why_not)
    num_ranks = _num_ranks(arguments)
    words = arguments.program[1:] if arguments.program[:1] == ["mpitrain"] else arguments.program
    inner = _parsed(arguments, words)
    if getattr(inner, "resume", None) == "auto" and not getattr(inner, "run_dir", None):
        from mpitrain.job import AUTO_WHERE

        raise UsageError(AUTO_WHERE)
    if inner and getattr(inner, "dry_run", False):  # the plan of a run needs no ranks
        if words[0] == "train":
            inner.ranks = inner.ranks or num_ranks
        return inner.run(inner) or EXIT_OK
    with Requests() as requests:
        try:
            return _Launch(arguments, num_ranks, words, inner, requests).run()
        except UsageError:
            if requests.abort:  # what was asked for a moment ago has been interrupted too
                return requests.abort
            raise


class _Launch:
    """One `mpitrain launch`: the launcher and, if there is one, the run directory; `run` starts it, again if needed."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        num_ranks: int,
        words: list[str],
        inner: argparse.Namespace | None,
        requests: Requests,
    ):
        from mpitrain.launch.command import is_local, left_to_launcher
        from mpitrain.launch.discover import find_launcher

        self.arguments, self.num_ranks, self.requests = arguments, num_ranks, requests
        self.attempts: list[str] = []  # the ids of its starts
        self.program = _program(words)
        self.launcher = find_launcher(arguments.mpi)
        self.trains, self.survives_deaths = words[0] == "train", arguments.ft != "none"
        self.run_dir = _run_dir(words, inner) if self.trains or self.survives_deaths else None
        self.insists = self.trains and _has_rate(inner)
        self.host_args = _split(arguments.host_args)
        self.local = is_local(self.launcher, self.host_args, os.environ)
        if whose := left_to_launcher(self.launcher, self.host_args, os.environ):
            tell(f"mpitrain: {whose}")

    def run(self) -> int:
        """The exit code."""
        from mpitrain.launch.command import relaunch
        from mpitrain.launch.supervision import launch_folder

        if self.arguments.dry_run:
            say(shell_line(*self._command(None)))
            return 0
        with launch_folder(self.run_dir, self.local) as folder, self._locked(folder):

            def once(more: list[str]) -> Outcome:
                return self._once(folder, more)

            if self.trains and self.run_dir:
                return relaunch(
                    once,
                    self.run_dir,
                    self.arguments.max_restarts,
                    self.requests,
                    self._is_ours,
                    self.insists,
                )
            return self.requests.exit_code(once([]).code)

    @contextlib.contextmanager
    def _locked(self, folder: Path | None) -> Iterator[None]:
        """Between two starts, too, no other launch begins in the run directory. Where nothing can be written there, the
        ranks say so."""
        if not self.trains or self.run_dir is None or folder is None:
            yield
            return
        lock = RunLock(self.run_dir, new_attempt_id(), LAUNCH_LOCK_FILE)
        lock.take()
        try:
            yield
        finally:
            lock.release()

    def _is_ours(self, attempt: str) -> bool:
        return not self.attempts or any(is_same_start(attempt, one) for one in self.attempts)

    def _once(self, folder: Path | None, more: list[str]) -> Outcome:
        from mpitrain.launch.command import completed, has_result, result_mark
        from mpitrain.launch.supervision import Supervisor, reported_by_ranks
        from mpitrain.launch.watch import Watch
        from mpitrain.system.launched import rank_status

        arguments, run_dir = self.arguments, self.run_dir
        before = result_mark(run_dir) if run_dir else None
        watch, attempt = None, ""
        if folder:
            attempt = new_attempt_id() if self.trains else ""  # a script may train several times
            self.attempts += [attempt] if attempt else []
            beat_s = rank_status.beat_s(self.num_ranks, arguments.host_timeout_s)
            rank_status.open_folder(folder, beat_s, attempt)
            owed = rank_status.READY if self.trains else rank_status.STARTED
            watch = Watch(self.num_ranks, owed, arguments.start_timeout_s, arguments.host_timeout_s)

        def finished() -> bool:
            return self.trains and run_dir is not None and has_result(run_dir, before, attempt)

        supervisor = Supervisor(
            self.launcher.flavour, self.requests, folder, watch, finished, self.trains, self.survives_deaths,
            str(run_dir / "stacks") if run_dir else "",
        )  # fmt: skip
        command, env = self._command(folder)
        outcome = supervisor.run([*command, *more], env)
        if outcome.reason:
            tell(f"mpitrain: {outcome.reason}: ended")
        # A complete result says how a run has ended, whatever its launcher or a rank met after it. And Open MPI's
        # mpirun ends with 0 when it has lost a host: only a result proves that a run came to its end.
        complete = finished()
        ended_here = (outcome.reason or outcome.final) and outcome.code
        doubtful = self.survives_deaths or bool(outcome.reason) or (self.trains and outcome.code == EXIT_OK)
        if run_dir and not self.requests.abort and (complete or (doubtful and not ended_here)):
            code = completed(run_dir, before, outcome.code, self.trains, attempt)
            outcome = replace(outcome, code=code)
            if complete:
                return outcome
        return reported_by_ranks(folder, outcome)

    def _command(self, folder: Path | None) -> tuple[list[str], dict[str, str]]:
        """The command line and what it needs in its environment."""
        from mpitrain.launch.command import Asked, launch_command
        from mpitrain.system.launched import rank_status

        extra = {"MPITRAIN_RUN_DIR": str(self.run_dir)} if self.run_dir else {}
        extra |= {rank_status.VARIABLE: str(folder)} if folder else {}
        terminal = {} if self.arguments.dry_run else _terminal()
        ask = Asked(
            self.launcher,
            self.num_ranks,
            self.program,
            num_cores=usable_cores(),
            is_root=os.geteuid() == 0,
            fault_tolerance=self.arguments.ft,
            host_args=self.host_args,
            interface=self.arguments.interface,
            environ={**os.environ, **extra, **terminal},
        )
        command, env = launch_command(ask)
        return command, env | extra | terminal


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


def _parsed(arguments: argparse.Namespace, words: list[str]) -> argparse.Namespace | None:
    """Our own command's arguments: a wrong option is answered here, before N ranks repeat it."""
    if words[:1] and words[0] in _RANKED:
        inner: argparse.Namespace = arguments.parse(words)
        return inner
    return None


def _program(words: list[str]) -> list[str]:
    """What each rank runs: this python in every case, because the launcher was chosen for its MPI."""
    from mpitrain.launch.command import own_program, own_script

    if not words:
        raise UsageError("launch what? For example: mpitrain launch -n 4 train jobs/digits.py")
    first = words[0]
    for alone in _ALONE:
        if words[: len(alone.split())] == alone.split():
            reason = f"`{alone}` runs in one process and needs no ranks"
            raise UsageError(f"{reason}: mpitrain {shlex.join(words)}")
    if first in _RANKED:
        return own_program(words)
    if first in ("python", "python3"):
        return own_script(words[1:])
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise UsageError(f"no script {first!r} (looked in {Path.cwd()})")
        return own_script(words)
    raise UsageError(
        f"cannot launch {first!r}{did_you_mean(first, _RANKED)}; launch takes train, sweep, predict, data pack, data "
        "check, env or a script.py"
    )


def _terminal() -> dict[str, str]:
    """Informs rank 0 that its progress line ends on a terminal: mpirun's pipe hides it."""
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return {"MPITRAIN_TERMINAL": str(os.get_terminal_size(sys.stderr.fileno()).columns)}
    return {}


def _run_dir(words: list[str], inner: argparse.Namespace | None) -> Path:
    """Where `result.json` will be, fixed before the launch: under --ft that file says how the run ended."""
    from mpitrain.reporting.report import default_run_dir

    given = getattr(inner, "run_dir", None)
    if given:
        return Path(given).absolute()
    job = getattr(inner, "job", None) or next((word for word in words if word.endswith(".py")), "run")
    name = Path(job.replace(":", ".")).stem if job.endswith(".py") else re.split(r"[.:/]", job)[-1]
    return default_run_dir(name).absolute()


def _has_rate(inner: argparse.Namespace | None) -> bool:
    """Whether faults are ordered for the whole run."""
    given = getattr(inner, "inject", None) or ()
    if not given:
        return False
    from mpitrain.inject import orders_among, read

    return bool(orders_among(read(given)))


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--host-args {text!r}: {error}") from None
