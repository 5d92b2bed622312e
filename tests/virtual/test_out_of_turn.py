"""A message that its receiver does not expect is the sender's fault, and is told as such, with `python -O` too."""

import dataclasses

import pytest

import mpitrain as mt
from mpitrain.effects import Now, Recv
from mpitrain.errors import WireError
from mpitrain.messages import Answer, Done, Join
from mpitrain.mpi.message_header import decode, encode
from mpitrain.reporting.report import NullReport
from mpitrain.roles import FaultTolerantServer, Worker
from mpitrain.strategies.placement import assign
from tests import messages
from tests.virtual.worlds import Desk, NumberStore

ROLES = assign((0, 0), 1)
NOT_ANSWERS = [message for message in messages.MESSAGES if not isinstance(message, Answer)]
NOT_FOR_SERVERS = [messages.REPLY, messages.UPDATE, messages.MEAN, messages.SAVE, messages.DIFFERENCE]


@pytest.mark.parametrize("message", NOT_ANSWERS, ids=messages.name_of)
def test_a_worker_that_awaits_an_answer_names_who_sent_something_else(message):
    role = Worker(1, ROLES, None, NullReport()).run()
    role.send(None)
    role.send(None)  # it has said that it joins
    with pytest.raises(
        WireError, match=rf"rank 0 sent {message.kind.name} .*rank 1 \(worker, awaits REPLY\)"
    ):
        role.send((0, message))


@pytest.mark.parametrize("message", NOT_FOR_SERVERS, ids=messages.name_of)
def test_a_server_names_who_sent_what_is_not_for_servers(message):
    with pytest.raises(WireError, match=rf"rank 1 sent {message.kind.name} "):
        Desk(mt.Async(), NumberStore(1.0), (1, 2)).feed(1, message)


def test_a_server_hears_its_own_workers_only():
    with pytest.raises(WireError, match=r"rank 7 sent JOIN .*workers \(1, 2\)"):
        Desk(mt.Async(), NumberStore(1.0), (1, 2)).feed(7, Join(0))


@pytest.mark.parametrize("message", [messages.PUSH, messages.UPDATE, messages.MEAN], ids=messages.name_of)
def test_a_push_without_a_gradient_is_refused(message):
    """Before it comes to the server, which is handed no push without one; an update and a mean likewise."""
    header = encode(dataclasses.replace(message, payload=None), 0).header
    with pytest.raises(WireError, match=rf"rank 2 sent {message.kind.name} .*without the payload"):
        decode(header, 0, 2)


def test_after_the_last_push_a_server_expects_no_work():
    server = FaultTolerantServer(mt.Async(), NumberStore(1.0), (1, 2), NullReport(), delivers=True)
    role = server.run()
    effect = role.send(None)
    for message in [(worker, kind(step=0)) for kind in (Join, Done) for worker in (1, 2)]:
        effect = feed(role, effect, message)
    with pytest.raises(WireError, match="rank 1 sent PUSH .*all pushed their last"):
        feed(role, effect, (1, messages.PUSH))


def feed(role, effect, arrived):
    """Answer everything that the role does with None, until it asks for a message; that is `arrived`."""
    while not isinstance(effect, Recv):
        effect = role.send(0.0 if isinstance(effect, Now) else None)
    effect = role.send(arrived)
    while not isinstance(effect, Recv):
        effect = role.send(0.0 if isinstance(effect, Now) else None)
    return effect
