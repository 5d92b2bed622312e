"""The end of a run over parameter servers: one worker delivers the final model, and the others stay until it has.

Invariants: a worker that has pushed its last stays. The dealing server names who delivers: the validator, and
should that be lost, the lowest worker that still stays, which then asks every shard for its part of the final model.
When the dealing server has heard what was measured it lets all go, and a server ends when all that stayed have left or
are lost. What was measured travels with the message, so nothing hangs on the worker after that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from mpitrain.effects import Compute, Effect, Kind, Message, Send
from mpitrain.roles.failure_detector.server_side import SILENT
from mpitrain.roles.failure_detector.silence import AWAY_SILENCE_S
from mpitrain.roles.out_of_turn import out_of_turn

if TYPE_CHECKING:
    from mpitrain.roles.server.fault_tolerant import FaultTolerantServer
    from mpitrain.roles.worker import Worker

Steps = Generator[Effect, Any, None]
Deliver = Callable[[], dict[str, Any]]


def stay(worker: Worker, deliver: Deliver) -> Steps:
    """The worker's side, after it has said that it is done; `deliver` saves, measures and returns what there is to
    tell, JSON-able."""
    servers, dealer = worker.roles.servers, worker.roles.dealer
    missing = set(servers) if worker.wants_final else set()
    while True:
        source, message = yield from worker.probe.receive(servers)
        if message.kind == Kind.WAKE and message.stop:
            break
        if message.kind == Kind.WAKE:
            worker.validates = worker.wants_final = True
            missing = set(servers)
            for server in servers:
                yield Send(server, Message(Kind.FINAL, step=worker.step))
            continue
        worker.take_in(source, message)
        if message.kind == Kind.FINAL:
            missing.discard(source)
            if not missing:
                yield from worker.report_away()
                measured = yield Compute(deliver, "deliver", interruptible=False)
                yield Send(dealer, Message(Kind.DELIVERED, step=worker.step, text=json.dumps(measured)))
    for server in servers:
        yield Send(server, Message(Kind.LEAVE, step=worker.step))


def see_off(server: FaultTolerantServer) -> Steps:
    """The server's side, when no worker will push any more."""
    staying = set(server.workers) - set(server.tracker.lost) - server.left
    yield from _name(server, staying)
    while staying:
        arrived = yield from server.detector.listen(staying, AWAY_SILENCE_S)
        if arrived is None:
            continue
        source, message = arrived
        if message.kind == Kind.LOST:
            staying.discard(source)
            how = message.text or "died"
            if source not in server.left:
                server.tracker.lost[source] = how
                server.report.event("worker lost", rank=source, how=how, version=server.ledger.version)
            if how == SILENT:
                yield from server.dismiss(source)
            yield from _name(server, staying)
        elif message.kind == Kind.LEAVE:
            staying.discard(source)
        elif message.kind == Kind.FINAL or (
            source in server.tracker.lost and server.owes_final(source, message)
        ):
            yield from server.send_final(source)
        elif message.kind == Kind.DELIVERED:
            server.delivered = json.loads(message.text)
            for worker in sorted(staying):
                yield Send(worker, Message(Kind.WAKE, stop=True))
        else:
            if source not in server.tracker.lost:
                raise out_of_turn(source, message, "a server whose workers have all pushed their last")
            yield from server.turn_away(source, message)


def _name(server: FaultTolerantServer, staying: set[int]) -> Steps:
    """Who delivers from here on, where the one that was to has not and will not (the dealing server)."""
    if server.leases.dealer is None or server.delivered or not staying:
        return
    tracker = server.tracker
    if tracker.validator not in staying:
        tracker.validator = min(staying)
    if tracker.validator not in server.named:  # the validator itself has asked for the final model
        server.named.add(tracker.validator)
        yield Send(tracker.validator, Message(Kind.WAKE, promoted=True))
