"""What validation must reach: one reading and one judgement of targets, for every place that has them.

Invariants: a target is a number, which means at least that, or a text: "<X", "<=X", ">X" or ">=X". A metric that
is NaN, infinite or not measured misses every target. Standard library only.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

from mpitrain.errors import UsageError

LOSS = "validation_loss"  # what every validation reports, whatever the job's metrics are
# A number means "at least", which no run should have to reach of these.
_SMALLER_IS_BETTER = ("loss", "error", "perplexity")
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_WORDS = {"<": "below", "<=": "at most", ">": "above", ">=": "at least"}
_MISSED = {"<": "is not below", "<=": "is above", ">": "is not above", ">=": "is below"}
_GOAL = re.compile(r"\s*(<=|>=|<|>)(.*)", re.DOTALL)
_OPTION = re.compile(r"\s*([^<>=]*?)\s*(<=|>=|<|>|=)(.*)", re.DOTALL)


class Target(NamedTuple):
    """What one metric must reach: `sign` is one of `<`, `<=`, `>`, `>=`."""

    metric: str
    sign: str
    bound: float

    def met(self, value: float | None) -> bool:
        """Whether a measured value reaches it."""
        return (
            value is not None and math.isfinite(value) and bool(_COMPARE[self.sign](float(value), self.bound))
        )

    def in_words(self) -> str:
        """What the metric must be."""
        return f"{_WORDS[self.sign]} {self.bound:g}"

    def why_missed(self, value: float | None) -> str:
        """In words, for a value that does not reach it."""
        if value is None:
            return f"{self.metric} was not measured, and its target is {self.sign}{self.bound:g}"
        if not math.isfinite(value):
            return f"{self.metric} is {value}, and its target is {self.sign}{self.bound:g}"
        return f"{self.metric} {value} {_MISSED[self.sign]} {self.bound:g}"


def read_target(metric: str, goal: object) -> Target:
    """The target that `goal` sets for `metric`.

    Raises:
        UsageError: `goal` is neither a number nor one of the texts, or it is a number and the metric a loss.
    """
    where = f"target of {metric!r}"
    if isinstance(goal, str):
        found = _GOAL.fullmatch(goal)
        if found is None:
            raise UsageError(f'{where}: {goal!r} is neither a number (at least that) nor a text "<X" or ">X"')
        return Target(metric, found[1], _bound(found[2], where))
    if isinstance(goal, bool) or not isinstance(goal, Real):
        raise UsageError(f'{where}: {goal!r} is neither a number (at least that) nor a text "<X" or ">X"')
    if metric.lower().endswith(_SMALLER_IS_BETTER):
        raise UsageError(
            f"{where}: the number {goal} means at least {goal}, which a bad run meets; "
            f'write {{"{metric}": "<{goal}"}}, or --target "{metric}<{goal}", for below {goal}, or '
            f'">{goal}" if above is meant'
        )
    return Target(metric, ">=", _bound(goal, where))


def _bound(text: Any, where: str) -> float:
    try:
        bound = float(text)
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise UsageError(f"{where}: {str(text).strip()!r} is not a finite number")
    return bound


def read_option(text: str) -> tuple[str, Any]:
    """(metric, goal) of a `--target` text: "accuracy=0.97", "validation_loss<0.3".

    Raises:
        UsageError: it is not of that form.
    """
    found = _OPTION.fullmatch(text)
    if found is None or not found[1]:
        raise UsageError(f'--target {text!r}: write "NAME=X" (at least X), "NAME<X" or "NAME>X"')
    metric, sign, bound = found[1], found[2], found[3]
    goal = _bound(bound, f"--target {text!r}") if sign == "=" else f"{sign}{bound.strip()}"
    read_target(metric, goal)
    return metric, goal


def option_text(metric: str, goal: object) -> str:
    """The `--target` text of one target."""
    return f"{metric}{goal}" if isinstance(goal, str) else f"{metric}={goal}"


def check_targets(goals: Mapping[str, object], reported: Iterable[str] | None = None) -> None:
    """Refuse targets that cannot be read, and those of metrics that are not among `reported`, where that is known.

    Raises:
        UsageError: names the metric.
    """
    if not isinstance(goals, Mapping):
        raise UsageError(
            f'target must be a dict such as {{"accuracy": 0.97, "validation_loss": "<0.3"}}, got {goals!r}'
        )
    known = None if reported is None else sorted(reported)
    for metric, goal in goals.items():
        read_target(metric, goal)
        if known is not None and metric not in known:
            raise UsageError(
                f"target {metric!r}: validation reports no metric of that name; it reports {', '.join(known)}"
            )


class Choice(NamedTuple):
    """What the best model is chosen by: a metric, and whether less of it is better."""

    metric: str
    less_is_better: bool

    def is_better(self, value: float | None, than: float | None) -> bool:
        """Whether `value` beats the best so far; None is none. A value that is not finite beats nothing."""
        if value is None or not math.isfinite(value):
            return False
        return than is None or (value < than if self.less_is_better else value > than)


def read_choice(text: object, reported: Iterable[str] | None = None, what: str = "keep_best") -> Choice:
    """What `keep_best` names: "accuracy", or with the direction, "<distance" (less is better) or ">score" (more is).

    Without a sign less of a loss, an error or a perplexity is better, and more of anything else. `what`: names it in
    messages.

    Raises:
        UsageError: it is no text of that form, or names none of the metrics `reported`, where these are known.
    """
    found = re.fullmatch(r"\s*([<>]?)\s*([^<>=]+?)\s*", text) if isinstance(text, str) else None
    if found is None:
        raise UsageError(
            f'{what}={text!r}: write a metric of the validation, "accuracy", or with the direction, "<distance" '
            'for less is better or ">score" for more'
        )
    sign, metric = found[1], found[2]
    known = None if reported is None else sorted(reported)
    if known is not None and metric not in known:
        raise UsageError(
            f"{what} {metric!r}: validation reports no metric of that name; it reports {', '.join(known)}"
        )
    return Choice(metric, sign == "<") if sign else choice_by_name(metric)


def choice_by_name(metric: str) -> Choice:
    """The choice by a metric of just this name, whatever letters it has: less of a loss, an error or a perplexity is
    better, and more of anything else."""
    return Choice(metric, metric.lower().endswith(_SMALLER_IS_BETTER))


def goals_among(of_runs: Iterable[object]) -> dict[str, Any]:
    """The targets of several runs, each as the first run that has it says; what is no target is passed over."""
    goals: dict[str, Any] = {}
    for found in of_runs:
        for metric, goal in found.items() if isinstance(found, Mapping) else ():
            with contextlib.suppress(UsageError):
                read_target(str(metric), goal)
                goals.setdefault(str(metric), goal)
    return goals


def main_choice(goals: Mapping[str, object], reported: Collection[str]) -> Choice | None:
    """What runs are compared by that say nothing of it: their first target, else the loss, else the first metric, of
    those that are reported; None where nothing is."""
    for metric, goal in goals.items():
        if metric in reported:
            return Choice(metric, read_target(metric, goal).sign in ("<", "<="))
    names = [LOSS] if LOSS in reported else sorted(reported)
    return choice_by_name(names[0]) if names else None


def missed_targets(goals: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, str]:
    """Why each target that `metrics` do not reach is missed, by metric."""
    targets = [read_target(metric, goal) for metric, goal in goals.items()]
    return {
        target.metric: target.why_missed(metrics.get(target.metric))
        for target in targets
        if not target.met(metrics.get(target.metric))
    }


def first_met(
    goals: Mapping[str, object], measured: Iterable[Mapping[str, object]], clock: str
) -> dict[str, Any] | None:
    """`clock` and `samples` of the first validation that reached every target; None without targets, or if none did."""
    met = (row for row in measured if goals and not missed_targets(goals, row))
    first = next(met, None)
    return {key: first[key] for key in (clock, "samples")} if first else None
