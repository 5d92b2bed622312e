"""A server that goes on without a worker that dies or falls silent.

Invariants: no lease is lost with its worker. A worker that has nothing left to do is asked to stay while others
still hold leases (`standby`): it says that it is idle, and to every strategy it has left; should one of the others be
lost, the dealing server wakes it, it joins again and takes over. A worker is given up as silent when everybody else
waits or has left, and, where MPI reports no death (`by_heartbeat`), whatever the others do; should it wake after that,
what it pushes is refused and it has to leave. For rank 0, to which everybody then reports, the servers stay a while
longer in case it does. A worker whose gradients are not finite any more, where such are skipped, is given up as well:
all servers see the same pushes of it, so they agree on when.

The final model: a worker that has pushed its last stays. The dealing server names who delivers: the validator, and
should that be lost, the lowest worker that still stays, which then asks every shard for its part of the final model.
When the dealing server has heard what was measured it lets all go, and a server ends when all that stayed have left or
are lost. What was measured travels with the message, so nothing hangs on the worker after that.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Set
from typing import Any

from mpitrain.effects import Forget, Role, Send
from mpitrain.errors import LostRankError
from mpitrain.messages import (
    Alive,
    AskAverage,
    Average,
    Claim,
    Delivered,
    Done,
    Final,
    FinalRequest,
    Idle,
    Join,
    Leave,
    Lost,
    Message,
    Pull,
    PullRows,
    Push,
    Reply,
    Unit,
    Wake,
    payload_of,
)
from mpitrain.roles.failure_detector.server_side import LOOK_EVERY_S, SILENT, FailureDetector
from mpitrain.roles.failure_detector.silence import AWAY_SILENCE_S, SilenceTracker
from mpitrain.roles.out_of_turn import out_of_turn
from mpitrain.roles.server.server import Server, Steps
from mpitrain.roles.server.validation_units import OF_VALIDATIONS, ValidationUnits
from mpitrain.roles.server.worker_state import (
    MAY_HELP,
    STANDING_BY,
    STAYING,
    WANTING_FINAL,
    WorkerEvent,
    WorkerState,
)
from mpitrain.strategies.base import MOST_NONFINITE

REPORTER = 0
RETURN_S = 60.0  # how long the end of a run waits for rank 0, where that was given up
NOT_FINITE = "not finite"


class FaultTolerantServer(Server):
    """`Server`, and what it does about workers that are lost; the arguments are the same, and

    Args:
        delivers: a worker saves and validates the final model, and the others stay until it has.
        floor_s: as in `SilenceTracker`.
        by_heartbeat: as in `FailureDetector`.
    """

    def __init__(
        self,
        *args: Any,
        delivers: bool = False,
        floor_s: float | None = None,
        by_heartbeat: bool = False,
        **options: Any,
    ):
        super().__init__(*args, **options)
        self.delivers = delivers
        self.delivered: dict[str, Any] = {}  # what the worker that delivered has reported
        self.validator = min(self.workers)
        self.tracker = SilenceTracker(floor_s)
        self.detector = FailureDetector(self.tracker, self.table.is_lost, by_heartbeat, self._upto)
        self.units = ValidationUnits(lambda: self.table.who(*MAY_HELP) | self.detector.announced)
        self._answers |= {
            Idle: self._on_idle,
            FinalRequest: self._on_final,
            Leave: self._on_leave,
            AskAverage: self._on_ask_average,
            **dict.fromkeys(OF_VALIDATIONS, self.units.take_message),
        }
        self._alone_since_s: float | None = None
        self._next_look_s = 0.0
        self._has_served = False

    def run(self) -> Role:
        """Serve until every worker has left, or is lost; returns the shard's counts."""
        yield from super().run()
        if not self._over and self.leases.unfinished():
            self.failure = (
                "no worker is left, and not all batches are done: each of them was given up as silent by some server; "
                "start again with --resume auto, and with a larger --heartbeat-s where workers may be silent for long"
            )
        if self.delivers:
            for worker in self.table.who(*WANTING_FINAL):
                self.table[worker].named = True
            yield from self._see_off()
        for worker, how in self.table.lost.items():
            if how != NOT_FINITE and (self.delivers or worker not in self.table.who(*WANTING_FINAL)):
                yield Forget(worker, listen=how == SILENT)
        self._has_served = True
        return self.summary()

    def _next(self) -> Generator[Any, Any, tuple[int, Message] | None]:
        while self.table.present or self._lingers():
            arrived = yield from self.detector.listen(self._owing())
            if arrived is None:
                if self.detector.now_s >= self._next_look_s:
                    # a look goes through all workers, and signs of life are many
                    self._next_look_s = self.detector.now_s + LOOK_EVERY_S / 2
                    yield from self._look_for_silence(self.detector.now_s)
            elif arrived[0] not in self.table:
                return arrived
            elif isinstance(arrived[1], Lost):
                yield from self._lose(arrived[0], arrived[1].how or "died")
            elif self.table.is_lost(arrived[0]):
                yield from self.turn_away(*arrived)
            else:
                return arrived
        for worker in self.table.who(WorkerState.LOST):
            if self.table[worker].lost == NOT_FINITE:
                self.table.lose(worker, SILENT)
        return None

    def _upto(self) -> int | None:
        """The highest rank of whose gradient there is room for the payload; None: for all."""
        return self.gathering.upto(self.strategy.contributors(self.table.active), self.table.active_version)

    def _owing(self) -> Set[int]:
        """Who owes signs of life: those who wait to be let go do too."""
        if not self.detector.looks:
            return self.table.present
        waiting = self.table.who(*WANTING_FINAL, *(STAYING if self.delivers else ()))
        return self.table.present | waiting if waiting else self.table.present

    def _lingers(self) -> bool:
        """Whether to stay a while for those who may yet leave in order, when nobody else is there."""
        lost = {worker: self.table[worker].lost for worker in self.table.who(WorkerState.LOST)}
        if lost.get(REPORTER) != SILENT and NOT_FINITE not in lost.values():
            return False
        self._alone_since_s = self.detector.now_s if self._alone_since_s is None else self._alone_since_s
        return self.detector.now_s - self._alone_since_s < RETURN_S

    def _see_off(self) -> Steps:
        """When no worker will push any more: wait until the final model is delivered and all have left."""
        staying = self.table.who(*STAYING)
        # whoever leaves from here on may yet be lost
        left = self.table.who(WorkerState.LEFT, WorkerState.LOST_LEFT)
        yield from self._name_deliverer(staying)
        while staying:
            arrived = yield from self.detector.listen(staying, AWAY_SILENCE_S)
            if arrived is None:
                continue
            source, message = arrived
            if source not in self.table:
                raise out_of_turn(source, message, f"a server of workers {self.workers}")
            if isinstance(message, Lost):
                staying.discard(source)
                how = message.how or "died"
                self.units.lose(source)
                if source not in left:
                    self.table.lose(source, how)
                    self.report.event("worker lost", rank=source, how=how, version=self.counts.version)
                if how == SILENT:
                    yield from self.dismiss(source)
                yield from self._name_deliverer(staying)
            elif isinstance(message, Leave):
                staying.discard(source)
                yield from self._on_leave(source, message)
            elif isinstance(message, AskAverage | PullRows) or (
                isinstance(message, OF_VALIDATIONS) and not self.table.is_lost(source)
            ):
                yield from self._answers[type(message)](source, message)
            elif isinstance(message, FinalRequest) or (
                self.table.is_lost(source) and self.owes_final(source, message)
            ):
                if isinstance(message, Done):
                    self._enter(source, WorkerEvent.DONE, message)
                self._enter(source, WorkerEvent.ASK_FINAL, message)
                yield from self.send_final(source)
            elif isinstance(message, Delivered):
                self.delivered = json.loads(message.text)
                yield from self._let_go(staying)
            else:
                if not self.table.is_lost(source):
                    raise out_of_turn(source, message, "a server whose workers have all pushed their last")
                yield from self.turn_away(source, message)

        if self.checkpoints.writes_last and not self._over and self.gathering.empty:
            yield from self._write_checkpoint()

    def _let_go(self, staying: Set[int]) -> Steps:
        """The dealing server, to all who stay: they leave. Where the end of the run is written, it has begun to, and
        they write their parts and tell the other servers."""
        last, counts = 0, self.counts
        if (
            not self._over
            and self.gathering.empty
            and self.checkpoints.name_last(counts.samples_accepted, self.restored_samples, self.flushed_rest)
        ):
            yield from self._write_checkpoint(staying)
            last = self.checkpoints.last
        for worker in sorted(staying):
            part_of = self.checkpoints.on_answer(worker)[1] if last else 0
            yield Send(worker, Wake(stop=True, last_at=last, part_of=part_of))

    def _name_deliverer(self, staying: set[int]) -> Steps:
        """Who delivers from here on, where the one that was to has not and will not (the dealing server)."""
        if self.leases.dealer is None or self.delivered or not staying:
            return
        if self.validator not in staying:
            self.validator = min(staying)
        if not self.table[self.validator].named:  # the validator itself has asked for the final model
            self.table[self.validator].named = True
            yield Send(self.validator, Wake(promoted=True))

    def turn_away(self, worker: int, message: Message) -> Steps:
        """A worker that was given up has woken: its leases are others' now."""
        if isinstance(message, PullRows):  # for a batch of which nothing will be taken
            yield from self._on_pull_rows(worker, message)
            return
        if (payload := payload_of(message)) is not None:
            payload.release()
        if isinstance(message, Done):
            self._enter(worker, WorkerEvent.DONE, message)
        if isinstance(message, Alive):
            yield Send(worker, Alive())
            owed, self.table[worker].owed = self.table[worker].owed, None
            if owed is not None:
                yield Send(worker, owed)
        elif isinstance(message, Idle) and self.leases.dealer is not None:
            yield Send(worker, Wake(stop=True))
        elif isinstance(message, Claim):  # nobody counts on it
            yield Send(worker, Unit(0, -1))
        elif isinstance(message, AskAverage):
            yield from self._on_ask_average(worker, message)
        elif isinstance(message, Push | Join | Pull):
            step = message.step + isinstance(message, Push)
            yield Send(worker, Reply(self.counts.version, step, stop=True))
        elif isinstance(message, Done | Delivered) and self.delivers and self.leases.dealer is not None:
            yield Send(worker, Wake(stop=True))
        elif self.owes_final(worker, message):
            self._enter(worker, WorkerEvent.ASK_FINAL, message)
            if self._has_served:
                yield from self.send_final(worker)
        elif isinstance(message, Leave):
            yield from self._on_leave(worker, message)

    def owes_final(self, worker: int, message: Message) -> bool:
        """Whether one that was given up as silent asks for the final model. Another server may not have given it up;
        only whom the dealing server has given up does not deliver."""
        if not isinstance(message, Done):
            return isinstance(message, FinalRequest)
        lets_go = self.delivers and (self.leases.dealer is not None or self.table[worker].lost != SILENT)
        return message.wants_final and not lets_go

    def _take(self, source: int, message: Message) -> Steps:
        yield from super()._take(source, message)
        if isinstance(message, Push):
            record, leased = self.table[source], self.leases.batch_size > 0
            record.num_nonfinite = 0 if message.finite else record.num_nonfinite + 1
            if record.num_nonfinite == MOST_NONFINITE and leased and not self._over:
                yield from (self._fail if self.strategy.reduces else self._lose)(source, NOT_FINITE)
        if self.table.any_in(WorkerState.STANDBY):
            yield from self._wake()

    def _fail(self, worker: int, how: str) -> Steps:
        """The others cannot go on without that worker."""
        self.failure = self.failure or _why_lost(worker, how) + ", and the others cannot step without it"
        self.leases.close()
        yield from self._send_off()

    def _on_final(self, worker: int, message: FinalRequest) -> Steps:
        """It delivers, and this shard has not seen everybody's last push yet."""
        self._enter(worker, WorkerEvent.ASK_FINAL, message)
        yield from ()

    def _on_leave(self, worker: int, message: Leave) -> Steps:
        self._enter(worker, WorkerEvent.LEAVE, message)
        self.checkpoints.hear_last(message.last_at)
        yield from ()

    def _on_ask_average(self, worker: int, message: AskAverage) -> Steps:
        yield Send(worker, Average(self.counts.version, self.store.average()))

    def send_final(self, worker: int) -> Steps:
        """The model after the last update."""
        payload = self.store.read(worker, full=True)
        yield Send(worker, Final(self.counts.version, payload))

    def _on_idle(self, worker: int, message: Idle) -> Steps:
        """It has been answered, has nothing to compute on, and waits to be woken."""
        self._enter(worker, WorkerEvent.IDLE, message)
        self.counts.leave(worker)
        yield from self._go_on_without(worker)

    def _on_join(self, worker: int, message: Join) -> Steps:
        if worker not in self.table.standby:
            yield from super()._on_join(worker, message)
            return
        self._enter(worker, WorkerEvent.JOIN, message)
        self.table[worker].next_step = message.step
        self.strategy.on_join(self.memory, worker, self.table.active)
        self.table.take_part(worker)
        self.leases.top_up(worker, 1, self.table.active)
        yield from self._welcome(worker)

    def _release(
        self, worker: int, num_leases: int, uses: int = 1, event: WorkerEvent = WorkerEvent.ANSWER
    ) -> Steps:
        yield from super()._release(worker, num_leases, uses, event)
        if self.detector.looks:
            self.tracker.answered(worker, self.detector.now_s)

    def _wake(self) -> Steps:
        """The dealing server: to work, when leases have come back; to the end, when all are settled."""
        if self.leases.dealer is None:
            return
        standby = self.table.who(WorkerState.STANDBY)
        if not standby:
            return
        over = self._over or not self.leases.outstanding()
        if not over and self.leases.waiting() <= len(self.table.who(WorkerState.WOKEN)):
            return
        for worker in sorted(standby):
            if over or self.leases.waiting() > len(self.table.who(WorkerState.WOKEN)):
                self.table.move(worker, WorkerEvent.WAKE)
                yield Send(worker, Wake(stop=over))
                self.tracker.answered(worker, self.detector.now_s)

    @property
    def _over(self) -> bool:
        return bool(self.failure) or self.checkpoints.ended

    def _look_for_silence(self, now_s: float) -> Steps:
        """Whoever still works while all others wait, or have left, and has been silent for too long is given up."""
        present, blocked = self.table.present, self.table.blocked
        waiting = self.table.standby | blocked | self.table.joining | (self.detector.announced & present)
        waiting |= {worker for worker in present if self.tracker.waits(worker, now_s)}
        working = present - waiting
        others = waiting or len(present) + self.table.num_lost < len(self.workers)
        if (
            others
            and working
            and all(self.tracker.is_silent(worker, now_s, bool(blocked)) for worker in working)
        ):
            for worker in sorted(working):
                yield from self._lose(worker, SILENT)

    def dismiss(self, worker: int) -> Steps:
        """Of one that is given up as silent nothing is awaited, and nothing is sent to it: over TCP that crashes UCX.
        Should it live, it says so, and gets then what it waits for."""
        record = self.table[worker]
        if record.state in (WorkerState.BLOCKED, WorkerState.JOINING):
            record.owed = Reply(self.counts.version, record.next_step or 0, stop=True)
        elif record.state in STANDING_BY and self.leases.dealer is not None:  # which alone wakes
            record.owed = Wake(stop=True)
        yield Forget(worker, listen=True)

    def _lose(self, worker: int, how: str) -> Steps:
        if self.table.is_lost(worker):  # given up as silent, and now known to be dead
            self.table.lose(worker, how)
            return
        self.detector.looks = True  # one that is lost may come back
        silence_s = self.tracker.silence_s(worker, self.detector.now_s)
        if worker == REPORTER and self.detector.by_heartbeat and how != NOT_FINITE:
            raise LostRankError(
                f"rank {REPORTER}, which writes the result, {how}: nobody has heard of it for "
                f"{silence_s:.1f} s. The job ends, to be started again from its newest checkpoint"
            )
        if how == SILENT:
            yield from self.dismiss(worker)
        was_active = worker in self.table.active
        self.table.lose(worker, how)
        self.units.lose(worker)
        present = self.table.present
        if worker == self.validator and present:  # the lowest that remains takes over
            self.validator = min(present)
        self.counts.leave(worker)
        self.leases.take_back(worker)
        silence = {"silence_s": round(silence_s, 3)} if how == SILENT else {}
        self.report.event("worker lost", rank=worker, how=how, version=self.counts.version, **silence)
        self._follow_ticks()
        if was_active:
            yield from self._go_on_without(worker)
        if not present and self.table.num_lost == len(self.workers):
            self.failure = self.failure or _why_lost(worker, how) + ", and no other worker is left"
        yield from self._let_all_in()  # shards would see the end of a warm-up at different pushes from here on
        yield from self._wake()

    @property
    def num_living(self) -> int:
        return max(1, len(self.workers) - self.table.num_lost)

    def _follow_ticks(self) -> None:
        """From here on a tick is a step of the workers that are left."""
        if changed := self.pace.change(self.num_living, self.applied_samples):
            self.report.event("schedule", **changed)

    def _is_promoted(self, worker: int) -> bool:
        return worker == self.validator != min(self.workers)

    def _stands_by(self, worker: int) -> bool:
        return not self._over and self.leases.has_nothing(worker) and self.leases.outstanding(but_for=worker)

    def summary(self) -> dict[str, Any]:
        """`Server.summary`, with the ranks that were lost, and how."""
        return {**super().summary(), "lost": {str(rank): how for rank, how in self.table.lost.items()}}


def _why_lost(worker: int, how: str) -> str:
    cause = f"has sent {MOST_NONFINITE} gradients in a row that are not finite"
    return f"rank {worker} (worker) {cause if how == NOT_FINITE else how}"
