"""The worker: reads the model from every shard, computes a gradient, pushes each shard its slice, and goes on
when all have answered.

Invariants: a worker knows versions, leases and who has answered; what a gradient is, and what its own
parameters do between two reads, only its replica knows. Every push is answered; the answer brings parameters
when the push asked for them. With two pushes in flight the answer to one is taken in just before the next
leaves. Where workers all-reduce, each push begins an all-reduce, and the end of that follows its answer: all have
pushed then, so nobody who waits in it is asked to help with a validation.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from mpitrain.effects import AllReduce, Begin, Compute, Effect, Interrupted, Now, Reduction, Role, Send
from mpitrain.messages import (
    Answer,
    Away,
    CheckpointRequest,
    Delivered,
    Difference,
    Done,
    Final,
    FinalRequest,
    Idle,
    Join,
    Lease,
    Leave,
    Note,
    Pull,
    Push,
    Reply,
    Save,
    Told,
    ToServer,
    Wake,
    num_parts,
)
from mpitrain.roles.divided_validation import DividedValidation, Measures
from mpitrain.roles.failure_detector.worker_side import ServerProbe
from mpitrain.roles.out_of_turn import out_of_turn
from mpitrain.roles.protocols import (
    CheckpointWriter,
    Gradient,
    ReducingReplica,
    Replica,
    Report,
    TabledReplica,
)
from mpitrain.roles.row_pulls import RowPulls
from mpitrain.roles.save_request import SaveRequest
from mpitrain.strategies.base import ServerStrategy
from mpitrain.strategies.placement import Roles
from mpitrain.strategies.validation_policy import ValidationCadence

Deliver = Callable[[], dict[str, Any]]
PREFETCH = 2  # batches to read ahead


@dataclass(frozen=True)
class Rhythm:
    """When a worker pushes, pulls and says that it lives.

    Args:
        leased: batches come from the dealer; otherwise from whoever answers `Compute`, until it answers None.
        wants_final: fetch the final model at the end, as the validator must.
        push_every, pull_every, inflight: as in `ServerStrategy`; a lease is one push whatever `push_every` says.
        batch_size: the usual one, where batches differ in size on purpose: virtual time charges by it.
        part_samples: samples that are computed at once, where a batch is computed in several parts; 0: all.
        heartbeat_s, signs_s: as in `ServerProbe`.
    """

    leased: bool = True
    wants_final: bool = False
    push_every: int = 1
    pull_every: int = 1
    inflight: int = 1
    batch_size: int = 0
    part_samples: int = 0
    heartbeat_s: float = 0.0
    signs_s: float = 0.0

    @classmethod
    def of(cls, strategy: ServerStrategy, **more: Any) -> Rhythm:
        """That of a strategy's workers."""
        return cls(
            push_every=strategy.push_every, pull_every=strategy.pulls, inflight=strategy.inflight, **more
        )


@dataclass(frozen=True)
class Duties:
    """What falls to a worker besides its batches.

    Args:
        writer: of this worker's part of a checkpoint.
        deliver: saves (and measures, without `measures`) the final model, if that falls to this worker, and returns
            what there is to report; None where nobody is to.
        validations: when the worker validates, if that falls to it, and whether that ends the run; every epoch by
            default.
        measures: the worker's validation set, which all workers measure together; None: `replica.validate`, by itself.
    """

    writer: CheckpointWriter | None = None
    deliver: Deliver | None = None
    validations: ValidationCadence | None = None
    measures: Measures | None = None


class Worker:
    """One worker.

    Args:
        rank: its own rank; roles: everybody's.
        replica: model and data.
        report: where progress goes when this rank logs.
    """

    def __init__(
        self,
        rank: int,
        roles: Roles,
        replica: Replica,
        report: Report,
        rhythm: Rhythm = Rhythm(),
        duties: Duties = Duties(),
    ):
        self.probe = ServerProbe(rank, roles.servers, rhythm.heartbeat_s, rhythm.signs_s)
        self.rank, self.roles, self.replica, self.report = rank, roles, replica, report
        self.rhythm, self.wants_final = rhythm, rhythm.wants_final
        self.validates, self.validations = rank == roles.validator, duties.validations or ValidationCadence()
        self.writer, self.deliver = duties.writer, duties.deliver
        self.reducing = replica if isinstance(replica, ReducingReplica) else None
        self.division: DividedValidation | None = None
        self._receive: Any = self.probe.receive
        self.row_pulls: RowPulls | None = None
        if isinstance(replica, TabledReplica):
            self.row_pulls = RowPulls(roles.servers, self.probe.receive, lambda: self.step, replica)
            self._receive = self.row_pulls.receive
        if duties.measures is not None:
            self.division = DividedValidation(
                roles, duties.measures, self._receive, self.report_away, lambda: self.step, self.row_pulls
            )
            self._receive = self.division.receive
        self.next_checkpoint: CheckpointRequest | None = None  # that the dealing server has named
        self._part_of = 0  # the checkpoint that this worker is to write its part of; 0: none
        self.batches: deque[tuple[Lease, Lease | None]] = deque()  # with its lease, if it is the last of that
        self.versions = [0] * len(roles.servers)
        self.step = self.samples = self.num_batches = self.progress = 0
        self.stopped = False
        self.compute_s = self.wait_s = 0.0
        self._unpushed: list[Gradient] = []
        self._since_pull = self._num_prefetched = self._num_awaited = 0  # awaited: pushes without an answer
        self._joined = self._standby = self._requested = False
        self._reduction: Reduction | None = None  # that has begun

    def run(self) -> Role:
        """Work until no lease is left or a server says stop; returns this worker's counts."""
        yield from self._broadcast(Join(self.step))
        yield from self.collect()
        self._joined = True
        yield from self._idle()  # where others hold all that is left
        epoch = self.validations.epoch_of(self.batches[0][0].epoch if self.batches else 0)
        self._requested = self._requested or (self.validates and self.validations.over)  # at the start before
        while not self.stopped and (self.batches or not self.rhythm.leased):
            lease, last = self._next_batch() if self.rhythm.leased else (None, None)
            if lease:
                if self.validations.is_due(lease.epoch, self.progress):
                    yield from self._validate(epoch)
                epoch = max(epoch, lease.epoch)
            if not (yield from self._one_batch(lease, last, epoch)):
                break
            if not self.batches and self.rhythm.leased:
                yield from self._await_answer()  # it may bring more to do
                yield from self._idle()
        yield from self.settle_pushes()
        if info := self.replica.statistics():
            note = {"name": "codec", "worker": self.rank, **info}
            yield Send(self.roles.dealer, Note(json.dumps(note)))
        self._before_final()
        yield from self._broadcast(Done(self.step, self.wants_final, not self.stopped, self.next_checkpoint))
        if self.deliver is not None:
            yield from self._stay(self.deliver)
        elif self.wants_final:
            yield from self.collect(Final)
        counts = {"rank": self.rank, "steps": self.step, "samples": self.samples}
        return {**counts, "compute_s": self.compute_s, "wait_s": self.wait_s}

    @property
    def stops_for_later(self) -> bool:
        """Whether the run ends before its last batch, with a checkpoint to go on from."""
        return self.next_checkpoint is not None and self.next_checkpoint.final

    def state(self) -> dict[str, Any]:
        """The worker's own counts, JSON-able: the number of its batches keys the randomness of the next one."""
        counts = {"step": self.step, "samples": self.samples, "num_batches": self.num_batches}
        return {**counts, "since_pull": self._since_pull}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; parameters and leases come from the servers."""
        self.step, self.samples, self.num_batches = state["step"], state["samples"], state["num_batches"]
        self._since_pull = state["since_pull"]

    def _next_batch(self) -> tuple[Lease, Lease | None]:
        batch = self.batches.popleft()
        self._num_prefetched = max(0, self._num_prefetched - 1)
        self._look_ahead()
        return batch

    def _put_back(self, lease: Lease | None, last: Lease | None) -> None:
        assert lease is not None, "of a loop"
        self.batches.appendleft((lease, last))
        self._num_prefetched += 1

    def _look_ahead(self) -> None:
        for lease, _ in itertools.islice(self.batches, self._num_prefetched, PREFETCH):
            self.replica.prefetch(lease)
            self._num_prefetched += 1

    def _idle(self) -> Generator[Effect, Any, None]:
        """Stay for as long as the dealing server wants, in case somebody's leases come back."""
        while self._standby and not self.batches and not self.stopped:
            self._standby = False
            yield from self._broadcast(Idle(self.step))
            source, message = yield from self._receive((self.roles.dealer,))
            while isinstance(message, Reply):  # a restart that crossed it (virtual time only)
                self.take_in(source, message)
                source, message = yield from self._receive((self.roles.dealer,))
            if not isinstance(message, Wake):
                raise out_of_turn(source, message, f"rank {self.rank} (worker, idle)")
            if message.stop:
                return
            yield from self._broadcast(Join(self.step))
            yield from self.collect()

    def _one_batch(self, lease: Lease | None, last: Lease | None, epoch: int) -> Generator[Effect, Any, bool]:
        started_s, count = (yield Now()), num_parts(lease, self.rhythm.part_samples)
        if self.row_pulls is not None:
            yield from self.row_pulls.of_batch(lease, self.num_batches)
        gradient = yield Compute(
            lambda: self.replica.gradient(lease, self.num_batches),
            interruptible=self.rhythm.inflight == 1 and self.reducing is None,
            size=lease.num_samples / self.rhythm.batch_size / count
            if lease and self.rhythm.batch_size
            else 1.0,
            num_batches=count,
            step=self.num_batches,
        )
        if gradient is None and self.row_pulls is not None:  # it came upon rows that nobody had named
            self._put_back(lease, last)
            return True
        if gradient is None:
            return False
        if isinstance(gradient, SaveRequest):
            assert lease is None, "whoever deals the batches names the checkpoints too"
            yield from self._save(gradient)
            return True
        if isinstance(gradient, Interrupted):  # by the server's answer: again, on the new version
            self._put_back(lease, last)
            yield from self.collect()
            return True
        computed_s = yield Now()
        self._unpushed.append(gradient)
        if gradient.goes_on:
            self._put_back(lease, last)
            yield from self._push()
            self.compute_s += computed_s - started_s
            return True
        self.num_batches, self._since_pull = self.num_batches + 1, self._since_pull + 1
        self.samples += gradient.samples
        if last or (not self.rhythm.leased and len(self._unpushed) == self.rhythm.push_every):
            yield from self._push(last)
        elif self._since_pull >= self.rhythm.pull_every != self.rhythm.push_every:
            self._since_pull = 0
            yield from self._broadcast(Pull(self.step))
            yield from self.collect()
        self.compute_s += computed_s - started_s
        self.wait_s += (yield Now()) - computed_s
        self.report.progress(self.progress, self.versions[0], epoch + 1, gradient.loss)
        return True

    def _push(self, lease: Lease | None = None) -> Generator[Effect, Any, None]:
        """Hand in what has been computed since the last push, all of `lease`. It names the versions that the oldest
        answer still in use brought: an answer that is waited for first belongs to the batches after this one. It goes
        out when every shard has answered all pushes before it, which so are confirmed."""
        if self.row_pulls is not None:
            ahead = [
                lease
                for lease, _ in itertools.islice(self.batches, self.rhythm.inflight - 1, self.rhythm.inflight)
            ]
            self.row_pulls.replica.look_ahead(
                ahead[0] if ahead else None, self.num_batches + self.rhythm.inflight - 1
            )
        versions, payloads = tuple(self.versions), self.replica.take_push()
        if self._num_awaited:
            yield from self._await_answer()
        if self.stopped:
            for payload in payloads:
                payload.release()
            return
        samples = sum([gradient.samples for gradient in self._unpushed])
        loss = sum([gradient.loss * gradient.samples for gradient in self._unpushed]) / max(1, samples)
        # the last lease of an epoch may be short: where pulls go with pushes, they do then too
        ends = self.next_checkpoint is not None and self.next_checkpoint.final
        asks = not ends and (self._requested or (self.writer is not None and self.writer.asked()))
        pull = self._since_pull >= self.rhythm.pull_every or self.rhythm.pull_every == self.rhythm.push_every
        is_finite = all(gradient.finite for gradient in self._unpushed)
        for shard, server in enumerate(self.roles.servers):
            message = Push(
                version=versions[shard],
                step=self.step,
                samples=samples,
                payload=payloads[shard],
                share=sum([gradient.share for gradient in self._unpushed]),
                loss=loss,
                finite=is_finite,
                pull=pull,
                lease=lease,
                num_batches=0 if self._unpushed[-1].goes_on else len(self._unpushed),
                checkpoint=CheckpointRequest() if asks else self.next_checkpoint,
                options=self._unpushed[-1].options,
            )
            yield Send(server, message)
        if self.reducing is not None:
            self._reduction = self.reducing.reduction(is_finite)
            yield Begin(self._reduction)
        self._unpushed.clear()
        self._since_pull = 0 if pull else self._since_pull
        self.step, self._num_awaited = self.step + 1, self._num_awaited + 1
        if self._num_awaited >= self.rhythm.inflight:
            yield from self._await_answer()

    def settle_pushes(self) -> Generator[Effect, Any, None]:
        """Push what has been computed, and wait until all pushes have been answered."""
        if self._unpushed and not self.stopped:
            yield from self._push()
        yield from self._await_answer()

    def _await_answer(self) -> Generator[Effect, Any, None]:
        while self._num_awaited:
            yield from self.collect()
            self._num_awaited -= 1

    def collect(self, awaited: type[Answer] | type[Final] = Answer) -> Generator[Effect, Any, None]:
        """Wait until every shard has answered, and all-reduce what a push has begun. A restart that crossed this
        worker's last message is no answer: a reply names the push that it answers by the next one's step."""
        missing = set(self.roles.servers)
        while missing:
            source, message = yield from self._receive(missing, served=awaited is not Final)
            # shards that a checkpoint cut at different pushes may name different ones when a worker joins
            crossed = (
                isinstance(message, Answer)
                and self._joined
                and (awaited is not Answer or message.step < self.step)
            )
            expected = isinstance(message, awaited) or crossed
            if not isinstance(message, Answer | Final) or not expected or source not in missing:
                kind = "FINAL" if awaited is Final else "REPLY"
                raise out_of_turn(source, message, f"rank {self.rank} (worker, awaits {kind})")
            if not crossed:
                missing.discard(source)
            self.take_in(source, message)
        if self._reduction is not None:
            yield AllReduce(self._reduction)
            self._reduction = None
        if self.step and self.writer is not None:
            self.writer.try_out(self.state)
        yield from self._write_part()

    def _write_part(self) -> Generator[Effect, Any, None]:
        """Of the checkpoint to which what it holds belongs, if there is one."""
        if self._part_of and self.writer is not None:
            writer, checkpoint_at, self._part_of = self.writer, self._part_of, 0
            yield Compute(lambda: self._keep(writer, checkpoint_at), "checkpoint")

    def _keep(self, writer: CheckpointWriter, checkpoint_at: int) -> None:
        if not self._unpushed:  # or else what a hook would count now is computed again by who resumes
            self.replica.finish()
        writer.save(checkpoint_at, self.state(), ())

    def _save(self, request: SaveRequest) -> Generator[Effect, Any, None]:
        """Ask for a checkpoint; returns when all shards have written."""
        yield from self.settle_pushes()
        yield from self._broadcast(Save(self.step, request.checkpoint_at, request.text))
        yield from self.collect()

    def _stay(self, deliver: Deliver) -> Generator[Effect, Any, None]:
        """After this worker has reported that it is done it stays until the final model is delivered, by itself if it
        is asked to; `deliver` saves, measures and returns what is to be reported, JSON-able."""
        servers, dealer = self.roles.servers, self.roles.dealer
        missing = set(servers) if self.wants_final else set()
        while True:
            source, message = yield from self._receive(servers)
            if isinstance(message, Wake):
                if message.stop:
                    last_at, self._part_of = message.last_at, message.part_of
                    break
                self.validates = self.wants_final = True
                missing = set(servers)
                self._before_final()
                yield from self._broadcast(FinalRequest(self.step))
                continue
            if not isinstance(message, Answer | Final):
                raise out_of_turn(source, message, f"rank {self.rank} (worker, has pushed its last)")
            self.take_in(source, message)
            if isinstance(message, Final):
                missing.discard(source)
                if not missing:
                    yield from self.report_away()
                    if self.row_pulls is not None:
                        yield from self.row_pulls.of_model()
                    measured = yield Compute(deliver, "deliver", interruptible=False)
                    if self.division is not None:
                        samples = None if self.stops_for_later else self.progress
                        metrics = yield from self.division.measure(samples)
                        measured = {**measured, "metrics": metrics, **self.validations.result()}
                    yield Send(dealer, Delivered(self.step, json.dumps(measured)))
        yield from self._write_part()
        yield from self._broadcast(Leave(self.step, last_at))

    def _before_final(self) -> None:
        """Before it is asked for: it may be received into the very memory of what is to be saved."""
        if self.wants_final and self.writer is not None:
            self.replica.before_final()

    def take_in(self, source: int, message: Answer | Final) -> None:
        """What a server's answer says and brings."""
        shard = self.roles.servers.index(source)
        if isinstance(message, Answer):
            self._take_answer(source, message)
        if isinstance(message, Difference):
            if message.payload is None:
                raise out_of_turn(source, message, f"rank {self.rank} (worker, awaits a difference)")
            self.replica.subtract(shard, message.payload)
        elif message.payload is not None:
            self.replica.load(shard, message.payload)
        if message.payload is not None:
            self.versions[shard] = message.version

    def _take_answer(self, source: int, message: Answer) -> None:
        self.stopped = self.stopped or message.stop
        if source == self.roles.dealer:
            self.progress = message.samples
            if message.told:
                self.replica.hear_figures(message.told)
            self.replica.progress(self.progress, message.living)
            if message.promoted:
                self.validates = self.wants_final = True
            self._standby = message.standby
            self.next_checkpoint, self._part_of = message.checkpoint, message.part_of or self._part_of
            if not self._joined:
                self.step, self.num_batches = message.step, message.num_batches
        elif message.checkpoint is not None and message.checkpoint.at is None:
            self._requested = True
        for lease in message.leases:
            if not lease.batch_size:
                self.batches.append((lease, lease))
                continue
            pieces = lease.batches()
            self.batches.extend((piece, lease if piece is pieces[-1] else None) for piece in pieces)
        self._look_ahead()

    def _broadcast(self, message: ToServer) -> Generator[Effect, Any, None]:
        for server in self.roles.servers:
            yield Send(server, message)

    def report_away(self, for_part: bool = False) -> Generator[Effect, Any, None]:
        """To servers that listen for signs of life, before something that may take as long as it likes."""
        if self.probe.timeout_s:
            yield from self._broadcast(Away(self.step, for_part))

    def _validate(self, epoch: int) -> Generator[Effect, Any, None]:
        """The validator measures the parameters it holds, and the others help it; at the end of an epoch, when the
        first batch of the next one reaches it."""
        if not self.validates:
            return
        yield from self.report_away()
        samples = self.progress
        if self.division is not None:
            metrics = yield from self.division.measure(samples)
        else:
            metrics = yield Compute(lambda: self.replica.validate(samples), "validate")
        self._requested = self._requested or self.validations.over
        if metrics:
            note = {"name": "validation", "epoch": epoch + 1, "samples": self.progress, **metrics}
            self.report.event(**note)
            yield Send(self.roles.dealer, Note(json.dumps(note)))
            if (
                self.validations.informs
            ):  # those with rates of their own learn of it by the dealing server's answers
                text = self.validations.told(metrics)
                yield from self._broadcast(Told(self.step, text))
                if len(self.roles.workers) == 1:  # or else they would not step at the same rates
                    self.replica.hear_figures(text)
                    self.replica.progress(self.progress)
