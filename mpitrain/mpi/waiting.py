"""How long to pause between two polls that found nothing: one law for everybody who polls MPI.

While a transfer runs nobody sleeps (a rendezvous message moves only inside MPI calls); the core is offered
to other threads and ranks and taken back. When nothing is outstanding but receives that may never match,
sleeping costs no bandwidth, so the pauses grow: give way for 0.2 ms, then naps of 0.1 ms, and naps of 2 ms
after 50 ms without traffic (three passive receives: naps of 0.2 ms cost 10.6 % of a core, of 2 ms 1.7 %).
This file imports the stdlib only.
"""

import os
import time

GIVE_WAY_S = 0.0002
SHORT_NAP_S = 0.0001
QUIET_AFTER_S = 0.05
LONG_NAP_S = 0.002


class Backoff:
    """The pause law's memory: since when has there been no traffic."""

    def __init__(self) -> None:
        self._quiet_since_s = time.monotonic()

    def traffic(self) -> None:
        """Something completed or was posted: be attentive again."""
        self._quiet_since_s = time.monotonic()

    def nap_s(self) -> float:
        """Seconds to sleep now, given that nothing but passive receives is outstanding; 0.0 means only give way."""
        quiet_s = time.monotonic() - self._quiet_since_s
        if quiet_s < GIVE_WAY_S:
            return 0.0
        return SHORT_NAP_S if quiet_s < QUIET_AFTER_S else LONG_NAP_S

    def pause(self, transferring: bool) -> None:
        """One pause after a poll that found nothing."""
        nap_s = 0.0 if transferring else self.nap_s()
        if nap_s:
            time.sleep(nap_s)
        else:
            give_way()


def give_way() -> None:
    """Offer the core to other ranks and the interpreter to other threads, without sleeping."""
    os.sched_yield()
