"""What every worker is doing, as one server sees it: one state for each, and each change of it.

Invariants: a worker is in exactly one state, and `WorkerTable.move` alone changes it, along a row of `TRANSITIONS`. Who
is blocked, stands by or is lost is asked of the states and stored nowhere else. The events in the first line below are
messages of the worker: a server refuses one for which the worker's state has no row as out of turn. The events in the
second line are what the server does or learns: there a missing row is a mistake in this package. PULLING has no row for
LOSE because the server answers before it takes in another message. Whether a worker takes part in updates (`active`) is
no state, because the warm-up decides it, also for workers that have not joined; a move to a state in which nobody can
take part ends it.

    JOIN, PUSH, PULL, SAVE, IDLE, DONE, ASK_FINAL, LEAVE
    ANSWER, RESTART, WAKE, LOSE

    state                 event -> next state
    EXPECTED              JOIN -> JOINING, LOSE -> LOST
    JOINING               ANSWER -> COMPUTING, LOSE -> LOST
    COMPUTING             PUSH -> BLOCKED, PULL -> PULLING, SAVE -> SAVING, IDLE -> STANDBY, DONE -> DONE,
                          RESTART -> COMPUTING, LOSE -> LOST
    PULLING               ANSWER -> COMPUTING
    BLOCKED               ANSWER -> COMPUTING, LOSE -> LOST
    SAVING                ANSWER -> COMPUTING, LOSE -> LOST
    STANDBY               JOIN -> JOINING, DONE -> DONE, WAKE -> WOKEN, LOSE -> LOST
    WOKEN                 JOIN -> JOINING, DONE -> DONE, LOSE -> LOST
    DONE                  ASK_FINAL -> AWAITING_FINAL, LEAVE -> LEFT, LOSE -> LOST
    AWAITING_FINAL        LEAVE -> LEFT, LOSE -> LOST
    LEFT                  LOSE -> LOST_LEFT
    LOST                  DONE -> LOST_DONE, ASK_FINAL -> LOST_AWAITING_FINAL, LEAVE -> LOST_LEFT
    LOST_DONE             ASK_FINAL -> LOST_AWAITING_FINAL, LEAVE -> LOST_LEFT
    LOST_AWAITING_FINAL   LEAVE -> LOST_LEFT
    LOST_LEFT
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Set
from dataclasses import dataclass

from mpitrain.errors import WireError
from mpitrain.messages import ToWorker
from mpitrain.roles.save_request import SaveRequest


class WorkerState(enum.Enum):
    """What a worker does, or waits for."""

    EXPECTED = "has not joined yet"
    JOINING = "has joined, and awaits the model; where others warm up, until they have"
    COMPUTING = "has been answered"
    PULLING = "has asked for the model, without a gradient"
    BLOCKED = "has pushed, and awaits the answer"
    SAVING = "has asked for a checkpoint, and awaits that all others do"
    STANDBY = "has nothing to compute on, and waits in case there is more"
    WOKEN = "has been asked to join again, or to leave, and has not done so yet"
    DONE = "has pushed its last"
    AWAITING_FINAL = "has pushed its last, and asked for the final model"
    LEFT = "has stayed for as long as it was wanted"
    LOST = "has died or was given up; should it speak, it is turned away"
    LOST_DONE = "was given up, and has said since that it pushes no more"
    LOST_AWAITING_FINAL = "was given up, and has asked for the final model"
    LOST_LEFT = "has left, and is lost, whichever was first"

    __hash__ = object.__hash__  # members are one of a kind; Enum's own calls Python code


class WorkerEvent(enum.Enum):
    """What changes a worker's state."""

    JOIN = "it joins"
    PUSH = "it pushes"
    PULL = "it asks for the model"
    SAVE = "it asks for a checkpoint"
    IDLE = "it has nothing to compute on"
    DONE = "it pushes no more"
    ASK_FINAL = "it asks for the final model"
    LEAVE = "it leaves"
    ANSWER = "it is sent the answer that it waits for"
    RESTART = "it is sent the model in the middle of its gradient"
    WAKE = "it is asked to join again, or to leave"
    LOSE = "it has died or is given up"

    __hash__ = object.__hash__  # members are one of a kind; Enum's own calls Python code


_S, _E = WorkerState, WorkerEvent
TRANSITIONS: dict[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (_S.EXPECTED, _E.JOIN): _S.JOINING,
    (_S.EXPECTED, _E.LOSE): _S.LOST,
    (_S.JOINING, _E.ANSWER): _S.COMPUTING,
    (_S.JOINING, _E.LOSE): _S.LOST,
    (_S.COMPUTING, _E.PUSH): _S.BLOCKED,
    (_S.COMPUTING, _E.PULL): _S.PULLING,
    (_S.COMPUTING, _E.SAVE): _S.SAVING,
    (_S.COMPUTING, _E.IDLE): _S.STANDBY,
    (_S.COMPUTING, _E.DONE): _S.DONE,
    (_S.COMPUTING, _E.RESTART): _S.COMPUTING,
    (_S.COMPUTING, _E.LOSE): _S.LOST,
    (_S.PULLING, _E.ANSWER): _S.COMPUTING,
    (_S.BLOCKED, _E.ANSWER): _S.COMPUTING,
    (_S.BLOCKED, _E.LOSE): _S.LOST,
    (_S.SAVING, _E.ANSWER): _S.COMPUTING,
    (_S.SAVING, _E.LOSE): _S.LOST,
    (_S.STANDBY, _E.JOIN): _S.JOINING,  # where another server has woken it
    (_S.STANDBY, _E.DONE): _S.DONE,
    (_S.STANDBY, _E.WAKE): _S.WOKEN,
    (_S.STANDBY, _E.LOSE): _S.LOST,
    (_S.WOKEN, _E.JOIN): _S.JOINING,
    (_S.WOKEN, _E.DONE): _S.DONE,
    (_S.WOKEN, _E.LOSE): _S.LOST,
    (_S.DONE, _E.ASK_FINAL): _S.AWAITING_FINAL,
    (_S.DONE, _E.LEAVE): _S.LEFT,
    (_S.DONE, _E.LOSE): _S.LOST,
    (_S.AWAITING_FINAL, _E.LEAVE): _S.LEFT,
    (_S.AWAITING_FINAL, _E.LOSE): _S.LOST,
    (_S.LEFT, _E.LOSE): _S.LOST_LEFT,
    (_S.LOST, _E.DONE): _S.LOST_DONE,
    (_S.LOST, _E.ASK_FINAL): _S.LOST_AWAITING_FINAL,
    (_S.LOST, _E.LEAVE): _S.LOST_LEFT,
    (_S.LOST_DONE, _E.ASK_FINAL): _S.LOST_AWAITING_FINAL,
    (_S.LOST_DONE, _E.LEAVE): _S.LOST_LEFT,
    (_S.LOST_AWAITING_FINAL, _E.LEAVE): _S.LOST_LEFT,
}
STANDING_BY = (_S.STANDBY, _S.WOKEN)
MAY_TAKE_PART = (_S.EXPECTED, _S.JOINING, _S.COMPUTING, _S.PULLING, _S.BLOCKED, _S.SAVING)
PRESENT = (*MAY_TAKE_PART, *STANDING_BY)  # will push, or may yet
STAYING = (_S.DONE, _S.AWAITING_FINAL)  # until the final model is delivered, where one of them delivers
MAY_HELP = (
    _S.JOINING,
    _S.COMPUTING,
    _S.BLOCKED,
    _S.STANDBY,
    *STAYING,
)  # will listen to its servers once more
WANTING_FINAL = (_S.AWAITING_FINAL, _S.LOST_AWAITING_FINAL)


@dataclass
class WorkerRecord:
    """What a server keeps of one worker, beside what it is to compute on (`Leases`) and when it was heard of
    (`SilenceTracker`)."""

    state: WorkerState = WorkerState.EXPECTED
    since: int = 0  # the number of the move that brought it into its state: the order of arrival
    next_step: int | None = None  # names the push that an answer answers; None before it has joined
    num_batches: int = 0  # pushed: keys the randomness of its next one
    is_within: bool = False  # its last push was of a step within a batch: it needs no other
    no_pull: bool = False  # its push wants no parameters: it goes on with what it has
    pending_difference: bool = False  # it has pushed parameters, to be answered with the difference
    save: SaveRequest = SaveRequest(0, "")  # the last checkpoint that it has asked for
    num_nonfinite: int = 0  # pushes in a row that were not finite
    lost: str = ""  # how: "died", "silent" or "not finite"
    lost_since: int = 0  # the number of that move
    owed: ToWorker | None = None  # to one that was given up while it waited
    named: bool = False  # was to deliver the final model
    told_at: int = -1  # samples of the last figure that it has been told


class WorkerTable:
    """The workers of one server.

    Args:
        workers: all that will join; active: those that take part from the start.
    """

    def __init__(self, workers: Iterable[int], active: Iterable[int]):
        self._records = {worker: WorkerRecord() for worker in workers}
        self.num_lost = 0  # how many `lost` has, which is asked for at every update and every answer
        self._in: dict[WorkerState, set[int]] = {state: set() for state in WorkerState}
        self._in[WorkerState.EXPECTED].update(self._records)
        self._present, self._active = set(self._records), set(active)
        self._num_moves = 0
        self._maybe_unread = dict.fromkeys(self._active)  # all of them have moved since it was asked
        self.active_version = 0  # another one where `active` is another set

    def __getitem__(self, worker: int) -> WorkerRecord:
        return self._records[worker]

    def __contains__(self, rank: int) -> bool:
        return rank in self._records

    def items(self) -> Iterable[tuple[int, WorkerRecord]]:
        """All workers and their records, in the order in which the workers were given."""
        return self._records.items()

    def may(self, worker: int, event: WorkerEvent) -> bool:
        """Whether `event` has a row in the state of `worker`."""
        return (self._records[worker].state, event) in TRANSITIONS

    def move(self, worker: int, event: WorkerEvent) -> None:
        """`event` has happened to `worker`.

        Raises:
            WireError: it cannot, in the state of the worker.
        """
        record = self._records[worker]
        if not self.may(worker, event):
            raise WireError(f"worker {worker} is {record.state.name}: {event.name} has no row")
        self._num_moves += 1
        self._in[record.state].discard(worker)
        record.state, record.since = TRANSITIONS[record.state, event], self._num_moves
        self._in[record.state].add(worker)
        if record.state not in MAY_TAKE_PART and worker in self._active:
            self._active.discard(worker)
            self.active_version += 1
        self._maybe_unread[worker] = None
        if record.state not in PRESENT:  # nobody comes back
            self._present.discard(worker)

    def lose(self, worker: int, how: str) -> None:
        """`worker` is lost; of one that is already, only `how` is news."""
        record = self._records[worker]
        if not record.lost:
            self.move(worker, WorkerEvent.LOSE)
            record.lost_since = record.since
            self.num_lost += 1
        record.lost = how

    def take_part(self, worker: int) -> None:
        """`worker` takes part in updates from now on.

        Raises:
            WireError: it cannot, in its state.
        """
        if (state := self._records[worker].state) not in MAY_TAKE_PART:
            raise WireError(f"worker {worker} is {state.name}, and cannot take part in updates")
        self._active.add(worker)
        self._maybe_unread[worker] = None
        self.active_version += 1

    def any_unread(self, reads: Container[int]) -> bool:
        """Whether somebody takes part that is neither blocked nor, by `reads`, computes on anything. Only those are
        looked at that have moved since they were last: nobody's reads end otherwise."""
        while self._maybe_unread:
            worker = next(reversed(self._maybe_unread))
            if worker in self._active and worker not in self.blocked and worker not in reads:
                return True
            del self._maybe_unread[worker]
        return False

    def who(self, *states: WorkerState) -> set[int]:
        """The workers that are in one of `states`."""
        return set().union(*(self._in[state] for state in states))

    def any_in(self, state: WorkerState) -> bool:
        """Whether a worker is in `state`."""
        return bool(self._in[state])

    def in_turn(self, *states: WorkerState) -> list[int]:
        """The same, in the order in which they came into their states."""
        return sorted(self.who(*states), key=lambda worker: self._records[worker].since)

    def is_lost(self, rank: int) -> bool:
        """Whether `rank` is a worker that is lost."""
        return rank in self._records and bool(self._records[rank].lost)

    @property
    def present(self) -> Set[int]:
        """Who will push, or may yet."""
        return self._present

    @property
    def active(self) -> Set[int]:
        """Who takes part in updates now."""
        return self._active

    @property
    def blocked(self) -> Set[int]:
        """Who has pushed, and awaits the answer."""
        return self._in[WorkerState.BLOCKED]

    @property
    def standby(self) -> Set[int]:
        """Who has nothing to do, and waits in case there is more."""
        return self.who(*STANDING_BY)

    @property
    def joining(self) -> Set[int]:
        """Who has joined, and awaits the model."""
        return self._in[WorkerState.JOINING]

    @property
    def lost(self) -> dict[int, str]:
        """Who is lost, and how, the first first."""
        records = [(record.lost_since, worker, record.lost) for worker, record in self.items() if record.lost]
        return {worker: how for _, worker, how in sorted(records)}
