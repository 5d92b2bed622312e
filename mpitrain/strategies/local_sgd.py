"""Periodic averaging: each worker steps by itself, and every so often all take the mean.

    H local steps:      x_i <- x_i - eta g_i
    then                xbar = mean of x_i,  d = x0 - xbar,  x_i = x0 = outer(x0, d)

x0 is what all held after the averaging before. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019;
with `start`, gradients are averaged at every step until then (post-local SGD: Lin et al., "Don't Use Large
Mini-Batches, Use Local SGD", ICLR 2020). Bytes a step are those of allreduce divided by H. Invariants: when to
average is decided here, from counts alone, so that all workers decide the same without a message.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mpitrain.errors import UsageError
from mpitrain.strategies.base import Strategy
from mpitrain.values import Value, register

OUTER_WIRES = ("full", "float16", "bfloat16", "int8")
UNITS = ("steps", "samples")


@dataclass(frozen=True, repr=False)
class Outer(Value):
    """Base of what is done with the averaged difference d."""


@register("outer", "average")
class Average(Outer):
    """The mean itself: x = x0 - d."""


@register("outer", "slowmo")
class SlowMo(Outer):
    """A slow momentum: u = beta u + d / eta; x = x0 - rate eta u, eta the workers' learning rate.

    Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", ICLR 2020. beta=0 and
    rate=1 is local SGD.
    """

    beta: float = 0.5
    rate: float = 1.0

    def check(self) -> None:
        if not 0 <= self.beta < 1 or not 0 < self.rate < float("inf"):
            raise UsageError(
                f"slowmo: needs 0 <= beta < 1 and a finite rate > 0, got beta={self.beta}, rate={self.rate}"
            )


@register("outer", "diloco")
class DiLoCo(Outer):
    """Nesterov's momentum on the averaged difference: v = momentum v + d; x = x0 - rate (d + momentum v).

    Douillard et al., "DiLoCo", 2023, with AdamW on the workers and periods of hundreds of steps.
    """

    rate: float = 0.7
    momentum: float = 0.9

    def check(self) -> None:
        if not 0 <= self.momentum < 1 or not 0 < self.rate < float("inf"):
            raise UsageError(
                f"diloco: needs 0 <= momentum < 1 and a finite rate > 0, got momentum={self.momentum}, "
                f"rate={self.rate}"
            )


@register("strategy", "localsgd")
class LocalSGD(Strategy):
    """Every rank is a worker with an optimizer of its own; parameters are averaged every `period`.

    Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.

    Args:
        period: H, in `unit`s: how much every worker does between two averagings.
        unit: "steps", or "samples" of all workers together, as schedules count them.
        start: so much of the run, in `unit`s, is ordinary allreduce (post-local SGD).
        average_optimizer: average the floating tensors of the optimizer's state too (momenta); otherwise each worker
            keeps its own.
        average_buffers: average floating buffers too (BatchNorm's running statistics).
        outer: what is done with the averaged difference: `average()`, `slowmo(...)`, `diloco(...)`.
        wire: the difference as it travels: "full", "float16", "bfloat16", or "int8" (a scale for 256 numbers, what is
            rounded off is kept for the next time); sums are taken in float32.
    """

    period: int = 16
    unit: str = "steps"
    start: int = 0
    average_optimizer: bool = False
    average_buffers: bool = True
    outer: Outer = field(default=Average(), metadata={"kind": "outer"})
    wire: str = "full"

    wire_fields: ClassVar[tuple[str, ...]] = ("wire",)
    needs_all = False
    steps_on_workers = True

    def check(self) -> None:
        if self.period < 1 or self.start < 0:
            raise UsageError(
                f"localsgd: needs period >= 1 and start >= 0, got period={self.period}, start={self.start}"
            )
        for key, known in (("unit", UNITS), ("wire", OUTER_WIRES)):
            self.hold_known(key, known)

    @property
    def clips_mean(self) -> bool:
        return True  # nothing is coded or pushed: each worker steps with what is clipped, its own or the mean

    @property
    def begins_together(self) -> bool:
        return self.start > 0

    @property
    def period_steps(self) -> int:
        return self.period if self.unit == "steps" else 1

    def after_warmup(self) -> Strategy:
        return replace(self, start=0)

    def steps_to_exchange(self, num_workers: int, samples: int) -> int:
        return self.period if self.unit == "steps" else -(-self.period // (num_workers * samples))

    @property
    def keeps_anchor(self) -> bool:
        """Whether x0 is needed: for an outer optimizer, or because differences travel."""
        return self.outer != Average() or self.wire != "full"

    def begin(self) -> dict[str, Any]:
        """The strategy's memory before the first step: `done` and `since` the last averaging, in `unit`s."""
        return {"done": 0, "since": 0}

    def averages_gradients(self, memory: dict[str, Any]) -> bool:
        """Whether the step to come is one of allreduce."""
        return bool(memory["done"] < self.start)

    def on_step(self, memory: dict[str, Any], samples: int) -> bool:
        """A step of all workers over `samples` samples was taken: whether to average now. Changes `memory`."""
        amount = 1 if self.unit == "steps" else samples
        local = not self.averages_gradients(memory)
        memory["done"] += amount
        memory["since"] += amount if local else 0
        return bool(memory["since"] >= self.period)

    def on_average(self, memory: dict[str, Any]) -> None:
        """All hold the same again."""
        memory["since"] = 0
