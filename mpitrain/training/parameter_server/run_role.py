"""Running one rank's role of a run over parameter servers.

Invariants: this file knows what differs between launches that survive a death, and nothing of what the roles do.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Executor
from typing import Any

from mpitrain.effects import Role
from mpitrain.errors import EvictedError, LostRankError
from mpitrain.roles.bundles import bundled
from mpitrain.roles.failure_detector.silence import MID_SILENCE_S
from mpitrain.roles.failure_detector.worker_side import report_failure
from mpitrain.system.launched.ranks import Ends
from mpitrain.training.session import Session


def heartbeat_s(session: Session) -> float:
    """How long anybody may be silent where MPI reports no death; 0 where it does, or the launcher ends the job."""
    if session.runtime.fault_tolerance != "heartbeat":
        return 0.0
    return session.overrides.heartbeat_s or MID_SILENCE_S


def run_role(
    session: Session, peers: tuple[int, ...], buffer_for: Any, role: Role,
    computer: Executor | None = None, workers_sum: Any = None, ends: Ends = Ends(),  # noqa: B008 - frozen
) -> Any:  # fmt: skip
    """Run `role` among `peers` and return what it returned; the arguments are those of `MpiWorld`;
    `workers_sum`: of a role that all-reduces. Peers behind an aggregator are reached through it.

    Where MPI would not report the failure of a worker, the worker reports it to its servers before the error goes on.
    """
    runtime, routes = session.runtime, session.roles.routes(session.place)
    role = bundled(role, session.place, routes, serves=session.role == "server")
    peers = tuple(dict.fromkeys(routes.get(peer, peer) for peer in peers))

    def on_step(step: int) -> None:
        runtime.step = step

    timeout_s = heartbeat_s(session)
    world = runtime.make_world(
        peers,
        buffer_for,
        on_step=on_step,
        computer=computer,
        ends=ends._replace(leave_s=timeout_s or None),
        reduce=workers_sum,
        begin=workers_sum.begin if workers_sum is not None else None,
    )
    session.end_listening = world.close
    try:
        returned = world.run(role)
    except Exception as error:
        if timeout_s and session.role == "worker" and not isinstance(error, LostRankError | EvictedError):
            with contextlib.suppress(Exception):  # the error that came first is the one to report
                world.advance(report_failure(peers), None)
        raise
    if timeout_s:
        runtime.may_die_alone = False  # from here on nobody would notice
    return returned
