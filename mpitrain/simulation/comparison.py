"""One job under several strategies and numbers of workers: a run in virtual time each, and a row of figures of each.

Invariants: all runs draw the same times for the same worker, so that what differs between rows is no luck. Equal inputs
give equal rows; nothing in them depends on the clock of this machine or on where files are, but for `run_dir`. What a
strategy refuses is a row that says why, and the others go on.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from mpitrain.errors import EXIT_OK, DeadlockError, LostRankError, UsageError
from mpitrain.inject.values import Injection
from mpitrain.job import Job, Overrides
from mpitrain.job.job import VALIDATED
from mpitrain.model.gradient.sparse_gradients import sparse_parameters
from mpitrain.reporting.fom import SILENT, fom_line
from mpitrain.reporting.report import default_run_dir
from mpitrain.reporting.run_files import read_runs
from mpitrain.reporting.targets import first_met
from mpitrain.simulation.base import NO_MEASUREMENT, VirtualRun
from mpitrain.simulation.checkpoints import policy_of
from mpitrain.simulation.lockstep import simulate_lockstep
from mpitrain.simulation.measured_step import charged, with_measured
from mpitrain.simulation.servers import simulate_job
from mpitrain.simulation.timing import Circumstances, quantiles, time_run
from mpitrain.simulation.workload import PAD_BYTES, Workload, codec_of
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.checkpoint_policy import CheckpointPolicy
from mpitrain.system.files.folders import unused
from mpitrain.system.saying import say, tell
from mpitrain.system.trace import read_steps
from mpitrain.training.measure import build_module
from mpitrain.training.validate import validate_simulation
from mpitrain.training.validations.judge import asked_for
from mpitrain.virtual import ComputeLaw, Constant, Costs, Ideal, NetworkLaw
from mpitrain.virtual.compute import WorkerTimes
from mpitrain.virtual.serial_fraction import fit_serial_fraction, limit

DRAWS, MOST_DRAWS = 10_000, 1_000_000  # of which the time of a batch on one device is the mean
CODED_STEPS, CODED_WORKERS = 30, 2  # of the run with gradients that says how many bytes a codec sends


class Comparison:
    """The runs of one job.

    Args:
        job, options: with everything but the strategy in place.
        compute, network, costs: laws of all runs; `measured` ones are measured once.
        timing_only: whether roles run without gradients: then there is no loss.
        asked: the texts that the strategies were given as, by the texts that they print as.
    """

    def __init__(
        self,
        job: Job,
        options: Overrides,
        compute: ComputeLaw = Constant(),  # noqa: B008 - frozen
        network: NetworkLaw = Ideal(),  # noqa: B008 - frozen
        costs: Costs = Costs(),  # noqa: B008 - frozen
        timing_only: bool = False,
        asked: Mapping[str, str] = MappingProxyType({}),
    ):
        self.asked = asked
        self.job, self.options, self.timing_only = job, options, timing_only
        self.network = network
        self.catalogue = job.data.scan()
        self.compute_text = str(compute)
        self.compute, self.measured = with_measured(compute, job, options.lr, self.catalogue)
        self.costs = charged(costs, self.measured)
        self.run_dir = Path(options.run_dir or default_run_dir(f"{job.name or 'job'}-virtual")).resolve()
        self._known_shares: dict[str, dict[str, float]] = {}
        # whether what messages carry of tables depends on the batches, where servers hold them
        self.touches_rows = timing_only and _has_tables(job)

    def run(self, strategies: Sequence[Strategy], counts: Sequence[int]) -> dict[str, Any]:
        """All of them, JSON-able.

        Raises:
            UsageError: not one of them can run.
        """
        _set_aside(self.run_dir)
        rows: list[dict[str, Any]] = []
        for strategy in strategies:
            for number in counts:
                rows.append(self._row(len(rows), strategy, number))
        if all("refused" in row for row in rows):
            raise UsageError("; ".join(dict.fromkeys(row["refused"] for row in rows)))
        return {
            "job": self.job.name,
            "seed": self.job.seed,
            "batch_samples": self.job.step_samples,
            "compute": self.compute_text,
            "network": str(self.network),
            "costs": str(self.costs),
            **({"measured": self.measured} if self.measured else {}),
            "target": dict(self.job.target),
            "gradients": not self.timing_only,
            "one_device_samples_per_s": self._alone(1, DRAWS),
            "rows": rows,
            "limits": [found for one in strategies if (found := _limit_of(str(one), rows)) is not None],
        }

    def _alone(self, number: int, num_batches: int) -> float:
        """Samples per second of one device that computes what so many workers do, without a network: the first draws
        of each, as in the run, so that chance is on both sides of a speed-up."""
        each = -(-min(num_batches, MOST_DRAWS) // number)
        times = [WorkerTimes(self.compute, self.job.seed, worker) for worker in range(number)]
        total_s = sum(one.next() for one in times for _ in range(each))
        return each * number * (self.job.part_samples or self.job.step_samples) / total_s if total_s else 0.0

    def _num_batches(self, number: int) -> int:
        """That are computed in a run, one after the other on one device."""
        job, part = self.job, self.job.part_samples or self.job.step_samples
        if self.options.steps is not None:
            return self.options.steps * number * -(-job.step_samples // part)
        return -(-self.catalogue.num_samples // part) * job.epochs

    def _row(self, index: int, strategy: Strategy, number: int) -> dict[str, Any]:
        job = replace(self.job, strategy=strategy)
        folder = self.run_dir / f"{index:02d}-{_file_name(str(strategy))}-{number}"
        row: dict[str, Any] = {"strategy": str(strategy), "workers": number}
        if not self.options.quiet:
            tell(f"simulating {strategy} on {number} workers")
        try:
            if self.timing_only:
                found = self.timed(strategy, number, folder)
            else:
                found = self._trained(job, number, folder)
        except UsageError as error:
            return row | {"refused": str(error)}
        except (DeadlockError, LostRankError) as error:
            return row | {"refused": str(error), "status": "fail"}
        per_s, alone = found["samples_per_second"], self._alone(number, self._num_batches(number))
        row |= {
            "servers": found["servers"],
            "status": found["status"],
            "failure": found["failure"],
            "exit_code": found["exit_code"],
            "steps": found["steps"],
            "samples": found["samples"],
            "virtual_s": found["virtual_s"],
            "paused_s": found.get("paused_s", 0.0),
            "samples_per_s": per_s,
            "speed_up": per_s / alone if alone else 0.0,
            "utilisation": _utilisation(found),
            "staleness": quantiles(found.get("staleness_histogram", {})),
            "staleness_mean": found.get("staleness_mean", 0.0),
            "dropped_share": _dropped(found),
            **_bytes(found),
        }
        row.update({key: found[key] for key in ("checkpoints", "restarts") if key in found})
        if (folder / "metrics.jsonl").exists():
            row["run_dir"] = str(folder)
            row |= _progress(folder, found, job.target)
        elif job.trace is not None:
            row["run_dir"] = str(folder)
        return row

    def _trained(self, job: Job, number: int, folder: Path) -> dict[str, Any]:
        options = replace(self._asked(job), run_dir=str(folder), quiet=self.options.quiet or True)
        return simulate_job(job, options, number, self.compute, self.network, self.costs)

    def _asked(self, job: Job) -> Overrides:
        return replace(self.options, strategy=self.asked.get(str(job.strategy)))

    def timed(self, strategy: Strategy, number: int, folder: Path) -> dict[str, Any]:
        """The result of a run without gradients, whose figure of merit is printed; `folder`: for what it traces.

        Raises:
            UsageError: the strategy refuses the job, or so many workers.
        """
        job = replace(self.job, strategy=strategy)
        options = self._asked(job)
        nothing: dict[str, Any] = dict.fromkeys(("validate", *VALIDATED))
        job = replace(job, validate_ema=False, target={}, log=(), **nothing)
        validate_simulation(job, options, number)
        if strategy.lockstep and not strategy.has_servers:
            with tempfile.TemporaryDirectory() as scratch:
                run_dir = str(folder) if job.trace is not None else scratch
                run = VirtualRun(
                    job,
                    replace(options, run_dir=run_dir, quiet=options.quiet or True),
                    number,
                    self.compute,
                    self.network,
                    self.costs,
                )
                found = simulate_lockstep(run, gradients=False)  # its report prints the figure of merit
            for key in ("model", "run_dir"):  # nothing was trained, and the directory is gone
                found.pop(key, None)
            return found | {"timing_only": True}
        steps = read_steps(job.trace)
        if steps is not None:
            folder.mkdir(parents=True, exist_ok=True)
        injections: tuple[Injection, ...] = options.injections
        policy = policy_of(job, options.checkpoint_every, self.costs, injections)
        load = Workload.of(job, options.steps, policy != CheckpointPolicy(), **self._shares(job))
        found = time_run(
            strategy, load, number, self.compute, self.network, job.seed,
            Circumstances(injections, self.costs, None if steps is None else (steps, folder), policy),
        )  # fmt: skip
        nodes = self.network.nodes(number + found["servers"]) or (0,)
        about = {**asked_for(job, options), **NO_MEASUREMENT}
        found = (
            about | found | {"status": "ok", "failure": "", "exit_code": EXIT_OK, "nodes": len(set(nodes))}
        )
        if options.quiet != SILENT:
            say(fom_line(found))
        return found

    def _shares(self, job: Job) -> dict[str, float]:
        """What share of full numbers travels where a codec decides, measured once for each strategy."""
        # of rows that a batch touches there are more in a larger one
        key = f"{job.strategy} {job.batch_size if self.touches_rows else ''}"
        if key not in self._known_shares:
            self._known_shares[key] = self._measured_shares(job)
        return self._known_shares[key]

    def _measured_shares(self, job: Job) -> dict[str, float]:
        """Of a short run with gradients."""
        strategy = job.run_strategy
        coded = codec_of(strategy) is not None or not strategy.reply_codec.is_none
        if not coded and not (self.touches_rows and strategy.has_servers):
            return {}
        with tempfile.TemporaryDirectory() as scratch:
            options = replace(
                self.options, run_dir=scratch, quiet=True, strategy=None, steps=CODED_STEPS, inject=()
            )
            with contextlib.redirect_stdout(io.StringIO()):  # its figure of merit is nobody's
                found = simulate_job(job, options, CODED_WORKERS)
        load = Workload.of(job)

        def share(num_bytes: float, messages: float, shards: int = 1) -> float:
            full_bytes = load.num_parameters * load.number_bytes
            return max(0.0, num_bytes / messages - 2 * PAD_BYTES * shards) / full_bytes

        if not strategy.has_servers:
            sent, number = (sum(one[key] for one in found["ranks"]) for key in ("sent_bytes", "messages"))
            return {"push_share": share(sent, number)}
        pushes, shards = found["accepted"] + found["dropped"] + found["late"], len(found["shards"])
        pushed, replied = (
            sum(one[key] for one in found["shards"]) for key in ("pushed_bytes", "replied_bytes")
        )
        return {
            "push_share": share(pushed, pushes, shards),
            "reply_share": share(replied, pushes + CODED_WORKERS, shards),
        }


def _has_tables(job: Job) -> bool:
    return bool(sparse_parameters(build_module(replace(job, strategy=None), torch.device("cpu"))))


def _set_aside(folder: Path) -> None:
    """Runs that an earlier comparison has left here go to a folder of their own."""
    left = [one for one in folder.glob("[0-9][0-9]*-*") if one.is_dir()]
    if not left:
        return
    name = time.strftime("earlier-%Y%m%d-%H%M%S", time.localtime(max(one.stat().st_mtime for one in left)))
    target = unused(folder / name)
    target.mkdir()
    for one in left:
        one.rename(target / one.name)


def _file_name(strategy: str) -> str:
    return re.sub(r"[^\w.=,-]+", "-", strategy).strip("-")[:60]


def _utilisation(found: Mapping[str, Any]) -> float:
    """Share of the workers' time in which they compute."""
    if "compute_share" in found:
        return float(found["compute_share"])
    ranks = found.get("per_worker") or found.get("ranks") or ()
    total_s = len(ranks) * found["virtual_s"]
    return sum(one.get("compute_s", 0.0) for one in ranks) / total_s if total_s else 0.0


def _dropped(found: Mapping[str, Any]) -> float:
    """Share of the samples whose gradients were not applied."""
    dropped = found.get("samples_dropped", 0)
    total = found["samples"] + dropped
    return dropped / total if total else 0.0


def _bytes(found: Mapping[str, Any]) -> dict[str, int]:
    """The most that a server takes in and sends out, and the most that a rank without a server sends."""
    if shards := found.get("shards"):
        return {"server_bytes": max(int(one["pushed_bytes"] + one["replied_bytes"]) for one in shards)}
    if "sent_bytes_a_step" in found:
        return {"rank_bytes": int(found["sent_bytes_a_step"] * found["steps"])}
    sent = [
        int(one["sent_bytes"])
        for one in found.get("ranks") or found.get("per_worker") or ()
        if "sent_bytes" in one
    ]
    return {"rank_bytes": max(sent)} if sent else {}


def _progress(folder: Path, found: Mapping[str, object], target: Mapping[str, object]) -> dict[str, Any]:
    """How loss and metrics went, and when the target was met."""
    measured = read_runs([folder])[0].validations("virtual_s")
    return {
        "metrics": found["metrics"],
        "loss_curve": found["loss_curve"],
        "validations": measured,
        "to_target": first_met(target, measured, "virtual_s"),
    }


def _limit_of(strategy: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the speed-up of a strategy tends to, from the rows of at least two numbers of workers above one."""
    points = [
        (row["workers"], row["speed_up"])
        for row in rows
        if row["strategy"] == strategy and row.get("speed_up")
    ]
    if len([number for number, _ in points if number > 1]) < 2:
        return None
    fit = fit_serial_fraction(points)
    assert fit is not None
    most, at = limit(fit)
    return {
        "strategy": strategy,
        **fit._asdict(),
        "speed_up": most if most < float("inf") else None,
        "workers": at if at < float("inf") else None,
    }
