"""Communicators of some living ranks, made beside ranks that are dead or busy (ULFM).

Invariants: only the members take part. `Comm.Create_group` fails on a parent with a dead rank, and `Comm.Shrink` asks
every rank that lives; `MPI_Comm_create_from_group` does neither, but waits for ever for a member that does not come. So
the members first meet by messages on a communicator that nobody revokes, where a death is an error. Then each makes the
communicators in a thread of its own, while the thread that owns MPI stays outside MPI and looks whether a member has
died: it then leaves that thread behind, which waits for ever outside MPI's own code, in the launcher's library. Last,
the members meet again, so that nobody uses, or revokes, a communicator that another is yet making. A member that fails
says so to those who wait for it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any
from zlib import crc32

from mpitrain.errors import LostRankError, MismatchError
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.collective_queue import Task, digest, last_tag
from mpitrain.mpi.engine.engine import Engine
from mpitrain.mpi.faults.errors import is_dead_peer
from mpitrain.mpi.operation import Op
from mpitrain.system import background, processes

_TOKEN = struct.Struct("<QB")  # what is being made, and whether its sender has met no error
_LOOK_EVERY_S, _GRACE_S = 0.02, 0.5
_FIRST_TAG = 17  # those below have other uses on the world's communicator
Comms = tuple[MPI.Intracomm, MPI.Intracomm]


class Regroup:
    """Two communicators of some ranks of `world`, in this order; every member makes one of these with the same `name`,
    which is used once. `identities`: the process of every rank of `world`."""

    def __init__(
        self,
        engine: Engine,
        world: MPI.Intracomm,
        identities: Sequence[str],
        members: Sequence[int],
        name: str,
    ):
        self._engine, self._world, self._identities = engine, world, identities
        self._members, self._name = list(members), name
        self._me = self._members.index(world.rank)
        self._digest = digest(f"{name}: {self._members}")

    def make(self, timeout_s: float) -> Generator[Iterable[Op], Any, Comms]:
        """A task in the thread that owns MPI: the communicators, when every member has them.

        Raises:
            LostRankError: a member has died.
            MismatchError: a member makes another group by this name.
            TimeoutError: a member has not come in time.
        """
        end_s = time.monotonic() + timeout_s
        yield from self._meet("before", end_s)
        comms: Comms | None = None
        error: BaseException | None = None
        try:
            comms = self._create(end_s)
        except (MPI.Exception, LostRankError, TimeoutError) as failure:
            error = failure
        yield from self._meet("after", end_s, error)
        assert comms is not None
        return comms

    # ---- by messages

    def _meet(self, when: str, end_s: float, error: BaseException | None = None) -> Task:
        """Done when every member is here (dissemination). One that has met an error waits for nobody, and tells those
        who wait for it."""
        tag = self._tag(when)
        for after, before in self._partners():
            token = _TOKEN.pack(self._digest, error is None)
            sent = self._engine.isend(token, after, tag, self._world)
            if error is not None:
                continue
            heard = bytearray(_TOKEN.size)
            left_s = max(0.0, end_s - time.monotonic())
            got = self._engine.irecv(heard, before, tag, self._world, timeout_s=left_s)
            try:
                yield (sent, got)
                self._check(before, *_TOKEN.unpack(heard))
            except (MPI.Exception, LostRankError, MismatchError, TimeoutError) as failure:
                error = self._named(failure, before)
        if error is not None:
            raise error

    def _partners(self) -> Iterator[tuple[int, int]]:
        size, distance = len(self._members), 1
        while distance < size:
            yield self._members[(self._me + distance) % size], self._members[(self._me - distance) % size]
            distance *= 2

    def _tag(self, when: str) -> int:
        return _FIRST_TAG + crc32(f"{self._name} {when}".encode()) % (last_tag() - 2 * _FIRST_TAG)

    def _check(self, source: int, theirs: int, is_well: int) -> None:
        if theirs != self._digest:
            raise MismatchError(
                f"MPI rank {source} makes another group as {self._name} than this rank, whose group is the MPI ranks"
                f" {self._members}: give all members the same handles"
            )
        if not is_well:
            raise LostRankError(
                f"MPI rank {source} could not make the group {self._name}: a member has failed"
            )

    def _named(self, failure: BaseException, source: int) -> BaseException:
        if isinstance(failure, MPI.Exception) and is_dead_peer(failure):
            return LostRankError(
                f"MPI rank {source} has died, or the rank to which this one reports, while the group {self._name} of"
                f" the MPI ranks {self._members} was made: make one without it"
            )
        if isinstance(failure, TimeoutError):
            return TimeoutError(f"MPI rank {source} has not come to the group {self._name} in time")
        return failure

    # ---- by MPI

    def _create(self, end_s: float) -> Comms:
        made: list[Comms | BaseException] = []

        def create() -> None:
            try:
                group = self._world.group.Incl(self._members)
                whole = MPI.Intracomm.Create_from_group(
                    group, f"mpi4py:{self._name}", MPI.INFO_NULL, MPI.ERRORS_RETURN
                )
                # Open MPI 5.0 loses `Revoke` of a communicator made from a group whose ranks have made unequal numbers
                # of communicators before; that of its duplicate arrives.
                made.append((whole.Dup(), whole.Dup()))
            except BaseException as error:
                made.append(error)

        thread = background.start("regroup", create)
        given_up_s = end_s
        thread.join(_LOOK_EVERY_S)
        while thread.is_alive() and time.monotonic() < given_up_s:
            if self._gone() and given_up_s == end_s:  # it may have done its part before
                given_up_s = min(end_s, time.monotonic() + _GRACE_S)
            thread.join(_LOOK_EVERY_S)
        failure = made[0] if made and isinstance(made[0], BaseException) else None
        if failure is not None:  # the launcher may tell of a death by an error of any class
            given_up_s = min(end_s, time.monotonic() + _GRACE_S)
            while not self._gone() and time.monotonic() < given_up_s:
                time.sleep(_LOOK_EVERY_S)
        if (failure is not None or not made) and (gone := self._gone()):
            raise LostRankError(
                f"MPI rank {gone[0]} has died while the group {self._name} was made: make one without it"
            ) from failure
        if not made:
            raise TimeoutError(
                f"MPI has not made the group {self._name} of the MPI ranks {self._members} in time"
            )
        if isinstance(made[0], BaseException):
            raise made[0]
        return made[0]

    def _gone(self) -> list[int]:
        return [rank for rank in self._members if processes.is_gone(self._identities[rank])]
