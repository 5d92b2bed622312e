"""The world in virtual time: a heap of (time, serial, what happens), one thread, any number of ranks.

Invariants: nothing here knows a strategy or a role; it answers effects. Ties are broken by the order in
which events were made, every random draw is keyed by (seed, worker, number of the draw) whatever rank the worker
has, so a run is a pure function of its inputs and the number of servers changes no worker's times. When the heap is
empty and a rank still waits, that is a deadlock and is reported with the names of those who wait. Gradients are
computed for real, at the moment the task starts. The design follows SimPy's environment (processes that
yield what they wait for).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from mpitrain.effects import (
    AllReduce,
    Begin,
    Break,
    Compute,
    Effect,
    Forget,
    Interrupted,
    Now,
    Recv,
    Role,
    Send,
    Sleep,
    drive,
)
from mpitrain.errors import DeadlockError, LostRankError, WireError
from mpitrain.messages import (
    Alive,
    Announced,
    Assist,
    Bundle,
    Lost,
    Measured,
    Message,
    Push,
    payload_bytes,
    payloads_of,
    release,
)
from mpitrain.system import interrupts
from mpitrain.system.trace import COMMUNICATION
from mpitrain.virtual.all_reduces import AllReduces
from mpitrain.virtual.compute import ComputeLaw, WorkerTimes
from mpitrain.virtual.deadlocks import MOST_NAMED, Waits, deadlock
from mpitrain.virtual.fair_sharing import Flows
from mpitrain.virtual.message_law import HEADER_BYTES
from mpitrain.virtual.network import Links, NetworkLaw
from mpitrain.virtual.outages import Outages
from mpitrain.virtual.process import Computed, FlowEnds, Process, TimeUp, Torn
from mpitrain.virtual.pushes_at_senders import PushesAtSenders
from mpitrain.virtual.rendezvous import Clear, Header, Rendezvous
from mpitrain.virtual.traces import VirtualTrace

AnswerLate = Callable[[int, Any], Role]
DEADLY = ("kill", "segv", "raise")  # the others of `--inject` fall silent
MOST_LOOKS = 100_000  # of those who wait, while nothing happens but that somebody is silent
_CHANGES_NOTHING = Alive | Assist | Measured  # of what a worker computes


class VirtualWorld:
    """Runs roles in virtual time.

    Args:
        compute: law of the time one gradient of the usual size takes; what else takes time says `charge`.
        network: law of the time a message takes.
        seed: key of every draw.
        may_die: ranks whose death is a message to the others (`Lost`), not an error.
        workers: ranks of the workers in order, where ranks are not their numbers.
        nodes: node of every rank, where the network law does not say it.
        hosts: ranks whose data stay in host memory, where others have a device.
        drive_computing: ranks that drive their messages while they compute, as those do that compute on a thread of its
            own; the messages of all others stand still meanwhile, where the network law has an eager limit.
    """

    def __init__(
        self,
        compute: ComputeLaw,
        network: NetworkLaw,
        seed: int = 0,
        may_die: Collection[int] = (),
        workers: Sequence[int] = (),
        nodes: Sequence[int] = (),
        hosts: Collection[int] = (),
        drive_computing: Collection[int] = (),
    ):
        self.compute, self.network, self.seed = compute, network, seed
        self.now_s = 0.0
        self.num_events = 0
        self.ended_s: dict[int, float] = {}  # by rank
        self.broken: dict[int, str] = {}  # by rank: how it failed, as `--inject` ordered
        self.traces: dict[int, VirtualTrace] = {}  # by rank, where what it does is recorded
        self.outages: Outages | None = None  # where the job is started again when it ends before its time
        self._may_die = frozenset(may_die)
        self._numbers = {rank: number for number, rank in enumerate(workers)}
        self._num_looks = 0  # deadlines since anything else has happened
        self._links = Links(nodes=nodes, hosts=hosts)
        self.charge: Callable[[int, Compute], float] = _free  # seconds of a rank's task besides the law's
        self.push_s = 0.0  # that a server takes with each push
        self._flows = Flows(network, self._links) if network.shares_fairly else None
        self._rendezvous: Rendezvous | None = None
        if network.eager_bytes:
            self._rendezvous = Rendezvous(self._begin, release, network.eager_bytes, HEADER_BYTES)
        self._drive_computing = frozenset(drive_computing)
        self._at_senders = PushesAtSenders()
        self._all_reduces: AllReduces | None = None
        self._heap: list[tuple[float, int, Any, Any]] = []
        self._serial = 0
        self._forgotten: set[int] = set()  # given up by somebody
        self.answer_late: dict[int, AnswerLate] = {}  # by rank, as `Ends` has it
        self._num_pending = 0  # events other than deadlines
        self._processes: dict[int, Process] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning, those included that the ends of the job have cost."""
        return self.now_s if self.outages is None else self.outages.elapsed_s(self.now_s)

    def run(self, roles: dict[int, Role], all_reduces: AllReduces | None = None) -> dict[int, Any]:
        """Run every role to its end; returns what each returned, by rank. `all_reduces`: those of the ranks whose
        roles have some.

        Raises:
            DeadlockError: somebody waits for a message that nobody will send.
        """
        self._all_reduces = all_reduces
        self._processes = {rank: Process(rank, role) for rank, role in roles.items()}
        self._links.num_nodes = self._count_nodes()
        for process in self._processes.values():
            process.trace = self.traces.get(process.rank)
            self._schedule(self.now_s, process, None)
        heap, heappop = self._heap, heapq.heappop
        while heap:
            self.now_s, _, process, event = heappop(heap)
            self.num_events += 1
            if not self.num_events % 1024:
                interrupts.check()
            kind = type(event)
            if kind is TimeUp:
                self._num_looks += 1
            else:
                self._num_pending -= 1
                self._num_looks = 0
            if kind is FlowEnds:
                self._end_flows()
            elif process.rank in self.broken:
                _throw_away(event)
            elif kind is tuple:
                if self._rendezvous is None:
                    self._deliver(process, event)
                else:
                    self._arrive(self._rendezvous, process, event)
            elif kind is Computed:
                if not event.broken_off:
                    process.computing = None
                    if process.trace is not None:
                        process.trace.computed(event.took_s)
                    self._advance(process, event.result)
            elif kind is TimeUp:
                if process.waiting and process.num_waits == event.wait:
                    process.waiting = False
                    self._advance(process, None)
            elif kind is Break:
                self._break(process, event.how)
            elif self._rendezvous is not None and (kind is Header or kind is Clear):
                self._rendezvous.happens(event, self._drives(process))
            else:
                assert event is None, f"{event!r} is no event"
                self._advance(process, None)
        self.now_s = max(self.ended_s.values(), default=self.now_s)  # deadlines that nobody needed come later
        processes = self._processes.values()
        gone = self._forgotten | set(self.broken)
        waiting = [p.rank for p in processes if not p.finished and p.rank not in gone]
        if waiting:
            named = [self._waits(rank) for rank in waiting[:MOST_NAMED]]
            raise DeadlockError(deadlock(self.now_s, named, len(waiting)))
        return {rank: process.result for rank, process in self._processes.items()}

    def _count_nodes(self) -> int:
        """Of all ranks; 0 where the network knows none."""
        placed = self._links.nodes or self.network.nodes(1 + max(self._processes, default=0))
        return len(set(placed or ()))

    def _schedule(self, time_s: float, process: Process | None, event: object) -> None:
        self._serial += 1
        self._num_pending += type(event) is not TimeUp
        heapq.heappush(self._heap, (time_s, self._serial, process, event))

    def _break(self, process: Process, how: str) -> None:
        """The rank is no more, or does nothing any more; those who can do without one that is dead are informed. Where
        nobody can, and the job is started again, all goes on."""
        if process.finished:
            return
        if how in DEADLY and process.rank not in self._may_die and self.outages and self.outages.restart_s:
            self.outages.die(self.now_s)
            return
        self.broken[process.rank] = how
        process.result = {"rank": process.rank, "broken": how}
        for message in process.inbox:
            _throw_away(message)
        if self._rendezvous is not None:
            self._rendezvous.forget(process.rank)
        if self._all_reduces is not None:
            self._all_reduces.forget(process.rank)
        self._at_senders.forget(process.rank)
        if how not in DEADLY:
            return
        if process.rank not in self._may_die:
            raise LostRankError(
                f"rank {process.rank} died ({how}) at t={self.now_s:.3f} s, and nobody can go on"
            )
        for other in self._processes.values():
            if other.rank not in self._may_die and not other.finished:
                self._send(process.rank, Send(other.rank, Lost()))

    def _waits_for_silent(self) -> bool:
        """Whether somebody may yet be given up: then time passes although nothing is under way."""
        silent = [rank for rank, how in self.broken.items() if how not in DEADLY]
        return bool(silent) and self._num_looks < MOST_LOOKS

    def _arrive(self, rendezvous: Rendezvous, process: Process, message: tuple[int, object]) -> None:
        """A message is there as a whole; one that was sent behind another waits for that."""
        for one in rendezvous.arrived(process.rank, message, self._drives(process)):
            self._deliver(process, one)

    def _drives(self, process: Process) -> bool:
        """Whether a rank is in MPI now, or drives it from another thread."""
        if process.waiting or process.finished:
            return True
        computing = process.computing
        return computing is not None and (computing.sleeps or process.rank in self._drive_computing)

    def _deliver(self, process: Process, message: tuple[int, Any]) -> None:
        if type(message[1]) is Torn:
            raise WireError(f"payload of rank {message[0]} is torn: its stamps differ")
        if process.finished:
            self._answer_late(process, [message])
            return
        process.inbox.append(message)
        if process.waiting:
            process.waiting = False
            arrived = process.inbox.popleft()
            if not self._is_busy_with(process, arrived):
                self._advance(process, arrived)
            return
        computing = process.computing
        if computing is None or not computing.interruptible or _changes_nothing(message[1]):
            return
        if process.trace is not None:
            process.trace.computed(computing.took_s)
        computing.broken_off, process.computing = True, None
        self._advance(process, Interrupted())

    def _is_busy_with(self, process: Process, arrived: tuple[int, Any]) -> bool:
        """Whether a rank takes time with what it has just received, as a server does with a push."""
        if not self.push_s or type(arrived[1]) is not Push:
            return False
        self._pass_time(process, self.push_s, arrived)
        return True

    def _pass_time(
        self, process: Process, seconds: float, answer: object = None, interruptible: bool = False
    ) -> None:
        """The rank goes on with `answer` when so much time has passed; its messages move meanwhile."""
        process.computing = Computed(answer, interruptible, sleeps=True)
        self._schedule(self.now_s + seconds, process, process.computing)
        self._drive(process)

    def _advance(self, process: Process, answer: object) -> None:
        """Run a role until it has to wait for a message or for time to pass."""
        trace, send = process.trace, process.role.send
        while True:
            try:
                effect: Effect = send(answer) if trace is None else trace.send_on(send, answer)
            except StopIteration as end:
                process.finished, process.result, self.ended_s[process.rank] = True, end.value, self.now_s
                self._drive(process)
                self._answer_late(process, process.inbox)
                if trace is not None:
                    trace.write()
                return
            answer = None
            if type(effect) is Send:
                self._send(process.rank, effect)
            elif type(effect) is Now:
                answer = self.now_s
            elif type(effect) is Compute:
                answer = self._compute(process, effect)
                if process.computing is not None:
                    return
            elif type(effect) is Sleep:
                if trace is not None:
                    trace.sleep(effect.seconds)
                self._pass_time(process, effect.seconds, interruptible=effect.interruptible)
                return
            elif type(effect) is Recv:
                if effect.upto is not None or process.rank in self._at_senders.upto:
                    for kept in self._at_senders.let_in(process.rank, effect.upto):
                        self._set_out(kept.source, process.rank, kept.num_bytes, kept.message, kept.sent)
                if not process.inbox:
                    self._drive(process)
                    if effect.timeout_s == 0:
                        continue
                    self._wait(process, effect)
                    return
                answer = process.inbox.popleft()
                if self._is_busy_with(process, answer):
                    return
            elif type(effect) is AllReduce:
                self._all_reduce(process, effect)
                return
            elif type(effect) is Forget:
                if trace is not None:
                    trace.forget(effect.rank)
                self._forgotten.add(effect.rank)
            elif type(effect) is Break:
                if effect.how == "torn":
                    process.tears = True
                elif effect.how == "slow_reader":
                    process.late_s = effect.after_s
                elif effect.after_s:
                    self._schedule(self.now_s + effect.after_s, process, effect)
                else:
                    self._break(process, effect.how)
                    if process.rank in self.broken:
                        return
            elif type(effect) is not Begin:
                raise AssertionError(f"rank {process.rank} yielded {effect!r}, which is no effect")

    def _answer_late(self, process: Process, messages: Iterable[tuple[int, Any]]) -> None:
        """Of a rank whose role is over, to those that were given up and speak all the same."""
        if (answer := self.answer_late.get(process.rank)) is None:
            return
        for source, message in messages:
            if source in self._forgotten:
                drive(answer(source, message), lambda effect: self._send(process.rank, effect))

    def _wait(self, process: Process, effect: Recv) -> None:
        """Nothing is here: the rank goes on when a message is, or its time is up."""
        process.waiting = True
        process.num_waits += 1
        process.awaited, process.waits_since_s = effect, self.now_s
        if process.trace is not None:
            process.trace.wait()
        pending = self._num_pending or self._waits_for_silent()
        if effect.timeout_s is not None and pending:  # else nobody is left who could send
            self._schedule(self.now_s + effect.timeout_s, process, TimeUp(process.num_waits))

    def _all_reduce(self, process: Process, effect: AllReduce) -> None:
        """The rank waits in it; once the last one has come, all go on when it has taken its time."""
        assert self._all_reduces is not None, "nobody carries out all-reduces"
        process.computing = Computed(None, False, sleeps=True)
        process.awaited, process.waits_since_s = Recv(kind="an all-reduce"), self.now_s
        if process.trace is not None:
            process.trace.wait("all-reduce", COMMUNICATION)
        self._drive(process)
        ended = self._all_reduces.bring(process.rank, effect.reduction)
        if ended is None:
            return
        for rank, result in ended.results.items():
            one = self._processes[rank]
            assert one.computing is not None
            one.computing.result = result
            ended_s = self.now_s + ended.took_s
            if one.trace is not None:
                one.trace.fly("allreduce", ended.num_bytes, self.now_s, ended_s)
            self._schedule(ended_s, one, one.computing)

    def _compute(self, process: Process, effect: Compute) -> Any:
        """Carry out a task; returns its result at once where it takes no time."""
        took_s = self.charge(process.rank, effect)
        result = effect.task() if process.trace is None else process.trace.carry_out(effect, took_s)
        is_gradient = effect.what == "gradient"
        if is_gradient:
            drawn_s = self._draw(process)
            for _ in range(effect.num_batches - 1):
                drawn_s += self._draw(process)
            took_s += effect.size * drawn_s
        if is_gradient or took_s:
            process.computing = Computed(result, is_gradient and effect.interruptible, took_s)
            self._schedule(self.now_s + took_s, process, process.computing)
        return result

    def _send(self, source: int, effect: Send) -> None:
        num_headers = 1 + (len(effect.message.entries) if type(effect.message) is Bundle else 0)
        num_bytes = num_headers * HEADER_BYTES + payload_bytes(effect.message)
        sender = self._processes[source]
        sender.last_sent = effect
        message: Any = effect.message
        if sender.tears and payloads_of(effect.message):
            sender.tears = False
            message = Torn()
        if self._at_senders.has_room(source, effect.to, effect.message):
            self._set_out(source, effect.to, num_bytes, message, effect.message)
        else:
            self._at_senders.keep(effect.to, source, num_bytes - HEADER_BYTES, message, effect.message)
            self._set_out(source, effect.to, HEADER_BYTES, Announced(), None)

    def _set_out(self, source: int, to: int, num_bytes: int, message: Any, sent: Any) -> None:
        """`sent`: the message that a trace shows."""
        if self._rendezvous is not None:
            self._rendezvous.send(source, to, num_bytes, message, sent)
        else:
            self._begin(source, to, num_bytes, (source, message), sent)

    def _begin(self, source: int, to: int, num_bytes: int, event: object, sent: Any = None) -> None:
        """Bytes set out, and `event` happens to rank `to` when the last one is there. `sent`: the message that a trace
        shows."""
        if self._flows is not None:
            self._flows.start(self.now_s, source, to, num_bytes, (source, event, sent, self.now_s))
            self._schedule(self._flows.next_s, None, FlowEnds())
            return
        arrival_s = self.network.arrival_s(self._links, self.now_s, source, to, num_bytes)
        if sent is not None and (trace := self._processes[source].trace) is not None:
            trace.send(to, sent, self.now_s, arrival_s)
        self._schedule(arrival_s + self._processes[to].late_s, self._processes[to], event)

    def _drive(self, process: Process) -> None:
        """What has waited for this rank to call MPI goes on."""
        if self._rendezvous is not None:
            self._rendezvous.drive(process.rank)

    def _end_flows(self) -> None:
        """A message may have passed all links by now; what sets out behind it, or goes on faster, ends later."""
        assert self._flows is not None
        arrivals = self._flows.take(self.now_s)
        for arrival_s, to, (source, event, sent, sent_s) in arrivals:
            if sent is not None and (trace := self._processes[source].trace) is not None:
                trace.send(to, sent, sent_s, arrival_s)
            self._schedule(arrival_s + self._processes[to].late_s, self._processes[to], event)
        if arrivals and self._flows.next_s < math.inf:
            self._schedule(self._flows.next_s, None, FlowEnds())

    def _waits(self, rank: int) -> Waits:
        """What a rank waits for."""
        process = self._processes[rank]
        awaited = process.awaited
        if self._all_reduces is not None and (missing := self._all_reduces.missing(rank)):
            awaited = awaited._replace(sources=missing)
        return Waits(rank, awaited, process.waits_since_s, process.last_sent)

    def _draw(self, process: Process) -> float:
        worker = self._numbers.get(process.rank, process.rank)
        if process.times is None:
            process.times = WorkerTimes(self.compute, self.seed, worker)
        return process.times.next()


def _free(rank: int, effect: Compute) -> float:
    """Nothing is charged."""
    return 0.0


def _throw_away(event: object) -> None:
    """Nobody is there to receive it."""
    message = event[1] if isinstance(event, tuple) else getattr(event, "message", None)
    if message is not None:
        release(message)


def _changes_nothing(message: Message) -> bool:
    if type(message) is Bundle:
        return all(isinstance(entry.message, _CHANGES_NOTHING) for entry in message.entries)
    return isinstance(message, _CHANGES_NOTHING)
