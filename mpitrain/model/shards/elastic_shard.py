"""A server's shard of the centre of elastic averaging.

    d = a (x_i - xc)        xc <- xc + d        answered with d: the worker takes x_i <- x_i - d

Invariants: d is made once and used on both sides, so xc + sum over i of x_i is conserved (to the bit on
dyadic numbers). Zhang, Choromanska and LeCun, NIPS 2015; `strategies/parameter_server/elastic.py` holds the formulas.
"""

from __future__ import annotations

from typing import Any

import torch

from mpitrain.model.copies import copied
from mpitrain.model.recipe import UpdateRule
from mpitrain.model.wire.buffers import BufferPool, FixedBuffer, wire_dtype
from mpitrain.model.wire.flat import Layout
from mpitrain.strategies.parameter_server.elastic import Elastic
from mpitrain.strategies.schedules import Pace


class ElasticStore:
    """One shard of the centre.

    Args:
        layout: of the whole vector; shard: which part of it.
        initial: 1-D tensor of the shard's first parameters; copied.
        share: a, by which both sides close the difference.
        strategy: its wires; what both sides use is d as it travels.
        rule: of updates, of which there is the moving average here; pace: what rates follow on the workers.
    """

    correction = None
    follows_options = False

    def __init__(
        self,
        layout: Layout,
        shard: int,
        initial: torch.Tensor,
        share: float,
        strategy: Elastic = Elastic(),  # noqa: B008 - frozen
        rule: UpdateRule = UpdateRule(),  # noqa: B008 - frozen
        pace: Pace | None = None,
    ):
        self.share = share
        self.pool = BufferPool(layout.size(shard), layout.dtype)
        self.arrivals = BufferPool(self.pool.numel, wire_dtype(strategy.push_numbers, layout.wire_dtype))
        self._replies = BufferPool(self.pool.numel, wire_dtype(strategy.reply_numbers, layout.wire_dtype))
        self._finals = BufferPool(self.pool.numel, layout.wire_dtype)
        self.centre = self.pool.take()
        self.centre.body.copy_(initial)
        self.updates = rule.begin(None, lambda: [self.centre.body], pace)
        self._gathered: list[tuple[int, FixedBuffer]] = []
        self._answers: dict[int, FixedBuffer] = {}

    def wire_buffer(self) -> FixedBuffer:
        """An empty wire buffer for arriving parameters."""
        return self.arrivals.take()

    def hear_options(self, text: str) -> None:
        """Workers hold the optimizers."""

    def correct(self, worker: int, payload: object, num_reads: int) -> Any:
        """Nothing to correct: parameters are exchanged."""
        return payload

    def mask(self, payload: object, spans: list[tuple[int, int]]) -> Any:
        """All of it: an exchange may be made again."""
        return payload

    def add(self, worker: int, payload: Any, weight: float, share: float = 1.0) -> None:
        """Take one worker's parameters; the exchange itself is `apply`."""
        self._gathered.append((worker, payload))

    def apply(self) -> None:
        """Make the difference of every exchange gathered, and move the centre by it."""
        if self.centre.users > 1:  # somebody is still being sent the centre as it was
            fresh = self.pool.take()
            fresh.body.copy_(self.centre.body)
            self.centre.release()
            self.centre = fresh
        self.centre.rewrite()
        for worker, payload in self._gathered:
            difference = self._replies.take()
            difference.body.copy_((payload.body.to(self.pool.dtype) - self.centre.body).mul_(self.share))
            self.centre.body.add_(difference.body)
            self._answers[worker] = difference
            payload.release()
        self._gathered.clear()
        self.updates.moved()

    def follow(self, samples: int, num_workers: int) -> None:
        """Workers hold the rates."""

    def statistics(self) -> dict[str, float]:
        """Empty: no codecs here."""
        return {}

    def average(self) -> FixedBuffer:
        """The moving average of the shard, a copy; asked where the job keeps one."""
        assert self.updates.ema is not None, "no average is kept"
        copy = self.pool.take()
        copy.body.copy_(self.updates.ema.values()[0])
        return copy

    def read(self, worker: int, full: bool = False, uses: int = 1) -> FixedBuffer:
        """The difference that answers `worker`'s push, or else the centre (in the model's own dtype where `full`)."""
        if worker in self._answers and not full:
            return self._answers.pop(worker)
        pool = self._finals if full else self._replies
        if pool.dtype == self.pool.dtype:
            return self.centre.hold()
        reply = pool.take()
        reply.body.copy_(self.centre.body)
        return reply

    def state(self) -> dict[str, Any]:
        """The centre; a copy."""
        assert not self._gathered, "state is taken between exchanges"
        ema = {"ema": self.updates.ema.state()} if self.updates.ema is not None else {}
        return {"parameters": copied(self.centre.body), **ema}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; workers read anew."""
        self._answers.clear()
        if self.centre.users > 1:
            self.centre.release()
            self.centre = self.pool.take()
        self.centre.rewrite()
        self.centre.body.copy_(state["parameters"])
        if self.updates.ema is not None:
            self.updates.ema.restore(state.get("ema"))
