"""`mpitrain ensemble`: the best of several runs as one model, measured beside its members, and saved.

Invariants: what is measured does not depend on the number of ranks, to the bit. Rank 0 alone writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from mpitrain.data import Shards
from mpitrain.data.read.batch import to_device
from mpitrain.data.read.reader import Source
from mpitrain.data.write.ranks import ALONE, Ranks
from mpitrain.embedding.tables import served_layers
from mpitrain.errors import UsageError
from mpitrain.job import Job
from mpitrain.reporting.report import write_json
from mpitrain.reporting.run_files import RunFiles
from mpitrain.reporting.targets import Choice, choice_by_name, read_choice
from mpitrain.system.interrupts import interruptible
from mpitrain.training.agree import attempt
from mpitrain.training.ensembles import saved, soups
from mpitrain.training.ensembles.combine import HOWS, Ensemble, find_class_dim
from mpitrain.training.ensembles.elsewhere import exchange_over
from mpitrain.training.ensembles.held_out import measured_of, source_of
from mpitrain.training.ensembles.members import choice_of, choose_members
from mpitrain.training.measure import MODEL_FILE, device_for, save_model
from mpitrain.training.resuming.fingerprint import of_job_file
from mpitrain.training.trained_model import FILES, load_with_job
from mpitrain.training.validations.validation import Measure
from mpitrain.values import nearest

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime

WEIGHTS = ("equal", "metric")
Note = Callable[[str], None]


class Member(NamedTuple):
    """One of an ensemble's: `metrics` of it alone, `weight` of 1; `rank` computed it."""

    name: str
    folder: str
    weight: float
    metrics: dict[str, float]
    rank: int


class Ensembled(NamedTuple):
    """What was made, and how it does beside its members.

    Attributes:
        kind: "ensemble", "uniform soup" or "greedy soup".
        combine, class_dim: as of `Ensemble`; "weights" of a soup.
        used: names of the members that are part of it; all but for a greedy soup.
        metrics: of all of it; best: name of the best member by `by`; is_better: whether it beats that one, by metric.
        num_samples: it was measured on; passed_over: runs that were not taken, and why.
        held_out: metrics of all of it, and of the best member, on samples that nothing was chosen by; empty without.
    """

    path: Path
    kind: str
    combine: str
    class_dim: int | None
    members: list[Member]
    used: list[str]
    metrics: dict[str, float]
    by: str
    best: str
    is_better: dict[str, bool]
    num_samples: int
    passed_over: dict[str, str]
    held_out: dict[str, dict[str, float]]

    def record(self) -> dict[str, Any]:
        """As JSON."""
        found = self._asdict() | {"members": [one._asdict() for one in self.members]}
        return {"schema": saved.SCHEMA} | found | {"path": str(self.path)}


@dataclasses.dataclass(frozen=True)
class EnsembleOptions:
    """How one model is made of several runs.

    Args:
        top: how many settings, the best by validation metric, each with all of its runs (of other seeds and folds);
            all runs that are named unless given, and those of the best three settings of a directory.
        by: the metric, as `keep_best` of `Job`; by default the job's own, else that of its first target.
        which: "last", "best" or "ema", as of `mpitrain.load`.
        combine, class_dim: as of `Ensemble`; by default probabilities where the job's loss takes the model's answer for
            logits, and their dimension; otherwise outputs.
        weights: "equal"; "metric", in proportion to the metric of each member (to its inverse where less is better); or
            a number for each member in the order of `run_dirs`.
        soup: "uniform" or "greedy": average the weights of the models instead of their answers.
        data: shards to measure on instead of the job's validation data.
        test: shards that nothing is chosen by, to measure the result and its best member on once it is made; by default
            what the first run was given, or what its job names.
        job: job, or its file, where the runs' own has moved.
        overwrite: replace `out` if it holds an ensemble.
    """

    top: int | None = None
    by: str | None = None
    which: str = "last"
    combine: str | None = None
    class_dim: int | None = None
    weights: str | Sequence[float] = "equal"
    soup: str | None = None
    data: str | Path | None = None
    test: str | Path | None = None
    job: Job | str | Path | None = None
    overwrite: bool = False


@interruptible()
def ensemble(
    run_dirs: Sequence[str | Path],
    out: str | Path,
    options: EnsembleOptions | None = None,
    *,
    ranks: Ranks = ALONE,
    note: Note = lambda text: None,
    **settings: Any,
) -> Ensembled:
    """Make one model of several finished runs, measure it beside them on the validation data, and save it.

    Args:
        run_dirs: of runs, or directories that hold runs.
        out: the directory to write, which `mpitrain predict` and `mpitrain.load` read.
        options: or its fields by name: `ensemble(runs, "best", top=3, soup="greedy")`.
        ranks: members are divided over them, and each computes its own.
        note: is told what is being done.

    Raises:
        UsageError: as `mpitrain.load`, of each member; there are fewer than two; they answer in different forms, or, of
            a soup, have different architectures; there is nothing to measure on; `out` exists.
    """
    ask = options or EnsembleOptions(**settings)
    making = _Making(Path(out), ask, ranks, note)
    attempt(ranks, lambda: _check(ask, ranks))
    attempt(ranks, lambda: saved.check_new_directory(Path(out), ask.overwrite) if ranks.rank == 0 else None)
    folders = [Path(one) for one in run_dirs]
    wanted = None if ask.by is None else attempt(ranks, lambda: read_choice(ask.by))
    chosen = attempt(ranks, lambda: choose_members(folders, ask.top, wanted, ask.which))
    making.load(chosen.runs)
    making.measure_members()
    shares = attempt(ranks, lambda: making.shares(ask.weights))
    if ask.soup is not None:
        return making.soup(ask.soup, shares, chosen.passed_over)
    return making.ensemble(ask.combine, ask.class_dim, shares, chosen.passed_over)


def _check(ask: EnsembleOptions, ranks: Ranks) -> None:
    weights, soup = ask.weights, ask.soup
    for name, value, known in (
        ("combine", ask.combine, HOWS), ("soup", soup, soups.SOUPS), ("which", ask.which, tuple(FILES)),
        ("weights", weights if isinstance(weights, str) else None, WEIGHTS),
    ):  # fmt: skip
        if value is not None and value not in known:
            raise UsageError(f"ensemble: {name}={value!r}{nearest(str(value), list(known))}")
    if soup is not None and (ask.combine is not None or ask.class_dim is not None):
        raise UsageError("a soup averages weights, so there is nothing to combine: leave out --combine")
    if soup == "greedy" and weights != "equal":
        raise UsageError(
            "a greedy soup weighs its ingredients alike: leave out --weights, or take --soup uniform"
        )
    if soup is not None and ranks.size > 1:
        raise UsageError(
            "a soup is one model, which one process measures: run this without `mpitrain launch`"
        )


class _Making:
    """The members on this rank and what is measured of them."""

    def __init__(self, path: Path, ask: EnsembleOptions, ranks: Ranks, note: Note):
        self.path, self.ask, self.ranks, self.note = path, ask, ranks, note

    def load(self, runs: Sequence[RunFiles]) -> None:
        """Load the members that are computed here, each on a device of its own where there are several."""
        self.runs = list(runs)
        self.names = [run.name for run in runs]
        self.modules: list[nn.Module | None] = [None] * len(runs)

        def load_all() -> Job:
            first: Job | None = None
            for number, run in enumerate(self.runs):
                if not self.is_here(number) and number:
                    continue
                job, module = load_with_job(run.folder, self.ask.job, self.ask.which)
                _check_whole(run, module)
                first = first or job
                if self.is_here(number):
                    self.modules[number] = module.requires_grad_(False)
            assert first is not None
            if self.ask.data is not None:
                text = str(self.ask.data)
                pattern = str(Path(text) / "*.h5") if Path(text).is_dir() else text
                first = dataclasses.replace(first, validate=Shards(pattern))
            if first.validate is None:
                raise UsageError("the job has no validate= data to measure on; give --data SHARDS")
            return first

        self.job = attempt(self.ranks, load_all)
        attempt(self.ranks, self._place)
        assert self.job.validate is not None
        validate = self.job.validate
        self.catalogue = attempt(self.ranks, validate.scan)
        self.held_out = source_of(self.job, self.runs[0].folder, self.ask.test)
        attempt(self.ranks, lambda: self.held_out.scan() if self.held_out is not None else None)

    def _place(self) -> None:
        for number, module in enumerate(self.modules):
            if module is not None:
                module.to(self._device_of(number))

    def is_here(self, number: int) -> bool:
        """Whether this rank computes the member."""
        return number % self.ranks.size == self.ranks.rank

    @property
    def device(self) -> torch.device:
        """Where what is no member's own is computed."""
        return device_for(self.job, self.ranks.local_rank)

    def _device_of(self, number: int) -> torch.device:
        return device_for(self.job, number) if self.ranks.size == 1 else self.device

    def measure(
        self, module: nn.Module, device: torch.device | None = None, source: Source | None = None
    ) -> dict[str, float]:
        """The job's metrics of a module on this rank; `source`: on other samples than those of the validation."""
        job = dataclasses.replace(self.job, target={})
        try:
            if source is not None:
                return measured_of(job, module, source, device or self.device)
            return Measure(job, module, self.catalogue, device or self.device)()
        except AttributeError as error:
            if "an ensemble has no attribute" in str(error):
                raise UsageError(f"the job's functions ask for a part of the model, and {error}") from None
            raise

    def measure_members(self) -> None:
        """Each on the rank that has it; all ranks then know all figures."""

        def own() -> dict[str, dict[str, float]]:
            found = {}
            for number, module in enumerate(self.modules):
                if module is not None:
                    self.note(f"measuring {self.names[number]}, {number + 1} of {len(self.modules)}")
                    found[str(number)] = self.measure(module, self._device_of(number))
            return found

        parts = self.ranks.allgather(attempt(self.ranks, own))
        together = {int(number): found for part in parts for number, found in part.items()}
        self.figures = [together[number] for number in range(len(self.modules))]
        self.by: Choice = attempt(self.ranks, lambda: choice_of(self.job, self.ask.by, list(self.figures[0])))

    def shares(self, weights: str | Sequence[float]) -> list[float]:
        """What each member counts, of 1."""
        if weights == "equal":
            given = [1.0] * len(self.runs)
        elif weights == "metric":
            values = [found[self.by.metric] for found in self.figures]
            if not all(0 < value < float("inf") for value in values):
                raise UsageError(
                    f"weights by {self.by.metric} need values above 0, and the members have {values}; give numbers"
                )
            given = [1 / value if self.by.less_is_better else value for value in values]
        else:
            given = [float(one) for one in weights]
            if len(given) != len(self.runs):
                raise UsageError(
                    f"{len(given)} weights for {len(self.runs)} members: give one for each, in their order: "
                    + ", ".join(self.names)
                )
            if not all(0 <= one < float("inf") for one in given) or not sum(given):
                raise UsageError(f"weights {given} must be finite, not negative, and one of them above 0")
        return [one / sum(given) for one in given]

    def ensemble(
        self, how: str | None, class_dim: int | None, shares: list[float], passed_over: dict[str, str]
    ) -> Ensembled:
        """Combine the members' answers, and save all of it."""
        how, class_dim = self._agreed_way(how, class_dim)
        size = self.ranks.size
        exchange = None if size == 1 else exchange_over(cast("Runtime", self.ranks), len(self.modules))
        module = Ensemble(self.modules, shares, how, class_dim, exchange).eval()
        self.note(f"measuring the ensemble of {len(self.modules)}")
        metrics = self.measure(module)
        made = self._judged("ensemble", how, class_dim, shares, self.names, metrics, passed_over)
        made = made._replace(held_out=self._held_out(module, made))

        def save() -> None:
            with saved.new_directory(self.path) as folder:
                for number, (run, found) in enumerate(zip(self.runs, self.figures, strict=True)):
                    weights, source = run.folder / FILES[self.ask.which], run.folder
                    to = saved.member_folder(folder, number)
                    saved.write_as_run(to, source, self._job_file(), weights, {"metrics": found})
                write_json(folder / saved.ENSEMBLE_FILE, made.record())

        attempt(self.ranks, lambda: save() if self.ranks.rank == 0 else None)
        return made

    def _agreed_way(self, how: str | None, class_dim: int | None) -> tuple[str, int | None]:
        """How to combine, found out on rank 0, which has the first member."""

        def find() -> list[Any]:
            if self.ranks.rank != 0 or how == "outputs":
                return [how, None]
            found = class_dim
            if found is None:
                member, device = self.modules[0], self._device_of(0)
                assert member is not None and self.job.validate is not None
                count = min(self.catalogue.num_samples, max(2, self.job.batch_size))
                with self.job.validate.reader(self.catalogue, self.job.seed) as reader:
                    batch = next(iter(reader.sequential(count, 0, count)))
                found = find_class_dim(self.job, member, to_device(batch, device))
            if how is not None and found is None:
                raise UsageError(
                    f"--combine {how} needs a model that answers with the logits of classes, and a log-softmax of its "
                    "answer changes the job's loss; give --class-dim if it has such a dimension all the same, or "
                    "--combine outputs"
                )
            return [how or ("outputs" if found is None else "probabilities"), found]

        way, dim = self.ranks.broadcast(attempt(self.ranks, find))
        return way, dim

    def soup(self, kind: str, shares: list[float], passed_over: dict[str, str]) -> Ensembled:
        """Average the members' weights, and save the model."""
        modules = {name: one for name, one in zip(self.names, self.modules, strict=True) if one is not None}
        soups.check_one_architecture(modules)
        modules = {name: module.to(self.device) for name, module in modules.items()}
        self.note(f"averaging {len(modules)} models")
        used = self.names
        if kind == "uniform":
            made = soups.mean_of(self.job, list(modules.values()), shares)
        else:
            values = {
                name: found[self.by.metric] for name, found in zip(self.names, self.figures, strict=True)
            }
            sign = 1.0 if self.by.less_is_better else -1.0
            ranked = sorted(self.names, key=lambda name: sign * values[name])
            made, used = soups.greedy(
                self.job, [(name, modules[name], values[name]) for name in ranked], self.by, self.measure
            )
        done = self._judged(f"{kind} soup", "weights", None, shares, used, self.measure(made), passed_over)
        done = done._replace(held_out=self._held_out(made, done))
        with saved.new_directory(self.path) as folder:
            first = self.runs[self.names.index(used[0])].folder
            saved.write_as_run(folder, first, self._job_file(), None, {"metrics": done.metrics})
            save_model(made.cpu(), folder / MODEL_FILE, {"job": self.job.name or "", "soup": kind})
            write_json(folder / saved.SOUP_FILE, done.record())
        return done

    def _job_file(self) -> dict[str, Any]:
        """What `run.json` says of the job's file where the user has named another than the run's."""
        if self.ask.job is None:
            return {}
        return dict(of_job_file(None if isinstance(self.ask.job, Job) else str(self.ask.job)))

    def _judged(
        self, kind: str, how: str, class_dim: int | None, shares: list[float], used: list[str],
        metrics: dict[str, float], passed_over: dict[str, str],
    ) -> Ensembled:  # fmt: skip
        members = [
            Member(run.name, str(run.folder.resolve()), share, found, number % self.ranks.size)
            for number, (run, share, found) in enumerate(zip(self.runs, shares, self.figures, strict=True))
        ]
        best = _best_of(members, self.by)
        return Ensembled(
            self.path, kind, how, class_dim, members, list(used), metrics, self.by.metric, best.name,
            {name: _choice(name, self.by).is_better(value, best.metrics.get(name)) for name, value in metrics.items()},
            self.catalogue.num_samples, passed_over, {},
        )  # fmt: skip

    def _held_out(self, module: nn.Module, made: Ensembled) -> dict[str, dict[str, float]]:
        """Of the result, which all ranks compute together, and of its best member, which one rank has."""
        if (source := self.held_out) is None:
            return {}
        self.note("measuring on the held-out part")
        found = {made.kind: self.measure(module, source=source)}
        best = self.names.index(made.best)
        mine = self.modules[best]
        own = {} if mine is None else {made.best: self.measure(mine, self._device_of(best), source)}
        for part in self.ranks.allgather(own):
            found |= part
        return found


def _choice(metric: str, by: Choice) -> Choice:
    return by if by.metric == metric else choice_by_name(metric)


def _best_of(members: Sequence[Member], by: Choice) -> Member:
    best = members[0]
    for one in members[1:]:
        if by.is_better(one.metrics[by.metric], best.metrics[by.metric]):
            best = one
    return best


def _check_whole(run: RunFiles, module: nn.Module) -> None:
    if served := served_layers(module):
        raise UsageError(
            f"run {run.name}: the rows of {', '.join(served)} are in tables-0.safetensors and its kin, which an "
            "ensemble does not hold: take models whose layers hold their own weights"
        )
