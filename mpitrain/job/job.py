"""What is to be trained: a job is one frozen value.

Invariants: a job knows nothing of ranks or MPI.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpitrain.errors import UsageError
from mpitrain.job.option import REFUSED, check_device, check_limit, check_precision
from mpitrain.options import check_value
from mpitrain.reporting.listeners import check_callbacks, read_logs
from mpitrain.reporting.targets import LOSS, Choice, check_targets, read_choice
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.checkpoint_policy import read_policy
from mpitrain.strategies.schedules import ByFunction, Schedule
from mpitrain.strategies.validation_policy import ValidationPolicy, read_validation_policy
from mpitrain.system.trace import read_steps
from mpitrain.values import nearest

if TYPE_CHECKING:
    import torch

    from mpitrain.data.read.reader import Source


EMA_PREFIX = "ema_"  # of the names of what is measured of the average of the weights
ON_NONFINITE = ("stop", "skip")
CLIPPED = ("clip_norm", "clip_value")
VALIDATED = ("validate_every", "keep_best", "patience")
SLICES = ("column", "row", "gather")
# A job's functions, what they are called with, and what they may look like.
CALLED = {
    "model": (),
    "loss": ("model", "batch"),
    "optimizer": ("parameters",),
    "metrics": ("model", "batch"),
    "predict": ("model", "batch"),
    "step": ("model", "optimizers", "batch"),
    "transform": ("batch", "random"),
    "scheduler": ("optimizer",),
    "schedule": ("epochs", "workers"),
}
EXAMPLES = {
    "model": "lambda: Net(width=8)",
    "loss": 'lambda model, batch: cross_entropy(model(batch["x"]), batch["y"])',
    "optimizer": "lambda parameters: SGD(parameters, lr=0.1)",
    "metrics": 'lambda model, batch: {"accuracy": accuracy(model(batch["x"]), batch["y"])}',
    "predict": 'lambda model, batch: model(batch["x"])',
    "step": "def step(model, optimizers, batch): ...",
    "transform": "lambda batch, random: augmented(batch, random.uniform())",
    "scheduler": "lambda optimizer: CosineAnnealingLR(optimizer, T_max=1000)",
    "schedule": "lambda epochs, workers: 0.5 ** (epochs / 10)",
}


_REFUSED = {"resume": REFUSED}  # of fields that cannot be changed when a run goes on; all others act


@dataclasses.dataclass(frozen=True)
class Job:
    """A training job.

    Args:
        model: makes the module (called on every rank under the job's seed), or the module itself.
        loss: `loss(model, batch) -> scalar tensor`, the mean over the batch. A batch is what the data give: of
            shards a dict of tensors, of a dataset what torch's `default_collate` makes of its samples (a pair also
            answers `batch["x"]` and `batch["y"]`). The mean of a step is that over its samples. Where the loss divides
            by something else (class weights, `ignore_index`), each rank's own mean would count alike whatever its batch
            weighs: return `(sum, weight)`, and the step takes the sum of all over the weight of all, exactly as one
            process with the whole batch.
        optimizer: makes the torch optimizer from the parameters. Its rate multiplies the mean gradient and is
            never scaled behind your back. A function whose argument is called `named_parameters` gets pairs of name
            and parameter, for groups by name. Several optimizers are such functions by name, each of the parameters of
            the part of the model that has this name (`{"generator": ..., "discriminator": ...}`), with a `step`.
        data: training samples: `Shards`, `Synthetic`, or a map-style dataset, an `IterableDataset` or a `DataLoader` of
            torch, whose dataset, collate_fn, worker processes, batch_size and drop_last are taken; which samples a
            worker gets is dealt by the job. validate: samples to validate on, or None.
        test: samples that no run measures and nothing is chosen by; `mpitrain runs best` and `mpitrain ensemble` say
            what that which they have chosen gives on them.
        transform: `transform(batch, random) -> batch`, on every training batch; `random` draws numbers that belong to
            the samples (`random.uniform()`, `random.each(f, batch["x"])`), whatever the number of workers.
            `mpitrain.Transformed(source, transform)` is the same for validation.
        metrics: `metrics(model, batch) -> {name: mean over the batch}`; the loss is always measured. What is reported
            is the mean over batches of at least 256 samples, by their samples: right for what is a mean over samples,
            such as accuracy, and not the whole set's value of an AUC, an F1 or a correlation. For those:
            `mpitrain.Collected(function)`, a torchmetrics object, a dict of those by name, or a list of all these.
        predict: `predict(model, batch) -> tensor`, or tensors by name, with a row for each sample: what `mpitrain
            predict` writes; None: what the model returns for `x`, or for the only value.
        step: with several optimizers: `step(model, optimizers, batch)` computes what is to be minimized, calls
            `backward()` and `optimizers[name].step()`, which steps with the mean gradient of all workers, and
            `zero_grad()`; it returns the loss to report, or losses by name. Under `allreduce()`, and with steps of each
            worker's own under `localsgd()` and servers with `optimizer="worker"`. `loss` is then what validation
            measures, and may be None without one.
        epochs: passes over the data; batch_size: samples per worker and step; that of the `DataLoader`, else 32.
        strategy: how workers agree; `AllReduce()` if None.
        schedule: factor on the learning rate by progress in samples, such as `Gradual(epochs=5)`, or a function of
            (epochs so far, number of workers) that returns it; None is constant.
        scheduler: `scheduler(optimizer)` makes a torch scheduler, which is stepped once for every full batch of all
            workers that is accepted (and for an epoch's incomplete last one): as often as all step together under
            `allreduce()`, whatever the strategy. `mpitrain.PerEpoch(scheduler)` is stepped once an epoch. One that goes
            by a metric (`ReduceLROnPlateau`) is stepped after every validation instead, with the validation loss.
        scheduler_metric: the metric of the validation that such a scheduler goes by, in place of the loss; whether less
            or more of it is better the scheduler itself says (`mode="max"`).
        target: metrics that validation must reach: a number is at least that, `"<X"` is below and `">X"` above X, as in
            `{"accuracy": 0.97, "validation_loss": "<0.3"}`; missing one is `status=missed` and exit code 3.
        validate_every: when to validate: epochs (2, or "2 epochs"), accepted samples ("10000 samples"), seconds ("60s")
            or "never"; None is after every epoch. The final model is validated in any case.
        keep_best: a metric of the validation; the model that was best by it so far is kept as
            `model-best.safetensors`. Less of a loss, error or perplexity is better, more of anything else; "<distance"
            and ">score" say which.
        patience: end the run in order, with a checkpoint, after so many validations without a better value of
            `keep_best`'s metric (of the validation loss, if there is none); None is never.
        seed: key of initialisation, order and every other draw.
        on_nonfinite: "stop" at the first NaN or infinite gradient, or "skip" such batches and count them; over
            parameter servers a worker with ten such pushes in a row is then done without.
        clip_norm, clip_value: clip the gradient before every step, to a Euclidean norm over all parameters as torch's
            `clip_grad_norm_`, and then every number of it into [-clip_value, clip_value]; None is off. Under
            `allreduce()`, `sync()`, `backup()` and split models this is the mean gradient of all workers; under all
            other strategies, and with a codec or 16 bits on the wire, it is each worker's own, before that is coded.
        gradient_noise: standard deviation of Gaussian noise that is added to every number of the gradient, after it has
            been clipped (Neelakantan et al. 2015, "Adding gradient noise improves learning for very deep networks",
            arXiv:1511.06807, with a deviation that stays the same); None is none. It is added to the gradient that
            `clip_norm` acts on, and under `allreduce(codec=...)` to the mean that is stepped with.
        accumulate: batches whose gradients a worker adds up, without communication in between, before a step or a push:
            the gradient is the mean over all their samples (or by the loss's own weights), as of one batch of
            `accumulate * batch_size` samples, and the memory that of one of `batch_size`.
        precision: "bfloat16": model, loss and metrics are computed under torch's autocast; parameters, gradients, sums,
            servers and the saved model stay float32. "float16" is for accelerators only: the loss is scaled, and a step
            whose gradients overflow is computed again with half the scale.
        device: where workers compute: "cpu"; a kind of accelerator that torch knows, such as "cuda" (ROCm's, too) or
            "xpu", for the one that a worker's number on its node falls on, which "auto" takes where there is one; or
            one device for all of a node, "cuda:1". A simulation computes on the host.
        activation_checkpointing: True: the layers that lie in the model's containers keep their inputs only, and
            compute the rest again in the backward pass; or names or patterns (`"blocks.*"`) of the layers that do. The
            trained model is the same to the bit.
        sync_batchnorm: BatchNorm layers take their statistics from the batches of all workers, as of one process with
            all of them, under `allreduce()` and `sharded()`.
        compile: True: torch compiles the model in place at its first call; a text names the backend ("inductor").
        ema: decay of an exponential moving average of the weights, such as 0.999, which follows every update and is
            saved as `model-ema.safetensors`; None is none. Servers average what they hold, workers of `localsgd` after
            every averaging, and of peers the first one its own parameters.
        validate_ema: validations measure the average as well, as `ema_validation_loss` and so on; the best model by
            such a metric is the average.
        drop_last: leave an incomplete last batch of an epoch out, unless an epoch has no complete one.
        checkpoint_every: accepted samples ("5000"), seconds ("60s"), "auto" (from the measured cost of one and
            `mtbf_s`, the mean time between failures in seconds: Young 1974, Daly 2006) or "never"; a run that is asked
            to end (SIGUSR1, SIGTERM, SIGHUP) writes one in any case. keep_checkpoints: how many complete ones stay.
        synthetic: samples for `--synthetic`, which needs no files.
        stages: how `pipeline(stages=K)` splits the model by layers: names of submodules which, called one after
            the other, are the model, cut into K runs of about equally many parameters; or
            `stages(model, K) -> K modules` made of the model's own layers. None: as the layers of an
            `nn.Sequential`. The loss may call the model only, and once.
        tensor_plan: which layers `tensor(parallel=K)` slices: name or pattern (`"layers.*.up"`) to "column"
            (outputs are sliced and stay so), "row" (inputs are sliced, outputs whole) or "gather" (as column,
            outputs put together again).
        sparse_as_dense: layers of `nn.Embedding(sparse=True)` and its kin are trained as if they had no `sparse=True`:
            with whole gradients, under any strategy.
        find_unused_parameters: under `allreduce()`: True where the loss leaves out some parameters in some steps, which
            costs a walk through its graph at every step; None looks at the first step and goes on as if it were True
            where that leaves some out.
        init: a safetensors file (such as another run's `model.safetensors`) whose parameters and buffers every rank
            starts from under every strategy; None: the model as `model` makes it. All names and shapes must fit.
        init_partial: load what fits by name and shape, and report what does not.
        log: "csv" (`metrics.csv`), "tensorboard" (event files in `tensorboard/`), "mlflow" (a store of files in
            `mlflow/`), "wandb" (an offline run in `wandb/`), "mllog" (MLPerf's lines in `mllog.txt`) or several of
            them: the rows of `metrics.jsonl` once more.
        log_every: a row of progress after every so many steps; None: one a second on a terminal, one in 5 s in a log.
        trace: "steps=50:60" writes what each rank does in these of its steps into the run directory
            (`trace-rank-0.json` and so on), for chrome://tracing or ui.perfetto.dev.
        callbacks: objects with any of the methods `on_step(row)`, `on_validation(row)` and `on_checkpoint(row)`, which
            rank 0 calls with the rows of `metrics.jsonl`.
        options: parameters to record with the run. Those that a job file declares with `mpitrain.Options` are entered
            when it is read, and it gives no others.
        name: for the run directory; the job file's name if None.
    """

    # A resume refuses other names or shapes of parameters; what the model computes with them acts.
    model: Callable[[], Any] | torch.nn.Module = dataclasses.field(metadata=_REFUSED)
    loss: Callable[[Any, Any], torch.Tensor | tuple[torch.Tensor, Any]] | Any  # or None
    optimizer: (
        Callable[[Iterable[Any]], torch.optim.Optimizer]
        | Mapping[str, Callable[[Iterable[Any]], torch.optim.Optimizer]]
    )
    # Other samples; the same samples in another place act.
    data: Source = dataclasses.field(metadata=_REFUSED)
    validate: Source | None = None
    metrics: Any = None
    predict: Callable[[Any, Any], Any] | None = None
    step: Callable[[Any, Mapping[str, Any], Any], Any] | None = None
    transform: Callable[[Any, Any], Any] | None = None
    epochs: int = 1
    batch_size: int = None  # type: ignore[assignment]  # a number from __post_init__ on
    strategy: Strategy | None = None
    schedule: Schedule | Callable[[float, int], float] | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    scheduler_metric: str | None = None
    target: Mapping[str, float | str] = dataclasses.field(default_factory=dict)
    validate_every: int | str | None = None
    keep_best: str | None = None
    patience: int | None = None
    seed: int = 0
    on_nonfinite: str = "stop"
    clip_norm: float | None = None
    clip_value: float | None = None
    gradient_noise: float | None = None
    accumulate: int = 1
    precision: str = "float32"
    device: str = "auto"
    activation_checkpointing: bool | Sequence[str] = False
    sync_batchnorm: bool = False
    compile: bool | str = False
    ema: float | None = None
    validate_ema: bool = False
    drop_last: bool = False
    checkpoint_every: str = "auto"
    keep_checkpoints: int = 2
    mtbf_s: float = 86400.0
    synthetic: Source | None = None
    stages: Callable[[Any, int], Sequence[Any]] | Sequence[str] | None = dataclasses.field(
        default=None, metadata=_REFUSED
    )
    tensor_plan: Mapping[str, str] = dataclasses.field(default_factory=dict, metadata=_REFUSED)
    # Over servers, which hold tables apart from the other parameters; elsewhere it acts.
    sparse_as_dense: bool = dataclasses.field(default=False, metadata=_REFUSED)
    find_unused_parameters: bool | None = None
    init: str | os.PathLike[str] | None = None
    init_partial: bool = False
    log: str | Sequence[str] | None = None
    log_every: int | None = None
    trace: str | None = None
    callbacks: Sequence[Any] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str | None = None
    test: Source | None = None

    def __post_init__(self) -> None:
        _check_function("transform", self.transform, CALLED["transform"])
        self._adopt_data()
        for key in ("epochs", "batch_size", "accumulate", "keep_checkpoints", "log_every", "patience"):
            value = getattr(self, key)
            if key in ("log_every", "patience") and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"Job: {key} must be a whole number of at least 1, got {value!r}")
        for key in CLIPPED:
            check_limit(f"Job: {key}", getattr(self, key), "None for no clipping")
        noise = self.gradient_noise
        check_limit("Job: gradient_noise", None if noise == 0 else noise, "0 or None for no noise")
        for key, arguments in CALLED.items():
            if key in ("schedule", "metrics"):  # which may be values
                continue
            value = getattr(self, key)
            if key == "loss" and value is None and self.step is not None and self.validate is None:
                continue
            named = key == "optimizer" and isinstance(value, Mapping)
            for function in value.values() if named else (value,):
                _check_function(key, function, arguments)
        self._check_step()
        self._check_metrics()
        if self.on_nonfinite not in ON_NONFINITE:
            raise UsageError(
                "Job: "
                f"on_nonfinite={self.on_nonfinite!r}{nearest(str(self.on_nonfinite), list(ON_NONFINITE))}"
            )
        check_precision("Job: precision", self.precision)
        check_device("Job: device", self.device)
        if self.strategy is not None and not isinstance(self.strategy, Strategy):
            raise UsageError(
                f"Job: strategy must be a value such as mpitrain.Async(servers=1), got {self.strategy!r}; a text is "
                "for --strategy"
            )
        self._check_schedule()
        read_policy(self.checkpoint_every, self.mtbf_s)
        check_targets(self.target, self._known_metrics)
        if self.target and self.validate is None:
            raise UsageError(f"Job: target {dict(self.target)} needs validate= data to be measured on")
        self._check_validation()
        if self.ema is not None and not (type(self.ema) in (int, float) and 0 <= self.ema < 1):
            raise UsageError(
                f"Job: ema must be a decay of at least 0 and below 1, such as 0.999, got {self.ema!r}"
            )
        read_logs(self.log)
        read_steps(self.trace)
        check_callbacks(self.callbacks)
        for name, value in self.options.items():
            check_value(name, value)
        self._check_init()
        self._check_splits()

    def _adopt_data(self) -> None:
        """Make sources of the data that were given; a `DataLoader` has its say on batches."""
        from mpitrain.data.datasets.loaders import adopt

        adopted = adopt("data", self.data, self.transform)
        object.__setattr__(self, "data", adopted.source)
        for key in ("validate", "test", "synthetic"):
            if (value := getattr(self, key)) is not None:
                object.__setattr__(self, key, adopt(key, value).source)
        size = adopted.batch_size
        if None not in (size, self.batch_size) and size != self.batch_size:
            raise UsageError(
                f"Job: batch_size={self.batch_size}, and the DataLoader of data has batch_size={size}; give one of them"
            )
        object.__setattr__(self, "batch_size", (size or 32) if self.batch_size is None else self.batch_size)
        object.__setattr__(self, "drop_last", self.drop_last or adopted.drop_last)

    @property
    def run_strategy(self) -> Strategy:
        """The strategy of a run, which has one: `apply_overrides` finds it."""
        assert self.strategy is not None
        return self.strategy

    @property
    def step_samples(self) -> int:
        """Samples per worker and step: of all batches whose gradients it adds up."""
        return self.batch_size * self.accumulate

    @property
    def part_samples(self) -> int:
        """Samples that a worker computes at once, where a step is more than that; 0: all of a step."""
        return self.batch_size if self.accumulate > 1 else 0

    @property
    def has_several_optimizers(self) -> bool:
        """Whether `step` steps them by name."""
        return isinstance(self.optimizer, Mapping)

    def _check_step(self) -> None:
        if self.has_several_optimizers != (self.step is not None):
            raise UsageError(
                "Job: several optimizers and a step function go together: optimizer={'generator': ..., "
                "'discriminator': ...}, step=function; with one optimizer, loss is all that is needed"
            )
        if self.step is None:
            return
        for name in self.optimizer if isinstance(self.optimizer, Mapping) else ():
            if not isinstance(name, str) or not name:
                raise UsageError(
                    f"Job: an optimizer's name must be that of a part of the model, got {name!r}"
                )
        if not self.optimizer:
            raise UsageError("Job: optimizer names no optimizer")
        if self.precision == "float16":
            raise UsageError(
                "Job: precision='float16' scales the loss, which a step function takes backward itself: use 'bfloat16'"
            )
        if self.find_unused_parameters is not None:
            raise UsageError(
                "Job: find_unused_parameters: a step function may leave out parameters as it likes; leave it out"
            )

    def _check_schedule(self) -> None:
        schedule = self.schedule
        if schedule is not None and not isinstance(schedule, Schedule):
            if not callable(schedule):
                raise UsageError(
                    "Job: schedule must be a value such as mpitrain.Gradual(epochs=5), or a function of (epochs, "
                    f"workers), got {schedule!r}"
                )
            _check_function("schedule", schedule, CALLED["schedule"])
            object.__setattr__(self, "schedule", ByFunction(schedule))
        if schedule is not None and self.scheduler is not None:
            raise UsageError("Job: schedule and scheduler both set the learning rates; give one of them")
        metric = self.scheduler_metric
        if metric is None:
            return
        if self.scheduler is None:
            raise UsageError(
                f"Job: scheduler_metric={metric!r} is what a scheduler goes by; give scheduler, too"
            )
        if read_choice(metric, self._known_metrics, "scheduler_metric").metric != metric:
            raise UsageError(
                f"Job: scheduler_metric={metric!r}: name the metric alone; the scheduler says whether less or more of "
                'it is better, as in ReduceLROnPlateau(optimizer, mode="max")'
            )

    def _check_metrics(self) -> None:
        if self.metrics is None or inspect.isfunction(self.metrics):  # the usual one needs no torch
            _check_function("metrics", self.metrics, CALLED["metrics"])
            return
        from mpitrain.model.metrics import check_metrics

        check_metrics(self.metrics, lambda one: _check_function("metrics", one, CALLED["metrics"]))

    @property
    def _known_metrics(self) -> tuple[str, ...] | None:
        """What validation reports; None where that is known when it has been."""
        if self.metrics is not None:
            return None
        return (LOSS, EMA_PREFIX + LOSS) if self.validate_ema else (LOSS,)

    def _check_validation(self) -> None:
        read_validation_policy(self.validate_every)
        if self.keep_best is not None:
            read_choice(self.keep_best, self._known_metrics)
        for key in VALIDATED:
            if getattr(self, key) is not None and self.validate is None:
                raise UsageError(f"Job: {key}={getattr(self, key)!r} needs validate= data to be measured on")
        if self.validate_ema and (self.ema is None or self.validate is None):
            raise UsageError(
                "Job: validate_ema=True measures the average that ema= keeps, on validate= data; give both"
            )

    @property
    def goes_by(self) -> str:
        """The metric that a scheduler may go by; empty where nothing is measured before the end."""
        validates = (
            self.validate is not None and read_validation_policy(self.validate_every) != ValidationPolicy()
        )
        return (self.scheduler_metric or LOSS) if validates else ""

    @property
    def best_by(self) -> Choice | None:
        """What validations are compared by; None where nothing depends on it."""
        if self.keep_best is None:
            return None if self.patience is None else read_choice(LOSS)
        return read_choice(self.keep_best)

    def _check_init(self) -> None:
        if not (self.init is None or (isinstance(self.init, str | os.PathLike) and os.fspath(self.init))):
            raise UsageError(f"Job: init must be the path of a safetensors file, got {self.init!r}")
        if self.init_partial and self.init is None:
            raise UsageError(
                "Job: init_partial (--init-partial) says how the weights of init (--init) are loaded; give init, too"
            )

    def _check_splits(self) -> None:
        stages = self.stages
        named = isinstance(stages, list | tuple) and stages and all(isinstance(name, str) for name in stages)
        if not (stages is None or callable(stages) or named):
            raise UsageError(
                f"Job: stages must be names of submodules or stages(model, count) -> modules, got {stages!r}"
            )
        if not isinstance(self.tensor_plan, Mapping):
            raise UsageError(
                'Job: tensor_plan must be a dict such as {"layers.*.up": "column"}, got '
                + repr(self.tensor_plan)
            )
        for name in ("sync_batchnorm", "sparse_as_dense"):
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(f"Job: {name} must be True or False, got {value!r}")
        if not isinstance(self.compile, bool | str) or self.compile == "":
            raise UsageError(
                f"Job: compile must be True, False or the name of a backend, got {self.compile!r}"
            )
        layers = self.activation_checkpointing
        named = isinstance(layers, list | tuple) and all(isinstance(name, str) for name in layers)
        if not (isinstance(layers, bool) or named):
            raise UsageError(
                'Job: activation_checkpointing must be True, False or names of layers such as ["blocks.*"], got '
                + repr(layers)
            )
        for pattern, way in self.tensor_plan.items():
            if way not in SLICES:
                raise UsageError(f"Job: tensor_plan {pattern!r}: {way!r}{nearest(str(way), list(SLICES))}")


def _check_function(key: str, function: Any, arguments: tuple[str, ...]) -> None:
    """Refuse what cannot be called as a job's function of this name is."""
    if key == "model" and hasattr(function, "named_parameters") and not isinstance(function, type):
        return  # the module itself
    if key in ("metrics", "predict", "scheduler", "step", "transform") and function is None:
        return
    example = EXAMPLES[key]
    if not callable(function):
        made = "an optimizer that is made already" if hasattr(function, "param_groups") else f"{function!r}"
        raise UsageError(f"Job: {key} must be a function, such as `{example}`, got {made}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C nobody knows
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        call = f"called with ({', '.join(arguments)})" if arguments else "called without arguments"
        name = getattr(function, "__name__", type(function).__name__)
        raise UsageError(
            f"Job: {key} is {call}, which {name}{signature} does not allow ({error}); it is a function such as "
            f"`{example}`"
        ) from None
