"""The server: owns one shard of the model, asks the rule about every push, carries out its verdict.

Law of this file: the role owns who takes part (`active`), who waits for an answer (`held`) and which
gradients wait to be added, and hands them to the rule; the rule owns nothing. Gradients of one update are
added in rank order, never in order of arrival, so the bits depend on the set of gradients alone. Every read
it sends out and every push it takes in goes through the ledger, so the counts add up by construction. The
lowest server also deals the batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any, Protocol

from mpitrain.effects import Compute, Effect, Kind, Message, Now, Payload, Recv, Role, Send
from mpitrain.rules import Dealer, Lease, Ledger, Push, Schedule, ServerStrategy, Verdict

LEASES_AHEAD = 2  # one to compute on and one to read in the meantime
Steps = Generator[Effect, Any, None]


class Store(Protocol):
    """A shard of the model with its optimizer, opaque to the role."""

    def add(self, worker: int, payload: Any, weight: float) -> None:
        """Gather one gradient; the store releases it when it is done with it."""

    def correct(self, worker: int, payload: Any) -> Any:
        """Where the damping corrects gradients: this one, on arrival, for what has changed since the worker's read."""

    def apply(self) -> None:
        """Take one optimizer step with the mean of what has been gathered."""

    def set_rate(self, factor: float) -> None:
        """Learning rates become `factor` times what they were at first."""

    def read(self, worker: int, full: bool = False) -> Payload:
        """The present parameters for `worker`, unchanged for as long as the payload is held; `full`: unrounded."""


class Report(Protocol):
    """Where progress goes; does nothing except on the rank that logs."""

    def progress(self, samples: int, step: int, epoch: int, loss: float, **fields: Any) -> None: ...
    def event(self, name: str, **fields: Any) -> None: ...


class Server:
    """One shard's server.

    Args:
        rule: the strategy, asked about every push.
        store: the shard's parameters and optimizer.
        workers: ranks that will join, push and leave.
        report: where progress and notes go.
        dealer: deals batches; given to exactly one server, or to none when workers bring their own data.
        on_nonfinite: "stop" ends the run in order, nothing applied; "skip" counts the push and goes on.
        epoch_samples: samples of one epoch, the measure of warm-up and schedule; 0 when workers bring their own data.
        schedule: factor on the learning rate, by the samples that the shard's updates have consumed.
    """

    def __init__(
        self,
        rule: ServerStrategy,
        store: Store,
        workers: tuple[int, ...],
        report: Report,
        dealer: Dealer | None = None,
        on_nonfinite: str = "stop",
        epoch_samples: int = 0,
        schedule: Schedule | None = None,
    ):
        self.rule, self.store, self.report, self.dealer = rule, store, report, dealer
        self.on_nonfinite, self.epoch_samples, self.schedule = on_nonfinite, epoch_samples, schedule
        self.num_workers = len(workers)
        self.applied_samples = 0  # in updates so far: the progress that the schedule follows
        self.ledger = Ledger()
        self.present = set(workers)  # will push, or wait for the warm-up to end
        self.active = set(rule.warmup.first(workers))  # take part now
        self.memory = rule.start(tuple(sorted(self.active)))
        self.held: set[int] = set()
        self.failure = ""
        self.max_pending = 0
        self._lobby: set[int] = set()  # joined during the warm-up
        self._pending: dict[tuple[int, int], tuple[Payload, float]] = {}  # (worker, step): waits for its turn
        self._added: set[int] = set()  # workers whose gradients are in the update being gathered
        self._dealt: dict[int, list[Lease]] = {}  # dealt to workers that have not been answered yet
        self._next_step: dict[int, int] = {}  # of each worker: names the push that a reply answers
        self._want_final: list[int] = []

    def run(self) -> Role:
        """Serve until every worker has left; returns the shard's counts."""
        answer: dict[Kind, Callable[[int, Message], Steps]] = {
            Kind.JOIN: self._on_join,
            Kind.PUSH: self._on_push,
            Kind.DONE: self._on_done,
            Kind.NOTE: self._on_note,
        }
        self._deal_first(sorted(self.active))
        while self.present:
            source, message = yield Recv()
            yield from answer[message.kind](source, message)
        for worker in self._want_final:
            payload = self.store.read(worker, full=True)
            yield Send(worker, Message(Kind.FINAL, version=self.ledger.version, payload=payload))
        return self.summary()

    def _on_join(self, worker: int, message: Message) -> Steps:
        self._next_step[worker] = message.step
        if worker in self.active or not self.active:
            yield from self._release(worker, 0)
        else:
            self._lobby.add(worker)

    def _on_push(self, worker: int, message: Message) -> Steps:
        payload = message.payload
        assert payload is not None, f"push of rank {worker}, step {message.step}, carries no gradient"
        self.held.add(worker)
        self._next_step[worker] = message.step + 1
        lease = self.dealer.settle(worker) if self.dealer else None
        if not message.finite or message.version < self.ledger.reads[worker]:
            yield from self._refuse(worker, message, payload)
            yield from self._end_warmup()
            return
        push = Push(
            worker, message.step, message.version, self.ledger.version, (yield Now()), self.held, self.active
        )
        verdict = self.rule.on_push(self.memory, push)
        staleness = self.ledger.push(
            worker, message.samples, payload.num_bytes, verdict.weight, late=verdict.late
        )
        if verdict.weight > 0:
            payload = self.store.correct(worker, payload) if self.rule.damping.corrects else payload
            self._pending[worker, message.step] = (payload, verdict.weight)
            self.max_pending = max(self.max_pending, len(self._pending))
            self._add_in_turn()
        else:
            payload.release()
        yield from self._carry_out(verdict)
        if self.failure:
            yield from self._send_off()
        epoch = lease.epoch + 1 if lease else 1
        samples, version = self.ledger.samples_accepted, self.ledger.version
        self.report.progress(samples, version, epoch, message.loss, staleness=staleness, worker=worker)
        yield from self._end_warmup()

    def _carry_out(self, verdict: Verdict) -> Steps:
        if verdict.flush:
            self._add_in_turn(last=True)
            if self.schedule is not None and self.epoch_samples:
                progress = self.applied_samples / self.epoch_samples
                self.store.set_rate(self.schedule.factor(progress, self.num_workers))
            self.applied_samples = self.ledger.samples_accepted
            yield Compute(self.store.apply, "apply")
            self._added.clear()
            self.ledger.update()
        for worker in verdict.restart:
            if worker in self.ledger.reads:  # or else it has not joined yet
                self.ledger.abort(worker)
                yield from self._release(worker, 0)
        for worker in verdict.release:
            yield from self._release(worker, 1)

    def _add_in_turn(self, last: bool = False) -> None:
        """Hand the store, in rank order, those gradients before which no other can come."""
        due = frozenset() if last else self.rule.contributors(self.active)
        if due is None:
            return
        for key in sorted(self._pending):
            if any(other < key[0] and other not in self._added for other in due):
                break
            self.store.add(key[0], *self._pending.pop(key))
            self._added.add(key[0])

    def _refuse(self, worker: int, message: Message, payload: Payload) -> Steps:
        """A gradient that was stopped when it was already under way, or a NaN or infinite one: that is never applied;
        counted, and under "stop" the end of the run."""
        if message.version < self.ledger.reads[worker]:
            self.ledger.overtaken(worker, message.samples, payload.num_bytes)
            payload.release()
            yield from self._release(worker, 1)
            return
        self.ledger.push(worker, message.samples, payload.num_bytes, weight=0.0, finite=False)
        payload.release()
        if self.on_nonfinite != "stop":
            yield from self._release(worker, 1)
            return
        if not self.failure:
            self.failure = (
                f"rank {worker} (worker, step {message.step}): the gradient is not finite (loss "
                f"{message.loss:g}); nothing of it was applied. Lower the learning rate or clip gradients, or pass "
                'on_nonfinite="skip" to count such batches and go on'
            )
        if self.dealer:
            self.dealer.close()
        yield from self._send_off()

    def _send_off(self) -> Steps:
        """After a failure nobody is held: what they wait for may never come."""
        for worker in sorted(self.held):
            yield from self._release(worker, 0)

    def _end_warmup(self) -> Steps:
        """When its samples are in, everybody who is present takes part."""
        if self.active == self.present:
            return
        pushed = self.ledger.samples_accepted + self.ledger.samples_dropped
        if self.rule.warmup.is_over(pushed, self.epoch_samples):
            newcomers = sorted(self.present - self.active)
            for worker in newcomers:
                self.rule.on_join(self.memory, worker, self.active)
                self.active.add(worker)
            self._deal_first(newcomers)
            yield from self._open_lobby()

    def _open_lobby(self) -> Steps:
        for worker in sorted(self._lobby):
            self._lobby.discard(worker)
            yield from self._release(worker, 0)

    def _deal_first(self, workers: list[int]) -> None:
        """Deal the first leases in rank order, before anybody asks: who trains on what in lockstep is no matter of
        timing, and every round is one run of the order."""
        for _ in range(LEASES_AHEAD):
            for worker in workers:
                self._dealt.setdefault(worker, []).extend(self._deal(worker))

    def _deal(self, worker: int) -> list[Lease]:
        """One lease more for `worker`, or none."""
        lease = self.dealer.deal(worker) if self.dealer else None
        return [lease] if lease else []

    def _release(self, worker: int, num_leases: int) -> Steps:
        self.held.discard(worker)
        leases = self._dealt.pop(worker, [])
        for _ in range(num_leases):
            leases += self._deal(worker)
        payload = self.store.read(worker)
        self.ledger.read(worker, payload.num_bytes)
        message = Message(
            Kind.REPLY,
            version=self.ledger.version,
            step=self._next_step[worker],
            samples=self.ledger.samples_accepted,
            stop=bool(self.failure),
            leases=tuple((lease.epoch, lease.start, lease.num_samples) for lease in leases),
            payload=payload,
        )
        yield Send(worker, message)

    def _on_done(self, worker: int, message: Message) -> Steps:
        self.present.discard(worker)
        self.active.discard(worker)
        self.held.discard(worker)
        self.ledger.leave(worker)
        if message.stop:
            self._want_final.append(worker)
        self._add_in_turn()
        yield from self._carry_out(self.rule.on_leave(self.memory, worker, self.held, self.active))
        if not self.active:
            if self._pending or self._added:  # too few for an update of their own, but nothing is lost
                yield from self._carry_out(Verdict(0.0, True, ()))
            yield from self._open_lobby()  # the data ended before the warm-up did

    def _on_note(self, worker: int, message: Message) -> Steps:
        self.report.event(**json.loads(message.text))
        yield from ()

    def summary(self) -> dict[str, Any]:
        """Counts of this shard for `result.json`, with the failure that ended the run, if any."""
        left_out = self.dealer.num_left_out if self.dealer else 0
        counts = {"samples_left_out": left_out, "max_pending": self.max_pending, "failure": self.failure}
        return {**self.ledger.summary(), **counts}

    def state(self) -> dict[str, Any]:
        """Rule memory, counts and data position, JSON-able; the store saves its tensors itself."""
        assert not self._pending and not self._added, "state is taken when no update is being gathered"
        return {
            "memory": self.memory,
            "ledger": self.ledger.state(),
            "dealer": self.dealer.state() if self.dealer else None,
            "failure": self.failure,
            "applied_samples": self.applied_samples,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned: the workers join anew, and what they computed on goes
        unused.
        """
        self.memory, self.failure = state["memory"], state["failure"]
        self.applied_samples = state["applied_samples"]
        self.ledger.restore(state["ledger"])
        for worker in list(self.ledger.reads):
            self.ledger.leave(worker)
        if self.dealer and state["dealer"]:
            self.dealer.restore(state["dealer"])
