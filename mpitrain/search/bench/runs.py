"""The runs of a benchmark: under MPI by `mpitrain launch`, as a person would start them, and in virtual time.

Invariants: nothing is measured here; what a run says of itself is read from its directory.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpitrain.errors import EXIT_OK, EXIT_TARGET_MISSED, UsageError, printable
from mpitrain.job import Job
from mpitrain.reporting.fom import fom_line
from mpitrain.reporting.run_files import read_runs
from mpitrain.reporting.targets import first_met
from mpitrain.search.bench.settings import Request, Setting
from mpitrain.simulation.comparison import Comparison
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.placement import assign_workers
from mpitrain.system.files.run_directory import read_json
from mpitrain.system.saying import say
from mpitrain.values import parse
from mpitrain.virtual import ComputeLaw, NetworkLaw

LAST_LINES = 12  # of what a failed run has said, where it is not in our words
_OURS = re.compile(r"(?:\[rank \d+\] )?mpitrain: (.*)")


def num_ranks(strategy: Strategy, workers: int) -> int:
    """Of a run with so many workers on this machine."""
    _, nodes = assign_workers(
        workers, lambda size: (0,) * size, strategy.num_servers(), aggregates=strategy.aggregates
    )
    return len(nodes)


def command(request: Request, setting: Setting, seed: int, folder: Path) -> list[str]:
    """The words that start one run under MPI."""
    ranks = num_ranks(setting.strategy, setting.workers)
    return [
        sys.executable, "-m", "mpitrain", "launch", "--mpi", request.mpi, "-n", str(ranks), "train", request.path,
        *request.train.words, "--strategy", setting.asked,
        "--batch-size", str(setting.batch_size), "--seed", str(seed), "--run-dir", str(folder), "--quiet",
    ]  # fmt: skip


def measured(
    request: Request, job: Job, setting: Setting, repeat: int, folder: Path, trained_bytes: int
) -> dict[str, Any]:
    """Run it; what came of it. A run that failed says so in `failure`.

    Args:
        trained_bytes: of all gradients of the model, for what a plain allreduce sends.
    """
    seed = job.seed + repeat
    ended = subprocess.run(
        command(request, setting, seed, folder), capture_output=True, text=True, errors="replace", check=False
    )
    result = read_json(folder / "result.json") or {}
    found = {"seed": seed, "run_dir": str(folder), "exit_code": ended.returncode}
    if ended.returncode not in (EXIT_OK, EXIT_TARGET_MISSED) or not result:
        return found | {"status": "fail", "failure": result.get("failure") or why(ended.stderr)}
    say(fom_line(result))
    return found | _figures(result, folder, setting, job.target, trained_bytes)


def why(said: str) -> str:
    """Why a run has failed, from its stderr: what mpitrain has said of it, without what the MPI library adds."""
    lines = [printable(line).strip() for line in said.splitlines() if line.strip()]
    ours = dict.fromkeys(found[1] for line in lines if (found := _OURS.match(line)))
    return "; ".join(ours) or "\n".join(lines[-LAST_LINES:]) or "it said nothing"


def _figures(
    result: Mapping[str, Any],
    folder: Path,
    setting: Setting,
    target: Mapping[str, object],
    trained_bytes: int,
) -> dict[str, Any]:
    validations = read_runs([folder])[0].validations("seconds")
    kept = ("status", "samples_per_second", "spread", "warmup_steps", "steps", "samples", "train_s", "wall_s")
    return {
        **{name: result.get(name) for name in (*kept, "device", "precision", "metrics")},
        "failure": "",
        "staleness_mean": result.get("staleness_mean"),
        "validations": validations,
        "to_target": first_met(target, validations, "seconds"),
        "num_bytes": sent_bytes(result, setting, trained_bytes),
        "energy_j": result.get("energy_joules"),
    }


def sent_bytes(result: Mapping[str, Any], setting: Setting, trained_bytes: int) -> int | None:
    """What the busiest server takes in and sends out, or what a rank without servers sends; None where nobody counts.

    A plain allreduce is not counted by the run: a ring sends 2 (N - 1) / N of the gradients a step.
    """
    ranks = [one for one in result.get("ranks") or () if isinstance(one, Mapping)]
    through = [int(one["pushed_bytes"] + one["replied_bytes"]) for one in ranks if "pushed_bytes" in one]
    sent = [int(one["sent_bytes"]) for one in ranks if "sent_bytes" in one]
    if through or sent:
        return max(through or sent)
    if "averaging_bytes" in result:
        return int(result["averaging_bytes"])
    if setting.strategy.all_reduces and not setting.strategy.codes_allreduce:
        number = setting.workers
        return int(2 * (number - 1) / number * trained_bytes * result["steps"])
    return None


def simulated(request: Request, job: Job, settings: Sequence[Setting], folder: Path) -> list[dict[str, Any]]:
    """A row of each of these settings, in virtual time, where a batch takes as long as the compute law says."""
    compute, network = parse(request.compute, "compute"), parse(request.network, "network")
    assert isinstance(compute, ComputeLaw) and isinstance(network, NetworkLaw)
    rows = []
    for number, batch in dict.fromkeys((one.workers, one.batch_size) for one in settings):
        these = [one for one in settings if (one.workers, one.batch_size) == (number, batch)]
        assert batch is not None
        options = replace(
            request.train.overrides,
            strategy=None,
            batch_size=batch,
            quiet=True,
            run_dir=str(folder / f"v{number}"),
        )
        strategies: list[Strategy] = [one.strategy for one in these]
        comparison = Comparison(
            replace(job, batch_size=batch), options, compute, network,
            asked={str(one.strategy): one.asked for one in these},
        )  # fmt: skip
        try:
            found = comparison.run(strategies, [number])["rows"]
        except UsageError as error:
            found = [{"refused": str(error)} for _ in these]
        rows += [_virtual_row(setting, row) for setting, row in zip(these, found, strict=True)]
    return rows


def _virtual_row(setting: Setting, row: Mapping[str, Any]) -> dict[str, Any]:
    if "refused" in row:
        return {**setting.row(), "refused": row["refused"]}
    met = row.get("to_target")
    run = {
        "seed": None,
        "run_dir": row.get("run_dir"),
        "exit_code": row["exit_code"],
        "status": row["status"],
        "failure": "" if row["status"] != "fail" else row["failure"],
        "samples_per_second": row["samples_per_s"],
        "steps": row["steps"],
        "samples": row["samples"],
        "train_s": row["virtual_s"],
        "metrics": row.get("metrics") or {},
        "staleness_mean": row["staleness_mean"],
        "validations": [
            {"seconds": one["virtual_s"], **{key: value for key, value in one.items() if key != "virtual_s"}}
            for one in row.get("validations", ())
        ],
        "to_target": met and {"seconds": met["virtual_s"], "samples": met["samples"]},
        "num_bytes": row.get("server_bytes", row.get("rank_bytes")),
    }
    return {**setting.row(), "speed_up": row["speed_up"], "runs": [run]}


def folder_name(index: int, setting: Setting) -> str:
    """Of the runs of a setting."""
    name = re.sub(r"[^\w.=,-]+", "-", setting.asked).strip("-")[:60]
    return f"{index:02d}-{name}-{setting.workers}"
