"""Flow control among peers that do not wait for one another: how many updates a receiver may have left to take in.

Invariants: a sender never has more than `CREDITS` updates under way to a receiver that has not confirmed them, so
neither side's memory grows where one is slow or stopped. A sender without credit begins no further step; nothing is
dropped or merged, so every update is still taken in exactly once. A receiver confirms every `CREDITS // 2` updates, and
both count from the last meeting. The death of a peer ends the run of all, also of those that wait for its credit.
"""

from __future__ import annotations

CREDITS = 16
_EVERY = CREDITS // 2


class PeerCredits:
    """What one peer has sent to each receiver since the last meeting, and what was confirmed."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}
        self._confirmed: dict[int, int] = {}
        self.most = 0  # updates without a confirmation, to one receiver, ever

    def may_send(self, to: int) -> bool:
        return self._unconfirmed(to) < CREDITS

    def sent(self, to: int) -> None:
        self._sent[to] = self._sent.get(to, 0) + 1
        self.most = max(self.most, self._unconfirmed(to))

    def received(self, source: int, confirmed: int) -> None:
        """`source` has taken in so many."""
        self._confirmed[source] = confirmed

    def is_due(self, heard: int) -> bool:
        """Whether a receiver that has taken in so many updates confirms them now."""
        return heard % _EVERY == 0

    @property
    def are_due(self) -> bool:
        """Whether a receiver has yet to confirm what it will."""
        return any(self._confirmed.get(to, 0) < sent - sent % _EVERY for to, sent in self._sent.items())

    def clear(self) -> None:
        """All have met, and everything has been taken in."""
        self._sent.clear()
        self._confirmed.clear()

    def _unconfirmed(self, to: int) -> int:
        return self._sent.get(to, 0) - self._confirmed.get(to, 0)
