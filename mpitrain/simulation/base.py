"""What simulations without servers have in common: the checks, the virtual world and its log, and the result.

Invariants: it knows no strategy; `peers.py` and `local_sgd.py` bring their roles.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from mpitrain.data.format.catalogue import Catalogue
from mpitrain.effects import Compute, Role
from mpitrain.errors import UsageError
from mpitrain.inject import Straggler, check_workers
from mpitrain.job import Job, Overrides
from mpitrain.model.in_place import refuse_renormed
from mpitrain.model.optimizers.ema import Ema
from mpitrain.model.optimizers.optimizer import Rates, state_bytes
from mpitrain.model.recipe import Recipe
from mpitrain.model.wire.masters import without_masters
from mpitrain.reporting.listeners import read_logs
from mpitrain.reporting.report import Report, Reported, default_run_dir
from mpitrain.simulation.checkpoints import Checkpoints, StateBytes, policy_of
from mpitrain.simulation.collective_costs import all_reduces
from mpitrain.simulation.drawn import draw
from mpitrain.simulation.measured_step import charged, with_measured
from mpitrain.simulation.report import VirtualLog
from mpitrain.simulation.step_costs import num_bytes_of
from mpitrain.simulation.workload import codec_of
from mpitrain.strategies.checkpoint_policy import CheckpointPolicy
from mpitrain.strategies.features import VIRTUAL, why_not
from mpitrain.strategies.validation_policy import ValidationCadence, read_validation_policy
from mpitrain.system.trace import TraceSteps, file_name, read_steps, switch
from mpitrain.training.measure import MODEL_FILE, build, save_model
from mpitrain.training.recipe import recipe_of
from mpitrain.training.resuming.about_data import about_data
from mpitrain.training.resuming.initial_weights import start_from
from mpitrain.training.schedule import goes_by_figures
from mpitrain.training.tracing import nothing_traced
from mpitrain.training.validations.averaged_model import EMA_MODEL_FILE
from mpitrain.training.validations.best_model import Validations, begin_from
from mpitrain.training.validations.judge import divergence, judge
from mpitrain.training.validations.validation import Measure, make_measure
from mpitrain.virtual import ComputeLaw, Costs, NetworkLaw, VirtualWorld
from mpitrain.virtual.all_reduces import Reduce
from mpitrain.virtual.traces import VirtualTrace

# What a figure of merit says of a run that starts no process, warms nothing up and goes on from nothing.
NO_MEASUREMENT = {"device": "cpu", "spread": None, "warmup_steps": 0, "leg": 1}


class VirtualRun:
    """One virtual run of a job on `number` workers, or peers; servers come on top.

    Raises:
        UsageError: a wrong option, or more workers than samples.
    """

    world: VirtualWorld
    log: VirtualLog
    helpers: Mapping[int, str] = MappingProxyType({})  # ranks that compute no gradients, with their roles
    _loaded: dict[str, Any]
    _warning: str

    def __init__(
        self,
        job: Job,
        options: Overrides,
        number: int,
        compute: ComputeLaw,
        network: NetworkLaw,
        costs: Costs = Costs(),  # noqa: B008 - frozen
    ):
        if number < 1:
            raise UsageError(f"--workers must be at least 1, got {number}")
        check_workers(options.injections, number)
        self.catalogue: Catalogue = job.data.scan()
        if self.catalogue.num_samples < number:
            raise UsageError(
                f"{number} workers for {self.catalogue.num_samples} training samples: use at most "
                f"{self.catalogue.num_samples} workers"
            )
        self.job, self.options, self.number = job, options, number
        validation = job.validate.scan() if job.validate else None
        self._about_data = about_data(job, options, self.catalogue, validation)
        self.network = network
        self.compute_text = str(compute)
        self.compute, self.measured = with_measured(compute, job, options.lr, self.catalogue)
        self.costs = charged(costs, self.measured)
        self.parts: dict[int, float] = {}  # of the parameters that a rank holds, where it is not all of them
        self._num_bytes = 0  # of all parameters that are trained
        self.num_shares = number  # batches a step
        placed = network.nodes(number)
        self.nodes = placed or tuple(range(number))  # of every rank
        self.num_nodes = len(set(placed or (0,)))
        self.run_dir = Path(options.run_dir or default_run_dir(f"{job.name or 'job'}-virtual")).resolve()
        self.stragglers = [Straggler(options.injections, index, job.seed) for index in range(number)]
        self.validations = Validations(job, self.run_dir, read_validation_policy(job.validate_every))
        self.started_s = 0.0
        self.checkpoint_policy = policy_of(job, options.checkpoint_every, self.costs, options.injections)
        self.state_bytes = StateBytes()
        self._loaded, self._warning = {}, ""
        self._diverged = ""  # why the model that was saved is of no use

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The job's module and optimizer, with the weights that the job starts from."""
        if self.checkpoint_policy != CheckpointPolicy():
            self.state_bytes = self._weigh_state()
        made, strategy = build(self.job, self.options.lr, torch.device("cpu")), self.job.run_strategy
        if strategy.num_servers() or self.number > 1:
            refuse_renormed(made[0], why_not("changes in place", strategy, VIRTUAL))
        self.validations.informs = goes_by_figures(
            self.job, self.recipe.update, Rates(made[1]), strategy, VIRTUAL
        )
        self._num_bytes = sum(one.nbytes for one in made[0].parameters() if one.requires_grad)
        self._loaded, self._warning = start_from(self.job, made[0]), without_masters(made[0], strategy)
        return made

    def _weigh_state(self) -> StateBytes:
        """Of a module and an optimizer that nobody else uses."""
        module, optimizer = build(self.job, self.options.lr, torch.device("cpu"))
        trained = [one for one in module.parameters() if one.requires_grad]
        kept = state_bytes(trained, optimizer) or 0
        buffers = [one for one in module.buffers() if one.is_floating_point()]
        return StateBytes(num_bytes_of(trained), kept, num_bytes_of(buffers))

    def start(self, samples_per_row: int, world: VirtualWorld, warns: bool = True) -> None:
        """Begin the report.

        Args:
            samples_per_row: samples between two calls of `log.progress`.
            world: that runs the roles; warns: whether to warn of a run that is too short to measure.
        """
        job = self.job
        planned = self.catalogue.num_samples * job.epochs
        if self.options.steps is not None:
            planned = self.options.steps * self.num_shares * job.step_samples
        reported = Reported(
            self.run_dir, planned, quiet=self.options.quiet, num_epochs=job.epochs,
            log_every=job.log_every, logs=read_logs(job.log), callbacks=job.callbacks,
        )  # fmt: skip
        report = Report(reported)
        report.begin(virtual_s=0.0)
        begin_from(self.run_dir, None, None)
        self.world = world
        orders = self.options.injections
        self.checkpoints = Checkpoints(world, self.checkpoint_policy, self.costs, orders, job.seed)
        draw(self.stragglers, orders, job.run_strategy, job.seed, lambda: world.elapsed_s)
        if self.costs != Costs():
            world.charge, world.push_s = self._charge, self.costs.push_s
        switch(job.trace is not None)
        if (steps := read_steps(job.trace)) is not None:
            world.traces = {
                rank: self._trace(steps, rank, world) for rank in range(self.number + len(self.helpers))
            }
        self.log = VirtualLog(report, world, math.ceil(planned / samples_per_row), bool(self.options.quiet))
        if warns:
            self.log.warn_if_short(math.ceil(planned / job.step_samples), self.number)
        if self._loaded:
            self.log.event("initial weights", **self._loaded)
        if self._warning:
            self.log.event("warning", text=self._warning)
        self.started_s = time.monotonic()

    def _charge(self, rank: int, effect: Compute) -> float:
        """Seconds of a task besides those of the compute law."""
        if effect.what == "checkpoint":
            return self.checkpoints.hold_up_s(rank)
        strategy = self.job.run_strategy
        return self.costs.seconds(
            effect.what,
            self._num_bytes * self.parts.get(rank, 1.0),
            effect.num_batches,
            effect.size,
            codec_of(strategy) is not None,
            strategy.steps_on_workers,
        )

    def _trace(self, steps: TraceSteps, rank: int, world: VirtualWorld) -> VirtualTrace:
        strategy = self.job.run_strategy
        role = self.helpers.get(rank, strategy.worker_role)
        return VirtualTrace(
            steps, self.run_dir / file_name(rank), rank, f"rank {rank} ({role}, virtual)",
            clock=lambda: world.now_s,
            batches_per_push=strategy.push_every,
            about={"clock": "virtual time, the same on all ranks"},
        )  # fmt: skip

    def start_alike(self) -> None:
        """`start`, for ranks that are all alike and report once a step of all."""
        apart = self.job.run_strategy.asynchronous  # they compute on a thread of their own
        world = VirtualWorld(
            self.compute, self.network, self.job.seed, drive_computing=range(self.number) if apart else ()
        )
        self.start(self.job.step_samples * self.num_shares, world)

    @property
    def recipe(self) -> Recipe:
        """Of ranks that take the same steps."""
        return recipe_of(self.job, self.job.run_strategy, self.num_shares, self.catalogue.num_samples)

    def measure(self, module: nn.Module) -> Measure | None:
        """What validates `module`, where the job has something to validate on."""
        validation = self.job.validate.scan() if self.job.validate else None
        return make_measure(self.job, module, validation, torch.device("cpu"), validations=self.validations)

    def cadence(self, rank: int) -> ValidationCadence:
        """When a rank validates, or the others come together with the one that does: each counts for itself."""
        first = self.validations
        return (
            first if rank == 0 else Validations(self.job, self.run_dir, first.policy, informs=first.informs)
        )

    @property
    def writes(self) -> bool:
        """Whether roles have checkpoints to agree on: those that are due, or the one with which a validation may end
        the run."""
        return self.checkpoints.are_due or self.validations.may_end

    def save(self, module: nn.Module, name: str = MODEL_FILE) -> Path:
        """Write the trained module; returns the file."""
        path = self.run_dir / name
        save_model(module, path, {"strategy": str(self.job.strategy)})
        self._diverged = self._diverged or divergence(module.named_parameters())
        return path

    def save_all(self, module: nn.Module, average: Ema | None) -> None:
        """The model, and beside it the average of its parameters, where one is kept."""
        self.save(module)
        if average is not None:
            with average.swapped():
                self.save(module, EMA_MODEL_FILE)

    def run(self, roles: Sequence[Role], reduce: Reduce | None = None) -> list[Any]:
        """What each rank's role returns; `reduce` carries out the collectives of roles that all-reduce."""
        pairs = zip(self.stragglers, roles, strict=True)
        together = None
        if reduce is not None:
            together = all_reduces(range(self.number), reduce, self.network, self.number)
        returned = self.world.run(
            {rank: straggler.wrap(role) for rank, (straggler, role) in enumerate(pairs)}, together
        )
        return [returned[rank] for rank in range(self.number)]

    def result(self, samples: int, metrics: dict[str, float], *failures: str) -> dict[str, Any]:
        """What was asked for, what it took, and the verdict on it; of `failures` those count that are not empty."""
        traces, elapsed_s = self.world.traces.values(), self.world.elapsed_s
        if self.job.trace is not None and not any(one.num_steps for one in traces):
            self.log.event("warning", text=nothing_traced(self.job.trace))
        return {
            **judge(self.job, metrics, list(filter(None, [*failures, self._diverged])), self.options),
            **self._about_data,
            **self.validations.result(),
            "workers": self.number,
            "servers": 0,
            "nodes": self.num_nodes,
            "virtual": True,
            **NO_MEASUREMENT,
            **self.checkpoints.summary(),
            "spread": self.log.spread(),
            "injected": [row for straggler in self.stragglers for row in straggler.counts()],
            "run_dir": str(self.run_dir),
            "model": str(self.run_dir / MODEL_FILE),
            "samples": samples,
            "samples_per_second": samples / elapsed_s if elapsed_s else 0.0,
            "virtual_s": elapsed_s,
            "paused_s": self.log.paused_s,
            "compute": self.compute_text,
            **({"measured": self.measured} if self.measured else {}),
            "network": str(self.network),
            "costs": str(self.costs),
            "num_events": self.world.num_events,
            "wall_s": time.monotonic() - self.started_s,
            "loss_curve": self.log.curve,
        }
