"""Checkpoints of a loop of one's own: `mt.save(run_dir, step)`, and `mt.wrap(..., resume=run_dir)`.

Invariants: every worker calls `save` at the same step, each writes what it holds, and servers what they hold, in
the parts that `mpitrain train` writes too; a checkpoint is complete when all parts are there. What is resumed goes on
bit for bit where the strategy is synchronous or has one worker. Position in the data, schedulers and random numbers are
the loop's own: it hands them in as `state`, and finds them again in `resumed()`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from mpitrain.checkpoint import Checkpoint, write_part
from mpitrain.checkpoint.parts import FIRST, folder_of
from mpitrain.checkpoint.pruning import Pruner
from mpitrain.errors import CheckpointError, UsageError
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.part_names import own_part
from mpitrain.strategies.placement import Roles
from mpitrain.system.files.folders import make_private
from mpitrain.system.files.run_directory import (
    Identity,
    adopt,
    make_room,
    new_attempt_id,
    new_run_id,
    wait_for_room,
)
from mpitrain.system.files.run_lock import RunLock
from mpitrain.system.saying import tell
from mpitrain.training.agree import attempt
from mpitrain.training.resuming.find_checkpoint import find, identify, readers_of
from mpitrain.training.resuming.resume_options import shapes_of
from mpitrain.training.synchronous.checkpoints import copied

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime
    from mpitrain.roles import SaveRequest
    from mpitrain.training.parameter_server.builder import AnyStore


ROOM_S = 600.0  # how long the others wait for whoever makes room, once


class Resumed(NamedTuple):
    """What a loop goes on from: the `step` given to `save`, and this worker's `state` then."""

    step: int
    state: Any


@dataclasses.dataclass
class LoopRun:
    """Whose checkpoints a loop writes, the same on all ranks: where it goes on from those that lie there, that run's;
    anywhere else a new run's, which moves what is there aside.

    Args:
        new: of the new run; found: what the loop goes on from; directory: where that lies.
    """

    new: Identity
    found: Checkpoint | None = None
    directory: Path | None = None
    locks: dict[Path, RunLock] = dataclasses.field(default_factory=dict)
    pruners: dict[Path, Pruner] = dataclasses.field(default_factory=dict)

    def open(self, run_dir: Path, step: int, first: bool) -> Identity:
        """Whose checkpoints are written to `run_dir`, before this process writes there. Whoever writes the `first` part
        holds the directory's lock from the first time on, until the process ends, and makes room; the others wait.

        Raises:
            UsageError: the checkpoint that the loop goes on from is a later one; another job writes there; or another
                run's checkpoints cannot be moved.
        """
        found, identity = self.found, self.new
        if found is not None and run_dir == self.directory:
            identity = identity._replace(run=found.identity.run)
            if step < found.checkpoint_at:
                raise UsageError(
                    f"save: step {step} lies before {found.checkpoint_at}, from which this loop goes on: count on from "
                    "resumed().step, or leave out resume="
                )
        if not first:
            if not wait_for_room(run_dir, identity.run, ROOM_S):
                raise CheckpointError(
                    f"save: the rank that writes {FIRST} did not make {run_dir} ready within {ROOM_S:g} s; see its log"
                )
            return identity
        try:
            make_private(run_dir)
            if run_dir not in self.locks:
                lock = RunLock(run_dir, self.new.attempt)
                lock.take()
                self.locks[run_dir] = lock
            moved = None
            if identity.run != self.new.run:
                adopt(run_dir, identity.run)
            else:
                moved = make_room(run_dir, identity.run, beside=False)
            if run_dir not in self.pruners:
                self.pruners[run_dir] = Pruner(run_dir)
        except OSError as error:
            raise UsageError(
                f"save: {run_dir} holds another run's checkpoints, which cannot be moved aside, or cannot be written "
                f"to: {error}"
            ) from error
        if moved is not None:
            text = f"mpitrain: checkpoints of an earlier run in {run_dir} are now in {moved}"
            tell(text)
        return identity

    def close(self, run_dir: Path) -> None:
        """Give back the lock of a directory that no more is written to."""
        if run_dir in self.locks:
            self.locks.pop(run_dir).release()

    def tidy(self, run_dir: Path, keep: int, step: int, identity: Identity, parts: Sequence[str]) -> None:
        """After the first of the `parts` of the checkpoint at `step`; `keep` of 0: nothing else is ever written
        there."""
        if keep:
            self.pruners[run_dir].prune(keep, step, identity, parts)
        else:
            self.close(run_dir)


@dataclasses.dataclass
class Saver:
    """How this worker writes.

    Args:
        run: whose checkpoints; about: the run; part: this worker's; parts: all of them, on the worker that writes the
            first.
        take: its state, given (step, run directory, checkpoints to keep).
    """

    run: LoopRun
    about: dict[str, Any]
    part: str
    parts: list[str]
    take: Callable[[int, Path, int], dict[str, Any]]
    others: list[Saver] = dataclasses.field(default_factory=list)  # of further models of the program

    @property
    def number_of_next(self) -> int:
        """Which model of the program the next one is."""
        return 1 + len(self.others)

    def take_along(self, other: Saver) -> None:
        """Write what this worker holds of another model into the same part."""
        self.others.append(other)
        self.about["further_models"] = [one.about["parameters"] for one in self.others]

    def save(self, run_dir: Path, step: int, state: object, keep: int) -> None:
        """`mt.save`."""
        further = [other.take(step, run_dir, keep) for other in self.others]
        tree = copied({**self.take(step, run_dir, keep), "loop": state, "further_models": further})
        identity = self.run.open(run_dir, step, first=bool(self.parts))
        try:
            write_part(folder_of(run_dir, step), self.part, tree, identity, self.parts, self.about)
        except TypeError as error:
            raise UsageError(f"save: {error}; give numbers, texts, lists, dicts and tensors") from error
        if self.parts:
            self.run.tidy(run_dir, keep, step, identity, self.parts)


def about_loop(strategy: Strategy, model: torch.nn.Module, num_workers: int) -> dict[str, Any]:
    """What a checkpoint says of its run."""
    kind = f"{strategy.family} in a loop of one's own"
    return {
        "kind": kind, "strategy": str(strategy), "parameters": shapes_of(model), "workers": num_workers,
    }  # fmt: skip


def keep_allreduce(runtime: Runtime, found: Checkpoint | None, about: dict[str, Any]) -> None:
    """Decide on allreduces as the run did that the loop goes on from, say where that cannot be, and have it written
    into the loop's own checkpoints. Groups that there are already follow."""
    plan, before = runtime.allreduce_plan, found.about.get("allreduce") if found is not None else None
    if plan.adopt(before):
        for group in runtime.groups:
            group.decide()
    if before is not None and runtime.rank == 0 and (noted := plan.differences(before)):
        text = "; ".join(f"{name}: {value}" for name, value in noted.items())
        tell(f"mpitrain: allreduces of the resumed loop: {text}")
    about["allreduce"] = plan.state()


class FoundModel:
    """A checkpoint as one of its further models sees it; all else is the checkpoint's."""

    def __init__(self, checkpoint: Checkpoint, number: int):
        self._checkpoint, self._number = checkpoint, number
        models = checkpoint.about.get("further_models", [])
        parameters = models[number - 1] if number <= len(models) else f"not among {1 + len(models)} model(s)"
        self.about = {**checkpoint.about, "parameters": parameters}

    def part(self, name: str) -> Any:
        """What stands in this part of the model."""
        return self._checkpoint.part(name)["further_models"][self._number - 1] | {"loop": None}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)


def find_run(
    runtime: Runtime,
    resume: str | os.PathLike[str] | None,
    about: dict[str, Any],
    same_number: bool,
    number: int = 0,
    roles: Roles = Roles((), ()),  # noqa: B008 - frozen
) -> LoopRun:
    """The newest checkpoint under `resume`, if there is one, and whose checkpoints the loop writes; collective.

    Args:
        same_number: whether only as many workers can go on from it.
        number: which of the program's models asks; the first one names the run.
        roles: where there are servers.

    Raises:
        AgreedError: none verifies, or it is of another run.
    """
    directory = runtime.broadcast(None if resume is None else str(Path(resume).resolve()))
    readers = readers_of(roles, range(runtime.size))
    found = find(runtime, Path(directory), readers) if directory is not None else None
    if found is not None and number:
        found = cast(Checkpoint, FoundModel(found, number))
    new = Identity(*runtime.broadcast(identify(found, new_run_id(), new_attempt_id())))

    def check() -> None:
        for key in ("kind", "parameters", *(("workers",) if same_number else ())):
            if found is not None and found.about.get(key) != about[key]:
                raise UsageError(
                    f"{found.folder} was written by {found.about.get('strategy')}, whose {key} was "
                    f"{found.about.get(key)}; here it is {about[key]}"
                )

    attempt(runtime, check)
    return LoopRun(new, found, Path(directory) if directory is not None else None)


def loop_state(resume: Checkpoint | None, saved: dict[str, Any] | None) -> Resumed | None:
    """What the loop had handed in on this worker, which goes on from `saved`; on a worker that was not there before,
    that is the first worker's."""
    if resume is None:
        return None
    return Resumed(resume.checkpoint_at, saved["loop"] if saved else None)


def write_shard(
    run: LoopRun, part: str, about: dict[str, Any], workers: tuple[int, ...], store: AnyStore
) -> Callable[[SaveRequest, dict[str, Any], list[int]], None]:
    """What a server does when all workers have come: a write that fails leaves the checkpoint before as it is."""

    def write(order: SaveRequest, role: dict[str, Any], present: list[int]) -> None:
        asked = json.loads(order.text)
        shards = [f"shard-{shard}" for shard in range(about["servers"])]
        parts = (
            shards + [f"worker-{workers.index(worker)}" for worker in present] if part == shards[0] else []
        )
        run_dir = Path(asked["run_dir"])
        identity = run.open(run_dir, order.checkpoint_at, first=bool(parts))
        try:
            state = {"role": role, "store": store.state()}
            write_part(folder_of(run_dir, order.checkpoint_at), part, state, identity, parts, about)
        except CheckpointError as error:
            tell(f"mpitrain: warning: {error}")
            return
        if parts:
            run.tidy(run_dir, asked["keep"], order.checkpoint_at, identity, parts)

    return write


def lockstep_saver(
    run: LoopRun, about: dict[str, Any], rank: int, size: int, take: Callable[[], dict[str, Any]]
) -> Saver:
    """Of strategies without servers: all are at the same step by themselves."""
    parts = [own_part(other) for other in range(size)] if rank == 0 else []
    return Saver(run, about, own_part(rank), parts, lambda step, run_dir, keep: take())
