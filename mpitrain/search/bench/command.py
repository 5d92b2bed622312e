"""`mpitrain bench`: a job under several strategies and numbers of workers, with a table, JSON and a page.

Invariants: figures of merit go to stdout, one a run; everything for eyes goes to stderr. What an interruption leaves
is written as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mpitrain.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK
from mpitrain.job import Job
from mpitrain.reporting.report import default_run_dir, plain
from mpitrain.search.bench.runs import folder_name, measured, simulated
from mpitrain.search.bench.settings import Request, Setting, in_turns, load
from mpitrain.search.bench.summary import main_metric, summed_up, verdicts, with_efficiency
from mpitrain.search.bench.text import bench_text
from mpitrain.system.files.atomic import check_output, write_whole
from mpitrain.system.files.folders import make_private
from mpitrain.system.saying import tell
from mpitrain.training.measure import build_module

BENCH_SCHEMA = 1


def bench_command(request: Request) -> int:
    """Measure; returns 0, or 1 where a run has failed. A missed target is a finding, no failure."""
    check_output(request.json, "--json")
    check_output(request.html, "--html")
    if request.html:
        from mpitrain.reporting.pages.figures import check_drawing

        check_drawing()  # before anything takes long
    job, settings = load(request)
    folder = Path(request.run_dir) if request.run_dir else default_run_dir(f"{job.name or 'job'}-bench")
    make_private(folder)
    rows = [setting.row() | ({} if setting.refused else {"runs": []}) for setting in settings]
    interrupted = False
    try:
        _measure(request, job, settings, rows, folder)
        _simulate(request, job, settings, rows, folder)
    except KeyboardInterrupt:
        interrupted = True
        tell("mpitrain: interrupted; what follows are the runs that came to their end")
    found = _found(request, job, rows)
    _write(request, found, folder)
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_ERROR if any(run["failure"] for row in rows for run in row.get("runs", ())) else EXIT_OK


def _measure(
    request: Request, job: Job, settings: Sequence[Setting], rows: Sequence[dict[str, Any]], folder: Path
) -> None:
    order = list(in_turns(settings, request.repeats))
    trained_bytes = _trained_bytes(job) if order else 0
    for count, (number, repeat) in enumerate(order, 1):
        setting = settings[number]
        seed = job.seed + repeat
        what = f"{setting.asked} on {setting.workers} workers, seed {seed}"
        _say(request, f"run {count} of {len(order)}: {what}")
        place = folder / f"{folder_name(number, setting)}-seed-{seed}"
        rows[number]["runs"].append(measured(request, job, setting, repeat, place, trained_bytes))


def _simulate(
    request: Request, job: Job, settings: Sequence[Setting], rows: list[dict[str, Any]], folder: Path
) -> None:
    able = [number for number, one in enumerate(settings) if one.virtual and not one.refused]
    if able:
        _say(request, f"{len(able)} runs in virtual time")
    # by number of workers, as `simulated` returns them
    for workers in dict.fromkeys(settings[number].workers for number in able):
        these = [number for number in able if settings[number].workers == workers]
        found = simulated(request, job, [settings[number] for number in these], folder)
        by_strategy = {row["strategy"]: row for row in found}
        for number in these:
            rows[number] = by_strategy[str(settings[number].strategy)]


def _trained_bytes(job: Job) -> int:
    module = build_module(replace(job, strategy=None), torch.device("cpu"))
    return sum(one.numel() * one.element_size() for one in module.parameters() if one.requires_grad)


def _say(request: Request, text: str) -> None:
    if not request.quiet:
        tell(text)


def _found(request: Request, job: Job, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    summed = with_efficiency([summed_up(row) for row in rows])
    metric = main_metric(job.target, summed)
    return {
        "schema": BENCH_SCHEMA,
        "job": job.name,
        "scaling": "weak" if request.global_batch_size is None else "strong",
        "global_batch_size": request.global_batch_size,
        "repeats": request.repeats,
        "seed": job.seed,
        "target": dict(job.target),
        "train_args": list(request.train.words),
        "compute": request.compute,
        "network": request.network,
        "metric": metric[0] if metric else None,
        "rows": summed,
        "verdicts": list(verdicts(summed, job.target)),
    }


def _write(request: Request, found: dict[str, Any], folder: Path) -> None:
    strict = plain(found)
    write_whole(folder / "bench.json", json.dumps(strict, indent=1, sort_keys=True) + "\n")
    if not request.quiet:
        tell(bench_text(found))
        tell(f"\nall figures: {folder / 'bench.json'}")
    if request.json:
        write_whole(Path(request.json), json.dumps(strict, indent=1, sort_keys=True) + "\n")
    if request.html:
        from mpitrain.search.bench.page import bench_page

        write_whole(Path(request.html), bench_page(found))
