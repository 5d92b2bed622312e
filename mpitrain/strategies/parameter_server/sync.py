"""Synchronous SGD over a server, with and without spare workers.

    w <- w - eta * mean of the first k gradients of this version        version <- version + 1

`sync`: k = N. `backup`: k = N - spare, and what comes later for this version is received and dropped. Chen,
Pan, Monga, Bengio and Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016. N counts the workers that
take part; when workers leave at the end of the data, N shrinks with them.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, ClassVar

from mpitrain.errors import UsageError
from mpitrain.strategies.base import NOTHING, Arrival, ServerStrategy, Verdict
from mpitrain.values import nearest, register

STRAGGLERS = ("finish", "abort")


def _check_lockstep(strategy: ServerStrategy) -> None:
    """In lockstep whoever did not read the newest version before pushing would be late for ever."""
    if strategy.inflight != 1 or strategy.pulls > strategy.push_every:
        raise UsageError(
            f"{strategy.name}: an update takes gradients of the present version only, so it works neither with "
            "inflight=2 nor with pull_every above push_every; use async, softsync or ssp for these"
        )


def _on_push(arrival: Arrival, quorum: int) -> Verdict:
    if arrival.read < arrival.version:
        return Verdict(0.0, False, (arrival.worker,), late=True)
    # whoever waits has pushed for this version; one that has, and died, does not stand in for those that live
    if len(arrival.blocked) < quorum or len(arrival.blocked & arrival.active) < quorum:
        return Verdict(1.0, False, ())
    return Verdict(1.0, True, tuple(sorted(arrival.blocked)))


def _on_leave(blocked: Set[int], active: Set[int], quorum: int) -> Verdict:
    if not 0 < quorum <= len(blocked & active):
        return NOTHING
    return Verdict(0.0, True, tuple(sorted(blocked)))


@register("strategy", "sync")
class Sync(ServerStrategy):
    """A server waits for the gradients of all N workers and applies their mean.

    Gradients are added in rank order as they come.
    """

    lockstep: ClassVar[bool] = True
    aggregates_by: ClassVar[str] = "sum"

    @property
    def steps_in_batch(self) -> bool:
        return (
            not (self.moves or self.reduces or self.aggregates or self.correction) and self.push_codec.is_none
        )

    def check(self) -> None:
        super().check()
        _check_lockstep(self)

    def start(self, workers: tuple[int, ...]) -> dict[str, Any]:
        return {}

    def on_push(self, memory: dict[str, Any], arrival: Arrival) -> Verdict:
        return _on_push(arrival, len(arrival.active))

    def on_leave(self, memory: dict[str, Any], worker: int, blocked: Set[int], active: Set[int]) -> Verdict:
        return _on_leave(blocked, active, len(active))

    def num_contributors(self, num_workers: int) -> int:
        return num_workers

    def contributors(self, active: Set[int]) -> Set[int] | None:
        return active


@register("strategy", "backup")
class Backup(ServerStrategy):
    """A server waits for the first N - spare gradients of a version, and drops the rest.

    Chen et al., "Revisiting Distributed Synchronous SGD", 2016.

    Args:
        spare: how many of the N workers an update does not wait for.
        stragglers: "finish": a straggler completes its gradient, which is dropped on arrival, and then reads
            the present version; "abort": it is stopped at once and starts on the new version (virtual time
            only: MPI cannot interrupt backward).
    """

    spare: int = 1
    stragglers: str = "finish"

    lockstep: ClassVar[bool] = True

    def check(self) -> None:
        super().check()
        _check_lockstep(self)
        self.hold("spare", self.spare >= 0, "must not be negative")
        if self.stragglers not in STRAGGLERS:
            raise UsageError(
                f"backup: stragglers={self.stragglers!r}{nearest(self.stragglers, list(STRAGGLERS))}"
            )
        if self.stragglers == "abort" and self.servers > 1:
            raise UsageError(
                'backup: stragglers="abort" needs servers=1: shards finish a version at different times'
            )

    def check_workers(self, num_workers: int) -> None:
        if self.spare >= num_workers:
            raise UsageError(f"backup: spare={self.spare} of {num_workers} workers leaves none to wait for")

    def start(self, workers: tuple[int, ...]) -> dict[str, Any]:
        return {}

    def on_push(self, memory: dict[str, Any], arrival: Arrival) -> Verdict:
        verdict = _on_push(arrival, self._quorum(arrival.active))
        if verdict.flush and self.stragglers == "abort":
            return verdict._replace(restart=tuple(sorted(arrival.active - arrival.blocked)))
        return verdict

    def on_leave(self, memory: dict[str, Any], worker: int, blocked: Set[int], active: Set[int]) -> Verdict:
        verdict = _on_leave(blocked, active, self._quorum(active))
        if verdict.flush and self.stragglers == "abort":
            return verdict._replace(restart=tuple(sorted(active - blocked)))
        return verdict

    def contributors(self, active: Set[int]) -> Set[int] | None:
        return active if self.spare == 0 else None

    def num_contributors(self, num_workers: int) -> int:
        return max(1, num_workers - self.spare)

    def _quorum(self, active: Set[int]) -> int:
        return max(1, len(active) - self.spare)
