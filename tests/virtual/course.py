"""The obstacle course of the parameter-server family: a new rule is one file in `rules/` and one row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mpitrain import rules
from mpitrain.rules import ServerStrategy

# The obstacle course: every registered server strategy has at least one row, made for a number of workers.
COURSE: dict[str, Callable[[int], ServerStrategy]] = {
    "sync": lambda n: rules.Sync(),
    "backup, none": lambda n: rules.Backup(spare=0),
    "backup, one": lambda n: rules.Backup(spare=min(1, n - 1)),
    "backup, all but one": lambda n: rules.Backup(spare=n - 1),
    "backup, abort": lambda n: rules.Backup(spare=min(2, n - 1), stragglers="abort"),
    "async": lambda n: rules.Async(),
    "async, inverse": lambda n: rules.Async(damping=rules.Inverse()),
    "async, drop": lambda n: rules.Async(damping=rules.Drop(limit=1)),
    "softsync": lambda n: rules.SoftSync(updates=3),
    "softsync, drop": lambda n: rules.SoftSync(updates=2, damping=rules.Drop(limit=1)),
    "softsync, blocking": lambda n: rules.SoftSync(updates=max(1, n - 1), blocking=True),
    "softsync, blocking, drop": lambda n: rules.SoftSync(
        updates=min(2, n), blocking=True, damping=rules.Drop(limit=0)
    ),
    "softsync, blocking, all": lambda n: rules.SoftSync(updates=n, blocking=True),
    "ssp": lambda n: rules.StaleSync(bound=1),
    "async, two in flight": lambda n: rules.Async(inflight=2),
    "softsync, two in flight, drop": lambda n: rules.SoftSync(
        updates=2, inflight=2, damping=rules.Drop(limit=3)
    ),
    "softsync, blocking, two in flight": lambda n: rules.SoftSync(
        updates=max(1, n - 1), blocking=True, inflight=2
    ),
    "ssp, two in flight": lambda n: rules.StaleSync(bound=1, inflight=2),
    "async, pushes of three": lambda n: rules.Async(push_every=3),
    "async, pulls of two": lambda n: rules.Async(pull_every=2, optimizer="worker"),
    "async, pulls within pushes": lambda n: rules.Async(push_every=3, pull_every=2, optimizer="worker"),
    "ssp, pushes of two, pulls of three": lambda n: rules.StaleSync(bound=1, push_every=2, pull_every=3),
    "sync, pushes of two": lambda n: rules.Sync(push_every=2, optimizer="worker"),
    "async, two in flight, pushes of two": lambda n: rules.Async(inflight=2, push_every=2),
    "async, per round": lambda n: rules.Async(batching=rules.PerRound()),
    "sync, by speed": lambda n: rules.Sync(batching=rules.BySpeed()),
    "bounded": lambda n: rules.Bounded(staleness=1),
    "bounded, rounds": lambda n: rules.Bounded(staleness=0),
    "bounded, two in flight": lambda n: rules.Bounded(staleness=2, inflight=2),
    "bounded, pushes of two, drop": lambda n: rules.Bounded(
        staleness=2, push_every=2, damping=rules.Drop(limit=1)
    ),
    "elastic": lambda n: rules.Elastic(push_every=2),
    "ssp, rounds": lambda n: rules.StaleSync(bound=0, damping=rules.Power(1.0)),
}


def on_servers(rule: ServerStrategy, num_servers: int, num_workers: int) -> ServerStrategy:
    """The rule over that many servers, or over one where it refuses several."""
    waits = isinstance(rule, rules.SoftSync) and rule.blocking and rule.updates < num_workers
    waits |= isinstance(rule, rules.Bounded) and rule.inflight == 2
    return rule if waits or "abort" in str(rule) else replace(rule, servers=num_servers)
