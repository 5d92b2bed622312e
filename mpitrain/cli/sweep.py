"""`mpitrain sweep`: many runs of one job, each with other options."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpitrain.cli.common.options import asked, command, option, switch
from mpitrain.cli.common.ranks import on_ranks
from mpitrain.cli.slurm import script_setting
from mpitrain.cli.train import add_job_options, add_options, overrides
from mpitrain.errors import UsageError
from mpitrain.system.launched.launch_variables import is_rank, launched_task
from mpitrain.system.number_texts import natural, positive

if TYPE_CHECKING:
    from mpitrain.search.sweep.check import Read
    from mpitrain.search.sweep.plan import Plan

_DESCRIPTION = """\
Train a job once for every configuration: every combination of values, draws
from laws, seeds, strategies. All of them are read before the first one starts.
What has finished is not trained again when the same command is given once more,
or `mpitrain sweep --run-dir DIR` alone."""

_EXAMPLES = """\
examples:
  mpitrain sweep jobs/digits.py --vary lr=1e-3,3e-3 --vary batch-size=16,64
  mpitrain sweep jobs/digits.py --epochs 5 --seeds 3 \\
      --vary "strategy=allreduce(),async(servers=1)" --ranks-per-run 3
  mpitrain sweep jobs/digits.py --vary "lr=log_uniform(1e-4, 1e-1)" \\
      --sampler random --num 32 --asha "asha(least=2, reduction=3)"
  mpitrain sweep --run-dir runs/first --rerun
  mpitrain sweep jobs/digits.py --vary lr=1e-3,3e-3 --slurm --runs-per-node 4 \\
      --slurm-set gpus_per_node=4 --slurm-set time=2:00:00
  mpirun -n 4 mpitrain sweep jobs/digits.py --vary lr=1e-3,3e-3 --run-dir runs/a
  mpitrain runs table runs/first

In a --config file the varied options stand in a table:
  epochs = 5
  [vary]
  lr = [0.001, 0.003]
  strategy = ["allreduce()", "async(servers=1)"]
  "model.hidden" = "integers(16, 256, log=True)\""""

# What a run of a sweep cannot be given, or is given by the sweep.
_NOT_VARIED = {
    "help", "run_dir", "resume", "config", "options", "dry_run", "ranks", "nodes", "gpus_per_node", "server_nodes",
    "hosts", "write_hosts", "quiet", "threads",
}  # fmt: skip
# Options of the sweep itself, or of its own runs, that are not passed on as they are.
_NOT_PASSED = _NOT_VARIED - {"options"}


def _epilog() -> str:
    from mpitrain.search.sweep.axes import rows

    lines = ["laws, for --vary NAME=LAW:"]
    for signature, summary in rows():
        lines += [
            f"  {signature}",
            *textwrap.wrap(summary, 80, initial_indent=" " * 6, subsequent_indent=" " * 6),
        ]
    return "\n".join(lines) + "\n\n" + _EXAMPLES


def add_parser(commands: Any) -> None:
    """Add `sweep` to the command's subparsers."""
    parser = command(
        commands, "sweep", "train a job with many configurations", run_sweep, _DESCRIPTION, _epilog
    )
    _add_search_options(parser.add_argument_group("the search"))
    ways = parser.add_argument_group("ways to run")
    option(ways, "--ranks-per-run", "K", "ranks of each run (default: 1)", positive, 1)
    option(
        ways, "--parallel", "N",
        "runs at a time on this host (default: so many that every rank has a GPU, or a core without one); in a "
        "launch of ranks it follows from these",
        positive,
    )  # fmt: skip
    switch(ways, "--slurm", "submit an array of nodes that share the work, and print the job's id")
    option(ways, "--runs-per-node", "R", "with --slurm: runs at a time on each node (default: 1)", positive)
    option(
        ways, "--slurm-set", "NAME=VALUE",
        "with --slurm: time, partition, gpus_per_node, array, ..., as of mpitrain slurm render --set, as often as "
        "you like",
        default=[], action="append",
    )  # fmt: skip
    switch(ways, "--rerun", "train those once more that have failed")
    switch(ways, "--dry-run", "check and list the configurations, and stop")
    add_options(ways, "synthetic")
    option(ways, "--json", "FILE", "write the figures")
    add_job_options(parser, job_is_optional=True)


def _add_search_options(search: Any) -> None:
    """Which configurations there are, and what they are compared by."""
    option(
        search, "--vary", "NAME=VALUES",
        "an option of train, or a parameter of the job file (model.hidden), with its values: a list with commas, "
        "a list in JSON, or a law to draw from; as often as you like",
        default=[], action="append",
    )  # fmt: skip
    option(
        search, "--sampler", "NAME",
        "grid: every combination (default); random: --num draws; optuna: --num proposals of its TPE sampler, "
        "which learns from what has finished (needs mpitrain[optuna])",
        default="grid",
    )  # fmt: skip
    option(search, "--num", "N", "configurations that a sampler draws", positive)
    option(search, "--sampler-seed", "N", "key of the draws (default: 0)", natural, 0)
    option(search, "--seeds", "N", "train every configuration with seeds 0 to N-1, or with those listed: 3,7")
    option(
        search, "--folds", "K",
        "cross-validation: train every configuration once for each of K parts of the training set, without it, "
        "and validate on it (--fold 1/K, 2/K, ... of train)",
        positive, 0,
    )  # fmt: skip
    option(
        search, "--metric", "NAME",
        "what configurations are compared by, as in --keep-best (default: the job's keep_best or target, or the "
        "validation loss)",
        default="",
    )  # fmt: skip
    option(
        search, "--asha", "RULE",
        'stop early: after least epochs the best 1/reduction go on to reduction times as many, and so on: "asha('
        'least=1, reduction=3)"',
        default="",
    )  # fmt: skip


def run_sweep(arguments: argparse.Namespace) -> int:
    """Carry out the sweep, here or on the ranks of a launch."""
    from mpitrain.search.sweep.command import Request, sweep_command, sweep_on_ranks

    plan = _plan(arguments) if arguments.job else None
    if plan is None and (given := _given(arguments)):
        arguments.parser.error(
            f"{given[0]} needs the job: without one the sweep in --run-dir goes on as it was begun"
        )
    request = asked(
        Request, arguments, plan=plan, read=lambda plan: _reader(arguments.parse, plan), slurm=_slurm(arguments),
        runs_per_node=arguments.runs_per_node or 1,
    )  # fmt: skip
    task = launched_task()
    if not is_rank() and not (task and task.is_one_of_several()):
        return sweep_command(request)
    if arguments.slurm:
        raise UsageError("--slurm submits a sweep: run it without mpirun, srun and mpitrain launch")
    if os.environ.get("MPITRAIN_FT"):
        raise UsageError(
            "--ft lets one run survive deaths; a sweep goes on when it is started again: leave --ft out"
        )
    from mpitrain.training import signals

    signals.install_early()

    def work(_: argparse.Namespace, whole: object) -> int:
        code = sweep_on_ranks(request, whole)
        signals.ignore()  # what asks for an end changes nothing any more
        return code

    return on_ranks(work, arguments)


def _slurm(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The settings of the batch script; None where nothing is to be submitted."""
    if not arguments.slurm:
        for option, given in (
            ("--runs-per-node", arguments.runs_per_node),
            ("--slurm-set", arguments.slurm_set),
        ):
            if given:
                raise UsageError(f"{option} goes with --slurm")
        return None
    for option, given in (("--parallel", arguments.parallel), ("--json", arguments.json)):
        if given:
            raise UsageError(f"{option} is for a sweep that runs here, not for one that --slurm submits")
    return dict(map(script_setting, arguments.slurm_set))


def _given(arguments: argparse.Namespace) -> list[str]:
    return [*_fixed_words(arguments), *(f"--vary {text}" for text in arguments.vary)]


def _plan(arguments: argparse.Namespace) -> Plan:
    from mpitrain.search.sweep.axes import read_axis
    from mpitrain.search.sweep.plan import Plan

    axes = tuple(map(read_axis, arguments.vary))
    _check_names([axis.name for axis in axes if "." not in axis.name], arguments)
    return asked(
        Plan, arguments, words=tuple(_fixed_words(arguments)), axes=axes, seeds=_seeds(arguments.seeds),
        asha=_asha(arguments.asha),
    )  # fmt: skip


def _asha(text: str) -> str:
    from mpitrain.search.sweep.asha import RULE_KIND
    from mpitrain.values import parse

    return str(parse(text, RULE_KIND)) if text else ""


def _seeds(text: str | None) -> tuple[int, ...]:
    """ "3" is 0, 1 and 2; "3,7" is 3 and 7."""
    if text is None:
        return ()
    try:
        seeds = tuple(natural(one.strip()) for one in text.split(","))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--seeds: {error}") from None
    seeds = tuple(range(seeds[0])) if len(seeds) == 1 else seeds
    if not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds {text}: say how many, at least 1, or list different ones")
    return seeds


def _train_actions(parse: Callable[[Sequence[str]], argparse.Namespace]) -> list[argparse.Action]:
    """The options of `train`."""
    return list(parse(["train", "-"]).parser._actions)


def _check_names(names: list[str], arguments: argparse.Namespace) -> None:
    """Refuse to vary what is no option of `train`."""
    from mpitrain.values import nearest

    options = [
        action.option_strings[0].removeprefix("--").replace("-", "_")
        for action in _train_actions(arguments.parse)
        if action.option_strings and action.dest not in _NOT_VARIED
    ]
    for name in names:
        if name not in options:
            raise UsageError(
                f"--vary {name}: train has no such option to vary{nearest(name, options)}; a parameter of the job file "
                "has a dot in its name"
            )


def _fixed_words(arguments: argparse.Namespace) -> list[str]:
    """The options of `train` that were given to the sweep, for all of its runs."""
    words = []
    for action in _train_actions(arguments.parse):
        value = getattr(arguments, action.dest, action.default)
        if not action.option_strings or action.dest in _NOT_PASSED or value == action.default:
            continue
        option = action.option_strings[0]
        if action.nargs == 0:
            words.append(option)
        else:
            words += [f"{option}={one}" for one in (value if isinstance(value, list) else [value])]
    return words


def _reader(parse: Callable[[Sequence[str]], argparse.Namespace], plan: Plan) -> Read:
    def read(words: Sequence[str]) -> tuple[Any, Sequence[str]]:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                found = parse(["train", plan.job, *words])
        except SystemExit:
            first = said.getvalue().splitlines()[:1]
            raise UsageError(first[0].partition("error: ")[2] if first else "an option is wrong") from None
        return overrides(found), found.options

    return read
