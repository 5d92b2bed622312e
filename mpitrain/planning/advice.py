"""What to do, in the order in which a person should think of it, and which strategy is best by a criterion.

Invariants: pure functions of a prediction; each piece of advice says its reason with the figures that made it.

Rules, with who gave them: the rate of a synchronous step over N times as many samples is N times as large, after a
warm-up over 5 epochs (Goyal et al. 2017), with Adam sqrt(N) times; a stale gradient's is divided by its staleness,
which is N - 1 in the mean (Zhang et al. 2015); workers that average seldom keep the rate of one device (Stich 2018);
of N workers 4 % to 10 % are spare (Chen et al. 2016).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from mpitrain.errors import UsageError
from mpitrain.planning.scaling import Conditions, Setting, throughput
from mpitrain.system.sizes import size_text

CRITERIA = ("speed", "accuracy", "accuracy-in=TIME", "accuracy-per-epoch", "cost")
_TIME = re.compile(r"accuracy-in=(\d+(?:\.\d+)?)([smhd])$")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
UNEVEN = 1.5  # synchronous workers wait half of a mean batch for the last one
SAME = 0.01  # of the throughput: settings that differ by less are one
SAVES_S = 60  # a launch that saves less is not worth its ranks, nor waiting in a queue for them
WORTH = 1.05  # a setting that is not so many times as fast as one device is not worth its ranks


class Option(NamedTuple):
    """One setting on so many workers.

    Args:
        setting: None: one device, without a strategy.
        rate: samples a second; stale: updates, in the mean, between reading parameters and applying a gradient.
        step_samples: that an update is made of; learning_rate: what the papers' rules make of the job's, in words, and
            lr_factor: as a factor (what divides a rate by staleness is a damping of the strategy).
        epochs: passes over the data in the time of `accuracy-in`, at most the job's.
        alike: texts of settings that are as good within 1 %.
    """

    setting: Setting | None
    workers: int
    rate: float
    stale: float
    step_samples: float
    learning_rate: str
    epochs: float
    lr_factor: float = 1.0
    alike: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Workers and servers."""
        return self.workers + (self.setting.servers if self.setting else 0)

    @property
    def text(self) -> str:
        """The strategy's."""
        return self.setting.text if self.setting else "one device"


def check_criterion(text: str) -> float | None:
    """The seconds of `accuracy-in=2h`, None for another criterion.

    Raises:
        UsageError: no criterion.
    """
    if found := _TIME.match(text):
        return float(found[1]) * _UNITS_S[found[2]]
    if text not in CRITERIA:
        raise UsageError(f"--best {text}: it is one of {', '.join(CRITERIA)}, such as accuracy-in=2h")
    return None


def candidates(num_workers: int, num_samples: int, batch: int) -> list[Setting]:
    """Settings that are worth asking about on so many workers."""
    if num_workers == 1:
        return []
    found = [Setting("allreduce()", "allreduce")]
    longest = math.sqrt(num_samples / (num_workers * batch))  # Stich 2018: O(sqrt(T / (N b)))
    periods = sorted({period for period in (2, 4, 8, 16) if period <= max(2, longest)})
    found += [Setting(f"localsgd(period={one})", "localsgd", period=one) for one in periods]
    servers = [one for one in (1, 2, 4, 8) if one <= num_workers]
    found += [Setting(f"sync(servers={one})", "servers", one) for one in servers]
    spares = sorted({max(1, round(share * num_workers)) for share in (0.04, 0.1)} - {num_workers})
    found += [
        Setting(f"backup(servers={one}, spare={spare})", "servers", one, spare)
        for one in servers
        for spare in spares
    ]
    return found + [Setting(f"async(servers={one}, damping=inverse())", "async", one) for one in servers]


def virtual_candidates(num_workers: int) -> list[str]:
    """Those without a closed form, which are run in virtual time."""
    if num_workers == 1:
        return []
    found = ["allreduce(codec=bfloat16())", 'async(push_wire="bfloat16", damping=inverse())']
    found += ["decentralized()", 'decentralized(topology="ring")', 'localsgd(period=16, wire="bfloat16")']
    found += [f"ssp(bound={bound}, damping=inverse())" for bound in (1, 4)]
    groups = sorted(
        {max(2, round(num_workers * share)) for share in (0.25, 0.5)} & set(range(2, num_workers))
    )
    return found + [f"softsync(updates={one}, damping=inverse())" for one in groups]


def option(
    setting: Setting | None,
    conditions: Conditions,
    num_workers: int,
    adaptive: bool,
    num_samples: int,
    epochs: int,
    within_s: float | None,
) -> Option:
    """A setting with its speed and what the papers say of it."""
    batch = conditions.batch
    rate = throughput(setting or Setting("", "allreduce"), conditions, num_workers)
    stale, samples, rule, factor = 0.0, float(batch * num_workers), "as it is", 1.0
    accepted = float(num_workers - (setting.spare if setting else 0))
    together = setting is not None and setting.kind in ("allreduce", "servers")
    if setting is not None and setting.kind == "async":
        stale, samples, rule = num_workers - 1.0, batch, "/ staleness"
    elif setting is not None and setting.kind == "virtual":
        assert setting.runs is not None
        found = setting.runs.speed(setting, conditions, num_workers, batch)
        stale, samples = found.stale, found.step_samples
        assert setting.strategy is not None
        together = setting.strategy.lockstep
        accepted = samples / batch
        rule = "/ staleness" if stale else rule
    if together and num_workers > 1:
        samples, factor = batch * accepted, math.sqrt(accepted) if adaptive else accepted
        rule = f"x {factor:.3g}" if adaptive else f"x {factor:.3g}, warm-up"
    possible = epochs if within_s is None else min(epochs, rate * within_s / num_samples)
    return Option(setting, num_workers, rate, stale, samples, rule, possible, factor)


def rank(options: Sequence[Option], criterion: str) -> list[Option]:
    """The options, the best first; of equals, that of fewer ranks."""
    if criterion == "speed":
        return sorted(options, key=lambda one: (-_figure(one.rate), one.ranks))
    if criterion == "cost":
        return sorted(options, key=lambda one: (-_figure(one.rate / one.ranks), one.ranks))

    def by_accuracy(one: Option) -> tuple[float, ...]:
        period, lossy = (one.setting.period, one.setting.lossy) if one.setting else (1, False)
        return (round(one.stale, 9), lossy, period, one.step_samples, -_figure(one.rate), one.ranks)

    if criterion.startswith("accuracy-in="):
        return sorted(options, key=lambda one: (-round(one.epochs, 9), *by_accuracy(one)))
    return sorted(options, key=by_accuracy)


def merged(ranked: Sequence[Option], criterion: str) -> list[Option]:
    """Without settings that differ in nothing but their servers from a better one with at most 1 % less speed; for
    accuracy, however much slower they are. What is kept names them as alike."""
    kept: list[Option] = []
    by_rate = not criterion.startswith("accuracy")
    for one in sorted(ranked, key=lambda one: one.ranks) if by_rate else ranked:
        for place, other in enumerate(kept):
            if _alike(one, other) and not (by_rate and one.rate > (1 + SAME) * other.rate):
                kept[place] = other._replace(alike=(*other.alike, one.text))
                break
        else:
            kept.append(one)
    order = {(one.text, one.workers): place for place, one in enumerate(ranked)}
    return sorted(kept, key=lambda one: order[one.text, one.workers])


def _alike(one: Option, other: Option) -> bool:
    """Whether they train alike: the same rule, on as many workers."""
    if one.setting is None or other.setting is None or one.workers != other.workers:
        return False
    first, second = one.setting, other.setting
    same = ("kind", "period", "spare", "lossy")
    if first.kind == "virtual" and first.text != second.text:
        return False
    return all(getattr(first, key) == getattr(second, key) for key in same)


def _figure(value: float) -> float:
    """To six digits: rounding errors make nothing better."""
    return float(f"{value:.6g}")


def advise(
    conditions: Conditions,
    rank_bytes: int,
    data_bytes: int | None,
    memory_bytes: float | None,
    num_samples: int,
    epochs: int,
    fastest: Sequence[Option],
    per_node: int,
    start_s: float = 0.0,
    calm: Conditions | None = None,
    loaded: bool = False,
) -> list[tuple[str, str]]:
    """(question, answer) in the order of thinking. `fastest`: the fastest option of each number of workers; `start_s`:
    of a rank that has a core to itself; `calm`: the conditions without what a probe's steps vary by, which bounds the
    figures on the other side; `loaded`: whether others used the host meanwhile, so that what varies is the load."""
    lines = _fits(rank_bytes, data_bytes, memory_bytes)
    one_rate = throughput(Setting("", "allreduce"), conditions, 1)
    alone_s = num_samples * epochs / one_rate
    alone = _duration(alone_s)
    if calm is not None:
        calm_s = num_samples * epochs / throughput(Setting("", "allreduce"), calm, 1)
        alone = " to ".join(_duration(one_s) for one_s in sorted((alone_s, calm_s)))
    lines.append(("one device", f"{epochs} epochs take {alone}"))
    inside = [one for one in fastest if 1 < one.workers <= per_node]
    across = [one for one in fastest if one.workers > per_node]
    for name, found in (("one node", inside), ("several nodes", across)):
        if found:
            best = max(found, key=lambda one: one.rate)
            times = best.rate / one_rate
            if times < WORTH:
                lines.append((name, f"no faster than one device ({times:.2f} times): one device is better"))
            else:
                told = f"{times:.2f}" if calm is None else _between(times, best, calm)
                lines.append((name, f"{told} times one device: {best.text} on {best.workers} workers"))
    if loaded:
        lines.append((
            "a launch",
            "stay on one device until a probe of a quiet host says otherwise: this one measured the load",
        ))  # fmt: skip
    elif several := [one for one in fastest if one.workers > 1]:
        lines.append(("a launch", _launch(several, num_samples * epochs, alone_s, per_node, start_s)))
    work_s = conditions.times.mean_s
    lines.append(("computing", f"{1e9 * work_s / conditions.num_bytes:.3g} ms per MB of parameters"))
    most = max((one.workers for one in fastest), default=1)
    wait = conditions.times.order_s(most, most) / work_s
    if loaded:
        text = "not known: other processes used this host, and its steps vary by the load; probe a quiet one"
    elif wait > UNEVEN:
        text = f"asynchronous: the last of {most} workers takes {wait:.2f} times the mean"
    else:
        text = f"synchronous: the last of {most} workers takes only {wait:.2f} times the mean"
    lines.append(("waiting", text))
    return lines


def _fits(rank_bytes: int, data_bytes: int | None, memory_bytes: float | None) -> list[tuple[str, str]]:
    """What model and data need, beside the memory that there is."""
    lines = []
    if memory_bytes is None:
        lines.append(("the model", f"a rank needs {size_text(rank_bytes)}; give --memory to compare"))
    else:
        verb = "fits" if rank_bytes <= memory_bytes else "does not fit: split it, sharded() or pipeline()"
        lines.append(("the model", f"{size_text(rank_bytes)} a rank of {size_text(memory_bytes)}: it {verb}"))
    if data_bytes is None:
        lines.append(("the data", "samples differ in length: their size is not known"))
    elif memory_bytes is None:
        lines.append(("the data", size_text(data_bytes)))
    else:
        verb = (
            "fit into memory" if data_bytes <= memory_bytes else "do not fit: they are read from the shards"
        )
        lines.append(("the data", f"{size_text(data_bytes)}: they {verb}"))
    return lines


def _between(times: float, best: Option, calm: Conditions) -> str:
    """How many times as fast as one device, as probed and on a calm host."""
    assert best.setting is not None
    alone = throughput(Setting("", "allreduce"), calm, 1)
    low, high = sorted((times, throughput(best.setting, calm, best.workers) / alone))
    return f"{low:.2f} to {high:.2f}"


def started_s(ranks: int, per_node: int, start_s: float) -> float:
    """Until all ranks have started: those of a node share its cores, of which it is taken to have as many as this
    host, and nodes start side by side."""
    return start_s * max(1.0, min(ranks, per_node) / (os.cpu_count() or 1))


def _launch(
    several: Sequence[Option], num_samples: int, alone_s: float, per_node: int, start_s: float
) -> str:
    """Whether the best of several workers saves enough of a job's time, start-up included."""

    def whole_s(one: Option) -> float:
        return started_s(one.ranks, per_node, start_s) + num_samples / one.rate

    best = min(several, key=lambda one: (whole_s(one), one.ranks))
    alone_s += start_s
    took_s, saved_s = whole_s(best), alone_s - whole_s(best)
    told = f"with start-up one device takes {_duration(alone_s)}, {best.workers} workers take {_duration(took_s)}"
    if saved_s < SAVES_S:
        return f"stay on one device: {told}; less than {SAVES_S} s are saved, and a launch is not worth that"
    return f"{told}: {best.text}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
