"""What the parts of a checkpoint are called that ranks without a server write."""

from __future__ import annotations


def own_part(place: int) -> str:
    """The part that a rank writes, by its rank or by the part of a split model that it holds: the first puts its own
    things beside what all share."""
    return f"own-{place}" if place else "shard-0"
