"""What a benchmark measures: every strategy on every number of workers, with the batch that each worker takes.

Invariants: everything that can be known to be wrong is said before the first run starts. What one setting cannot do is
a row that says why, and the others go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mpitrain.errors import UsageError
from mpitrain.job import Job, Overrides, apply_overrides
from mpitrain.strategies.base import Strategy
from mpitrain.training.job_file import load_job
from mpitrain.values import parse

# Options of train that a benchmark sets by itself, and what to say instead.
_OWN = {
    "strategy": "--strategies",
    "run_dir": "--run-dir of bench",
    "resume": "nothing: every run begins anew",
    "quiet": "--quiet of bench",
}


class TrainArgs(NamedTuple):
    """Options of `mpitrain train` for every run: the words, and what they mean, for the run and for the job file."""

    words: Sequence[str] = ()
    overrides: Overrides = Overrides()
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class Request:
    """What the command line asks.

    Attributes:
        path: of the job file; train: what every run is told.
        strategies: texts; workers, virtual_workers: how many, in runs under MPI and in virtual time.
        global_batch_size: of all workers together, the same for every number of them (strong scaling); None: every
            worker takes the job's batch (weak scaling).
        repeats: runs of each setting under MPI, with one seed after the other.
        compute, network: laws of the virtual runs. mpi: as in `mpitrain launch`.
        json, html: files to write.
    """

    path: str
    strategies: Sequence[str]
    workers: Sequence[int]
    virtual_workers: Sequence[int] = ()
    global_batch_size: int | None = None
    repeats: int = 3
    train: TrainArgs = TrainArgs()
    compute: str = "measured(3)"
    network: str = "ideal()"
    mpi: str = "auto"
    run_dir: str | None = None
    json: str | None = None
    html: str | None = None
    quiet: bool = False

    def check(self) -> None:
        """Refuse what no benchmark can do.

        Raises:
            UsageError: names the option.
        """
        for name, instead in _OWN.items():
            if getattr(self.train.overrides, name):
                raise UsageError(
                    f"--train-args: --{name.replace('_', '-')} is set for every run; use {instead}"
                )
        if self.train.overrides.batch_size is not None and self.global_batch_size is not None:
            raise UsageError(
                "--global-batch-size follows from no --batch-size: leave one of them out (of each worker, for weak "
                "scaling, or of all of them, for strong scaling)"
            )
        if not self.workers and not self.virtual_workers:
            raise UsageError("nothing to measure: give --workers or --virtual-workers")


@dataclass(frozen=True)
class Setting:
    """One row: a strategy on a number of workers.

    Attributes:
        asked: the strategy's text as it was given; batch_size: of each worker; None: refused.
        refused: why it cannot be measured; empty where it can.
    """

    strategy: Strategy
    asked: str
    workers: int
    virtual: bool
    batch_size: int | None
    refused: str = ""

    def row(self) -> dict[str, Any]:
        """How the row begins."""
        batch = self.batch_size or 0
        return {
            "strategy": str(self.strategy),
            "strategy_asked": self.asked,
            "workers": self.workers,
            "servers": self.strategy.num_servers(),
            "virtual": self.virtual,
            "batch_size": self.batch_size,
            "global_batch_size": batch * self.strategy.num_replicas(self.workers) if batch else None,
            **({"refused": self.refused} if self.refused else {}),
        }


def load(request: Request) -> tuple[Job, list[Setting]]:
    """The job with everything but the strategy in place, and all settings, those under MPI first.

    Raises:
        UsageError: the job, an option or a strategy's text is wrong, or not one setting can be measured.
    """
    request.check()
    strategies = [(parse(text, "strategy"), text) for text in dict.fromkeys(request.strategies)]
    first = replace(request.train.overrides, strategy=request.strategies[0])
    job = apply_overrides(load_job(request.path, request.train.settings), first)
    job.data.scan()  # a pattern that matches nothing is said here, once
    settings = [
        _setting(request, job, strategy, text, number, virtual)
        for virtual, counts in ((False, request.workers), (True, request.virtual_workers))
        for strategy, text in strategies
        for number in sorted(set(counts))
        if isinstance(strategy, Strategy)
    ]
    if all(setting.refused for setting in settings):
        raise UsageError("; ".join(dict.fromkeys(setting.refused for setting in settings)))
    return job, settings


def _setting(
    request: Request, job: Job, strategy: Strategy, text: str, number: int, virtual: bool
) -> Setting:
    try:
        strategy.check_workers(number)
        batch = _batch_size(request, job, strategy, number)
    except UsageError as error:
        return Setting(strategy, text, number, virtual, None, str(error))
    return Setting(strategy, text, number, virtual, batch)


def _batch_size(request: Request, job: Job, strategy: Strategy, number: int) -> int:
    whole = request.global_batch_size
    if whole is None:
        return job.batch_size
    shares = strategy.num_replicas(number)
    if whole % shares:
        raise UsageError(
            f"--global-batch-size {whole} cannot be divided among {shares} batches of {number} workers evenly"
        )
    return whole // shares


def in_turns(settings: Sequence[Setting], repeats: int) -> Iterator[tuple[int, int]]:
    """(number of the setting, repeat) in the order of the runs: every setting once, then each once more, beginning one
    later, so that neither drift of the machine nor the place in the order favours one."""
    able = [number for number, setting in enumerate(settings) if not setting.virtual and not setting.refused]
    for repeat in range(repeats):
        start = repeat % max(1, len(able))
        yield from ((number, repeat) for number in [*able[start:], *able[:start]])
