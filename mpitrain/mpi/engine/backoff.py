"""How long to pause between two polls that found nothing: one law for everybody who polls MPI.

While a transfer runs nobody sleeps (a rendezvous message moves only inside MPI calls); the core is offered to other
threads and ranks and taken back. When nothing is outstanding but receives that may never match, sleeping costs no
bandwidth, so the pauses grow: give way for 0.2 ms, then naps of 0.1 ms, and naps of 2 ms after 50 ms without traffic
(three passive receives: naps of 0.2 ms cost 10.6 % of a core, of 2 ms 1.7 %). A rank that waits for others to arrive at
a collective takes its long naps only after a second: arrival travels in log2(ranks) rounds, and each round would wait
for a sleeper. This file imports the stdlib only.
"""

import os
import time

SPIN_S = 0.00005
GIVE_WAY_S = 0.0002
SHORT_NAP_S = 0.0001
QUIET_AFTER_S = 0.05
QUIET_AFTER_ARRIVING_S = 1.0
LONG_NAP_S = 0.002


class Backoff:
    """The pause law's memory: since when has there been no traffic."""

    def __init__(self) -> None:
        self._quiet_since_s = time.monotonic()

    def traffic(self) -> None:
        """Something completed or was posted: be attentive again."""
        self._quiet_since_s = time.monotonic()

    def nap_s(self, arriving: bool = False) -> float:
        """Seconds to sleep now, given that no transfer runs; 0.0 means only give way. `arriving`: this rank waits for
        others at a collective."""
        quiet_s = time.monotonic() - self._quiet_since_s
        if quiet_s < GIVE_WAY_S:
            return 0.0
        return (
            SHORT_NAP_S if quiet_s < (QUIET_AFTER_ARRIVING_S if arriving else QUIET_AFTER_S) else LONG_NAP_S
        )

    def spin(self) -> bool:
        """True right after traffic: the next message is microseconds away, and where others want the core, offering it
        costs a time slice."""
        return time.monotonic() - self._quiet_since_s < SPIN_S

    def pause(self, transferring: bool, arriving: bool = False) -> None:
        """One pause after a poll that found nothing."""
        nap_s = 0.0 if transferring else self.nap_s(arriving)
        if nap_s:
            time.sleep(nap_s)
        else:
            give_way()


def give_way() -> None:
    """Offer the core to other ranks and the interpreter to other threads, without sleeping."""
    os.sched_yield()
