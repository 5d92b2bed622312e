"""A batch script as a value, and its text: a pure function.

Invariants: the same `Script` gives the same text on every machine, and the defaults give the templates in
`slurm/`, to the byte.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import dataclass
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.slurm import het_parts, script_parts
from mpitrain.slurm.limits import LEAST_LEAD_S, LEAST_MINUTES, LEAST_TRAIN_S, LIMIT, lead, seconds_of
from mpitrain.values import nearest

_NO_WORD = r"""[\s"'`#$\\]"""  # what sbatch would not take for a part of a directive's word

_BASE = (
    script_parts.NODES,
    LIMIT,
    script_parts.SIGNALS,
    script_parts.EACH,
    script_parts.CHECK_NODES,
    script_parts.PLACE,
    script_parts.LAUNCH,
)


@dataclass(frozen=True)
class _Kind:
    """What one kind of script is for, and what it is made of after START and the arguments."""

    purpose: str
    example: str
    nodes: int
    body: tuple[str, ...]
    arguments: str = "JOB.py [options of mpitrain train]"
    requeue: bool = True


_TRAIN = (
    script_parts.RUN_DIR,
    *_BASE,
    script_parts.ALL_FIT,
    script_parts.STAGE,
    script_parts.FINISH,
    script_parts.SIMPLE_BODY + script_parts.DEAF + script_parts.TRAIN,
)
KINDS: dict[str, _Kind] = {
    "single-node": _Kind("Train on the GPUs of one node.", "jobs/digits.py", 1, _TRAIN),
    "multi-node": _Kind(
        "Train on several nodes: workers on the GPUs, servers on the cores beside them.",
        "jobs/digits.py --strategy 'async(servers=2)'",
        2,
        _TRAIN,
    ),
    "hetjob": _Kind(
        "Train with the servers on nodes of a CPU partition and the workers on GPU nodes.",
        "jobs/digits.py --strategy 'async(servers=1)'",
        2,
        (
            script_parts.RUN_DIR,
            het_parts.NODES,
            LIMIT,
            script_parts.SIGNALS,
            het_parts.EACH,
            script_parts.CHECK_NODES,
            script_parts.ALL_FIT,
            script_parts.STAGE,
            script_parts.FINISH,
            script_parts.DEAF,
            het_parts.OUTLIVED,
            het_parts.BODY,
        ),
    ),
    "array-sweep": _Kind(
        "Train once for every line of options in a text file, one array index a line.",
        "sweep.txt jobs/digits.py",
        1,
        (script_parts.SWEEP_OPTIONS, *_TRAIN),
        "SWEEP.txt JOB.py [options for all lines]",
    ),
    "tolerant": _Kind(
        "Train on several nodes and a spare one: when a node dies, go on with the healthy ones.",
        "jobs/digits.py --strategy 'async(servers=2)'",
        3,
        (
            script_parts.RUN_DIR,
            *_BASE,
            script_parts.STAGE,
            script_parts.FINISH,
            script_parts.ANSWERING,
            script_parts.GUARD,
            script_parts.DEAF,
            script_parts.TOLERANT_BODY,
        ),
    ),
    "benchmark": _Kind(
        "Measure samples per second on 1, 2, 4, ... and all nodes of the allocation.",
        "jobs/digits.py --strategy 'allreduce()'",
        4,
        (script_parts.RUN_DIR, *_BASE, script_parts.ALL_FIT, script_parts.BENCHMARK_BODY),
        requeue=False,
    ),
}

# What other commands submit; the templates of slurm/ are those above.
_OF_COMMANDS = {
    "sweep": _Kind(
        "Train the configurations of a sweep that are left, several at a time on each node.",
        "runs/first 4",
        1,
        (
            script_parts.SWEEP_JOB,
            script_parts.RUN_DIR,
            *(part for part in _BASE if part != script_parts.PLACE),
            script_parts.ALL_FIT,
            script_parts.STAGE,
            script_parts.FINISH,
            script_parts.SWEEP_BODY + script_parts.DEAF + script_parts.SWEEP_RUN,
        ),
        "RUN_DIR RANKS_PER_NODE",
    ),
}


SYSTEMS = ("slurm", "pbs", "lsf", "flux")


@dataclass(frozen=True)
class Script:
    """Everything a batch script depends on; what is `None` is left to Slurm, `site.sh` or the command line.

    Attributes:
        kind: one of `KINDS`, or "sweep", whose job is the sweep's directory.
        job: the job file; empty: the script takes it as its first argument.
        options: further arguments of `mpitrain train`, or of the sweep.
        nodes: nodes of the allocation (of the workers' component in a `hetjob`).
        gpus_per_node: GPUs asked for on each of them; 0 asks for none.
        time: limit, as sbatch reads it ("4:00:00"). `signal_s` seconds before it the ranks are asked to checkpoint, or
            for its last fifth, where that is less (`lead_s`).
        server_nodes, server_partition: the servers' component of a `hetjob`.
        sweep: the options' file of an `array-sweep`; `array` its indices ("0-7%4").
        switches: most leaf switches, and how long to wait for them ("1@10:00").
        sbatch: further words for sbatch ("--exclude=n3", "--dependency=afterok:12"), for both components of a `hetjob`.
        system: one of `SYSTEMS` (`batch_systems.py` renders those that are not Slurm).
    """

    kind: str = "multi-node"
    job: str = ""
    options: tuple[str, ...] = ()
    name: str = "mpitrain"
    nodes: int | None = None
    gpus_per_node: int = 4
    time: str = "04:00:00"
    signal_s: int = 300
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    switches: str | None = None
    server_nodes: int = 1
    server_partition: str = "cpu"
    sweep: str = ""
    array: str | None = None
    sbatch: tuple[str, ...] = ()
    system: str = "slurm"

    def __post_init__(self) -> None:
        if self.kind not in KINDS | _OF_COMMANDS:
            raise UsageError(f"no kind of script {self.kind!r}{nearest(self.kind, list(KINDS))}")
        if self.system not in SYSTEMS:
            raise UsageError(f"no batch system {self.system!r}{nearest(self.system, list(SYSTEMS))}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            words = value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()
            if not all(word.isprintable() for word in words):
                raise UsageError(f"{field.name}={value!r}: without line ends, tabs and the like")
            if isinstance(value, str) and field.name not in ("job", "sweep") and re.search(_NO_WORD, value):
                raise UsageError(
                    f"{field.name}={value!r}: one word, without blanks, quotes, #, $ and backslashes"
                )
        _check_sbatch(self.sbatch)
        if self.kind == "hetjob" and "hetjob" in self.name:
            raise UsageError(
                'name: sbatch takes a directive with "hetjob" in it for the border between components'
            )
        if self.job and self.kind == "array-sweep" and not self.sweep:
            raise UsageError("an array-sweep needs sweep=, the file with one line of options per index")
        for name, least in (("nodes", 1), ("gpus_per_node", 0), ("signal_s", 1), ("server_nodes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name}={value}: at least {least}")
        limit_s = seconds_of(self.time)
        if (KINDS | _OF_COMMANDS)[self.kind].requeue and limit_s and limit_s - self.lead_s < LEAST_TRAIN_S:
            raise UsageError(
                f"time={self.time!r}: nothing can be trained within {limit_s} s, of which the last {self.lead_s} s are "
                f"for the checkpoint; at least {LEAST_MINUTES} minutes"
            )

    @property
    def lead_s(self) -> int:
        """How long before the limit the ranks are asked to checkpoint."""
        return lead(seconds_of(self.time), self.signal_s)


def _check_sbatch(words: tuple[str, ...]) -> None:
    for index, word in enumerate(words):
        if not word or re.search(_NO_WORD.replace(r"\s", ""), word) or "hetjob" in word:
            raise UsageError(f"sbatch option {word!r}: without quotes, #, $, backslashes and the word hetjob")
        if index == 0 and not word.startswith("-") or re.match("--(wrap|parsable|help|version)", word):
            raise UsageError(
                f"sbatch option {word!r}: an option that goes with a script, such as --exclude=n3"
            )


def make(kind: str, **options: Any) -> Script:
    """A `Script` from names; an unknown name is answered with the valid ones.

    Raises:
        UsageError: unknown kind or name, or a value that makes no sense.
    """
    known = [field.name for field in dataclasses.fields(Script) if field.name != "kind"]
    for name in options:
        if name not in known:
            raise UsageError(f"a Slurm script has no option {name!r}{nearest(name, known)}")
    return Script(kind, **options)


def render(script: Script) -> str:
    """The batch script's whole text."""
    kind = (KINDS | _OF_COMMANDS)[script.kind]
    parts = [
        _header(script, kind),
        _directives(script, kind),
        script_parts.START,
        _arguments(script, kind),
        *kind.body,
    ]
    text = "\n".join(part.rstrip("\n") + "\n" for part in parts)
    known = {
        "@signal_s@": script.lead_s,
        "@least_lead_s@": LEAST_LEAD_S,
        "@least_s@": LEAST_TRAIN_S,
        "@least_minutes@": LEAST_MINUTES,
    }
    for name, value in known.items():
        text = text.replace(name, str(value))
    return text


def _header(script: Script, kind: _Kind) -> str:
    lines = ["#!/bin/bash", f"# {kind.purpose}", "#"]
    if not script.job:
        array = "--array=0-3 " if script.kind == "array-sweep" else ""
        lines += [
            f"#   sbatch {array}slurm/{script.kind}.sbatch {kind.example}",
            "#",
            "# Your site's ways are in slurm/site.sh; options of sbatch before the script's name replace those below.",
        ]
    lines.append("# Written by `mpitrain slurm render`, which also fills in job, nodes and limits.")
    return "\n".join(lines) + "\n"


def _directives(script: Script, kind: _Kind) -> str:
    is_array = script.kind == "array-sweep" or script.array
    output = "%x-%A_%a.out" if is_array else "%x-%j.out"
    lines = [f"--job-name={script.name} --time={script.time}", f"--output={output} --open-mode=append"]
    if kind.requeue:
        lines.append(f"--signal=B:USR1@{script.lead_s} --requeue")
    if script.array:
        lines.append(f"--array={script.array}")
    for name in ("account", "qos"):
        if value := getattr(script, name):
            lines.append(f"--{name}={value}")
    shape = [f"--nodes={script.nodes or kind.nodes} --exclusive --mem=0"]
    if script.gpus_per_node:
        shape[0] += f" --gpus-per-node={script.gpus_per_node}"
    for name in ("partition", "constraint", "switches"):
        if value := getattr(script, name):
            shape.append(f"--{name}={value}")
    if script.kind == "tolerant":
        shape.append("--no-kill")
    further = [" ".join(f'"{word}"' if " " in word else word for word in script.sbatch)] * bool(script.sbatch)
    shape += further
    if script.kind == "hetjob":
        partition = script.partition or "gpu"
        shape = [line for line in shape if not line.startswith("--partition")]
        shape[0] = f"--partition={partition} {shape[0]}"
        lines += [
            f"--partition={script.server_partition} --nodes={script.server_nodes} --exclusive --mem=0",
            *further,
            "hetjob",
        ]
    text = "".join(f"#SBATCH {line}\n" for line in [*lines, *shape])
    return text if script.switches else text + "##SBATCH --switches=1@10:00\n"


def _arguments(script: Script, kind: _Kind) -> str:
    if script.job:
        words = [*([script.sweep] if script.sweep else []), script.job, *script.options]
        return f"set -- {shlex.join(words)}\n"
    return f""": "${{1:?usage: sbatch slurm/{script.kind}.sbatch {kind.arguments}}}"\n"""
