"""What the servers of a checkpoint had processed, and what becomes of that for another number of servers.

Invariants: a shard that is put together from pieces of others counts only what all of these had processed; what one
piece had processed before the others is dealt again, counted once by every shard, and left out of that piece.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from mpitrain.strategies.parameter_server.processed import ProcessedSamples, in_all, in_any


def _pieces(state: dict[str, Any], size: int, epoch_samples: int) -> list[tuple[int, int, ProcessedSamples]]:
    counted = ProcessedSamples.of(state["processed"], epoch_samples)
    pieces = [
        (low, high, in_any([counted, ProcessedSamples.of(more, epoch_samples)]))
        for low, high, more in state["pieces"]
    ]
    return pieces or [(0, size, counted)]


def processed_by(states: Sequence[dict[str, Any]], epoch_samples: int) -> list[ProcessedSamples]:
    """What each shard of a checkpoint had counted, and each piece of one had taken, the first shard first."""
    counted = [ProcessedSamples.of(state["processed"], epoch_samples) for state in states]
    return counted + [piece for state in states for _, _, piece in _pieces(state, 0, epoch_samples)]


def reshard_role(
    states: Sequence[dict[str, Any]], boundaries: Sequence[int], low: int, high: int, epoch_samples: int
) -> dict[str, Any]:
    """The role state of a server of numbers [low, high), from those of all shards of a checkpoint, which lay between
    `boundaries`; counts are those of the first, as far as all have processed the same."""
    made = copy.deepcopy(states[0])
    counted = [ProcessedSamples.of(state["processed"], epoch_samples) for state in states]
    common = in_all(counted)
    made["processed"], made["pieces"] = common.state(), []
    counts, ahead = made["ledger"], counted[0].num_samples() - common.num_samples()
    uncounted = min(ahead, counts["samples_accepted"])
    counts["samples_accepted"] -= uncounted
    counts["samples_dropped"] -= ahead - uncounted
    made["applied_samples"] = min(made["applied_samples"], counts["samples_accepted"])
    for state, start, end in zip(states, boundaries, boundaries[1:]):
        for piece_low, piece_high, processed in _pieces(state, end - start, epoch_samples):
            first, last = max(low, start + piece_low), min(high, start + piece_high)
            if first < last:
                made["pieces"].append([first - low, last - low, processed.state()])
    made["row_pieces"] = [piece.state() for state in states for piece in _row_pieces(state, epoch_samples)]
    return made


def num_row_pieces(state: dict[str, Any]) -> int:
    """From how many old shards the rows of a shard are still put together."""
    return len(state.get("row_pieces", ()))


def _row_pieces(state: dict[str, Any], epoch_samples: int) -> list[ProcessedSamples]:
    """What the rows of a shard's tables have taken, by old shard; that of rows begun since comes last."""
    counted = ProcessedSamples.of(state["processed"], epoch_samples)
    old = [ProcessedSamples.of(piece, epoch_samples) for piece in state.get("row_pieces", ())]
    return [*[in_any([counted, piece]) for piece in old], counted]
