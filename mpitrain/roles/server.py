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
from typing import Any

from mpitrain.effects import Compute, Effect, Kind, Message, Now, Payload, Recv, Role, Send
from mpitrain.roles.deals import Deals
from mpitrain.roles.ports import Report, Store
from mpitrain.rules import Dealer, Ledger, Push, Schedule, ServerStrategy, Verdict

Steps = Generator[Effect, Any, None]


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
        batch_size: the job's; what the strategy's batching starts from; 0 when workers bring their own data.
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
        batch_size: int = 0,
    ):
        self.rule, self.store, self.report = rule, store, report
        self.on_nonfinite, self.epoch_samples, self.schedule = on_nonfinite, epoch_samples, schedule
        self.num_workers = len(workers)
        self.deals = Deals(rule, dealer, len(workers), batch_size)
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
        self._next_step: dict[int, int] = {}  # of each worker: names the push that a reply answers
        self._want_final: list[int] = []
        self._keeps: set[int] = set()  # pushed and want no parameters: they go on with what they have
        self._exchanged: set[int] = set()  # pushed parameters, to be answered with the difference

    def run(self) -> Role:
        """Serve until every worker has left; returns the shard's counts."""
        answer: dict[Kind, Callable[[int, Message], Steps]] = {
            Kind.JOIN: self._on_join,
            Kind.PUSH: self._on_push,
            Kind.DONE: self._on_done,
            Kind.NOTE: self._on_note,
            Kind.PULL: self._on_pull,
        }
        self.deals.first(sorted(self.active), self.active)
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
            yield from self._welcome(worker)
        else:
            self._lobby.add(worker)

    def _welcome(self, worker: int) -> Steps:
        """The first read: with two pushes in flight the first two gradients are computed on it."""
        yield from self._release(worker, 0, uses=self.rule.inflight)

    def _on_pull(self, worker: int, message: Message) -> Steps:
        """The model without a gradient: what was read before goes unused from here on."""
        self.ledger.leave(worker)
        yield from self._release(worker, 0)

    def _on_push(self, worker: int, message: Message) -> Steps:
        payload = message.payload
        assert payload is not None, f"push of rank {worker}, step {message.step}, carries no gradient"
        self.held.add(worker)
        self._next_step[worker] = message.step + 1
        if not message.pull:
            self._keeps.add(worker)
        lease = self.deals.settle(worker)
        now_s = yield Now()
        self.deals.pushed(worker, message.samples, now_s)
        if not message.finite or message.version < self.ledger.oldest_read(worker):
            yield from self._refuse(worker, message, payload)
            yield from self._end_warmup()
            return
        push = Push(worker, message.step, message.version, self.ledger.version, now_s, self.held, self.active)
        verdict = self.rule.on_push(self.memory, push)
        staleness = self.ledger.push(
            worker,
            message.samples,
            payload.num_bytes,
            verdict.weight,
            late=verdict.late,
            keep=not message.pull,
        )
        if verdict.weight > 0:
            payload = self.store.correct(worker, payload) if self.rule.damping.corrects else payload
            self._pending[worker, message.step] = (
                payload,
                verdict.weight * self.deals.weight(message.samples),
            )
            self._exchanged.update([worker] if self.rule.elastic else [])
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
        if message.version < self.ledger.oldest_read(worker):
            self.ledger.overtaken(worker, message.samples, payload.num_bytes)
            payload.release()
            yield from self._release(worker, 1)
            return
        keep = worker in self._keeps
        self.ledger.push(worker, message.samples, payload.num_bytes, weight=0.0, finite=False, keep=keep)
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
        self.deals.close()
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
            self.deals.first(newcomers, self.active)
            yield from self._open_lobby()

    def _open_lobby(self) -> Steps:
        for worker in sorted(self._lobby):
            self._lobby.discard(worker)
            yield from self._welcome(worker)

    def _release(self, worker: int, num_leases: int, uses: int = 1) -> Steps:
        """Answer a worker: parameters (or the difference of an elastic exchange), unless its push wants none."""
        self.held.discard(worker)
        leases = self.deals.take(worker, num_leases, self.active)
        payload = None
        if worker in self._keeps:
            self._keeps.discard(worker)
        else:
            payload = self.store.read(worker)
            self.ledger.read(worker, payload.num_bytes, uses)
        if self.rule.batching.measures:
            self.deals.answered(worker, (yield Now()))
        message = Message(
            Kind.DIFFERENCE if worker in self._exchanged else Kind.REPLY,
            version=self.ledger.version,
            step=self._next_step[worker],
            samples=self.ledger.samples_accepted,
            stop=bool(self.failure),
            leases=tuple(leases),
            payload=payload,
        )
        self._exchanged.discard(worker)
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
        left_out = self.deals.num_left_out()
        counts = {"samples_left_out": left_out, "max_pending": self.max_pending, "failure": self.failure}
        return {**self.ledger.summary(), **counts}

    def state(self) -> dict[str, Any]:
        """Rule memory, counts and data position, JSON-able; the store saves its tensors itself."""
        assert not self._pending and not self._added, "state is taken when no update is being gathered"
        return {
            "memory": self.memory,
            "ledger": self.ledger.state(),
            "failure": self.failure,
            "applied_samples": self.applied_samples,
            "deals": self.deals.state(),
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
        self.deals.restore(state["deals"])
