"""THE progress engine: post nonblocking operations, poll everything outstanding, tell whoever waits.

The law of this file: **MPI is called by one thread at a time**, the one that holds `_lock` (thread level SERIALIZED).
Inline, that is the thread that calls `poll` and `wait` (a server's or worker's main thread). After `start_thread()` a
daemon communication thread drives what is outstanding while everybody computes; whoever waits takes the wheel from it
until what it waits for is done, because handing every small collective to another thread and back costs five times
the collective (2 ranks, 1 KB: 250 us against 40). What other threads post is queued to whoever drives. World and
process group share this class, and a process has one engine (`Runtime.engine`).

It never blocks in one operation while others are outstanding: a pipeline posts its receive before the
matching send on both sides, so a queue that finishes one operation before the next would deadlock. Blocking
collectives run only when every rank has arrived (`collective`): arrival is a nonblocking zero-byte barrier,
polled like everything else, so a rank that waits for slower ones still moves its other messages and leaves
the core to its own backward pass.

Nothing hangs after an error: the operation that failed completes with `.error` set, and `wait` raises it;
if the engine itself breaks (an exception in a callback on the communication thread), everything outstanding
and everything posted later fails with that error.

A receive buffer must be at least as long as its message. A message that is too long raises ERR_TRUNCATE
when it is small, but Open MPI 5.0.11 crashes on a long one: send the length ahead, or use fixed lengths.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.backoff import Backoff, give_way
from mpitrain.mpi.engine.posting import Posting, withdraw
from mpitrain.mpi.engine.requests import Progress
from mpitrain.mpi.engine.wakeup import Bell
from mpitrain.mpi.failed_ranks import Graves
from mpitrain.mpi.operation import Op

_LOOK_AGAIN_S = 0.5  # how long a thread sleeps at most without asking whether it still has to


class Engine(Posting):
    """Drives the nonblocking operations of one process over communicator `comm` (see the module's law). `tolerant`: the
    launch has ULFM, and what waits for a dead rank fails (`graves.py`)."""

    def __init__(self, comm: "MPI.Comm", tolerant: bool = False):
        self.comm = comm
        self.on_wait: Callable[[], None] = lambda: None  # called again and again while somebody waits
        self._progress = Progress(self._notify, Graves() if tolerant else None)
        self._backoff = Backoff()
        self._commands: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # held while MPI is called, once there is a communication thread
        self._owner = 0  # the thread that holds it
        self._wheel = threading.Lock()  # held by the one waiting thread that drives
        self._bell = Bell()  # wakes the communication thread
        self._driver_bell = Bell()
        self._stopping = False
        self._finished = threading.Condition()
        self._num_asleep = 0  # threads that wait for another one's driving; changed under `_finished`
        self._broken: BaseException | None = None
        self.waited_s = 0.0  # in which a thread that computes has waited for other ranks

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
        """Return when `predicate()` holds; inline it is asked after every poll, else whenever something completes."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        if self.owns_mpi:
            while not predicate():
                if not self.poll():
                    self.on_wait()
                    self._check(deadline_s)
                    self._backoff.pause(self._progress.num_awake > 0, self._progress.num_arriving > 0)
            return
        began_s = time.monotonic()
        while not predicate():
            self.on_wait()
            if self._wheel.acquire(blocking=False):
                self._drive(predicate, deadline_s)
            else:
                self._sleep(predicate, deadline_s)
        self.waited_s += time.monotonic() - began_s

    def _sleep(self, predicate: Callable[[], Any], deadline_s: float | None) -> None:
        """Until something completes. Who completes looks for sleepers afterwards, who goes to sleep looks at the
        predicate afterwards, so none is missed."""
        with self._finished:
            self._num_asleep += 1
            try:
                if not predicate():
                    self._check(deadline_s)
                    self._finished.wait(_left_s(deadline_s, _LOOK_AGAIN_S))
            finally:
                self._num_asleep -= 1

    def _drive(self, predicate: Callable[[], Any], deadline_s: float | None) -> None:
        """Take the wheel until `predicate()` holds, then give it back; the caller holds `_wheel`."""
        try:
            while not self._lock.acquire(timeout=_left_s(deadline_s, _LOOK_AGAIN_S)):
                if predicate():
                    return
                self._check(deadline_s)
            self._owner = threading.get_ident()
            try:
                while not predicate():
                    if not self._step():
                        self.on_wait()
                        self._check(deadline_s)
                        self._rest(self._driver_bell)
            finally:
                self._owner = 0
                self._lock.release()
        finally:
            self._wheel.release()
            if self._commands or not self._progress.is_idle:
                self._bell.ring()
            self._notify()  # another waiting thread may take the wheel now

    def run(self, function: Callable[[], Any], gate: "MPI.Comm | None" = None) -> Any:
        """`call`, or `collective` where a gate is given; waits and returns the function's result."""
        op = self.call(function) if gate is None else self.collective(function, gate)
        self.wait(op)
        return op.result

    # ---- polling

    @property
    def owns_mpi(self) -> bool:
        """True in the thread that may call MPI now: anybody's as long as no communication thread runs."""
        return self._thread is None or self._owner == threading.get_ident()

    @property
    def arriving(self) -> bool:
        """Whether this rank is at a collective to which others have yet to come."""
        return self._progress.num_arriving > 0

    @property
    def outstanding(self) -> tuple[Op, ...]:
        """What has been posted and is not done."""
        return self._progress.outstanding()

    def poll(self) -> int:
        """Inline: test everything outstanding, complete what is finished, return how many that were."""
        assert self.owns_mpi, "the communication thread polls; other threads wait"
        num_done = self._progress.poll()
        if num_done:
            self._backoff.traffic()
        return num_done

    def _check(self, deadline_s: float | None) -> None:
        if self._broken is not None:
            raise self._broken
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise TimeoutError("the deadline passed while waiting for other ranks")

    # ---- the communication thread

    def start_thread(self) -> None:
        """From now on a daemon thread drives what nobody waits for. It sleeps while nothing is outstanding.

        Raises UsageError if this MPI was started without leave to be called from a second thread.
        """
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise UsageError(
                "this MPI allows calls from the main thread only; set MPI4PY_RC_THREAD_LEVEL=serialized"
            )
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._serve, name="mpitrain-communication", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float | None = None) -> None:
        """Withdraw passive receives, finish everything else, end the thread; the caller then owns MPI again.

        With a `timeout_s`, raises TimeoutError naming what other ranks have not answered by then.
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
        self._thread = None

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
            with self._lock:
                self._owner = threading.get_ident()
                num_done = self._step()
                self._owner = 0
                if self._stopping and not self._commands and not len(self._progress):
                    return
            if self._wheel.locked():  # somebody waits and drives; the bell rings when the wheel is free again
                self._bell.wait(_LOOK_AGAIN_S)
            elif not num_done:
                self._rest(self._bell)

    def _step(self) -> int:
        """Run what other threads have queued and poll once; returns how much was done. A callback that fails breaks the
        engine: whoever waits must hear of it, or the job would hang."""
        try:
            return self._obey() + self.poll()
        except Exception as error:
            self._break(error)
            return 1

    def _obey(self) -> int:
        num_commands = 0
        while self._commands:
            try:
                command = self._commands.popleft()
            except IndexError:  # the engine is broken and another thread was faster
                break
            command()
            num_commands += 1
        return num_commands

    def _rest(self, bell: Bell) -> None:
        """Sleep for as long as the pause law allows; `bell` ends the nap."""
        nap_s: float | None = None
        if len(self._progress):
            nap_s = 0.0 if self._progress.num_awake else self._backoff.nap_s(self._progress.num_arriving > 0)
        if nap_s == 0.0:
            if not self._backoff.spin():
                give_way()
            return
        bell.wait(nap_s if bell is self._bell else nap_s or _LOOK_AGAIN_S)

    def _break(self, error: BaseException) -> None:
        self._broken = error
        self._progress.fail_all(error)
        self._obey()

    # ---- handing over to the thread that owns MPI

    def _submit(self, op: Op, start: Callable[[], Any], quiet: bool = False) -> Op:
        def command() -> None:
            if self._broken is None:
                self._backoff.traffic()
                start()
            else:
                self._progress.complete(op, self._broken)

        self._command(command, quiet)
        return op

    def _command(self, command: Callable[[], None], quiet: bool = False) -> None:
        """Run it here or queue it. `quiet`: this thread is about to wait, so it need not wake another to obey."""
        if self.owns_mpi:
            command()
            return
        self._commands.append(command)
        if self._broken is not None:  # nobody serves the queue any more: fail what lies there ourselves
            self._obey()
        elif self._wheel.locked():
            self._driver_bell.ring()
        if not quiet:
            self._bell.ring()

    def _notify(self) -> None:
        if self._num_asleep:
            with self._finished:
                self._finished.notify_all()


def _left_s(deadline_s: float | None, at_most_s: float) -> float:
    """Seconds to wait for a lock at once, so that a deadline is seen."""
    return at_most_s if deadline_s is None else min(at_most_s, max(0.0, deadline_s - time.monotonic()))
