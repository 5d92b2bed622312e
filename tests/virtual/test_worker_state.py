"""What a worker does on a server is one state, which changes along one table: the documented one, whatever is sent, and
no row of it is dead."""

from __future__ import annotations

import itertools
import re

import pytest

import mpitrain as mt
from mpitrain.effects import Compute, Now, Recv, Send
from mpitrain.errors import WireError
from mpitrain.messages import Done, FinalRequest, Idle, Join, Leave, Lost, Pull, Push, Reply, Save
from mpitrain.reporting.report import NullReport
from mpitrain.roles import FaultTolerantServer, SavingServer
from mpitrain.roles.server import worker_state
from mpitrain.roles.server.worker_state import (
    MAY_TAKE_PART,
    PRESENT,
    TRANSITIONS,
    WANTING_FINAL,
    WorkerEvent,
    WorkerState,
    WorkerTable,
)
from mpitrain.strategies.sampling.dealer import BatchDealer
from mpitrain.strategies.warmup import Warmup
from tests.virtual.worlds import Number, NumberStore, paced

WORKERS = (1, 2)
LENGTH = 3  # of sequences of messages, from the start and from where all workers have joined
JOINED = tuple((worker, Join, {"step": 0}) for worker in WORKERS)


def documented():
    """The table that the module's docstring shows."""
    rows, state = {}, None
    _, _, text = worker_state.__doc__.partition("state                 event -> next state\n")
    for line in text.splitlines():
        if started := re.match(r"    ([A-Z_]+)", line):
            state = WorkerState[started[1]]
        for event, following in re.findall(r"([A-Z_]+) -> ([A-Z_]+)", line):
            rows[state, WorkerEvent[event]] = WorkerState[following]
    return rows


def test_the_docstring_shows_the_table():
    assert documented() == TRANSITIONS
    own, ours = re.search(r"\n    (JOIN, .*)\n    (ANSWER, .*)\n", worker_state.__doc__).groups()
    assert [*own.split(", "), *ours.split(", ")] == [event.name for event in WorkerEvent]


def reachable(states):
    """Every state that a sequence of events leads to from one of `states`."""
    found = set(states)
    while more := {to for (state, _), to in TRANSITIONS.items() if state in found} - found:
        found |= more
    return found


def test_every_state_is_reached_and_who_is_lost_or_done_takes_no_part_again():
    lost = {state for state in WorkerState if state.name.startswith("LOST")}
    assert reachable({WorkerState.EXPECTED}) == set(WorkerState)
    assert reachable({WorkerState.LOST}) == lost
    assert not reachable(set(WorkerState) - set(PRESENT)) & set(PRESENT)
    for state in WorkerState:  # PULLING is answered before another message is taken in
        assert ((state, WorkerEvent.LOSE) in TRANSITIONS) == (state not in lost | {WorkerState.PULLING})
        assert (state, WorkerEvent.ANSWER) not in TRANSITIONS or (
            state,
            WorkerEvent.PUSH,
        ) not in TRANSITIONS, "nobody waits here"


def ways():
    """For every state a shortest sequence of events that leads to it."""
    found = {WorkerState.EXPECTED: ()}
    while more := {
        to: (*found[state], event)
        for (state, event), to in TRANSITIONS.items()
        if state in found and to not in found
    }:
        found |= more
    return found


@pytest.mark.parametrize("state", WorkerState)
def test_in_every_state_every_event_goes_along_its_row_or_changes_nothing(state):
    for event in WorkerEvent:
        table = WorkerTable(WORKERS, WORKERS)
        for before in ways()[state]:
            table.move(1, before)
        assert table[1].state == state
        if table.may(1, event):
            table.move(1, event)
            assert table[1].state == TRANSITIONS[state, event]
        else:
            with pytest.raises(WireError, match=f"worker 1 is {state.name}: {event.name} has no row"):
                table.move(1, event)
            assert table[1].state == state
        consistent(table)
        assert table[2].state == WorkerState.EXPECTED


def test_a_worker_that_is_lost_keeps_its_place_among_the_lost_and_tells_how_at_last():
    table = WorkerTable((3, 1, 2), ())
    for worker, how in ((2, "silent"), (1, "died"), (2, "died")):
        table.lose(worker, how)
    table.move(2, WorkerEvent.LEAVE)
    assert list(table.lost.items()) == [(2, "died"), (1, "died")]
    assert table.is_lost(1) and not table.is_lost(3) and not table.is_lost(7)


def test_final_models_go_out_in_the_order_in_which_they_were_asked_for():
    table = WorkerTable(WORKERS, WORKERS)
    for worker in reversed(WORKERS):
        for event in ways()[WorkerState.AWAITING_FINAL]:
            table.move(worker, event)
    assert table.in_turn(*WANTING_FINAL) == [2, 1] and table.who(*WANTING_FINAL) == {1, 2}


def consistent(table):
    """Queries answer what the records say."""
    for state in WorkerState:
        assert table.who(state) == {worker for worker, record in table.items() if record.state == state}
    assert all(table[worker].state in MAY_TAKE_PART for worker in table.active)
    assert table.present == {worker for worker, record in table.items() if record.state in PRESENT}


class Seen(WorkerTable):
    """Notes every row that a server goes along."""

    rows: set[tuple[WorkerState, WorkerEvent]] = set()

    def move(self, worker, event):
        self.rows.add((self[worker].state, event))
        super().move(worker, event)


def warming_up():
    strategy = mt.Async(warmup=Warmup(workers=1, epochs=1))
    return FaultTolerantServer(strategy, NumberStore(0.5), WORKERS, NullReport(), pace=paced(2, 1))


def deals(strategy, delivers):
    dealer = BatchDealer(4, 1, 1)
    return FaultTolerantServer(
        strategy,
        NumberStore(0.5),
        WORKERS,
        NullReport(),
        dealer,
        pace=paced(4, 1),
        delivers=delivers,
    )


def follows(strategy, delivers):
    return FaultTolerantServer(strategy, NumberStore(0.5), WORKERS, NullReport(), delivers=delivers)


def saves():
    return SavingServer(
        mt.Sync(), NumberStore(0.5), WORKERS, NullReport(), write=lambda order, state, workers: None
    )


ABORTING = mt.Backup(spare=1, stragglers="abort")
SERVERS = {
    "warming up": warming_up,
    "async, deals, delivers": lambda: deals(mt.Async(), True),
    "sync, deals": lambda: deals(mt.Sync(), False),
    "async, delivers": lambda: follows(mt.Async(servers=2), True),
    "abort": lambda: follows(ABORTING, False),
    "saves": saves,
}
MESSAGES = [
    *((kind, {"step": 0}) for kind in (Join, Pull, Idle, Done, FinalRequest, Leave)),
    (Done, {"step": 0, "wants_final": True}),
    (Save, {"step": 0, "at": 0, "text": ""}),
    (Lost, {}),
    (Lost, {"how": "silent"}),
    (Push, {}),
    (Push, {"pull": False}),
]


class Fed:
    """A server fed by hand with the messages of workers, each with the version and the lease that it was sent."""

    def __init__(self, server):
        self.server = server
        self.versions = dict.fromkeys(WORKERS, 0)
        self.leases = {worker: [] for worker in WORKERS}
        self.over = False
        self._role = server.run()
        self._effect = self._role.send(None)
        self._go_on()

    def feed(self, worker, kind, fields):
        if kind is Push:
            version, leases = self.versions[worker], self.leases[worker]
            lease = leases.pop(0) if leases else None
            fields = {
                "version": version,
                "step": 0,
                "samples": 1,
                "payload": Number(1.0, version),
                "lease": lease,
            } | fields
        self._answer((worker, kind(**fields)))
        self._go_on()

    def has_work(self, worker):
        return self.server.leases.dealer is None or bool(self.leases[worker])

    def _go_on(self):
        """To where the server waits for a message."""
        while not self.over and not isinstance(self._effect, Recv):
            answer = None
            if isinstance(self._effect, Compute):
                answer = self._effect.task()
            elif isinstance(self._effect, Now):
                answer = 0.0
            elif isinstance(self._effect, Send) and isinstance(self._effect.message, Reply):
                worker, message = self._effect
                self.versions[worker] = message.version
                self.leases[worker].extend(message.leases)
            self._answer(answer)

    def _answer(self, answer):
        try:
            self._effect = self._role.send(answer)
        except StopIteration:
            self.over = True


def replay(make, sequence):
    """A server that was sent `sequence`; None if it refused the last of it."""
    fed = Fed(make())
    for number, (worker, kind, fields) in enumerate(sequence, 1):
        try:
            fed.feed(worker, kind, fields)
        except WireError as error:
            assert f"rank {worker} sent {kind.kind.name}" in str(error) and number == len(sequence)
            return None
    return fed


def explore(make, sequence, length):
    """Every sequence of `length` more messages after `sequence`, as far as the server takes it; returns how many."""
    fed, number = replay(make, sequence), 1
    if fed is None or fed.over:
        return number
    consistent(fed.server.table)
    assert not fed.server.table.who(WorkerState.PULLING), "it was answered"
    if length:
        for worker, (kind, fields) in itertools.product(WORKERS, MESSAGES):
            if kind is not Push or fed.has_work(worker):
                number += explore(make, (*sequence, (worker, kind, fields)), length - 1)
    return number


def test_whatever_workers_send_a_server_stays_within_the_table_and_goes_along_every_row(monkeypatch):
    """All sequences of so many messages of two workers: a server refuses one as out of turn, or goes along a row."""
    monkeypatch.setattr("mpitrain.roles.server.server.WorkerTable", Seen)
    monkeypatch.setattr(Seen, "rows", set())
    numbers = {
        name: explore(make, (), LENGTH) + explore(make, JOINED, LENGTH) for name, make in SERVERS.items()
    }
    assert min(numbers.values()) > 2000
    dead = [f"{state.name} {event.name}" for state, event in set(TRANSITIONS) - Seen.rows]
    assert not dead, f"rows that nothing goes along: {sorted(dead)}"
