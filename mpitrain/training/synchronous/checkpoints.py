"""Checkpoints of synchronous runs, in which every rank holds the same parameters.

Invariants: all ranks decide alike. All know at how many samples the next checkpoint is due; what one rank alone knows
(that it was asked to end, that time is up) is agreed in one small allreduce every so many steps, about twice a second.
Rank 0 writes what all ranks share, every other rank what is its own (a codec's residual, a local optimizer's momenta),
if there is any. Of a split
model each rank of the first replica writes its part, and no other rank anything. The position in the data is samples,
so another number of ranks, or of replicas, goes on from there, and residuals are distributed anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from mpitrain.checkpoint import Checkpoint, CheckpointWriter
from mpitrain.strategies.checkpoint_policy import Cadence
from mpitrain.strategies.model_parallel.mesh_layout import Grid
from mpitrain.strategies.part_names import own_part
from mpitrain.system.looking import is_only_looked_at
from mpitrain.torch_versions import pytree
from mpitrain.training import signals
from mpitrain.training.resuming.resume import (
    about_run,
    check,
    make_checkpoint_writer,
    read_own_part,
    restoring,
)
from mpitrain.training.session import Session, attempt
from mpitrain.training.share_tree import share_tree
from mpitrain.training.synchronous.collectives import GroupCollectives
from mpitrain.training.watchdog.emergency import Emergency, Guard, KeptBuffers, Taken, refuse_devices


class StepCheckpoints:
    """When a synchronous run writes checkpoints, and from where it goes on.

    Args:
        session: of the run; described: the parameters' names and shapes, and the optimizer's class and groups, which
            the checkpoint holds.
        state: what rank 0 writes: a tree with tensors (copied here).
        own: what each rank writes beside it, or None; own_stands: it is as `state` is between two steps, so that it can
            be written when the run stands still.
        grid: who holds which part of a split model.
        module: what is written as "module", if a step leaves its parameters alone until its update; forward passes may
            change its buffers.
        collectives: by which the ranks agree; over torch's group by default.
    """

    def __init__(
        self,
        session: Session,
        described: tuple[list[str], list[str]],
        state: Callable[[], dict[str, Any]],
        own: Callable[[], dict[str, Any]] | None = None,
        grid: Grid | None = None,
        module: torch.nn.Module | None = None,
        collectives: GroupCollectives | None = None,
        own_stands: bool = False,
    ):
        kind = session.strategy.family + (f" in {grid.num_parts} parts" if grid else "")
        about = about_run(session, described[0], kind, described[1])
        attempt(session.runtime, lambda: check(session, about))
        self._collectives = collectives or GroupCollectives()
        self.rank = session.runtime.rank
        replica, place = grid.place(self.rank) if grid else (0, self.rank)
        num_places = grid.num_parts if grid else session.runtime.size
        self._writes = replica == 0 and (self.rank == 0 or own is not None)
        self._parts = tuple(own_part(other) for other in range(num_places if own else 1))

        self.writer: CheckpointWriter = make_checkpoint_writer(
            session, own_part(place), about, lambda: copied(self._tree())
        )
        asked_for = session.overrides.watchdog_s > 0 or session.runtime.survives_shrink
        self.guard, self.buffers = Guard(), KeptBuffers(module, asked_for)
        self._state, self._own = state, own
        self._at = (session.resume.checkpoint_at if session.resume else 0, 0)
        if module is None:
            session.in_emergency(
                None, f"{session.strategy}: a step may have put the parts of the model together"
            )
        elif own is not None and grid is None and not own_stands:
            session.in_emergency(
                None, f"{session.strategy}: what the codec keeps back is in the middle of a step"
            )
        else:
            emergency = Emergency(self.writer, self.guard, self._take, lambda: list(self._parts))
            session.in_emergency(emergency if self._writes else None)
        self._own_of_first: Any = None  # between `restored` and `restored_own`
        self.ended = False
        self.wants_validation: Callable[[], bool] = _never  # the first rank, by its clock
        self.before_writing: Callable[[], object] = _never  # on all ranks
        self._validates = False  # all ranks have agreed to
        self._written_at = session.resume.checkpoint_at if session.resume else 0
        self._cadence = Cadence(
            self.writer.plan.policy, session.resume.checkpoint_at if session.resume else 0
        )
        self._asked_s = time.monotonic()

    def restored(self, session: Session) -> Any:
        """The saved tree on every rank, which rank 0 alone reads, or None for a run from the beginning."""
        if session.resume is None:
            return None

        def read() -> Any:
            part = read_own_part(session.resume, own_part(0))
            return {"state": part["state"], "own": part.get("own")}

        of_first = restoring(session.resume)(read) if self.rank == 0 else lambda: None
        part = share_tree(session.runtime, attempt(session.runtime, of_first))
        self._own_of_first = part["own"]
        return part["state"]

    def restored_part(self, session: Session, part: int) -> Any:
        """What the rank that held this part of a split model wrote, or None for a run from the beginning."""

        def read() -> Any:
            found = read_own_part(session.resume, own_part(part))
            return found["own"] if found else None

        return attempt(session.runtime, restoring(session.resume)(read))

    def restored_own(self, session: Session) -> tuple[Any, list[Any], int]:
        """After `restored`: (what rank 0 wrote as its own or None, what falls to this rank, how many ranks wrote): of
        what ranks wrote, rank r takes r, r + size, ...; the same state on every rank while their number is the same."""
        resume: Checkpoint | None = session.resume
        named = (
            [int(name.split("-")[1]) for name in resume.parts if name.startswith("own-")] if resume else []
        )
        first, self._own_of_first = self._own_of_first, None
        mine = [rank for rank in sorted(named) if rank % session.runtime.size == self.rank]
        parts = attempt(session.runtime, lambda: [read_own_part(resume, own_part(rank)) for rank in mine])
        own = [first if self.rank == 0 else None, *(part.get("own") for part in parts)]
        return first, [state for state in own if state is not None], 1 + len(named)

    def _tree(self) -> dict[str, Any]:
        """What this rank writes, as it is now."""
        shared = {"state": self._state()} if self.rank == 0 else {}
        return shared | ({"own": self._own()} if self._own else {})

    def _take(self) -> Taken:
        """For the watchdog: the state after the last step that is whole."""
        tree = self._tree()
        refuse_devices(tree)
        for part in tree.values():
            self.buffers.put_into(part.get("module", {}))
        return Taken(*self._at, {"role": {}, **copied(tree)})

    def try_out(self) -> None:
        """Refuse what no checkpoint can hold, before the first step and after it.

        Raises:
            UsageError: names it.
        """
        if self._writes:
            self.writer.try_out(dict)

    def go_on_from(self, samples: int) -> None:
        """The run goes on at `samples`, not from a checkpoint."""
        self._cadence.go_on_from(samples)

    def go_back_to(self, samples: int, step: int) -> None:
        """All ranks are between two steps again, where they were before."""
        self._at = samples, step
        self._cadence.go_on_from(samples)
        self.buffers.keep_present()
        self.guard.end()

    def after_step(self, step: int, samples: int) -> None:
        """Write, or end, if it is time to; every rank calls it after every step."""
        self.buffers.keep_present()
        self.try_out()
        self._at = samples, step
        self.guard.end()
        due = self._cadence.is_due(samples)
        if step >= self._cadence.ask_at:
            asked, time_is_up, self._validates = self._agree(step)
            self.ended, due = self.ended or asked, due or asked or time_is_up
        if due:
            self._write(samples)

    def _write(self, samples: int) -> None:
        self.before_writing()
        self._cadence.go_on_from(samples)
        self._written_at = samples
        if self._writes:
            self.writer.save(samples, {}, self._parts if self.rank == 0 else ())

    def validates_now(self) -> bool:
        """Whether the ranks have agreed, after the last step, that it is time to validate."""
        validates, self._validates = self._validates, False
        return validates

    def end_early(self, over: bool, samples: int) -> None:
        """Collective, between two steps: end the run, with a checkpoint to go on from, where a validation has ended it;
        the first rank knows."""
        flag = self._collectives.largest(torch.tensor([int(over and self.rank == 0)]))
        if flag and not self.ended:
            self.ended = True
            if samples > self._written_at:
                self._write(samples)

    def finish(self, samples: int, out_of_turn: bool = False) -> None:
        """The run has come to its end, between two steps: more epochs go on from there. `out_of_turn`: the end has
        changed what ranks hold, as no run that goes on would have; then a checkpoint before it is the better one."""
        if samples > self._written_at and self.writer.writes_last and not (out_of_turn and self._written_at):
            self._write(samples)

    def _agree(self, step: int) -> tuple[bool, bool, bool]:
        wanted = self._cadence.steps_to_next_question(step, self._asked_s, time.monotonic())
        timed = self.rank == 0 and self.writer.time_is_up()
        validates = self.rank == 0 and self.wants_validation()
        wishes = torch.tensor([int(signals.asked()), int(timed), int(validates), -wanted])
        wishes = self._collectives.largest(wishes)
        self._asked_s = time.monotonic()
        self._cadence.ask_at = step - int(wishes[3])
        return bool(wishes[0]), bool(wishes[1]), bool(wishes[2])


def _never() -> bool:
    """Nobody validates by the clock."""
    return False


def copied(tree: object) -> Any:
    """A state tree with its tensors copied, in host memory; as it is for who only looks at it."""
    if is_only_looked_at():
        return tree
    return pytree.tree_map(
        lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf, tree
    )
