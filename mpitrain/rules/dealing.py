"""Who trains on which samples: batches are dealt as leases, one after the other, from one place.

Law of this file: a lease is a run [start, start + count) of one epoch's global order; every sample of an
epoch is dealt exactly once, and progress is what has been settled, not what has been dealt. A fast worker
simply asks more often. Pure and small enough to save as integers.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Lease(NamedTuple):
    """`num_samples` samples from position `start` of the global order of `epoch` (epochs count from 0): what one
    push covers. `batch_size`: to be cut into batches of so many; 0: it is one batch.
    """

    epoch: int
    start: int
    num_samples: int
    batch_size: int = 0

    def batches(self) -> list[Lease]:
        """The batches in it; the last one may be smaller."""
        size, end = self.batch_size or self.num_samples, self.start + self.num_samples
        return [Lease(self.epoch, at, min(size, end - at)) for at in range(self.start, end, size)]


def share_out(start: int, count: int, num_workers: int, worker: int) -> tuple[int, int]:
    """Worker's contiguous (start, count) of a run of `count` samples; the shares differ by at most one, the
    longer ones first.
    """
    share, longer = divmod(count, num_workers)
    return start + worker * share + min(worker, longer), share + (worker < longer)


class Dealer:
    """Deals `num_epochs` epochs of `num_samples` samples in batches of `batch_size`; the last batch of an
    epoch may be smaller.

    Args:
        num_batches: stop after this many batches (a benchmark run), however many epochs that takes; None for
            no such limit.
        drop_last: leave a smaller last batch out (counted in `num_left_out`).
    """

    def __init__(
        self,
        num_samples: int,
        num_epochs: int,
        batch_size: int,
        num_batches: int | None = None,
        drop_last: bool = False,
    ):
        assert num_samples > 0 and batch_size > 0
        self.num_samples, self.num_epochs, self.batch_size = num_samples, num_epochs, batch_size
        self.num_batches, self.drop_last = num_batches, drop_last and num_samples >= batch_size
        self.epoch = self.cursor = self.num_dealt = self.num_left_out = 0
        self.closed = False
        self.returned: list[Lease] = []
        self.outstanding: dict[int, list[Lease]] = {}

    def deal(self, worker: int, batch_size: int = 0, num_batches: int = 1) -> Lease | None:
        """The next lease for `worker`, or None when everything has been dealt; what came back goes out
        first. `batch_size`: instead of the usual one; num_batches: to put into one lease, as far as they go.
        """
        size = batch_size or self.batch_size
        if self.returned and not self.closed:
            self.outstanding.setdefault(worker, []).append(self.returned.pop(0))
            return self.outstanding[worker][-1]
        if self.num_batches is not None:
            num_batches = min(num_batches, self.num_batches - self.num_dealt)
        if self.closed or num_batches <= 0:
            return None
        if self.cursor >= self.num_samples or self._tail_is_dropped(size):
            self.num_left_out += max(0, self.num_samples - self.cursor)
            self.epoch, self.cursor = self.epoch + 1, 0
        if self.num_batches is None and self.epoch >= self.num_epochs:
            return None
        count = min(size * num_batches, self.num_samples - self.cursor)
        count -= count % size if self.drop_last and count > size else 0
        lease = Lease(self.epoch, self.cursor, count, size if count > size else 0)
        self.cursor += count
        self.num_dealt += -(-count // size)
        self.outstanding.setdefault(worker, []).append(lease)
        return lease

    def _tail_is_dropped(self, size: int) -> bool:
        return self.drop_last and self.num_samples - self.cursor < min(size, self.num_samples)

    def settle(self, worker: int) -> Lease:
        """`worker` has handed in the gradient of its oldest lease."""
        return self.outstanding[worker].pop(0)

    def take_back(self, worker: int) -> None:
        """`worker` will hand in nothing more: its leases are dealt again, earliest first."""
        self.returned = sorted(self.returned + self.outstanding.pop(worker, []))

    def close(self) -> None:
        """Deal nothing more."""
        self.closed = True

    def state(self) -> dict[str, Any]:
        """Position in the data: integers only."""
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "num_dealt": self.num_dealt,
            "num_left_out": self.num_left_out,
            "closed": self.closed,
            "returned": [list(lease) for lease in self.returned],
            "outstanding": {
                str(worker): [list(lease) for lease in leases] for worker, leases in self.outstanding.items()
            },
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; whoever held leases then has to be dealt new ones."""
        self.epoch, self.cursor, self.num_dealt = state["epoch"], state["cursor"], state["num_dealt"]
        self.num_left_out, self.closed = state["num_left_out"], state["closed"]
        held = [*state["returned"], *(lease for leases in state["outstanding"].values() for lease in leases)]
        self.returned, self.outstanding = sorted(Lease(*lease) for lease in held), {}
