"""Steps of ranks that hold parts of a model, by their cost: stages of a pipeline, slices of layers, shards.

Invariants: as `lockstep.py`. A rank's time for a batch is what one device would take for the whole model; a part takes
its share of it. Where all stages take equally long and messages no time, the idle share of a pipeline is
(S - 1) / (M + S - 1) exactly, in both schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.virtual.lockstep import FORWARD_SHARE, Times

Op = tuple[bool, int]  # (forward, number of the microbatch)


class Unit(NamedTuple):
    """Layers whose parameters are gathered together.

    Args:
        share: of the time of a batch; gather_s: seconds of gathering its parameters; reduce_s: of reducing and
            scattering its gradients; stays: it is gathered once a step only, as FSDP2's outermost unit is.
    """

    share: float
    gather_s: float
    reduce_s: float
    stays: bool = False


class ShardedSteps:
    """FSDP2: parameters are gathered before a unit computes and again before it goes backward, gradients are reduced
    and scattered behind it. Collectives follow one another; in the backward pass the next unit's parameters are
    gathered while one computes.

    Args:
        units: in the order of the forward pass; together they have the whole time of a batch.
        added_s: seconds of collectives of every batch within the layers, for which everybody waits.
    """

    def __init__(self, units: Sequence[Unit], added_s: float = 0.0, forward_share: float = FORWARD_SHARE):
        self.units, self.added_s, self.forward_share = units, added_s, forward_share

    def end_s(self, began_s: Times, before_s: Times, last_s: Times) -> float:
        """As of a `Schedule`. Batches before the last one are computed with the same gathering."""
        ready_s = began_s
        if before_s.any():
            ready_s = np.full_like(began_s, self._pass(began_s, before_s, reduces=False))
        return self._pass(ready_s, last_s, reduces=True)

    def _pass(self, began_s: Times, took_s: Times, reduces: bool) -> float:
        """Forward and backward over one batch."""
        now_s = began_s.copy()
        free_s = -np.inf  # when the last collective ends
        for unit in self.units:
            free_s = max(free_s, float(now_s.max())) + unit.gather_s
            now_s = np.maximum(now_s, free_s) + took_s * (unit.share * self.forward_share)
        now_s += self.added_s
        gathered_s = float(now_s.max()) if self.units else -np.inf
        for index in reversed(range(len(self.units))):
            unit = self.units[index]
            if index == len(self.units) - 1 and not unit.stays:
                free_s = gathered_s = max(free_s, gathered_s) + unit.gather_s
            now_s = np.maximum(now_s, gathered_s)
            if index and not self.units[index - 1].stays:
                free_s = gathered_s = max(free_s, float(now_s.max())) + self.units[index - 1].gather_s
            now_s = now_s + took_s * (unit.share * (1.0 - self.forward_share))
            if reduces:
                free_s = max(free_s, float(now_s.max())) + unit.reduce_s
        return max(free_s, float(now_s.max()))


class PipelineSteps:
    """Pipelines side by side, whose stages average their gradients at the end.

    Args:
        ranks: of every pipeline, by stage; shares: of the time of a batch, by stage.
        microbatches: pieces of a batch; schedule: "1f1b" or "gpipe".
        message_s: seconds from each stage but the last one to the next, for a piece; the same back.
        average_s: of averaging the gradients of a stage over the pipelines.
    """

    def __init__(
        self, ranks: Sequence[Sequence[int]], shares: Sequence[float], microbatches: int, schedule: str,
        message_s: Sequence[float], average_s: Sequence[float], forward_share: float = FORWARD_SHARE,
    ):  # fmt: skip
        self.ranks, self.shares, self.microbatches, self.schedule = ranks, shares, microbatches, schedule
        self.message_s, self.average_s, self.forward_share = message_s, average_s, forward_share

    def end_s(self, began_s: Times, before_s: Times, last_s: Times) -> float:
        """As of a `Schedule`; a pipeline accumulates by its microbatches only."""
        took_s = before_s + last_s
        ends = np.array([self._pipeline(row, began_s, took_s) for row in self.ranks])
        return float((ends.max(axis=0) + np.array(self.average_s)).max())

    def _pipeline(self, ranks: Sequence[int], began_s: Times, took_s: Times) -> list[float]:
        pieces = [float(took_s[rank]) * share / self.microbatches for rank, share in zip(ranks, self.shares)]
        forward = [piece * self.forward_share for piece in pieces]
        backward = [piece - first for piece, first in zip(pieces, forward)]
        return pipeline_ends_s(
            [float(began_s[rank]) for rank in ranks], forward, backward, self.message_s, self.microbatches,
            self.schedule,
        )  # fmt: skip


def order_of_stage(stage: int, num_stages: int, microbatches: int, schedule: str) -> list[Op]:
    """What a stage computes, in order."""
    if schedule == "gpipe":
        return [(True, number) for number in range(microbatches)] + [
            (False, number) for number in range(microbatches)
        ]
    ahead = min(microbatches, num_stages - stage)
    ops = [(True, number) for number in range(ahead)]
    for number in range(microbatches):
        ops.append((False, number))
        if ahead + number < microbatches:
            ops.append((True, ahead + number))
    return ops


def pipeline_ends_s(
    began_s: Sequence[float], forward_s: Sequence[float], backward_s: Sequence[float],
    message_s: Sequence[float], microbatches: int, schedule: str,
) -> list[float]:  # fmt: skip
    """When each stage has computed everything; `forward_s` and `backward_s`: of a microbatch, by stage."""
    num_stages = len(forward_s)
    orders = [order_of_stage(stage, num_stages, microbatches, schedule) for stage in range(num_stages)]
    done: dict[tuple[int, bool, int], float] = {}
    at, now_s = [0] * num_stages, list(began_s)
    left = sum(map(len, orders))
    while left:
        for stage in range(num_stages):
            while at[stage] < len(orders[stage]):
                is_forward, number = orders[stage][at[stage]]
                source = stage - 1 if is_forward else stage + 1
                arrived_s = began_s[stage]
                if 0 <= source < num_stages:
                    if (source, is_forward, number) not in done:
                        break
                    arrived_s = done[source, is_forward, number] + message_s[min(stage, source)]
                took_s = (forward_s if is_forward else backward_s)[stage]
                now_s[stage] = max(now_s[stage], arrived_s) + took_s
                done[stage, is_forward, number] = now_s[stage]
                at[stage], left = at[stage] + 1, left - 1
    return now_s
