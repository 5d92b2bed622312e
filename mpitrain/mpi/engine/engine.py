"""The progress engine: post nonblocking operations, poll everything outstanding, notify the threads that wait.

Invariants: MPI is called by one thread at a time, the one that owns it (`ownership.py`). Inline, that is the thread
that calls `poll` and `wait` (the main thread of a server or worker). After `start_thread()` a daemon communication
thread drives what is outstanding while other threads compute; a thread that waits drives MPI itself until what it
waits for is done, because handing every small collective to another thread and back costs five times the collective.
Everything that is posted returns an Op at once, from any thread; what MPI has to do for it is queued to the thread
that drives. A collective that its caller waits for begins in the caller's thread where nothing else is outstanding,
and ends there if the other ranks are about to arrive; short messages begin there, too (`wakeup.py`). A process has one
engine (`Runtime.engine`), which world and process group share: the threads of two would be inside MPI at once.

The engine never blocks in one operation while others are outstanding: a pipeline posts its receive before the
matching send on both sides, so an engine that finished one operation before the next would deadlock. Blocking
collectives run only when every rank has arrived (`collective`): the arrival is a small nonblocking Allreduce, polled
like everything else, so a rank that waits for slower ones still moves its other messages and leaves the core to its
own backward pass.

Nothing hangs after an error: the operation that failed completes with `.error` set, and `wait` raises it; if the
engine itself breaks (an exception in a callback), everything outstanding and posted later fails with that error.

A receive buffer must be as long as its message: a longer one raises ERR_TRUNCATE when it is small, but crashes Open MPI
5.0.11 when it is long, so the length is sent ahead, or fixed.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.at_once import AtOnce
from mpitrain.mpi.engine.backoff import Backoff
from mpitrain.mpi.engine.board_steps import BoardSteps
from mpitrain.mpi.engine.collective_queue import PendingCollective
from mpitrain.mpi.engine.doorbell import NodePeers
from mpitrain.mpi.engine.forks import refuse_children_of
from mpitrain.mpi.engine.ownership import Ownership, Turn, left_s
from mpitrain.mpi.engine.requests import Progress, withdraw
from mpitrain.mpi.engine.resting import CHECK_AGAIN_S, Rests, Sleepers
from mpitrain.mpi.failed_ranks import FailedRanks
from mpitrain.mpi.operation import Op, message_of
from mpitrain.system import awake, background


class Engine:
    """Drives the nonblocking operations of one process over communicator `comm`. `ulfm`: the launch has ULFM, and an
    operation that waits for a dead rank fails (`failed_ranks.py`). `tolerant`: the job may go on without ranks that
    die, so every receive names its rank."""

    def __init__(self, comm: "MPI.Comm", ulfm: bool = False, tolerant: bool = False):
        self.comm, self.tolerant = comm, tolerant or ulfm
        self.listens_to_each = self.tolerant  # worlds post a receive for each peer, not one for all of them
        self.on_wait: Callable[[], None] = lambda: None  # called again and again while a thread waits
        self._backoff = Backoff()
        self._rests = Rests(self._backoff)
        self._begin(FailedRanks() if ulfm else None)
        self._stopping = False
        self.waited_s = 0.0  # seconds for which threads that compute have waited for other ranks
        self.who = "" if comm.size == 1 else f"rank {comm.rank} of {comm.size}"
        refuse_children_of(self)

    def _begin(self, deaths: FailedRanks | None) -> None:
        self._sleepers = Sleepers()
        self._progress = Progress(self._sleepers.wake, deaths)
        self._commands: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._mpi = Ownership()  # once there is a communication thread
        self._driving = threading.Lock()  # held by the one waiting thread that drives MPI
        turn = Turn(self._mpi, self._driving, self._commands)
        self.boards = BoardSteps(self._progress, self._rests, turn, self)
        self.at_once = AtOnce(self._progress, self._rests, turn, self, self._sleepers.wake)
        self._broken: BaseException | None = None

    def refuse(self, error: Exception) -> None:
        """In a forked child: whatever is posted fails with `error`, and what is under way is the parent's."""
        self._of_parent = self._progress  # kept: to free its requests would be a call of MPI
        self._begin(None)
        self._broken = error
        Progress.threaded = None

    def use_bell(self, peers: NodePeers, shares_cores: bool) -> None:
        """From here on ranks of this node ring each other for messages on `comm`. `shares_cores`: see `Rests.use`."""
        self._rests.use(peers.bell, shares_cores, may_die=self.tolerant)
        self._progress.ring_for([self.comm], peers)

    # ---- posting

    def isend(
        self, buffer: Any, dest: int, tag: int, comm: "MPI.Comm | None" = None, timeout_s: float | None = None
    ) -> Op:
        """Send `buffer` (a tensor, or anything mpi4py takes as a message) to rank `dest` of `comm`."""
        op = Op("send", message_of(buffer), dest, tag)
        op.comm = target = self.comm if comm is None else comm
        return self.post(op, target.Isend, (op.buffer, dest, tag), timeout_s)

    def irecv(
        self, buffer: Any, source: int, tag: int, comm: "MPI.Comm | None" = None, passive: bool = False,
        timeout_s: float | None = None,
    ) -> Op:  # fmt: skip
        """Receive into `buffer` from rank `source`, or, unless the job may go on without ranks that die, from whichever
        sends first. `passive`: the message may never come, so no thread stays awake for it."""
        if source == MPI.ANY_SOURCE and self.tolerant:
            raise ValueError(
                "receive from each rank by its number: under ANY_SOURCE a dead peer cannot be recognised"
            )
        op = Op("receive", message_of(buffer), source, tag, passive)
        op.comm = target = self.comm if comm is None else comm
        return self.post(op, target.Irecv, (op.buffer, source, tag), timeout_s)

    def call(self, function: Callable[[], Any], short: bool = False) -> Op:
        """Run `function()` in the thread that owns MPI, in order of submission; inline at once. `short`: see `post`."""
        op = Op("call")
        return self._submit(op, lambda: self._progress.run(op, function), short=short)

    def collective(self, function: Callable[[], Any], control_comm: "MPI.Comm") -> Op:
        """Run the blocking collective `function()` once every rank of `control_comm` has arrived.

        `control_comm` is a communicator over the same ranks that carries nothing but these arrivals. All its ranks must
        submit their collectives in the same order, as MPI demands anyway.
        """
        return self.submit_collective(lambda may_block: function(), control_comm)

    def submit_collective(
        self, function: Callable[[bool], Any], control_comm: "MPI.Comm", what: str = "", balance: int = 0,
        timeout_s: float | None = None, quiet: bool = False, blocks: bool = True,
        deposit: Callable[[], None] | None = None, short: bool = False,
    ) -> Op:  # fmt: skip
        """`collective` with everything that `collective_queue.py` offers: `function(may_block)` may block in MPI only
        if `may_block`, which no rank's may unless it `blocks` on all, and may return a Task that yields the Ops it
        waits for. The Op fails with a MismatchError where `what` or `balance` does not fit those of the other ranks.
        `quiet`: the caller waits for the Op next. `deposit`: see `PendingCollective`; where that is `short`, it begins
        in this thread where that may be."""
        op = Op("collective")
        op.what = what
        collective = PendingCollective(op, function, what, balance, blocks, deposit)
        if quiet and self.at_once.begin(collective, control_comm, timeout_s):
            return op
        return self._submit(
            op,
            lambda: self._progress.submit_collective(collective, control_comm, timeout_s),
            quiet,
            short=short and self._rests.has_boards,
        )

    def post(
        self,
        op: Op,
        start: Callable[..., "MPI.Request"],
        arguments: Sequence[Any] = (),
        timeout_s: float | None = None,
        short: bool = False,
    ) -> Op:
        """Post what `start(*arguments)` begins as `op`, which the caller has made. `short`: as a rule somebody waits
        for it before it has to be driven, so it begins in this thread where that may be; it may be done then."""
        if self._thread is None and self._broken is None:
            self._backoff.traffic()
            return self._progress.post(op, start, arguments, timeout_s)
        if not short or not self._may_begin():
            return self._submit(op, lambda: self._progress.post(op, start, arguments, timeout_s))
        try:
            self._progress.post(op, start, arguments, timeout_s, looks=True)
        except Exception as error:
            self.fail(error)
        if op.done:  # nothing is left to be driven that was not before
            self._mpi.release()
        else:
            self.give(short=True)
        return op

    def nonblocking(self, start: Callable[[], "MPI.Request"], buffer: Any, comm: "MPI.Comm") -> Op:
        """Post the nonblocking collective of `comm` that `start()` begins; `buffer` is kept alive until it is done."""
        (op := Op("operation", buffer)).comm = comm
        return self.post(op, start)

    def forget(self, comms: Sequence["MPI.Comm"], error: BaseException | None = None) -> None:
        """Drop the queues of communicators that are used no more; what is outstanding there fails with `error`."""
        self._progress.forget(comms, error)

    def acknowledge(self, op: Op) -> None:
        """In a callback of a receive that was not to say it itself: its sender learns that the message has come."""
        self._progress.acknowledge(op)

    def cancel(self, op: Op) -> None:
        """Withdraw a receive that nothing has matched: it completes with `cancelled` set and a CancelledError."""
        self._command(lambda: withdraw(op))

    def make_passive(self, peer: int) -> None:
        """Test what is outstanding with rank `peer` as seldom as a passive receive, because it may never be done."""
        self._command(lambda: self._progress.make_passive(peer))

    # ---- waiting

    def wait(self, *ops: Op, timeout_s: float | None = None) -> None:
        """Return when all `ops` are done; raise the error of the first that fails, or TimeoutError naming the rest."""
        try:
            self.wait_any(lambda: any(op.error for op in ops) or all(op.done for op in ops), timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {', '.join(repr(op) for op in ops if not op.done)}") from None
        for op in ops:
            if op.error is not None:
                raise op.error

    def wait_any(self, predicate: Callable[[], Any], timeout_s: float | None = None) -> None:
        """Return when `predicate()` holds; inline it is called after every poll, else whenever something completes."""
        deadline_s = None if timeout_s is None else awake.now_s() + timeout_s
        if self.owns_mpi:
            while not predicate():
                if not self._poll():
                    self._rests.pause(self._progress, self._has_work, lambda: self._check(deadline_s))
            return
        began_s = time.monotonic()
        while not predicate():
            if self._driving.acquire(blocking=False):
                self._drive(predicate, deadline_s)
            else:
                self._sleepers.sleep(predicate, lambda: self._check(deadline_s))
        self.waited_s += time.monotonic() - began_s

    def _drive(self, predicate: Callable[[], Any], deadline_s: float | None) -> None:
        """Drive MPI until `predicate()` holds, then release `_driving`, which the caller holds."""
        try:
            while not (self._mpi.take(0) or self._mpi.take(left_s(deadline_s, CHECK_AGAIN_S))):
                if predicate():
                    return
                self._check(deadline_s)
            try:
                self._rests.want(0)
                while not predicate():
                    self._mpi.give_way()
                    if not self._step():
                        self._rests.drive_on(self._progress, self._has_work, lambda: self._check(deadline_s))
            finally:
                self._release()
        finally:
            self._driving.release()
            self._leave()  # another waiting thread may drive now

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait for the collectives under way and keep MPI for this thread meanwhile: a blocking call of its own would
        otherwise wait for ranks that wait for these. Nested ones, and all of them where no communication thread runs,
        do nothing. What is posted inside, by this thread, is driven by its own waits."""
        if self.owns_mpi:
            if self._broken is not None:
                raise self._broken
            yield
            return
        while not self._take():
            self.wait_any(lambda: not self._progress.has_collectives)
        try:
            yield
        finally:
            self.give()

    def _take(self) -> bool:
        """Own MPI in this thread; False, and it is given back, where a collective is under way."""
        self._mpi.claim(self._rests.driver.set)
        self._step()
        if self._broken is None and self._progress.has_collectives:
            self.give()
            return False
        return True

    @property
    def may_step(self) -> bool:
        """Whether there is a communication thread, which drives what is left, and nothing is broken."""
        return self._thread is not None and self._broken is None

    def give(self, short: bool = False) -> None:
        """Let other threads own MPI, and the communication thread drive what is outstanding; after a nap if `short`."""
        self._release()
        self._leave(short)

    def _leave(self, short: bool = False) -> None:
        self._rests.leave(self._progress, bool(self._commands), short)
        self._sleepers.wake()

    def _release(self) -> None:
        """Let another thread own MPI, after peers can see whether this process waits for them."""
        self._rests.want_for(self._progress)
        self._mpi.release()

    def run(self, function: Callable[[], Any], control_comm: "MPI.Comm | None" = None) -> Any:
        """`call`, or `collective` where a control communicator is given; waits and returns the function's result."""
        op = self.call(function) if control_comm is None else self.collective(function, control_comm)
        self.wait(op)
        return op.result

    # ---- polling

    @property
    def owns_mpi(self) -> bool:
        """True in the thread that may call MPI now: in any thread as long as no communication thread runs."""
        return self._thread is None or self._mpi.is_mine

    @property
    def arriving(self) -> bool:
        """Whether this rank waits at a collective at which other ranks have yet to arrive."""
        return self._progress.num_arriving > 0

    @property
    def outstanding(self) -> tuple[Op, ...]:
        """What has been posted and is not done."""
        return self._progress.outstanding()

    def poll(self) -> int:
        """Inline: test everything outstanding, complete what is finished, return how many that were."""
        assert self.owns_mpi, "the communication thread polls; other threads wait"
        return self._poll()

    def _poll(self) -> int:
        num_done = self._progress.poll()
        if num_done:
            self._backoff.traffic()
        return num_done

    def _check(self, deadline_s: float | None) -> float:
        """The seconds for which a thread that waits may sleep."""
        self.on_wait()
        if self._broken is not None:
            raise self._broken
        if deadline_s is None:
            return CHECK_AGAIN_S
        if (left := deadline_s - awake.now_s()) < 0:
            raise TimeoutError("the deadline passed while waiting for other ranks")
        return min(CHECK_AGAIN_S, left)

    # ---- the communication thread

    def start_thread(self) -> None:
        """Start a daemon thread that drives what no thread waits for. It sleeps while nothing is outstanding."""
        if self._thread is None:
            self._stopping, Progress.threaded = False, self._progress
            self._thread = background.start("communication", self._serve)

    def stop(self, timeout_s: float | None = None) -> None:
        """Withdraw passive receives, finish everything else, end the thread; the caller then owns MPI again.

        With a `timeout_s`, raises TimeoutError that names what other ranks have not answered by then.
        """
        thread = self._thread
        self._command(self._wind_up)
        if thread is None:
            with contextlib.suppress(TimeoutError):
                self.wait_any(lambda: not len(self._progress), timeout_s)
        else:
            thread.join(timeout_s)
        if len(self._progress):
            raise TimeoutError(f"no end within {timeout_s} s of {', '.join(map(repr, self.outstanding))}")
        if thread is not None:
            self._thread = Progress.threaded = None

    def abandon(self, error: BaseException) -> None:
        """Fail everything outstanding with `error` and end the thread: the communicators are lost. The caller then owns
        MPI again."""
        self._command(lambda: self._progress.fail_all(error))
        self.stop()

    def _wind_up(self) -> None:
        self._stopping = True
        for op in self.outstanding:
            if op.passive:
                withdraw(op)

    def _serve(self) -> None:
        while self._broken is None:
            self._rests.thread.nap(self._ends_nap)
            self._mpi.take()
            num_done = self._step()
            self._mpi.give_way()
            is_over = self._stopping and not self._commands and not len(self._progress)
            self._release()
            if is_over:
                return
            if not self._rests.park(self._driving.locked) and not num_done:
                self._rests.rest(self._rests.thread, self._progress, self._has_work)

    def _ends_nap(self) -> bool:
        is_left = (self._commands or not self._progress.is_idle) and not self._driving.locked()
        return self._rests.ends_nap(bool(is_left))

    def _step(self) -> int:
        """Run what other threads have queued and poll once; returns how much was done. A callback that fails breaks the
        engine: the threads that wait must get its error, or the job would hang."""
        try:
            return self._run_commands() + self._poll() if self._commands else self._poll()
        except Exception as error:
            self.fail(error)
            return 1

    def _has_work(self) -> bool:
        """A thread's last look before it sleeps. Only a poll shows that a message has come: this thread's where no
        other has MPI, else that of one that drives, which sets this thread's wakeup when it leaves."""
        if self._commands or self._progress.has_news:
            return True
        if not self._progress.has_rung:
            return False
        if self.owns_mpi:
            return (self.poll() if self._thread is None else self._step()) > 0
        if not self._mpi.take(0):
            return not self._driving.locked()  # who has it for a moment may leave without a word
        try:
            return self._step() > 0
        finally:
            self._release()

    def _run_commands(self) -> int:
        num_commands = 0
        while self._commands:
            try:
                command = self._commands.popleft()
            except IndexError:  # the engine is broken and another thread was faster
                break
            command()
            num_commands += 1
        return num_commands

    def fail(self, error: BaseException) -> None:
        """Nothing is carried out from here on: what is outstanding, and whatever is posted, fails with `error`."""
        self._broken = error
        self._progress.fail_all(error)
        self._run_commands()

    # ---- handing over to the thread that owns MPI

    def _submit(self, op: Op, start: Callable[[], Any], quiet: bool = False, short: bool = False) -> Op:
        if short and self._begin_here(start):
            return op

        def command() -> None:
            if self._broken is None:
                self._backoff.traffic()
                start()
            else:
                self._progress.complete(op, self._broken)

        self._command(command, quiet)
        return op

    def _begin_here(self, start: Callable[[], Any]) -> bool:
        """Call `start()` where this thread `_may_begin`."""
        if not self._may_begin():
            return False
        try:
            start()
        except Exception as error:
            self.fail(error)
        self.give(short=True)
        return True

    def _may_begin(self) -> bool:
        """Own MPI in this thread, where no other has it, nor has anything queued for it."""
        if self._thread is None or self._driving.locked() or not self._mpi.take(0):
            return False
        if self._commands or self._broken is not None:
            self.give()
            return False
        self._backoff.traffic()
        return True

    def _command(self, command: Callable[[], None], quiet: bool = False) -> None:
        """Run it here or queue it. `quiet`: this thread is about to wait, so it need not wake another one."""
        if self.owns_mpi:
            command()
            return
        self._commands.append(command)
        if self._broken is not None:  # no thread runs the queue any more: fail what is in it here
            self._run_commands()
        elif self._driving.locked():
            self._rests.driver.set()
        if not quiet:
            self._rests.thread.set()
