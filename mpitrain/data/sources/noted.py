"""What happens to samples on their way into shards that people should know: counted by kind, each with a name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Counts = Mapping[str, tuple[int, str]]


class Noted:
    """How often each kind of thing has happened, and to which file first."""

    def __init__(self) -> None:
        self.counts: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, name: str, count: int = 1) -> None:
        """One more, or several."""
        before, first = self.counts.get(kind, (0, name))
        self.counts[kind] = before + count, first

    def lines(self) -> list[str]:
        """For people."""
        return [f"{count} {kind}, first {first}" for kind, (count, first) in sorted(self.counts.items())]

    @classmethod
    def merged(cls, several: Iterable[Counts]) -> Noted:
        """Of all ranks."""
        made = cls()
        for counts in several:
            for kind, (count, first) in counts.items():
                made.add(kind, first, count)
        return made
