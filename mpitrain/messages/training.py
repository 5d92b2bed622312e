"""The messages of training: workers to servers, servers to workers, and among peers.

Invariants: as of the package.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.messages.common import CheckpointRequest, Kind, Lease, Payload, Sent, message


@message(Kind.JOIN)
class Join(Sent):
    """A worker asks every server for the model, and the dealing server for its first leases, when it begins to work or
    has been woken.

    step: of its next push.
    """

    step: int


@message(Kind.PUSH)
class Push(Sent):
    """A worker hands a server its part of a gradient (or of its parameters, in an elastic exchange).

    version: of this shard, which the gradient was computed on.
    step: of this push.
    samples: in the batches that it was made of; 0 of a step within a batch, whose last step counts them.
    payload: the gradient.
    share: its share in the mean of an update: samples, or the weight that the loss reports.
    loss: the mean of the batches.
    finite: neither the loss nor any number of the gradient, on any shard, is a NaN or infinite.
    pull: the worker wants the parameters back; otherwise it goes on with what it has.
    lease: what it was made of; None where workers bring their own data, and of a step within a batch.
    num_batches: how many it was made of; 0 of a step within a batch.
    checkpoint: the next one that the worker knows of; or a request, because the worker or one of its servers has been
        asked to end.
    options: those of the server's optimizer that came with the gradient, as JSON text; empty where none has changed.
        Of several optimizers, whose gradient it is.
    """

    version: int
    step: int
    samples: int
    payload: Payload
    share: float = 1.0
    loss: float = 0.0
    finite: bool = True
    pull: bool = True
    lease: Lease | None = None
    num_batches: int = 1
    checkpoint: CheckpointRequest | None = None
    options: str = ""


@message(Kind.PULL)
class Pull(Sent):
    """A worker asks every server for the model, and hands in no gradient.

    step: of its next push.
    """

    step: int


@message(Kind.PULL_ROWS)
class PullRows(Sent):
    """A worker asks a server for rows of tables, as they are now; the server answers at once with `Rows`.

    step: as in `Join`.
    payload: which rows.
    trains: a gradient is computed on them; otherwise they are of a validation or of the final model, and unrounded.
    """

    step: int
    payload: Payload
    trains: bool = True


@message(Kind.ROWS)
class Rows(Sent):
    """A server's answer to `PullRows`.

    version: of this shard now.
    payload: the rows.
    """

    version: int
    payload: Payload


@message(Kind.IDLE)
class Idle(Sent):
    """A worker informs every server that it has nothing to compute on, and stays in case there is more.

    step: of the push that it would make next.
    """

    step: int


@message(Kind.AWAY)
class Away(Sent):
    """A worker informs every server that it validates before its next message, for as long as it takes.

    step: of its next push.
    for_part: it measures a part of a validation, or waits for the time of one.
    """

    step: int
    for_part: bool = False


@message(Kind.SAVE)
class Save(Sent):
    """A worker asks every server to write a checkpoint as soon as all workers have asked for it, and then for the
    model.

    step: of its next push.
    at: the step of the user's loop, which the checkpoint is named by.
    text: what else those who write have to know, as JSON text.
    """

    step: int
    at: int
    text: str


@message(Kind.NOTE)
class Note(Sent):
    """A worker has something for the run's report, which the dealing server writes.

    text: the event as JSON text.
    """

    text: str


@message(Kind.DONE)
class Done(Sent):
    """A worker informs every server that it will not push again.

    step: how many pushes it has made.
    wants_final: it asks for the final model.
    all_answered: every shard has answered all its pushes, and so has processed them; False where that is not known,
        because a server has stopped it.
    checkpoint: as in `Push`.
    """

    step: int
    wants_final: bool = False
    all_answered: bool = True
    checkpoint: CheckpointRequest | None = None


@message(Kind.FINAL)
class FinalRequest(Sent):
    """A worker that is to deliver the final model in place of another one asks every server for it.

    step: how many pushes it has made.
    """

    step: int


@message(Kind.DELIVERED)
class Delivered(Sent):
    """The worker that delivers the final model informs the dealing server that it is saved.

    step: how many pushes it has made.
    text: what was measured, as JSON text.
    """

    step: int
    text: str


@message(Kind.LEAVE)
class Leave(Sent):
    """A worker informs every server that it leaves, having stayed for as long as it was wanted.

    step: how many pushes it has made.
    last_at: the checkpoint of the end of the run, as the dealing server has named it; 0: none.
    """

    step: int
    last_at: int = 0


@message(Kind.LOST)
class Lost(Sent):
    """A worker is gone. The world informs the ranks that go on without it; or the worker informs its servers that it
    fails now; or a server's own failure detector has found that it is silent.

    how: "silent"; empty where it has died.
    """

    how: str = ""


@message(Kind.ALIVE)
class Alive(Sent):
    """A worker that waits for an answer asks a server whether it is there; a server answers with the same."""


@message(Kind.ANNOUNCED)
class Announced(Sent):
    """The world tells a server that a worker has pushed, and that the payload stays with the worker until there is room
    for it. The `Push` comes later."""


@message(Kind.REPLY)
class Answer(Sent):
    """A server's answer to a `Join`, `Push`, `Pull` or `Save`; sent unasked, it makes a worker begin its batch anew.
    It is a `Reply` or a `Difference`.

    version: of this shard now.
    step: of the worker's next push, which identifies the push that is answered.
    samples: accepted so far, which a schedule on the worker follows.
    payload: the model, or the difference; None where the push asked for nothing.
    leases: what to compute on after those that the worker has (the dealing server).
    stop: there is no more work.
    num_batches: how many batches the worker has pushed, in case it has just been started anew.
    checkpoint: the next one (the dealing server), or a request where this server has been asked to end (any other).
    part_of: what the worker holds with this answer belongs to the checkpoint at so many samples; 0: to none.
    promoted: the worker validates from now on, because the one that did is gone.
    standby: the worker should stay although it has nothing to do.
    living: which part of the run's workers is not lost, which a schedule on the worker follows.
    told: figures of validations that a scheduler on the worker goes by, as in `Told`.
    """

    version: int
    step: int
    samples: int = 0
    payload: Payload | None = None
    leases: tuple[Lease, ...] = ()
    stop: bool = False
    num_batches: int = 0
    checkpoint: CheckpointRequest | None = None
    part_of: int = 0
    promoted: bool = False
    standby: bool = False
    living: float = 1.0
    told: str = ""


@dataclass(frozen=True, slots=True)
class Reply(Answer):
    """The answer whose payload is the model of this shard."""


@message(Kind.DIFFERENCE)
class Difference(Answer):
    """The answer to an elastic push: its payload is what both sides move by."""


@message(Kind.FINAL)
class Final(Sent):
    """A server hands the worker that asked for it the model of its shard after the last update.

    version: of the shard.
    payload: the model, unrounded.
    """

    version: int
    payload: Payload


@message(Kind.WAKE)
class Wake(Sent):
    """The dealing server asks a worker that is idle to join again, or directs one that has pushed its last.

    stop: the worker leaves.
    promoted: the worker delivers the final model, for which it asks every server.
    last_at: the checkpoint of the end of the run, which the worker names to the other servers; 0: none is written.
    part_of: the same, where the worker writes a part of it; 0: it has none.
    """

    stop: bool = False
    promoted: bool = False
    last_at: int = 0
    part_of: int = 0


@message(Kind.UPDATE)
class Update(Sent):
    """A peer sends another one what has become of its model. (In virtual time, also a part of an all-reduce.)

    step: of the sender.
    payload: what this step has changed, or the parameters.
    """

    step: int
    payload: Payload


@message(Kind.SUM)
class Sum(Sent):
    """At a meeting a peer sends its parent in the tree of all peers the sum of the parameters below.

    meeting: its number, from 0.
    step: of the sender.
    count: how many peers the sum is of.
    payload: the sum; None where nobody below takes part.
    """

    meeting: int
    step: int
    count: int
    payload: Payload | None


@message(Kind.MEAN)
class Mean(Sent):
    """At a meeting a peer sends its children in the tree the mean of all.

    meeting: its number, from 0.
    step: of the sender.
    payload: the mean.
    """

    meeting: int
    step: int
    payload: Payload


@message(Kind.ASK)
class Ask(Sent):
    """A peer informs its parent in the tree whether it, or one of those below, has been asked to end.

    step: after which all peers ask.
    checkpoint: a request where one has been asked to end; None where none has.
    """

    step: int
    checkpoint: CheckpointRequest | None


@message(Kind.AGREED)
class Agreed(Sent):
    """The first peer answers `Ask` for all; every peer passes it on to its children.

    step: after which all peers have asked.
    writes: all write a checkpoint now.
    ends: the run ends with it.
    ask_at: the step after which all ask again.
    """

    step: int
    writes: bool
    ends: bool
    ask_at: int


@message(Kind.LAST)
class Last(Sent):
    """A peer informs everybody who may wait for it that it has taken its last step.

    step: how many steps it has taken.
    """

    step: int


@message(Kind.CREDIT)
class Credit(Sent):
    """A peer that waits for nobody has taken in more of the receiver's updates (`roles/peer_credits.py`).

    step: how many since the last meeting.
    """

    step: int
