"""What a run knows of its ranks, whether they are processes over MPI or threads of one process: who this rank is, what
it is at, and what all ranks agree on.

Invariants: all ranks call the same collectives in the same order. How values get from rank to rank is a subclass's
affair; what is agreed on is decided here, so it comes out alike on every rank. As long as ranks agree, what one rank
sends for it is as long among ten thousand ranks as among two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mpitrain.errors import EXIT_USAGE, AgreedError
from mpitrain.system import awake
from mpitrain.system.launched.agreement_texts import (
    describe_error,
    difference_text,
    differences,
    digest_words,
    error_text,
    texts_of,
)
from mpitrain.system.saying import tell

WAITS_S = 1.0  # a rank counts as waiting for so long after it has last said so


class Ends(NamedTuple):
    """What a world makes of the end of a peer, and of its role's own.

    Args:
        may_die: peers whose death is a message (`Lost`), not an error.
        leave_s: how long to wait, in the end, for what was sent to leave; the rest is sent all the same.
        answer_late: makes what answers a peer that the role has given up, and that speaks after its end, until `close`.
    """

    may_die: Collection[int] = ()
    leave_s: float | None = None
    answer_late: Callable[[int, Any], Any] | None = None


class Ranks:
    """This rank among the others.

    Attributes:
        rank, size: its number, and how many there are; launched: the rank at launch of what is rank r now.
        nodes: the index of every rank's node; num_nodes, local_rank: this rank among those of its node.
        hosts, processes: of every rank, by name.
        role, run_dir: what this rank does, and where, for reports of errors.
        fault_tolerance: "ulfm", "heartbeat" or "none".
        may_die_alone: the others go on without this rank; survives_shrink: without any rank that dies now.
        num_threads: replicas, where ranks are threads of one process.
        evicted: ranks that are dead, or will never answer again; lost: at launch, and left behind since.
        allreduce_plan: what decides which algorithm carries an all-reduce.
        payloads: what looks at payloads that ranks exchange in collectives (`mpi/process_group/checksums.py`), if any
            does; set before a group is made.
    """

    allreduce_plan: Any
    payloads: Any = None

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.role = ""
        self.run_dir: Path | None = None
        self._step, self._stamp_s, self._waiting_s = -1, awake.now_s(), 0.0
        self.local_rank, self.num_nodes = 0, 1
        self.nodes: tuple[int, ...] = (0,) * size
        self.hosts, self.processes = [""] * size, [""] * size
        self.launched = list(range(size))
        self.num_threads: int | None = None
        self.fault_tolerance = "none"
        self.may_die_alone = self.survives_shrink = False
        self.evicted: set[int] = set()
        self.lost: set[int] = set()

    # ---- what this rank is at

    @property
    def step(self) -> int:
        """The step under way, for error messages; setting it reports progress."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self.stamp()

    def stamp(self) -> None:
        """Report progress."""
        self._stamp_s = awake.now_s()

    def stamp_waiting(self) -> None:
        """Report that this rank waits for others."""
        self._waiting_s = awake.now_s()

    @property
    def progress_s(self) -> float:
        """When this rank last reported progress, by the clock that stands while this process does."""
        return self._stamp_s

    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return awake.now_s() - self._stamp_s

    def stuck_s(self) -> float:
        """Seconds since the last progress or wait for others."""
        return awake.now_s() - max(self._stamp_s, self._waiting_s)

    @property
    def arriving(self) -> bool:
        """Whether this rank waits for others at this very moment."""
        raise NotImplementedError

    @property
    def waits(self) -> bool:
        """Whether this rank waits for others, or has just done so."""
        return self.arriving or awake.now_s() - self._waiting_s < WAITS_S

    def where(self) -> str:
        """ "rank 2 (worker, step 41)", as far as it is known."""
        known = [self.role] if self.role else []
        known += [f"step {self.step}"] if self.step >= 0 else []
        return f"rank {self.launched_rank}" + (f" ({', '.join(known)})" if known else "")

    @property
    def launched_rank(self) -> int:
        """The number of this rank at launch."""
        return self.launched[self.rank]

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank, and never was."""
        return self.size == 1 and not self.lost

    def forget_run(self) -> None:
        """A run has failed, and the process goes on: no later error is reported with it."""
        self.role, self.run_dir, self._step = "", None, -1

    def dead(self) -> set[int]:
        """Ranks that are known to have failed."""
        return set()

    # ---- collectives, of JSON values

    def barrier(self) -> None:
        """Return when every rank has arrived here."""
        raise NotImplementedError

    def broadcast(self, value: object, root: int = 0) -> Any:
        """The JSON value of `root` on every rank; the other ranks' argument is ignored."""
        raise NotImplementedError

    def gather(self, value: object) -> list[Any] | None:
        """The JSON values of all ranks in rank order, on rank 0; None elsewhere."""
        raise NotImplementedError

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """The bytes of all ranks in rank order, on rank 0; None elsewhere."""
        raise NotImplementedError

    def allgather(self, value: object) -> list[Any]:
        """The JSON values of all ranks in rank order, on every rank."""
        raise NotImplementedError

    def gather_living(self, value: object, wait_s: float = 10.0) -> dict[int, Any] | None:
        """The JSON values of all ranks that still answer, by rank, on rank 0; None elsewhere. An evicted rank is waited
        for `wait_s` at most."""
        raise NotImplementedError

    def broadcast_living(self, value: object) -> Any:
        """Rank 0's JSON value on every rank that still answers."""
        raise NotImplementedError

    def from_first_of_node(self, value: object) -> Any:
        """The JSON value of the first rank of this rank's node; the other ranks' argument is ignored."""
        raise NotImplementedError

    def largest(self, own: Sequence[int], what: str) -> list[int]:
        """Of each number below 2**64 the largest that a rank has brought, on every rank. `what`: this call, by name."""
        raise NotImplementedError

    def broadcast_tensors(self, tensors: Sequence[Any], root: int = 0) -> None:
        """All ranks take over the values that `root` has of these tensors."""
        raise NotImplementedError

    def agree(self, error: Exception | None) -> None:
        """Return if no rank brings an error; otherwise rank 0 prints each once and every rank raises AgreedError.

        All ranks then leave together, with the exit code of the lowest rank that failed.
        """
        if not self.largest([error is not None], "agree")[0]:
            return
        brought = self.gather(None if error is None else describe_error(error))
        self._leave_together(error_text(brought) if brought is not None else None)

    def compare(self, values: Mapping[str, object]) -> None:
        """Return if `values` (name -> JSON value) is the same on all ranks; otherwise all raise AgreedError (exit 2)
        after rank 0 has named each field that differs and which ranks hold which value."""
        words = digest_words(values)
        if self.largest(words, "compare") == words:
            return
        texts = texts_of(values)
        first: dict[str, str] = self.broadcast(texts)
        brought = self.gather(differences(first, texts))
        self._leave_together((difference_text(first, brought), EXIT_USAGE) if brought is not None else None)

    def _leave_together(self, told: tuple[str, int] | None) -> NoReturn:
        """Collective: every rank raises AgreedError with the text and the exit code that rank 0 brings."""
        text, code = self.broadcast(told)
        if self.rank == 0:
            tell(text)
        raise AgreedError(text, code)

    # ---- what carries roles

    def make_world(
        self, peers: Sequence[int], buffer_for: Callable[[int, Any], Any], **options: object
    ) -> Any:
        """What runs this rank's role among `peers`; arguments and options are those of `mpi/world.py`."""
        raise NotImplementedError

    def sum_among(self, ranks: Sequence[int]) -> Any:
        """Collective over `ranks`: the sums that these take together, as in `mpi/workers_sum.py`."""
        raise NotImplementedError

    def building(self) -> AbstractContextManager[None]:
        """For as long as this rank makes its model: nobody else draws random numbers in this process."""
        return nullcontext()

    def built(self, module: Any) -> None:
        """This rank has made its model."""

    def fail(self, how: str, after_s: float = 0.0) -> None:
        """Fail as `--inject` orders, now or `after_s` from now."""
        raise NotImplementedError

    def end_job(self, error: BaseException) -> NoReturn:
        """Report `error` with rank, role and step, and end the whole job with its exit code."""
        raise NotImplementedError
