"""The synchronous run: torch's DistributedDataParallel over our process group, stepped by the role of a worker.

Invariants: all ranks take the same steps in the same order; whether a step is finite is read off the
reduced gradient, which is the same bits everywhere, so no extra message decides it. Batches are dealt as a server
would deal them under `sync()` (`strategies/sampling/step_partition.py`), each rank from positions of the order, so
from chunks, of its own; an incomplete last round is shared evenly and weighted so that it, too, is the mean over its
samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpitrain.data.read.batch import to_device
from mpitrain.effects import Exchange, together
from mpitrain.messages import Kind, Lease
from mpitrain.model.gradient.accumulation import LeaseReader, read_alike
from mpitrain.model.in_place import held_alike
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.roles.step_worker import AlikeReplica, StepReplica, StepWorker
from mpitrain.strategies.sampling.step_partition import StepCourse, StepPartition, StepTurn
from mpitrain.system import trace
from mpitrain.training.measure import (
    MODEL_FILE,
    Meter,
    num_warmup,
    save_model,
)
from mpitrain.training.outcome import RunOutcome
from mpitrain.training.recipe import recipe_of_steps
from mpitrain.training.replica_guard import Named, ReplicaGuard, state_of
from mpitrain.training.resuming.resume import restoring
from mpitrain.training.resuming.resume_options import describe_optimizer, same_codec, shapes_of
from mpitrain.training.schedule import go_on, goes_by_figures, report_end_of
from mpitrain.training.session import Session, attempt
from mpitrain.training.synchronous.checkpoints import StepCheckpoints
from mpitrain.training.synchronous.codec_hooks import CodecHook
from mpitrain.training.synchronous.collectives import collectives_of
from mpitrain.training.synchronous.ddp import ParallelModule
from mpitrain.training.synchronous.flips import Flips
from mpitrain.training.synchronous.going_back import GoingBack
from mpitrain.training.synchronous.injected_delay import InjectedDelay
from mpitrain.training.synchronous.recovery_state import RecoveryState
from mpitrain.training.synchronous.stepper import Parts, Stepper
from mpitrain.training.validations.averaged_model import EMA_MODEL_FILE
from mpitrain.training.validations.judge import divergence
from mpitrain.training.validations.validation import Measure, make_measure
from mpitrain.training.validations.validation_parts import measure_together


class Trainer(AlikeReplica):
    """The run of one rank: what the role of a worker asks for (its course, steps, validations, checkpoints), and the
    outcome. `rates`: of the optimizer that steps, as it was when the run began.
    """

    # each rank reads windows of its own; otherwise all share one run of the order, round by round
    by_window = True
    reads_alike = False  # as many batches on every rank in every step
    ended_out_of_turn = False  # as `StepCheckpoints.finish` has it

    def __init__(
        self,
        session: Session,
        module: nn.Module,
        rates: Rates,
        reader: Any,
        device: torch.device,
        kept: RecoveryState | None = None,
    ):
        self.session, self.module, self.rates, self.optimizer = session, module, rates, rates.optimizer
        self.device = device
        self.recipe = recipe_of_steps(session)
        self.leases = LeaseReader(reader.batch, reader.prefetch, self.recipe.gradient.part_samples)
        self.rank = session.runtime.rank
        share, self.num_workers = self.place
        self.delay = (kept and kept.delay) or InjectedDelay(
            session.straggler(), module.parameters(), session.runtime.fail
        )
        job = session.job
        informs = attempt(
            session.runtime, lambda: goes_by_figures(job, self.recipe.update, rates, session.strategy)
        )
        self.validations = session.validations(steps_end_it=not informs, informs=informs)
        self.set_measure = self._make_measure()
        self.collectives = collectives_of(session.runtime)
        self.stepper = self._make_stepper()
        self.hook: CodecHook | None = self.stepper.parallel.hook if self.stepper.parallel else None
        per_epoch = -(-session.catalogue.num_samples // (job.step_samples * self.num_workers))
        self.num_steps = session.overrides.steps or per_epoch * job.epochs
        self.meter = Meter(session.report, num_warmup(self.num_steps))
        catalogue = session.catalogue
        window = catalogue.window_samples if self.by_window else catalogue.num_samples
        partition = StepPartition(
            catalogue.num_samples, job.step_samples, self.num_workers, window, job.drop_last, (share,)
        )
        self.course = StepCourse(partition, job.epochs, session.overrides.steps)
        self._guard_replicas(kept)
        self.checkpoints = self._make_checkpoints()
        self.checkpoints.before_writing = self._compare
        saved = kept.state if kept else self._restored()
        if saved is not None:
            attempt(session.runtime, restoring(session.resume)(lambda: self.restore(saved)))
            self._restore_own(kept)
            warmup = num_warmup(self.num_steps - self.stepper.step)
            self.meter = Meter(session.report, warmup, self.stepper.samples, self.stepper.step)
        self.replicas.begin_at(self.stepper.step)
        self.replicas.takes_rounding = not self.going_back.wanted
        if kept is None:
            attempt(session.runtime, self.checkpoints.try_out)
        if kept is not None:
            self.stepper.failure, self.meter = kept.failure, kept.meter or self.meter
            self.checkpoints.go_on_from(self.stepper.samples)
        self._begin()
        if kept is not None and kept.validating == self.stepper.samples:
            self.validations.repeat()
        self._own_before: dict[str, Any] = {}
        self.stepper.before_forward, self.stepper.before_update = self.delay.begin, self._before_update
        self._remember()
        trace.watch(self.meter, progress=("report", trace.OTHER))
        trace.watch(self, next_turn=("take leases", trace.OTHER), settle_checkpoint=("settle", trace.OTHER))

    @property
    def place(self) -> tuple[int, int]:
        """Which share of every step is this rank's, and how many there are."""
        return self.rank, self.session.runtime.size

    def _make_measure(self) -> Measure | None:
        """What measures this rank's share of the validation set."""
        session = self.session
        return make_measure(
            session.job, self.module, session.validation, self.device, session.runtime.stamp, self.validations
        )

    def _guard_replicas(self, kept: RecoveryState | None) -> None:
        session, payloads, wanted = (
            self.session,
            self.session.runtime.payloads,
            self.session.overrides.go_back,
        )
        self.replicas = ReplicaGuard(
            session.runtime, session.strategy, self._alike, session.report.event, self._changed, self._part,
            self._state_alike, session.overrides.compare_every, payloads and payloads.damaged,
        )  # fmt: skip
        self.going_back = (kept and kept.going_back) or GoingBack(
            session.runtime, wanted and self._may_compare
        )
        self.going_back.tell = session.report.event  # another rank's, where the first has died
        self.delay.flips = Flips(self._alike, self._state_alike, payloads and payloads.flip)

    def _begin(self) -> None:
        """What is known when the run stands where it goes on from."""
        report_end_of(self.session, self.stepper.updates.pace)
        self._clock_validations()

    def _clock_validations(self) -> None:
        """Where the job counts seconds, the ranks agree on when they validate."""
        if self.validations.counts_seconds:
            self.validations.agreed = self.checkpoints.validates_now
            self.checkpoints.wants_validation = self.validations.time_is_up

    def _make_checkpoints(self) -> StepCheckpoints:
        return StepCheckpoints(
            self.session, self._described, self.state, self.hook.state if self.hook else None,
            module=self.module, collectives=self.collectives,
        )  # fmt: skip

    @property
    def _described(self) -> tuple[list[str], list[str]]:
        return shapes_of(self.module), describe_optimizer(self.module, self.optimizer)

    def _restore_own(self, kept: RecoveryState | None) -> None:
        """Continue from what ranks have written each for itself, or have kept."""
        resume = self.session.resume
        if self.hook is None:
            return
        if kept is not None or (resume and same_codec(resume.about, self.session.strategy, "codec")):
            self.hook.restore_shares(
                *(kept.shares(self.num_workers) if kept else self.checkpoints.restored_own(self.session))
            )

    def _make_stepper(self) -> Stepper:
        """What takes the steps."""
        session = self.session
        stepper = Stepper(session.job, self.recipe, self.rank, session.runtime.where)
        stepper.train(self.module, self.rates, self._make_parallel())
        return stepper

    def _make_parallel(self) -> ParallelModule:
        job = self.session.job
        codec = self.session.strategy.push_codec
        return ParallelModule(self.module, job.find_unused_parameters, codec, job.seed)

    def _before_update(self) -> None:
        self.checkpoints.guard.begin()

    def state(self) -> dict[str, Any]:
        """Everything the run goes on from; the same on all ranks."""
        stepper, course = self.stepper, self.course
        counts = {
            "epoch": course.epoch, "step": stepper.step, "samples": stepper.samples,
            "nonfinite": stepper.nonfinite, "left_out": course.num_left_out,
        }  # fmt: skip
        return self._held_state() | {
            "counts": counts,
            "rounds": course.partition.state(),
            **stepper.updates.pace.state(stepper.samples),
        }

    def _held_state(self) -> dict[str, Any]:
        """The module, its optimizer and the average of its weights."""
        ema = self.stepper.updates.ema.state() if self.stepper.updates.ema else []
        return {"module": self.module.state_dict(), "optimizer": self.rates.state(), "ema": ema}

    def _restored(self) -> Any:
        """What `state` returned when the checkpoint to go on from was written; None at the beginning."""
        return self.checkpoints.restored(self.session)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._restore_held(state)
        counts, stepper = state["counts"], self.stepper
        self.course.restore(counts, state["rounds"])
        stepper.step, stepper.samples = counts["step"], counts["samples"]
        stepper.nonfinite = counts["nonfinite"]
        go_on(self.session, stepper.updates.pace, state, stepper.samples)
        self.validations.go_on_from(state.get("figures"))
        if stepper.updates.ema is not None:
            stepper.updates.ema.restore(state.get("ema"))

    def _restore_held(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.rates.restore(state["optimizer"])

    def own_state(self) -> dict[str, Any]:
        """What this rank alone holds of what it goes on from."""
        return self.hook.state() if self.hook is not None else {}

    def restore_own(self, own: dict[str, Any]) -> None:
        """Continue from what `own_state` returned on this rank."""
        if self.hook is not None:
            self.hook.restore(own)

    def keep_state(self) -> RecoveryState:
        """What this rank goes on from should others have died in this step: everything as when all last held the same,
        here after the step before."""
        self.checkpoints.writer.wait()
        own, before = self.hook.state() if self.hook else {}, self._own_before
        if own.get("step") == before.get("step"):  # or it has sent its share, which others may have used
            own = before
        meter, state = self.meter if self.rank == 0 else None, self.state()
        self.checkpoints.buffers.put_into(
            state["module"]
        )  # the forward pass of the step that failed has changed them
        step, failure, validating = self.stepper.step, self.stepper.failure, self.validations.under_way
        return RecoveryState(
            step, failure, state, before, own, self.delay, meter, self.going_back, validating
        )

    def run(self) -> None:
        """Run the worker's role to the end of the course, or until a gradient is not finite or the run is asked to
        end."""
        self.going_back.run(self, self._run_once)

    def _run_once(self) -> None:
        world = self.session.runtime.make_world((), _no_payload, reduce=self._reduce)
        world.run(StepWorker(self.rank, self, self.replica, self.meter, validations=self.validations).run())
        if self.going_back.wanted and not self.checkpoints.ended:
            self._compare()

    @property
    def replica(self) -> StepReplica:
        """What the role asks for all but its course."""
        return self

    def _reduce(self, task: Any) -> Any:
        """A collective, which is its own question."""
        return task()

    @property
    def _over(self) -> bool:
        return bool(self.stepper.failure) or self.checkpoints.ended

    def _may_write_checkpoint(self) -> bool:
        """Whether all ranks hold the same, so that a checkpoint may be written after this step."""
        return True

    def _alike(self) -> list[tuple[str, torch.Tensor]]:
        """What all ranks hold the same of, where they are to."""
        return held_alike(self.module)

    def _state_alike(self) -> Named:
        """The same of the optimizer's state."""
        return state_of(self.optimizer, self.module.named_parameters())

    _part = 0  # of a model that is not split

    def _changed(self) -> Collection[str]:
        """Parameters that forward passes here have changed in place."""
        return self.stepper.in_place.changed

    def _compare(self, look: Callable[[], bool] | None = None) -> None:
        """Whether all ranks do hold the same, where they are to. What ends a run that can go back may be what has
        parted them."""
        goes_on = self.going_back.wanted or not self.stepper.failure
        if self._may_compare and self._may_write_checkpoint() and goes_on:
            self.going_back.look(self, look or self.replicas.compare)

    @property
    def _may_compare(self) -> bool:
        return self.session.runtime.size > 1

    def _remember(self) -> None:
        """The step is whole, and all ranks hold the same now."""
        if self.hook is not None and self.session.runtime.survives_shrink:
            self._own_before = self.hook.state()

    # ---- the course, as the role asks for it

    @property
    def epoch(self) -> int:
        """Whole epochs that are over."""
        return self.course.epoch

    @property
    def goes_on(self) -> bool:
        """Whether there are steps left to take, and the run is not to end before them."""
        return self.course.goes_on and not self._over

    @property
    def has_step(self) -> bool:
        """Whether there is a step left."""
        return self.course.has_step

    def next_turn(self) -> StepTurn | None:
        """This rank's lease of the next step; None where the epoch has come to its end."""
        self.going_back.freshen(self)
        with self.checkpoints.guard.changing():
            turn = self.course.next_turn()
        following = self.course.partition.peek() if turn else None
        if following is not None and self.stepper.reads:
            self.leases.announce(following.leases[0])
        return turn

    # ---- what else it asks for

    @property
    def samples(self) -> int:
        """That all have trained on."""
        return self.stepper.samples

    @property
    def stopped(self) -> bool:
        """Whether the run is to end."""
        return self._over

    def local_step(self, turn: StepTurn) -> float:
        """A step on this rank's batches; returns the loss."""
        lease = turn.lease
        return self.stepper.take_step(self._parts(lease, turn.largest), lease.num_samples, turn.num_samples)

    def reduce_gradients(self) -> Exchange | None:
        """What the stepper has not done in its step."""
        return self.stepper.reduce_gradients()

    def _parts(self, lease: Lease, largest: int = 0) -> Parts:
        """The batches of the step that begins, in which no rank has more than `largest` samples."""
        self.session.runtime.step = self.stepper.step
        if not self.stepper.reads:
            yield None, lease.num_samples
            return
        if self.reads_alike or self.session.job.sync_batchnorm:
            parts = read_alike(self.leases, lease, largest)
        else:
            parts = self.leases.read(lease)
        for read, num_samples in parts:
            yield to_device(read, self.device), num_samples

    def settle_checkpoint(self) -> None:
        """The step is over and reported."""
        self.course.partition.settle_step()
        if self.stepper.failure and self.going_back.wanted:
            self._compare()
        if self._may_write_checkpoint():
            self._remember()
            self.checkpoints.after_step(self.stepper.step, self.stepper.samples)
            self._compare(self.replicas.after_step)  # the step is whole, whoever dies in here
        self.stepper.compute_s += self.delay.sleep_after_step()

    def statistics(self) -> dict[str, float]:
        """Further numbers for a row of progress."""
        return self.hook.statistics(with_norm=False) if self.hook else {}

    def _counts(self) -> dict[str, Any]:
        """Further counts for `result.json`, on rank 0."""
        if self.hook is None:
            return {}
        statistics = self.hook.statistics()
        self.meter.event("codec", **statistics)
        return {"codec": {"name": str(self.hook.codec), **statistics}}

    @property
    def validates(self) -> bool:
        """Whether there is something to validate on."""
        return self.session.validation is not None

    measured_part = 1.0

    def reduce_mean(self) -> Exchange:
        """Others may still be training, and waiting for them is no pause."""

        def meet() -> None:
            self.session.runtime.barrier()
            self._compare()

        return together(meet)

    def hear_figures(self, text: str) -> Exchange:
        """What the first rank has measured that a scheduler goes by, for all."""
        return together(lambda: self.stepper.updates.pace.hear_figures(self.session.runtime.broadcast(text)))

    def agree_to_end(self, ends: bool) -> Exchange:
        """The first rank knows whether a validation has ended the run."""
        return together(lambda: self.checkpoints.end_early(ends, self.stepper.samples))

    def _measured(self, samples: int | None) -> dict[str, float]:
        """Figures of the model, on rank 0; collective."""
        if self.set_measure is None:
            return {}
        averaged = self.stepper.averaged()
        with self.checkpoints.guard.changing() if averaged else contextlib.nullcontext():
            return measure_together(self.session.runtime, self.set_measure, samples, averaged)

    def outcome(self) -> RunOutcome:
        """What this rank knows of the run; the model is measured and saved, whatever happened."""
        ended = self.checkpoints.ended
        if not self.stepper.failure:
            self.checkpoints.finish(self.stepper.samples, self.ended_out_of_turn)
        self.checkpoints.writer.wait()
        if not ended:
            self._compare()
        model, metadata = self.session.run_dir / MODEL_FILE, self._metadata()
        self._save(model, metadata)
        if (ema := self.stepper.updates.ema) is not None:
            with ema.swapped():
                self._save(self.session.run_dir / EMA_MODEL_FILE, metadata)
        metrics = self._measured(None if ended else self.stepper.samples)
        concluded = self._conclude()
        outcome = RunOutcome(
            self._detail(), self.stepper.failure or self._divergence(), ended,
            self.checkpoints.writer.unwritten, self.delay.straggler.counts(),
        )  # fmt: skip
        if self._writes:
            outcome.detail["checkpoints"] = self.checkpoints.writer.summary()
        if self.rank == 0:
            counts: dict[str, Any] = {
                "accepted": self.stepper.step - self.stepper.nonfinite,
                "nonfinite": self.stepper.nonfinite,
                "samples_left_out": self.course.num_left_out,
            }
            counts |= self._counts() | concluded | self.validations.result() | self.going_back.result()
            outcome.result = {**self.meter.result(), **counts, "metrics": metrics, "model": str(model)}
        return outcome

    def _detail(self) -> dict[str, Any]:
        """This rank's row of `result.json`."""
        return {
            "rank": self.session.runtime.launched_rank, "role": "worker", "steps": self.stepper.step,
            "compute_s": self.stepper.compute_s,
        }  # fmt: skip

    @property
    def _writes(self) -> bool:
        """Whether this rank's row tells of checkpoints."""
        return self.rank == 0

    def _conclude(self) -> dict[str, Any]:
        """What belongs in `result.json` besides; collective."""
        return {}

    def _divergence(self) -> str:
        return "" if self.rank else divergence(self.module.named_parameters())

    def _metadata(self) -> dict[str, str]:
        return {"strategy": str(self.session.strategy), "job": self.session.job.name or ""}

    def _save(self, path: Path, metadata: dict[str, str]) -> None:
        """Write the model, on rank 0."""
        if self.rank == 0:
            save_model(self.module, path, metadata)


def _no_payload(source: int, kind: Kind) -> Any:
    raise AssertionError(f"rank {source} sent a {kind.name}: workers that step together send no messages")
