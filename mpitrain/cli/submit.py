"""What `mpitrain slurm submit` and `render` look at before anything is queued: options, strategies, the job file, every
line of a sweep.

Invariants: what would end the job on its nodes, and can be known without its data and nodes, is refused here.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.system.saying import tell
from mpitrain.system.sizes import counted, size_text

_SHAPE = "the script's are its own: --set nodes=N --set gpus_per_node=G, before KIND"
_NOT_IN_A_SCRIPT = {
    "dry_run": "it would be run on the nodes; before KIND it prints the script, and `mpitrain train JOB --dry-run` the "
    "placement",
    **dict.fromkeys(("ranks", "nodes", "gpus_per_node", "server_nodes", "hosts", "write_hosts"), _SHAPE),
    "threads": "the script starts ranks, one a GPU; leave it out",
    "run_dir": "the script names it by the job; export RUN_DIR=DIR (a sweep: RUN_ROOT=DIR) before you submit",
    "resume": "the script says --resume auto; export RUN_DIR=DIR to go on with the run there, or start from its "
    "weights with --init",
}
_RESHAPES = re.compile(r"-[NGn]|--(nodes|ntasks|gpus|gres)")


def check_options(script: Any, words: Sequence[str], parse: Callable[[list[str]], argparse.Namespace]) -> Any:
    """The parsed options of `train`, none of which the script itself gives.

    Raises:
        UsageError: one makes no sense in a script. SystemExit: it is no option.
    """
    arguments = parse(["train", script.job, *words])
    refused = dict(_NOT_IN_A_SCRIPT)
    for text in arguments.options:
        if (name := text.partition("=")[0]) in {field.name for field in dataclasses.fields(script)}:
            raise UsageError(
                f"--set {text} after JOB is for a parameter of the job file; the script's own comes before KIND: --set "
                f"{text} {script.kind} {script.job}, and {name} is one of the script's"
            )
    if script.kind == "benchmark":
        refused["steps"] = "export STEPS=N before you submit"
    for name, way_out in refused.items():
        value = getattr(arguments, name)
        if value and not (name == "resume" and value == "auto"):
            raise UsageError(
                f"--{name.replace('_', '-')} after JOB makes no sense in a batch script: {way_out}"
            )
    return arguments


def check_all(script: Any, parse: Callable[[list[str]], argparse.Namespace], load: bool = True) -> None:
    """Every run that the script would start.

    Args:
        load: run the job file, too, and look at the strategy with the script's nodes; that takes torch.
    Raises:
        UsageError: one of them would refuse to start; it names the sweep's line. SystemExit: it has a wrong option.
    """
    from mpitrain.slurm.sweep_file import SweepLine, read_sweep

    lines = read_sweep(Path(script.sweep)) if script.kind == "array-sweep" else [SweepLine(0, ())]
    loaded = functools.cache(_load)
    for line in lines:
        where = f"{script.sweep}, line {line.number}: " if line.number else ""
        try:
            arguments = check_options(script, [*script.options, *line.words], parse)
            if load:
                _check_job(script, arguments, loaded)
        except UsageError as error:
            raise UsageError(f"{where}{error}") from error
        except SystemExit:
            if where:
                tell(f"mpitrain: error: {where}see above; nothing was submitted")
            raise


def _load(path: str, settings: tuple[str, ...]) -> Any:
    if find_spec("torch") is None:
        raise UsageError("the job cannot be looked at without torch: --no-check submits it as it is")
    from mpitrain.training.job_file import load_job

    return load_job(path, settings)


def _check_job(script: Any, arguments: argparse.Namespace, load: Callable[..., Any]) -> None:
    job = load(script.job, tuple(arguments.options))
    from mpitrain.cli.train import overrides
    from mpitrain.job import apply_overrides
    from mpitrain.planning.dry_run import Machine, check_roles

    again = None if script.kind == "benchmark" else "auto"
    chosen = dataclasses.replace(overrides(arguments), run_dir="runs", resume=again)
    job = apply_overrides(job, chosen)
    if any(map(_RESHAPES.match, script.sbatch)) or any(name.startswith("SBATCH_GPUS") for name in os.environ):
        return  # with how many workers is not known here
    serving = script.server_nodes if script.kind == "hetjob" else 0
    machine = Machine(_num_nodes(script) + serving, _workers_per_node(script), serving)
    nodes = machine.nodes(job.run_strategy)
    roles = check_roles(job, chosen, nodes, serving)
    asked = asked_memory(script.sbatch, os.environ)
    if asked and not script.gpus_per_node:  # of ranks on GPUs what they hold lies there
        from mpitrain.planning.node_memory import MARGIN, node_bytes_of, proposed

        if (found := node_bytes_of(job, chosen.lr, nodes, roles)) is not None:
            tell_less(asked, *found, proposed(found[0]), MARGIN)


def asked_memory(words: Sequence[str], environ: Mapping[str, str]) -> tuple[str, float] | None:
    """("mem" or "mem-per-cpu", bytes) that the script is to ask for in place of all that its nodes have (--mem=0, which
    the templates ask for); None where that stands. What sbatch's variables say counts before the script's lines."""
    found, rest = None, list(words)
    while rest:
        name, _, value = rest.pop(0).partition("=")
        if name in ("--mem", "--mem-per-cpu"):
            found = name[2:], value or (rest.pop(0) if rest else "")
    for name, variable in (("mem", "SBATCH_MEM_PER_NODE"), ("mem-per-cpu", "SBATCH_MEM_PER_CPU")):
        if variable in environ:
            found = name, environ[variable]
    if found is None or not (size := re.fullmatch(r"(\d+)([KMGT]?)B?", found[1], re.IGNORECASE)):
        return None
    num_bytes = float(size[1]) * 1024 ** (" KMGT".index(size[2].upper() or "M"))
    return (found[0], num_bytes) if num_bytes else None


def tell_less(asked: tuple[str, float], needed: float, num_ranks: int, proposal: str, margin: float) -> None:
    """Warn where the ranks of a node need more than the script asks for."""
    (name, given), ranks = asked, counted(num_ranks, "rank")
    with_margin = needed * (1 + margin)
    least = (
        f"the {ranks} of a node need about {size_text(needed)}; with {100 * margin:.0f} % more: {proposal}"
    )
    if name == "mem" and given < with_margin:
        tell(f"mpitrain: warning: --mem asks for {size_text(given)} a node, and {least}")
    elif name == "mem-per-cpu":
        cpus = math.ceil(with_margin / given)
        tell(
            f"mpitrain: --mem-per-cpu is enough where a node gives the job {counted(cpus, 'CPU')} or more: {least}"
        )


def _num_nodes(script: Any) -> int:
    """The fewest nodes that a run of it has."""
    from mpitrain.slurm import KINDS

    if script.kind == "benchmark":
        return 1
    nodes: int = script.nodes or KINDS[script.kind].nodes
    spare = _number("SPARE_NODES", 1) if script.kind == "tolerant" else 0
    if nodes <= spare:
        raise UsageError(
            f"nodes={nodes}, {spare} of them spare: a tolerant script needs more; set nodes, or export SPARE_NODES"
        )
    return nodes - spare


def _workers_per_node(script: Any) -> int:
    return _number("WORKERS_PER_NODE", script.gpus_per_node or 1)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if re.fullmatch(r"\d{1,6}", text) else default
