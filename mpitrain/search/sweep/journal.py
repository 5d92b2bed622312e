"""What a sweep leaves on disk, so that any number of processes on any hosts deal from it, and a killed one goes on.

    RUN_DIR/sweep.json                         the plan
    RUN_DIR/claims/INDEX-RUNG-ATTEMPT.json     made once, by whoever begins this attempt
    RUN_DIR/dealers/NAME/lock, journal.jsonl   a process that deals: a sign of life, and what it has noted down
    RUN_DIR/proposals/INDEX.json               of a sampler that proposes: a setting
    RUN_DIR/logs/INDEX.txt                     what the run has printed
    RUN_DIR/INDEX/                             the run's own directory

Invariants: no lock of the file system and no append by two writers, which parallel file systems may lack: a claim is a
file that is made where there is none (O_EXCL), and every dealer appends to a journal of its own, fsynced row by row. A
row that a crash has torn is skipped; its task is open again. No two hosts' clocks are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpitrain.errors import OutputError, UsageError
from mpitrain.search.sweep.deal import Ended, Records, Task
from mpitrain.search.sweep.plan import Plan, plan_from
from mpitrain.system.files.atomic import sync_directory, write_durable
from mpitrain.system.files.folders import make_private
from mpitrain.system.files.run_directory import read_json
from mpitrain.system.files.run_lock import LOCK_FILE, QUIET_S, RunLock, holder_lives

PLAN_FILE, JOURNAL_FILE = "sweep.json", "journal.jsonl"
CLAIMS, DEALERS, LOGS, PROPOSALS = "claims", "dealers", "logs", "proposals"
Options = tuple[tuple[str, str], ...]


class Sweep:
    """The directory of a sweep.

    Args:
        folder: which is made where there is none.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def run_dir(self, index: int) -> Path:
        """Of the configuration of that number."""
        return self.folder / str(index)

    def log_file(self, index: int) -> Path:
        """What its run has printed."""
        return self.folder / LOGS / f"{index}.txt"

    def plan(self) -> Plan | None:
        """The plan that lies here; None where there is none.

        Raises:
            UsageError: it is damaged, or of another version.
        """
        path = self.folder / PLAN_FILE
        if not path.exists():
            return None
        return plan_from(read_json(path) or {}, path)

    def begin(self, plan: Plan) -> None:
        """Write the plan down.

        Raises:
            UsageError: the directory cannot be written to.
        """
        try:
            make_private(self.folder)
            for name in (CLAIMS, DEALERS, LOGS, PROPOSALS):
                make_private(self.folder / name)
            write_durable(self.folder / PLAN_FILE, (json.dumps(plan.to_json(), indent=2) + "\n").encode())
        except OSError as error:
            raise UsageError(
                f"cannot write to {self.folder}: {error.strerror}; choose another with --run-dir"
            ) from error

    def rows(self) -> Iterator[dict[str, Any]]:
        """What all dealers have noted down."""
        for path in sorted(self.folder.glob(f"{DEALERS}/*/{JOURNAL_FILE}")):
            with contextlib.suppress(OSError):
                for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                    with contextlib.suppress(ValueError):
                        row = json.loads(line)
                        if isinstance(row, dict):
                            yield row

    def claims(self) -> dict[Task, dict[str, Any]]:
        """Every attempt, with what the dealer has written that has claimed it: its name, the launch of ranks that it
        is a part of, and whether it is the task's last chance."""
        found = {}
        for path in (self.folder / CLAIMS).glob("*-*-*.json"):
            with contextlib.suppress(ValueError):
                found[Task(*map(int, path.stem.split("-")))] = read_json(path) or {}
        return found

    def records(self, dealer: Dealer | None = None) -> Records:
        """Everything that is known, for the decision what comes next; as one of the dealers, or from outside."""
        claims, ended, again = self.claims(), {}, set()
        for row in self.rows():
            with contextlib.suppress(KeyError, TypeError, ValueError):
                if row["event"] == "ended":
                    ended[_task(row)] = Ended(
                        str(row["status"]),
                        row["value"],
                        int(row["samples"]),
                        float(row["busy_s"]),
                        str(row["reason"]),
                    )
                elif row["event"] == "rerun":
                    again.add(_task(row))
        dealers = {task: str(claim.get("dealer", "")) for task, claim in claims.items()}
        names = {name: self._lives(name, dealer) for name in set(dealers.values()) if name}
        lives = {
            task: names[name] if name else self._is_fresh(task, dealer) for task, name in dealers.items()
        }
        unsure = any(alive is None for task, alive in lives.items() if task not in ended)
        return Records(
            {task: alive is not False for task, alive in lives.items()},
            ended,
            frozenset(again),
            {task: str(claim.get("launch", "")) for task, claim in claims.items()},
            frozenset(task for task, claim in claims.items() if claim.get("last")),
            unsure and dealer is not None and dealer.may_be_early,
        )

    def process_of(self, task: Task) -> str:
        """The identity of the process that carries an attempt out; empty if that was the dealer itself."""
        for row in self.rows():
            with contextlib.suppress(KeyError, TypeError, ValueError):
                if row["event"] == "launched" and _task(row) == task:
                    return str(row["process"])
        return ""

    def claimed_s(self, task: Task) -> float:
        """When an attempt was claimed, by the clock of the file system; 0 if it was not."""
        return self.touched_s(self.claim_file(task))

    def touched_s(self, path: Path) -> float:
        """When a file was written, by the clock of its file system; 0 where there is none."""
        try:
            return path.stat().st_mtime
        except OSError:
            return 0.0

    def claim_file(self, task: Task) -> Path:
        return self.folder / CLAIMS / f"{task.number}-{task.rung}-{task.attempt}.json"

    def proposals(self) -> dict[int, Options]:
        """The settings that a sampler has proposed while the sweep ran, by the first configuration of each."""
        found = {}
        for path in (self.folder / PROPOSALS).glob("*.json"):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                options = (read_json(path) or {})["options"]
                found[int(path.stem)] = tuple((str(name), str(value)) for name, value in options)
        return found

    def settle(self, number: int, options: Options) -> Options:
        """The setting of the configuration of that number from now on: this one, or that of whoever was first.

        Raises:
            OutputError: the disk is full, or the file system knows no links.
        """
        path = self.folder / PROPOSALS / f"{number}.json"
        own = path.with_name(f".{number}.{secrets.token_hex(4)}")
        try:
            write_durable(own, json.dumps({"options": options}).encode())
            try:
                os.link(own, path)  # whole, and once
            except FileExistsError:
                return self.proposals()[number]
            finally:
                own.unlink()
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}; free space and start again") from error
        return options

    def _lives(self, name: str, dealer: Dealer | None) -> bool | None:
        if dealer is not None and name == dealer.name:
            return True
        folder = self.folder / DEALERS / name
        return holder_lives(folder, dealer.folder if dealer else None)

    def _is_fresh(self, task: Task, dealer: Dealer | None) -> bool | None:
        """Of a claim without a name, which is being written, or was when its process died: None as long as that may be
        known later."""
        ours = dealer.touched_s if dealer else time.time()
        return None if self.claimed_s(task) > ours - QUIET_S else False


def _task(row: dict[str, Any]) -> Task:
    return Task(int(row["number"]), int(row["rung"]), int(row["attempt"]))


class Dealer:
    """A process that takes tasks of a sweep; its threads may share it. A context manager. `launch`: of ranks, where the
    death of one may be that of all."""

    def __init__(self, sweep: Sweep, launch: str = ""):
        self.sweep, self.launch = sweep, launch
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.folder = sweep.folder / DEALERS / self.name
        self._turn = threading.Lock()
        self._since_s = time.monotonic()

    def __enter__(self) -> Dealer:
        make_private(self.folder)
        self._lock = RunLock(self.folder, self.name)
        self._lock.take()
        self._journal = open(self.folder / JOURNAL_FILE, "a", encoding="utf-8")
        sync_directory(self.folder)
        return self

    def __exit__(self, *error: object) -> None:
        self._journal.close()
        self._lock.release()

    @property
    def touched_s(self) -> float:
        """When this dealer has last shown that it lives, by the clock of the file system."""
        return self.sweep.touched_s(self.folder / LOCK_FILE)

    @property
    def may_be_early(self) -> bool:
        """Whether it is too early to tell dealers on other hosts that are gone from those that are slow."""
        return time.monotonic() - self._since_s < QUIET_S + 5

    def claim(self, task: Task, is_last_chance: bool = False) -> bool:
        """Whether this dealer has got the attempt, and nobody else will."""
        path = self.sweep.claim_file(task)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}; free space and start again") from error
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps({"dealer": self.name, "launch": self.launch, "last": is_last_chance}))
            file.flush()
            os.fsync(handle)
        return True

    def note(self, event: str, **fields: object) -> None:
        """Append a row that survives a power cut.

        Raises:
            OutputError: the disk is full, or the file system away.
        """
        row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": event, **fields}
        try:
            with self._turn:
                self._journal.write(json.dumps(row) + "\n")
                self._journal.flush()
                os.fsync(self._journal.fileno())
        except OSError as error:
            raise OutputError(
                f"cannot write {self.folder / JOURNAL_FILE}: {error.strerror}; free space and start the sweep again"
            ) from error

    def launched(self, task: Task, process: str) -> None:
        """Note down which process carries an attempt out, where that is not this one."""
        self.note("launched", **task._asdict(), process=process)

    def ended(self, task: Task, ended: Ended) -> None:
        """Note down how an attempt ended."""
        self.note("ended", **task._asdict(), **ended._asdict())
