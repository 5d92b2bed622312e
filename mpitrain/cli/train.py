"""`mpitrain train`: every rank runs this; options become `Overrides`, the rest is `mpitrain.training`."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING, Any

from mpitrain.cli.common.options import command, option, switch
from mpitrain.job.option import OF_JOB, OUTPUT, WAYS, add_option, declared, given
from mpitrain.job.overrides import Overrides
from mpitrain.system.launched.launch_variables import launched_nodes, launched_rank, launched_size
from mpitrain.system.number_texts import natural, positive

if TYPE_CHECKING:
    from mpitrain.strategies.registry import Row

_DESCRIPTION = """\
Train a job. Run it under mpirun, srun or `mpitrain launch`; every rank gets the
same command line. Options replace what the job file says."""

_EXAMPLES = """\
examples:
  mpitrain launch -n 4 train jobs/digits.py
  mpirun -n 5 mpitrain train jobs/digits.py --strategy "async(servers=2)"
  mpitrain train jobs/digits.py --strategy "async()" --dry-run --ranks 64
  mpitrain launch -n 4 train jobs/digits.py --synthetic --steps 200

The run directory gets metrics.jsonl, env.json, result.json and the model
(model.safetensors); the last line on stdout is the figure of merit."""

# Where each kind of value stands.
_HEADINGS = {
    "strategy": 'strategies, as in --strategy "ssp(bound=3)"',
    "damping": "dampings, for damping= of a server strategy",
    "codec": "codecs, for codec= of allreduce and decentralized, push_wire= and reply_wire= of a server strategy",
    "warmup": "warm-up, for warmup= of a server strategy and of decentralized",
    "batching": "batch sizes, for batching= of a server strategy",
    "outer": "outer optimizers, for outer= of localsgd",
    "schedule": 'learning-rate schedules, as in --schedule "gradual(epochs=5)"',
}


def _epilog() -> str:
    """All that strategy and schedule texts can hold, from the table in `strategies/registry.py`, and examples."""
    from mpitrain.strategies.registry import rows

    table, lines = rows(), []
    kinds = dict.fromkeys([*_HEADINGS, *(row.kind for row in table)])
    for kind in kinds:
        lines += [
            *_wrapped(f"{_HEADINGS.get(kind, kind)}:", ""),
            *_listed([row for row in table if row.kind == kind]),
            "",
        ]
    return "\n".join(lines) + "\n" + _EXAMPLES


def _listed(table: list[Row]) -> list[str]:
    """Each value with its arguments and what it does; arguments that several share follow in one place."""
    lines: list[str] = []
    shared: dict[str, list[str]] = {}
    for row in table:
        lines += [*_wrapped(row.signature, "  "), *_wrapped(row.summary, "      ")]
        if row.inherited:
            shared.setdefault(row.inherited, []).append(row.name)
    for arguments, names in shared.items():
        lines += _wrapped(f"{', '.join(names)} also take{'s' * (len(names) == 1)} {arguments}", "  ")
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    """`text` on lines of 80 columns, the first indented so; a heading and a signature go on two columns deeper."""
    return textwrap.wrap(
        text,
        80,
        initial_indent=indent,
        subsequent_indent=indent if len(indent) == 6 else indent + "  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def add_parser(commands: Any) -> None:
    """Add `train` to the command's subparsers."""
    parser = command(commands, "train", "train a job (on every rank)", run_train, _DESCRIPTION, _epilog)
    add_job_options(parser)
    run = parser.add_argument_group(WAYS)
    option(
        run, "--threads", "N",
        "train N replicas as threads of this process, without MPI; servers get threads of their own on top",
        positive,
    )  # fmt: skip
    switch(
        run, "--dry-run",
        "print roles, placement, shards per worker and message sizes, and stop; needs no MPI",
    )  # fmt: skip
    option(run, "--ranks", "N", "ranks of the dry run (default: the launch's, or 4)", positive)
    option(run, "--nodes", "M", "nodes of the dry run (default: the job's, or 1)", positive)
    add_options(run, *_under(WAYS))
    _add_machine_options(run)


def _add_machine_options(run: Any) -> None:
    """The nodes that a dry run plans for, where their shape decides how many ranks there are."""
    option(
        run, "--gpus-per-node", "G",
        "workers on each node of the dry run; servers come on top, where the strategy places them",
        natural,
    )  # fmt: skip
    option(
        run, "--server-nodes", "K",
        "the first K nodes of the dry run are a heterogeneous job's component for servers",
        natural, 0,
    )  # fmt: skip
    option(run, "--hosts", "NAMES", 'the nodes of the dry run by name, such as "n1 n2", instead of --nodes')
    option(run, "--write-hosts", "FILE", "also write each rank's node, a line a rank (needs --hosts)")


def add_job_options(
    parser: argparse.ArgumentParser, job_is_optional: bool = False, several_strategies: bool = False
) -> None:
    """The options `train` and `simulate` share: what a job's fields can be replaced with."""
    add_job(parser, nargs="?" if job_is_optional else None)
    job = parser.add_argument_group(OF_JOB)
    if several_strategies:
        several: Any = {"action": "append", "default": [], "dest": "strategies"}
        text = f"{declared(Overrides)['strategy'][0].help}; as often as you like"
        job.add_argument("--strategy", metavar="TEXT", help=text, **several)
    add_options(job, *(name for name in _under(OF_JOB) if name != "strategy" or not several_strategies))
    _add_parameter_options(job)
    add_options(parser.add_argument_group(OUTPUT), *_under(OUTPUT))


def add_job(parser: Any, **more: Any) -> None:
    """The job that a command is given."""
    option(
        parser, "job", "JOB",
        "job file: Python that ends in `job = mpitrain.Job(...)`; FILE:NAME another name in it; or a module, "
        "pkg.jobs or pkg.jobs:name",
        **more,
    )  # fmt: skip


def add_options(group: Any, *names: str) -> None:
    """Add these options of a run."""
    options = declared(Overrides)
    for name in names:
        add_option(group, name, options[name])


def _under(heading: str) -> list[str]:
    return [name for name, (one, _) in declared(Overrides).items() if one.group == heading]


def _add_parameter_options(job: Any) -> None:
    option(
        job, "--set", "NAME=VALUE",
        "a parameter that the job file declares with mpitrain.Options, such as model.hidden=256, as often as you "
        "like",
        default=[], action="append", dest="options",
    )  # fmt: skip
    option(
        job, "--config", "FILE",
        'TOML with any of these options ("epochs = 30"), and a table for each group of declared parameters '
        '("[model]"); the command line replaces what it says',
    )  # fmt: skip


def overrides(arguments: argparse.Namespace) -> Overrides:
    """What these options change of the job."""
    return Overrides(**given(arguments, Overrides))


def run_train(arguments: argparse.Namespace) -> int:
    """Train, or print the plan of a dry run."""
    if not arguments.dry_run:
        for name in ("ranks", "nodes", "gpus_per_node", "server_nodes", "hosts", "write_hosts"):
            if getattr(arguments, name):
                option = "--" + name.replace("_", "-")
                arguments.parser.error(
                    f"{option} describes a --dry-run; a run has the ranks and nodes it is launched with"
                )
        from mpitrain.training import signals, train_command

        signals.install_early()
        return train_command(
            arguments.job, overrides(arguments), settings=arguments.options, threads=arguments.threads
        )
    if arguments.threads:
        arguments.parser.error("--dry-run shows the plan of a run over MPI: leave --threads out")
    if launched_rank() != 0:
        return 0
    from mpitrain.planning.dry_run import dry_run_command

    chosen = overrides(arguments)
    if arguments.gpus_per_node is not None:
        return dry_run_command(
            arguments.job,
            chosen,
            0,
            0,
            _machine(arguments),
            arguments.write_hosts,
            settings=arguments.options,
        )
    if arguments.hosts or arguments.write_hosts or arguments.server_nodes:
        arguments.parser.error("--hosts, --write-hosts and --server-nodes need --gpus-per-node")
    num_ranks = arguments.ranks or launched_size() or 4
    num_nodes = arguments.nodes or launched_nodes() or 1
    if num_nodes > num_ranks:
        arguments.parser.error(
            f"--nodes {num_nodes}: {num_ranks} rank(s) cannot be on more than {num_ranks} node(s)"
        )
    return dry_run_command(arguments.job, chosen, num_ranks, num_nodes, settings=arguments.options)


def _machine(arguments: argparse.Namespace) -> Any:
    """The `mpitrain.planning.dry_run.Machine` that --nodes or --hosts, --gpus-per-node and --server-nodes describe."""
    from mpitrain.planning.dry_run import Machine

    hosts = tuple((arguments.hosts or "").split())
    if arguments.ranks:
        arguments.parser.error("--ranks follows from --gpus-per-node and the strategy; leave one of them out")
    if hosts and arguments.nodes not in (None, len(hosts)):
        arguments.parser.error(
            f"--nodes {arguments.nodes} and {len(hosts)} names in --hosts; leave one of them out"
        )
    if arguments.write_hosts and not hosts:
        arguments.parser.error("--write-hosts needs the nodes' names: --hosts")
    num_nodes = len(hosts) or arguments.nodes or launched_nodes() or 1
    return Machine(num_nodes, arguments.gpus_per_node, arguments.server_nodes, hosts)
