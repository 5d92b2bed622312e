"""What has been announced to a rank that reads late on purpose (`--inject "slow_reader(...)"`).

Invariants: a header is held back, so what it announces stays under way and its sender holds it; what comes first is
read first.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any


class LateReads:
    """Headers that are looked at `seconds` after they have come; at once where that is 0."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._waiting: deque[tuple[float, Any, bytearray]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, peer: Any, header: bytearray) -> None:
        """A header has come from `peer`."""
        self._waiting.append((time.monotonic() + self.seconds, peer, bytearray(header)))

    def take(self) -> tuple[Any, bytearray] | None:
        """The next one whose time has come."""
        if not self._waiting or self._waiting[0][0] > time.monotonic():
            return None
        _, peer, header = self._waiting.popleft()
        return peer, header

    def left_s(self, end_s: float | None) -> float | None:
        """Seconds until the next is due, or until `end_s`, whichever comes first; None: neither comes."""
        moments = [one for one in (end_s, self._waiting[0][0] if self._waiting else None) if one is not None]
        return max(0.0, min(moments) - time.monotonic()) if moments else None
