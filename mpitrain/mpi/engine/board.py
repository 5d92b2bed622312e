"""Where the ranks of a group on one node say that they have arrived at a collective, and leave what it needs of them.

Invariants: the collectives of a group come one after another, each is a step. A rank posts a step when it is done with
the one before, so nobody can be more than one step behind another, and two places for each rank, used in turn, are
enough: what a rank has posted stays until all are done with it. What a rank posts is written before the number of its
step; the last to arrive rings those that wait, and nobody else is woken.

A record is three numbers, of which `collective_queue.py` says what they mean; what else a rank posts, at most
`slot_bytes`, lies at `offset(rank)`. This file imports only the standard library.
"""

import ctypes
import mmap
from array import array
from collections.abc import Callable, Sequence

from mpitrain.mpi.engine.doorbell import Doorbell, Peer, SharedMemory

_HEAD_BYTES = 64
_RECORD = 3
# Added to the last number of a record, which those of all ranks do not reach otherwise: by a rank that failed to leave
# its part, and by one that takes part in nothing more.
FAILED, GAVE_UP = 2**24, 2**32
MAX_RANKS = 128


def num_bytes(num_ranks: int, slot_bytes: int) -> int:
    """Of the memory of a board."""
    return _slots_at(num_ranks) + 2 * num_ranks * slot_bytes


def _slots_at(num_ranks: int) -> int:
    numbers = 8 * num_ranks * (1 + 2 * _RECORD)
    return -(-(_HEAD_BYTES + numbers) // mmap.PAGESIZE) * mmap.PAGESIZE


class Board:
    """That of a group of `size` ranks, of which this is rank `rank`, in memory that all have mapped."""

    def __init__(
        self, memory: SharedMemory, rank: int, size: int, slot_bytes: int, bell: Doorbell, peers: Sequence[Peer]
    ):  # fmt: skip
        self.memory, self.slot_bytes, self.bell = memory, slot_bytes, bell
        self._rank, self._size, self._peers = rank, size, peers
        numbers = memoryview(memory.map)[_HEAD_BYTES : _slots_at(size)].cast("Q")
        self._steps = numbers[:size]
        self._records = [numbers[size + turn * size * _RECORD :][: size * _RECORD] for turn in (0, 1)]
        at = rank * _RECORD
        self._own_records = [records[at : at + _RECORD] for records in self._records]
        self.step = self.turn = 0  # turn: which of the two places the step at hand uses
        self.own_addresses = [
            memory.address + _slots_at(size) + (2 * rank + turn) * slot_bytes for turn in (0, 1)
        ]

    def post(self, own: "array[int]", deposit: Callable[[], None] | None = None) -> bool:
        """Arrive at the next step with this record; `deposit()` writes what else this rank leaves at its address.
        Returns whether all have arrived. Raises what `deposit` raises; this rank has arrived then, and all see that it
        has failed, unless it was interrupted."""
        self.step += 1
        self.turn ^= 1
        failure: Exception | None = None
        if deposit is not None:
            try:
                deposit()
            except Exception as error:
                failure = error
            except BaseException:  # this rank has not arrived
                self.step, self.turn = self.step - 1, self.turn ^ 1
                raise
        self._own_records[self.turn][:] = memoryview(own)
        if failure is not None:
            self._own_records[self.turn][_RECORD - 1] += FAILED
        has_all = self._arrive()
        if failure is not None:
            raise failure
        return has_all

    def _arrive(self) -> bool:
        self._steps[self._rank] = self.step
        self.bell.fence()
        if min(self._steps.tolist()) < self.step:
            return False
        self.bell.ring(self._peers)
        return True

    def is_complete(self) -> bool:
        """Whether all have arrived at the step at hand."""
        return min(self._steps.tolist()) >= self.step

    def sums(self) -> list[int]:
        """Of the records of all ranks, once it is complete."""
        values = self._records[self.turn].tolist()
        return [sum(values[each::_RECORD]) % 2**64 for each in range(_RECORD)]

    def are_alike(self, own: "array[int]") -> bool:
        """Whether all ranks have this record, once it is complete."""
        return bool(self._records[self.turn].tolist() == own.tolist() * self._size)

    def failed(self) -> list[int]:
        """The ranks that failed to leave their part of the step, once it is complete."""
        last = self._records[self.turn].tolist()[_RECORD - 1 :: _RECORD]
        return [rank for rank, number in enumerate(last) if number % GAVE_UP >= FAILED]

    def give_up(self) -> None:
        """Arrive at all steps to come, with a record that says that this rank takes part in none."""
        for records in self._records:
            records[(self._rank + 1) * _RECORD - 1] = GAVE_UP
        self._steps[self._rank] = 2**63
        self.bell.fence()
        self.bell.ring(self._peers)

    def offset(self, rank: int) -> int:
        """Where in the memory a rank's deposit of this step begins."""
        return _slots_at(self._size) + (2 * rank + self.turn) * self.slot_bytes

    def copy_in(self, address: int, size_bytes: int) -> None:
        """Deposit so many bytes from there."""
        ctypes.memmove(self.own_addresses[self.turn], address, size_bytes)
