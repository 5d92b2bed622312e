"""What a message says of its sender's progress."""

from __future__ import annotations

from mpitrain.messages import (
    Alive,
    AmongServers,
    Answer,
    Assist,
    Average,
    Final,
    Lost,
    Measured,
    Message,
    Note,
    Push,
    Rows,
    Unit,
    Wake,
)

_WITHOUT_STEP = Note | Wake | Lost | Alive | Assist | Unit | Measured | AmongServers


def step_after(message: Message, before: int) -> int:
    """The step, or a server's version, that its sender has come to."""
    if isinstance(message, Push):
        return message.step + 1
    if isinstance(message, Answer | Rows | Final | Average):
        return message.version
    return before if isinstance(message, _WITHOUT_STEP) else message.step
