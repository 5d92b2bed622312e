"""What a message says of its sender's progress."""

from __future__ import annotations

from mpitrain.messages import (
    Alive,
    AmongServers,
    Announced,
    Answer,
    Assist,
    Average,
    Bundle,
    Final,
    Lost,
    Measured,
    Message,
    Note,
    Push,
    Rows,
    Told,
    Unit,
    Wake,
)

_WITHOUT_STEP = Note | Wake | Lost | Alive | Announced | Assist | Unit | Measured | Told | AmongServers


def step_after(message: Message, before: int) -> int:
    """The step, or a server's version, that its sender has come to."""
    if isinstance(message, Bundle):
        for entry in message.entries:
            before = step_after(entry.message, before)
        return before
    if isinstance(message, Push):
        return message.step + 1
    if isinstance(message, Answer | Rows | Final | Average):
        return message.version
    return before if isinstance(message, _WITHOUT_STEP) else message.step


def is_progress(message: Message) -> bool:
    """Whether it is more than a sign of life."""
    if isinstance(message, Bundle):
        return any(is_progress(entry.message) for entry in message.entries)
    return not isinstance(message, Alive)
