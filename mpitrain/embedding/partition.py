"""Which server holds a row of a table, and where.

    "hash"    p = a id mod rows,   server = p mod servers,   slot = p div servers     (a and rows have no common factor)
    "range"   server s holds the ids from rows s div servers up to rows (s + 1) div servers, in order

Invariants: every id has one place and every place one id, so nothing has to be looked up. The places are a function of
the number of rows and of servers alone: all ranks compute the same. A multiplication by about the golden ratio spreads
ids that lie close together, as those of frequent categories often do, evenly over the servers (Knuth, The Art of
Computer Programming 3, section 6.4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpitrain.errors import UsageError

MAX_ROWS = 2**32  # an id in a message has 32 bits
WAYS = ("hash", "range")
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Partition:
    """Of `num_rows` rows over `num_servers` servers, `way` "hash" or "range".

    Raises:
        UsageError: no rows, too many, or another way.
    """

    num_rows: int
    num_servers: int
    way: str = "hash"

    def __post_init__(self) -> None:
        if not 1 <= self.num_rows <= MAX_ROWS:
            raise UsageError(f"a table has from 1 to {MAX_ROWS:,} rows, got {self.num_rows:,}")
        if self.way not in WAYS:
            raise UsageError(f"a table is parted by {' or '.join(map(repr, WAYS))}, got {self.way!r}")

    @cached_property
    def _factor(self) -> int:
        factor = max(1, int(min(self.num_rows, 2**31) * _GOLDEN))
        while math.gcd(factor, self.num_rows) != 1:
            factor += 1
        return factor

    @cached_property
    def _cuts(self) -> np.ndarray:
        return np.array(
            [self.num_rows * s // self.num_servers for s in range(self.num_servers + 1)], np.int64
        )

    def size(self, server: int) -> int:
        """Rows of one server."""
        if self.way == "range":
            return int(self._cuts[server + 1] - self._cuts[server])
        return (self.num_rows - server + self.num_servers - 1) // self.num_servers

    def place(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The servers of ids, and the slots there, all int64."""
        if self.way == "range":
            servers = np.searchsorted(self._cuts, ids, side="right") - 1
            return servers, ids - self._cuts[servers]
        # products of two numbers below 2^32 fit 64 bits without a sign
        places = (ids.astype(np.uint64) * np.uint64(self._factor)) % np.uint64(self.num_rows)
        servers, count = (places % np.uint64(self.num_servers)).astype(np.int64), np.uint64(self.num_servers)
        return servers, (places // count).astype(np.int64)

    def ids(self, server: int, slots: np.ndarray) -> np.ndarray:
        """What `place` has put into these slots of a server."""
        if self.way == "range":
            return np.asarray(slots + self._cuts[server])
        places = slots.astype(np.uint64) * np.uint64(self.num_servers) + np.uint64(server)
        back = pow(self._factor, -1, self.num_rows) if self.num_rows > 1 else 0
        return np.asarray((places * np.uint64(back)) % np.uint64(self.num_rows)).astype(np.int64)
