"""The messages of a validation that all workers over parameter servers compute.

Invariants: as of the package. They change no parameter, and no count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpitrain.messages.common import Kind, Payload


@dataclass(frozen=True, slots=True)
class Divide:
    """The worker that validates lets the dealing server divide it among all workers; a peer passes it on to its
    children in the tree of all peers, each of which measures its share.

    step: of its next push.
    num_units: parts of the validation set that can be measured one by one.
    payload: what is measured, everything that a worker needs to do so.
    """

    kind: ClassVar[Kind] = Kind.DIVIDE
    step: int
    num_units: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker asks the dealing server for a unit of a validation, and hands in what the one before has given.

    step: of its next push.
    number: of the validation that `unit` belongs to.
    unit: that it has measured; -1 for none.
    payload: what that gave; None from the worker that validates, which keeps it.
    """

    kind: ClassVar[Kind] = Kind.CLAIM
    step: int
    number: int = 0
    unit: int = -1
    payload: Payload | None = None


@dataclass(frozen=True, slots=True)
class Over:
    """The worker that validates informs the dealing server that the validation is over.

    step: of its next push.
    """

    kind: ClassVar[Kind] = Kind.OVER
    step: int


@dataclass(frozen=True, slots=True)
class AskAverage:
    """A worker asks every server for the moving average of its shard.

    step: of its next push.
    """

    kind: ClassVar[Kind] = Kind.ASK_AVERAGE
    step: int


@dataclass(frozen=True, slots=True)
class Assist:
    """The dealing server informs a worker that there are units of a validation to claim."""

    kind: ClassVar[Kind] = Kind.ASSIST


@dataclass(frozen=True, slots=True)
class Unit:
    """The dealing server answers a `Claim`.

    number: of the validation.
    unit: to measure; -1: there is none left.
    payload: what is measured, with a worker's first unit; None for the worker that validates.
    """

    kind: ClassVar[Kind] = Kind.UNIT
    number: int
    unit: int
    payload: Payload | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The dealing server passes on to the worker that validates what another one has measured; a peer its parent in the
    tree of all peers what it and those below have.

    number: of the validation, or the step before which the peers validate.
    unit: that was measured, or the peer.
    payload: what it gave.
    """

    kind: ClassVar[Kind] = Kind.MEASURED
    number: int
    unit: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Average:
    """A server answers `AskAverage`.

    version: of the shard.
    payload: the moving average of it.
    """

    kind: ClassVar[Kind] = Kind.AVERAGE
    version: int
    payload: Payload
