"""Messages between workers and servers that travel together, through the aggregator of a node.

Invariants: as of the package. What is in a bundle is for the receiver what it would be by itself, in the order in which
it stands there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpitrain.messages.common import Kind, Sent, message

if TYPE_CHECKING:
    from mpitrain.messages import Message


class Entry(NamedTuple):
    """One message, from the worker or server on rank `source` to the one on rank `to`. Entries may share a payload,
    which each of them holds."""

    source: int
    to: int
    message: Message


@message(Kind.BUNDLE)
class Bundle(Sent):
    """Messages that travel together.

    entries: none where a worker informs its aggregator that it sends nothing more.
    num_taken: of the aggregator's bundles the server has dealt with so many since it sent the one before.
    """

    entries: tuple[Entry, ...]
    num_taken: int = 0


class NotSent:
    """Stands for the gradient of a push that does not travel: it is in the sum that another push of the same bundle
    carries, or is not finite, and nobody wants it."""

    num_bytes = 0

    def statistics(self) -> dict[str, float]:
        """Nothing is known of the numbers."""
        return {}

    def hold(self) -> NotSent:
        """There is nothing to hold."""
        return self

    def stamp(self) -> int:
        """There is nothing to bear one."""
        return 0

    def release(self) -> None:
        """There is nothing to release."""


NOT_SENT = NotSent()
