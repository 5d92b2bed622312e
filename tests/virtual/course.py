"""The obstacle course of the parameter-server family: a new strategy is one file in `strategies/` and one row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mpitrain import strategies
from mpitrain.strategies.base import ServerStrategy

# The obstacle course: every registered server strategy has at least one row, made for a number of workers.
COURSE: dict[str, Callable[[int], ServerStrategy]] = {
    "sync": lambda n: strategies.Sync(),
    "backup, none": lambda n: strategies.Backup(spare=0),
    "backup, one": lambda n: strategies.Backup(spare=min(1, n - 1)),
    "backup, all but one": lambda n: strategies.Backup(spare=n - 1),
    "backup, abort": lambda n: strategies.Backup(spare=min(2, n - 1), stragglers="abort"),
    "async": lambda n: strategies.Async(),
    "async, inverse": lambda n: strategies.Async(damping=strategies.Inverse()),
    "async, drop": lambda n: strategies.Async(damping=strategies.Drop(limit=1)),
    "softsync": lambda n: strategies.SoftSync(updates=3),
    "softsync, drop": lambda n: strategies.SoftSync(updates=2, damping=strategies.Drop(limit=1)),
    "softsync, blocking": lambda n: strategies.SoftSync(updates=max(1, n - 1), blocking=True),
    "softsync, blocking, drop": lambda n: strategies.SoftSync(
        updates=min(2, n), blocking=True, damping=strategies.Drop(limit=0)
    ),
    "softsync, blocking, all": lambda n: strategies.SoftSync(updates=n, blocking=True),
    "ssp": lambda n: strategies.StaleSync(bound=1),
    "async, two in flight": lambda n: strategies.Async(inflight=2),
    "softsync, two in flight, drop": lambda n: strategies.SoftSync(
        updates=2, inflight=2, damping=strategies.Drop(limit=3)
    ),
    "softsync, blocking, two in flight": lambda n: strategies.SoftSync(
        updates=max(1, n - 1), blocking=True, inflight=2
    ),
    "ssp, two in flight": lambda n: strategies.StaleSync(bound=1, inflight=2),
    "async, pushes of three": lambda n: strategies.Async(push_every=3),
    "async, pulls of two": lambda n: strategies.Async(pull_every=2, optimizer="worker"),
    "async, pulls within pushes": lambda n: strategies.Async(push_every=3, pull_every=2, optimizer="worker"),
    "ssp, pushes of two, pulls of three": lambda n: strategies.StaleSync(bound=1, push_every=2, pull_every=3),
    "sync, pushes of two": lambda n: strategies.Sync(push_every=2, optimizer="worker"),
    "async, two in flight, pushes of two": lambda n: strategies.Async(inflight=2, push_every=2),
    "async, per round": lambda n: strategies.Async(batching=strategies.PerRound()),
    "sync, by speed": lambda n: strategies.Sync(batching=strategies.BySpeed()),
    "bounded": lambda n: strategies.Bounded(staleness=1),
    "bounded, rounds": lambda n: strategies.Bounded(staleness=0),
    "bounded, two in flight": lambda n: strategies.Bounded(staleness=2, inflight=2),
    "bounded, pushes of two, drop": lambda n: strategies.Bounded(
        staleness=2, push_every=2, damping=strategies.Drop(limit=1)
    ),
    "elastic": lambda n: strategies.Elastic(push_every=2),
    "ssp, rounds": lambda n: strategies.StaleSync(bound=0, damping=strategies.Power(1.0)),
}


def on_servers(strategy: ServerStrategy, num_servers: int, num_workers: int) -> ServerStrategy:
    """The strategy over that many servers, or over one where it refuses several."""
    waits = isinstance(strategy, strategies.SoftSync) and strategy.blocking and strategy.updates < num_workers
    waits |= isinstance(strategy, strategies.Bounded) and strategy.inflight == 2
    return strategy if waits or "abort" in str(strategy) else replace(strategy, servers=num_servers)
