"""What somebody wants to know of several runs before any picture: which is best, by how much, and whether that can be
told at all; and what each run is called, which is what it was given that others were not.

Invariants: functions of what the runs have left. Runs are compared as `mpitrain runs best` compares them: settings, by
the mean over seeds and folds; a run that has failed or is not finished is best at nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.reporting.pages.figures import compact, count_text
from mpitrain.reporting.repetitions import (
    Measured,
    Setting,
    data_of,
    figure_text,
    is_clear,
    measured,
    options_of,
    ranked,
    repetition_of,
    setting_of,
    settings_among,
)
from mpitrain.reporting.run_files import RunFiles
from mpitrain.reporting.targets import Choice, first_met, goals_among, main_choice

MOST_IN_NAME = 3  # options
_TOLD_BY_OTHERS = ("servers", "job_file")  # by the strategy; a digest says nothing to anybody
_BY_VALUE = ("strategy",)
_PLACES = {
    "strategy": -2,
    "workers": -1,
    "batch_size": 1,
    "accumulate": 1,
    "precision": 1,
    "epochs": 1,
    "seed": 2,
}
_SHORT = {"batch_size": "batch", "learning_rate": "lr"}


def differing(runs: Sequence[RunFiles]) -> dict[str, list[str]]:
    """What the runs were given that differs, as texts by name: one for each run, empty where it was given nothing."""
    given = [{name: _text(value) for name, value in options_of(run).items()} for run in runs]
    for run, options in zip(runs, given, strict=True):
        if asked := run.result.get("strategy_asked") or run.started.get("strategy_asked"):
            options["strategy"] = str(asked)
    names = dict.fromkeys(name for one in given for name in one)
    found = {name: [one.get(name, "") for one in given] for name in names}
    return {name: texts for name, texts in found.items() if len(set(texts)) > 1}


def names_of(runs: Sequence[RunFiles]) -> list[str]:
    """What each run is called beside the others: "lr 0.003, batch 16"; its own name where that tells them not apart."""
    if len(runs) == 1:
        return [runs[0].name]
    options = {name: texts for name, texts in differing(runs).items() if name not in _TOLD_BY_OTHERS}
    shown = sorted(options, key=lambda name: _PLACES.get(name, 0))[:MOST_IN_NAME]
    found = []
    for number in range(len(runs)):
        parts = [
            text if name in _BY_VALUE else f"{_SHORT.get(name, name)} {text}"
            for name in shown
            if (text := options[name][number])
        ]
        found.append(", ".join(parts))
    return [
        name if name and found.count(name) == 1 else f"{name} ({run.name})" if name else run.name
        for name, run in zip(found, runs, strict=True)
    ]


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def choice_of(runs: Sequence[RunFiles]) -> Choice | None:
    """What the runs are about: see `main_choice`."""
    return main_choice(
        goals_among(run.targets() for run in runs), {name for run in runs for name in run.measured()}
    )


@dataclass(frozen=True)
class Answer:
    """Which of these runs is best.

    Attributes:
        by: what they are compared by, None where nothing was measured.
        order: settings that have a figure, the best first.
        sentences: which one, by how much, whether that can be told; the fastest; the first at the target.
        best_name: what the best setting is called; margin: by which it is before the second.
        is_clear: whether that can be told, None where it is not known.
    """

    by: Choice | None
    order: tuple[Setting[RunFiles], ...]
    sentences: tuple[str, ...]
    best_name: str = ""
    margin: float | None = None
    is_clear: bool | None = None

    @property
    def best(self) -> tuple[RunFiles, ...]:
        """The runs of the best setting; empty where none is."""
        return self.order[0].runs if self.order else ()


def answer(runs: Sequence[RunFiles]) -> Answer:
    """Which of these runs is best, and what else is to be said first."""
    by, names = choice_of(runs), dict(zip((run.folder for run in runs), names_of(runs), strict=True))
    more = [*_fastest(runs, names), *_first_at_target(runs, names)]
    if by is None:
        return Answer(
            None, (), ("None of these runs has measured anything: their job has no validate=.", *more)
        )
    differs, found = tuple(differing(runs)), []
    for run in runs:
        options = options_of(run)
        setting = setting_of({name: _text(options.get(name, "")) for name in differs})
        value = measured(run.result, by) if run.is_finished else None
        found.append(Measured(run, setting, repetition_of(options), value, data_of(run)))
    try:
        order = ranked(settings_among(found), by)
    except UsageError as error:
        return Answer(by, (), (f"No best one: {error}.", *more))
    if not order:
        return Answer(by, (), (f"No run has come to its end with a finite {by.metric} yet.", *more))
    settings = _named(order, names)
    first = f"Best: {settings[0]}, with {by.metric} {figure_text(order[0])}"
    if len(order) == 1:
        return Answer(by, tuple(order), (f"{first}; no other has a figure.", *more), settings[0])
    margin = abs(float(order[0].mean or 0.0) - float(order[1].mean or 0.0))
    clear = is_clear(margin, [order[0].spread, order[1].spread])
    sentences = (f"{first}.", _by_how_much(order, settings, by, margin, clear), *more)
    return Answer(by, tuple(order), sentences, settings[0], margin, clear)


def _named(order: Sequence[Setting[RunFiles]], names: Mapping[Any, str]) -> list[str]:
    """Settings by what their runs have in common."""
    found = []
    for setting in order:
        first = names[setting.runs[0].folder]
        parts = [part for part in first.split(", ") if not part.startswith(("seed ", "fold "))]
        found.append(", ".join(parts) or first if len(setting.runs) > 1 else first)
    return found


def _by_how_much(
    order: Sequence[Setting[RunFiles]], settings: Sequence[str], by: Choice, margin: float, clear: bool | None
) -> str:
    word = "lower" if by.less_is_better else "higher"
    second = f"{settings[1]} ({figure_text(order[1])})"
    if not margin:
        return f"{second} is exactly as good."
    said = f"That is {compact(margin)} {word} than the next, {second}"
    if clear is None:
        return (
            f"{said}. Of one run each, so whether another seed would change the order is not known: train every "
            "setting with three seeds (mpitrain sweep --seeds 3)."
        )
    if clear:
        return f"{said}, more than twice what the seeds of a setting differ by: a real difference."
    close = [
        name
        for name, one in zip(settings[1:], order[1:], strict=True)
        if is_clear(float(order[0].mean or 0.0) - float(one.mean or 0.0), [order[0].spread, one.spread])
        is not True
    ]
    others = (
        ""
        if len(close) < 2
        else f", and neither are {', '.join(close[1:4])}{' ...' if len(close) > 4 else ''}"
    )
    return f"{said}, no more than seeds may make: the two are not told apart{others}."


def _fastest(runs: Sequence[RunFiles], names: Mapping[Any, str]) -> Iterable[str]:
    rates = {
        run.folder: float(rate)
        for run in runs
        if isinstance(rate := run.result.get("samples_per_second"), int | float) and rate > 0
    }
    if len(rates) < 2:
        return
    first, *_, last = sorted(rates, key=lambda one: -rates[one])
    times = rates[first] / rates[last]
    yield (
        f"Fastest: {names[first]}, {count_text(rates[first])} samples/s, {times:.2f} times {names[last]}, the slowest "
        f"({count_text(rates[last])})."
    )


def _first_at_target(runs: Sequence[RunFiles], names: Mapping[Any, str]) -> Iterable[str]:
    met = {run.folder: found for run in runs if (found := met_target(run))}
    if len(met) < 2:
        return
    first, second, *_ = sorted(met, key=lambda one: met[one]["trained_s"])
    yield (
        f"First at the target: {names[first]}, after {seconds_text(met[first]['trained_s'])} of training and "
        f"{count_text(met[first]['samples'])} samples; next {names[second]}, {seconds_text(met[second]['trained_s'])}."
    )


def met_target(run: RunFiles) -> dict[str, Any] | None:
    """`trained_s` and `samples` of the first validation that met every target."""
    return first_met(run.targets(), run.validations("trained_s", True), "trained_s")


def seconds_text(seconds: float) -> str:
    """A time for people: 0.53 s, 48 s, 3 min 5 s, 2 h 4 min."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left} min" if hours else f"{minutes} min {rest} s"
