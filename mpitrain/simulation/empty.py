"""Stores and replicas of no numbers, for roles that are only timed.

Invariants: they satisfy `roles/protocols.py`; a payload knows nothing but its bytes, and nothing is validated.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from mpitrain.messages import Lease
from mpitrain.simulation.workload import NUMBER_BYTES, Workload
from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.strategies.sampling.peer_partition import Turn
from mpitrain.strategies.sampling.step_partition import StepTurn


class Bytes:
    """A payload that is nothing but its size."""

    __slots__ = ("num_bytes",)

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes

    def statistics(self) -> dict[str, float]:
        """Nothing is known of the numbers."""
        return {}

    def hold(self) -> Bytes:
        """It can be held as often as anybody likes."""
        return self

    def release(self) -> None:
        """Nothing is held."""


class Nothing:
    """A gradient that took its time."""

    __slots__ = ("samples", "share")
    loss, finite, options, goes_on = 0.0, True, "", False

    def __init__(self, samples: int):
        self.samples, self.share = samples, float(samples)


class Quiet:
    """A report that goes nowhere."""

    def progress(self, samples: int, step: int, epoch: int, loss: float, **fields: object) -> None:
        """Not reported."""

    def event(self, name: str, **fields: object) -> None:
        """Not reported."""

    def pause(self, seconds: float) -> None:
        """Not counted."""

    def until_now(self) -> None:
        """Not counted."""


class EmptyStore:
    """A shard of no numbers; `reply`, `final`: what it answers with; `codes`: each worker is answered with something of
    its own."""

    def __init__(self, reply: Bytes, final: Bytes, codes: bool = False):
        self.reply, self.final, self.codes = reply, final, codes

    def add(self, worker: int, payload: object, weight: float, share: float = 1.0) -> None:
        """Nothing is added."""

    def hear_options(self, text: str) -> None:
        """There is no optimizer."""

    def correct(self, worker: int, payload: object, num_reads: int) -> Any:
        """As it came."""
        return payload

    def mask(self, payload: object, spans: list[tuple[int, int]]) -> Any:
        """As it came."""
        return payload

    def apply(self) -> None:
        """What is read from here on is no longer what was read."""
        self.reply = Bytes(self.reply.num_bytes)

    def follow(self, samples: int, num_workers: int) -> None:
        """There is no optimizer."""

    def average(self) -> Bytes:
        """As large as the shard."""
        return self.final

    def read(self, worker: int, full: bool = False, uses: int = 1) -> Bytes:
        """As large as the parameters."""
        if full:
            return self.final
        return Bytes(self.reply.num_bytes) if self.codes else self.reply


class EmptySums:
    """Adds nothing up."""

    def add(self, total: object, others: Sequence[tuple[float, object]]) -> None:
        """It is as large as one."""


class _Steps:
    """What empty replicas have in common: gradients of nothing."""

    def __init__(self) -> None:
        self._gradients: dict[int, Nothing] = {}

    def progress(self, samples: int, living: float = 1.0) -> None:
        """No schedule follows it."""

    def hear_figures(self, text: str) -> None:
        """Nothing is measured, so nobody is told."""

    def prefetch(self, lease: Lease) -> None:
        """Nothing is read."""

    def validate(self, samples: int | None = None) -> dict[str, float]:
        """Nothing is measured."""
        return {}

    def statistics(self) -> dict[str, float]:
        """Nothing to report."""
        return {}

    def of(self, samples: int) -> Nothing:
        """The gradient of so many samples."""
        if samples not in self._gradients:
            self._gradients[samples] = Nothing(samples)
        return self._gradients[samples]


class EmptyReplica(_Steps):
    """A worker's model of no numbers; `pushes`: what it pushes to each shard."""

    def __init__(self, pushes: list[Bytes]):
        super().__init__()
        self.pushes = pushes

    def load(self, shard: int, payload: object) -> None:
        """Nothing to take over."""

    def subtract(self, shard: int, payload: object) -> None:
        """Nothing to move."""

    def gradient(self, lease: Any, step: int) -> Nothing:
        """It takes its time, which the world knows."""
        return self.of(lease.num_samples)

    def take_push(self) -> list[Any]:
        """What to push, this worker's own."""
        return [Bytes(one.num_bytes) for one in self.pushes]

    def finish(self) -> None:
        """Nothing is kept back."""

    def before_final(self) -> None:
        """Nothing to keep."""


class EmptyReducingReplica(EmptyReplica):
    """The same, where workers all-reduce so many bytes after a push."""

    def __init__(self, pushes: list[Bytes], reduced_bytes: float):
        super().__init__(pushes)
        self.reduced_bytes = reduced_bytes

    def reduction(self, is_finite: bool) -> EmptyReduction:
        """Bytes alone."""
        return EmptyReduction(self.reduced_bytes)


class EmptyPeer(_Steps):
    """A peer's model of no numbers; `message`: what it sends of a step; `model`: at a meeting."""

    def __init__(self, message: Bytes, model: Bytes):
        super().__init__()
        self.message, self.model = message, model

    def step(self, turn: Turn) -> Nothing:
        """It takes its time, which the world knows."""
        assert turn.lease is not None
        return self.of(turn.lease.num_samples)

    def update(self) -> Bytes:
        """What to send of it."""
        return self.message

    def apply(self, payload: object, num_peers: int) -> None:
        """Nothing changes."""

    def copy(self, source: int, payload: object) -> None:
        """Nothing changes."""

    def mix(self, rank: int, weights: dict[int, float], rate: float) -> None:
        """Nothing changes."""

    def end_step(self) -> None:
        """Nothing changes."""

    def total(self) -> Bytes:
        """As large as the model."""
        return self.model

    def add(self, total: object, other: object) -> Any:
        """As large as one."""
        return total

    def divide(self, total: object, count: int) -> Any:
        """As large as one."""
        return total

    def settle_mean(self, mean: object) -> float:
        """All are alike."""
        return 0.0

    def digest(self) -> str:
        """All are alike."""
        return ""


class EmptyReduction:
    """What a worker brings to an all-reduce: bytes, and what is to happen when it is over."""

    def __init__(self, num_bytes: float, then: Callable[[], None] = lambda: None):
        self._num_bytes, self._then = num_bytes, then

    def num_bytes(self) -> float:
        """Bytes that are reduced."""
        return self._num_bytes

    def rounds(self) -> Generator[Any, Any, None]:
        """Nothing is asked."""
        self._then()
        return
        yield


class EmptyLocalReplica(_Steps):
    """A worker's model of no numbers under `localsgd`."""

    validates = validates_last = stopped = False
    measured_part = 0.0

    def __init__(self, strategy: LocalSGD, workload: Workload):
        super().__init__()
        self.on_settled: Callable[[], object] = lambda: None
        self.strategy, self.memory = strategy, strategy.begin()
        self.samples = self.num_averagings = 0
        self._averages_gradients = False
        self._model_bytes = float(workload.num_parameters * workload.number_bytes)
        self._mean_bytes = (
            workload.num_parameters * NUMBER_BYTES.get(strategy.wire, workload.number_bytes)
            + workload.buffer_bytes * strategy.average_buffers
            + workload.optimizer_bytes * strategy.average_optimizer
        )

    def local_step(self, turn: StepTurn) -> float:
        """It takes its time, which the world knows."""
        self._averages_gradients = self.strategy.averages_gradients(self.memory)
        self.samples += turn.num_samples
        return 0.0

    def reduce_gradients(self) -> EmptyReduction | None:
        """The mean of all, where the step is one of allreduce."""
        return EmptyReduction(self._model_bytes) if self._averages_gradients else None

    def end_step(self, turn: StepTurn) -> EmptyReduction | None:
        """The averaging that is due."""
        return self._average() if self.strategy.on_step(self.memory, turn.num_samples) else None

    def settle_checkpoint(self) -> None:
        """A checkpoint may be due."""
        self.on_settled()

    @property
    def is_apart(self) -> bool:
        """Whether workers hold different parameters now."""
        return bool(self.memory["since"])

    def finish(self) -> EmptyReduction | None:
        """The last averaging."""
        return self._average() if self.is_apart else None

    def _average(self) -> EmptyReduction:
        return EmptyReduction(self._mean_bytes, self._averaged)

    def _averaged(self) -> None:
        self.strategy.on_average(self.memory)
        self.num_averagings += 1

    def reduce_mean(self) -> None:
        """Nothing is validated."""

    def measure(self) -> None:
        """Nothing is validated."""

    def gather_measured(self) -> Any:
        """Nothing is validated."""
        raise AssertionError("nothing is validated")

    def conclude(self) -> dict[str, float]:
        """Nothing is validated."""
        return {}

    def hear_figures(self, text: str) -> Any:
        """Nothing is measured."""
        raise AssertionError("nothing is validated")

    def agree_to_end(self, ends: bool) -> Any:
        """No validation ends the run."""
        raise AssertionError("nothing is validated")
