"""Stragglers you can order: which worker sleeps when, as text that means the same in both worlds.

    --inject "slow(worker=2, factor=5)"  --inject "pause(worker=1, at_step=50, seconds=2)"

Law of this file: injection happens at the effect seam and nowhere else. `Straggler.wrap` passes every effect
of a role through and, after a gradient of its worker, yields a `Sleep`; the role, the rule and the world
stay as they are. A slow worker sleeps, it does not spin: it must not take a core from the others. Which
gradients are hit is a function of (seed, worker, step), never of timing.

`worker` is the worker's index, 0 to N - 1, whatever its rank is; `step` counts its own gradients from 0.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mpitrain.effects import Compute, Interrupted, Now, Role, Sleep
from mpitrain.errors import UsageError
from mpitrain.text import Value, parse, register


@dataclass(frozen=True, repr=False)
class Injection(Value):
    """Base of everything `--inject` accepts.

    Args:
        worker: index of the worker among the workers, 0 to N - 1; not a rank.
    """

    worker: int

    def check(self) -> None:
        if self.worker < 0:
            raise UsageError(f"{self.name}: worker is an index from 0 (not a rank), got {self.worker}")

    def sleep_s(self, step: int, compute_s: float, seed: int) -> float:
        """Seconds to sleep after gradient number `step`, which took `compute_s`."""
        raise NotImplementedError


@register("inject", "slow")
@dataclass(frozen=True, repr=False)
class Slow(Injection):
    """Every gradient takes `factor` times as long: the worker sleeps (factor - 1) times what it computed."""

    factor: float

    def check(self) -> None:
        super().check()
        if not 1 <= self.factor < math.inf:
            raise UsageError(f"slow: factor must be finite and at least 1, got {self.factor}")

    def sleep_s(self, step: int, compute_s: float, seed: int) -> float:
        return (self.factor - 1) * compute_s


@register("inject", "pause")
@dataclass(frozen=True, repr=False)
class Pause(Injection):
    """Once, after gradient number `at_step` (from 0), the worker sleeps `seconds`."""

    at_step: int
    seconds: float

    def check(self) -> None:
        super().check()
        if self.at_step < 0:
            raise UsageError(f"pause: at_step counts from 0, got {self.at_step}")
        _check_seconds(self.name, self.seconds)

    def sleep_s(self, step: int, compute_s: float, seed: int) -> float:
        return self.seconds if step == self.at_step else 0.0


@register("inject", "stall")
@dataclass(frozen=True, repr=False)
class Stall(Injection):
    """After each gradient, with probability `chance`, the worker sleeps `seconds`. The draw is keyed by (seed,
    worker, step), so the same gradients stall in both worlds.
    """

    chance: float
    seconds: float

    def check(self) -> None:
        super().check()
        if not 0 <= self.chance <= 1:
            raise UsageError(f"stall: chance is a probability from 0 to 1, got {self.chance}")
        _check_seconds(self.name, self.seconds)

    def sleep_s(self, step: int, compute_s: float, seed: int) -> float:
        drawn = random.Random(f"stall/{seed}/{self.worker}/{step}").random()
        return self.seconds if drawn < self.chance else 0.0


def _check_seconds(name: str, seconds: float) -> None:
    if not 0 <= seconds < math.inf:
        raise UsageError(f"{name}: seconds must be finite and not negative, got {seconds}")


def texts(given: str | Injection | Iterable[str | Injection]) -> tuple[str, ...]:
    """One or several injections, as text or as values, as a tuple of texts."""
    return tuple(str(one) for one in ([given] if isinstance(given, str | Injection) else given))


def read(texts: Iterable[str]) -> tuple[Injection, ...]:
    """The injections that the texts spell.

    Raises:
        UsageError: a text that is no injection; the message names what exists.
    """
    values = tuple(parse(text, "inject") for text in texts)
    assert all(isinstance(value, Injection) for value in values)
    return values  # type: ignore[return-value]


def check_workers(injections: tuple[Injection, ...], num_workers: int) -> None:
    """Refuse an injection for a worker that does not exist.

    Raises:
        UsageError: names the injection and the workers there are.
    """
    for injection in injections:
        if injection.worker >= num_workers:
            there = f"{num_workers} workers, 0 to {num_workers - 1}" if num_workers > 1 else "1 worker, 0"
            raise UsageError(
                f'--inject "{injection}": there is no worker {injection.worker}. This run has {there} '
                "(the index among the workers; servers and ranks do not count)"
            )


class Straggler:
    """What is ordered for one worker, and what has come of it.

    Args:
        injections: everybody's; those of other workers are ignored.
        worker: this worker's index.
        seed: the run's.
    """

    def __init__(self, injections: tuple[Injection, ...], worker: int, seed: int):
        self.injections = tuple(one for one in injections if one.worker == worker)
        self.worker, self.seed = worker, seed
        self.step = self.sleeps = 0
        self.slept_s = 0.0

    def sleep_s(self, compute_s: float) -> float:
        """One gradient more, which took `compute_s`: seconds to sleep now, counted as slept."""
        seconds = sum(one.sleep_s(self.step, compute_s, self.seed) for one in self.injections)
        self.step += 1
        self.sleeps += seconds > 0
        self.slept_s += seconds
        return seconds

    def wrap(self, role: Role) -> Role:
        """The role, its gradients followed by the sleeps; the role itself if nothing is ordered."""
        return self._follow(role) if self.injections else role

    def _follow(self, role: Role) -> Role:
        answer: Any = None
        while True:
            try:
                effect = role.send(answer)
            except StopIteration as end:
                return end.value
            if not (isinstance(effect, Compute) and effect.what == "gradient"):
                answer = yield effect
                continue
            began_s = yield Now()
            answer = yield effect
            if answer is None or isinstance(answer, Interrupted):
                continue
            seconds = self.sleep_s((yield Now()) - began_s)
            if seconds > 0 and (broken_off := (yield Sleep(seconds, effect.interruptible))) is not None:
                answer = broken_off  # the gradient was not finished yet, as far as its role can tell

    def counts(self) -> list[dict[str, Any]]:
        """For `result.json`: how often and how long this worker slept; empty if nothing was ordered."""
        row = {"worker": self.worker, "sleeps": self.sleeps, "slept_s": self.slept_s}
        return [row] if self.injections else []

    def state(self) -> dict[str, Any]:
        """Where the worker is, JSON-able."""
        return {"step": self.step, "sleeps": self.sleeps, "slept_s": self.slept_s}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.step, self.sleeps, self.slept_s = state["step"], state["sleeps"], state["slept_s"]
