"""The vocabulary between roles and worlds.

A role is a generator. It yields what it wants and is sent the answer; it never calls MPI, a clock or torch,
so the same role runs under `mpirun` and in virtual time. A worker, in full, would be:

    def worker(server, replica):
        yield Send(server, Message(Kind.JOIN))                       # never blocks
        while True:
            source, reply = yield Recv()                              # next message from anyone, in order per source
            replica.load(reply.payload)
            gradient = yield Compute(replica.gradient)                # real work; virtual time charges for it
            yield Send(server, Message(Kind.PUSH, version=reply.version, payload=gradient))

`Now()` answers the world's clock in seconds. `AllReduce` is answered when all ranks have come to it: over MPI by
collectives, in virtual time by messages round a ring. Payloads are opaque here. A world keeps a payload until it has
been sent, then calls its `release()`; what a role receives it must release itself when it is done with it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol


class Kind(enum.IntEnum):
    """What a message is. Numbers travel on the wire: append, never renumber."""

    JOIN = 1  # worker -> server: I am here, send me the model
    REPLY = 2  # server -> worker: the model's present version, and leases from the dealer
    PUSH = 3  # worker -> server: a gradient
    DONE = 4  # worker -> server: I will not push again; `stop` set: send me the final model
    FINAL = 5  # server -> worker: the model after the last update; worker -> server: send me that
    NOTE = 6  # worker -> server: something for the run's report, as JSON text
    PULL = 7  # worker -> server: send me the model; no gradient
    DIFFERENCE = 8  # server -> worker: what both sides of an elastic exchange move by
    LOST = 9  # world -> server: this worker is dead; worker -> server: I fail now
    IDLE = 10  # worker -> server: I have nothing to compute on, and stay in case there is more
    WAKE = 11  # server -> idle worker: join again, or, with `stop`, leave, or, with `promoted`, deliver the model
    UPDATE = 12  # peer -> peer: what this step has changed, or the parameters
    SUM = 13  # peer -> its parent at a meeting: the sum of the parameters below
    MEAN = 14  # peer -> its children at a meeting: the mean of all
    ASK = 15  # peer -> its parent: whether one of those below was told to end
    AGREED = 16  # peer -> its children: whether all write a checkpoint now, and end
    DELIVERED = 17  # worker -> dealing server: the final model is saved, and `text` is what was measured
    LEAVE = 18  # worker -> server: I stayed for as long as I was wanted
    SAVE = 19  # worker -> server: when all are here, write the checkpoint `checkpoint_at`, then send me the model
    ALIVE = 20  # worker -> server: I wait for an answer; are you there? server -> worker: I am
    AWAY = 21  # worker -> server: I validate before my next push, for as long as it takes
    LAST = 22  # peer -> peers: I have taken my last step; `step` is how many I took


REQUESTED = (
    -1
)  # in place of a message's `checkpoint_at`: its sender was told to end, and asks for a checkpoint


class Payload(Protocol):
    """Bytes that a message carries beside its header."""

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""

    def statistics(self) -> dict[str, float]:
        """What there is to tell of them in the run's progress."""

    def release(self) -> None:
        """The holder no longer needs the bytes."""


class Message(NamedTuple):
    """One message. `version` of the model read or sent, `step` of the worker (its pushes, from 0), `samples` in the
    batch or accepted in all, `share` that a push has in the mean of its update, `loss` of the batch, `finite` of the
    whole gradient (a DONE is not, when a server said stop: not every shard need have processed what was pushed), `stop`
    no more work, `pull` a push that is to be answered with parameters, `leases` as (epoch, start, count, batch size)
    dealt with an answer, or the one that a push was made of; `text` a note, or, of a push, the options of the optimizer
    that came with the gradient.

    Checkpoints: `checkpoint_at` is the accepted samples at which every shard writes the next one (or `REQUESTED`),
    `final` that the run ends with it, `checkpoint` the one that this answer belongs to, `batches` how many a worker
    that joins has done before. Losses: `promoted` is the worker that validates from now on, for the one that did is
    gone; `standby`: it should stay although it has nothing to do.
    """

    kind: Kind
    version: int = 0
    step: int = 0
    samples: int = 0
    loss: float = 0.0
    finite: bool = True
    stop: bool = False
    pull: bool = True
    leases: tuple[tuple[int, int, int, int], ...] = ()
    text: str = ""
    payload: Payload | None = None
    checkpoint_at: int = 0
    final: bool = False
    checkpoint: int = 0
    batches: int = 0
    promoted: bool = False
    standby: bool = False
    share: float = 1.0


class Send(NamedTuple):
    """Start sending; answered at once."""

    to: int
    message: Message


class Recv(NamedTuple):
    """Answered with `(source, message)` when the next message is here, or with None after `timeout_s` without one; 0
    asks for what is here now."""

    timeout_s: float | None = None


class Compute(NamedTuple):
    """Run `task()` and answer its result. `what` tells a virtual world what to charge: "gradient", "apply",
    "validate", "checkpoint" or "deliver", `size` by how much more than usual; `interruptible`: there, a message breaks
    it off.
    """

    task: Callable[[], Any]
    what: str = "gradient"
    interruptible: bool = True
    size: float = 1.0


class Interrupted(NamedTuple):
    """The answer to a `Compute` or `Sleep` that a message broke off (virtual time only); that message comes
    next.
    """


class Now(NamedTuple):
    """Answered with the world's clock in seconds."""


class Forget(NamedTuple):
    """Rank `rank` is given up: nothing is sent to it any more, nor waited for. Answered with None. `listen`: should it
    speak all the same, it is heard and answered; what is outstanding with it keeps nobody awake."""

    rank: int
    listen: bool = False


class Sleep(NamedTuple):
    """Let `seconds` pass without using the core; messages progress meanwhile. Answered with None. `interruptible` as
    in `Compute`."""

    seconds: float
    interruptible: bool = True


class Break(NamedTuple):
    """Ordered by `--inject` only: this rank fails, `how` is the injection's name, `after_s` from now; never answered
    where it fails at once. "torn": it goes on, and its next payload is torn."""

    how: str
    after_s: float = 0.0


class Reduction(Protocol):
    """What one rank brings to an all-reduce, opaque to role and world."""

    @property
    def rounds(self) -> Callable[[], Generator[Any, Any, Any]]:
        """Makes a generator: it yields what this rank brings to one collective after another, is sent what has come of
        each, and returns the answer to the effect. All ranks bring the same kinds of things in the same order."""

    @property
    def num_bytes(self) -> Callable[[], float]:
        """Bytes that are reduced, before they are cut among ranks; asked in virtual time, which charges for them."""


class AllReduce(NamedTuple):
    """Reduce with all other ranks of the world; answered when all have come to it."""

    reduction: Reduction


Effect = Send | Recv | Compute | Now | Sleep | Forget | Break | AllReduce
Role = Generator[Effect, Any, Any]


def drive(generator: Generator[Any, Any, Any], answer: Callable[[Any], Any]) -> Any:
    """Run a generator to its end, each thing that it yields answered by `answer`; returns what it returns."""
    answered: Any = None
    while True:
        try:
            asked = generator.send(answered)
        except StopIteration as end:
            return end.value
        answered = answer(asked)


def replaced(role: Role, answer_to: Callable[[Effect], Role]) -> Role:
    """The role, with each of its effects replaced by those of `answer_to(effect)`, which returns the answer."""
    answer: Any = None
    while True:
        try:
            effect = role.send(answer)
        except StopIteration as end:
            return end.value
        answer = yield from answer_to(effect)


def watched(
    role: Role,
    before: Callable[[Effect], None] = lambda effect: None,
    after: Callable[[Effect, Any], None] = lambda effect, answer: None,
) -> Role:
    """The role unchanged; `before` sees each of its effects, `after` each effect with its answer."""

    def pass_on(effect: Effect) -> Role:
        before(effect)
        answer = yield effect
        after(effect, answer)
        return answer

    return replaced(role, pass_on)
