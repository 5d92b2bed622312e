"""What a dry run says of codecs: bytes a step, what they cost here, and on which links that pays.

Invariants: bytes and seconds are measured on this machine (`planning/codec_cost.py`). A codec pays where the time that
its fewer bytes save on the link exceeds its own time; neither is taken to be hidden behind the backward pass.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from mpitrain.codecs.base import Codec
from mpitrain.model.wire.buffers import wire_dtype
from mpitrain.planning.codec_cost import CodecCost, measure_codec
from mpitrain.planning.units import break_even
from mpitrain.strategies.base import ServerStrategy
from mpitrain.system.sizes import size_text


def describe_allreduce_codec(codec: Codec, module: nn.Module, num_bytes: int, num: int) -> list[str]:
    """A codec on the allreduce of `num` ranks."""
    if codec.is_none:
        return []
    cost = measure_codec(codec, module)
    full = 2 * (num - 1) / num * num_bytes
    if codec.averages:
        takes, decodes = 2 * (num - 1) / num * cost.message_bytes, 1
        travels = f"averaged: at least {size_text(takes)} sent per rank"
    else:
        takes, decodes = (num - 1) * cost.message_bytes, num
        travels = f"handed to all: each rank receives {size_text(takes)}"
    return [
        _message(codec, cost, num_bytes),
        f"            {travels}, in place of {size_text(full)}",
        *_costs(cost, cost.encode_s + decodes * cost.decode_s, decodes),
        *break_even(full - takes, cost.encode_s + decodes * cost.decode_s),
    ]


def describe_server_codecs(strategy: ServerStrategy, module: nn.Module, num_bytes: int) -> list[str]:
    """Codecs on pushes and replies of a server strategy."""
    lines: list[str] = []
    for what, codec in (("push", strategy.push_codec), ("reply", strategy.reply_codec)):
        if codec.is_none:
            continue
        cost = measure_codec(codec, module)
        per_server_s = (cost.decode_s if what == "push" else cost.encode_s) / strategy.servers
        lines += [
            _message(codec, cost, num_bytes).replace("a message", f"a {what}, over all shards,"),
            *_costs(cost, cost.encode_s + cost.decode_s, 1),
            f"            the servers are busy with that alone at {1 / per_server_s:,.0f} of them a second",
            *break_even(num_bytes - cost.message_bytes, cost.encode_s + cost.decode_s),
        ]
    if not strategy.reply_codec.is_none:
        lines.append(
            f"memory      every server keeps a copy of its shard for each worker: {size_text(num_bytes)} "
            "a worker over all servers"
        )
    return lines


def message_sizes(
    strategy: ServerStrategy, module: nn.Module, numbers: int, dtype: Any
) -> tuple[float, float]:
    """Bytes of a worker's push and of a reply, over all shards, for parameters of `dtype`."""
    sizes = []
    for codec, wire in (
        (strategy.push_codec, strategy.push_numbers),
        (strategy.reply_codec, strategy.reply_numbers),
    ):
        plain = float(numbers * wire_dtype(wire, dtype).itemsize)
        sizes.append(plain if codec.is_none else float(measure_codec(codec, module).message_bytes))
    return sizes[0], sizes[1]


def _message(codec: Codec, cost: CodecCost, num_bytes: int) -> str:
    ratio = f"{num_bytes / max(1, cost.message_bytes):.1f} times fewer bytes than float32"
    return (
        f"codec       {codec}: {size_text(cost.message_bytes)} a message once its density is reached, {ratio}"
    )


def _costs(cost: CodecCost, total_s: float, decodes: int) -> list[str]:
    sample = (
        ""
        if cost.measured == cost.total
        else f", extrapolated from {cost.measured / 1e6:.1f} million of its numbers"
    )
    each = f"{1e3 * cost.encode_s:.3g} to encode, {decodes} x {1e3 * cost.decode_s:.3g} to decode"
    return [f"            costs {1e3 * total_s:.3g} ms of a core here ({each}{sample})"]
