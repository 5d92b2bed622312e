"""A peer's replica: its parameters as one flat vector, its own optimizer, and what it sends and receives.

Invariants: `x` is the peer's parameters, and nothing but the methods below changes it; replicas that take in the
same messages in the same order hold the same bits. An encoder works on updates with its residual (full topology), or
on x - xhat without one, for there what was not sent stays in the difference by itself (ChocoSGD). Several virtual
peers may share one module: each then has its own x, optimizer and buffers.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from mpitrain.codecs import Encoder, Part, add_message
from mpitrain.errors import UsageError
from mpitrain.messages import Lease
from mpitrain.model.copies import copied
from mpitrain.model.gradient.accumulation import LeaseReader
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.optimizers.step_hooks import OwnStep
from mpitrain.model.pieces import PIECE_BYTES, cut
from mpitrain.model.recipe import Recipe
from mpitrain.model.replicas.worker_replica import Gradient
from mpitrain.model.wire.buffers import BufferPool, FixedBuffer, VariableBuffer
from mpitrain.model.wire.codec_registry import check_optimizer, make_encoder, make_layout_of
from mpitrain.model.wire.flat import FlatModel, all_finite
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.sampling.peer_partition import Turn
from mpitrain.system import trace


class PeerReplica:
    """One peer's model and data.

    Args:
        model: the flat model, of one shard; optimizer: over its parameters, this peer's own.
        strategy: what is sent; rank: this peer's; recipe: how its batches become its updates.
        reader: of the training data; measure, shared: as for `Replica`.

    Raises:
        UsageError: a codec for parameters of float64, or that has a momentum beside the optimizer's.
    """

    def __init__(
        self,
        model: FlatModel,
        optimizer: Optimizer,
        strategy: Decentralized,
        rank: int,
        recipe: Recipe,
        reader: LeaseReader,
        measure: Callable[[int | None], dict[str, float]] | None = None,
        shared: bool = False,
    ):
        self.model, self.optimizer, self.strategy, self.rank = model, optimizer, strategy, rank
        self.own_gradients, self.reader, self.measure, self.shared = (
            recipe.gradient.begin(rank),
            reader,
            measure,
            shared,
        )
        self._rates = Rates(optimizer)
        self.updates = recipe.update.begin(self._rates, lambda: [self.x])
        self._own_step = OwnStep(optimizer)  # `wrap` lets the user's optimizer step the peers from here on
        self.encoder = self._make_encoder()
        layout = model.layout
        self._layout = make_layout_of(zip(layout.names, layout.shapes, strict=True))
        self.x = model.wire_buffers[0].body.clone() if shared else model.wire_buffers[0].body
        self._pool = BufferPool(layout.size(0), layout.dtype)
        self._updates = self._pool
        if layout.wire_dtype != layout.dtype and recipe.update.law.num_workers > 1:  # or nothing travels
            self._updates = BufferPool(layout.size(0), layout.wire_dtype)
        self._delta = torch.zeros_like(self.x)
        self._common = self.x.clone() if strategy.mixes else None  # what all held last
        self._copies: dict[int, torch.Tensor] = {}
        buffers = list(model.module.buffers())
        self._module_buffers = buffers if shared else []
        self._buffers = [buffer.clone() for buffer in buffers] if shared else buffers
        self.num_messages, self.codec_s, self._kept = 0, 0.0, 0.0
        trace.watch(self, _move=("optimizer", trace.OPTIMIZER))
        if self.encoder is not None:
            trace.watch(self, update=("encode", trace.CODEC), _take=("decode", trace.CODEC))

    def _make_encoder(self) -> Encoder | None:
        codec, dtype = self.strategy.codec, self.model.layout.dtype
        if codec.is_none:
            return None
        check_optimizer(codec, self.optimizer)
        if dtype != torch.float32:
            raise UsageError(f"{codec}: a codec takes parameters of float32 or 16 bits, these are {dtype}")
        return make_encoder(codec, self.updates.rule.law.num_workers, self.rank, self.own_gradients.rule.seed)

    def prefetch(self, lease: Lease) -> None:
        """Start reading the batch."""
        self.reader.announce(lease)

    def step(self, turn: Turn) -> Gradient:
        """Forward, backward and one step of the peer's optimizer; nothing moves where the gradient is not finite."""
        lease = turn.lease
        assert lease is not None
        self._enter()
        mean = self.own_gradients.backward(self.model, self.reader, lease, turn.step, turn.weight)
        self.updates.follow(turn.samples_before, turn.num_active)
        gradient = self.collect(mean.value, lease.num_samples)
        self._leave()
        return gradient

    def collect(self, loss: float, num_samples: int) -> Gradient:
        """One step of the peer's optimizer with the gradients that backward left on the parameters."""
        finite = loss - loss == 0.0 and all_finite(self.model.gradients())
        self._move(finite)
        return Gradient(loss, num_samples, finite, num_samples)

    @torch.no_grad()
    def _move(self, finite: bool) -> None:
        """The optimizer's step: on x in gossip, into the update otherwise."""
        now = self.model.wire_buffers[0].body
        if not self.strategy.mixes:
            self._delta.copy_(now)
        if finite:
            with self.model.stepping():
                self._own_step()
            self.model.refresh()
        if not self.strategy.mixes:
            for piece in cut([now], PIECE_BYTES):
                (delta,), (x,) = piece.of([self._delta]), piece.of([now])
                before = delta.clone()
                delta.sub_(x)
                x.copy_(before)  # which changes by what is sent of the step, not by the step

    @torch.no_grad()
    def update(self) -> FixedBuffer | VariableBuffer:
        """What is sent to the others of the step."""
        if self.encoder is None:
            wire_buffer = self._updates.take()
            wire_buffer.body.copy_(self.x if self.strategy.mixes else self._delta)
            return wire_buffer
        began_s = time.perf_counter()
        sent = self._delta
        if self.strategy.mixes:
            sent = self.x - self._copy_of(self.rank)
            if self.encoder.residual:
                self.encoder.memory.clear(self.encoder.residual)
        message = self.encoder.encode([Part(sent, self._layout)])
        self.num_messages += 1
        self.codec_s += time.perf_counter() - began_s
        return VariableBuffer(message)

    @torch.no_grad()
    def apply(self, payload: object, num_peers: int) -> None:
        """x <- x - q / num_peers."""
        self._take(payload, self.x, -1.0 / num_peers)

    @torch.no_grad()
    def copy(self, source: int, payload: Any) -> None:
        """xhat <- xhat + q; without a codec, the parameters themselves."""
        if self.encoder is None:
            self._copy_of(source).copy_(payload.body)
            payload.release()
        else:
            self._take(payload, self._copy_of(source), 1.0)

    def _take(self, payload: Any, into: torch.Tensor, weight: float) -> None:
        began_s = time.perf_counter()
        if self.encoder is None:
            into.add_(payload.body, alpha=weight)
        else:
            add_message(payload.body, [Part(into, self._layout)], weight)
        self.codec_s += time.perf_counter() - began_s
        payload.release()

    def _copy_of(self, source: int) -> torch.Tensor:
        assert self._common is not None, "updates are applied, not copied"
        if source not in self._copies:
            self._copies[source] = self._common.clone()
        return self._copies[source]

    @torch.no_grad()
    def mix(self, rank: int, weights: dict[int, float], rate: float) -> None:
        """x <- x + rate * sum over j of w_j (xhat_j - xhat)."""
        own = self._copy_of(rank)
        for other, weight in sorted(weights.items()):
            if other != rank:
                theirs = self._copy_of(other)
                for piece in cut([self.x], PIECE_BYTES):
                    (x,), (one,), (another,) = piece.of([self.x]), piece.of([theirs]), piece.of([own])
                    x.add_(one - another, alpha=rate * weight)

    # ---- a meeting

    @torch.no_grad()
    def total(self) -> FixedBuffer:
        """x, in a wire buffer of its own."""
        wire_buffer = self._pool.take()
        wire_buffer.body.copy_(self.x)
        return wire_buffer

    @torch.no_grad()
    def add(self, total: Any, other: Any) -> Any:
        """total <- total + other."""
        total.body.add_(other.body)
        other.release()
        return total

    @torch.no_grad()
    def divide(self, total: Any, count: int) -> Any:
        """total <- total / count."""
        total.body.div_(count)
        return total

    @torch.no_grad()
    def settle_mean(self, mean: Any) -> float:
        """x <- mean; everybody's copy of everybody is the mean too. Returns |x - mean| / |mean|."""
        if self._common is not None and self.encoder is not None:
            self._kept = self._distance(self._copy_of(self.rank))
        apart, size = self._distance(mean.body), float(mean.body.norm())
        self.x.copy_(mean.body)
        if self._common is not None:
            self._common.copy_(self.x)
            self._copies.clear()
        mean.release()
        return apart / size if size else apart

    def _distance(self, other: torch.Tensor) -> float:
        """|x - other|."""
        pieces = [(*piece.of([self.x]), *piece.of([other])) for piece in cut([self.x], PIECE_BYTES)]
        return math.hypot(*(float((one - another).norm()) for one, another in pieces))

    def digest(self) -> str:
        """16 hexadecimal digits of the bits of x."""
        return hashlib.blake2b(self.x.numpy().data, digest_size=8).hexdigest()

    # ---- arriving wire buffers, metrics, state

    def buffer_for(self, is_update: bool) -> FixedBuffer | VariableBuffer:
        """Where a payload is to be received."""
        if is_update and self.encoder is not None:
            return VariableBuffer()
        return (self._updates if is_update else self._pool).take()

    def validate(self, samples: int | None = None) -> dict[str, float]:
        """Metrics, after so many accepted samples, of this peer's own parameters."""
        if self.measure is None:
            return {}
        self._enter()
        metrics = self.measure(samples)
        self._leave(moved=False)
        return metrics

    def take_module(self) -> Any:
        """The module, holding x and this peer's buffers."""
        self._enter()
        return self.model.module

    def end_step(self) -> None:
        """A step is over, with what others have sent taken in: the moving average follows."""
        self.updates.moved()

    def hear_figures(self, text: str) -> None:
        """Validations have given figures, which the rates may follow."""
        self.updates.pace.hear_figures(text)

    def show(self) -> None:
        """Make the parameters x, where they do not live in it."""
        self.model.install(0)

    def statistics(self, with_norm: bool = False) -> dict[str, float]:
        """Of the last message: density, bytes, tau where there is one; `codec_ms` a message, coding and decoding; the
        norm of what is kept back, which costs a pass (in gossip, |x - xhat| at the last meeting)."""
        if self.encoder is None:
            return {}
        found = self.encoder.statistics() | {"codec_ms": 1e3 * self.codec_s / max(1, self.num_messages)}
        if with_norm:
            found["residual_norm"] = self._kept if self.strategy.mixes else self.encoder.residual_norm()
        return found

    @torch.no_grad()
    def _enter(self) -> None:
        if self.shared:
            self.model.wire_buffers[0].body.copy_(self.x)
        self.model.install(0)
        for buffer, own in zip(self._module_buffers, self._buffers):
            buffer.copy_(own)

    @torch.no_grad()
    def _leave(self, moved: bool = True) -> None:
        if self.shared and moved:
            self.x.copy_(self.model.wire_buffers[0].body)
        for buffer, own in zip(self._module_buffers, self._buffers):
            own.copy_(buffer)

    def state(self) -> dict[str, Any]:
        """Parameters, optimizer state, residual, buffers, and in gossip the copies of others; all copied."""
        optimizer = copied(self._rates.state())
        encoder = self.encoder.state() if self.encoder is not None else {}
        copies = {str(source): copied(copy) for source, copy in self._copies.items()}
        return {
            "parameters": copied(self.x), "optimizer": optimizer, "encoder": encoder, "copies": copies,
            "common": copied(self.x if self._common is None else self._common),
            "buffers": [buffer.detach().clone() for buffer in self._buffers],
            "ema": self.updates.ema.state() if self.updates.ema else [],
        }  # fmt: skip

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.x.copy_(state["parameters"])
        self.show()
        with self.model.stepping():
            self._rates.restore(state["optimizer"])
        if self.updates.ema is not None:
            self.updates.ema.restore(state.get("ema"))
        for buffer, saved in zip(self._buffers, state["buffers"], strict=True):
            buffer.copy_(saved)
        if self.encoder is not None and state["encoder"]:
            self.encoder.restore(state["encoder"])
        if self._common is not None:
            self._common.copy_(state["common"])
            copies = state["copies"].items()
            self._copies = {int(source): copy.to(self.x.device, copy=True) for source, copy in copies}
