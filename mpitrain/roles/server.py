"""The server: owns one shard of the model, asks the rule about every push, applies what the rule says and
answers whom it names.

Law of this file: the role owns who is waiting (`held`) and hands it to the rule; the rule owns nothing. Every
read it sends out and every push it takes in goes through the ledger, so the counts add up by construction.
The lowest server also deals the batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any, Protocol

from mpitrain.effects import Compute, Effect, Kind, Message, Now, Payload, Recv, Role, Send
from mpitrain.rules import Dealer, Ledger, Push, ServerStrategy

LEASES_AHEAD = 2  # one to compute on and one to read in the meantime


class Store(Protocol):
    """A shard of the model with its optimizer, opaque to the role."""

    def add(self, payload: Payload, weight: float) -> None:
        """Gather one gradient; the store releases it when it is done with it."""

    def apply(self) -> None:
        """Take one optimizer step with what has been gathered."""

    def read(self) -> Payload:
        """The present parameters, unchanged for as long as the payload is held."""


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
    """

    def __init__(
        self,
        rule: ServerStrategy,
        store: Store,
        workers: tuple[int, ...],
        report: Report,
        dealer: Dealer | None = None,
        on_nonfinite: str = "stop",
    ):
        self.rule, self.store, self.report, self.dealer, self.on_nonfinite = (
            rule,
            store,
            report,
            dealer,
            on_nonfinite,
        )
        self.ledger = Ledger()
        self.memory = rule.start(workers)
        self.active = set(workers)
        self.held: set[int] = set()
        self.failure = ""
        self.arrivals: list[int] = []
        self._want_final: list[int] = []

    def run(self) -> Role:
        """Serve until every worker has left; returns the shard's counts."""
        answer: dict[Kind, Callable[[int, Message], Generator[Effect, Any, None]]] = {
            Kind.JOIN: self._on_join,
            Kind.PUSH: self._on_push,
            Kind.DONE: self._on_done,
            Kind.NOTE: self._on_note,
        }
        while self.active:
            source, message = yield Recv()
            yield from answer[message.kind](source, message)
        for worker in self._want_final:
            yield Send(worker, Message(Kind.FINAL, version=self.ledger.version, payload=self.store.read()))
        return self.summary()

    def _on_join(self, worker: int, message: Message) -> Generator[Effect, Any, None]:
        yield from self._release(worker, num_leases=LEASES_AHEAD)

    def _on_push(self, worker: int, message: Message) -> Generator[Effect, Any, None]:
        payload = message.payload
        assert payload is not None, f"push of rank {worker}, step {message.step}, carries no gradient"
        num_bytes = payload.num_bytes
        self.held.add(worker)
        self.arrivals.append(worker)
        lease = self.dealer.settle(worker) if self.dealer else None
        if not message.finite:
            self._refuse(worker, message, payload)
            yield from self._release(worker, num_leases=1)
            return
        push = Push(worker, message.step, message.version, self.ledger.version, (yield Now()), self.held)
        verdict = self.rule.on_push(self.memory, push)
        staleness = self.ledger.push(worker, message.samples, num_bytes, verdict.weight)
        if verdict.weight > 0:
            self.store.add(payload, verdict.weight)
        else:
            payload.release()
        if verdict.flush:
            yield Compute(self.store.apply, "apply")
            self.ledger.update()
        epoch = lease.epoch + 1 if lease else 1
        self.report.progress(
            self.ledger.samples_accepted,
            self.ledger.version,
            epoch,
            message.loss,
            staleness=staleness,
            worker=worker,
        )
        for released in verdict.release:
            yield from self._release(released, num_leases=1)

    def _refuse(self, worker: int, message: Message, payload: Payload) -> None:
        """A NaN or infinite gradient: never applied; counted, and under "stop" the end of the run."""
        self.ledger.push(worker, message.samples, payload.num_bytes, weight=0.0, finite=False)
        payload.release()
        if self.on_nonfinite == "stop" and not self.failure:
            self.failure = (
                f"rank {worker} (worker, step {message.step}): the gradient is not finite (loss "
                f"{message.loss:g}); nothing of it was "
                'applied. Lower the learning rate or clip gradients, or pass on_nonfinite="skip" '
                "to count such batches and go on"
            )
            if self.dealer:
                self.dealer.close()

    def _release(self, worker: int, num_leases: int) -> Generator[Effect, Any, None]:
        self.held.discard(worker)
        leases = [self.dealer.deal(worker) for _ in range(num_leases)] if self.dealer else []
        payload = self.store.read()
        self.ledger.read(worker, payload.num_bytes)
        message = Message(
            Kind.REPLY,
            version=self.ledger.version,
            samples=self.ledger.samples_accepted,
            stop=bool(self.failure),
            leases=tuple((lease.epoch, lease.start, lease.num_samples) for lease in leases if lease),
            payload=payload,
        )
        yield Send(worker, message)

    def _on_done(self, worker: int, message: Message) -> Generator[Effect, Any, None]:
        self.active.discard(worker)
        self.held.discard(worker)
        self.ledger.leave(worker)
        if message.stop:
            self._want_final.append(worker)
        yield from ()

    def _on_note(self, worker: int, message: Message) -> Generator[Effect, Any, None]:
        self.report.event(**json.loads(message.text))
        yield from ()

    def summary(self) -> dict[str, Any]:
        """Counts of this shard for `result.json`, with the failure that ended the run, if any."""
        left_out = self.dealer.num_left_out if self.dealer else 0
        return {**self.ledger.summary(), "samples_left_out": left_out, "failure": self.failure}

    def state(self) -> dict[str, Any]:
        """Rule memory, counts and data position, JSON-able; the store saves its tensors itself."""
        return {
            "memory": self.memory,
            "ledger": self.ledger.state(),
            "dealer": self.dealer.state() if self.dealer else None,
            "failure": self.failure,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned: the workers join anew, so what they were computing on goes unused."""
        self.memory, self.failure = state["memory"], state["failure"]
        self.ledger.restore(state["ledger"])
        for worker in list(self.ledger.reads):
            self.ledger.leave(worker)
        if self.dealer and state["dealer"]:
            self.dealer.restore(state["dealer"])
