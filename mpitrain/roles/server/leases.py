"""What a server deals out to workers: leases, ahead of their need, in the sizes of the strategy's batching.

Invariants: leases are dealt in rank order before anybody asks, then one for every push that comes in, so
that who trains on what in lockstep is no matter of timing. Only the dealing server has a dealer; what a gradient
weighs for its size, every server says alike. With several servers a lease that was pushed here stays in question until
its worker is known to have been answered by all of them: should it be lost before that, the lease is dealt again, and
the shards that have processed it do not process it twice.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Set
from typing import Any

from mpitrain.messages import Lease
from mpitrain.strategies.base import ServerStrategy
from mpitrain.strategies.parameter_server.batch_size import PerWorker
from mpitrain.strategies.sampling.dealer import BatchDealer, check_batch_size

NOBODY = -1
LEASES_AHEAD = 1  # to read while computing on another; one more for every push that may be in flight


class Leases:
    """Leases and batch sizes of one server.

    Args:
        strategy: the strategy: its `batching`, `push_every` and `inflight`.
        dealer: where leases come from; None on the other servers, and where workers bring their own data.
        num_workers: all of them; batch_size: the job's, 0 where workers bring their own data.
    """

    def __init__(
        self, strategy: ServerStrategy, dealer: BatchDealer | None, num_workers: int, batch_size: int
    ):
        self.strategy, self.dealer = strategy, dealer
        self.num_workers, self.batch_size = num_workers, batch_size
        self._plain = strategy.batching == PerWorker() and strategy.push_every == 1
        self.memory: dict[str, Any] = {}  # the batching's
        self._answered_s: dict[int, float] = {}
        self._dealt: dict[int, list[Lease]] = {}  # to workers that have not been answered yet
        self._unconfirmed: dict[int, list[Lease]] = {}  # pushed here, and perhaps not to every other shard

    def first(self, workers: list[int], active: Set[int]) -> None:
        """Deal the first leases of `workers`, every round one run of the order."""
        for _ in range(LEASES_AHEAD + self.strategy.inflight):
            for worker in workers:
                self._dealt.setdefault(worker, []).extend(self._deal(worker, active))

    def top_up(self, worker: int, num_leases: int, active: Set[int]) -> None:
        """Deal what the next `take_leases` will send along."""
        for _ in range(num_leases):
            self._dealt.setdefault(worker, []).extend(self._deal(worker, active))

    def take_leases(self, worker: int, num_leases: int, active: Set[int]) -> list[Lease]:
        """What to send along with an answer: leases dealt before, and so many more as far as they go."""
        self.top_up(worker, num_leases, active)
        return self._dealt.pop(worker, [])

    def _deal(self, worker: int, active: Set[int]) -> list[Lease]:
        if self.dealer is None:
            return []
        size = self.strategy.batching.size(self.memory, worker, active, self.dealer.batch_size)
        together = self.strategy.contributors(active) if self._plain else None
        lease = self.dealer.deal(
            worker, size, self.strategy.push_every, together or (), self.strategy.reduces
        )
        return [lease] if lease else []

    def take_back(self, worker: int) -> None:
        """`worker` is gone: what it was dealt is dealt to others."""
        self._dealt.pop(worker, None)
        if self.dealer:
            self.dealer.take_back(worker)
            self.dealer.give_back(self._unconfirmed.pop(worker, []))

    def has_nothing(self, worker: int) -> bool:
        """Whether `worker` would have nothing to compute on."""
        return self.dealer is not None and not self.dealer.outstanding.get(worker)

    def waiting(self) -> int:
        """How many leases have come back and wait to be dealt again."""
        return len(self.dealer.returned) if self.dealer and not self.dealer.closed else 0

    def outstanding(self, but_for: int | None = None) -> bool:
        """Whether anything that has been dealt is not settled: somebody has it, or has not confirmed it (other than
        `but_for`), or it has come back."""
        if self.dealer is None:
            return False
        unconfirmed = any(leases for worker, leases in self._unconfirmed.items() if worker != but_for)
        return bool(self.dealer.outstanding) or unconfirmed or self.waiting() > 0

    def unfinished(self) -> bool:
        """At the end: whether anything is left that was to be done, dealt or not."""
        if self.dealer is None or self.dealer.closed:
            return False
        return self.outstanding() or self.dealer.deal(NOBODY) is not None

    def settle_lease(self, worker: int) -> Lease | None:
        """`worker` has pushed here what it made of its oldest lease."""
        if self.dealer is None:
            return None
        lease = self.dealer.settle_lease(worker)
        if self.strategy.servers > 1:
            self._unconfirmed.setdefault(worker, []).append(lease)
        return lease

    def confirm(self, worker: int) -> None:
        """Every shard has answered all that `worker` has pushed."""
        self._unconfirmed.pop(worker, None)

    def close(self) -> None:
        """Deal nothing more."""
        if self.dealer:
            self.dealer.close()

    def answered(self, worker: int, now_s: float) -> None:
        """An answer has gone out: from here on `worker`'s speed is measured."""
        self._answered_s[worker] = now_s

    def pushed(self, worker: int, num_samples: int, now_s: float) -> None:
        """A push has come in."""
        began_s = self._answered_s.get(worker)
        if self.strategy.batching.measures and began_s is not None:
            self.strategy.batching.measured(self.memory, worker, num_samples, now_s - began_s)

    def weight(self, num_samples: int) -> float:
        """What the size of a push makes it weigh, beside its damping."""
        size = self.batch_size * self.strategy.push_every
        return self.strategy.batching.weight(num_samples, self.num_workers, size) if size else 1.0

    def share(self, counted: float) -> float:
        """What share a push of `counted` samples (or what its loss counts) has in the mean of its update: where it is a
        mean itself, and not the sum of several, or the way that a worker has gone."""
        is_mean = self.strategy.push_every == 1 and self.strategy.optimizer == "server"
        return counted if is_mean and not self.strategy.batching.measures else 1.0

    def num_left_out(self) -> int:
        """Samples left out with incomplete last batches."""
        return self.dealer.num_left_out if self.dealer else 0

    def state(self, workers: tuple[int, ...]) -> dict[str, Any]:
        """Data position and the batching's memory, JSON-able. Workers by number, not by rank: with more or fewer
        servers the same worker is another rank."""
        numbers = {worker: number for number, worker in enumerate(workers)}
        dealer = _renamed(self.dealer.state(), numbers) if self.dealer else None
        return {"dealer": dealer, "batching": copy.deepcopy(self.memory), "batch_size": self.batch_size}

    def restore(self, state: dict[str, Any], workers: tuple[int, ...]) -> None:
        """Continue from what `state` returned, with `workers`.

        Raises:
            UsageError: other batches in the middle of an epoch.
        """
        self.memory = state["batching"]
        if self.dealer and state["dealer"]:
            self.dealer.restore(_renamed(state["dealer"], dict(enumerate(workers))), workers)
            if state["batch_size"] != self.batch_size:
                left = sum(count for _, count in self.dealer.left())
                whole = left in (0, self.dealer.num_samples) and self.dealer.all_of_this_epoch()
                check_batch_size(state["batch_size"], self.batch_size, self.dealer.epoch, whole)
                self.dealer.lay_out_anew()


def _renamed(position: dict[str, Any], names: Mapping[int, int]) -> dict[str, Any]:
    """A dealer's state with its workers called otherwise; what belongs to nobody of them has names below 0, each its
    own."""
    keys = [key for key in ("stretches", "outstanding") if key in position]
    owners = {owner for key in keys for owner, *_ in position[key]}
    others, lowest = sorted(owner for owner in owners - set(names) if owner >= 0), min([0, *owners])
    names = {**names, **{owner: lowest - 1 - index for index, owner in enumerate(others)}}
    return position | {
        key: [[names.get(owner, owner), *rest] for owner, *rest in position[key]] for key in keys
    }
