"""A worker's copy of the model: takes over parameters, turns a lease into a gradient, and measures itself on
the validation data.

Invariants: one batch's randomness (dropout and the like) is keyed by (seed, worker, number of the batch), so
it does not depend on timing. Several virtual workers may share one module: each then brings its own parameters and
buffers with it. Parameters that are a worker's own for the whole run (elastic averaging) are state: who resumes keeps
them at its first read of the servers' model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from mpitrain.model.copies import copied
from mpitrain.model.gradient.accumulation import LeaseReader
from mpitrain.model.optimizers.server_steps import ServerSteps
from mpitrain.model.recipe import GradientRule
from mpitrain.model.replicas.local_steps import LocalSteps
from mpitrain.model.wire.buffers import FixedBuffer, VariableBuffer
from mpitrain.model.wire.flat import FlatModel, all_finite
from mpitrain.model.wire.push_codec import PushCoder
from mpitrain.model.wire.reply_codec import ReplyReader


class Gradient(NamedTuple):
    """What one batch gave: its mean loss, its samples; `finite` covers the loss and every element of the gradient;
    `share`: what it is the mean of, samples as a rule; `options`: those of the servers' optimizer that have changed,
    as JSON text; `goes_on`: it is that of a step within the batch, of which there is more."""

    loss: float
    samples: int
    finite: bool
    share: float
    options: str = ""
    goes_on: bool = False


class Between(NamedTuple):
    """What the strategy asks of a worker between a gradient and its push.

    Args:
        local: steps of its own between reads; None: it only computes gradients.
        coder: makes messages of what is pushed.
        server_steps: the job's optimizer, where servers take its steps: its hooks act here, its options travel.
    """

    local: LocalSteps | None = None
    coder: PushCoder | None = None
    server_steps: ServerSteps | None = None


class Replica:
    """One worker's model and data.

    Args:
        model: the flat model; rule: how it becomes a gradient.
        reader: of the training data; worker: its number among the workers, whatever its rank is.
        between: what happens to a gradient before it is pushed.
        measure: returns the validation metrics of the module, or nothing.
        shared: other replicas use the same module in between.
    """

    def __init__(
        self,
        model: FlatModel,
        rule: GradientRule,
        reader: LeaseReader,
        worker: int,
        between: Between = Between(),  # noqa: B008 - frozen
        measure: Callable[[int | None], dict[str, float]] | None = None,
        shared: bool = False,
    ):
        self.model, self.own_gradients, self.reader = model, rule.begin(worker), reader
        self.measure, self.shared = measure, shared
        self.local, self.coder, self.server_steps = between
        self._reader = ReplyReader(model.layout) if model.replies_coded else None
        self._finite = True  # all that the next push is made of
        self._wire_buffers: list[FixedBuffer] | None = None  # the gradient to be pushed
        self._pulled: list[FixedBuffer | None] = [None] * model.layout.num_shards
        self._resumed: dict[int, torch.Tensor] = {}  # own parameters, by shard, until that is read
        self._kept: torch.Tensor | None = None  # own parameters, since the final model takes their place
        self._buffers = [buffer.clone() for buffer in model.module.buffers()] if shared else []

    def load(self, shard: int, payload: Any) -> None:
        """Take over one shard's parameters; a wire buffer of the model itself needs no copy. Who has resumed with
        parameters of its own keeps them instead, once."""
        payload = self._reader.take(shard, payload) if self._reader else payload
        resumed = self._resumed.pop(shard, None)
        if not self.shared:
            if resumed is None:
                self.model.install(shard, payload)
            else:
                self.model.wire_buffers[shard].body.copy_(resumed)
                self.model.install(shard)
            payload.release()
            return
        held, self._pulled[shard] = self._pulled[shard], payload
        if self.local is not None:  # these parameters will move: nobody else may hold them
            own = held or FixedBuffer(self.model.layout.size(shard), self.model.layout.dtype)
            own.body.copy_(payload.body if resumed is None else resumed)
            self._pulled[shard] = own
            payload.release()
        elif held is not None:
            held.release()

    @torch.no_grad()
    def subtract(self, shard: int, payload: Any) -> None:
        """Move one shard's parameters by minus the payload."""
        if self.shared:
            self._own(shard).body.sub_(payload.body)
        else:
            wire_buffer = self.model.current()[shard]
            wire_buffer.body.sub_(payload.body)
            self.model.install(shard)
        payload.release()

    def _own(self, shard: int) -> FixedBuffer:
        wire_buffer = self._pulled[shard]
        assert wire_buffer is not None, "a difference came before any parameters"
        return wire_buffer

    def progress(self, samples: int, living: float = 1.0) -> None:
        """So many samples have been accepted, and this part of the workers is not lost: what a schedule on the worker
        follows."""
        if self.local is not None:
            self.local.progress(samples, living)

    def hear_figures(self, text: str) -> None:
        """Validations have given figures, which a schedule on the worker may follow."""
        if self.local is not None:
            self.local.pace.hear_figures(text)

    def prefetch(self, lease: Any) -> None:
        """Start reading the batch."""
        self.reader.announce(lease)

    def gradient(self, lease: Any, step: int) -> Gradient:
        """Forward and backward over the lease's batch, on the parameters loaded last."""
        self._enter()
        self._after_step(broken_off=self._wire_buffers is not None)
        mean = self.own_gradients.backward(self.model, self.reader, lease, step)
        value = mean.value
        if self.server_steps is not None and self.server_steps.hooks and self._may_step(value):
            self.server_steps.begin()
        gradient = self.collect(value, lease.num_samples, mean.weight)
        self._leave()
        return gradient

    def _may_step(self, loss: float) -> bool:
        """Hooks of a step that is not taken do not run."""
        return loss - loss == 0.0 and all_finite(self.model.gradients())

    def _after_step(self, broken_off: bool = False) -> None:
        """The hooks after the step before, once its answer is here."""
        if self.server_steps is not None:
            self.server_steps.end(broken_off)

    def finish(self) -> None:
        """The hooks after a step whose answer is here, where nothing is computed next, or the state is saved first."""
        if self.server_steps is not None and self.server_steps.begun:
            self._enter()
            self._after_step()

    def before_final(self) -> None:
        """Parameters of this worker's own are kept for its state: the final model takes their place in the module."""
        if self.owns_parameters and self._kept is None:
            self._kept = self._own_parameters()

    @property
    def owns_parameters(self) -> bool:
        """Whether the parameters are this worker's own for the whole run, and not those that servers hold."""
        return self.local is not None and self.local.pushes == "parameters"

    def _own_parameters(self) -> torch.Tensor:
        """A copy of the whole vector, which says nothing of the number of shards."""
        shards = range(self.model.layout.num_shards)
        buffers = [self._own(shard) for shard in shards] if self.shared else self.model.current()
        return torch.cat([buffer.body for buffer in buffers])

    def collect(self, loss: float, num_samples: int, share: float | None = None) -> Gradient:
        """Take up the gradients that backward left on the parameters: into wire buffers, or into a step of this
        worker's own."""
        if self.local is not None:
            finite = loss - loss == 0.0 and self.local.step()
            self._finite = self._finite and finite
        else:
            for wire_buffer in self._wire_buffers or ():  # broken off before it was pushed
                wire_buffer.release()
            self._wire_buffers = self.model.push_buffers()
            finite = self._finite = self.model.gather_gradients(self._wire_buffers) and loss - loss == 0.0
        options = (
            self.server_steps.text(self.local.rates if self.local else None)
            if self.server_steps is not None
            else ""
        )
        return Gradient(loss, num_samples, finite, num_samples if share is None else share, options)

    def take_push(self) -> list[FixedBuffer] | list[VariableBuffer]:
        """What to push, one wire buffer or message a shard."""
        finite, self._finite = self._finite, True
        if self.local is not None:
            self._enter()
            wire_buffers = self.local.take_push()
        else:
            assert self._wire_buffers is not None, "push without a gradient"
            wire_buffers, self._wire_buffers = self._wire_buffers, None
        return wire_buffers if self.coder is None else self.coder.encode(wire_buffers, finite)

    def statistics(self) -> dict[str, float]:
        """What the codec has to report of its messages; empty without one."""
        return self.coder.statistics() if self.coder else {}

    def validate(self, samples: int | None = None) -> dict[str, float]:
        """Metrics, after so many accepted samples, of the parameters loaded last."""
        if self.measure is None:
            return {}
        self._enter()
        metrics = self.measure(samples)
        self._leave()
        return metrics

    def take_module(self) -> Any:
        """The module, holding the parameters loaded last and this worker's buffers."""
        self._enter()
        return self.model.module

    @torch.no_grad()
    def _enter(self) -> None:
        for shard, wire_buffer in enumerate(self._pulled):
            if wire_buffer is not None:
                self.model.install(shard, wire_buffer)
        for buffer, own in self._buffer_pairs():
            buffer.copy_(own)

    @torch.no_grad()
    def _leave(self) -> None:
        if self.shared and self.local is not None:
            for shard, now in enumerate(self.model.current()):
                self._own(shard).body.copy_(now.body)
        for buffer, own in self._buffer_pairs():
            own.copy_(buffer)

    def _buffer_pairs(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """(the module's, this replica's own) where others use the module in between."""
        return zip(self.model.module.buffers(), self._buffers, strict=True) if self.shared else ()

    def _own_buffers(self) -> Iterable[torch.Tensor]:
        return self._buffers if self.shared else self.model.module.buffers()

    def state(self) -> dict[str, Any]:
        """Buffers (BatchNorm's and the like), what the local optimizer remembers, and parameters where they are this
        worker's own; tensors are copies."""
        own = {}
        if self.owns_parameters:
            own["parameters"] = self._own_parameters() if self._kept is None else self._kept
        return {
            "buffers": [buffer.detach().clone() for buffer in self._own_buffers()],
            "local": copied(self.local.state()) if self.local else None,
            "coder": self.coder.state() if self.coder else None,
            "remote": copied(self.server_steps.state()) if self.server_steps else None,
            **own,
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; what the coder had kept is dealt out by whoever knows all workers."""
        self.restore_buffers(state)
        if self.local is not None and state["local"] is not None:
            self.local.restore(state["local"])
        if self.owns_parameters and "parameters" in state:
            layout = self.model.layout
            sizes = [layout.size(shard) for shard in range(layout.num_shards)]
            self._resumed = dict(enumerate(state["parameters"].split(sizes)))
        if self.server_steps is not None:
            self.server_steps.restore(state.get("remote"))

    @torch.no_grad()
    def restore_buffers(self, state: dict[str, Any]) -> None:
        """Take the buffers of what `state` returned."""
        for buffer, saved in zip(self._own_buffers(), state["buffers"], strict=True):
            buffer.copy_(saved)
