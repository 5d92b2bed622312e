"""What somebody wants to know of one run first: how it stands, four numbers, and sentences.

Invariants: functions of what the run has left, which may be any part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from mpitrain.reporting.goodput import shares_of
from mpitrain.reporting.pages.answers import met_target, seconds_text
from mpitrain.reporting.pages.figures import compact, count_text
from mpitrain.reporting.pages.times import SHARES, worker_times
from mpitrain.reporting.repetitions import measured
from mpitrain.reporting.run_files import RunFiles
from mpitrain.reporting.targets import LOSS, Choice, Target, read_target
from mpitrain.system.sizes import counted
from mpitrain.system.time_spent import goodput, read_spent

_STATUS = {
    "ok": ("finished", "good"), "missed": ("target missed", "warn"), "fail": ("failed", "bad"),
    "requeue": ("interrupted", "warn"),
}  # fmt: skip


def status_of(run: RunFiles) -> tuple[str, str]:
    """How it stands, in two words, and whether that is good."""
    if not run.result:
        return "not finished", "info"
    status = str(run.result.get("status"))
    if status == "ok" and run.targets():
        return "target met", "good"
    return _STATUS.get(status, (status, "bad"))


def about(run: RunFiles) -> list[str]:
    """What it is, in few words."""
    asked = run.result.get("strategy_asked") or run.started.get("strategy_asked") or run.fact("strategy")
    found = [str(one) for one in (run.fact("job"), asked) if one]
    for name in ("workers", "servers", "nodes", "epochs"):
        if number := run.fact(name):
            found.append(counted(number, name[:-1]))
    found += [
        f"{what} {value}"
        for name, what in (("batch_size", "batch"), ("seed", "seed"))
        if (value := run.fact(name)) is not None
    ]
    found += [str(value) for name in ("precision", "device") if (value := run.fact(name))]
    if run.rows and "time" in run.rows[0]:
        found.append(f"started {run.rows[0]['time']}")
    return found


def targets_of(run: RunFiles) -> list[tuple[Target, float | None]]:
    """Each target with what the run has reached so far."""
    found = run.measured()
    return [(read_target(name, goal), _number(found.get(name))) for name, goal in run.targets().items()]


def numbers_of(run: RunFiles, by: Choice | None) -> list[tuple[str, str, str]]:
    """Four large numbers: the metric that it is about, the loss, samples per second, the time."""
    found = []
    if by is not None:
        value = _number(run.measured().get(by.metric))
        found.append((by.metric, _said(value), _target_note(run, by.metric)))
    progress = run.of_kind("progress")
    losses = [
        ("validation loss", run.measured().get(LOSS)),
        ("training loss", progress[-1].get("loss") if progress else None),
    ]
    for name, value in losses[by is not None and by.metric == LOSS :]:
        if (number := _number(value)) is not None:
            found.append(
                (name, _said(number), _lowest(run) if name == "validation loss" else "of the last batches")
            )
            break
    if rate := _number(run.result.get("samples_per_second")):
        number = int(run.result.get("workers") or 1)
        found.append(
            (
                "samples/s",
                count_text(rate),
                f"{compact(rate / number)} each worker" if number > 1 else "",
            )
        )
    if (trained := run.training_s) is not None:
        whole = _number(run.result.get("total_wall_s"))
        virtual = "virtual " if "virtual_s" in run.result else ""
        found.append(
            (
                f"{virtual}time of training",
                seconds_text(trained),
                f"{seconds_text(whole)} in all" if whole else "",
            )
        )
    if samples := _number(
        run.fact("samples") if run.result else (progress[-1].get("samples") if progress else None)
    ):
        found.append(
            ("samples", f"{samples:,.0f}", f"{run.fact('steps'):,} steps" if run.result.get("steps") else "")
        )
    return found[:4]


def _target_note(run: RunFiles, metric: str) -> str:
    for target, value in targets_of(run):
        if target.metric == metric and not run.result and not target.met(value):
            return f"to be {target.in_words()}"
        if target.metric == metric:
            return f"{'meets' if target.met(value) else 'misses'} the target, {target.in_words()}"
    return "no target"


def _lowest(run: RunFiles) -> str:
    values = [value for _, value in _measured(run, LOSS)]
    return f"lowest {_said(min(values))}" if values else ""


def _measured(run: RunFiles, metric: str) -> list[tuple[dict[str, Any], float]]:
    rows = run.validations("trained_s", True)
    return [
        (row, value)
        for row in rows
        if (value := _number(row.get(metric))) is not None and math.isfinite(value)
    ]


def sentences_of(run: RunFiles, by: Choice | None, with_outcome: bool = True) -> Iterable[str]:
    """What is to be said first."""
    if with_outcome:
        yield from _outcome(run)
    yield from _best(run, by)
    yield from _work(run)


def _outcome(run: RunFiles) -> Iterable[str]:
    if not run.result:
        yield "It has not come to its end: it is under way, or was ended."
        return
    status = run.result.get("status")
    if status not in ("ok", "missed"):
        why = run.result.get("failure") or "no reason was given"
        yield f"status={status}, exit code {run.result.get('exit_code')}: {why}"
        return
    for target, value in targets_of(run):
        if not target.met(value):
            yield f"Target missed: {target.metric} is {_said(value)}, and was to be {target.in_words()}."
            continue
        said = f"Target met: {target.metric} {_said(value)} is {target.in_words()}"
        met = met_target(run)
        yield said + (
            f", first after {int(met['samples']):,} samples and {seconds_text(met['trained_s'])} of training."
            if met and len(run.targets()) == 1
            else "."
        )


def _best(run: RunFiles, by: Choice | None) -> Iterable[str]:
    found = _measured(run, by.metric) if by else []
    if by is None or len(found) < 2:
        return
    pick = min if by.less_is_better else max
    row, value = pick(found, key=lambda pair: pair[1])
    last = found[-1][1]
    best = f"The best {by.metric}, {_said(value)}, was measured after {int(row['samples']):,} samples"
    if run.result.get("best", {}).get("model") and (kept := measured(run.result, by)) is not None:
        yield f"{best}; the model with {_said(kept)} was kept."
    else:
        so_far = "so far" if not run.result else "of all"
        yield (
            f"The last {by.metric} is the best {so_far}."
            if value == last
            else f"{best}; the last is {_said(last)}."
        )


def _work(run: RunFiles) -> Iterable[str]:
    times = worker_times(run)
    whole = sum(sum(value for key, value in one.items() if key != "rank") for one in times)
    if whole:
        parts = {what: sum(one[key] for one in times) / whole for key, what in SHARES.items()}
        said = [f"{100 * share:.0f} % {what}" for what, share in parts.items() if share >= 0.005]
        yield f"The workers' time: {', '.join(said)}."
    if spent := goodput(read_spent(run.folder)):
        said = [f"{100 * share:.0f} % {part}" for part, share in shares_of(spent).items()]
        yield f"The run's wall time, {seconds_text(spent['wall_s'])} over all its starts: {', '.join(said)}."
    if (mean := _number(run.result.get("staleness_mean"))) is not None:
        most, dropped = run.result.get("staleness_max"), run.result.get("dropped") or "none"
        yield f"Staleness of gradients: {mean:.1f} versions in the mean, {most} at most; dropped: {dropped}."
    lost = sum(row["event"] == "worker lost" for row in run.rows)
    starts = sum(row["event"] == "start" for row in run.rows)
    if lost or starts > 1:
        said = [f"{counted(lost, 'worker')} lost"] * bool(lost) + [f"started {starts} times"] * (starts > 1)
        yield f"Faults: {', '.join(said)}."


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _said(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.5g}" if math.isfinite(value) else str(value)
