"""A process that was forked from a rank is no rank: what it posts would take its parent's place among the ranks, and
leave the parent waiting. Its copy of the engine refuses."""

import os
import weakref
from typing import Protocol

from mpitrain.errors import UsageError


class Refusing(Protocol):
    """An engine, as this file sees it; `who` is empty for a rank that is alone, whose place nobody can take."""

    who: str

    def refuse(self, error: Exception) -> None: ...


_engines: "weakref.WeakSet[Refusing]" = weakref.WeakSet()


def refuse_children_of(engine: Refusing) -> None:
    """From here on children of this process get an engine that refuses."""
    _engines.add(engine)


def _refuse() -> None:
    for engine in list(_engines):
        if engine.who:
            engine.refuse(
                UsageError(
                    f"this process ({os.getpid()}) was forked from {engine.who} and is no rank itself: call "
                    "collectives in the parent, or start ranks by mpirun, srun or mpitrain launch"
                )
            )


os.register_at_fork(after_in_child=_refuse)
