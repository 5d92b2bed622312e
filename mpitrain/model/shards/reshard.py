"""A checkpoint's shards, cut anew for another number of servers.

Invariants: only what belongs to single elements is cut (parameters and the optimizer's tensors of their shape);
what belongs to a whole slice, such as Adam's step, is the same in all slices of a group in lockstep, and otherwise the
largest of them is taken. The rows of tables are joined, and each server takes those that fall to it. With the same
cuts nothing goes through here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpitrain.model.shards.tabled_shard import joined_tables
from mpitrain.model.wire.flat import Layout


def reshard(
    states: Sequence[dict[str, Any]], layout: Layout, shard: int, num_pieces: Sequence[int] = ()
) -> dict[str, Any]:
    """The store state of `shard` under `layout`, from the states of all old shards in order; `num_pieces`: as for
    `joined_states`, where there are tables."""
    whole = torch.cat([state["parameters"] for state in states])
    low, high = layout.cuts[shard], layout.cuts[shard + 1]
    made = {**states[0], "parameters": whole[low:high].clone()}
    if all(state.get("ema") for state in states):
        made["ema"] = [torch.cat([state["ema"][0] for state in states])[low:high].clone()]
    else:
        made.pop("ema", None)
    made.pop("replies", None)  # workers' copies are of the old cuts: each is sent the parameters in full
    if "optimizer" in states[0]:
        made["optimizer"] = _optimizer(states, layout, shard)
    if "tables" in states[0]:
        made |= joined_tables(states, num_pieces)
    return made


def _optimizer(states: Sequence[dict[str, Any]], layout: Layout, shard: int) -> dict[str, Any]:
    """Old slices of a group, joined and cut: slice k of a shard is its k-th group that has a part there."""
    old = layout.cut_into(len(states))
    pieces: dict[int, list[dict[str, Any]]] = {}
    options: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for index, state in enumerate(states):
        for position, (group, _, _) in enumerate(old.group_slices(index)):
            pieces.setdefault(group, []).append(state["optimizer"]["state"].get(position, {}))
            options[group] = (
                state["optimizer"]["param_groups"][position],
                state["optimizer"]["first"][position],
            )
    begins = (0, *layout.group_ends[:-1])
    low = layout.cuts[shard]
    made: dict[str, Any] = {**states[0]["optimizer"], "state": {}, "param_groups": [], "first": []}
    for position, (group, start, stop) in enumerate(layout.group_slices(shard)):
        first = low + start - begins[group]
        length = layout.group_ends[group] - begins[group]
        cut = _cut(pieces[group], length, first, first + stop - start)
        if cut:
            made["state"][position] = cut
        now, began = options[group]
        made["param_groups"].append({**now, "params": [position]})
        made["first"].append(dict(began))
    for position in range(len(old.group_slices(0)), len(states[0]["optimizer"]["param_groups"])):  # of tables
        now = states[0]["optimizer"]["param_groups"][position]
        made["param_groups"].append({**now, "params": [len(made["param_groups"])]})
        made["first"].append(dict(states[0]["optimizer"]["first"][position]))
    return made


def _cut(slices: Sequence[dict[str, Any]], length: int, first: int, last: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key in slices[0]:
        values = [piece[key] for piece in slices]
        elementwise = all(isinstance(value, torch.Tensor) and value.dim() == 1 for value in values)
        if elementwise and sum(len(value) for value in values) == length:
            made[key] = torch.cat(values)[first:last].clone()
        elif all(value is None for value in values):
            made[key] = None
        else:
            made[key] = max(values, key=float)
    return made
