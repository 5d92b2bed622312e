"""Everybody's share of every step where all workers take the same steps: round by round what a server would deal.

Invariants: a pure function of (samples, batch size, workers, window), the same on every rank without a message.
As long as an epoch has a full batch for everybody, a round is what `BatchDealer` deals to the workers in turn, so that
`allreduce()` and `sync()` train on the same batches and each rank reads chunks of its own; of what is left everybody
gets as much as the others. A rest too small to give every worker one sample is left out.
"""

from __future__ import annotations

from typing import Any

from mpitrain.messages import Lease
from mpitrain.strategies.sampling.dealer import BatchDealer, check_batch_size

ENDLESS = 1 << 62


class StepPartition:
    """The rounds of a run.

    Args:
        num_samples: of an epoch; batch_size: per worker.
        num_workers: how many; window_samples: how many samples are read together.
        drop_last: leave out an incomplete last round, unless an epoch has no complete one.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        num_workers: int,
        window_samples: int,
        drop_last: bool = False,
    ):
        self.num_workers, self.batch_size, self.drop_last = num_workers, batch_size, drop_last
        self.dealer = BatchDealer(
            num_samples, ENDLESS, batch_size, num_workers=num_workers, window_samples=window_samples
        )
        self._left = num_samples  # of this epoch, not dealt
        self._ahead: list[Lease] | None = None

    def peek(self) -> list[Lease] | None:
        """The leases of the next round, by worker; None at the end of the epoch."""
        if self._ahead is None:
            full = self.num_workers * self.batch_size
            if self._left < self.num_workers or (self._drops_last(full) and self._left < full):
                return None
            if self._left >= full:
                dealt = [self.dealer.deal(worker) for worker in range(self.num_workers)]
                self._ahead = [lease for lease in dealt if lease is not None]
            else:
                self._ahead = self.dealer.deal_evenly()
            self._left -= sum(lease.num_samples for lease in self._ahead)
            assert len(self._ahead) == self.num_workers and self._left >= 0
        return self._ahead

    def _drops_last(self, full: int) -> bool:
        """Whether an incomplete last round is left out, where a complete one has `full` samples."""
        return self.drop_last and self.dealer.num_samples >= full

    def take(self) -> list[Lease] | None:
        """The next round, to be settled before another is taken; None at the end of the epoch."""
        leases, self._ahead = self.peek(), None
        return leases

    def settle(self) -> None:
        """The round taken last is done."""
        for worker in range(self.num_workers):
            self.dealer.settle(worker)

    def next_epoch(self) -> int:
        """Begin the next epoch; returns how many samples of this one are left out."""
        assert self._ahead is None
        left, self._left = self._left, self.dealer.num_samples
        self.dealer.skip_rest()
        return left

    def state(self) -> dict[str, Any]:
        """Position in the data: integers only."""
        return {"workers": self.num_workers, "batch_size": self.batch_size, "dealer": self.dealer.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; for other workers the rest of the epoch is dealt anew.

        Raises:
            UsageError: other batches in the middle of an epoch.
        """
        self.dealer.restore(state["dealer"], tuple(range(state["workers"])))
        left, full = sum(count for _, count in self.dealer.left()), state["workers"] * state["batch_size"]
        is_over = left < state["workers"] or (self._drops_last(full) and left < full)
        between = is_over or left == self.dealer.num_samples
        check_batch_size(state["batch_size"], self.batch_size, self.dealer.epoch, between)
        if (state["workers"], state["batch_size"]) != (self.num_workers, self.batch_size):
            self.dealer.lay_out_anew()
        self._left, self._ahead = sum(count for _, count in self.dealer.left()), None
