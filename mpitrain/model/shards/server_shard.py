"""A server's shard: a slice of the flat vector with the optimizer state that belongs to it.

Invariants: whoever was given a version keeps exactly that version. The live wire buffer is sent without
copying; when an update comes while somebody still holds it, the update goes into a fresh wire buffer and the old
one stays as it was (copy on write). Gradients are used where they arrived. A weight scales the learning rate of
its gradient, weight decay included, so where training comes to rest depends on no weight:

    SGD                  d = c (g + decay w),  momentum sums up d:  older gradients keep the weights they had
    any other optimizer  its step for g, times c:  scaling g would nearly cancel
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mpitrain.embedding.shard import TableShard
from mpitrain.errors import UsageError
from mpitrain.messages import NOT_SENT
from mpitrain.model.copies import copied
from mpitrain.model.optimizers.group_options import FollowedOptions
from mpitrain.model.optimizers.optimizer import Rates, check_elementwise, coupled_decays, rebuild, scaled
from mpitrain.model.optimizers.several_optimizers import SeveralOptimizers
from mpitrain.model.optimizers.step_hooks import ServerStep
from mpitrain.model.recipe import UpdateRule
from mpitrain.model.wire.buffers import BufferPool, FixedBuffer, VariableBuffer, wire_dtype
from mpitrain.model.wire.flat import Layout
from mpitrain.model.wire.masters import widened
from mpitrain.model.wire.push_codec import PushDecoder
from mpitrain.model.wire.reply_codec import ReplyCoder
from mpitrain.strategies.base import ServerStrategy
from mpitrain.strategies.parameter_server.asynchronous import Async
from mpitrain.strategies.schedules import Pace


class ShardStore:
    """One shard.

    Args:
        layout: of the whole vector; shard: which part of it.
        initial: 1-D tensor of the shard's first parameters; copied.
        prototype: the user's optimizer; its class and group options are used, its own parameters are not
            touched.
        strategy: its wires and codecs; where its damping corrects gradients elementwise, what each worker read is kept.
        rule: how gradients become updates; pace: what the rates follow, where the prototype is not the job's optimizer.
        tables: whose rows the same optimizer updates (`TabledStore`).
    """

    def __init__(
        self,
        layout: Layout,
        shard: int,
        initial: torch.Tensor,
        prototype: Optimizer,
        strategy: ServerStrategy = Async(),  # noqa: B008 - frozen
        rule: UpdateRule = UpdateRule(),  # noqa: B008 - frozen
        pace: Pace | None = None,
        tables: Sequence[TableShard] = (),
    ):
        check_elementwise(prototype)
        self._pieces = layout.pieces(shard)
        self.pool = BufferPool(layout.size(shard), layout.dtype)
        self.arrivals = self._pool_for(wire_dtype(strategy.push_numbers, layout.wire_dtype))
        self._replies = self._pool_for(wire_dtype(strategy.reply_numbers, layout.wire_dtype))
        self._finals = self._pool_for(layout.wire_dtype)
        self._decoder = None if strategy.push_codec.is_none else PushDecoder(layout, shard)
        codec = strategy.reply_codec
        self._coder = None if codec.is_none else ReplyCoder(layout, shard, codec)
        self._reply: FixedBuffer | None = (
            None  # the present version as it is sent, once somebody has asked for it
        )
        self.live = self.pool.take()
        self.live.body.copy_(initial)
        self._slices = [(start, stop) for _, start, stop in layout.group_slices(shard)]
        self._parameters = [nn.Parameter(self.live.body[start:stop]) for start, stop in self._slices]
        self.tables = tables
        groups = [*[group for group, _, _ in layout.group_slices(shard)], *[one.group for one in tables]]
        parameters = [*self._parameters, *[one.parameter for one in tables]]
        self.optimizer = rebuild(prototype, list(zip(groups, parameters, strict=True)))
        self._step = ServerStep(self.optimizer)
        self._rates = Rates(self.optimizer, groups)
        self._options = FollowedOptions(self.optimizer, groups)
        self.updates = rule.begin(self._rates, lambda: [self.live.body], pace or rule.pace(Rates(prototype)))
        self._steps_workers = strategy.optimizer == "worker"  # whose rates are theirs
        self._shard, self._at = shard, (0, 1)  # samples and workers before the update to come
        self.correction = strategy.damping.make_correction()
        self._reads: dict[
            int, deque[FixedBuffer]
        ] = {}  # for a correction: what each worker read, the oldest first
        self._gathered: FixedBuffer | None = None
        self._own_weight = 1.0  # of what is gathered, which it has not met yet
        self._weights: list[float] = []  # of what is gathered, times its share
        self._shares: list[float] = []
        self._unit = 1.0
        self._mean_rate: float | None = None  # what is gathered is a mean already, for a step at this rate

    def begin_with(self, states: list[dict[str, Any]]) -> None:
        """Start from this state of the optimizer, one a slice of the shard; empty where there is none."""
        for parameter, state in zip(self._parameters, states, strict=True):
            if state and isinstance(self.optimizer, SeveralOptimizers):
                self.optimizer.begin_with(parameter, widened(state))
            elif state:
                self.optimizer.state[parameter] = widened(state)

    def _pool_for(self, dtype: torch.dtype) -> BufferPool:
        return self.pool if dtype == self.pool.dtype else BufferPool(self.pool.numel, dtype)

    def wire_buffer(self) -> FixedBuffer | VariableBuffer:
        """An empty wire buffer for an arriving gradient."""
        return self._decoder.wire_buffer() if self._decoder else self.arrivals.take()

    def _widen(self, payload: FixedBuffer | VariableBuffer) -> FixedBuffer:
        """16 bits or a message on the wire, full sums."""
        if isinstance(payload, VariableBuffer):
            assert self._decoder is not None, "a coded push, and no codec"
            wide = self.pool.take()
            self._decoder.add(payload, wide.body.zero_())
            return wide
        if payload.body.dtype == self.pool.dtype:
            return payload
        wide = self.pool.take()
        wide.body.copy_(payload.body)
        payload.release()
        return wide

    def correct(self, worker: int, payload: FixedBuffer | VariableBuffer, num_reads: int) -> FixedBuffer:
        """The gradient as the damping corrects it for what has changed since `worker` read what it was computed on: the
        oldest of its newest `num_reads` reads. Takes the wire buffer over. Called on arrival: the parameters stay as
        they are until the update that takes it, but the worker may read again."""
        payload, reads = self._widen(payload), self._reads.get(worker, deque())
        while len(reads) > num_reads:
            reads.popleft().release()
        if self.correction and self.correction.scales:
            for decay, (start, stop) in zip(coupled_decays(self.optimizer), self._slices, strict=True):
                payload.body[start:stop].add_(self.live.body[start:stop], alpha=decay)
        if self.correction and reads and reads[0] is not self.live:
            self.correction.apply(payload.body, self.live.body, reads[0].body)
        return payload

    def mask(self, payload: FixedBuffer | VariableBuffer, spans: list[tuple[int, int]]) -> FixedBuffer:
        """The gradient with zeros in `spans`, [start, end) of the shard; takes the wire buffer over."""
        payload = self._widen(payload)
        for start, end in spans:
            payload.body[start:end].zero_()
        return payload

    def hear_options(self, text: str) -> None:
        """The options that came with the gradient to be gathered next; of several optimizers, whose gradient it is.

        Raises:
            UsageError: workers have stepped different ones at the same time.
        """
        if not isinstance(self.optimizer, SeveralOptimizers):
            self._options.hear_options(text)
            return
        if self.optimizer.turn not in (None, text):
            one, other = (f"steps {name!r}" if name else "ends" for name in (self.optimizer.turn, text))
            raise UsageError(
                f"Job: the step function {one} on one worker where it {other} on another: under servers all workers "
                'take the same steps with every batch; use optimizer="worker", under which each takes its own'
            )
        self.optimizer.turn = text

    @property
    def follows_options(self) -> bool:
        """Whether workers have changed options of the optimizer: what changes them further only they know."""
        return self._options.heard

    def add(self, worker: int, payload: Any, weight: float, share: float = 1.0) -> None:
        """Gather `weight * share * gradient`; takes the buffer over and releases it when it is done with it. A gradient
        that is in another one's sum (`NOT_SENT`) only counts. Shares are counted in the first one's, so equal ones
        change no bit."""
        self._unit = self._unit if self._shares else share or 1.0
        self._shares.append(share / self._unit)
        weight *= self._shares[-1]
        self._weights.append(weight)
        if payload is NOT_SENT:
            return
        if self._gathered is None:
            self._gathered, self._own_weight = self._widen(payload), weight
            return
        if self._own_weight != 1.0:
            self._gathered.body.mul_(self._own_weight)
            self._own_weight = 1.0
        if isinstance(payload, VariableBuffer) and self._decoder is not None and weight == 1.0:
            self._decoder.add(payload, self._gathered.body)
            return
        payload = self._widen(payload)
        self._gathered.body.add_(payload.body, alpha=weight)
        payload.release()

    def mean_squares(self) -> float:
        """Make what was gathered the mean that `apply` uses; returns the sum of its squares."""
        assert self._gathered is not None, "the mean of no gradient"
        rate = self._mean_rate = self._to_mean()
        scale = self._scale_of(rate)
        norms = torch._foreach_norm(self._by_parameter(self._gathered.body))
        return sum(float(norm) ** 2 for norm in norms) / scale**2 if scale else 0.0

    def apply(self, norm: float | None = None) -> None:
        """One optimizer step with the mean of what was gathered: sum(weight * share * gradient) / sum(share). `norm`:
        of the whole gradient, of which this shard's is a part."""
        gathered, before = self._gathered, self.live.hold()
        assert gathered is not None, "apply without a gradient"
        watching = self.correction is not None and self.correction.watches_updates
        if self.live.users > 2 or watching:
            self._move_to(self.pool.take())
        self.live.rewrite(num_holders=2)
        self._options.apply(len(self._weights))
        if not self._steps_workers:  # the job's own schedule has the last word, as it has without servers
            self.updates.follow(*self._at, self._shard)
        rate, decay = self._scale(gathered.body, norm)
        for parameter, (start, stop) in zip(self._parameters, self._slices, strict=True):
            parameter.grad = gathered.body[start:stop]
        try:
            with self._tables_in_place(), scaled(self.optimizer, rate, decay):
                self._step()
        finally:
            for parameter in self._parameters:
                parameter.grad = None
        if self.correction and watching:
            self.correction.on_update(before.body, self.live.body)
        before.release()
        gathered.release()
        if self._reply is not None:
            self._reply.release()
            self._reply = None
        if not self._ends_turn():
            self.updates.moved()
        self._gathered = self._mean_rate = None
        self._weights.clear()
        self._shares.clear()

    def _ends_turn(self) -> bool:
        """Whether it was that of one of several optimizers, within a batch whose last push steps none."""
        optimizer = self.optimizer
        if not isinstance(optimizer, SeveralOptimizers):
            return False
        turn, optimizer.turn = optimizer.turn, None
        return bool(turn)

    @property
    def _is_proportional(self) -> bool:
        """Whether a step is proportional to its gradient."""
        return isinstance(self.optimizer, torch.optim.SGD)

    def _scale_of(self, rate: float) -> float:
        """By how much a gradient is multiplied that is to be used at `rate` times the learning rate."""
        return rate if self._is_proportional else 1.0

    def _by_parameter(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        return [gradient[at : at + stop - start] for _, start, stop, at in self._pieces]

    def _sums(self) -> list[torch.Tensor]:
        """What has been gathered, in any number of tensors."""
        assert self._gathered is not None, "the sum of no gradient"
        return [self._gathered.body]

    def _tables_in_place(self) -> contextlib.AbstractContextManager[None]:
        """For as long as the optimizer steps its parameters of tables are the rows that were touched."""
        return contextlib.nullcontext()

    def _to_mean(self) -> float:
        """Make the gathered sum the mean, multiplied as `_scale_of` says; returns the factor on the rate."""
        total, shares = sum(self._weights), sum(self._shares)
        if not total:  # no sample of any of them counts
            factor = 0.0
        else:
            factor = self._own_weight / (shares if self._is_proportional else total)
        for one in self._sums() if factor != 1.0 else ():
            one.mul_(factor)
        return total / shares if shares else 1.0

    def _scale(self, gradient: torch.Tensor, norm: float | None) -> tuple[float, float]:
        """Make the gathered sum what the optimizer is to see; returns the factors on its learning rate and its weight
        decay. `norm`: as for `apply`."""
        rate = self._to_mean() if self._mean_rate is None else self._mean_rate
        scale = self._scale_of(rate)
        total = None if norm is None else torch.tensor(norm * scale, dtype=torch.float64)
        self.updates.shape(lambda: self._by_parameter(gradient), scale, total)
        if self.correction and self.correction.scales:  # decay is in the gradient, scaled with it
            return (1.0 if self._is_proportional else rate), 0.0
        return (1.0, rate) if self._is_proportional else (rate, 1.0)

    def _move_to(self, fresh: FixedBuffer) -> None:
        fresh.body.copy_(self.live.body)
        for parameter, (start, stop) in zip(self._parameters, self._slices, strict=True):
            parameter.data = fresh.body[start:stop]
        self.live.release()
        self.live = fresh

    def follow(self, samples: int, num_workers: int) -> None:
        """The update to come is the one after so many accepted samples, with so many workers."""
        self._at = samples, num_workers

    def statistics(self) -> dict[str, float]:
        """What the codecs cost here, in milliseconds a message."""
        found = self._decoder.statistics() if self._decoder else {}
        return found | (self._coder.statistics() if self._coder else {})

    def average(self) -> FixedBuffer:
        """The moving average of the shard, a copy; asked where the job keeps one."""
        assert self.updates.ema is not None, "no average is kept"
        copy = self.pool.take()
        copy.body.copy_(self.updates.ema.values()[0])
        return copy

    def read(self, worker: int, full: bool = False, uses: int = 1) -> FixedBuffer | VariableBuffer:
        """The present parameters, rounded for the wire, or only to the model's own dtype where `full`; held for the
        caller, who releases them. So many pushes of the worker will be computed on them, none where it is `full`."""
        if full:
            return self.live.hold() if self._finals is self.pool else self._rounded(self._finals)
        if self._coder is not None:
            message = self._coder.encode(worker, self.live.body)
            if self.correction:
                copy = self.pool.take()
                copy.body.copy_(self._coder.held(worker))
                self._remember(worker, copy, uses)
                copy.release()
            return message
        if self.correction:
            self._remember(worker, self.live, uses)
        if self._replies is self.pool:
            return self.live.hold()
        if self._reply is None:
            self._reply = self._rounded(self._replies)
        return self._reply.hold()

    def _rounded(self, pool: BufferPool) -> FixedBuffer:
        copy = pool.take()
        copy.body.copy_(self.live.body)
        return copy

    def _remember(self, worker: int, read: FixedBuffer, uses: int) -> None:
        self._reads.setdefault(worker, deque()).extend(read.hold() for _ in range(uses))

    def state(self) -> dict[str, Any]:
        """Parameters, optimizer state and the correction's memory as the last update left them; tensors are copies."""
        optimizer = copied(self._rates.state())
        correction = self.correction.state() if self.correction else {}
        replies: dict[str, Any] = (
            {"replies": {"codec": self._coder.codec.name, **self._coder.state()}} if self._coder else {}
        )
        if self.updates.ema is not None:
            replies["ema"] = self.updates.ema.state()
        return {
            "parameters": copied(self.live.body), "optimizer": optimizer, "correction": correction, **replies,
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; workers read anew."""
        for read in (read for reads in self._reads.values() for read in reads):
            read.release()
        self._reads.clear()
        if self.live.users > 1:
            self._move_to(self.pool.take())
        self.live.rewrite()
        self.live.body.copy_(state["parameters"])
        self._rates.restore(state["optimizer"])
        if self.updates.ema is not None:
            self.updates.ema.restore(state.get("ema"))
        if self.correction and state["correction"]:
            self.correction.restore(state["correction"])
        if self._coder is not None:
            replies = state.get("replies", {})
            # another codec's say nothing here: all workers are sent the parameters in full
            if replies.get("codec") != self._coder.codec.name:
                replies = {"copies": {}, "encoders": {}}
            self._coder.restore(replies)
