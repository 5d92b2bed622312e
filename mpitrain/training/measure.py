"""What all kinds of run share: building the model, saving it, and measuring throughput.

Invariants: a trained model is always saved, as safetensors, as a whole and durably. Throughput
leaves out the first steps, in which buffers are allocated and connections made.
"""

from __future__ import annotations

import inspect
import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpitrain.checkpoint.tensor_file import Described, body, describe, header, order_of
from mpitrain.devices import accelerator
from mpitrain.devices.moving import move
from mpitrain.embedding.tables import served_layers
from mpitrain.errors import MpitrainError, UsageError
from mpitrain.job import Job
from mpitrain.model.building.activation_checkpointing import checkpoint_activations
from mpitrain.model.building.compiler_import import without_compiler
from mpitrain.model.building.compiling import compile_in_place
from mpitrain.model.building.deferred import Deferred
from mpitrain.model.gradient.precision import check_float32
from mpitrain.model.gradient.sparse_gradients import (
    check_served_layers,
    check_sparse_layers,
    check_sparse_optimizer,
    sparse_layers,
)
from mpitrain.model.gradient.sync_batchnorm import sync_batchnorm
from mpitrain.model.gradient.user_code import check_made_optimizer, check_module, named_part
from mpitrain.model.optimizers.optimizer import check_closure, set_learning_rate
from mpitrain.model.optimizers.several_optimizers import SeveralOptimizers
from mpitrain.reporting.report import writing
from mpitrain.strategies.features import MPI, why_not
from mpitrain.system.files.atomic import durably_replaced
from mpitrain.system.files.folders import make_private
from mpitrain.system.launched.launch_variables import node_name
from mpitrain.system.tracebacks import place_of, users_frames

if TYPE_CHECKING:
    from mpitrain.reporting.report import NullReport, Report
    from mpitrain.system.launched.ranks import Ranks

MODEL_FILE = "model.safetensors"
# What Python and torch say of parameters that are taken for pairs, and of a function that is taken for a model.
_WANTS_NAMES = re.compile(
    r"values to unpack|cannot unpack|update sequence element|unbind|iteration over a 0-d tensor|"
    r"has no attribute '(named_)?(parameters|modules|children)'"
)


def device_for(job: Job, local_rank: int) -> torch.device:
    """The device that the job asks for; a kind, such as "cuda", means that on which this rank's number on its
    node falls.

    Raises:
        UsageError: this process sees no such device.
    """
    kind = accelerator.kind() if job.device != "cpu" else None
    device = torch.device((kind or "cpu") if job.device == "auto" else job.device)
    if not accelerator.computes(device):
        return device
    num_devices = accelerator.num_devices() if kind == device.type else 0
    if num_devices <= (device.index or 0):
        there = f"{accelerator.num_devices()} of {kind!r}" if kind else "none"
        hidden = accelerator.visible_variable(device.type) or "what hides devices of this kind"
        raise UsageError(
            f"device={job.device!r} (--device), and of accelerators this process on {node_name()} sees {there}; use "
            f"another device, or look at {hidden} and at what this torch was built for"
        )
    return accelerator.of_rank(device.type, local_rank) if device.index is None else device


def pick_device(job: Job, local_rank: int) -> torch.device:
    """As `device_for`, which then is this thread's own; raises as it does."""
    device = device_for(job, local_rank)
    accelerator.make_current(device)
    return device


def compute_thread(device: torch.device) -> Executor:
    """A thread to compute on while the main thread drives MPI; the current GPU is a thread's own."""
    return ThreadPoolExecutor(1, "mpitrain-compute", initializer=accelerator.make_current, initargs=(device,))


_STEPPED = "the gradients of a step function (step=) travel whole to servers"


def build(job: Job, lr: float | None, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The job's module and optimizer, made under the job's seed so that every rank gets the same."""
    module = build_module(job, device)
    return module, build_optimizer(job, module, lr)


def build_module(job: Job, device: torch.device, deferred: Deferred | None = None) -> nn.Module:
    """The job's module, as `build` makes it. With `deferred`, its large tensors are still to be made."""
    torch.manual_seed(job.seed)
    if isinstance(job.model, nn.Module):
        module = check_module(job.model)
    else:
        module = check_module(job.model() if deferred is None else deferred.build(job.model))
    for layer in sparse_layers(module).values() if job.sparse_as_dense else ():
        layer.sparse = False
    on_host = "" if device.type == "cpu" else "sparse gradients are exchanged in host memory only"
    if sparse_layers(module) and not torch.sparse.check_sparse_tensor_invariants.is_enabled():
        torch.sparse.check_sparse_tensor_invariants.disable()  # its default, and said so torch does not warn of it
    strategy = job.strategy
    if strategy is not None and strategy.has_servers:
        on_host = ""
    check_tables_of(job, module)
    stepped = "" if job.step is None or strategy is None or not strategy.has_servers else _STEPPED
    check_sparse_layers(module, (why_not("sparse", strategy, MPI) if strategy else "") or stepped or on_host)
    check_served_layers(module, (why_not("served", strategy, MPI) if strategy else "") or stepped)
    for name in job.optimizer if isinstance(job.optimizer, Mapping) else ():
        named_part(module, name)
    check_float32(module, job.precision)
    if job.sync_batchnorm:
        sync_batchnorm(module)
    checkpoint_activations(module, job.activation_checkpointing, compiled=bool(job.compile))
    if deferred is None:
        module = move(module, device)
    else:
        deferred.move(module, device)
    for called in (
        map(module.get_submodule, job.optimizer) if isinstance(job.optimizer, Mapping) else (module,)
    ):
        compile_in_place(called, job.compile)
    return module


def check_tables_of(job: Job, module: nn.Module) -> None:
    """Refuse settings of a job that look at a whole model, where servers hold tables of it.

    Raises:
        UsageError: names one.
    """
    tables = [*sparse_layers(module), *served_layers(module)]
    why = why_not("a copy of tables", job.strategy, MPI) if tables and job.strategy else ""
    for option in ("ema", "keep_best") if why else ():
        if (value := getattr(job, option)) is not None:
            raise UsageError(
                f"Job: {option}={value!r} keeps a copy of the whole model, and rows of {tables[0]!r} {why}: leave it "
                "out, or leave sparse=True out and use nn.Embedding"
            )


def takes_names(make: Any) -> bool:
    """Whether a job's `optimizer` asks for pairs of name and parameter."""
    try:
        return next(iter(inspect.signature(make).parameters), "") == "named_parameters"
    except (TypeError, ValueError):  # of a function in C nobody knows
        return False


@contextmanager
def _telling_of_names() -> Iterator[None]:
    """Calls a job's `optimizer` with parameters. An error of one that takes them for pairs with their names, or asks
    the function that makes the model for these, says how it is handed them.

    Raises:
        UsageError: that one.
    """
    try:
        yield
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        frames = users_frames(error)
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, MpitrainError) or not frames or not _WANTS_NAMES.search(said):
            raise
        line, where = place_of(*frames[-1])
        raise UsageError(
            f"Job: optimizer: {said} (`{line}`, {where}): it is handed the parameters; one whose argument is called "
            "named_parameters, `def optimizer(named_parameters): ...`, is handed pairs of name and parameter"
        ) from None


def build_optimizer(job: Job, module: nn.Module, lr: float | None) -> torch.optim.Optimizer:
    """A new optimizer of the job for `module`, with `lr` as its rate unless that is None. Several are one, made of
    them."""
    optimizer: torch.optim.Optimizer
    if isinstance(job.optimizer, Mapping):
        parts = {name: named_part(module, name) for name in job.optimizer}
        optimizer = SeveralOptimizers(
            {name: _make_optimizer(make, parts[name], job.strategy) for name, make in job.optimizer.items()}
        )
    else:
        optimizer = _make_optimizer(job.optimizer, module, job.strategy)
    for group in optimizer.param_groups:
        group.pop(
            "param_names", None
        )  # torch's own record of them, which would have to follow every cut of a group
    if lr is not None:
        set_learning_rate(optimizer, lr)
    return optimizer


def _make_optimizer(make: Callable[..., Any], module: nn.Module, strategy: Any) -> torch.optim.Optimizer:
    named = takes_names(make)
    with without_compiler(), nullcontext() if named else _telling_of_names():
        optimizer = check_made_optimizer(make(module.named_parameters() if named else module.parameters()))
    check_sparse_optimizer(module, optimizer)
    check_closure(optimizer, str(strategy or "a job"))
    return optimizer


def share_module(runtime: Ranks, module: nn.Module) -> None:
    """Collective: all ranks take over rank 0's parameters and buffers."""
    runtime.broadcast_tensors([*module.parameters(), *module.buffers()])


def save_model(module: nn.Module, path: Path, metadata: dict[str, str]) -> None:
    """Write the module's `state_dict()`, as `save_tensors` does."""
    save_tensors(module.state_dict(), path, metadata)


def save_tensors(state: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write tensors by name as safetensors; the file survives a power cut, or what was there stays.

    Every name is stored with a copy of its own (tied weights twice), so
    `module.load_state_dict(load_file(path))` reads it back anywhere.
    """
    save_one_by_one(describe(state), state.__getitem__, path, metadata)


def save_one_by_one(
    described: Mapping[str, Described],
    tensor: Callable[[str], torch.Tensor],
    path: Path,
    metadata: dict[str, str],
) -> None:
    """As `save_tensors`, of tensors that are asked for one after another, in the order of `order_of`."""
    with writing(path):
        make_private(path.parent)  # the run's, which somebody may have removed
    with writing(path), durably_replaced(path) as temporary, open(temporary, "wb") as file:
        file.write(header(described, metadata))
        for name in order_of(described):
            file.write(body(tensor(name)))


def read_nothing_ahead(epoch: int, start: int, count: int) -> None:
    """Stands for a prefetch where nothing is read ahead."""


def same_model(one: Path, other: Path) -> bool:
    """Whether two saved models hold the same names and the same bits."""
    from safetensors.torch import load_file

    first, second = load_file(one), load_file(other)
    return first.keys() == second.keys() and all(_same_bits(first[name], second[name]) for name in first)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compared as bytes: a run that has diverged holds NaN, which is equal to nothing."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


class Meter:
    """Forwards progress to the report and measures samples per second from the end of the warm-up to the last step,
    without pauses.

    Args:
        report: where progress goes.
        num_warmup: calls of `progress` that belong to the warm-up.
        samples, step: that were accepted, and taken, before this start (a run that was resumed).
    """

    def __init__(self, report: Report | NullReport, num_warmup: int, samples: int = 0, step: int = 0):
        self.report, self.num_warmup, self.start_samples = report, num_warmup, samples
        self.first_samples = self.last_samples = samples
        self.num_calls, self.step = 0, step
        self.first_s = self.last_s = self.begin_s = time.monotonic()
        self.paused_s = self._paused_since_s = 0.0  # up to the last step, and since
        self.windows = Windows(self.begin_s, samples)
        report.begin(samples)
        self.metrics: dict[str, Any] = {}

    def progress(self, samples: int, step: int, epoch: int, loss: float, **fields: object) -> None:
        """One step was taken; `samples` in all."""
        now_s = time.monotonic()
        self.num_calls += 1
        self._train_until(now_s)
        if self.num_calls <= self.num_warmup:
            self.first_s, self.first_samples, self.paused_s = now_s, samples, 0.0
            self.windows = Windows(now_s, samples)
        else:
            self.windows.mark(now_s - self.paused_s, samples)
        self.last_samples, self.step = samples, step
        self.report.progress(samples, step, epoch, loss, **fields)

    def go_on_from(self, samples: int, step: int) -> None:
        """So many samples were accepted, and steps taken, before this start."""
        self.start_samples = self.first_samples = self.last_samples = samples
        self.step = step
        self.windows = Windows(self.begin_s, samples)

    def event(self, name: str, **fields: object) -> None:
        """Something to put on record."""
        self.report.event(name, **fields)

    def pause(self, seconds: float) -> None:
        """So much time since the last step went into something that is not training."""
        self._paused_since_s += seconds
        self.report.pause("validation", seconds)

    def until_now(self) -> None:
        """Training has gone on until now, though this rank has no step to report: it waited for the others' last."""
        self._train_until(time.monotonic())

    def _train_until(self, now_s: float) -> None:
        self.last_s = now_s
        self.paused_s, self._paused_since_s = self.paused_s + self._paused_since_s, 0.0

    def validation(self, measure: Callable[[], dict[str, float]], epoch: int, samples: int) -> None:
        """Measure and report after `epoch` epochs and `samples` samples; the time it takes is a pause."""
        began_s = time.monotonic()
        self.event("validation", epoch=epoch, samples=samples, **measure())
        self.pause(time.monotonic() - began_s)

    def result(self) -> dict[str, Any]:
        """`samples_per_second` and what it was taken from."""
        spent_s = self.last_s - self.first_s - self.paused_s
        samples = self.last_samples - self.first_samples
        if samples <= 0 or spent_s <= 0:  # nothing but warm-up: take it all
            spent_s = max(1e-9, self.last_s - self.begin_s)
            samples = self.last_samples - self.start_samples
        return {
            "samples_per_second": samples / spent_s,
            "samples": self.last_samples,
            "steps": self.step,
            "warmup_steps": min(self.num_warmup, self.num_calls),
            "spread": self.windows.spread(),
            "leg_samples": self.last_samples - self.start_samples,
            "train_s": self.last_s - self.begin_s,
        }


class Windows:
    """Samples per second in windows of equal numbers of steps, of which there are 10 to 20 in the end.

    Args:
        now_s: when the first begins; samples: that were accepted by then.
    """

    MOST = 20

    def __init__(self, now_s: float, samples: int):
        self._marks = [(now_s, samples)]
        self._steps = self._stride = 0

    def mark(self, now_s: float, samples: int) -> None:
        """A step was taken."""
        self._stride = self._stride or 1
        self._steps += 1
        if self._steps % self._stride:
            return
        self._marks.append((now_s, samples))
        if len(self._marks) > self.MOST:
            self._marks, self._stride = self._marks[::2], 2 * self._stride

    def spread(self) -> float | None:
        """Standard deviation of the windows' samples per second over their mean; None of fewer than two windows."""
        rates = [
            (samples - before) / (now_s - then_s)
            for (then_s, before), (now_s, samples) in itertools.pairwise(self._marks)
            if now_s > then_s
        ]
        return relative_deviation(rates)


def relative_deviation(values: Sequence[float]) -> float | None:
    """Standard deviation over mean; None of fewer than two values, or where the mean is 0."""
    if len(values) < 2 or not (mean := statistics.fmean(values)):
        return None
    return statistics.stdev(values) / mean


def num_warmup(num_steps: int) -> int:
    """A tenth of the steps, at most 10."""
    return min(10, num_steps // 10)
