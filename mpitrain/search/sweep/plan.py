"""A sweep as a value: the job, what stays the same, what varies, and by what configurations are compared.

Invariants: standard library and the package's own values only; the configurations of a grid or of draws are a function
of the plan, so a sweep that is started again knows them without having been told. What `sweep.json` holds is a plan.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.reporting.repetitions import setting_of
from mpitrain.search.sweep.axes import Axis
from mpitrain.values import nearest

SAMPLERS = ("grid", "random", "optuna")
PLAN_SCHEMA = 1


@dataclass(frozen=True)
class Configuration:
    """One run of a sweep: its number, from 0, and the options that are its own, by name, as texts."""

    number: int
    options: tuple[tuple[str, str], ...]

    @property
    def words(self) -> list[str]:
        """Its options as they stand on the command line of `train`."""
        return [word for name, value in self.options for word in words_of(name, value)]

    @property
    def text(self) -> str:
        """Its options for people: "lr=0.001 batch_size=16"."""
        return _text(self.options)

    @property
    def setting_text(self) -> str:
        """The same without seed and fold."""
        return _text(setting_of(dict(self.options)))


def _text(options: Iterable[tuple[str, object]]) -> str:
    return " ".join(f"{name}={value}" for name, value in options) or "the job as it is"


def words_of(name: str, value: str) -> list[str]:
    """An option's words: `--set` for a parameter of the job file, a bare `--name` for one that is true."""
    if "." in name:
        return [f"--set={name}={value}"]
    option = f"--{name.replace('_', '-')}"
    if value in ("true", "false"):
        return [option] if value == "true" else []
    return [f"{option}={value}"]


@dataclass(frozen=True)
class Plan:
    """What a sweep is to do.

    Attributes:
        job: path of the job file.
        words: options of `train` that are the same for all.
        axes: what varies. sampler: "grid" (every combination), "random" (`num` draws) or "optuna" (`num` proposals).
        sampler_seed: key of the draws.
        seeds: every configuration is trained once with each; empty: with the job's own.
        folds: every configuration is trained once for each fold of the training set; 0: as the job says.
        metric: that configurations are compared by, as `keep_best` reads it; "" for the job's own choice.
        ranks_per_run: ranks of each run, servers among them.
        asha: a rule for stopping early, as text; "" trains all to their end.
        rungs: its epochs at each rung, which follow from the job; empty without it.
    """

    job: str
    words: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ()
    sampler: str = "grid"
    num: int | None = None
    sampler_seed: int = 0
    seeds: tuple[int, ...] = ()
    folds: int = 0
    metric: str = ""
    ranks_per_run: int = 1
    asha: str = ""
    rungs: tuple[int, ...] = ()

    def check(self) -> None:
        """Refuse what makes no sense together.

        Raises:
            UsageError: names the option and the way out.
        """
        if self.sampler not in SAMPLERS:
            raise UsageError(
                f"--sampler: there is no {self.sampler!r}{nearest(self.sampler, list(SAMPLERS))}"
            )
        named = [axis.name for axis in self.axes]
        if twice := [name for name in named if named.count(name) > 1]:
            raise UsageError(f"--vary {twice[0]} is given twice; give all of its values in one list")
        for name, taken in (("seed", self.seeds), ("fold", self.folds)):
            if taken and name in named:
                raise UsageError(f"--vary {name} and --{name}s vary the same; leave one of them out")
        if self.sampler == "grid":
            if laws := [axis.name for axis in self.axes if axis.law]:
                raise UsageError(
                    f"--vary {laws[0]}: a grid takes values, no law to draw from; give values, or --sampler random "
                    "--num N"
                )
            if self.num is not None:
                raise UsageError(
                    "--num says how many --sampler random or optuna draws; a grid has all combinations"
                )
        elif self.num is None:
            raise UsageError(f"--sampler {self.sampler}: say how many configurations with --num N")
        elif not self.axes:
            raise UsageError(f"--sampler {self.sampler}: say what it draws with --vary NAME=LAW")
        if self.folds == 1:
            raise UsageError("--folds: at least 2 parts are needed to train on some and validate on another")
        if self.asha and self.sampler == "optuna":
            raise UsageError("--asha stops configurations that are known beforehand: use --sampler random")

    @property
    def num_rungs(self) -> int:
        """1 without early stopping."""
        return max(1, len(self.rungs))

    @property
    def num_configurations(self) -> int:
        """Runs, seeds and folds counted in."""
        num = self.num if self.sampler != "grid" else len(list(self._grid()))
        return (num or 0) * len(self._repeats())

    def _grid(self) -> Any:
        axes = [[(axis.name, value) for value in axis.values] for axis in self.axes]
        return itertools.product(*axes)

    def _repeats(self) -> list[tuple[tuple[str, str], ...]]:
        """What is added to each setting: every seed with every fold."""
        seeds: list[tuple[tuple[str, str], ...]] = [(("seed", str(seed)),) for seed in self.seeds]
        folds: list[tuple[tuple[str, str], ...]] = [
            (("fold", f"{fold}/{self.folds}"),) for fold in range(1, self.folds + 1)
        ]
        seeds, folds = seeds or [()], folds or [()]
        return [(*seed, *fold) for seed in seeds for fold in folds]

    def configurations(self) -> list[Configuration]:
        """All of them, in order; of a sampler that proposes while the sweep runs, none."""
        if self.sampler == "grid":
            settings = list(self._grid())
        elif self.sampler == "random":
            settings = [
                tuple((axis.name, axis.draw(self.sampler_seed, index)) for axis in self.axes)
                for index in range(self.num or 0)
            ]
        else:
            return []
        return [
            Configuration(index, (*setting, *repeat))
            for index, (setting, repeat) in enumerate(itertools.product(settings, self._repeats()))
        ]

    def repeated(self, index: int, setting: Sequence[tuple[str, str]]) -> Configuration:
        """The configuration of that number, of a setting that a sampler has proposed."""
        repeats = self._repeats()
        return Configuration(index, (*setting, *repeats[index % len(repeats)]))

    @functools.cached_property
    def settings(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the configurations of each setting, which differ in seed and fold alone."""
        configurations = self.configurations()
        if not configurations:
            size = self.num_repeats
            return tuple(tuple(range(at, at + size)) for at in range(0, self.num_configurations, size))
        found: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for one in configurations:
            found.setdefault(setting_of(dict(one.options)), []).append(one.number)
        return tuple(map(tuple, found.values()))

    @property
    def num_repeats(self) -> int:
        """Runs of each setting."""
        return len(self._repeats())

    def to_json(self) -> dict[str, Any]:
        """What `sweep.json` holds."""
        return {"schema": PLAN_SCHEMA, **dataclasses.asdict(self)}


def plan_from(found: Mapping[str, Any], path: Path) -> Plan:
    """The plan in a `sweep.json`.

    Raises:
        UsageError: it holds none, or one of another version.
    """
    if found.get("schema") != PLAN_SCHEMA:
        raise UsageError(
            f"{path} is of schema {found.get('schema')!r}, and this version reads {PLAN_SCHEMA}; use the version that "
            "has begun the sweep, or begin another with a new --run-dir"
        )
    try:
        axes = tuple(Axis(one["name"], tuple(one["values"]), one["law"]) for one in found["axes"])
        values = {key: value for key, value in found.items() if key not in ("schema", "axes")}
        values |= {key: tuple(values[key]) for key in ("words", "seeds", "rungs")}
        return Plan(axes=axes, **values)
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} holds no plan of a sweep ({error})") from None


def differing(old: Plan, new: Plan) -> str:
    """In what the two differ, for people; empty where they are equal."""
    before, now = old.to_json(), new.to_json()
    return "; ".join(
        f"{key} was {before[key]!r} and is {now[key]!r}" for key in now if before[key] != now[key]
    )
