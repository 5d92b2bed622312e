"""The collectives of one group that wait for other ranks, and what the ranks compare before one of them runs.

Invariants: no rank touches another's memory before all ranks have asked for the same operation. A rank that arrives
at a collective adds three numbers to a small nonblocking Allreduce, which is polled like everything else:

    digest     a hash of the call (operation, dtype, number of elements, root ...): all are equal iff sum = n x own
    balance    for exchanges of unequal parts, the hashes of what it sends minus those of what it expects: sum = 0
    busy       1 if it has collectives of another group pending too, or cannot do this one in one blocking call

Sums in two's complement are exact, so every rank draws the same conclusion: a difference is an exception on all of
them before anything was sent (Open MPI 5.0.11 crashes on a long message that does not fit its receive). The ranks of a
group on one node post the same three numbers on a board instead (`board.py`), and with them what a small collective
needs of each: it is done by then.

The collectives of one group run one after another in order of submission, which MPI demands to be the same on all
ranks. Different groups are independent. A collective may block inside MPI (`may_block`) only where no rank was busy
with another group: if ranks ever waited for each other in a circle of blocking calls, each of them would have
collectives pending in two groups, so its second arrival would have said busy, and one call of the circle would not
have been allowed to block.
"""

import functools
import hashlib
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

import numpy as np

from mpitrain.errors import MismatchError, MpitrainError
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.board import GAVE_UP, Board
from mpitrain.mpi.operation import Op

AGREEMENT_S = 30.0  # for ranks that differ to say what they call: one may have died since, or may be none
_unanswered: list[Any] = []
LEFT_GROUP = "no collective: it has left the group"
Task = Generator[
    Iterable[Op], None, Any
]  # yields the Ops it waits for and is resumed when all of them are done


@functools.lru_cache(maxsize=4096)
def digest(text: str) -> int:
    """A 64-bit hash of `text`, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Announcement:
    """What a rank adds to the sum of arrivals at a collective, for calls that are all alike and follow one another:
    kept, because making it costs as much as a small collective. `agreed` is the sum where all `size` ranks call the
    same and none is busy."""

    __slots__ = ("agreed", "own", "sums", "what")

    def __init__(self, what: str, size: int):
        self.what = what
        self.own = array("Q", (digest(what), 0, 0))
        self.sums = array("Q", (0, 0, 0))
        self.agreed = array("Q", (self.own[0] * size % 2**64, 0, 0))


class PendingCollective:
    """One collective in a queue. `function(may_block)` runs when all ranks have arrived; it may return a Task. It may
    block where that of every rank `blocks` and none is busy. `deposit()`: what this rank leaves on the group's board,
    as the others do for the same call."""

    __slots__ = (
        "arrival",
        "deposit",
        "digest",
        "failure",
        "function",
        "is_posted",
        "op",
        "own",
        "sums",
        "what",
    )

    def __init__(
        self, op: Op, function: Callable[[bool], Any], what: str, balance: int, blocks: bool = True,
        deposit: Callable[[], None] | None = None,
    ):  # fmt: skip
        self.op, self.function, self.what, self.deposit = op, function, what, deposit
        self.is_posted = False  # on a board
        self.failure: Exception | None = None  # of this rank's deposit there
        self.digest = digest(what)
        self.own = array(
            "Q", (self.digest, balance % 2**64, not blocks)
        )  # numpy's would cost a microsecond more
        self.sums = array("Q", (0, 0, 0))
        self.arrival: Op | None = None

    @classmethod
    def announced(cls, op: Op, function: Callable[[bool], Any], made: Announcement) -> "PendingCollective":
        """One whose arrival has begun with the memory of `made`, which is its own from here on."""
        collective = cls(op, function, made.what, 0)
        collective.own, collective.sums = made.own, made.sums
        return collective

    def say_busy(self, busy: bool) -> None:
        """Whether this rank has collectives of another group pending as it arrives."""
        self.own[2] |= busy

    def make_arrival(self, control_comm: "MPI.Comm") -> Op:
        """The Op of this rank's arrival, which `start_arrival` begins."""
        # not this object itself: in a circle, tensors would live until the garbage collector comes
        self.arrival = Op("arrival", buffer=(self.own, self.sums), passive=True)
        self.arrival.comm = control_comm
        return self.arrival

    def start_arrival(self) -> "MPI.Request":
        """Tell the other ranks; done when all of them have."""
        assert self.arrival is not None
        request: MPI.Request = self.arrival.comm.Iallreduce(self.own, self.sums, MPI.SUM)
        return request

    @property
    def arrived(self) -> bool:
        """True when every rank has arrived at this collective."""
        return self.arrival is None or self.arrival.done

    def check(self, control_comm: "MPI.Comm", board: Board | None = None) -> bool:
        """True if this collective may block; raises MismatchError, on every rank, if the ranks do not agree."""
        if self.failure is not None:
            raise self.failure
        if board is not None:
            self.sums = array("Q", board.sums())
        elif self.arrival is None:
            return True
        elif self.arrival.error is not None:
            raise self.arrival.error
        if self.sums[2] >= GAVE_UP if board is not None else control_comm.Iprobe(MPI.ANY_SOURCE, last_tag()):
            raise PeersTimedOutError(
                f"{self.what}: other ranks have waited for this one until their timeout and given up"
            )
        if board is not None and (failed := board.failed()):
            raise PeerFailedError(
                f"{self.what}: rank{'s' * (len(failed) > 1)} {_some(failed)} of this group failed to leave what the "
                "others need; the error there says why"
            )
        digests, balance, busy = self.sums
        if digests != self.digest * control_comm.size % 2**64 or balance:
            raise MismatchError(_describe_mismatch(control_comm, self.what))
        return not busy


class PeerFailedError(MpitrainError):
    """Another rank of the group could not take part in a collective, in which nothing has been done."""


class PeersTimedOutError(TimeoutError):
    """Other ranks of the group have timed out in a collective at which this rank arrived too late."""


@functools.cache
def last_tag() -> int:
    """The largest tag of this MPI, reserved for the message that a rank has timed out."""
    largest = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    return largest if isinstance(largest, int) else 32767  # what every MPI allows


class CollectiveQueue:
    """The collectives of one group that were submitted and are not done."""

    def __init__(self, control_comm: "MPI.Comm"):
        self.control_comm = control_comm
        self.board: Board | None = None
        self.pending: deque[PendingCollective] = deque()
        self.running: PendingCollective | None = None
        self.broken: BaseException | None = None  # after a timeout the ranks may disagree on who is where

    def __len__(self) -> int:
        return len(self.pending) + (self.running is not None)

    def arrive(self) -> bool:
        """Whether the first one that waits may run; on the board this rank arrives at it when those before it are
        done."""
        if self.running is not None or not self.pending:
            return False
        head = self.pending[0]
        if self.board is None:
            return head.arrived
        if not head.is_posted:
            head.is_posted = True
            try:
                self.board.post(head.own, head.deposit)
            except Exception as error:  # it is that collective's alone
                head.failure = error
        return self.board.is_complete()

    @property
    def has_news(self) -> bool:
        """Whether the thread that owns MPI has something to do for it that no peer rings for again."""
        if self.board is None or self.running is not None or not self.pending:
            return False
        return not self.pending[0].is_posted or self.board.is_complete()

    def unfinished(self) -> list[PendingCollective]:
        """The one that runs, if there is one, and those behind it."""
        return [*([self.running] if self.running else []), *self.pending]

    def announce_timeout(self) -> list["MPI.Request"]:
        """Inform the others that this rank takes part in no further collective: one that arrived late would wait for
        ever."""
        if self.board is not None:
            self.board.give_up()
            return []
        comm = self.control_comm
        return [comm.Isend(b"", rank, last_tag()) for rank in range(comm.size) if rank != comm.rank]


def _describe_mismatch(control_comm: "MPI.Comm", what: str) -> str:
    """Collective, after a mismatch that every rank has seen: which ranks called what."""
    own = np.zeros(200, dtype=np.uint8)
    text = np.frombuffer(what.encode()[: own.size], dtype=np.uint8)
    own[: text.size] = text
    every = np.empty((control_comm.size, own.size), dtype=np.uint8)
    request = control_comm.Iallgather([own, MPI.UINT8_T], [every, MPI.UINT8_T])
    deadline_s = time.monotonic() + AGREEMENT_S
    while not request.Test():
        if time.monotonic() > deadline_s:
            _unanswered.append((request, own, every))  # MPI may write there as long as the process lives
            return (
                f"the ranks of this group call different collectives: this one {what}, and within {AGREEMENT_S:g} s "
                "not all of the others have said what they call"
            )
        time.sleep(0.001)
    calls: dict[str, list[int]] = {}
    for rank, row in enumerate(every):
        calls.setdefault(row.tobytes().rstrip(b"\0").decode(errors="replace"), []).append(rank)
    if len(calls) == 1:
        return f"the ranks of this group call {what}, but what they send is not what the others expect to receive"
    parts = [f"rank{'s' * (len(ranks) > 1)} {_some(ranks)}: {text}" for text, ranks in calls.items()]
    return f"the ranks of this group call different collectives: {'; '.join(parts)}"


def _some(ranks: list[int], limit: int = 8) -> str:
    named = ", ".join(map(str, ranks[:limit]))
    return named + (f" and {len(ranks) - limit} more" if len(ranks) > limit else "")


def failing(task: Task, error: BaseException) -> Task:
    """A task that continues `task` by raising `error` in it."""
    waited = task.throw(error)
    while True:
        yield waited
        waited = task.send(None)
