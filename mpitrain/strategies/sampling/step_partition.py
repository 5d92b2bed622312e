"""Everybody's share of every step where all workers take the same steps: step by step what a server would deal.

Invariants: a pure function of (samples, batch size, workers, window), the same on every rank without a message.
As long as an epoch has a full batch for everybody, a step is what `BatchDealer` deals to the workers in turn, so that
`allreduce()` and `sync()` train on the same batches and each rank reads chunks of its own; of what is left everybody
gets as much as the others. A rest too small to give every worker one sample is left out. A rank computes its own lease
and no other's (`epoch_steps.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpitrain.messages import Lease
from mpitrain.strategies.sampling.dealer import Run, check_batch_size, check_position, laid_out
from mpitrain.strategies.sampling.epoch_steps import CutSteps, EpochSteps, Layout, Step

UNTOUCHED = Layout({}, 0)


class StepPartition:
    """The steps of a run.

    Args:
        num_samples: of an epoch; batch_size: per worker.
        num_workers: how many; window_samples: how many samples are read together.
        drop_last: leave out an incomplete last step, unless an epoch has no complete one.
        workers: whose leases a `Step` holds; None for those of all workers.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        num_workers: int,
        window_samples: int,
        drop_last: bool = False,
        workers: Sequence[int] | None = None,
    ):
        self.num_samples, self.num_workers, self.batch_size = num_samples, num_workers, batch_size
        self.window_samples, self.drop_last = window_samples, drop_last
        self.workers = range(num_workers) if workers is None else workers
        self.epoch = 0
        self._whole = self._steps = self._steps_from(UNTOUCHED)  # of a whole epoch, and of this one
        self._num_taken = self._num_settled = 0  # steps of `_steps`

    def _steps_from(self, layout: Layout) -> EpochSteps | CutSteps:
        if self.window_samples >= self.num_samples and not layout.stretches:
            return CutSteps(
                self.num_samples, self.batch_size, self.num_workers, self.drop_last, layout, self.workers
            )
        return EpochSteps(
            self.num_samples, self.batch_size, self.num_workers, self.window_samples, self.drop_last, layout,
            self.workers,
        )  # fmt: skip

    def peek(self) -> Step | None:
        """The next step; None at the end of the epoch."""
        return self._steps.step(self._num_taken, self.epoch)

    def take_step(self) -> Step | None:
        """The next step, to be settled before another is taken; None at the end of the epoch."""
        step = self._steps.step(self._num_taken, self.epoch)
        if step is not None:
            self._num_taken += 1
        return step

    def settle_step(self) -> None:
        """The step taken last is done."""
        self._num_settled = self._num_taken

    def next_epoch(self) -> int:
        """Begin the next epoch; returns how many samples of this one are left out."""
        left = self._steps.num_left(self._num_taken)
        self.epoch, self._steps = self.epoch + 1, self._whole
        self._num_taken = self._num_settled = 0
        return left

    def state(self) -> dict[str, Any]:
        """Position in the data: integers only, as few among many workers as among two, but in an epoch in which the
        number of workers has changed."""
        layout = self._steps.layout
        return {
            "workers": self.num_workers,
            "batch_size": self.batch_size,
            "window": self.window_samples,
            "epoch": self.epoch,
            "cursor": layout.cursor,
            "stretches": [[owner, *run] for owner, run in layout.stretches.items()],
            "steps": self._num_settled,
        }

    def state_at(self, epoch: int, cursor: int, batch_size: int) -> dict[str, Any]:
        """What `state` returns where the samples of an epoch were trained on in order, up to `cursor`."""
        untouched = {"stretches": [], "steps": 0}
        return self.state() | untouched | {"epoch": epoch, "cursor": cursor, "batch_size": batch_size}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; for other workers the rest of the epoch is dealt anew.

        Raises:
            UsageError: other batches in the middle of an epoch.
            CheckpointError: `state` is another version's.
        """
        check_position(state, self.state())
        self.epoch, num_steps = state["epoch"], state["steps"]
        layout = Layout({owner: (start, end) for owner, start, end in state["stretches"]}, state["cursor"])
        before = state["workers"], state["batch_size"], state["window"]
        left = _left_at(self.num_samples, *before, self.drop_last, layout, num_steps)
        num_left, full = sum(count for _, count in left), state["workers"] * state["batch_size"]
        drops_last = self.drop_last and self.num_samples >= full
        is_over = num_left < state["workers"] or (drops_last and num_left < full)
        between = is_over or num_left == self.num_samples
        check_batch_size(state["batch_size"], self.batch_size, self.epoch, between)
        if before != (self.num_workers, self.batch_size, self.window_samples):
            layout, num_steps = Layout(*laid_out(left, self.num_samples)), 0
        self._steps = self._whole if layout == UNTOUCHED else self._steps_from(layout)
        self._num_taken = self._num_settled = num_steps


class StepTurn(NamedTuple):
    """One step of all workers: `leases` of those that were asked for, `num_samples` of all, of whom none has more than
    `largest`."""

    step: int
    epoch: int
    leases: tuple[Lease, ...]
    num_samples: int
    largest: int

    @property
    def lease(self) -> Lease:
        """The first of them: of a rank that asks for its own alone, its own."""
        return self.leases[0]


class StepCourse:
    """The steps of a run, epoch after epoch, until all are taken.

    Args:
        partition: of the epochs.
        num_epochs: how many; num_steps: take so many steps instead, however many epochs that takes.
    """

    def __init__(self, partition: StepPartition, num_epochs: int, num_steps: int | None = None):
        self.partition, self.num_epochs, self.num_steps = partition, num_epochs, num_steps
        self.step = self.num_left_out = 0

    @property
    def epoch(self) -> int:
        """Whole epochs that are over."""
        return self.partition.epoch

    @property
    def goes_on(self) -> bool:
        """Whether steps are left, or the end of an epoch."""
        if self.num_steps is None:
            return self.partition.epoch < self.num_epochs
        return self.step < self.num_steps

    @property
    def has_step(self) -> bool:
        """Whether steps are left."""
        if self.num_steps is not None or self.epoch + 1 < self.num_epochs:
            return self.goes_on
        return self.goes_on and self.partition.peek() is not None

    def next_turn(self) -> StepTurn | None:
        """The next step, to be settled before another is taken; None at the end of an epoch."""
        partition = self.partition
        step = partition.take_step()
        if step is None:
            self.num_left_out += partition.next_epoch()
            return None
        turn = StepTurn(self.step, partition.epoch, step.leases, step.num_samples, step.largest)
        self.step += 1
        return turn

    def restore(self, counts: dict[str, Any], position: dict[str, Any]) -> None:
        """Continue where "step" steps are taken and "left_out" samples left out, at a `position` in the data that the
        partition's `state` returned; errors as there."""
        self.partition.restore(position)
        self.step, self.num_left_out = counts["step"], counts["left_out"]


def _left_at(
    num_samples: int,
    num_workers: int,
    batch_size: int,
    window_samples: int,
    drop_last: bool,
    layout: Layout,
    num_steps: int,
) -> list[Run]:
    """(start, count) of what so many steps from `layout` on leave, in order; what lies together is one run."""
    steps = EpochSteps(
        num_samples, batch_size, num_workers, window_samples, drop_last, layout, (), until=num_steps
    )
    return steps.runs_left()
