"""Runs in virtual time behind a plan: how fast a strategy is that has no closed form, and what training comes to.

Invariants: a run depends on its arguments alone, and is made once for the same ones. How fast a strategy is, is asked
without gradients, of a few steps, after warm-ups; what training comes to, with them, of the job's epochs.
"""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.codecs.none import Uncompressed
from mpitrain.errors import EXIT_OK, EXIT_TARGET_MISSED, UsageError
from mpitrain.job import Job, Overrides
from mpitrain.planning.scaling import Conditions, Setting, Virtual
from mpitrain.reporting.targets import LOSS, Choice, choice_by_name, read_choice
from mpitrain.simulation.comparison import Comparison
from mpitrain.strategies.base import Strategy, read_strategy
from mpitrain.strategies.features import VIRTUAL, why_not
from mpitrain.virtual.compute import ComputeLaw, Constant
from mpitrain.virtual.compute_laws import Persistent, Resampled
from mpitrain.virtual.costs import Costs

STEPS, LEAST_STEPS, MOST_PUSHES = 30, 4, 4000  # of each worker; fewer where there are many workers


class Trained(NamedTuple):
    """What a training in virtual time came to.

    Args:
        strategy, workers: the setting; ranks: workers and servers; lr: the learning rate; None: the job's own.
        value: of the metric, at the end or within the time that was given; None: it was not measured by then.
        at_s, samples: when that was; to_target_s: until the job's target was met; None: it was not, or there is none.
        virtual_s: of the whole run; failure: why there are no figures.
    """

    strategy: str
    workers: int
    ranks: int
    lr: float | None
    value: float | None = None
    at_s: float | None = None
    samples: int | None = None
    to_target_s: float | None = None
    virtual_s: float | None = None
    failure: str = ""


class VirtualRuns:
    """Runs of one job under one machine's conditions.

    Args:
        job: with the command line's changes; options: those, for what they say of data and learning rate.
    """

    def __init__(self, job: Job, options: Overrides):
        self.job, self.options = job, replace(options, quiet=True, strategy=None)
        self._asked = Comparison(job, self.options, timing_only=True)
        self._found: dict[tuple[Any, ...], Virtual] = {}

    @property
    def touches_rows(self) -> bool:
        """Whether the model has tables, of which batches touch rows."""
        return self._asked.touches_rows

    def speed(self, setting: Setting, conditions: Conditions, num_workers: int, batch: float) -> Virtual:
        """Samples a second and staleness, without gradients.

        Raises:
            UsageError: the strategy refuses this job, or so many workers.
        """
        assert setting.strategy is not None
        strategy, samples = setting.strategy.after_warmup(), max(1, round(batch))
        run = copy.copy(self._asked)  # what it has learnt of codecs stays common
        run.job = replace(self.job, batch_size=samples, accumulate=1)
        run.compute = _compute(conditions, batch)
        run.network = conditions.network
        run.costs = _costs(strategy, conditions, batch)
        run.options = replace(self.options, steps=_steps(strategy, num_workers, samples))
        key = (
            str(strategy), num_workers, run.options.steps, batch, repr(run.compute), str(run.network), str(run.costs),
        )  # fmt: skip
        if key not in self._found:
            with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
                found = run.timed(strategy, num_workers, Path(scratch) / "run")
            self._found[key] = Virtual(
                found["samples_per_second"] * batch / samples,
                found.get("staleness_mean", 0.0),
                found["samples"] / found["steps"] if found["steps"] else 0.0,
            )
        return self._found[key]

    def train(
        self,
        settings: Sequence[tuple[Strategy, int, float | None]],
        conditions: Conditions,
        within_s: float | None,
    ) -> tuple[Choice, list[Trained]]:
        """(what was measured, a row for each (strategy, workers, learning rate)); the model of each is trained for
        the job's epochs, and `within_s` cuts what is looked at."""
        choice = _choice(self.job)
        rows = []
        for strategy, workers, lr in settings:
            one = Trained(str(strategy), workers, workers + strategy.num_servers(), lr)
            try:
                rows.append(
                    one._replace(**self._trained(strategy, workers, lr, conditions, choice, within_s))
                )
            except UsageError as error:
                rows.append(one._replace(failure=str(error)))
        return choice, rows

    def _trained(
        self,
        strategy: Strategy,
        workers: int,
        lr: float | None,
        conditions: Conditions,
        choice: Choice,
        within_s: float | None,
    ) -> dict[str, Any]:
        batch = conditions.batch
        with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
            run = Comparison(
                self.job,
                replace(self.options, run_dir=scratch, lr=lr or self.options.lr),
                _compute(conditions, batch),
                conditions.network,
                _costs(strategy, conditions, batch),
            )
            (row,) = run.run([strategy], [workers])["rows"]
        if row["exit_code"] not in (EXIT_OK, EXIT_TARGET_MISSED):
            return {"failure": row["failure"]}
        seen = [
            one
            for one in row["validations"]
            if choice.metric in one and (within_s is None or one["virtual_s"] <= within_s)
        ]
        met = row["to_target"]
        found = {"virtual_s": row["virtual_s"], "to_target_s": met["virtual_s"] if met else None}
        if seen:
            last = seen[-1]
            found |= {"value": last[choice.metric], "at_s": last["virtual_s"], "samples": last["samples"]}
        return found


def virtual_setting(text: str, runs: VirtualRuns) -> Setting:
    """A strategy that is run to learn its speed."""
    strategy = read_strategy(text)
    coded = any(wire not in ("full", Uncompressed()) for wire in strategy.wires)
    return Setting(
        text,
        "virtual",
        strategy.num_servers(),
        period=strategy.period_steps,
        lossy=coded,
        strategy=strategy,
        runs=runs,
    )


def with_rows(settings: Sequence[Setting], runs: VirtualRuns) -> list[Setting]:
    """Settings as they are, or, where the model has tables, those that send touched rows alone, none in closed form."""
    if not runs.touches_rows:
        return list(settings)
    found = []
    for one in settings:
        with contextlib.suppress(UsageError):  # it sends whole gradients
            found.append(setting_with_rows(one.text, read_strategy(one.text), runs))
    return found


def setting_with_rows(text: str, strategy: Strategy, runs: VirtualRuns) -> Setting:
    """A strategy for a model with tables.

    Raises:
        UsageError: it has no servers, or sends whole gradients.
    """
    why = why_not("sparse", strategy, VIRTUAL)
    if why or not strategy.has_servers:
        why = why or "how many rows ranks have in common depends on their batches"
        raise UsageError(
            f"plan: {text}: the model has tables of rows: {why}; plan strategies with servers, or let mpitrain "
            "simulate compute gradients"
        )
    return virtual_setting(text, runs)


def rank_trained(rows: Sequence[Trained], choice: Choice, criterion: str) -> list[Trained]:
    """The best first: by the metric where the criterion is accuracy, else by the time to the target, each rank of which
    counts under `cost`. What was not reached comes last."""
    by_value = criterion.startswith("accuracy") or all(one.to_target_s is None for one in rows)

    def key(one: Trained) -> tuple[bool, float, float]:
        figure = one.value if by_value else one.to_target_s
        if figure is None or figure != figure:
            return (True, 0.0, 0.0)
        if by_value:
            return (False, figure if choice.less_is_better else -figure, one.at_s or 0.0)
        return (False, figure * (one.ranks if criterion == "cost" else 1), 0.0)

    return sorted(rows, key=key)


def _choice(job: Job) -> Choice:
    """What tells a good model: what the job keeps its best by, else its target's metric, else the loss."""
    if job.keep_best:
        return read_choice(job.keep_best)
    return choice_by_name(next(iter(job.target), LOSS))


def _compute(conditions: Conditions, batch: float) -> ComputeLaw:
    """Of a batch of so many samples."""
    times = conditions.times
    if conditions.even:
        return Constant(times.mean_s * conditions.scale(batch), 0.0)
    law = Resampled(times.law) if isinstance(times.law, tuple) else times.law
    scale = conditions.scale(batch)
    return law if scale == 1 else Persistent(law, 0.0, (scale,))


def _costs(strategy: Strategy, conditions: Conditions, batch: float) -> Costs:
    """A server's updates, reading and validations; other ranks' updates are part of a batch's time."""
    costs = Costs(read_s=conditions.read_s * batch / conditions.batch, validate_s=conditions.validate_s)
    if strategy.has_servers:
        costs = replace(costs, push_s=conditions.push_s)
    if not strategy.has_servers or not conditions.apply_s:
        return costs
    passed_gb = costs.passes * conditions.num_bytes / 1e9
    return replace(costs, memory_gb_per_s=passed_gb / conditions.apply_s)


def _steps(strategy: Strategy, num_workers: int, samples: int) -> int:
    """Of a worker: whole rounds between two averagings or pushes, so that each has its share of them."""
    steps = max(LEAST_STEPS, min(STEPS, MOST_PUSHES // num_workers))
    unit = strategy.steps_to_exchange(num_workers, samples)
    return -(-steps // unit) * unit
