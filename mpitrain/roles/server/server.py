"""The server: owns one shard of the model, asks the strategy about every push, carries out its verdict.

Invariants: the role owns what every worker does (`WorkerTable`: who takes part, who waits for an answer) and which
gradients wait to be added, and hands them to the strategy; the strategy owns nothing. Gradients of one update are
added in rank order, never in order of arrival, so the bits depend on the set of gradients alone. Every read
it sends out and every push it takes in is counted, so the counts add up by construction. The
lowest server also deals the batches.

Exactly once: leases are dealt at least once, and processed idempotently. A push names its lease, every shard remembers
which it has processed (with its checkpoints, too), and one that comes again is an arrival like any other to the
strategy, so rounds stay what they are on all shards, but nothing of it is added or counted. A worker goes on only when
all shards have answered, so its next message confirms its leases to the dealing server; a lease that was never
confirmed is dealt again when its worker is lost. After a restart the shards may have been cut at different pushes: then
whatever not all of them have processed is dealt again (`BatchDealer.rejoin`). An elastic push carries parameters, not a
gradient: it is exchanged again, which conserves what both sides hold, and not counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence, Set
from typing import Any

from mpitrain.effects import Compute, Effect, Now, Recv, Role, Send
from mpitrain.errors import WireError
from mpitrain.messages import (
    Difference,
    Done,
    Final,
    Idle,
    Join,
    Lease,
    Message,
    Note,
    Payload,
    Pull,
    PullRows,
    Push,
    Reply,
    Rows,
    Told,
)
from mpitrain.roles.out_of_turn import out_of_turn
from mpitrain.roles.protocols import CheckpointWriter, Report, Store, TabledStore
from mpitrain.roles.server.checkpoint_schedule import CheckpointSchedule
from mpitrain.roles.server.gathering import Gathering
from mpitrain.roles.server.leases import Leases
from mpitrain.roles.server.resharding import processed_by
from mpitrain.roles.server.worker_state import WANTING_FINAL, WorkerEvent, WorkerTable
from mpitrain.strategies.base import Arrival, ReadsLeft, ServerStrategy, Verdict
from mpitrain.strategies.parameter_server.processed import ProcessedSamples, in_any
from mpitrain.strategies.parameter_server.staleness import ShardCounts
from mpitrain.strategies.sampling.dealer import BatchDealer
from mpitrain.strategies.schedules import Pace

Steps = Generator[Effect, Any, None]
_CONFIRMING = (Push, Pull, Idle)  # every shard has answered what came before


class Server:
    """One shard's server.

    Args:
        strategy, store, workers, report: the strategy, the shard, the ranks that will join, where progress goes.
        dealer: deals batches; given to exactly one server, or to none when workers bring their own data.
        on_nonfinite: "stop" ends the run in order, nothing applied; "skip" counts the push and goes on.
        pace: by which epochs and steps of the job are counted, and what the rates follow: here, or on workers that keep
            their own optimizer; None where workers bring their own data.
        writer: of this shard's part of a checkpoint.
    """

    def __init__(
        self, strategy: ServerStrategy, store: Store, workers: tuple[int, ...], report: Report,
        dealer: BatchDealer | None = None, on_nonfinite: str = "stop", pace: Pace | None = None,
        writer: CheckpointWriter | None = None,
    ):  # fmt: skip
        self.strategy, self.store, self.report = strategy, store, report
        self.tables = store if isinstance(store, TabledStore) else None
        self.row_bytes = 0  # of rows that were asked for besides
        self.on_nonfinite, self.pace = on_nonfinite, pace or Pace()
        self.workers = workers
        self.leases = Leases(strategy, dealer, len(workers), self.pace.batch_size)
        self.checkpoints = CheckpointSchedule(writer, dealer is not None)
        self.applied_samples = 0  # in updates so far: the progress that the rates follow
        self.counts = ShardCounts()
        self.processed = ProcessedSamples(self.pace.epoch_samples)
        self.pieces: list[
            tuple[int, int, ProcessedSamples]
        ] = []  # [start, end) of a shard cut anew, with what it had processed
        self.row_pieces: list[ProcessedSamples] = []  # the same of rows of tables, by old shard
        self.gathering = Gathering(store)
        self.table = WorkerTable(workers, strategy.warmup.first(workers))
        self.memory = strategy.start(tuple(sorted(self.table.active)))
        self.failure = ""
        self.restored_samples = 0
        self.flushed_rest = False  # at the end, out of turn
        self._answers: dict[type[Message], Callable[[int, Any], Steps]] = {
            Join: self._on_join, Push: self._on_push, Done: self._on_done, Note: self._on_note, Pull: self._on_pull,
            PullRows: self._on_pull_rows, Told: self._on_told,
        }  # fmt: skip

    def run(self) -> Role:
        """Serve until every worker has left; returns the shard's counts."""
        self.leases.first(sorted(self.table.active), self.table.active)
        self.checkpoints.look_for_one(self.counts.samples_accepted, self.table.present)
        while (arrived := (yield from self._next())) is not None:
            yield from self._take(*arrived)
        if (
            self.checkpoints.final and not self.checkpoints.ended
        ):  # everybody has left before this shard came to that point
            yield from self._write_checkpoint()
        for worker in self.table.in_turn(*WANTING_FINAL):
            payload = self.store.read(worker, full=True)
            yield Send(worker, Final(self.counts.version, payload))
        return self.summary()

    def _next(self) -> Generator[Effect, Any, tuple[int, Message] | None]:
        """The next message; None when every worker has left."""
        present = self.table.present
        return (yield Recv(kind="a message", sources=present)) if present else None

    def _take(self, source: int, message: Message) -> Steps:
        if type(message) not in self._answers or source not in self.table:
            raise out_of_turn(source, message, f"a server of workers {self.workers}")
        if message.all_answered if isinstance(message, Done) else isinstance(message, _CONFIRMING):
            self.leases.confirm(source)
        yield from self._answers[type(message)](source, message)

    def _enter(self, worker: int, event: WorkerEvent, message: Message) -> None:
        """The message of a worker changes what it does.

        Raises:
            WireError: what the worker does now has no row for that event.
        """
        if not self.table.may(worker, event):
            state = self.table[worker].state.name
            raise out_of_turn(worker, message, f"a server to which that worker is {state}")
        self.table.move(worker, event)

    def _on_join(self, worker: int, message: Join) -> Steps:
        self._enter(worker, WorkerEvent.JOIN, message)
        record = self.table[worker]
        record.next_step = message.step if record.next_step is None else record.next_step
        if worker in self.table.active or not self.table.active:  # or else it waits for the warm-up to end
            yield from self._welcome(worker)

    def _welcome(self, worker: int) -> Steps:
        """The first read: with two pushes in flight the first two gradients are computed on it."""
        yield from self._release(worker, 0, uses=self.strategy.inflight)

    def _on_pull(self, worker: int, message: Pull) -> Steps:
        """The model without a gradient: what was read before goes unused from here on."""
        self._enter(worker, WorkerEvent.PULL, message)
        self.table[worker].next_step = message.step  # after a restart this shard may have been cut at another
        self.counts.leave(worker)
        yield from self._release(worker, 0)

    def _on_pull_rows(self, worker: int, message: PullRows) -> Steps:
        """Rows of tables as they are now. Which version a worker has read is said by its answers alone."""
        if self.tables is None:
            raise out_of_turn(worker, message, "a server of a model without tables")
        payload = self.tables.rows(message.payload, not message.trains)
        self.row_bytes += payload.num_bytes
        yield Send(worker, Rows(self.counts.version, payload))

    def _on_push(self, worker: int, message: Push) -> Steps:
        payload = self.tables.arrive(worker, message.payload) if self.tables else message.payload
        self._enter(worker, WorkerEvent.PUSH, message)
        record = self.table[worker]
        record.next_step, record.no_pull = message.step + 1, not message.pull
        record.num_batches += message.num_batches
        record.is_within = message.num_batches == 0
        self.checkpoints.hear_request(message.checkpoint, self.counts.samples_accepted)
        lease = self._lease_of(worker, message)
        again = lease is not None and not self.processed.add(lease)
        now_s = yield Now()
        self.leases.pushed(worker, message.samples, now_s)
        # where all workers step together, one whose gradient counts for nothing waits with the others all the same
        counts_for_nothing = not message.finite and self.strategy.reduces and self.on_nonfinite != "stop"
        refused = not (message.finite or counts_for_nothing)
        if refused or message.version < self.counts.oldest_read(worker):
            yield from self._refuse(worker, message, payload, again)
            yield from self._end_warmup()
            return
        arrival = Arrival(
            worker, message.step, message.version, self.counts.version, now_s, self.table.blocked, self.table.active,
            self.counts.tightest(worker if message.pull else None), self.table.any_unread(self.counts.reads),
        )  # fmt: skip
        verdict = self.strategy.on_push(self.memory, arrival)
        weight = 0.0 if counts_for_nothing else verdict.weight
        num_reads = len(self.counts.reads[worker])
        size, info, late, keep = payload.num_bytes, payload.statistics(), verdict.late, not message.pull
        if again:
            self.counts.repeat(worker, size, keep)
        else:
            info["staleness"] = self.counts.push(
                worker, message.samples, size, weight, message.finite, late, keep
            )
        if weight > 0 and (self.strategy.elastic or not again):
            payload = self._mask(payload, lease)
            if self.strategy.damping.corrects:
                payload = self.store.correct(worker, payload, num_reads)
            weight *= self.leases.weight(message.samples)
            share = self.leases.share(message.share)
            self.gathering.take_gradient(worker, message.step, payload, weight, share, message.options)
            record.pending_difference = self.strategy.elastic
        else:
            payload.release()
            if verdict.weight > 0:
                self.gathering.pass_over(worker)
        self.gathering.add_in_turn(self.strategy.contributors(self.table.active), self.table.active_version)
        yield from self._carry_out(verdict)
        if self.failure or self.checkpoints.ended:
            yield from self._send_off()
        if not again:
            epoch = lease.epoch + 1 if lease else 1
            samples, version = self.counts.samples_accepted, self.counts.version
            self.report.progress(samples, version, epoch, message.loss, worker=worker, **info)
        yield from self._end_warmup()

    def _lease_of(self, worker: int, message: Push) -> Lease | None:
        """What a push was made of; None where workers bring their own data, and within a batch."""
        lease = message.lease
        if not message.num_batches:
            return None
        settled = self.leases.settle_lease(worker)
        if settled is not None and settled != lease:
            raise WireError(f"rank {worker} pushes {lease}, step {message.step}, where {settled} was due")
        return lease

    def _mask(self, payload: Payload, lease: Lease | None) -> Payload:
        """A push without what pieces of this shard had processed before they were put together."""
        spans = [(low, high) for low, high, processed in self.pieces if lease and processed.has(lease)]
        rows = {number for number, processed in enumerate(self.row_pieces) if lease and processed.has(lease)}
        if rows and self.tables is not None:
            self.tables.mask_rows(payload, rows)
        return self.store.mask(payload, spans) if spans else payload

    def _carry_out(self, verdict: Verdict) -> Steps:
        if verdict.flush:
            self.gathering.add_all(self.strategy.sums)
            if (
                not self.gathering.empty
            ):  # or else all of it had been processed before: a version like the last
                self.store.follow(self.applied_samples, self.num_living)
                self.applied_samples = self.counts.samples_accepted
            yield from self._apply()
            self.gathering.clear()
            self.counts.update()
            self.checkpoints.try_out(self.state)
            self.checkpoints.look_for_one(self.counts.samples_accepted, self.table.present)
            if self.checkpoints.due(self.counts.samples_accepted):
                yield from self._write_checkpoint()
        for worker in verdict.restart:
            if worker in self.counts.reads:  # or else it has not joined yet
                self.counts.abort(worker)
                yield from self._release(worker, 0, event=WorkerEvent.RESTART)
        for worker in verdict.release:
            yield from self._release(worker, 1)

    def _apply(self) -> Steps:
        """The store's update, where something has been gathered for it."""
        if not self.gathering.empty:
            yield Compute(self.store.apply, "apply", num_batches=self.gathering.num_taken)

    def _write_checkpoint(self, writers: Set[int] | None = None) -> Steps:
        """`writers`: the workers who may have a part of it; those who are present by default."""
        shards, present = self.strategy.servers, self.table.present if writers is None else writers
        yield Compute(
            lambda: self.checkpoints.save(self.state(), shards, present, self.workers), "checkpoint"
        )
        if self.checkpoints.ended:
            self.leases.close()

    def _refuse(self, worker: int, message: Push, payload: Payload, again: bool) -> Steps:
        """A gradient that was stopped when it was already under way, or a NaN or infinite one: that is never applied;
        counted, and under "stop" the end of the run."""
        if message.version < self.counts.oldest_read(worker):
            self.counts.overtaken(worker, message.samples, payload.num_bytes)
            payload.release()
            yield from self._release(worker, 1)
            yield from self._reconsider()
            return
        keep = self.table[worker].no_pull
        if again:
            self.counts.repeat(worker, payload.num_bytes, keep)
        else:
            self.counts.push(worker, message.samples, payload.num_bytes, weight=0.0, finite=False, keep=keep)
        payload.release()
        if self.on_nonfinite != "stop":
            yield from self._release(worker, 1)
            yield from self._reconsider()
            return
        if not self.failure:
            self.failure = (
                f"rank {worker} (worker, step {message.step}): the gradient is not finite (loss "
                f"{message.loss:g}); nothing of it was applied. Lower the learning rate or clip gradients, or pass "
                'on_nonfinite="skip" to count such batches and go on'
            )
        self.leases.close()
        yield from self._send_off()

    def _send_off(self) -> Steps:
        """After a failure nobody is blocked: what they wait for may never come."""
        for worker in sorted(self.table.blocked):
            yield from self._release(worker, 0)

    def _end_warmup(self) -> Steps:
        """When its samples are in, everybody who is present takes part."""
        present, active = self.table.present, self.table.active
        if len(present) == len(active):  # the usual case, asked at every push
            return
        standby = self.table.standby
        if len(present) == len(active) + len(standby):
            return
        pushed = self.counts.samples_accepted + self.counts.samples_dropped
        if self.strategy.warmup.is_over(pushed, self.pace.epoch_samples):
            yield from self._let_all_in()

    def _let_all_in(self) -> Steps:
        """Whoever is present takes part from now on."""
        newcomers = sorted(self.table.present - self.table.active - self.table.standby)
        for worker in newcomers:
            self.strategy.on_join(self.memory, worker, self.table.active)
            self.table.take_part(worker)
        self.leases.first(newcomers, self.table.active)
        yield from self._admit_joining()

    def _admit_joining(self) -> Steps:
        for worker in sorted(self.table.joining):
            yield from self._welcome(worker)

    def _release(
        self, worker: int, num_leases: int, uses: int = 1, event: WorkerEvent = WorkerEvent.ANSWER
    ) -> Steps:
        """Answer a worker: parameters (or the difference of an elastic exchange), unless its push wants none."""
        self.table.move(worker, event)
        record = self.table[worker]
        assert record.next_step is not None, "it has joined"
        leases = self.leases.take_leases(worker, 0 if record.is_within else num_leases, self.table.active)
        payload = None
        if not record.no_pull:
            payload = self.store.read(worker, uses=uses)
            self.counts.read(worker, payload.num_bytes, uses)
        if self.strategy.batching.measures:
            self.leases.answered(worker, (yield Now()))
        checkpoint, part_of = self.checkpoints.on_answer(worker)
        answer = Difference if record.pending_difference else Reply
        message = answer(
            version=self.counts.version,
            step=record.next_step,
            samples=self.counts.samples_accepted,
            payload=payload,
            leases=tuple(leases),
            stop=bool(self.failure) or self.checkpoints.ended,
            num_batches=record.num_batches,
            checkpoint=checkpoint,
            part_of=part_of,
            promoted=self._is_promoted(worker),
            standby=self._stands_by(worker),
            living=self.num_living / len(self.workers),
            told=self._untold(worker),
        )
        record.no_pull = record.pending_difference = False
        yield Send(worker, message)

    @property
    def num_living(self) -> int:
        """Workers that are not lost."""
        return len(self.workers)

    def _is_promoted(self, worker: int) -> bool:
        """Whether `worker` validates in place of one that is gone."""
        return False

    def _stands_by(self, worker: int) -> bool:
        """Whether `worker` is to stay although it has nothing to do."""
        return False

    def _on_done(self, worker: int, message: Done) -> Steps:
        self._enter(worker, WorkerEvent.DONE, message)
        self.checkpoints.hear_request(message.checkpoint, self.counts.samples_accepted)
        if (
            not message.all_answered
        ):  # ordered to stop, perhaps by a server that has given it up and processes nothing of it any more
            self.leases.take_back(worker)
        self.counts.leave(worker)
        if message.wants_final:
            self._enter(worker, WorkerEvent.ASK_FINAL, message)
        has_rest = not self.gathering.empty  # too few for an update of their own, but nothing is lost
        yield from self._go_on_without(worker)
        if not self.table.active and not self.gathering.empty:
            yield from self._carry_out(Verdict(0.0, True, ()))
        # the data ended before the warm-up did, or another server has given it up
        if not self.table.active or not message.all_answered:
            yield from self._let_all_in()
        self.flushed_rest = self.flushed_rest or (has_rest and self.gathering.empty)

    def _go_on_without(self, worker: int) -> Steps:
        """`worker` takes part no more: who waits for it waits no longer."""
        self.gathering.add_in_turn(self.strategy.contributors(self.table.active), self.table.active_version)
        yield from self._carry_out(
            self.strategy.on_leave(self.memory, worker, self.table.blocked, self.table.active)
        )
        yield from self._reconsider()

    def _reconsider(self) -> Steps:
        """A read has ended without a push that counts."""
        unread = self.table.any_unread(self.counts.reads)
        left = ReadsLeft(self.counts.version, self.table.blocked, self.counts.tightest(), unread)
        yield from self._carry_out(self.strategy.on_read_ended(self.memory, left))

    def _on_note(self, worker: int, message: Note) -> Steps:
        self.report.event(**json.loads(message.text))
        yield from ()

    def _on_told(self, worker: int, message: Told) -> Steps:
        """A validation has given a figure: from the next update on the rates follow it."""
        self.pace.hear_figures(message.text)
        yield from ()

    def _untold(self, worker: int) -> str:
        """The figures that a worker which steps by itself has not been told, by the dealing server."""
        figures, record = self.pace.figures, self.table[worker]
        steps = self.strategy.moves or self.strategy.reduces
        if figures is None or self.leases.dealer is None or not steps or not figures.rows:
            return ""
        text, record.told_at = figures.told(record.told_at), figures.rows[-1].samples
        return text

    def summary(self) -> dict[str, Any]:
        """Counts of this shard for `result.json`, with the failure that ended the run, if any."""
        waited, left_out = self.gathering.max_pending, self.leases.num_left_out()
        counts = {"samples_left_out": left_out, "max_pending": waited, "failure": self.failure}
        if self.tables is not None:
            counts["asked_rows_bytes"] = self.row_bytes
        return {**self.counts.summary(), **counts}

    def state(self) -> dict[str, Any]:
        """Counts and data position, JSON-able; the store saves its tensors itself, and right after an update a strategy
        remembers nothing that matters."""
        assert self.gathering.empty, "state is taken when no update is being gathered"
        workers = self.table.items()
        return {
            "workers": sorted(self.workers),
            "ledger": self.counts.state(),
            "leases": self.leases.state(self.workers),
            "next_step": {str(w): one.next_step for w, one in workers if one.next_step is not None},
            "num_batches": {str(w): one.num_batches for w, one in workers if one.num_batches},
            "failure": self.failure,
            "applied_samples": self.applied_samples,
            **self.pace.state(self.applied_samples),
            "processed": self.processed.state(),
            "pieces": [[low, high, processed.state()] for low, high, processed in self.pieces],
            "row_pieces": [processed.state() for processed in self.row_pieces],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned: the workers join anew, and what they computed on goes
        unused. The strategy begins anew, on the same parameters and counts, and other workers than before may go on.
        """
        self.failure, self.applied_samples = state["failure"], state["applied_samples"]
        self.counts.restore(state["ledger"])
        self.restored_samples = self.counts.samples_accepted
        self.processed = ProcessedSamples.of(state["processed"], self.pace.epoch_samples)
        pieces = [
            (low, high, ProcessedSamples.of(piece, self.pace.epoch_samples))
            for low, high, piece in state["pieces"]
        ]
        more = any(in_any([self.processed, piece]) != self.processed for _, _, piece in pieces)
        self.pieces = pieces if more else []
        rows = [ProcessedSamples.of(piece, self.pace.epoch_samples) for piece in state.get("row_pieces", ())]
        more = any(in_any([self.processed, piece]) != self.processed for piece in rows)
        self.row_pieces = rows if more else []
        self.leases.restore(state["leases"], self.workers)
        pushed = self.counts.samples_accepted + self.counts.samples_dropped
        if self.strategy.warmup.is_over(pushed, self.pace.epoch_samples):
            for worker in self.workers:
                self.table.take_part(worker)
        same = sorted(self.workers) == state["workers"]
        self.counts.begin_anew(forget=not same)
        # a fresh memory: clocks that two shards were cut at differently would hold back each other's workers for ever
        self.memory = self.strategy.start(tuple(sorted(self.table.active)))
        if same:
            for worker, record in self.table.items():
                record.next_step = state["next_step"].get(str(worker))
                record.num_batches = state["num_batches"].get(str(worker), 0)

    def rejoin(self, states: Sequence[dict[str, Any]]) -> None:
        """After `restore`: what the shards were cut at, this dealing server's own first; they may differ."""
        assert self.leases.dealer is not None, "only the dealing server deals again"
        self.leases.dealer.rejoin(processed_by(states, self.pace.epoch_samples))
