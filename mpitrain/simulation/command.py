"""`mpitrain simulate`: one run, or one for every strategy and number of workers, with a table, JSON and a page.

Invariants: figures of merit go to stdout, one a run; everything for eyes goes to stderr.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.job import Overrides, apply_overrides
from mpitrain.simulation.comparison import Comparison
from mpitrain.simulation.comparison_text import comparison_text, failures
from mpitrain.simulation.servers import simulate_again, simulate_job
from mpitrain.strategies.base import read_strategy
from mpitrain.system.files.atomic import check_output, write_whole
from mpitrain.system.saying import tell
from mpitrain.training.job_file import load_job
from mpitrain.values import parse
from mpitrain.virtual import ComputeLaw, Costs, NetworkLaw


@dataclass(frozen=True)
class Request:
    """What the command line asks.

    Attributes:
        path: of the job file; settings: of its declared parameters.
        workers, strategies: of which every pair is a run; no strategy: the job's own.
        compute, network, costs: texts of the laws.
        timing_only: no gradients; json, html: files to write; replay: a run directory.
    """

    path: str | None
    overrides: Overrides
    workers: Sequence[int] = (8,)
    strategies: Sequence[str] = ()
    compute: str = "constant(1, jitter=0.1)"
    network: str = "ideal()"
    costs: str = "costs()"
    timing_only: bool = False
    json: str | None = None
    html: str | None = None
    replay: str | None = None
    settings: Sequence[str] = ()

    @property
    def compares(self) -> bool:
        """Whether there are rows to show, and not one run."""
        several = len(self.workers) > 1 or len(self.strategies) > 1
        return several or self.timing_only or bool(self.json or self.html)


def simulate_command(request: Request) -> int:
    """Simulate; returns the exit code, which is that of the first run that did not succeed."""
    if request.replay is not None:
        _refuse_besides_replay(request)
        return int(simulate_again(Path(request.replay), request.overrides, path=request.path)["exit_code"])
    check_output(request.json, "--json")
    check_output(request.html, "--html")
    if request.path is None:
        raise UsageError("simulate needs a job file, or --replay RUN_DIR of a run that was started from one")
    compute, network = parse(request.compute, "compute"), parse(request.network, "network")
    costs = parse(request.costs, "costs")
    assert isinstance(compute, ComputeLaw) and isinstance(network, NetworkLaw) and isinstance(costs, Costs)
    strategies = [read_strategy(text) for text in request.strategies]
    first = str(strategies[0]) if strategies else None
    options = replace(request.overrides, strategy=first)
    job = apply_overrides(load_job(request.path, request.settings), options)
    if not request.compares:
        return int(simulate_job(job, options, request.workers[0], compute, network, costs)["exit_code"])
    if request.html:
        from mpitrain.reporting.pages.figures import check_drawing

        check_drawing()  # before anything takes long
    asked = {str(strategy): text for strategy, text in zip(strategies, request.strategies, strict=True)}
    runs = Comparison(job, options, compute, network, costs, request.timing_only, asked)
    found = runs.run(strategies or [job.run_strategy], sorted(set(request.workers)))
    if not options.quiet:
        tell(comparison_text(found))
    elif lines := failures(found):
        tell("\n".join(lines))
    if request.json:
        write_whole(Path(request.json), json.dumps(found, indent=1, sort_keys=True) + "\n")
    if request.html:
        from mpitrain.reporting.pages.comparison_page import comparison_page

        write_whole(Path(request.html), comparison_page(found))
    codes = [
        int(row.get("exit_code", 1)) for row in found["rows"] if row.get("status", "refused") != "refused"
    ]
    return next((code for code in codes if code), 0)


def _refuse_besides_replay(request: Request) -> None:
    """A recorded run has its own options; where results go is all that can be said.

    Raises:
        UsageError: names what else was given.
    """
    given = request.overrides
    bare = Overrides(run_dir=given.run_dir, quiet=given.quiet)
    plain = Request(request.path, bare, replay=request.replay)
    named = {"strategies": "strategy", "settings": "set"}
    differing = [name for name, value in vars(given).items() if value != getattr(bare, name)]
    differing += [
        named.get(name, name)
        for name, value in vars(request).items()
        if name != "overrides" and value and value != getattr(plain, name)  # nothing given is an empty list
    ]
    if differing:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in differing)
        raise UsageError(
            f"--replay repeats one recorded run, with the options that it had: leave out {options}"
        )
