"""How long to pause between two polls that found nothing. Everybody who polls MPI uses this one policy.

While a transfer is under way nobody sleeps, because a rendezvous message moves only inside MPI calls: the core is
yielded to other threads and ranks and taken back. When only receives that may never match are outstanding, sleeping
costs no bandwidth, so the pauses grow: yields for 0.2 ms, then sleeps of 0.1 ms, and sleeps of 2 ms after 50 ms
without traffic (three passive receives: sleeps of 0.2 ms cost 10.6 % of a core, of 2 ms 1.7 %). A rank that waits for
others to arrive at a collective takes the long sleeps only after a second: arrivals travel in log2(ranks) rounds, and
each round would wait for a sleeper. This file imports only the standard library.
"""

import os
import time

SPIN_S = 0.00005
YIELD_S = 0.0002
SHORT_SLEEP_S = 0.0001
QUIET_AFTER_S = 0.05
QUIET_AFTER_ARRIVING_S = 1.0
LONG_SLEEP_S = 0.002


class Backoff:
    """The state of the policy: the time of the last traffic."""

    def __init__(self) -> None:
        self._quiet_since_s = time.monotonic()

    def traffic(self) -> None:
        """Note that an operation was completed or posted, so that the next pauses are short again."""
        self._quiet_since_s = time.monotonic()

    def quiet_s(self) -> float:
        """Seconds since the last traffic."""
        return time.monotonic() - self._quiet_since_s

    def sleep_s(self, arriving: bool = False) -> float:
        """Seconds to sleep now, where no transfer is under way; 0.0 means only to yield. `arriving`: this rank waits
        for others at a collective."""
        quiet_s = self.quiet_s()
        if quiet_s < YIELD_S:
            return 0.0
        quiet_after_s = QUIET_AFTER_ARRIVING_S if arriving else QUIET_AFTER_S
        return SHORT_SLEEP_S if quiet_s < quiet_after_s else LONG_SLEEP_S

    def spin(self) -> bool:
        """True right after traffic: the next message is microseconds away, and yielding a core that others want costs
        a time slice."""
        return time.monotonic() - self._quiet_since_s < SPIN_S

    def pause(self, transferring: bool, arriving: bool = False) -> None:
        """Pause once after a poll that found nothing."""
        sleep_s = 0.0 if transferring else self.sleep_s(arriving)
        if sleep_s:
            time.sleep(sleep_s)
        else:
            yield_core()


def yield_core() -> None:
    """Offer the core to other ranks and the interpreter to other threads, without sleeping."""
    os.sched_yield()
