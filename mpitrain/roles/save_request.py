"""What a worker's loop answers when it wants a checkpoint."""

from __future__ import annotations

from typing import NamedTuple


class SaveRequest(NamedTuple):
    """The answer of a loop that wants a checkpoint in place of a gradient: at `checkpoint_at`, and whatever else those
    who write have to know."""

    checkpoint_at: int
    text: str
