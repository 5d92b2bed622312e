"""The messages of a validation that all workers over parameter servers compute.

Invariants: as of the package. They change no parameter, and no count.
"""

from __future__ import annotations

from mpitrain.messages.common import Kind, Payload, Sent, message


@message(Kind.DIVIDE)
class Divide(Sent):
    """The worker that validates lets the dealing server divide it among all workers; a peer passes it on to its
    children in the tree of all peers, each of which measures its share.

    step: of its next push.
    num_units: parts of the validation set that can be measured one by one.
    payload: what is measured, everything that a worker needs to do so.
    """

    step: int
    num_units: int
    payload: Payload


@message(Kind.CLAIM)
class Claim(Sent):
    """A worker asks the dealing server for a unit of a validation, and hands in what the one before has given.

    step: of its next push.
    number: of the validation that `unit` belongs to.
    unit: that it has measured; -1 for none.
    payload: what that gave; None from the worker that validates, which keeps it.
    """

    step: int
    number: int = 0
    unit: int = -1
    payload: Payload | None = None


@message(Kind.OVER)
class Over(Sent):
    """The worker that validates informs the dealing server that the validation is over.

    step: of its next push.
    """

    step: int


@message(Kind.ASK_AVERAGE)
class AskAverage(Sent):
    """A worker asks every server for the moving average of its shard.

    step: of its next push.
    """

    step: int


@message(Kind.ASSIST)
class Assist(Sent):
    """The dealing server informs a worker that there are units of a validation to claim."""


@message(Kind.UNIT)
class Unit(Sent):
    """The dealing server answers a `Claim`.

    number: of the validation.
    unit: to measure; -1: there is none left.
    payload: what is measured, with a worker's first unit; None for the worker that validates.
    """

    number: int
    unit: int
    payload: Payload | None = None


@message(Kind.MEASURED)
class Measured(Sent):
    """The dealing server passes on to the worker that validates what another one has measured; a peer its parent in the
    tree of all peers what it and those below have.

    number: of the validation, or the step before which the peers validate.
    unit: that was measured, or the peer.
    payload: what it gave.
    """

    number: int
    unit: int
    payload: Payload


@message(Kind.AVERAGE)
class Average(Sent):
    """A server answers `AskAverage`.

    version: of the shard.
    payload: the moving average of it.
    """

    version: int
    payload: Payload


@message(Kind.TOLD)
class Told(Sent):
    """The worker that validates tells every server what it has measured that a scheduler goes by; of peers each tells
    its children in the tree of all peers.

    step: of the worker's next push; of peers the step before which they validate, or the number of their meeting.
    text: figures (`strategies/figures.py`), as JSON text; empty where there are none.
    """

    step: int
    text: str
