"""A message that its receiver does not expect is the sender's fault, and is told as such, with `python -O` too."""

import pytest

import mpitrain as mt
from mpitrain.effects import Kind, Message, Now, Recv
from mpitrain.errors import WireError
from mpitrain.reporting.report import NullReport
from mpitrain.roles import FaultTolerantServer, Worker
from mpitrain.strategies.placement import assign
from tests.virtual.worlds import Desk, NumberStore

ROLES = assign((0, 0), 1)
FOR_WORKERS = {Kind.REPLY, Kind.DIFFERENCE}


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in FOR_WORKERS])
def test_a_worker_that_awaits_an_answer_names_who_sent_something_else(kind):
    role = Worker(1, ROLES, None, NullReport()).run()
    role.send(None)
    role.send(None)  # it has said that it joins
    with pytest.raises(WireError, match=rf"rank 0 sent {kind.name} .*rank 1 \(worker, awaits REPLY\)"):
        role.send((0, Message(kind)))


@pytest.mark.parametrize("kind", [Kind.REPLY, Kind.UPDATE, Kind.MEAN, Kind.SAVE, Kind.DIFFERENCE])
def test_a_server_names_who_sent_what_is_not_for_servers(kind):
    with pytest.raises(WireError, match=rf"rank 1 sent {kind.name} "):
        Desk(mt.Async(), NumberStore(1.0), (1, 2)).feed(1, Message(kind))


def test_a_server_hears_its_own_workers_only():
    with pytest.raises(WireError, match=r"rank 7 sent JOIN .*workers \(1, 2\)"):
        Desk(mt.Async(), NumberStore(1.0), (1, 2)).feed(7, Message(Kind.JOIN))


def test_a_push_without_a_gradient_is_refused():
    with pytest.raises(WireError, match="rank 2 sent PUSH .*without a gradient"):
        Desk(mt.Async(), NumberStore(1.0), (1, 2)).feed(2, Message(Kind.PUSH))


def test_after_the_last_push_a_server_expects_no_work():
    server = FaultTolerantServer(mt.Async(), NumberStore(1.0), (1, 2), NullReport(), delivers=True)
    role = server.run()
    effect = role.send(None)
    for message in [(worker, Message(kind)) for kind in (Kind.JOIN, Kind.DONE) for worker in (1, 2)]:
        effect = feed(role, effect, message)
    with pytest.raises(WireError, match="rank 1 sent PUSH .*all pushed their last"):
        feed(role, effect, (1, Message(Kind.PUSH)))


def feed(role, effect, arrived):
    """Answer everything that the role does with None, until it asks for a message; that is `arrived`."""
    while not isinstance(effect, Recv):
        effect = role.send(0.0 if isinstance(effect, Now) else None)
    effect = role.send(arrived)
    while not isinstance(effect, Recv):
        effect = role.send(0.0 if isinstance(effect, Now) else None)
    return effect
