"""`mpitrain train`: every rank runs this; options become `Overrides`, the rest is `mpitrain.training`."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING, Any

from mpitrain.cli.parser import above_zero, fraction, natural, positive, rate
from mpitrain.system.launch_variables import launched_nodes, launched_rank, launched_size

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
CHECKPOINT_TIMES = 'samples ("5000"), seconds ("60s"), auto (the default) or never'
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
    parser = commands.add_parser(
        "train", help="train a job (on every rank)", description=_DESCRIPTION, epilog=_epilog
    )
    add_job_options(parser)
    run = parser.add_argument_group("ways to run")
    run.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="train N replicas as threads of this process, without MPI; servers get threads of their own on top",
    )
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="print roles, placement, shards per worker and message sizes, and stop; needs no MPI",
    )
    run.add_argument(
        "--ranks", type=positive, metavar="N", help="ranks of the dry run (default: the launch's, or 4)"
    )
    run.add_argument(
        "--nodes", type=positive, metavar="M", help="nodes of the dry run (default: the job's, or 1)"
    )
    run.add_argument(
        "--checkpoint-every",
        metavar="WHEN",
        help=f"{CHECKPOINT_TIMES}; SIGUSR1, SIGTERM and SIGHUP write one and end the run with exit code 75",
    )
    run.add_argument(
        "--resume",
        metavar="FROM",
        help="auto: go on from the newest checkpoint in --run-dir, if there is one; or another run's directory. "
        "Options that are given now take effect, are converted or are refused",
    )
    run.add_argument(
        "--watchdog-s",
        type=rate,
        default=900.0,
        metavar="S",
        help="end the job when a rank neither works nor waits for others for so long (it must exceed the longest "
        "step), its stacks in the run directory; 0 is never (default 900)",
    )
    run.add_argument(
        "--heartbeat-s",
        type=rate,
        metavar="S",
        help="with servers: a worker that has been silent for so long is evicted, and never sooner, nor before 8 "
        "times its longest silence so far; under --ft heartbeat also how long a server may be silent (default: 60, and "
        "3 for a worker on whom all others wait at the end)",
    )
    run.add_argument(
        "--synthetic",
        action="store_true",
        help="draw samples from the job's synthetic= instead of reading data",
    )
    _add_machine_options(run)
    parser.set_defaults(run=run_train)


def _add_machine_options(run: Any) -> None:
    """The nodes that a dry run plans for, where their shape decides how many ranks there are."""
    run.add_argument(
        "--gpus-per-node",
        type=natural,
        metavar="G",
        help="workers on each node of the dry run; servers come on top, where the strategy places them",
    )
    run.add_argument(
        "--server-nodes",
        type=natural,
        default=0,
        metavar="K",
        help="the first K nodes of the dry run are a heterogeneous job's component for servers",
    )
    run.add_argument(
        "--hosts",
        metavar="NAMES",
        help='the nodes of the dry run by name, such as "n1 n2", instead of --nodes',
    )
    run.add_argument(
        "--write-hosts", metavar="FILE", help="also write each rank's node, a line a rank (needs --hosts)"
    )


def add_job_options(
    parser: argparse.ArgumentParser, job_is_optional: bool = False, several_strategies: bool = False
) -> None:
    """The options `train` and `simulate` share: what a job's fields can be replaced with."""
    parser.add_argument(
        "job",
        metavar="JOB",
        nargs="?" if job_is_optional else None,
        help="job file: Python that ends in `job = mpitrain.Job(...)`",
    )
    job = parser.add_argument_group("in place of the job's own")
    help_text = 'how the ranks agree, such as "async(servers=2)"'
    if several_strategies:
        several: Any = {"action": "append", "default": [], "dest": "strategies"}
        job.add_argument("--strategy", metavar="TEXT", help=f"{help_text}; as often as you like", **several)
    else:
        job.add_argument("--strategy", metavar="TEXT", help=help_text)
    job.add_argument("--schedule", metavar="TEXT", help='factor on the rate, such as "gradual(epochs=5)"')
    job.add_argument("--epochs", type=positive, metavar="N", help="passes over the data")
    job.add_argument("--batch-size", type=positive, metavar="N", help="samples per worker and step")
    job.add_argument("--lr", type=rate, metavar="X", help="learning rate of every parameter group")
    _add_step_options(job)
    job.add_argument(
        "--seed", type=natural, metavar="N", help="key of initial weights, data order and all draws"
    )
    job.add_argument(
        "--init",
        metavar="FILE",
        help="start from these weights (safetensors, such as another run's model.safetensors); every name and shape "
        "must fit",
    )
    job.add_argument(
        "--init-partial", action="store_true", help="of --init load what fits, and report what does not"
    )
    text = "stop after N batches for every worker: N updates where they step together, N for each of them in async()"
    job.add_argument("--steps", type=positive, metavar="N", help=text)
    job.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="TEXT",
        help='what validation must reach, as often as you like: "accuracy=0.97" (at least), "accuracy>0.97" or '
        '"validation_loss<0.3"',
    )
    _add_validation_options(job)
    job.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="TEXT",
        help='delay a worker, as often as you like: "slow(worker=2, factor=5)", "pause(worker=1, '
        'at_step=50, seconds=2)" or "stall(worker=0, chance=0.1, seconds=1)"; or make it fail by kill, segv, exit, '
        'raise, stop, wedge, nan or torn, as in "kill(worker=2, at_step=50)"; or "disk_full(at_write=0)", '
        '"corrupt_file(at_write=0)" of checkpoints; or, simulated, "crash(mtbf_s=3600)" the whole job; the worker is '
        "its index among the workers, from 0, and at_step counts in every start of the run anew",
    )
    _add_parameter_options(job)
    _add_output_options(parser.add_argument_group("output"))


def _add_output_options(out: Any) -> None:
    """Where results go, and in which forms."""
    out.add_argument(
        "--run-dir",
        metavar="DIR",
        help="where results go (default: runs/JOB-DATE-TIME); without --resume auto the files of an earlier run "
        "there are moved to earlier-RUN/ in it",
    )
    out.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="NAME",
        help="also write the rows of metrics.jsonl as csv (metrics.csv), tensorboard (event files), mlflow (a store of "
        "files) or wandb (an offline run), or what MLPerf has lines for as mllog (mllog.txt), as often as you like; "
        "nothing goes over the network",
    )
    out.add_argument(
        "--log-every",
        type=positive,
        metavar="N",
        help="a row of progress after every N steps (default: one a second on a terminal, one in 5 s in a log)",
    )
    out.add_argument(
        "--trace",
        metavar="STEPS",
        help="steps=50:60 writes what each rank does in these of its steps, for chrome://tracing or ui.perfetto.dev "
        "(trace-rank-0.json and so on)",
    )
    out.add_argument(
        "--quiet",
        action="store_true",
        help="no progress lines and no tables; errors, why a run failed and the figure of merit (a line for each run) "
        "stay",
    )


def _add_parameter_options(job: Any) -> None:
    job.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="options",
        help="a parameter that the job file declares with mpitrain.Options, such as model.hidden=256, as often as you "
        "like",
    )
    job.add_argument(
        "--config",
        metavar="FILE",
        help='TOML with any of these options ("epochs = 30"), and a table for each group of declared parameters '
        '("[model]"); the command line replaces what it says',
    )


def _add_validation_options(job: Any) -> None:
    job.add_argument(
        "--fold",
        metavar="I/K",
        help="cross-validation: train on the training set without part I of K, and validate on that part",
    )
    job.add_argument(
        "--test",
        metavar="PATTERN",
        help="shards that nothing is chosen by: no run measures them, and mpitrain runs best and mpitrain ensemble say "
        "what that which they have chosen gives on them",
    )
    job.add_argument(
        "--ema",
        type=fraction,
        metavar="X",
        help="decay of a moving average of the weights, such as 0.999, saved as model-ema.safetensors",
    )
    job.add_argument(
        "--validate-ema",
        action="store_true",
        help="validations measure the moving average, too, as ema_validation_loss and so on",
    )
    job.add_argument(
        "--validate-every",
        metavar="WHEN",
        help='epochs ("2 epochs"), samples ("10000 samples"), seconds ("60s") or never, which is only at the end '
        "(default: every epoch)",
    )
    job.add_argument(
        "--keep-best",
        metavar="METRIC",
        help="keep the best model by this metric as model-best.safetensors: less of a loss, error or perplexity, more "
        'of anything else; "<NAME" and ">NAME" say which',
    )
    job.add_argument(
        "--patience",
        type=positive,
        metavar="N",
        help="end the run in order after N validations without a better value of the --keep-best metric (default: of "
        "the validation loss)",
    )


def _add_step_options(job: Any) -> None:
    job.add_argument(
        "--accumulate",
        type=positive,
        metavar="K",
        help="add up the gradients of K batches, without communication in between, before a step or a push",
    )
    job.add_argument(
        "--precision",
        choices=("float32", "bfloat16", "float16"),
        metavar="P",
        help="numbers that model and loss are computed in: float32, bfloat16, or float16 with loss scaling (on CUDA); "
        "parameters, gradients and sums stay float32",
    )
    job.add_argument(
        "--clip-norm",
        type=above_zero,
        metavar="X",
        help="largest norm of the gradient: of the mean of all workers under allreduce, sync, backup and split models, "
        "of each worker's own under the others and with a codec",
    )
    job.add_argument(
        "--clip-value",
        type=above_zero,
        metavar="X",
        help="largest size of every number of the same gradient, after --clip-norm",
    )


def overrides(arguments: argparse.Namespace) -> Any:
    """The `mpitrain.job.Overrides` these options make."""
    from mpitrain.job import Overrides

    return Overrides(
        strategy=getattr(arguments, "strategy", None),
        schedule=arguments.schedule,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        accumulate=arguments.accumulate,
        precision=arguments.precision,
        lr=arguments.lr,
        clip_norm=arguments.clip_norm,
        clip_value=arguments.clip_value,
        seed=arguments.seed,
        run_dir=arguments.run_dir,
        synthetic=getattr(arguments, "synthetic", False),
        steps=arguments.steps,
        target=tuple(arguments.target),
        validate_every=arguments.validate_every,
        keep_best=arguments.keep_best,
        patience=arguments.patience,
        ema=arguments.ema,
        validate_ema=arguments.validate_ema,
        quiet=arguments.quiet,
        inject=tuple(arguments.inject),
        checkpoint_every=getattr(arguments, "checkpoint_every", None),
        resume=getattr(arguments, "resume", None),
        watchdog_s=getattr(arguments, "watchdog_s", 900.0),
        heartbeat_s=getattr(arguments, "heartbeat_s", None),
        init=arguments.init,
        init_partial=arguments.init_partial,
        log=tuple(arguments.log),
        log_every=arguments.log_every,
        trace=arguments.trace,
        fold=arguments.fold,
        test=arguments.test,
    )


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
