"""What can be ordered, as values: each says whom it hits and when.

Invariants: arithmetic only; `straggler.py` carries it out at the effect seam.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from mpitrain.errors import UsageError
from mpitrain.values import Value, parse, register

LEAST_MTBF_S = 1e-3


@dataclass(frozen=True, repr=False)
class Injection(Value):
    """Base of everything `--inject` accepts."""


@dataclass(frozen=True, repr=False)
class AtWorker(Injection):
    """What happens to one worker.

    Args:
        worker: index of the worker among the workers, 0 to N - 1; not a rank.
    """

    worker: int

    def check(self) -> None:
        self.hold("worker", self.worker >= 0, "is an index from 0 (not a rank)")

    def sleep_s(self, step: int, compute_s: float, seed: int) -> float:
        """Seconds to sleep after gradient number `step`, which took `compute_s`."""
        return 0.0


@register("inject", "slow")
class Slow(AtWorker):
    """Every gradient takes `factor` times as long: the worker sleeps (factor - 1) times what it computed."""

    factor: float

    def check(self) -> None:
        super().check()
        self.hold("factor", 1 <= self.factor < math.inf, "must be finite and at least 1")

    def sleep_s(self, step: int, compute_s: float, seed: int) -> float:
        return (self.factor - 1) * compute_s


@register("inject", "pause")
class Pause(AtWorker):
    """Once in every start of the run, after gradient number `at_step` of it (from 0), the worker sleeps `seconds`."""

    at_step: int
    seconds: float

    def check(self) -> None:
        super().check()
        self.hold("at_step", self.at_step >= 0, "counts from 0")
        _check_seconds(self.name, self.seconds)

    def sleep_s(self, step: int, compute_s: float, seed: int) -> float:
        return self.seconds if step == self.at_step else 0.0


@register("inject", "slow_reader")
class SlowReader(AtWorker):
    """Whatever is sent to the worker is received `seconds` late; it is under way meanwhile, and its sender holds it."""

    seconds: float

    def check(self) -> None:
        super().check()
        _check_seconds(self.name, self.seconds)


@register("inject", "stall")
class Stall(AtWorker):
    """After each gradient, with probability `chance`, the worker sleeps `seconds`. The draw is keyed by (seed,
    worker, step), so the same gradients stall in both worlds.
    """

    chance: float
    seconds: float

    def check(self) -> None:
        super().check()
        self.hold("chance", 0 <= self.chance <= 1, "is a probability from 0 to 1")
        _check_seconds(self.name, self.seconds)

    def sleep_s(self, step: int, compute_s: float, seed: int) -> float:
        drawn = random.Random(f"stall/{seed}/{self.worker}/{step}").random()
        return self.seconds if drawn < self.chance else 0.0


@dataclass(frozen=True, repr=False)
class Fault(AtWorker):
    """After gradient number `at_step` (from 0) of every start of the run, before it is pushed."""

    at_step: int

    def check(self) -> None:
        super().check()
        self.hold("at_step", self.at_step >= 0, "counts from 0")


@register("inject", "kill")
class Kill(Fault):
    """SIGKILL, `after_s` later: in the middle of whatever is under way then."""

    after_s: float = 0.0

    def check(self) -> None:
        super().check()
        self.hold("after_s", 0 <= self.after_s < math.inf, "must be finite and not negative")


@register("inject", "kill_at_end")
class KillAtEnd(AtWorker):
    """SIGKILL when all has been pushed and it falls to this worker to save and validate the final model, before it
    does."""


@register("inject", "segv")
class Segv(Fault):
    """SIGSEGV, as from a bug in native code."""


@register("inject", "exit")
class Exit(Fault):
    """The process exits with code 3 without ending MPI: the one death that ULFM does not report."""


@register("inject", "raise")
class Raise(Fault):
    """An exception in the user's code."""


@register("inject", "stop")
class Stop(Fault):
    """SIGSTOP: the process is there and does nothing."""


@register("inject", "wedge")
class Wedge(Fault):
    """It waits in user code for ever; its watchdog (`--watchdog-s`) is what ends it."""


@register("inject", "nan")
class Nan(Fault):
    """The gradient is not finite."""


@register("inject", "torn")
class Torn(Fault):
    """The payload that carries the gradient is torn."""


FLIPPED = ("parameters", "optimizer", "payload")


@register("inject", "flip")
class Flip(Fault):
    """A bit flips, of what all workers hold the same of.

    Args:
        what: "parameters" for these and buffers that train, "optimizer" for its state, or "payload" for one of the
            messages of more than 64 bytes that the worker receives next.
        tensor: the number of the tensor, or of the message, counted round.
        bit: the number of the bit in it, counted round.
    """

    what: str = "parameters"
    tensor: int = 0
    bit: int = 0

    def check(self) -> None:
        super().check()
        self.hold_known("what", FLIPPED)
        for key in ("tensor", "bit"):
            self.hold(key, getattr(self, key) >= 0, "counts from 0")


@dataclass(frozen=True, repr=False)
class FileFault(Injection):
    """Something happens to write number `at_write` (from 0) of one part of the checkpoints.

    Args:
        part: "shard-0" is server 0's, or rank 0's of a run in lockstep.
    """

    at_write: int = 0
    part: str = "shard-0"

    def check(self) -> None:
        self.hold("at_write", self.at_write >= 0, "counts from 0")


@register("inject", "disk_full")
class DiskFull(FileFault):
    """The file cannot be written to its end."""


@register("inject", "corrupt_file")
class CorruptFile(FileFault):
    """A bit of its tensors flips when it has been written."""


@register("inject", "crash")
class Crash(Injection):
    """The whole job ends, as when a node, its power or its time is gone, and is started again from its newest
    checkpoint; in virtual time only.

    Args:
        mtbf_s: mean time between two ends, which are drawn from an exponential law; 0: none are drawn.
        at_s: the job ends once, so many seconds after it began.
    """

    mtbf_s: float = 0.0
    at_s: float | None = None

    def check(self) -> None:
        for key in ("mtbf_s", "at_s"):
            _check_seconds(f"{self.name}: {key}", getattr(self, key) or 0.0)
        self.hold("mtbf_s", not 0 < self.mtbf_s < LEAST_MTBF_S, f"must be at least {LEAST_MTBF_S:g}")
        if not self.mtbf_s and self.at_s is None:
            raise UsageError('crash: say when, as in "crash(mtbf_s=86400)" or "crash(at_s=3600)"')


SILENT = (Exit, Stop, Wedge)  # nobody is informed, in virtual time


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
        if isinstance(injection, AtWorker) and injection.worker >= num_workers:
            there = f"{num_workers} workers, 0 to {num_workers - 1}" if num_workers > 1 else "1 worker, 0"
            raise UsageError(
                f'--inject "{injection}": there is no worker {injection.worker}. This run has {there} '
                "(the index among the workers; servers and ranks do not count)"
            )


def check_real(injections: tuple[Injection, ...]) -> None:
    """Refuse what only virtual time can do.

    Raises:
        UsageError: names the injection.
    """
    for injection in injections:
        if isinstance(injection, Crash):
            raise UsageError(
                f'--inject "{injection}" ends a whole job in virtual time (mpitrain simulate): order kill(...) for a '
                "worker here, and start the run again with --resume auto"
            )
