"""`mpitrain sweep`: check a plan, carry it out, and say what came of it.

Invariants: nothing is written, started or queued before every configuration was read. A sweep that lies in the
directory goes on, and only with the plan it has been begun with.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.errors import EXIT_ERROR, EXIT_OK, UsageError
from mpitrain.reporting.report import default_run_dir
from mpitrain.search.sweep.check import Read, Setup, examine
from mpitrain.search.sweep.deal import (
    FAILED,
    Compared,
    Standing,
    Task,
    all_progress,
    best_of,
    compare_settings,
    standings,
)
from mpitrain.search.sweep.journal import Dealer, Sweep
from mpitrain.search.sweep.local import Dealt, deal_locally, default_parallel
from mpitrain.search.sweep.plan import Plan, differing
from mpitrain.search.sweep.proposals import Proposals
from mpitrain.slurm import Script, submit
from mpitrain.slurm.script import make, render
from mpitrain.system.files.atomic import check_output, write_whole
from mpitrain.system.files.job_source import find_job
from mpitrain.system.saying import hand_out, say, tell

SHOWN = 10  # best configurations in the summary


@dataclass(frozen=True)
class Request:
    """What `mpitrain sweep` was asked for.

    Attributes:
        plan: None: the one that lies in `run_dir`.
        run_dir: of the sweep; None for a new one.
        parallel: runs at a time on this host; None for as many as it has room for.
        rerun: whether configurations that have failed are to be trained once more.
        json: a file for the figures.
        slurm: settings of a batch script, for a sweep that is submitted; runs_per_node: at a time.
    """

    plan: Plan | None
    run_dir: str | None
    read: Callable[[Plan], Read]
    parallel: int | None = None
    rerun: bool = False
    dry_run: bool = False
    json: str | None = None
    slurm: Mapping[str, Any] | None = None
    runs_per_node: int = 1


def sweep_command(request: Request) -> int:
    """Carry out a sweep on this host; returns the exit code."""
    sweep, setup = open_sweep(request)
    if request.slurm is not None:
        return _submit(request, sweep, setup)
    if request.dry_run:
        say(listing(setup))
        return EXIT_OK
    parallel = request.parallel or default_parallel(setup.plan.ranks_per_run)
    begin(sweep, setup, request.rerun)
    _note(f"{setup.plan.num_configurations} configurations, {parallel} at a time, in {sweep.folder}")
    parallel = min(parallel, setup.plan.num_configurations)
    dealt = deal_locally(sweep, setup, parallel, _proposer(sweep, setup))
    return conclude(sweep, setup, dealt, request.json)


def _submit(request: Request, sweep: Sweep, setup: Setup) -> int:
    """Submit the array, or print its script."""
    script = script_of(sweep, setup, request.runs_per_node, request.slurm or {})
    if request.dry_run:
        say(listing(setup))
        hand_out(f"\n{render(script)}")
        return EXIT_OK
    begin(sweep, setup, request.rerun)
    script = script_of(sweep, setup, request.runs_per_node, request.slurm or {})  # a rerun opens more
    say(submit(render(script)))
    _note(
        f"submitted as {'an array ' + script.array if script.array else 'one job'}; look at {sweep.folder} with:"
    )
    _note(f"  mpitrain runs table {sweep.folder}")
    return EXIT_OK


def sweep_on_ranks(request: Request, whole: Any) -> int:
    """Carry out a sweep with the ranks of a launch, all of which call this; returns the exit code.

    Args:
        whole: the runtime of all ranks.
    """
    from mpitrain.search.sweep.allocation import deal_to_groups, share
    from mpitrain.training.agree import attempt

    def prepare() -> tuple[Sweep, Setup] | None:
        if whole.rank:
            return None
        if request.parallel:
            raise UsageError(
                "--parallel is for a sweep without ranks: here every --ranks-per-run ranks make a group"
            )
        opened = open_sweep(request)
        if not request.dry_run:
            begin(*opened, request.rerun)
        return opened

    sweep, setup = share(whole, attempt(whole, prepare))
    if request.dry_run:
        if whole.rank == 0:
            say(listing(setup))
        return EXIT_OK
    if whole.rank == 0:
        num_groups = max(1, whole.size // setup.plan.ranks_per_run)
        _note(
            f"{setup.plan.num_configurations} configurations on {num_groups} group(s) of ranks, in {sweep.folder}"
        )
    dealt = deal_to_groups(whole, sweep, setup, request.read(setup.plan), lambda: _proposer(sweep, setup))
    return int(whole.broadcast(conclude(sweep, setup, dealt, request.json) if dealt is not None else None))


def open_sweep(request: Request) -> tuple[Sweep, Setup]:
    """The directory and the checked plan; writes nothing.

    Raises:
        UsageError: a configuration could not be trained, or another plan lies in the directory.
    """
    check_output(request.json, "--json")
    folder = Path(request.run_dir) if request.run_dir else None
    there = Sweep(folder).plan() if folder else None
    plan = request.plan or there
    if plan is None:
        what = f"there is no sweep in {folder} to go on with" if folder else "sweep which job?"
        raise UsageError(f"{what}: mpitrain sweep JOB.py --vary NAME=VALUE,VALUE")
    setup = examine(plan, request.read(plan))
    if there is not None and (text := differing(there, setup.plan)):
        raise UsageError(
            f"another sweep lies in {folder}: {text}. Give another --run-dir, or go on with that one by `mpitrain "
            f"sweep --run-dir {folder}` alone"
        )
    return Sweep(folder or default_run_dir(f"{find_job(plan.job).stem}-sweep")), setup


def begin(sweep: Sweep, setup: Setup, rerun: bool) -> None:
    """Write the plan down, and with `rerun` that what has failed is to be tried again."""
    if sweep.plan() is None:
        sweep.begin(setup.plan)
    if not rerun:
        return
    records = sweep.records()
    failed = [
        one.task
        for row in all_progress(records, setup.plan.num_configurations, setup.plan.num_rungs)
        for one in row
        if one.status == FAILED
    ]
    if failed:
        with Dealer(sweep) as dealer:
            for task in failed:
                for attempt in range(task.attempt + 1):  # of one that was killed often, all of them
                    dealer.note("rerun", **Task(task.number, task.rung, attempt)._asdict())
    _note(f"{len(failed)} failed before and run{'s' * (len(failed) == 1)} again")


def _proposer(sweep: Sweep, setup: Setup) -> Proposals | None:
    if setup.plan.sampler != "optuna":
        return None
    assert setup.by is not None
    return Proposals(sweep, setup.plan, setup.by)


def listing(setup: Setup) -> str:
    """The configurations, one a line, for `--dry-run`."""
    plan = setup.plan
    lines = [f"{one.number}: {one.text}" for one in setup.configurations]
    if not lines:
        lines = [f"{axis.name}: {axis.law or ', '.join(axis.values)}" for axis in plan.axes]
    head = f"{plan.num_configurations} configurations of {plan.job}, {plan.ranks_per_run} rank(s) each"
    if setup.by:
        head += f", compared by {setup.by.metric} ({'less' if setup.by.less_is_better else 'more'} is better)"
    if setup.plan.rungs:
        lines.append("rungs: " + ", ".join(f"{epochs} epochs" for epochs in setup.plan.rungs))
    return "\n".join([head, *lines])


def conclude(sweep: Sweep, setup: Setup, dealt: Dealt, json_file: str | None) -> int:
    """Say what came of it; returns the exit code: that of a signal, 1 if a configuration has failed, else 0."""
    records = sweep.records()
    found = standings(records, setup.plan.num_configurations, setup.plan.num_rungs)
    samples = sum(ended.samples for ended in records.ended.values())
    lines = summary(sweep, setup, found)
    if any(dealt.busy_s):
        lines.append(
            f"idle share {100 * dealt.idle_share:.1f} % of {len(dealt.busy_s)} group(s) of {setup.plan.ranks_per_run} "
            f"rank(s) in {dealt.elapsed_s:.1f} s; {samples} samples in all"
        )
    say("\n".join(lines))
    if json_file:
        write_whole(Path(json_file), json.dumps(figures(sweep, setup, dealt), indent=2) + "\n")
    if dealt.code:
        _note(f"asked to end; go on with: mpitrain sweep --run-dir {sweep.folder}")
        return dealt.code
    return EXIT_ERROR if any(one.status == FAILED for one in found) else EXIT_OK


def summary(sweep: Sweep, setup: Setup, found: list[Standing]) -> list[str]:
    """How many have come how far, what has failed, and the best."""
    counts = {
        status: sum(one.status == status for one in found)
        for status in dict.fromkeys(one.status for one in found)
    }
    lines = [
        f"{len(found)} configurations: " + ", ".join(f"{count} {status}" for status, count in counts.items())
    ]
    lines += [f"  {one.number} failed: {one.reason}"[:200] for one in found if one.status == FAILED][:SHOWN]
    compared = settings_of(sweep, setup)
    if setup.by is None or (best := best_of(compared, setup.by)) is None:
        return lines
    options = {one.number: one for one in configurations_of(sweep, setup)}
    sign = 1 if setup.by.less_is_better else -1
    ranked = sorted(
        (one for one in compared if one.mean is not None), key=lambda one: sign * (one.mean or 0.0)
    )
    repeated = any(len(one.numbers) > 1 for one in compared)
    if repeated:
        lines.append(f"{len(compared)} settings, mean and spread over their seeds and folds:")
    for one in ranked[:SHOWN]:
        first = options[one.numbers[0]]
        text = first.setting_text if repeated else first.text
        lines.append(f"  {setup.by.metric} {_figure(one)}  {_numbers(one)}: {text}")
    folders = [str(sweep.run_dir(number)) for number in best.numbers]
    return [*lines, f"best: {' '.join(folders)}"]


def _figure(one: Compared) -> str:
    return f"{one.mean:.6g}" + ("" if one.spread is None else f" +- {one.spread:.2g}")


def _numbers(one: Compared) -> str:
    numbers = one.numbers
    is_range = len(numbers) > 2 and numbers == tuple(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if is_range else ", ".join(map(str, numbers))


def settings_of(sweep: Sweep, setup: Setup) -> list[Compared]:
    """How the settings compare so far."""
    plan = setup.plan
    return compare_settings(sweep.records(), plan.num_configurations, plan.num_rungs, plan.settings)


def configurations_of(sweep: Sweep, setup: Setup) -> list[Any]:
    """All configurations that are known by now."""
    if setup.configurations:
        return list(setup.configurations)
    plan, proposed = setup.plan, sweep.proposals()
    return [
        plan.repeated(index, proposed[first])
        for index in range(plan.num_configurations)
        if (first := index - index % plan.num_repeats) in proposed
    ]


def figures(sweep: Sweep, setup: Setup, dealt: Dealt) -> dict[str, Any]:
    """What `--json` holds."""
    records = sweep.records()
    found = standings(records, setup.plan.num_configurations, setup.plan.num_rungs)
    options = {one.number: dict(one.options) for one in configurations_of(sweep, setup)}
    compared = settings_of(sweep, setup)
    best = best_of(compared, setup.by) if setup.by else None
    return {
        "schema": 2,  # 1 named one run as the best
        "run_dir": str(sweep.folder),
        "plan": setup.plan.to_json(),
        "rungs_epochs": list(setup.plan.rungs),
        "metric": setup.by.metric if setup.by else None,
        "best": list(best.numbers) if best else None,
        "num_samples": sum(ended.samples for ended in records.ended.values()),
        "num_attempts": len(records.claimed),
        "elapsed_s": dealt.elapsed_s,
        "busy_s": list(dealt.busy_s),
        "idle_share": dealt.idle_share,
        "exit_code": dealt.code,
        "settings": [dataclasses.asdict(one) for one in compared],
        "configurations": [
            {
                **one._asdict(),
                "options": options.get(one.number, {}),
                "run_dir": str(sweep.run_dir(one.number)),
            }
            for one in found
        ],
    }


def _note(text: str) -> None:
    """A line for people, on stderr."""
    tell(f"mpitrain: {text}")


# ---- A sweep as a Slurm array: every element is a node whose ranks take what is left, several runs at a time.
#
# Invariants: the elements are all alike and deal from one journal, so it does not matter how many of them run at once,
# nor in which order, nor which of them is lost. What is submitted has been checked as a whole before.


_OURS = ("kind", "job", "options", "sweep", "server_nodes", "server_partition")


def script_of(sweep: Sweep, setup: Setup, runs_per_node: int, settings: Mapping[str, object]) -> Script:
    """The batch script for what is left of a sweep.

    Args:
        settings: of the script, such as time and partition, by the names of `mpitrain slurm render --set`.

    Raises:
        UsageError: a setting is not known, makes no sense, or is the sweep's own.
    """
    for name in _OURS:
        if name in settings:
            raise UsageError(f"--slurm-set {name} follows from the sweep: leave it out")
    ranks = runs_per_node * setup.plan.ranks_per_run
    given = {
        "gpus_per_node": 0,
        "name": find_job(setup.plan.job).stem,
        "array": _array(sweep, setup, runs_per_node),
    }
    return make("sweep", job=str(sweep.folder.absolute()), options=(str(ranks),), **{**given, **settings})


def _array(sweep: Sweep, setup: Setup, runs_per_node: int) -> str | None:
    """As many elements as are busy with one run at each place; each goes on as long as there is something to do."""
    plan = setup.plan
    found = standings(sweep.records(), plan.num_configurations, plan.num_rungs)
    left = sum(one.status in ("open", "running") for one in found)
    num_nodes = math.ceil(left / runs_per_node)
    return f"0-{num_nodes - 1}" if num_nodes > 1 else None
