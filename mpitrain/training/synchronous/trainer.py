"""The synchronous run: torch's DistributedDataParallel over our process group.

Invariants: all ranks take the same steps in the same order; whether a step is finite is read off the
reduced gradient, which is the same bits everywhere, so no extra message decides it. Batches are dealt as a server
would deal them in lockstep (`strategies/sampling/step_partition.py`), each rank from places of the order, so from
chunks, of its own; an incomplete last round is shared evenly and weighted so that it, too, is the mean over its
samples.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpitrain.errors import UsageError
from mpitrain.model.flat import all_finite, trainable
from mpitrain.model.loss import BatchLoss, read_loss
from mpitrain.model.optimizer import Rates
from mpitrain.model.user_code import unused_parameters
from mpitrain.model.worker_replica import seed_step
from mpitrain.strategies.sampling.dealer import Lease
from mpitrain.strategies.sampling.step_partition import StepPartition
from mpitrain.training.measure import (
    MODEL_FILE,
    Meter,
    num_warmup,
    save_model,
)
from mpitrain.training.resume_options import describe_optimizer, same_codec
from mpitrain.training.session import Session, attempt
from mpitrain.training.synchronous.checkpoints import StepCuts
from mpitrain.training.synchronous.codec_hooks import CodecHook, reattach
from mpitrain.training.synchronous.ddp import attach, codec_of, data_parallel, weight_among_all
from mpitrain.training.synchronous.injected_delay import Nap
from mpitrain.training.synchronous.recovery import Kept
from mpitrain.training.validation import make_measure
from mpitrain.training.watchdog.emergency import KeptBuffers

_COUNTS = ("epoch", "step", "samples", "nonfinite", "left_out")


class Trainer:
    """The steps of one rank. What a step does with its gradients is `_begin_step`, `_update` and `_finish`. `rates`: of
    the optimizer that steps, as it was when the run began.
    """

    # each rank reads windows of its own; otherwise all share one run of the order, round by round
    by_window = True

    def __init__(
        self,
        session: Session,
        module: nn.Module,
        rates: Rates,
        reader: Any,
        device: torch.device,
        kept: Kept | None = None,
    ):
        self.session, self.module, self.rates, self.optimizer = session, module, rates, rates.optimizer
        self.reader, self.device = reader, device
        self.rank, self.num_workers = session.runtime.rank, session.runtime.size
        self.nap = (kept and kept.nap) or Nap(session.straggler(), module.parameters())
        self.hook: CodecHook | None = None
        self.find_unused = session.job.find_unused_parameters
        self.parallel = self._make_parallel()
        self.gradients = [parameter for _, parameter, _ in trainable(module, self.optimizer)]
        job = session.job
        per_epoch = -(-session.catalogue.num_samples // (job.batch_size * self.num_workers))
        self.num_steps = session.overrides.steps or per_epoch * job.epochs
        self.meter = Meter(session.report, num_warmup(self.num_steps))
        validation = session.validation if self.rank == 0 else None
        self.measure = make_measure(job, module, validation, device, session.runtime.stamp)
        self.epoch = self.step = self.samples = self.nonfinite = self.left_out = 0
        self.compute_s, self.failure = 0.0, ""
        catalogue = session.catalogue
        together = catalogue.window_samples if self.by_window else catalogue.num_samples
        self.rounds = StepPartition(
            catalogue.num_samples, job.batch_size, self.num_workers, together, job.drop_last
        )
        parameters = [f"{name} {tuple(value.shape)}" for name, value in module.named_parameters()]
        kept_back = self.hook.state if self.hook else None
        described = describe_optimizer(module, self.optimizer)
        self.cuts = StepCuts(session, parameters, described, self.state, kept_back, module=module)
        saved = kept.state if kept else self.cuts.restored(session)
        if saved is not None:
            attempt(session.runtime, lambda: self.restore(saved))
            resume, strategy = session.resume, session.strategy
            alike = kept is not None or (resume and same_codec(resume.about, strategy, "codec"))
            if self.hook is not None and alike:
                self.hook.restore_shares(
                    *(kept.shares(self.num_workers) if kept else self.cuts.restored_own(session))
                )
        if kept is not None:
            self.failure, self.meter = kept.failure, kept.meter or self.meter
            self.cuts.go_on_from(self.samples)
        self._own_before: dict[str, Any] = {}
        self._remember()

    def state(self) -> dict[str, Any]:
        """Everything the run goes on from; the same on all ranks."""
        counts = {key: getattr(self, key) for key in _COUNTS}
        return {
            "module": self.module.state_dict(),
            "optimizer": self.rates.state(),
            "counts": counts,
            "rounds": self.rounds.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.module.load_state_dict(state["module"])
        self.rates.restore(state["optimizer"])
        vars(self).update(state["counts"])
        self.rounds.restore(state["rounds"])
        self.meter = Meter(self.session.report, num_warmup(self.num_steps - self.step), self.samples)

    def keep(self) -> Kept:
        """What this rank goes on from should others have died in this step: everything as when all held the same last,
        here after the step before."""
        own, before = self.hook.state() if self.hook else {}, self._own_before
        if own.get("step") == before.get("step"):  # or it has sent its share, which others may have used
            own = before
        meter, state = self.meter if self.rank == 0 else None, self.state()
        self.cuts.buffers.put_into(
            state["module"]
        )  # the forward pass of the step that failed has changed them
        return Kept(self.step, self.failure, state, before, own, self.nap, meter)

    def run(self) -> None:
        """Epochs until all are done, `--steps` is reached, a step is not finite or the run is told to end."""
        limited = self.session.overrides.steps is not None
        while not self._over and (
            self.step < self.num_steps if limited else self.epoch < self.session.job.epochs
        ):
            self._epoch(limited)
            if self._over:
                break
            if not limited and self.epoch < self.session.job.epochs:
                self._validate(self.epoch - 1)
        self._finish()

    @property
    def _over(self) -> bool:
        return bool(self.failure) or self.cuts.ended

    def _make_parallel(self) -> Any:
        """The module to call."""
        parallel = self._make_ddp()
        self.hook = attach(parallel, codec_of(self.session.strategy), self.session.job.seed)
        return parallel

    def _make_ddp(self) -> DistributedDataParallel:
        return data_parallel(self.module, find_unused=bool(self.find_unused))

    def _loss(self, batch: dict[str, torch.Tensor]) -> BatchLoss:
        """The loss of a batch. At the first step all ranks look whether it leaves out parameters; if it does on any of
        them, DDP is made anew, which then looks at every step, and this step is done again."""
        job = self.session.job
        if self.find_unused is not None or not self._reduces:
            return read_loss(job.loss(self.parallel, batch))
        before = KeptBuffers(self.module)
        loss = read_loss(job.loss(self.parallel, batch))
        left_out = torch.tensor([len(unused_parameters(self.module, loss.total))])
        if self.num_workers > 1:
            dist.all_reduce(left_out, op=dist.ReduceOp.MAX)
        self.find_unused = bool(left_out)
        if not self.find_unused:
            return loss
        before.put_back()
        self.parallel = None
        del loss
        gc.collect()  # the hooks of the DDP before hang on the parameters for as long as it lives
        self.parallel = self._make_ddp()
        if self.hook is not None:
            reattach(self.parallel, self.hook)
        self._seed()
        return read_loss(job.loss(self.parallel, batch))

    @property
    def _reduces(self) -> bool:
        """Whether this step's backward pass exchanges gradients."""
        ddp = self.parallel
        return isinstance(ddp, DistributedDataParallel) and ddp.require_backward_grad_sync

    def _check_all_used(self) -> None:
        """DDP waits for ever for gradients that do not come, and tells so at the next step only, if there is one."""
        if self.find_unused or not self._reduces:
            return
        named = self.module.named_parameters()
        left_out = [name for name, one in named if one.requires_grad and one.grad is None]
        if left_out:
            more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
            raise UsageError(
                f"the loss does not depend on {', '.join(left_out[:3])}{more} in this step, and allreduce() needs the "
                "gradient of every parameter; say Job(find_unused_parameters=True)"
            )

    def _seed(self) -> None:
        seed_step(self.session.job.seed, self.rank, self.step)

    def _begin_step(self) -> None:
        """Before the forward pass."""
        if self.hook is not None and self.session.runtime.survives_shrink:
            self._own_before = self.hook.state()

    @property
    def averages_gradients(self) -> bool:
        """Whether the step under way takes the mean over the ranks."""
        return True

    def _may_be_cut(self) -> bool:
        """Whether all ranks hold the same, so that a checkpoint may be written after this step."""
        return True

    def _remember(self) -> None:
        """All ranks hold the same now."""

    def _finish(self) -> None:
        """After the last step."""

    def _epoch(self, limited: bool) -> None:
        while not self._over and not (limited and self.step >= self.num_steps):
            with self.cuts.guard.changing():
                leases = self.rounds.take()
                following = self.rounds.peek() if leases else None
                if leases is None:
                    self.left_out, self.epoch = self.left_out + self.rounds.next_epoch(), self.epoch + 1
                    return
            if following is not None:
                self.reader.prefetch(*following[self.rank][:3])
            self._one_step(leases[self.rank], sum(lease.num_samples for lease in leases))
            self.rounds.settle()
            if self._may_be_cut():
                self._remember()
                self.cuts.after_step(self.step, self.samples)
            self.compute_s += self.nap.take()

    def _one_step(self, lease: Lease, count: int) -> None:
        """One batch of this worker's, of a round of `count` samples."""
        runtime = self.session.runtime
        runtime.step = self.step
        share = lease.num_samples
        batch = {
            name: tensor.to(self.device, non_blocking=True)
            for name, tensor in self.reader.batch(lease.epoch, lease.start, share).items()
        }
        self._seed()
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)
        began_s = time.monotonic()
        self.nap.begin()
        self._begin_step()
        returned = self._loss(batch)
        loss = returned.mean
        value = float(loss.detach())
        weight = share * self.num_workers / count
        if returned.weight is not None and self.averages_gradients:
            loss, weight = returned.total, weight_among_all(returned.weight)
        if value - value != 0.0:
            weight = float("nan")  # poisons the reduced gradient, so that every rank sees it
        (loss if weight == 1.0 else loss * weight).backward()
        self._check_all_used()
        self.compute_s += time.monotonic() - began_s
        self.cuts.guard.begin()
        self._update(value, count)
        self.step += 1
        self.meter.progress(self.samples, self.step, lease.epoch + 1, value, **self._told())

    def _update(self, value: float, count: int) -> None:
        """Use the gradients of `count` samples of all workers, whose loss here was `value`."""
        if self._is_finite():
            self._step_optimizer()
            self.samples += count
        else:
            self._refuse(value)

    def _is_finite(self) -> bool:
        return all_finite([p.grad for p in self.gradients if p.grad is not None])

    def _step_optimizer(self) -> None:
        schedule = self.session.job.schedule
        if schedule is not None:
            progress = self.samples / self.session.catalogue.num_samples
            self.rates.set(schedule.factor(progress, self.num_workers))
        self.optimizer.step()

    def _told(self) -> dict[str, float]:
        """Further numbers for a row of progress."""
        return self.hook.statistics(with_norm=False) if self.hook else {}

    def _counts(self) -> dict[str, Any]:
        """Further counts for `result.json`, on rank 0."""
        if self.hook is None:
            return {}
        told = self.hook.statistics()
        self.meter.event("codec", **told)
        return {"codec": {"name": str(self.hook.codec), **told}}

    def _refuse(self, value: float) -> None:
        self.nonfinite += 1
        if self.session.job.on_nonfinite == "stop":
            whose = f"rank {self.session.runtime.launched_rank} (worker, step {self.step})"
            here = f"{whose}: loss is {value:g}" if value - value != 0.0 else ""
            self.failure = here or f"step {self.step}: the averaged gradient is not finite"

    def _validate(self, epoch: int) -> None:
        if self.measure is not None:
            self.meter.validation(self.measure, epoch + 1, self.samples)

    def outcome(self) -> dict[str, Any]:
        """Counts of this rank; rank 0 adds the metrics and saves the model, whatever happened."""
        detail: dict[str, Any] = {
            "rank": self.session.runtime.launched_rank,
            "role": "worker",
            "steps": self.step,
            "compute_s": self.compute_s,
        }
        injected = self.nap.straggler.counts()
        outcome: dict[str, Any] = {"detail": detail, "failure": self.failure, "injected": injected}
        outcome["requeue"] = self.cuts.ended
        self.cuts.keeper.wait()
        outcome["unwritten"] = self.cuts.keeper.unwritten
        if self.rank == 0:
            detail["checkpoints"] = self.cuts.keeper.summary()
            path = self.session.run_dir / MODEL_FILE
            told = {"strategy": str(self.session.strategy), "job": self.session.job.name or ""}
            save_model(self.module, path, told)
            counts: dict[str, Any] = {
                "accepted": self.step - self.nonfinite,
                "nonfinite": self.nonfinite,
                "samples_left_out": self.left_out,
            }
            metrics = self.measure() if self.measure else {}
            counts |= self._counts()
            outcome["result"] = {**self.meter.result(), **counts, "metrics": metrics, "model": str(path)}
        return outcome
