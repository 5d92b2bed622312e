"""Watching over a launch: what signals to `mpitrain launch` mean, and when it ends ranks by force.

Invariants: INT ends the job, TERM and USR1 ask it to write a checkpoint and to end, a second INT or TERM ends it at
once, and after any of them nothing is started again. The request travels through the launch's folder
(`rank_status.py`), because every MPI launcher handles a signal in its own way: Open MPI's kills its ranks at INT and
TERM, Hydra and srun hand them on, and a rank that still imports dies of USR1. When to give a launch up is a rule
without clock or process (`Watch`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mpitrain.errors import EXIT_ENDED_AT_ONCE, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_REQUEUE, MpitrainError
from mpitrain.system import rank_status
from mpitrain.system.processes import is_gone, runs, send_signal
from mpitrain.system.rank_status import ENDED, READY, STARTED, STARTING_MPI, RankStatus

LOOK_EVERY_S = 1.0
_FOLDER = ".launch-"
RESULT_GRACE_S = 30.0  # from a complete result to the end of the launcher
GONE_GRACE_S = 5.0  # from the death of a rank that has not begun to train to the end of the launcher
NEVER_HEARD_S = 60.0  # longest wait of all the others, in MPI's start, for a rank that has never reported
UNHEARD_S = 3.0  # from a request to the end of ranks of which none trains yet
END_GRACE_S = 10.0  # from asking the launcher to end to killing it
KILLED_S = 10.0  # longest time for what was killed to be gone
PAUSE_S = 10.0  # a launch that has not looked for so long was suspended itself


class Requests:
    """What signals have asked of this launch so far; a context manager that listens to them.

    Attributes:
        stop: a checkpoint and an end are asked for.
        abort: exit code of an end without one, 0 as long as nobody wants that; `at_once`: without any grace.
    """

    def __init__(self) -> None:
        self.stop, self.abort, self.at_once = False, 0, False
        self.from_terminal = False  # the terminal has sent INT to the MPI launcher too
        self.num_heard = self.num_usr1 = self.num_terms = 0
        self._kept: dict[int, Any] = {}

    def __enter__(self) -> Requests:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._kept[number] = signal.signal(number, lambda number, _: self.hear(number))
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)

    def hear(self, number: int) -> None:
        """The meaning of one signal."""
        self.num_heard += 1
        self.at_once = self.at_once or (bool(self.abort) and number != signal.SIGUSR1)
        if number == signal.SIGUSR1:
            self.num_usr1 += 1
        elif number == signal.SIGINT:
            self.from_terminal = self.from_terminal or terminal_is_ours()
            self.abort = self.abort or EXIT_INTERRUPTED
        else:
            self.num_terms += 1
            if self.num_terms > 1:
                self.abort, self.at_once = self.abort or EXIT_ENDED_AT_ONCE, True
        self.stop = True

    def exit_code(self, code: int) -> int:
        """Of a launch that is not continued because of these requests; `code`: how its ranks have ended."""
        return self.abort or code


@dataclass
class Watch:
    """When ranks that neither end nor get on are given up. `died`, `silent`: whether that was because one has died
    before it trained, or nothing was heard of a host.

    Args:
        num_ranks: how many were started; owed: the state that they must come to.
        start_timeout_s, host_timeout_s: see `mpitrain launch --help`; 0 is never.
    """

    num_ranks: int
    owed: str
    start_timeout_s: float
    host_timeout_s: float
    died: bool = False
    silent: bool = False
    _began_s: float | None = None
    _last_s: float = 0.0
    _progress_s: float = 0.0
    _seen_s: dict[int, float] = field(default_factory=dict)
    _gone_s: dict[int, float] = field(default_factory=dict)
    _all_wait_s: float | None = None
    _before: dict[int, RankStatus] = field(default_factory=dict)

    def look(self, now_s: float, statuses: Mapping[int, RankStatus]) -> str:
        """Why the launch is to be ended; empty as long as it is not. `statuses` may lack a rank that was there
        before: its file could not be read for a moment."""
        statuses = {**self._before, **statuses}
        if self._began_s is None:
            self._began_s = self._last_s = self._progress_s = now_s
        if (pause_s := now_s - self._last_s) > PAUSE_S:
            self._begin_anew(now_s, self._began_s + pause_s)
        self._last_s = now_s
        for rank, status in statuses.items():
            before = self._before.get(rank)
            if before is None or before.beat != status.beat:
                self._seen_s[rank] = now_s
            if before is None or before.progress != status.progress or before.state != status.state:
                self._progress_s = now_s
        self._before = statuses
        return self._why_not_started(now_s, statuses) or self._why_silent(now_s, statuses)

    def forgive(self, now_s: float) -> None:
        """No rank could report: all of them have all of the time again."""
        self._begin_anew(now_s, now_s)

    def _begin_anew(self, now_s: float, began_s: float) -> None:
        self._began_s, self._progress_s = began_s, now_s
        self._seen_s = dict.fromkeys(self._seen_s, now_s)
        self._gone_s.clear()
        self._all_wait_s = None
        self.died = self.silent = False

    def _why_not_started(self, now_s: float, statuses: Mapping[int, RankStatus]) -> str:
        owed = _stage_of(self.owed)
        late = [rank for rank in range(self.num_ranks) if rank not in statuses or statuses[rank].stage < owed]
        if self.owed != READY and not any(one.stage >= _stage_of(STARTING_MPI) for one in statuses.values()):
            self._began_s = now_s  # a script owes nothing before one of its ranks waits in MPI for the others
            return ""
        if not late:
            return ""
        gone = {rank for rank in late if rank in statuses and is_gone(statuses[rank].process)}
        self._gone_s = {rank: self._gone_s.get(rank, now_s) for rank in gone}
        if gone and now_s - min(self._gone_s.values()) > GONE_GRACE_S:
            self.died = True
            return f"{_named(sorted(gone), statuses)} died before it began to train"
        assert self._began_s is not None
        if self.start_timeout_s <= 0:
            return ""
        if now_s - self._began_s <= self.start_timeout_s:
            never_heard = self._never_heard(now_s, statuses)
            self.died = bool(never_heard)
            return f"{_named(never_heard, statuses)} died before it began to train" if never_heard else ""
        holds_up = [rank for rank in late if rank not in statuses or not _waits(statuses[rank])] or late
        return (
            f"{_named(holds_up, statuses)} did not begin to train within {self.start_timeout_s:g} s"
            " (--start-timeout-s); "
            f"{self.num_ranks - len(late)} of {self.num_ranks} ranks did"
        )

    def _never_heard(self, now_s: float, statuses: Mapping[int, RankStatus]) -> list[int]:
        """Ranks of `mpitrain train` that must have died before their first report, which they write before they import
        torch: all the others have waited for them for long, by what they themselves have needed."""
        missing = [rank for rank in range(self.num_ranks) if rank not in statuses]
        if self.owed != READY or not statuses or not missing or not all(map(_waits, statuses.values())):
            self._all_wait_s = None
            return []
        if self._all_wait_s is None:
            self._all_wait_s = now_s
        assert self._began_s is not None
        patience_s = max(NEVER_HEARD_S, 3 * (self._all_wait_s - self._began_s))
        return missing if now_s - self._all_wait_s > patience_s else []

    def _why_silent(self, now_s: float, statuses: Mapping[int, RankStatus]) -> str:
        """A host of which nothing is heard any more, while nobody gets on either: a run that has lost ranks and goes on
        without them is left alone."""
        if self.host_timeout_s <= 0 or now_s - self._progress_s <= self.host_timeout_s:
            return ""
        hosts: dict[str, list[int]] = {}
        for rank, status in statuses.items():
            if status.state == READY:
                hosts.setdefault(status.host, []).append(rank)
        for host, ranks in hosts.items():
            silent_s = now_s - max(self._seen_s[rank] for rank in ranks)
            if silent_s > self.host_timeout_s and not any(runs(statuses[rank].process) for rank in ranks):
                names = ", ".join(map(str, sorted(ranks)))
                self.silent = True
                return (
                    f"host {host} (rank {names}) has been silent for {silent_s:.0f} s (--host-timeout-s), and no other "
                    "rank gets on"
                )
        return ""


def _stage_of(state: str) -> int:
    return RankStatus(-1, "", "", state).stage


def _waits(status: RankStatus) -> bool:
    return status.state == STARTING_MPI or (status.state == STARTED and status.waits)


def _named(ranks: Sequence[int], statuses: Mapping[int, RankStatus]) -> str:
    """ "rank 2 on host n7 (preparing)", at most eight of them."""
    names = [
        f"rank {rank} on host {statuses[rank].host} ({_phase(statuses[rank])})"
        if rank in statuses
        else f"rank {rank} (nothing was heard of it; {_hosts(statuses)})"
        for rank in ranks[:8]
    ]
    return ", ".join(names) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _phase(status: RankStatus) -> str:
    return "about to train" if status.state == READY and status.step < 0 else status.state


def _hosts(statuses: Mapping[int, RankStatus]) -> str:
    known = sorted({status.host for status in statuses.values()})
    return f"the others are on {', '.join(known[:8])}" if known else f"started from {os.uname().nodename}"


@dataclass(frozen=True)
class Outcome:
    """How one start has ended. `code` is the MPI launcher's, unless it was ended here: then `reason` says why, and
    `final` whether another start would make no sense. `early`: a rank has died, without an error of its own, before
    the first step."""

    code: int
    reason: str = ""
    final: bool = False
    early: bool = False


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
        return early, f"{_named(known or wordless, statuses)} died before the first step" if early else ""
    begun = len(statuses) == num_ranks and all(
        status.stage >= _stage_of(READY) for status in statuses.values()
    )
    died = code > 128 and code - 128 not in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
    )  # which ask for an end
    return died and len(wordless) == len(statuses) and not begun, ""


@dataclass
class Supervisor:
    """One start of an MPI launcher.

    Args:
        flavour: of the launcher, which decides how it is asked to end.
        requests: listened to by the caller.
        folder: what ranks report (`rank_status.py`); None where they cannot.
        watch: when to give up; finished: whether a complete result is there.
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
    _statuses: dict[int, RankStatus] = field(default_factory=dict)

    def run(self, command: Sequence[str], env: Mapping[str, str]) -> Outcome:
        """Run the command with `env` added until it ends, or must be ended. One that died of signal n has code 128 + n,
        as in a shell."""
        if self.requests.stop:
            return Outcome(self.requests.exit_code(EXIT_REQUEUE), final=True)
        try:
            child = subprocess.Popen(list(command), env={**os.environ, **env})
        except OSError as error:
            raise MpitrainError(f"{command[0]} cannot be started: {error}") from error
        try:
            outcome = self._watch_over(child)
        except BaseException:
            self._end(child, EXIT_ERROR, "", True)
            raise
        self._kill_left_behind()
        if outcome.code and self.trains and not (outcome.reason or self.requests.stop):
            early, reason = died_early(self._statuses, self._num_ranks(), outcome.code, self.survives_deaths)
            outcome = replace(outcome, reason=reason, early=early)
        return outcome

    def _watch_over(self, child: subprocess.Popen[bytes]) -> Outcome:
        asked_s = result_s = left_s = None
        look_s = 0.0
        heard = handed_on = 0
        while (code := _ended(child)) is None:
            now_s, requests = time.monotonic(), self.requests
            if requests.abort:
                return self._end(child, requests.abort, "", True)
            if now_s < look_s and requests.num_heard == heard:
                continue
            heard = requests.num_heard
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
                if requests.num_terms:
                    return self._end(child, EXIT_ENDED_AT_ONCE, "", True)
            if asked_s is not None and now_s - asked_s > UNHEARD_S and not _any_began(statuses):
                return self._end(child, EXIT_REQUEUE, "it was asked to end before its first step", True)
            if reason := self._why_give_up(now_s):
                assert self.watch is not None
                outcome = self._end(child, EXIT_ERROR, reason, not (self.watch.silent or self.watch.died))
                return replace(outcome, early=self.trains and self.watch.died)
            if result_s is None and self.finished():
                result_s = now_s
            if result_s is not None and now_s - result_s > RESULT_GRACE_S:
                reason = f"{RESULT_GRACE_S:g} s after a complete result its launcher had not ended"
                return self._end(child, 0, reason, True)
            left_s = (left_s or now_s) if self._all_have_ended() else None
            if left_s is not None and now_s - left_s > RESULT_GRACE_S:
                worst = max(status.code or 0 for status in statuses.values())
                reason = f"{RESULT_GRACE_S:g} s after its last rank its launcher had not ended"
                return self._end(child, worst, reason, False)
        self._look()
        return Outcome(code if code >= 0 else 128 - code)

    def _look(self) -> dict[int, RankStatus]:
        """What every rank has reported last; it is remembered while its file cannot be read."""
        self._statuses |= rank_status.read_all(self.folder) if self.folder else {}
        return self._statuses

    def _why_give_up(self, now_s: float) -> str:
        if self.watch is None or not (reason := self.watch.look(now_s, self._statuses)):
            return ""
        if self.watch.died or self.folder is None or rank_status.is_writable(self.folder):
            return reason
        self.watch.forgive(now_s)  # on a full disk every rank is silent
        return ""

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
        deadline_s = time.monotonic() + KILLED_S
        while not all(map(is_gone, left)) and time.monotonic() < deadline_s:
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
        began_s = time.monotonic()
        polite = signal.SIGTERM if self.flavour == "openmpi" else signal.SIGINT
        # Open MPI's takes a second signal for leave to skip its clean-up; the others want several INTs within a second
        next_s = began_s + (END_GRACE_S / 2 if self.requests.from_terminal else 0.0)
        while _ended(child) is None:
            now_s = time.monotonic()
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
        return Outcome(self.requests.exit_code(code), reason, final)


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
            for left in parent.glob(f"{_FOLDER}*"):
                if is_gone(rank_status.launched_by(left)):
                    rank_status.remove_folder(left)
            folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))
    try:
        yield folder
    finally:
        if folder is not None:
            rank_status.remove_folder(folder)
        if made and parent is not None:
            with contextlib.suppress(OSError):
                parent.rmdir()


def reported_by_ranks(folder: Path | None, outcome: Outcome) -> Outcome:
    """The outcome with what a rank that was interrupted has reported, which not every launcher passes on."""
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


def terminal_is_ours() -> bool:
    """Whether this process is in the foreground of a terminal, which then sends INT to its whole group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
