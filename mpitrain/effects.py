"""The vocabulary between roles and worlds.

A role is a generator. It yields what it wants and is sent the answer; it never calls MPI, a clock or torch,
so the same role runs under `mpirun` and in virtual time. A worker, in full, would be:

    def worker(server, replica):
        yield Send(server, Join(step=0))                             # never blocks
        while True:
            source, reply = yield Recv()                              # next message from anyone, in order per source
            replica.load(reply.payload)
            gradient = yield Compute(replica.gradient)                # real work; virtual time charges for it
            yield Send(server, Push(reply.version, reply.step, samples=1, payload=gradient))

`Now()` answers the world's clock in seconds. `AllReduce` is answered when all workers have come to it: over MPI by
collectives, in virtual time when those would have ended. The messages stand in `messages/`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from typing import Any, NamedTuple, Protocol

from mpitrain.messages import Message


class Send(NamedTuple):
    """Start sending; answered at once."""

    to: int
    message: Message


class Recv(NamedTuple):
    """Answered with `(source, message)` when the next message is here, or with None after `timeout_s` without one; 0
    asks for what is here now. `kind` and `sources` say what is waited for, and from which ranks, in the report of a
    deadlock; whatever comes is the answer all the same. `upto`: the highest rank of whose push there is room for the
    payload; one from a rank above it stays with its sender, and `Announced` comes instead, until a `Recv` has room for
    it (None: for all). A world that copies no payload may ignore it."""

    timeout_s: float | None = None
    kind: str = ""
    sources: Collection[int] = ()
    upto: int | None = None


class Compute(NamedTuple):
    """Run `task()` and answer its result. `what` names what a virtual world charges for: "gradient", "apply",
    "sum", "validate", "checkpoint" or "deliver", `size` by how much more than usual, or for which part of a validation;
    `interruptible`: there, a message breaks it off. `num_batches`: computed one after the other, each of which
    takes its own time; of an "apply", the gradients that have come for it. `step`: of this rank, counted from 0, where
    this is a gradient.
    """

    task: Callable[[], Any]
    what: str = "gradient"
    interruptible: bool = True
    size: float = 1.0
    num_batches: int = 1
    step: int = 0


class Interrupted(NamedTuple):
    """The answer to a `Compute` or `Sleep` that a message broke off (virtual time only); that message comes
    next.
    """


class Now(NamedTuple):
    """Answered with the world's clock in seconds."""


class Forget(NamedTuple):
    """Rank `rank` is given up: nothing is sent to it any more, nor waited for. Answered with None. `listen`: should it
    speak all the same, it is heard and answered, after the role has ended, too, where the world is told how; what is
    outstanding with it keeps nobody awake and holds up no end."""

    rank: int
    listen: bool = False


class Sleep(NamedTuple):
    """Let `seconds` pass without using the core; messages progress meanwhile. Answered with None. `interruptible` as
    in `Compute`."""

    seconds: float
    interruptible: bool = True


class Break(NamedTuple):
    """Ordered by `--inject` only: this rank fails, `how` is the injection's name, `after_s` from now; never answered
    where it fails at once. "torn": it goes on, and its next payload is torn. "slow_reader": it goes on, and from now on
    reads what comes for it `after_s` late; its sender holds the payload meanwhile."""

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


class Exchange(NamedTuple):
    """A `Reduction`."""

    rounds: Callable[[], Generator[Any, Any, Any]]
    num_bytes: Callable[[], float]


def together(task: Callable[[], Any]) -> Exchange:
    """One collective, which `task` calls, where the world answers what is brought by calling it."""

    def rounds() -> Generator[Any, Any, Any]:
        return (yield task)

    return Exchange(rounds, float)


class Begin(NamedTuple):
    """The all-reduce that this rank comes to next, of the same reduction, may begin; answered at once. Over MPI its
    first collective is under way from here on; in virtual time nothing is before the rank comes to it."""

    reduction: Reduction


class AllReduce(NamedTuple):
    """Reduce with all other ranks of the world, or with all workers where it has servers; answered when all have come
    to it."""

    reduction: Reduction


Effect = Send | Recv | Compute | Now | Sleep | Forget | Break | Begin | AllReduce
Role = Generator[Effect, Any, Any]


def drive(
    generator: Generator[Any, Any, Any], answer: Callable[[Any], object], answered: object = None
) -> Any:
    """Run a generator to its end, each thing that it yields answered by `answer`; returns what it returns. `answered`:
    to what it has yielded already, if it has."""
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
