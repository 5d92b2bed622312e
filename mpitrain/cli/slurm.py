"""`mpitrain slurm`: write batch scripts, hand them in, see what became of them."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

from mpitrain.cli.common.options import command, option, switch
from mpitrain.errors import EXIT_ERROR, EXIT_OK, UsageError
from mpitrain.system.files.job_source import find_job
from mpitrain.system.number_texts import natural
from mpitrain.system.saying import hand_out, say, tell

_DESCRIPTION = """\
Batch scripts for Slurm: the templates of slurm/ with your job, nodes and limits
filled in. What is your centre's (modules, launcher, container, disks) stays in
slurm/site.sh, which every script reads."""

_RENDER_EPILOG = """\
kinds:
  single-node     the GPUs of one node
  multi-node      workers on the GPUs of several nodes, servers beside them
  hetjob          servers on a CPU partition, workers on a GPU partition
  array-sweep     one run for every line of options in a text file
  tolerant        several nodes and a spare; goes on when a node dies
  benchmark       samples per second on 1, 2, 4, ... nodes

Options of this command come before KIND, those of mpitrain train after JOB.
Without JOB the script takes it, and the options after it, from sbatch's own
command line, as the templates do.

examples:
  mpitrain slurm render --set nodes=4 multi-node jobs/digits.py > train.sbatch
  mpitrain slurm submit --set nodes=5 --set time=8:00:00 tolerant \\
      jobs/digits.py --strategy "async(servers=4)" --epochs 50
  mpitrain slurm submit --dry-run single-node jobs/digits.py     print it only
  mpitrain slurm submit --sbatch "--exclude=n3" single-node jobs/digits.py
  mpitrain slurm submit --set sweep=sweep.txt array-sweep jobs/digits.py
  mpitrain slurm render --set system=pbs multi-node jobs/digits.py > train.pbs

--set system=pbs, lsf or flux writes single-node, multi-node and benchmark
scripts for these."""

_LAUNCHERS = """\
launchers:
  openmpi, mpich, cray-mpich, intel-mpi     by srun
  mpirun, mpiexec, ibrun                    the MPI's or the site's own
  flux, pals                                Flux; HPE Cray's mpiexec under PBS

examples:
"""

_INIT_DESCRIPTION = """\
Write the templates of all batch scripts, and the site file that each of them
reads, into a folder: the folder slurm/ of mpitrain's sources. What is there
already stays as it is, and nothing is written then."""


def add_parser(commands: Any) -> None:
    """Add `slurm` and its own subcommands to the command's subparsers."""
    parser = commands.add_parser("slurm", help="write and submit batch scripts", description=_DESCRIPTION)
    actions = parser.add_subparsers(title="commands", dest="action", metavar="COMMAND", required=True)
    for name, run, text in (
        ("render", run_render, "print a batch script"),
        ("submit", run_submit, "hand a batch script to sbatch and print the job id"),
    ):
        action = command(actions, name, text, run, f"{text[0].upper()}{text[1:]}.", _RENDER_EPILOG)
        action.dashed = ("--sbatch",)
        option(action, "kind", "KIND", "see below")
        option(
            action, "program", "JOB ...", "job file and options of mpitrain train", nargs=argparse.REMAINDER
        )
        option(
            action, "--set", "NAME=VALUE",
            "nodes, gpus_per_node, time, partition, account, ...; as often as you like; a name with a dot is a "
            "parameter that the job file declares, and passed on to train",
            default=[], action="append", dest="settings",
        )  # fmt: skip
        option(
            action, "--sbatch", "OPTIONS",
            'further options of sbatch, such as "--exclude=n3 --dependency=afterok:12"; as often as you like',
            default=[], action="append",
        )  # fmt: skip
        switch(action, "--dry-run", "print the script and stop")
        switch(
            action, "--no-check",
            "do not run the job file here to see whether it can start (a login node without torch)",
        )  # fmt: skip
    _add_init(actions)
    _add_site(actions)
    status = command(
        actions,
        "status",
        "say what became of a run",
        run_status,
        "Say what became of a run, or of each run of a sweep.",
        "examples:\n  mpitrain slurm status runs/mpitrain-1",
    )
    option(status, "run_dir", "RUN_DIR", "the run's directory, or a sweep's")
    _add_may_requeue(actions)


def _add_init(actions: Any) -> None:
    init = command(
        actions,
        "init",
        "write the templates and the site file into a folder",
        run_init,
        _INIT_DESCRIPTION,
        f"{_LAUNCHERS}  mpitrain slurm init\n  mpitrain slurm init batch --launcher cray-mpich",
    )
    option(init, "folder", "DIR", "where they are to lie (default: slurm)", default="slurm", nargs="?")
    _add_way(init)


def _add_site(actions: Any) -> None:
    site = command(
        actions,
        "site",
        "print a site file for a launcher",
        run_site,
        "Print slurm/site.sh for a way to start ranks.",
        f"{_LAUNCHERS}  mpitrain slurm site --launcher cray-mpich > slurm/site.sh",
    )
    _add_way(site)


def _add_way(action: Any) -> None:
    option(action, "--launcher", "NAME", "see below (default: openmpi)", default="openmpi")
    option(action, "--image", "FILE", "an apptainer image to run mpitrain in", default="")


def _add_may_requeue(actions: Any) -> None:
    again = command(
        actions,
        "may-requeue",
        "for batch scripts: may this run be started again?",
        run_may_requeue,
        "Exit code 0 if a run that was asked to stop may be started again, else 1,\nwith the reason.",
        "examples:\n  mpitrain slurm may-requeue runs/mpitrain-1 --max-restarts 20",
    )
    option(again, "run_dir", "RUN_DIR", "the run's directory")
    option(again, "--max-restarts", "N", "how often at most (default: 20)", natural, 20)
    cause = again.add_mutually_exclusive_group()
    for name, text in (
        ("not started", "it was asked to stop before its ranks had begun"),
        ("node died", "the node of its batch script died"),
    ):
        cause.add_argument(
            f"--{name.replace(' ', '-')}",
            action="store_const",
            const=name,
            default="checkpointed",
            dest="cause",
            help=f"{text}: no checkpoint is asked for",
        )


def run_render(arguments: argparse.Namespace) -> None:
    """Print the script."""
    from mpitrain.slurm import render

    hand_out(render(_checked(arguments)))


def _checked(arguments: argparse.Namespace) -> Any:
    """The script, of whose runs none would refuse to start as far as that can be known here."""
    from mpitrain.cli.submit import check_all

    _check_order(arguments)
    if arguments.program:
        find_job(arguments.program[0])
    script = _script(arguments)
    if script.job:
        check_all(script, arguments.parse, load=not arguments.no_check)
    return script


def _check_order(arguments: argparse.Namespace) -> None:
    """KIND stands before the job, and what is said of the script before KIND.

    Raises:
        UsageError: something else does.
    """
    from mpitrain.slurm import KINDS

    words, kind = arguments.program, arguments.kind
    if kind.endswith(".py") or ".py:" in kind:
        raise UsageError(
            f"which kind of script? It comes before the job: mpitrain slurm {arguments.action} multi-node {kind}; "
            f"kinds are {', '.join(KINDS)}"
        )
    if words and words[0].startswith("--"):
        name = words[0].partition("=")[0]
        raise UsageError(
            f"{name} stands behind KIND; what is said of the script comes before it: {name} ... {kind} JOB.py"
        )


def run_init(arguments: argparse.Namespace) -> None:
    """Write the templates and the site file."""
    from mpitrain.slurm import templates
    from mpitrain.system.files.new_files import write_new

    texts = templates(arguments.folder, arguments.launcher, arguments.image)
    write_new(Path(arguments.folder), texts)
    for name in texts:
        say(Path(arguments.folder, name))
    tell(f"mpitrain: edit {Path(arguments.folder, 'site.sh')}: modules, launcher, container, disks")


def run_site(arguments: argparse.Namespace) -> None:
    """Print the site file."""
    from mpitrain.slurm import render_site

    hand_out(render_site(arguments.launcher, arguments.image))


def run_submit(arguments: argparse.Namespace) -> None:
    """Submit the script, or print it with --dry-run."""
    from mpitrain.slurm import render, submit
    from mpitrain.slurm.submit import run_directory, write_submitted

    for text in arguments.settings:
        if text.startswith("system=") and text != "system=slurm":
            raise UsageError(f"--set {text}: submit is for sbatch; render the script, and hand it in by hand")
    _check_order(arguments)
    if not arguments.program:
        if arguments.dry_run:
            return run_render(arguments)
        raise UsageError("submit which job? mpitrain slurm submit KIND JOB.py")
    script = _checked(arguments)
    if arguments.dry_run:
        hand_out(render(script))
        return
    job = submit(render(script))
    run_dir = run_directory(script, job)
    write_submitted(run_dir, job)
    tell(f"mpitrain: see how it goes: mpitrain slurm status {run_dir}")
    say(job)


def _script(arguments: argparse.Namespace) -> Any:
    from mpitrain.slurm.script import make
    from mpitrain.slurm.sweep_file import array_of, read_sweep

    settings = dict(script_setting(text) for text in arguments.settings if "." not in text.partition("=")[0])
    parameters = [f"--set={text}" for text in arguments.settings if "." in text.partition("=")[0]]
    job, options = (arguments.program or [""])[0], (*parameters, *arguments.program[1:])
    if parameters and not job:
        raise UsageError(f"{parameters[0]} is for the job file; say KIND JOB.py")
    try:
        words = tuple(word for text in arguments.sbatch for word in shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--sbatch {arguments.sbatch}: {error}") from None
    script = make(arguments.kind, **{"job": job, "options": options, "sbatch": words} | settings)
    if script.kind == "array-sweep" and job and Path(script.sweep).is_file():
        array = array_of(script.array, len(read_sweep(Path(script.sweep))))
        script = dataclasses.replace(script, array=array)
    return script


def script_setting(text: str) -> tuple[str, Any]:
    """`name=value` with the value as an int where the script's field is one."""
    name, sign, value = text.partition("=")
    if not sign or not value:
        raise UsageError(f"--set {text!r}: say NAME=VALUE, such as --set nodes=4")
    from mpitrain.slurm import Script

    types = {field.name: str(field.type) for field in dataclasses.fields(Script)}
    if types.get(name, "").startswith("int"):
        if not re.fullmatch(r"\d+", value):
            raise UsageError(f"--set {text!r}: {name} is a whole number")
        return name, int(value)
    return name, value


def run_status(arguments: argparse.Namespace) -> None:
    """Print the state of a run."""
    from mpitrain.slurm import describe

    say(describe(Path(arguments.run_dir)))


def run_may_requeue(arguments: argparse.Namespace) -> int:
    """0 or 1; prints why."""
    from mpitrain.slurm import may_requeue

    answer = may_requeue(Path(arguments.run_dir), arguments.max_restarts, arguments.cause)
    say(f"mpitrain: {'requeue' if answer.again else 'no requeue'}: {answer.reason}")
    return EXIT_OK if answer.again else EXIT_ERROR
