"""Watching over a launch: what signals to `mpitrain launch` mean, and when it ends ranks by force.

Invariants: INT ends the job, TERM, HUP and USR1 ask it to write a checkpoint and to end, a second INT ends it at once,
as does a second TERM or HUP when `end_requests.py` says so, and after any of them nothing is started again. QUIT asks
the ranks for their stacks. The request travels through the launch's folder (`rank_status.py`), because every MPI
launcher handles a signal in its own way: Open MPI's kills its ranks at INT, TERM and HUP, Hydra and srun hand them on,
and a rank that still imports dies of USR1. So the launcher is out of the terminal's reach, in a session of its own, and
this process alone hears what the terminal sends. When to give a launch up is a rule without clock or process
(`watch.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from mpitrain.errors import EXIT_ENDED_AT_ONCE, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_REQUEUE, MpitrainError
from mpitrain.launch import terminal
from mpitrain.launch.discover import own_python
from mpitrain.launch.left_behind import remove_left_behind
from mpitrain.launch.watch import Watch, named, stage_of
from mpitrain.system import awake
from mpitrain.system.launched import rank_status
from mpitrain.system.launched.end_requests import EndRequests, asking
from mpitrain.system.launched.rank_status import ENDED, READY, RankStatus
from mpitrain.system.processes import identity, is_gone, send_signal
from mpitrain.system.saying import tell

LOOK_EVERY_S = 1.0
RESULT_GRACE_S = 30.0  # from a complete result to the end of the launcher
UNHEARD_S = 3.0  # from a request to the end of ranks of which none trains yet
END_GRACE_S = 10.0  # from asking the launcher to end to killing it
KILLED_S = 10.0  # longest time for what was killed to be gone
_USUAL = 4  # exit codes up to here are our own, and no rank dies of these signals as a rule
_INTEL_SIGNAL = 255


class Requests:
    """What signals have asked of this launch so far; a context manager that listens to them.

    Attributes:
        stop: a checkpoint and an end are asked for.
        abort: exit code of an end without one, 0 as long as nobody wants that; `at_once`: without any grace.
    """

    def __init__(self) -> None:
        self.stop, self.abort, self.at_once = False, 0, False
        self.num_heard = self.num_usr1 = self.num_ends = self.num_quits = 0
        self.child: subprocess.Popen[bytes] | None = None  # the launcher, which Ctrl-Z does not reach
        self._ends = EndRequests()
        self._kept: dict[int, Any] = {}

    def __enter__(self) -> Requests:
        for number in (signal.SIGINT, signal.SIGQUIT, *asking()):
            self._kept[number] = signal.signal(number, lambda number, _: self.hear(number))
        if terminal.has_terminal():
            self._kept[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, lambda *_: self._stand_still())
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)

    def hear(self, number: int, now_s: float | None = None) -> None:
        """The meaning of one signal."""
        self.num_heard += 1
        if number == signal.SIGQUIT:
            self.num_quits += 1
            return
        self.at_once = self.at_once or (bool(self.abort) and number != signal.SIGUSR1)
        if number == signal.SIGUSR1:
            self.num_usr1 += 1
        elif number == signal.SIGINT:
            self.abort = self.abort or EXIT_INTERRUPTED
        else:
            self.num_ends += 1
            if self._ends.hear(awake.now_s() if now_s is None else now_s):
                self.abort, self.at_once = self.abort or EXIT_ENDED_AT_ONCE, True
        self.stop = True

    def _stand_still(self) -> None:
        for number in (signal.SIGTSTP, signal.SIGCONT):
            if self.child is not None and self.child.poll() is None:
                _send(self.child, number)
            if number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)

    def exit_code(self, code: int) -> int:
        """Of a launch that is not continued because of these requests; `code`: how its ranks have ended."""
        return self.abort or code


@dataclass(frozen=True)
class Outcome:
    """How one start has ended. `code` is the MPI launcher's, unless it was ended here: then `reason` says why, and
    `final` whether another start would make no sense. `early`: a rank has died, without an error of its own, before
    the first step. `ended_here`: this process has ended it, and what ranks report is no more than that."""

    code: int
    reason: str = ""
    final: bool = False
    early: bool = False
    ended_here: bool = False


def died_early(
    statuses: Mapping[int, RankStatus], num_ranks: int, code: int, survives_deaths: bool
) -> tuple[bool, str]:
    """Whether a start that has ended with `code` did so because a rank had died before the first step, and who had, if
    that can be known. A rank that has an error of its own reports its exit code, and is no such rank.

    Args:
        survives_deaths: the remaining ranks then end by themselves; otherwise the launcher kills all ranks, and its
            exit code is 128 + n.
    """
    if any(status.step >= 0 or status.code not in (None, EXIT_ERROR) for status in statuses.values()):
        return False, ""
    wordless = sorted(rank for rank, status in statuses.items() if status.code is None)
    if survives_deaths:  # where all have died, so would those of another start
        early = 0 < len(wordless) < len(statuses)
        # the launcher kills who is left as soon as one has ended with a code, so these may be wordless too
        known = sorted({dead for status in statuses.values() for dead in status.dead})
        return early, f"{named(known or wordless, statuses)} died before the first step" if early else ""
    begun = len(statuses) == num_ranks and all(
        status.stage >= stage_of(READY) for status in statuses.values()
    )
    asks_for_an_end = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    died = code > 128 and code - 128 not in asks_for_an_end
    return died and len(wordless) == len(statuses) and not begun, ""


@dataclass
class Supervisor:
    """One start of an MPI launcher.

    Args:
        flavour: of the launcher, which decides how it is asked to end.
        requests: listened to by the caller.
        folder: what ranks report (`rank_status.py`); None where they cannot.
        watch: when to give up; finished: whether a complete result is there.
        stacks: the folder for the ranks' stacks; empty: their standard error.
        trains: whether the ranks are `mpitrain train`'s, which listen to requests from their first step on.
        survives_deaths: whether ranks may go on without one that dies.
    """

    flavour: str
    requests: Requests
    folder: Path | None = None
    watch: Watch | None = None
    finished: Callable[[], bool] = lambda: False
    trains: bool = False
    survives_deaths: bool = False
    stacks: str = ""
    _statuses: dict[int, RankStatus] = field(default_factory=dict)

    def run(self, command: Sequence[str], env: Mapping[str, str]) -> Outcome:
        """Run the command with `env` added until it ends, or must be ended. One that died of signal n has code 128 + n,
        as in a shell."""
        if self.requests.stop:
            return Outcome(self.requests.exit_code(EXIT_REQUEUE), final=True)
        remove_left_behind()
        try:
            child = terminal.start(command, {**os.environ, **env})
        except OSError as error:
            raise MpitrainError(f"{command[0]} cannot be started: {error}") from error
        self.requests.child = child
        try:
            with guarded(child.pid, **self._facts()):
                outcome = self._watch_over(child)
        except BaseException:
            self._end(child, EXIT_ERROR, "", True)
            raise
        self._kill_left_behind()
        remove_left_behind()
        if outcome.code and self.trains and not (outcome.reason or self.requests.stop):
            early, reason = died_early(self._statuses, self._num_ranks(), outcome.code, self.survives_deaths)
            outcome = replace(outcome, reason=reason, early=early)
        return outcome

    def _facts(self) -> dict[str, Any]:
        """What another process needs to watch over the same launch, in JSON."""
        watch = self.watch
        owed = [watch.num_ranks, watch.owed, watch.start_timeout_s, watch.host_timeout_s] if watch else None
        return {
            "flavour": self.flavour,
            "folder": str(self.folder) if self.folder else None,
            "watch": owed,
            "trains": self.trains,
            "survives_deaths": self.survives_deaths,
        }

    def take_over(self, launcher: subprocess.Popen[bytes]) -> None:
        """Watch over what another launch, which is gone, has started, until it has ended."""
        self._watch_over(launcher)
        self._kill_left_behind()

    def _watch_over(self, child: subprocess.Popen[bytes]) -> Outcome:
        asked_s = result_s = left_s = stood = None
        look_s = 0.0
        heard = handed_on = quits = 0
        while (code := _ended(child)) is None:
            now_s, requests = awake.now_s(), self.requests
            if requests.abort:
                return self._end(child, requests.abort, "", True)
            if now_s < look_s and requests.num_heard == heard:
                continue
            heard = requests.num_heard
            if requests.num_quits > quits:
                quits = requests.num_quits
                self._ask_for_stacks()
            statuses = self._look()
            look_s = now_s + LOOK_EVERY_S + len(statuses) / 1000  # a file each
            stop = (
                requests.stop
            )  # once: a signal that comes between two looks at it would pass for one to a script
            listened = stop and self._listened()
            if listened and asked_s is None:
                assert self.folder is not None
                asked_s = now_s
                rank_status.request_stop(self.folder)
            elif stop and not listened:
                if requests.num_usr1 > handed_on:  # a script's own affair
                    handed_on = requests.num_usr1
                    _send(child, signal.SIGUSR1)
                if requests.num_ends:
                    return self._end(child, EXIT_ENDED_AT_ONCE, "", True)
            if asked_s is not None and now_s - asked_s > UNHEARD_S and not _any_began(statuses):
                return self._end(child, EXIT_REQUEUE, "it was asked to end before its first step", True)
            if reason := self._why_give_up(now_s):
                assert self.watch is not None
                outcome = self._end(child, EXIT_ERROR, reason, not (self.watch.silent or self.watch.died))
                return replace(outcome, early=self.trains and self.watch.died)
            if result_s is None and self.finished():
                result_s = now_s
            if (result_s is not None or left_s is not None) and (standing := self._standing()) != stood:
                # ranks that still get on are waited for: on a busy machine it takes a process long to end
                stood, result_s, left_s = standing, result_s and now_s, left_s and now_s
            if result_s is not None and now_s - result_s > RESULT_GRACE_S:
                reason = f"{RESULT_GRACE_S:g} s after a complete result its launcher had not ended"
                return self._end(child, 0, reason, True)
            left_s = (left_s or now_s) if self._all_have_ended() else None
            if left_s is not None and now_s - left_s > RESULT_GRACE_S:
                worst = max(status.code or 0 for status in statuses.values())
                reason = f"{RESULT_GRACE_S:g} s after its last rank its launcher had not ended"
                return self._end(child, worst, reason, False)
        self._look()
        return Outcome(code_of(self.flavour, code, self._statuses))

    def _look(self) -> dict[int, RankStatus]:
        """What every rank has reported last; it is remembered while its file cannot be read."""
        self._statuses |= rank_status.read_all(self.folder) if self.folder else {}
        return self._statuses

    def _why_give_up(self, now_s: float) -> str:
        if self.watch is None or not (
            reason := self.watch.look(now_s, self._statuses, awake.clock().num_pauses)
        ):
            return ""
        if self.watch.died or self.folder is None or rank_status.is_writable(self.folder):
            return reason
        self.watch.forgive(now_s)  # on a full disk every rank is silent
        return ""

    def _ask_for_stacks(self) -> None:
        if self.folder is None:
            told = "no rank can be asked for its stacks: send QUIT to the ranks"
        else:
            rank_status.request_stacks(self.folder, self.stacks)
            told = f"the ranks write their stacks {f'to {self.stacks}' if self.stacks else 'here'}, and go on"
        tell(f"mpitrain: {told}")

    def _standing(self) -> list[tuple[int, str, bool]]:
        """How far the ranks' ends have come: their states, and whose process is gone."""
        return [(rank, one.state, is_gone(one.process)) for rank, one in sorted(self._statuses.items())]

    def _num_ranks(self) -> int:
        return self.watch.num_ranks if self.watch else 0

    def _all_have_ended(self) -> bool:
        """Whether each of `train`'s ranks has reported its end; what a script does then is its own affair."""
        ended = all(status.state == ENDED for status in self._statuses.values())
        return self.trains and ended and 0 < self._num_ranks() == len(self._statuses)

    def _kill_left_behind(self) -> None:
        """End ranks that the launcher has left here, and wait until they are gone: they hold what the next start
        needs."""
        left = [one.process for one in self._look().values() if send_signal(one.process, signal.SIGKILL)]
        deadline_s = awake.now_s() + KILLED_S
        while not all(map(is_gone, left)) and awake.now_s() < deadline_s:
            time.sleep(0.02)

    def _listened(self) -> bool:
        """Whether ranks heed requests: those of `train` do as soon as they are there, unless they write no checkpoints,
        those of a script while it trains."""
        if self.folder is None:
            return False
        trains = [status for status in self._statuses.values() if status.state == READY]
        return (self.trains or bool(trains)) and all(status.listens for status in trains)

    def _end(self, child: subprocess.Popen[bytes], code: int, reason: str, final: bool) -> Outcome:
        """End the launcher and, through it, its ranks on all hosts; then what is left of them here."""
        statuses = self._look()
        began_s = awake.now_s()
        polite = signal.SIGTERM if self.flavour == "openmpi" else signal.SIGINT
        # Open MPI's takes a second signal for leave to skip its clean-up; the others want several INTs within a second
        next_s = began_s
        while _ended(child) is None:
            now_s = awake.now_s()
            if now_s - began_s > END_GRACE_S or self.requests.at_once:
                break
            if now_s >= next_s:
                _send(child, polite)
                next_s = now_s + (END_GRACE_S if self.flavour == "openmpi" else 0.2)
        for status in statuses.values():
            send_signal(status.process, signal.SIGKILL)
        if _ended(child) is None:
            _send(child, polite)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(2.0)
            _send(child, signal.SIGKILL)
        child.wait()
        return Outcome(self.requests.exit_code(code), reason, final, ended_here=True)


@contextlib.contextmanager
def launch_folder(run_dir: Path | None, local: bool) -> Iterator[Path | None]:
    """Where ranks report: in the run directory, which all hosts see, or, where there is none, on this host;
    None where there is no such place. A run directory that was made for this and that nobody has used goes, too."""
    made = run_dir is not None and not run_dir.exists()
    if run_dir is None:
        parent = Path(tempfile.gettempdir()) if local else None
    else:
        parent = run_dir
    folder = None
    if parent is not None:
        with contextlib.suppress(OSError):
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in parent.glob(f"{rank_status.FOLDER}*"):
                if is_gone(rank_status.launched_by(left)):
                    rank_status.remove_folder(left)
            folder = Path(tempfile.mkdtemp(prefix=rank_status.FOLDER, dir=parent))
    try:
        yield folder
    finally:
        if folder is not None:
            rank_status.remove_folder(folder)
        if made and parent is not None:
            with contextlib.suppress(OSError):
                parent.rmdir()


def reported_by_ranks(folder: Path | None, outcome: Outcome) -> Outcome:
    """The outcome with what a rank that was interrupted has reported, which not every launcher passes on; one that
    Hydra has interrupted because the launch is ended here reports the same."""
    if outcome.ended_here:
        return outcome
    statuses = rank_status.read_all(folder) if folder else {}
    interrupted = any(status.code == EXIT_INTERRUPTED for status in statuses.values())
    return replace(outcome, code=EXIT_INTERRUPTED, final=True) if interrupted else outcome


def _ended(child: subprocess.Popen[bytes], wait_s: float = 0.1) -> int | None:
    try:
        return child.wait(wait_s)
    except subprocess.TimeoutExpired:
        return None


def _any_began(statuses: Mapping[int, RankStatus]) -> bool:
    return any(status.state in (READY, ENDED) for status in statuses.values())


def _send(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)


def code_of(flavour: str, code: int, statuses: Mapping[int, RankStatus]) -> int:
    """The exit code of a launch whose launcher has ended with `code` (-n: died of signal n itself).

    Open MPI's and srun's say 128 more than the number of the signal that a rank has died of, as a shell does. MPICH's
    Hydra says the number itself, and mixes it with those of the ranks that it has killed then; Intel's says 255 of any
    signal. What ranks have reported goes before it.
    """
    if code < 0:
        return 128 - code
    if flavour != "mpich" or code == 0:
        return code
    reported = [status.code for _, status in sorted(statuses.items()) if status.code]
    if reported:
        return code if code in reported else reported[0]
    if code == _INTEL_SIGNAL and any(status.asked for status in statuses.values()):
        return 128 + signal.SIGTERM
    if not _USUAL < code < 32:
        return code
    # a rank that aborts (6) while Hydra kills the others (9) looks like one that was told to end (15)
    asked = not statuses or any(status.asked for status in statuses.values())
    if code == signal.SIGTERM and not asked:
        return 128 + signal.SIGABRT
    return 128 + code


# ---- Starting the process that ends a launch's ranks if the launch is killed (`left_alone.py`).


@contextlib.contextmanager
def guarded(launcher: int, **facts: object) -> Iterator[None]:
    """Inside, the launcher with this process number does not outlive us. `facts`: what a `Supervisor` is made of."""
    guard = Popen(
        [
            *own_python(),
            "-m",
            "mpitrain.launch.left_alone",
            json.dumps({"launcher": identity(launcher), **facts}),
        ],
        stdin=PIPE,
        stdout=DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()
