"""What the handler of a signal sets.

Invariants: there is no lock. Python runs a handler between two steps of the main thread, which may be inside of a lock
at that moment, that of a `threading.Event` included; a handler that waits for it then waits for ever.
"""


class Flag:
    """A `threading.Event` that nobody waits for."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """From now on it is set."""
        self._is_set = True

    def clear(self) -> None:
        """And no longer."""
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it is."""
        return self._is_set
