"""What threads of ranks of one node sleep on beside MPI, which gives nothing to sleep on: words of shared memory, two
for each process, and the kernel's futex.

A thread that polls uses up its share of a core that others want, and is not scheduled when its message comes; one that
sleeps in the kernel is. Invariants: whoever may have ended another's wait writes what that waits for, then looks
whether it is `wanted`, then rings; a sleeper says that it is wanted and reads its word, then looks once more at what
it waits for, and only then sleeps, which the kernel refuses where the word has changed. Between writing and looking
each passes a full barrier, so no ring is missed; sleeps are limited all the same, for what nobody rings for (a
deadline, a signal, a peer that is dead). A word is never written twice with one value, so a late writer cannot undo
another's ring. Memory has no name in the file system, so nothing is left of a process that is killed: a peer opens it
by way of /proc, and knows it by random bytes. Stores become visible in the order of the program on the one processor
that this runs on. This file imports no MPI.
"""

import contextlib
import ctypes
import itertools
import mmap
import os
import platform
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpitrain.errors import UsageError

_FUTEX, _WAIT, _WAKE, _ALL = 202, 0, 1, 0x7FFFFFFF  # of x86-64
_COOKIE_BYTES = 16
THREAD, DRIVER = 1, 2  # who may wait in a process: the communication thread, or a thread that drives MPI
_WORDS, _WANTED = (0, 16, 32), 48  # places of 32-bit words, a line of the cache each, behind the cookie
_OWN_BYTES = 4096
VARIABLE = "MPITRAIN_DOORBELL"


class Place(NamedTuple):
    """Where a peer finds a piece of memory."""

    process: int
    file: int
    cookie: str


def why_not(fault_tolerance: str) -> str:
    """Why ranks of a node do not ring each other here; empty if they do. Raises UsageError for an unknown setting."""
    asked = os.environ.get(VARIABLE) or "on"
    if asked not in ("on", "off"):
        raise UsageError(f"{VARIABLE}={asked}: it is on or off")
    if asked == "off":
        return f"{VARIABLE}=off"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"nothing is known to sleep on here ({sys.platform}, {platform.machine()})"
    if fault_tolerance != "none":
        return f"ranks may die, and their peers have to notice ({fault_tolerance})"
    return ""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedMemory:
    """Memory that other processes of this node may map; the first 64 bytes are not the caller's."""

    def __init__(self, file: int, num_bytes: int):
        self._file = file
        self.map = mmap.mmap(file, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @classmethod
    def made(cls, num_bytes: int) -> "SharedMemory":
        """New, zeros; a page of it is taken when it is first written. Raises OSError where it cannot be made."""
        file = os.memfd_create("mpitrain")
        try:
            os.ftruncate(file, num_bytes)
            memory = cls(file, num_bytes)
        except BaseException:
            os.close(file)
            raise
        memory.map[:_COOKIE_BYTES] = os.urandom(_COOKIE_BYTES)
        return memory

    @property
    def place(self) -> Place:
        """For `at`, in another process, until `close`."""
        return Place(os.getpid(), self._file, bytes(self.map[:_COOKIE_BYTES]).hex())

    @classmethod
    def at(cls, place: Place, num_bytes: int) -> "SharedMemory":
        """That of a peer. Raises OSError where this process cannot see it."""
        file = os.open(f"/proc/{place.process}/fd/{place.file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_size < num_bytes:
                raise OSError(f"process {place.process} is another one here")
            memory = cls(file, num_bytes)
        finally:
            os.close(file)
        if bytes(memory.map[:_COOKIE_BYTES]).hex() != place.cookie:
            raise OSError(f"process {place.process} is another one here")
        return memory

    def close(self) -> None:
        """No other process maps it from here on; it stays where it is mapped."""
        os.close(self._file)


class Peer:
    """The words of another process."""

    def __init__(self, place: Place):
        self._memory = SharedMemory.at(place, _OWN_BYTES)
        self.words = memoryview(self._memory.map).cast("I")
        self.addresses = _addresses(self._memory)


def _addresses(memory: SharedMemory) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(memory.address + 4 * word) for word in _WORDS]


class Doorbell:
    """The words of this process. `number` is another one in each process of the node, before any of them rings.

    `num_rung`, `num_sleeps`: rings to others, and sleeps; `num_missed` long sleeps have ended by their limit although
    what they waited for was there.
    """

    def __init__(self, number: int = 0):
        self.memory = SharedMemory.made(_OWN_BYTES)
        self._words = memoryview(self.memory.map).cast("I")
        self._addresses = _addresses(self.memory)
        self._syscall: Any = ctypes.CDLL(None).syscall
        self.number = number
        self._numbers = itertools.count(1)
        self._barrier = threading.Lock()
        self.num_rung = self.num_sleeps = self.num_missed = 0

    def value(self, which: int) -> int:
        """Of one of the words: to be read before a last look at what is waited for."""
        return self._words[_WORDS[which]]

    @property
    def wanted(self) -> int:
        """Who waits for peers."""
        return self._words[_WANTED]

    def want(self, which: int) -> None:
        """Say who here waits for peers (0: nobody); one thread at a time. A look at what is waited for comes after."""
        if self._words[_WANTED] != which:
            self._words[_WANTED] = which
            self.fence()

    def fence(self) -> None:
        """What was written before this is seen by others before this process reads anything after it."""
        with self._barrier:  # an interlocked instruction, which nothing else in Python is
            pass

    def ring(self, peers: Iterable[Peer]) -> None:
        """Wake those of the peers that wait, after a `fence`."""
        for peer in peers:
            if which := peer.words[_WANTED]:
                self.num_rung += 1
                peer.words[_WORDS[which]] = self._next()
                self._syscall(_FUTEX, peer.addresses[which], _WAKE, _ALL, None, None, 0)

    def ring_own(self, which: int) -> None:
        """Wake a thread of this process that sleeps."""
        self._words[_WORDS[which]] = self._next()
        self._syscall(_FUTEX, self._addresses[which], _WAKE, _ALL, None, None, 0)

    def sleep(self, which: int, value: int, limit_s: float) -> bool:
        """Until somebody rings, at once if somebody has since `value` was read, for `limit_s` at most; a signal ends it
        too. Whether somebody has rung."""
        limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
        self.num_sleeps += 1
        self._syscall(
            _FUTEX, self._addresses[which], _WAIT, ctypes.c_uint(value), ctypes.byref(limit), None, 0
        )
        return self.value(which) != value

    def _next(self) -> int:
        return (next(self._numbers) << 10 | self.number & 0x3FF) & 0xFFFFFFFF


def own() -> Doorbell | None:
    """One for this process; None where there is none to be had. Raises UsageError for an unknown setting."""
    if not why_not("none"):
        with contextlib.suppress(OSError):
            return Doorbell()
    return None


class NodePeers:
    """The other ranks of a communicator that are on this node, which ring each other for its messages."""

    def __init__(self, bell: Doorbell, peers: Mapping[int, Peer]):
        self.bell, self._peers = bell, peers

    def among(self, ranks: Sequence[int]) -> "NodePeers":
        """The same in a communicator of these ranks, in their order."""
        peers = {index: self._peers[rank] for index, rank in enumerate(ranks) if rank in self._peers}
        return NodePeers(self.bell, peers)

    @classmethod
    def at(cls, bell: Doorbell, places: Mapping[int, Place]) -> "NodePeers":
        """Those at these places, by rank. Raises OSError where this process cannot see one."""
        return cls(bell, {rank: Peer(place) for rank, place in places.items()})

    def words(self) -> list[Peer]:
        """In the order of the ranks."""
        return [self._peers[rank] for rank in sorted(self._peers)]

    def ring(self, rank: int) -> None:
        """Wake that one, if it waits: a message to it has been posted, or one of its own has been received."""
        peer = self._peers.get(rank)
        if peer is not None:  # else it is this process
            self.bell.fence()
            self.bell.ring((peer,))
