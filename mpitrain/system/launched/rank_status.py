"""The messages between a rank and its `mpitrain launch`, in a folder that both see.

    FOLDER/launch.json      how often a rank has to report that it lives, and the id of the start
    FOLDER/node-HOST-*.status   for each rank of a host who it is, how far its start-up has come, its last beat and
                            progress (`status_slots.py`)
    FOLDER/requests/stop    the launch asks all ranks to write a checkpoint and to end
    FOLDER/requests/stacks-1    for the first time, for the stacks of their threads; it holds the folder for them

Invariants: files, no signals and no MPI, so that it works before MPI is started, while it hangs, on every host and
under every launcher. A rank whose launch has named no folder reports nothing. A folder that cannot be written to ends
no run. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.system import background, stacks
from mpitrain.system.files.atomic import write_whole
from mpitrain.system.launched.end_requests import held_back, hold_back_in_command
from mpitrain.system.launched.launch_variables import (
    is_rank,
    launched_local_rank,
    launched_rank,
    launched_size,
)
from mpitrain.system.launched.status_slots import Slot, path_of, read_lines
from mpitrain.system.processes import identity, place

VARIABLE = "MPITRAIN_LAUNCH_DIR"
FOLDER = ".launch-"  # how its name begins, in the run directory
LOOK_EVERY_S = 0.5  # for a request; rank 0 of each node looks, or everybody where nobody knows who that is
FEW_RANKS = 32  # they may all look so often
# What a rank is at; in MPI_Init its other threads stand still, so it is silent there and waits all the same.
IMPORTING, STARTING_MPI, STARTED, READY, ENDED = "importing", "starting MPI", "preparing", "training", "ended"
_ORDER = (IMPORTING, STARTING_MPI, STARTED, READY, ENDED)


@dataclass
class RankStatus:
    """What one rank has reported.

    Attributes:
        process: see `processes.identity`.
        state: one of the constants above.
        waits: whether it waits for other ranks.
        beat, progress: change while it lives, and while it gets on.
        step: the last one that it has begun, -1 before the first.
        listens: whether it ends in order when it is asked to.
        asked: whether a signal has asked it to.
        code: what it has ended with, once it has.
        dead: ranks of which it knows that they have died.
    """

    rank: int
    host: str
    process: str
    state: str = IMPORTING
    waits: bool = False
    beat: int = 0
    progress: float = 0.0
    step: int = -1
    listens: bool = True
    asked: bool = False
    code: int | None = None
    dead: list[int] = field(default_factory=list)

    @property
    def stage(self) -> int:
        """How far it has come."""
        return _ORDER.index(self.state)


class Reporter:
    """This rank's side: a thread that writes its status and looks for requests."""

    def __init__(self, folder: Path, rank: int):
        self.folder = folder
        self.status = RankStatus(rank, socket.gethostname(), identity())
        self.stop_requested = threading.Event()
        self.was_asked = False  # set by a signal's handler, which must not wait for the lock
        self.looks = not launched_local_rank()  # for requests to end
        self._always_looks = 0 < (launched_size() or 0) <= FEW_RANKS
        self._num_stacks = 0
        self.observe: Callable[[], tuple[bool, float, int]] = lambda: (
            False,
            0.0,
            -1,
        )  # (waits, progress, step)
        self._lock = threading.Lock()
        told = _read(folder / "launch.json")
        self._beat_s = float(told.get("beat_s", 10.0))
        self.attempt = str(told.get("attempt", ""))
        self._pid = os.getpid()
        process = self.status.process
        self._slot = Slot(path_of(folder, self.attempt, place(process) if process else f"rank {rank}"))

    def start(self) -> None:
        """From here on this rank is heard of."""
        self._write()
        with held_back():
            background.start("status", self._run)

    def reach(self, state: str, code: int | None = None) -> None:
        """Report at once that the rank has reached `state`."""
        self.status.state, self.status.code = state, code
        self._write()

    def look(self) -> None:
        """Whether the launch asks for something. The folder is listed, because a network file system may remember for
        a minute that a file was not there."""
        with contextlib.suppress(OSError):
            names = os.listdir(self.folder / "requests")
            if "stop" in names:
                self.stop_requested.set()
            if (newest := _num_stacks(names)) > self._num_stacks:
                self._num_stacks = newest
                stacks.write((self.folder / "requests" / f"stacks-{newest}").read_text(), self.status.rank)

    def _run(self) -> None:
        silent_s, over = 0.0, threading.Event()
        while not over.wait(min(LOOK_EVERY_S, self._beat_s)):
            silent_s += min(LOOK_EVERY_S, self._beat_s)
            if self._always_looks or (self.looks and not self.stop_requested.is_set()):
                self.look()
            if silent_s >= self._beat_s or self.was_asked != self.status.asked:
                silent_s = 0.0
                self._write()
                self.look()

    def _write(self) -> None:
        if os.getpid() != self._pid:  # a forked child is no rank
            return
        with self._lock, contextlib.suppress(OSError):
            self.status.beat += 1
            self.status.asked = self.was_asked
            self.status.waits, self.status.progress, self.status.step = self.observe()
            self._slot.write(json.dumps(asdict(self.status)))


_reporter: Reporter | None = None


def begin() -> Reporter | None:
    """This process's reporter, if it is a rank of a `mpitrain launch`; its children are none."""
    global _reporter
    if _reporter is None and VARIABLE in os.environ and is_rank():
        stacks.listen()
        hold_back_in_command()  # whoever hears of this rank may signal it
        _reporter = Reporter(Path(os.environ.pop(VARIABLE)), launched_rank())
        _reporter.start()
    return _reporter


def reach(state: str, code: int | None = None) -> None:
    """Report to the launch, if there is one, how far this rank has come."""
    if _reporter is not None:
        _reporter.reach(state, code)


def know_dead(ranks: list[int]) -> None:
    """Report to the launch which ranks this one knows to have died."""
    if _reporter is not None:
        _reporter.status.dead = ranks
        _reporter.reach(_reporter.status.state, _reporter.status.code)


def take_attempt() -> str:
    """The id that the launch has given this start, once: a later run of this process is another one. Empty without."""
    if _reporter is None:
        return ""
    attempt, _reporter.attempt = _reporter.attempt, ""
    return attempt


def note_asked() -> None:
    """Report to the launch, soon, that a signal has asked this rank to end."""
    if _reporter is not None:
        _reporter.was_asked = True


def listen(listens: bool) -> None:
    """Report to the launch whether this rank heeds requests."""
    if _reporter is not None and _reporter.status.listens != listens:
        _reporter.status.listens = listens
        _reporter.reach(_reporter.status.state)


def stop_requested(now: bool = False) -> bool:
    """Whether the launch has asked for an end; `now`: look, instead of leaving that to the thread."""
    if now and _reporter is not None:
        _reporter.look()
    return _reporter is not None and _reporter.stop_requested.is_set()


# ---- the launch's side


def beat_s(num_ranks: int, host_timeout_s: float) -> float:
    """How often a rank is to say that it lives: ten times in `host_timeout_s`, where 0 is never, and no more often than
    the file system of many ranks can bear, a hundred writes a second."""
    if host_timeout_s <= 0:
        return max(10.0, num_ranks / 100)
    return max(0.5, min(10.0, host_timeout_s / 10), min(num_ranks / 100, host_timeout_s / 4))


def is_writable(folder: Path) -> bool:
    """Whether ranks can report at all: the folder is there, and the disk is not full."""
    probe = folder / "probe.tmp"
    try:
        probe.write_text("{}")
        probe.unlink()
    except OSError:
        return False
    return True


def open_folder(folder: Path, beat_s: float, attempt: str = "") -> None:
    """An empty folder for the ranks of one start, whose id is `attempt`."""
    remove_folder(folder)
    (folder / "requests").mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = {"beat_s": beat_s, "process": identity(), "attempt": attempt}
    (folder / "launch.json").write_text(json.dumps(facts))


def launched_by(folder: Path) -> str:
    """The process whose launch has opened the folder."""
    return str(_read(folder / "launch.json").get("process", ""))


def remove_folder(folder: Path) -> None:
    """Nobody is interested any more."""
    for path in (
        *folder.glob("requests/*"),
        *folder.glob("*.json"),
        *folder.glob("*.status"),
        *folder.glob("*.tmp"),
    ):
        with contextlib.suppress(OSError):
            path.unlink()
    for path in (folder / "requests", folder):
        with contextlib.suppress(OSError):
            path.rmdir()


def request_stop(folder: Path) -> None:
    """Ask all ranks to write a checkpoint and to end."""
    (folder / "requests" / "stop").touch()


def request_stacks(folder: Path, into: str) -> None:
    """Ask all ranks for the stacks of their threads, in files of the folder `into`, or, where it is empty, on their
    standard error."""
    number = _num_stacks(os.listdir(folder / "requests")) + 1
    write_whole(folder / "requests" / f"stacks-{number}", into)


def _num_stacks(names: list[str]) -> int:
    return max(
        (int(name[7:]) for name in names if name.startswith("stacks-") and name[7:].isdigit()), default=0
    )


def read_all(folder: Path) -> dict[int, RankStatus]:
    """What ranks have reported so far, by rank."""
    found: dict[int, RankStatus] = {}
    attempt = str(_read(folder / "launch.json").get("attempt", ""))
    for text in read_lines(folder, attempt):
        with contextlib.suppress(TypeError, ValueError):
            status = RankStatus(**json.loads(text))
            if status.rank not in found or found[status.rank].beat <= status.beat:
                found[status.rank] = status
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        status = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}
