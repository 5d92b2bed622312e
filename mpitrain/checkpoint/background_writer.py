"""This rank's part of every checkpoint: when it is due, and its writing in the background.

Invariants: the role hands over a state of its own (tensors copied, unless it waits until they are written), one writer
thread brings it to disk, and at most one is under way: a second waits for it. Until somebody waits, the writer leaves
most of its core to the training. A write that fails, in whatever way, warns, is counted and leaves the checkpoints
before it alone; only the third in a row ends the run. What no checkpoint can hold is refused before the first step, and
once more after the first update, when optimizers have a state.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.checkpoint.parts import FIRST, corrupt_part, folder_of, write_part
from mpitrain.checkpoint.pruning import Pruner
from mpitrain.errors import CheckpointError, UsageError
from mpitrain.strategies.checkpoint_policy import CheckpointPolicy
from mpitrain.system import background
from mpitrain.system.files.run_directory import MAX_RECORD_BYTES, Identity
from mpitrain.system.launched import time_limit
from mpitrain.system.looking import only_looking
from mpitrain.system.time_spent import TimeSpent

MAX_FAILURES = 3
RESTS = 7  # times as long as it has computed, so that of its core it takes an eighth


@dataclass(frozen=True)
class PartPlan:
    """What one rank writes of every checkpoint, and when.

    Args:
        run_dir: of the run; part: this rank's part, such as "shard-0"; identity: of the run and this start of it.
        policy: how often (asked on the dealing server only); keep: complete checkpoints to keep.
        about: JSON-able, into the first part: what the run is.
        asked: whether this process was asked to end (a signal).
        warn: is called with the reason when a write has failed.
        more: what else belongs to this part, by name (tensors, copied).
        writers: worker ranks that write a part of their own, as the dealing server must know.
        on_written: is called by the writer's thread with the folder and the names of all parts, where this rank knows
            them, when its own part is written.
        faults: what `--inject` orders of this part's writes: ("disk_full" or "corrupt_file", number of the write).
        drawn: asked before each write: the same of it, at times that are drawn.
        pauses: nothing is copied, and the role waits until its part is written.
        spent: on the rank that reports, what the run's time goes to.
    """

    run_dir: Path
    part: str
    identity: Identity
    policy: CheckpointPolicy
    keep: int = 2
    about: Any = None
    asked: Callable[[], bool] = lambda: False
    warn: Callable[[str], None] = lambda text: None
    more: Callable[[], dict[str, Any]] = dict
    writers: tuple[int, ...] = ()
    faults: frozenset[tuple[str, int]] = frozenset()
    on_written: Callable[[Path, tuple[str, ...]], None] = lambda folder, parts: None
    pauses: bool = False
    drawn: Callable[[], Sequence[str]] = tuple
    spent: TimeSpent | None = None


class CheckpointWriter:
    """One rank's part of every checkpoint."""

    def __init__(self, plan: PartPlan):
        self.plan, self._num_begun = plan, 0
        self.num_written = self.num_failed = self.num_bytes = 0
        self.copy_s = self.write_s = self.wait_s = 0.0
        self._failures = 0
        self.unwritten = ""  # why the last write failed, if it did
        self._cost_s: float | None = None
        self._last_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self._num_tried = 0
        self._pruner = Pruner(plan.run_dir) if plan.part == FIRST else None
        self._hurry = threading.Event()

    @property
    def writers(self) -> tuple[int, ...]:
        """Worker ranks that write a part of their own."""
        return self.plan.writers

    @property
    def writes_last(self) -> bool:
        """Whether the end of a run is written, too."""
        return not self.plan.policy.is_never

    def asked(self) -> bool:
        """Whether this process has been asked to end."""
        return self.plan.asked()

    def next_checkpoint_at(self, samples: int) -> int:
        """Accepted samples at which to write next, 0 while nothing is due; the dealing server asks."""
        if self.plan.policy.samples:
            return self.plan.policy.next_checkpoint_at(samples)
        return samples + 1 if self.time_is_up() else 0

    def time_is_up(self) -> bool:
        """Whether the policy counts time, and so much has passed since the last checkpoint."""
        busy = self._thread is not None and self._thread.is_alive()
        return not busy and time.monotonic() - self._last_s >= self.plan.policy.interval_s(self._cost_s)

    def try_out(self, role_state: Callable[[], dict[str, Any]]) -> None:
        """Before the first step, and at the first call after an update: look whether a checkpoint can hold the state.
        Nothing is written, and later calls do nothing.

        Raises:
            UsageError: it cannot; names the place.
        """
        if self._num_tried >= 2:
            return
        self._num_tried += 1
        from mpitrain.checkpoint.state_tree import structure_of

        try:
            with only_looking():
                structure = structure_of({"role": role_state(), **self.plan.more()})
            num_bytes = len(json.dumps([structure, self.plan.about]))
        except TypeError as error:
            raise UsageError(
                f"{self.plan.part}: {error}, so no checkpoint of this run could be written: keep it out of the "
                "state, or as numbers, texts, lists, dicts and tensors"
            ) from error
        if num_bytes > MAX_RECORD_BYTES:
            raise UsageError(
                f"{self.plan.part}: beside its tensors the state has {num_bytes} bytes of numbers and texts, and a "
                f"checkpoint holds {MAX_RECORD_BYTES}: make them tensors"
            )

    def save(self, checkpoint_at: int, role_state: dict[str, Any], parts: Sequence[str] = ()) -> None:
        """Take over the state and start writing; waits only for the writing before, or also for this one where the
        plan says so."""
        began_s = time.monotonic()
        if self.plan.spent is not None:
            self.plan.spent.mark()
        self.wait()
        waited_s = time.monotonic()
        with only_looking() if self.plan.pauses else contextlib.nullcontext():
            state = {"role": role_state, **self.plan.more()}
        self.wait_s += waited_s - began_s
        self.copy_s += time.monotonic() - waited_s
        self._last_s = time.monotonic()
        self._thread = background.start("checkpoint", self._write, checkpoint_at, state, tuple(parts))
        if self.plan.pauses:
            self.wait()
            self.wait_s += time.monotonic() - self._last_s
        if self.plan.spent is not None:
            self.plan.spent.pause("checkpoint", time.monotonic() - began_s)

    def write_now(self, checkpoint_at: int, state: dict[str, Any], parts: Sequence[str] = ()) -> None:
        """Write this part of a checkpoint in the calling thread, which need not be the role's: `state` is all of it.

        Raises:
            CheckpointError: it could not be written.
        """
        under_way = self._thread
        if under_way is not None:
            self._hurry.set()
            under_way.join()
        plan, folder = self.plan, folder_of(self.plan.run_dir, checkpoint_at)
        write_part(folder, plan.part, state, plan.identity, parts, plan.about)

    def _write(self, checkpoint_at: int, state: dict[str, Any], parts: tuple[str, ...]) -> None:
        began_s, rests = time.monotonic(), Rests(self._hurry)
        number, folder = self._num_begun, folder_of(self.plan.run_dir, checkpoint_at)
        self._num_begun += 1
        due = [how for how, at in self.plan.faults if at == number] + [*self.plan.drawn()]
        try:
            self.num_bytes += write_part(
                folder,
                self.plan.part,
                state,
                self.plan.identity,
                parts,
                self.plan.about,
                "disk_full" in due,
                rests.take,
            )
            if "corrupt_file" in due:
                corrupt_part(folder, self.plan.part)
            if parts:  # the first part knows what is complete
                self.plan.on_written(folder, parts)
                assert self._pruner is not None
                self._pruner.prune(self.plan.keep, checkpoint_at, self.plan.identity, parts)
            self.num_written += 1
            self._failures, self.unwritten = 0, ""
        except Exception as error:  # a state, a file system or a reader of checkpoints can raise anything
            self.num_failed, self._failures = self.num_failed + 1, self._failures + 1
            self.unwritten = _reason(folder / self.plan.part, error)
            self.plan.warn(self.unwritten)
        took_s = time.monotonic() - began_s - rests.total_s
        self.write_s += took_s
        self._cost_s = took_s
        time_limit.checkpoint_took(took_s)

    def wait(self) -> None:
        """Until nothing is being written any more.

        Raises:
            CheckpointError: the last three writes failed.
        """
        if self._thread is not None:
            self._hurry.set()
            self._thread.join()
            self._thread = None
            self._hurry.clear()
        if self._failures >= MAX_FAILURES:
            raise CheckpointError(
                f"{self._failures} checkpoints in a row could not be written to {self.plan.run_dir} "
                f"({self.unwritten}); free space or choose another --run-dir, then --resume auto"
            )

    def summary(self) -> dict[str, Any]:
        """What checkpoints have cost, for `result.json`."""
        return {
            "num_written": self.num_written,
            "num_failed": self.num_failed,
            "num_bytes": self.num_bytes,
            "copy_s": self.copy_s,
            "write_s": self.write_s,
            "wait_s": self.wait_s,
        }


class Rests:
    """The rests of the thread that makes this. `hurry`: while it is set, there are none."""

    def __init__(self, hurry: threading.Event):
        self._hurry, self.total_s = hurry, 0.0
        self._rested_s = time.thread_time()

    def take(self) -> None:
        """Rest in proportion to the work since the last time."""
        began_s = time.monotonic()
        self._hurry.wait(RESTS * (time.thread_time() - self._rested_s))
        self.total_s += time.monotonic() - began_s
        self._rested_s = time.thread_time()


def _reason(part: Path, error: Exception) -> str:
    """Why a part was not written."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"cannot write checkpoint part {part}: {type(error).__name__}: {error}"
