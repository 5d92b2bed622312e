"""One message of every class, each with something in every field."""

import dataclasses

from mpitrain.messages import (
    NOT_SENT,
    Agreed,
    Alive,
    Announced,
    Ask,
    AskAverage,
    Assist,
    Average,
    Away,
    Bundle,
    CheckpointRequest,
    Claim,
    Credit,
    Delivered,
    Difference,
    Divide,
    Done,
    Ended,
    Entry,
    Final,
    FinalRequest,
    Idle,
    Join,
    Last,
    Lease,
    Leave,
    Lost,
    Mean,
    Measured,
    Message,
    Note,
    Ordered,
    Over,
    PartialNorm,
    Pull,
    PullRows,
    Push,
    Reply,
    Rows,
    Save,
    Sum,
    Told,
    Unit,
    Update,
    Wake,
)


class Bytes:
    """A payload of so many bytes."""

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes

    def statistics(self) -> dict[str, float]:
        return {}

    def stamp(self) -> int:
        return 0

    def release(self) -> None:
        """Nothing is held."""


PAYLOAD = Bytes(4096)
LEASES = (Lease(2, 1 << 40, 96, 32), Lease(2, 96, 64), Lease(3, 0, 1, 1))
PUSH = Push(
    41, 7, 96, PAYLOAD, share=12.5, loss=0.125, finite=False, pull=False, lease=LEASES[0], num_batches=3,
    checkpoint=CheckpointRequest(640, final=True), options='[{"lr": 0.1}]',
)  # fmt: skip
REPLY = Reply(
    42, 8, 960, PAYLOAD, LEASES, stop=True, num_batches=24, checkpoint=CheckpointRequest(1000), part_of=640,
    promoted=True, standby=True,
)  # fmt: skip
DIFFERENCE = Difference(43, 9, 992, PAYLOAD, LEASES[1:], num_batches=25, checkpoint=CheckpointRequest())
UPDATE, MEAN, SAVE = Update(6, PAYLOAD), Mean(2, 30, PAYLOAD), Save(4, 77, '{"keep": 2}')
# what a server is sent of two workers whose gradients were summed, and a model that two workers share
BUNDLE = Bundle(
    (
        Entry(2, 0, Note('{"name": "Größe"}')),
        Entry(2, 0, dataclasses.replace(PUSH, payload=Bytes(640))),
        Entry(3, 0, dataclasses.replace(PUSH, payload=NOT_SENT)),
        Entry(1, 2, REPLY),
        Entry(1, 3, dataclasses.replace(REPLY, leases=())),
        Entry(1, 3, Alive()),
    ),
    num_taken=3,
)

MESSAGES: tuple[Message, ...] = (
    Join(7),
    PUSH,
    Pull(7),
    Idle(8),
    Away(8),
    SAVE,
    Note('{"name": "codec"}'),
    Done(9, wants_final=True, all_answered=False, checkpoint=CheckpointRequest(1000, final=True)),
    FinalRequest(9),
    Delivered(9, '{"accuracy": 0.5}'),
    Leave(9),
    Lost("silent"),
    Alive(),
    REPLY,
    DIFFERENCE,
    Final(99, PAYLOAD),
    Wake(stop=True, promoted=True),
    UPDATE,
    Sum(2, 30, 3, PAYLOAD),
    MEAN,
    Ask(5, CheckpointRequest()),
    Agreed(5, writes=True, ends=True, ask_at=12),
    Last(31),
    Credit(32),
    Divide(9, 12, PAYLOAD),
    Claim(9, 2, 5, PAYLOAD),
    Over(9),
    Assist(),
    Unit(2, -1, PAYLOAD),
    Measured(2, 5, PAYLOAD),
    AskAverage(9),
    Told(9, "[[1, 96, 0.5]]"),
    Average(41, PAYLOAD),
    PartialNorm(7, 0.75),
    Ended(),
    Announced(),
    Ordered(3, "silent", 2),
    PullRows(7, PAYLOAD, trains=False),
    Rows(41, PAYLOAD),
    BUNDLE,
)


def name_of(message: Message) -> str:
    """What a test of it is called."""
    return type(message).__name__
