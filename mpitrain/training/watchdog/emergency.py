"""An emergency checkpoint: the state of a run that is stuck, written by a thread that is not.

Invariants: it calls neither MPI nor a device, and writes nothing that may be torn. The main thread holds a `Guard`
whenever it changes what a checkpoint holds. The thread that writes takes the guard first, and the main thread then
waits before its next change. A rank that is stuck in the middle of a change never releases the guard, and no checkpoint
is written. The rank that writes the first part announces the checkpoint; the others write their parts if they belong to
it. A checkpoint is complete when all its parts are there, so one rank that cannot write leaves the one before the
newest.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mpitrain.checkpoint import CheckpointWriter
from mpitrain.checkpoint.parts import FIRST, folder_of, verify
from mpitrain.errors import CheckpointError
from mpitrain.system import awake
from mpitrain.system.files.part_places import is_there
from mpitrain.torch_versions import pytree
from mpitrain.training.watchdog.alarm_files import LOOK_EVERY_S, Alarm, EmergencyCheckpoint

HOLD_S = 5.0  # longest change of a rank that is not stuck in it, on a machine that is busy
# How long to wait for the first part's rank to announce the checkpoint; it also announces that there will be none.
ANNOUNCED_S = 10.0
OTHERS_S = 5.0  # how long the first part's rank stands still for the others to write theirs


class Guard:
    """Says when this rank's state is whole. It begins as in the middle of a change: there is no state yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changing = self._lock.acquire()
        self.was_whole = False

    def begin(self) -> bool:
        """From here on the main thread changes the state; whether it was whole before."""
        was_whole = not self._changing
        if was_whole:
            self._lock.acquire()
            self._changing = True
        return was_whole

    def end(self) -> None:
        """The state is whole."""
        self.was_whole = True
        if self._changing:
            self._changing = False
            self._lock.release()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """A change after which the state is as whole as it was; after an exception it is not."""
        was_whole = self.begin()
        yield
        if was_whole:
            self.end()

    @contextlib.contextmanager
    def held(self, timeout_s: float) -> Iterator[bool]:
        """For another thread: whether the state is whole, and stays so meanwhile."""
        got = self._lock.acquire(timeout=timeout_s)
        try:
            yield got
        finally:
            if got:
                self._lock.release()


class Taken(NamedTuple):
    """A copy of what this rank writes: `state`, after `samples` accepted samples and `step` steps or versions."""

    samples: int
    step: int
    state: dict[str, Any]


@dataclass(eq=False)
class Emergency:
    """What this rank would write.

    Args:
        writer: of this rank's part; guard: of the state.
        take: copies the state; called while the guard is held. Raises CheckpointError where it cannot.
        parts: all parts of the checkpoint, on the rank that writes the first one.
        fits: whether what was taken belongs to the checkpoint that another rank has announced.
    """

    writer: CheckpointWriter
    guard: Guard
    take: Callable[[], Taken]
    parts: Callable[[], list[str]] = list
    fits: Callable[[EmergencyCheckpoint, Taken], bool] = lambda announced, taken: announced[:2] == taken[:2]

    def write(self, alarm: Alarm) -> None:
        """Write this rank's part of the checkpoint, if it has one.

        Raises:
            CheckpointError: why there can be none.
        """
        if self.writer.plan.part != FIRST:
            self._write_further(alarm)
            return
        try:
            self._write_first(alarm)
        except BaseException:
            with contextlib.suppress(OSError):
                alarm.announce(None)
            raise

    def _write_first(self, alarm: Alarm) -> None:
        with self.guard.held(HOLD_S) as whole:
            taken = self._taken(whole)
            checkpoint = EmergencyCheckpoint(taken.samples, taken.step, tuple(self.parts()))
            folder = folder_of(self.writer.plan.run_dir, checkpoint.checkpoint_at)
            with contextlib.suppress(CheckpointError):
                verify(folder)  # the last one is of this very state
                alarm.announce(checkpoint._replace(parts=()))
                return
            alarm.announce(checkpoint)
            self.writer.write_now(checkpoint.checkpoint_at, taken.state, checkpoint.parts)
            deadline_s = awake.now_s() + OTHERS_S
            while awake.now_s() < deadline_s and not all(is_there(folder, part) for part in checkpoint.parts):
                time.sleep(LOOK_EVERY_S)

    def _write_further(self, alarm: Alarm) -> None:
        checkpoint = alarm.announced(ANNOUNCED_S)
        if checkpoint is None or self.writer.plan.part not in checkpoint.parts:
            return
        deadline_s = awake.now_s() + HOLD_S
        while True:
            with self.guard.held(HOLD_S) as whole:
                taken = self._taken(whole)
                if self.fits(checkpoint, taken):
                    self.writer.write_now(checkpoint.checkpoint_at, taken.state)
                    return
            if awake.now_s() > deadline_s:
                raise CheckpointError(
                    f"it is at {taken.samples} samples, step {taken.step}, and the first part is of "
                    f"{checkpoint.checkpoint_at} samples, step {checkpoint.step}"
                )
            time.sleep(LOOK_EVERY_S)

    def _taken(self, whole: bool) -> Taken:
        if not self.guard.was_whole:
            raise CheckpointError("no step has been taken since the start")
        if not whole:
            raise CheckpointError("it is in the middle of an update, or holds what the others do not")
        return self.take()


def refuse_devices(tree: object) -> None:
    """Only what the host holds can be written.

    Raises:
        CheckpointError: names the device.
    """
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
            raise CheckpointError(
                f"its state is on {leaf.device}, which a process that is stuck does not ask"
            )


class KeptBuffers:
    """A module's buffers as they were after the last whole step: forward passes change running statistics.

    Args:
        module: whose buffers; `on`: whether anybody will ask.
    """

    def __init__(self, module: torch.nn.Module | None, on: bool = True):
        named = dict(module.named_buffers()) if module is not None and on else {}
        self.names = list(named)
        self._buffers = named
        self._kept = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}

    @torch.no_grad()
    def keep_present(self) -> None:
        """They are whole now."""
        for name, buffer in self._buffers.items():
            self._kept[name].copy_(buffer)

    @torch.no_grad()
    def put_back(self) -> None:
        """The module goes on from them."""
        for name, buffer in self._buffers.items():
            buffer.copy_(self._kept[name])

    def put_into(self, state: dict[str, Any]) -> None:
        """In place of the present ones in a `state_dict`."""
        state.update({name: kept for name, kept in self._kept.items() if name in state})

    def copies(self) -> list[torch.Tensor]:
        """In the order of `module.buffers()`.

        Raises:
            CheckpointError: they are not on the host.
        """
        if any(kept.device.type != "cpu" for kept in self._kept.values()):
            raise CheckpointError(
                "the model's buffers are on a device, which a process that is stuck does not ask"
            )
        return [kept.clone() for kept in self._kept.values()]
