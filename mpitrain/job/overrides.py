"""What the command line changes of a job.

Invariants: a job is never changed in place: its fields are overridden by making another job. An option of `train` is
declared here alone: the fields of `Overrides` make the command line, TOML files, checks and the rules of a resume.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpitrain.errors import UsageError
from mpitrain.job.option import (
    CONVERTED,
    OF_JOB,
    OUTPUT,
    PRECISIONS,
    REFUSED,
    WAYS,
    above_nothing,
    at_least_one,
    check_device,
    check_limit,
    check_precision,
    declared,
    not_negative,
    option,
    spelt,
)
from mpitrain.system.number_texts import above_zero, fraction, natural, positive, rate
from mpitrain.values import parse

if TYPE_CHECKING:
    from mpitrain.inject import Injection
    from mpitrain.job.job import Job

AUTO_WHERE = (
    "--resume auto goes on with the run in --run-dir, and none is given, so every start has a new one; say --run-dir "
    "DIR, or --resume DIR to go on from the run in DIR"
)
CHECKPOINT_TIMES = 'samples ("5000"), seconds ("60s"), auto (the default) or never'


@dataclasses.dataclass(frozen=True)
class Overrides:
    """What the command line changes; None leaves the job's own value."""

    strategy: str | None = option(
        OF_JOB, 'how the ranks agree, such as "async(servers=2)"', "TEXT", resume=CONVERTED
    )
    schedule: str | None = option(OF_JOB, 'factor on the rate, such as "gradual(epochs=5)"', "TEXT")
    epochs: int | None = option(
        OF_JOB, "passes over the data", "N", reads=positive, check=at_least_one, replaces=True
    )
    batch_size: int | None = option(
        OF_JOB, "samples per worker and step", "N", reads=positive, check=at_least_one, replaces=True,
        resume=REFUSED,  # within an epoch; between two epochs it acts
    )  # fmt: skip
    lr: float | None = option(
        OF_JOB, "learning rate of every parameter group", "X", reads=rate, check=not_negative
    )
    accumulate: int | None = option(
        OF_JOB,
        "add up the gradients of K batches, without communication in between, before a step or a push",
        "K", reads=positive, check=at_least_one, replaces=True,
        resume=REFUSED,  # as batch_size, unless the two make as many samples as before
    )  # fmt: skip
    precision: str | None = option(
        OF_JOB,
        "numbers that model and loss are computed in: float32, bfloat16, or float16 with loss scaling (on an "
        "accelerator); parameters, gradients and sums stay float32",
        "P", choices=PRECISIONS, check=check_precision, replaces=True,
    )  # fmt: skip
    device: str | None = option(
        OF_JOB,
        "where workers compute: cpu, cuda or another kind that torch knows (the node's devices in turn), cuda:1 (that "
        "one for all), or auto: an accelerator where there is one",
        "DEVICE", check=check_device, replaces=True,
    )  # fmt: skip
    clip_norm: float | None = option(
        OF_JOB,
        "largest norm of the gradient: of the mean of all workers under allreduce, sync, backup and split models, "
        "of each worker's own under the others and with a codec",
        "X", reads=above_zero, check=check_limit, replaces=True,
    )  # fmt: skip
    clip_value: float | None = option(
        OF_JOB, "largest size of every number of the same gradient, after --clip-norm",
        "X", reads=above_zero, check=check_limit, replaces=True,
    )  # fmt: skip
    gradient_noise: float | None = option(
        OF_JOB,
        "standard deviation of Gaussian noise that is added to every number of the same gradient, after clipping; 0 is "
        "none",
        "X", reads=rate, replaces=True,
        check=lambda name, value: check_limit(name, None if value == 0 else value, "0 for no noise"),
    )  # fmt: skip
    seed: int | None = option(
        OF_JOB, "key of initial weights, data order and all draws", "N", reads=natural, replaces=True,
        resume=REFUSED,
    )  # fmt: skip
    init: str | None = option(
        OF_JOB,
        "start from these weights (safetensors, such as another run's model.safetensors); every name and shape "
        "must fit",
        "FILE", replaces=True,
        resume=REFUSED,  # the run has begun from others; the same ones, or none, go on
    )  # fmt: skip
    init_partial: bool = option(
        OF_JOB, "of --init load what fits, and report what does not", default=False, replaces=True,
        resume=REFUSED,
    )  # fmt: skip
    steps: int | None = option(
        OF_JOB,
        "stop after N steps of every worker, each of --batch-size samples (times --accumulate): N updates where all "
        "step together, N pushes of each worker under async(); not samples, and not batches of all workers",
        "N", reads=positive, check=at_least_one,
    )  # fmt: skip
    target: tuple[str, ...] = option(
        OF_JOB,
        'what validation must reach, as often as you like: "accuracy=0.97" (at least), "accuracy>0.97" or '
        '"validation_loss<0.3"',
        "TEXT", default=(),
    )  # fmt: skip
    fold: str | None = option(
        OF_JOB,
        "cross-validation: train on the training set without part I of K, and validate on that part",
        "I/K", resume=REFUSED,  # another part of the data
    )  # fmt: skip
    test: str | None = option(
        OF_JOB,
        "shards that nothing is chosen by: no run measures them, and mpitrain runs best and mpitrain ensemble say "
        "what that which they have chosen gives on them",
        "PATTERN",
    )  # fmt: skip
    ema: float | None = option(
        OF_JOB,
        "decay of a moving average of the weights, such as 0.999, saved as model-ema.safetensors",
        "X", reads=fraction, replaces=True,
    )  # fmt: skip
    validate_ema: bool = option(
        OF_JOB, "validations measure the moving average, too, as ema_validation_loss and so on",
        default=False, replaces=True,
    )  # fmt: skip
    validate_every: int | str | None = option(
        OF_JOB,
        'epochs (2, or "2 epochs"), samples ("10000 samples"), seconds ("60s") or never, which is only at the end '
        "(default: every epoch)",
        "WHEN", replaces=True,
    )  # fmt: skip
    keep_best: str | None = option(
        OF_JOB,
        "keep the best model by this metric as model-best.safetensors: less of a loss, error or perplexity, more "
        'of anything else; "<NAME" and ">NAME" say which',
        "METRIC", replaces=True,
    )  # fmt: skip
    patience: int | None = option(
        OF_JOB,
        "end the run in order after N validations without a better value of the --keep-best metric (default: of "
        "the validation loss)",
        "N", reads=positive, replaces=True,
    )  # fmt: skip
    inject: tuple[str, ...] = option(
        OF_JOB,
        'delay a worker, as often as you like: "slow(worker=2, factor=5)", "pause(worker=1, '
        'at_step=50, seconds=2)" or "stall(worker=0, chance=0.1, seconds=1)"; or make it fail by kill, segv, exit, '
        'raise, stop, wedge, nan, torn or flip, as in "kill(worker=2, at_step=50)"; or "disk_full(at_write=0)", '
        '"corrupt_file(at_write=0)" of checkpoints; or faults of all kinds at a rate, "poisson(mtbf_s=15)", over all '
        'starts of the run; or, simulated, "crash(mtbf_s=3600)" the whole job; the worker is its index among the '
        "workers, from 0, and at_step counts in every start of the run anew",
        "TEXT", default=(),
    )  # fmt: skip
    run_dir: str | None = option(
        OUTPUT,
        "where results go (default: runs/JOB-DATE-TIME); without --resume auto the files of an earlier run "
        "there are moved to earlier-RUN/ in it",
        "DIR",
    )
    log: tuple[str, ...] = option(
        OUTPUT,
        "also write the rows of metrics.jsonl as csv (metrics.csv), tensorboard (event files), mlflow (a store of "
        "files) or wandb (an offline run), or what MLPerf has lines for as mllog (mllog.txt), as often as you like; "
        "nothing goes over the network",
        "NAME", default=(), replaces=True,
    )  # fmt: skip
    log_every: int | None = option(
        OUTPUT,
        "a row of progress after every N steps (default: one a second on a terminal, one in 5 s in a log)",
        "N", reads=positive, check=at_least_one, replaces=True,
    )  # fmt: skip
    trace: str | None = option(
        OUTPUT,
        "steps=50:60 writes what each rank does in these of its steps, for chrome://tracing or ui.perfetto.dev "
        "(trace-rank-0.json and so on)",
        "STEPS", replaces=True,
    )  # fmt: skip
    quiet: bool | str = option(
        OUTPUT,
        "no progress lines and no tables; errors, why a run failed and the figure of merit (a line for each run) "
        "stay",
        default=False,
    )
    checkpoint_every: str | None = option(
        WAYS,
        f"{CHECKPOINT_TIMES}; SIGUSR1, SIGTERM and SIGHUP write one and end the run with exit code 75",
        "WHEN", replaces=True,
    )  # fmt: skip
    checkpoint_pause: bool = option(
        WAYS,
        "make no copy of the state for a checkpoint: training pauses while it is written, and needs no memory for it",
        default=False,
    )
    resume: str | None = option(
        WAYS,
        "auto: go on from the newest checkpoint in --run-dir, if there is one; or another run's directory. "
        "Options that are given now take effect, are converted or are refused",
        "FROM",
    )
    watchdog_s: float = option(
        WAYS,
        "end the job when a rank neither works nor waits for others for so long (it must exceed the longest "
        "step), its stacks in the run directory; 0 is never (default 900)",
        "S", default=900.0, reads=rate, check=not_negative,
    )  # fmt: skip
    go_back: bool = option(
        WAYS,
        "where replicas that must agree do not, all ranks go back to the last state in which they did, and redo the "
        "steps since; each keeps a copy of that state in host memory",
        default=False,
    )
    checksums: bool = option(
        WAYS,
        "every payload that ranks exchange travels with a checksum of its own, in messages of ours instead of the MPI "
        "library's collectives; a wrong one ends the run at the next comparison, or has all ranks go back",
        default=False,
    )
    compare_every: int | None = option(
        WAYS,
        "steps from one comparison of such replicas to the next, at most (default 100)",
        "N", reads=positive, check=at_least_one,
    )  # fmt: skip
    heartbeat_s: float | None = option(
        WAYS,
        "with servers: a worker that has been silent for so long is evicted, and never sooner, nor before 8 "
        "times its longest silence so far; under --ft heartbeat also how long a server may be silent (default: 60, and "
        "3 for a worker on whom all others wait at the end)",
        "S", reads=rate, check=above_nothing,
    )  # fmt: skip
    synthetic: bool = option(
        WAYS, "draw samples from the job's synthetic= instead of reading data", default=False,
        resume=REFUSED,  # they are data
    )  # fmt: skip

    def __post_init__(self) -> None:
        from mpitrain.inject import texts as injected
        from mpitrain.reporting.listeners import read_logs
        from mpitrain.reporting.targets import option_text

        object.__setattr__(self, "inject", injected(self.inject))
        if self.init is not None:
            object.__setattr__(self, "init", os.fspath(self.init))
        object.__setattr__(self, "log", read_logs(self.log))
        given: Any = self.target
        pairs = given.items() if isinstance(given, Mapping) else ()
        texts = [option_text(*pair) for pair in pairs] or ([given] if isinstance(given, str) else given)
        object.__setattr__(self, "target", tuple(texts))

    @property
    def injections(self) -> tuple[Injection, ...]:
        """What `inject` orders, as values."""
        from mpitrain.inject import read

        return read(self.inject)

    def check(self) -> None:
        """Refuse values that no run can have.

        Raises:
            UsageError: names the option and the value.
        """
        from mpitrain.reporting.targets import read_option
        from mpitrain.system.trace import read_steps

        for name, (one, _) in declared(Overrides).items():
            if one.check is not None:
                one.check(spelt(name), getattr(self, name))
        if self.resume == "auto" and not (self.run_dir or os.environ.get("MPITRAIN_RUN_DIR")):
            raise UsageError(AUTO_WHERE)
        _ = self.injections
        read_steps(self.trace)
        for text in self.target:
            read_option(text)


def apply_overrides(job: Job, overrides: Overrides) -> Job:
    """The job with the command line's options in place; `job.strategy` is set afterwards."""
    from mpitrain.data.datasets.folds import folded, read_fold
    from mpitrain.data.read.shards import Shards
    from mpitrain.job.job import VALIDATED
    from mpitrain.model.gradient.user_code import Checked, unwrapped
    from mpitrain.reporting.targets import read_option
    from mpitrain.strategies.allreduce import AllReduce

    overrides.check()
    changes: dict[str, Any] = {
        name: getattr(overrides, name)
        for name, (one, default) in declared(Overrides).items()
        if one.replaces and getattr(overrides, name) != default
    }
    if overrides.strategy is not None:
        changes["strategy"] = parse(overrides.strategy, "strategy")
    elif job.strategy is None:
        changes["strategy"] = AllReduce()
    if overrides.schedule is not None:
        changes |= {
            "schedule": parse(overrides.schedule, "schedule"),
            "scheduler": None,
            "scheduler_metric": None,
        }
    if overrides.synthetic:
        if job.synthetic is None:
            raise UsageError(
                "--synthetic: the job has no synthetic=mpitrain.Synthetic(...) to draw samples from"
            )
        unset = {key: None for key in VALIDATED if key not in changes}
        changes |= {"data": job.synthetic, "validate": None, "test": None, "target": {}, **unset}
        changes.setdefault("validate_ema", False)
    if overrides.fold is not None:
        part, num_folds = read_fold(overrides.fold)
        changes["data"], changes["validate"] = folded(changes.get("data", job.data), part, num_folds)
    if overrides.test is not None:
        if overrides.synthetic:
            raise UsageError("--test and --synthetic: drawn samples have no part that could be held out")
        changes["test"] = Shards(overrides.test)
    if overrides.target:
        changes["target"] = dict(read_option(text) for text in overrides.target)
    precision = changes.get("precision", job.precision)
    if job.loss is not None:
        changes["loss"] = Checked(unwrapped(job.loss), "loss", precision)
    metrics = unwrapped(job.metrics)
    if inspect.isfunction(metrics):
        changes["metrics"] = Checked(metrics, "metrics", precision)
    return dataclasses.replace(job, **changes)
