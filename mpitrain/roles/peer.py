"""The peer: trains on its own replica, sends its neighbours what has become of it, and takes in what they send.

Invariants: a peer sends one message to each receiver at every step. A synchronous one then waits for the
messages of the same step from all its senders, and takes them in in rank order; an asynchronous one takes what
is there, and begins no step while a receiver has left too many of its messages (`peer_credits.py`). At a
meeting every peer has first heard everything that the others had to say before it; sums go up a tree of all
peers and the mean comes down, so nothing is under way when it is over. What an update is and how it is mixed
only the replica knows; whom it goes to only the strategy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from mpitrain.effects import Compute, Effect, Now, Recv, Role, Send
from mpitrain.errors import LostRankError, NonFiniteError
from mpitrain.messages import (
    Agreed,
    Ask,
    CheckpointRequest,
    Credit,
    Divide,
    Last,
    Mean,
    Measured,
    Message,
    Sum,
    Told,
    Update,
    num_parts,
    payload_of,
)
from mpitrain.roles.peer_checkpoints import PeerCheckpoints
from mpitrain.roles.peer_credits import PeerCredits
from mpitrain.roles.protocols import PeerMeasures, PeerReplica, Report
from mpitrain.strategies import topology
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.figures import merged
from mpitrain.strategies.sampling.peer_partition import Endless, PeerPartition, Turn
from mpitrain.strategies.validation_policy import ValidationCadence

Answers = Generator[Effect, Any, Any]
Awaited = TypeVar("Awaited", Update, Sum, Mean, Ask, Agreed, Divide, Measured, Told)
_COUNTS = (
    "batches", "samples", "nonfinite", "num_active", "sent_bytes", "num_sent", "num_meetings", "drift", "drift_max",
)  # fmt: skip


@dataclass(frozen=True)
class PeerDuties:
    """What a peer does besides its steps, and how it takes them.

    Args:
        on_nonfinite: "stop" ends the job, "skip" leaves the step out.
        part_samples: as for a `Worker`.
        checkpoints: when to write checkpoints; None for never.
        validations: when the first peer validates, and whether that ends the run; every epoch by default.
        measures: this peer's validation set; None: `replica.validate`, of the first peer by itself.
    """

    on_nonfinite: str = "stop"
    part_samples: int = 0
    checkpoints: PeerCheckpoints | None = None
    validations: ValidationCadence | None = None
    measures: PeerMeasures | None = None


class Peer:
    """One peer.

    Args:
        rank: its own, from 0; number: of all peers.
        strategy: whom to talk to and when to meet; partition: this peer's part of the data, or `Endless` where somebody
            else brings it and answers `Compute`, in the end with None.
        report: where progress goes, on the peer that logs, which also validates.
    """

    def __init__(
        self,
        rank: int,
        number: int,
        strategy: Decentralized,
        partition: PeerPartition | Endless,
        replica: PeerReplica,
        report: Report,
        duties: PeerDuties = PeerDuties(),
    ):
        self.rank, self.number, self.strategy, self.partition = rank, number, strategy, partition
        self.replica, self.report, self.duties = replica, report, duties
        self.checkpoints, self.validations = duties.checkpoints, duties.validations or ValidationCadence()
        self.step = self.batches = self.samples = self.nonfinite = self.sent_bytes = self.num_sent = (
            self.num_meetings
        ) = 0
        self.num_active = partition.num_active()
        self.max_steps_ahead = 0
        self.drift = self.drift_max = self.compute_s = self.wait_s = 0.0
        self.digest = ""
        self._is_stepping = self._has_left = False
        self._since_meeting = 0  # messages to each receiver since then
        self._heard: dict[int, int] = {}  # messages from each sender since then
        self._credits = PeerCredits()
        self._untold = ""  # what the first peer has measured and the others are to hear at the next meeting
        self._waiting: deque[tuple[int, Message]] = deque()  # arrived, and not yet their turn
        self._left: dict[int, int] = {}  # who has taken the last step, and how many

    def run(self) -> Role:
        """Train to the end of the course; returns this peer's counts."""
        epoch = self.validations.epoch_of(self.partition.epoch)
        info: tuple[int, int, int, float] | None = None
        self._look_at_end(self.partition.step)  # the start before may have come to it
        while (turn := self.partition.next()) is not None:
            if turn.num_active != self.num_active:  # the warm-up is over: the others join from the mean
                yield from self._meet()
                self.num_active = turn.num_active
            if self.validations.is_due(turn.epoch, turn.samples_before):
                yield from self._validate(epoch, turn)
            epoch = turn.epoch
            self.step, self._is_stepping = turn.step, False
            if turn.lease is not None:
                loss = yield from self._step(turn)
                if loss is None:
                    yield from self._leave()
                    break
                info = (turn.samples_before + turn.num_samples, turn.step + 1, turn.epoch + 1, loss)
                self.report.progress(*info, drift=self.drift, **dict[str, Any](self.replica.statistics()))
            if meets := self.strategy.meets_after(turn.step):
                yield from self._meet()
            if self.checkpoints is not None:
                yield from self._look(self.checkpoints, turn, meets)
                if self.checkpoints.ended:
                    break
        if not self.strategy.asynchronous:
            yield from self._write_last()
        yield from self._meet()
        if self.strategy.asynchronous:  # until then there were updates under way
            yield from self._write_last()
        if self._has_left:
            yield from self._hear_last()
        if info:
            self.report.progress(*info)  # the run has lasted until everybody was here
        return self._counts()

    def _write_last(self) -> Answers:
        """The end of the run. The meeting that ends it is one that no run has which goes on."""
        if self.checkpoints is not None and self.checkpoints.is_last(self.partition.samples):
            save = self.checkpoints.save
            yield Compute(lambda: save(self.state()), "checkpoint")

    def state(self) -> dict[str, Any]:
        """Counts and position, JSON-able; taken between two steps. What others have sent ahead they will send again."""
        return {"partition": self.partition.state()} | {key: getattr(self, key) for key in _COUNTS}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; parameters and residuals are the replica's."""
        self.partition.restore(state["partition"])
        vars(self).update({key: state[key] for key in _COUNTS})
        self.num_active = min(state["num_active"], self.number)

    def _look(self, checkpoints: PeerCheckpoints, turn: Turn, met: bool) -> Answers:
        """Write a checkpoint where one is due. All peers write after the same step, and a synchronous one has then
        taken in all that was sent before it; asynchronous ones write when they have met."""
        checkpoints.try_out(self.state)
        if checkpoints.agrees_after(turn.step, met):
            checkpoints.take_decision((yield from self._agree(checkpoints, turn)))
        if checkpoints.is_due(turn.samples_before + turn.num_samples, met):
            yield Compute(lambda: checkpoints.save(self.state()), "checkpoint")

    def _agree(self, checkpoints: PeerCheckpoints, turn: Turn) -> Generator[Effect, Any, Agreed]:
        """What any peer was asked goes up the tree of all, what the first decides comes down."""
        asked, step = checkpoints.asked(), turn.step
        for child in topology.children(self.rank, self.number):
            message = yield from self._expect(child, Ask, step)
            asked = asked or message.checkpoint is not None
        parent = topology.parent(self.rank)
        if parent is None:
            samples = turn.samples_before + turn.num_samples
            decided = checkpoints.decide(asked, step, samples, (yield Now()))
        else:
            yield Send(parent, Ask(step, CheckpointRequest() if asked else None))
            decided = yield from self._expect(parent, Agreed, step)
        for child in topology.children(self.rank, self.number):
            yield Send(child, decided)
        return decided

    # ---- a step

    def _step(self, turn: Turn) -> Generator[Effect, Any, float | None]:
        following = self.partition.peek()
        if following is not None and following.lease is not None:
            self.replica.prefetch(following.lease)
        if self.strategy.asynchronous:
            yield from self._await_credits(turn)
        began_s = yield Now()
        gradient = yield Compute(
            lambda: self.replica.step(turn),
            interruptible=False,
            num_batches=num_parts(turn.lease, self.duties.part_samples),
            step=turn.step,
        )
        if gradient is None:  # whoever brings the data has no more
            return None
        self._is_stepping = True
        self._compare_steps()
        computed_s = yield Now()
        self.compute_s += computed_s - began_s
        if not gradient.finite:
            self._refuse(gradient.loss)
        assert turn.lease is not None
        self.batches, self.samples = self.batches + 1, self.samples + turn.lease.num_samples
        own = self.replica.update()
        for peer in self.strategy.receivers(self.rank, turn.num_active, turn.step):
            if self.strategy.asynchronous:
                self._credits.sent(peer)
            yield Send(peer, Update(turn.step, own.hold()))
            self.sent_bytes, self.num_sent = self.sent_bytes + own.num_bytes, self.num_sent + 1
        self._since_meeting += 1
        if self.strategy.asynchronous:
            self._take_in(self.rank, own)
            yield from self._take_ready()
        else:
            yield from self._take_this_step(turn, own)
        if self.strategy.mixes:
            weights = self.strategy.weights(self.rank, turn.num_active, turn.step)
            self.replica.mix(self.rank, weights, self.strategy.mixing_rate)
        self.replica.end_step()
        self.wait_s += (yield Now()) - computed_s
        return float(gradient.loss)

    def _leave(self) -> Answers:
        """Inform whoever may wait for this peer that it takes no further step; all are to have taken equally many."""
        for peer in self.strategy.contacts(self.rank, self.number):
            yield Send(peer, Last(self.step))
        self._has_left = True
        self._compare_steps()

    def _hear_last(self) -> Answers:
        """Nothing of this loop is under way when it is over: the next one in this process would take it for its own."""
        contacts = self.strategy.contacts(self.rank, self.number)
        while not self._left.keys() >= set(contacts):
            self._noted((yield Recv(kind="Last", sources=contacts)))

    def _compare_steps(self) -> None:
        """Nobody waits for somebody who has left: a step, or an end, that others do not share is reported at once."""
        for peer, steps in sorted(self._left.items()):
            mine = self.step + self._is_stepping
            if mine > steps or (self._has_left and mine != steps):
                goes_on = "has left, too, after" if self._has_left else "is at"
                raise LostRankError(
                    f"rank {peer} has left the loop after {steps} step(s), and rank {self.rank} (peer) {goes_on} step "
                    f"{mine}: peers wait for one another, so give every worker equally many batches, and let none end "
                    "by itself (by sys.exit, say, or an early mpitrain.finish)"
                )

    def _refuse(self, loss: float) -> None:
        self.nonfinite += 1
        if self.duties.on_nonfinite == "stop":
            what = f"loss is {loss:g}" if loss - loss != 0.0 else "the gradient is not finite"
            raise NonFiniteError(
                f'rank {self.rank} (peer, step {self.step}): {what}; on_nonfinite="skip" leaves such steps out'
            )

    def _take_in(self, source: int, payload: object) -> None:
        if self.strategy.mixes:
            self.replica.copy(source, payload)
        else:
            self.replica.apply(payload, self.num_active)

    def _take_ready(self) -> Answers:
        """Everything that is here, without waiting."""
        ready, self._waiting = list(self._waiting), deque()
        while (arrived := (yield Recv(timeout_s=0))) is not None:
            ready.append(self._noted(arrived))
        for source, message in ready:
            yield from self._hear(source, message)

    def _hear(self, source: int, message: Message) -> Answers:
        """Take an update in, and give its sender credit for more; what belongs to a meeting waits."""
        if not isinstance(message, Update):
            self._keep(source, message)
            return
        self._heard[source] = heard = self._heard.get(source, 0) + 1
        self._take_in(source, message.payload)
        if self._credits.is_due(heard):
            yield Send(source, Credit(heard))

    def _keep(self, source: int, message: Message) -> None:
        if not isinstance(message, Credit):  # which has been noted
            self._waiting.append((source, message))

    def _await_credits(self, turn: Turn) -> Answers:
        """Wait until every receiver may be sent another update, and take in what comes meanwhile: two peers that wait
        for each other so give each other credit."""
        receivers = self.strategy.receivers(self.rank, turn.num_active, turn.step)
        began_s = yield Now()
        while not all(map(self._credits.may_send, receivers)):
            yield from self._hear(*self._noted((yield Recv(kind="Credit", sources=receivers))))
        self.wait_s += (yield Now()) - began_s

    def _take_this_step(self, turn: Turn, own: object) -> Answers:
        """The messages of this step from all senders, taken in in rank order: the same bits on every replica."""
        arrived = {self.rank: own}
        for peer in self.strategy.senders(self.rank, turn.num_active, turn.step):
            message = yield from self._expect(peer, Update, turn.step)
            arrived[peer] = message.payload
        for source in sorted(arrived):
            self._take_in(source, arrived[source])

    def _expect(self, source: int, awaited: type[Awaited], number: int) -> Generator[Effect, Any, Awaited]:
        """Wait for the message of this class and number (of the step, or of the meeting); others wait."""
        for index, (sender, message) in enumerate(self._waiting):
            if sender == source and isinstance(message, awaited) and _number(message) == number:
                del self._waiting[index]
                return message
        while True:
            sender, message = self._noted((yield Recv(kind=awaited.__name__, sources=(source,))))
            if sender == source and isinstance(message, awaited) and _number(message) == number:
                return message
            self._keep(sender, message)

    def _noted(self, arrived: tuple[int, Message]) -> tuple[int, Message]:
        """How far the sender was ahead when its message came: the proof that it did not wait."""
        source, message = arrived
        if isinstance(message, Update):
            self.max_steps_ahead = max(self.max_steps_ahead, message.step - self.step)
        elif isinstance(message, Last):
            self._left[source] = message.step
            self._compare_steps()
        elif isinstance(message, Credit):
            self._credits.received(source, message.step)
        return source, message

    # ---- a meeting

    def _meet(self) -> Answers:
        """All peers take the mean of those that take part."""
        began_s = yield Now()
        if self.strategy.asynchronous and self.rank < self.num_active:
            yield from self._catch_up()
        self.digest = self.replica.digest()
        total, count = (self.replica.total(), 1) if self.rank < self.num_active else (None, 0)
        number = self.num_meetings
        for child in topology.children(self.rank, self.number):
            message = yield from self._expect(child, Sum, number)
            if message.payload is not None:
                total = message.payload if total is None else self.replica.add(total, message.payload)
            count += message.count
        parent = topology.parent(self.rank)
        if parent is None:
            mean = self.replica.divide(total, count)
        else:
            yield from self._send(parent, Sum(number, self.step, count, total))
            mean = (yield from self._expect(parent, Mean, number)).payload
        for child in topology.children(self.rank, self.number):
            yield from self._send(child, Mean(number, self.step, mean.hold()))
        if self.validations.informs and self.strategy.asynchronous:
            yield from self._tell(number)
        self.drift = self.replica.settle_mean(mean)
        self.drift_max = max(self.drift_max, self.drift if self.rank < self.num_active else 0.0)
        self.num_meetings, self._since_meeting = self.num_meetings + 1, 0
        self._heard.clear()
        self._credits.clear()
        self.wait_s += (yield Now()) - began_s

    def _send(self, to: int, message: Message) -> Answers:
        payload = payload_of(message)
        self.sent_bytes += payload.num_bytes if payload is not None else 0
        yield Send(to, message)

    def _catch_up(self) -> Answers:
        """Take in all that the senders have said since the last meeting: as many messages as this peer has sent, for
        all take the same steps. Those of sums and of steps after the meeting wait. The credits that are due come in
        before the meeting, too, so none is under way after it."""
        senders = set(self.strategy.senders(self.rank, self.num_active, self.step))
        waiting, self._waiting = self._waiting, deque()
        for source, message in waiting:
            yield from self._hear(source, message)
        while self._credits.are_due or any(
            self._heard.get(peer, 0) < self._since_meeting for peer in senders
        ):
            yield from self._hear(*self._noted((yield Recv(kind="Update", sources=senders))))

    def _validate(self, epoch: int, turn: Turn) -> Answers:
        """The first peer's replica is measured: by all peers where they are synchronous and all know that it is time,
        or else by itself while the others go on."""
        samples, measures = turn.samples_before, self.duties.measures
        metrics: dict[str, float] = {}
        if measures is not None and self._validates_together:
            metrics = yield from self._measure_together(measures, turn.step, samples)
            if self.validations.informs:
                self._untold = self.validations.told(metrics)
                yield from self._tell(turn.step)
        elif self.rank == 0:
            alone = self.replica.validate if measures is None else measures.alone
            metrics = yield Compute(lambda: alone(samples), "validate")
            if self.validations.informs:
                self._untold = merged(self._untold, self.validations.told(metrics))
                if self.number == 1:  # nobody else has to be at the same rate
                    yield from self._tell(turn.step)
        if self.rank == 0 and metrics:
            self.report.event("validation", epoch=epoch + 1, samples=samples, **metrics)
        self._look_at_end(turn.step)

    def _measure_together(self, measures: PeerMeasures, step: int, samples: int) -> Answers:
        """What the first peer holds goes down the tree of all, and what each has measured of it goes up."""
        parent, children = topology.parent(self.rank), topology.children(self.rank, self.number)
        if parent is None:
            shown = yield Compute(measures.show, "validate", size=0.0)
        else:
            shown = (yield from self._expect(parent, Divide, step)).payload
        for child in children:
            yield Send(child, Divide(step, self.number, shown.hold()))
        part = measures.part_of(self.rank, self.number)
        results = [
            (yield Compute(lambda: measures.share(self.rank, self.number, shown), "validate", size=part))
        ]
        for child in children:
            results.append((yield from self._expect(child, Measured, step)).payload)
        shown.release()
        if parent is None:
            return (yield Compute(lambda: measures.conclude(results, samples), "validate", size=0.0))
        yield Send(parent, Measured(step, self.rank, measures.join(results)))
        return {}

    def _tell(self, number: int) -> Answers:
        """What the first peer has measured that a scheduler goes by comes down the tree, and all hear it."""
        text, parent = self._untold, topology.parent(self.rank)
        if parent is not None:
            text = (yield from self._expect(parent, Told, number)).text
        for child in topology.children(self.rank, self.number):
            yield Send(child, Told(number, text))
        self.replica.hear_figures(text)
        self._untold = ""

    def _look_at_end(self, step: int) -> None:
        """All peers end together where a validation has ended the run."""
        if self.validations.may_end and self.checkpoints is not None:
            over = self.rank == 0 and self.validations.over
            self.checkpoints.validated(step, over, self._validates_together)

    @property
    def _validates_together(self) -> bool:
        """Whether all peers know at which step it is time."""
        return not (self.strategy.asynchronous or self.validations.counts_seconds)

    def _counts(self) -> dict[str, Any]:
        return {
            "rank": self.rank, "steps": self.partition.step, "batches": self.batches,
            "samples": self.samples, "nonfinite": self.nonfinite,
            "compute_s": self.compute_s, "wait_s": self.wait_s, "sent_bytes": self.sent_bytes,
            "messages": self.num_sent, "averagings": self.num_meetings, "max_steps_ahead": self.max_steps_ahead,
            "max_unanswered": self._credits.most,
            "drift": self.drift, "drift_max": self.drift_max, "digest": self.digest, **self.replica.statistics(),
        }  # fmt: skip


def _number(message: Update | Sum | Mean | Ask | Agreed | Divide | Measured | Told) -> int:
    """Which step or meeting it belongs to."""
    if isinstance(message, Measured):
        return message.number
    return message.meeting if isinstance(message, Sum | Mean) else message.step
