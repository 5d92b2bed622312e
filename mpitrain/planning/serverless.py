"""What a dry run says of strategies without a server: bytes a step, and where they do not pay.

Invariants: sizes come from the functions that the run asks; what is compared with is allreduce at its bound,
2 (N - 1)/N of the model a step and rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mpitrain.codecs.base import Codec
from mpitrain.codecs.eightbit import EightBit
from mpitrain.codecs.floats import BFloat16, Float16
from mpitrain.job import Job
from mpitrain.model.gradient.sparse_gradients import row_bytes, sparse_layers
from mpitrain.mpi.process_group.algorithm_choice import index_bytes
from mpitrain.planning.codec_cost import copy_s, measure_codec
from mpitrain.planning.codecs import describe_allreduce_codec
from mpitrain.planning.units import break_even
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.system.sizes import counted, size_text


def describe_serverless(
    job: Job, module: nn.Module, num_bytes: int, numbers: int, num_workers: int
) -> list[str]:
    """What travels, and what else a family has to say.

    Args:
        num_bytes, numbers: of all trained parameters.
    """
    strategy = job.run_strategy
    describe = strategy.choose(_DESCRIBED)
    return describe(strategy, module, num_bytes, numbers, num_workers, job.step_samples * num_workers)


def _allreduce(
    strategy: AllReduce, module: nn.Module, num_bytes: int, numbers: int, num_workers: int, step_samples: int
) -> list[str]:
    tables = sparse_layers(module)
    num_bytes -= sum(table.weight.nbytes for table in tables.values())
    least = size_text(2 * (num_workers - 1) / num_workers * num_bytes)
    return [
        f"messages    allreduce of {size_text(num_bytes)} a step; at least {least} sent per rank",
        *(_touched(name, table.weight) for name, table in tables.items()),
        *describe_allreduce_codec(strategy.codec, module, num_bytes, num_workers),
    ]


def _touched(name: str, table: torch.Tensor) -> str:
    each = f"{index_bytes(table.shape[:1])} + {row_bytes(table)} bytes"
    return f"            and the touched rows of {name}: {each} each of {table.shape[0]:,} ({size_text(table.nbytes)})"


def _local_sgd(
    strategy: LocalSGD, module: nn.Module, num_bytes: int, numbers: int, num_workers: int, step_samples: int
) -> list[str]:
    """What local SGD sends, what that costs here, and where allreduce would have hidden it."""
    wide = {"full": num_bytes, "float16": 2 * numbers, "bfloat16": 2 * numbers, "int8": 65 * numbers / 64}
    share = 2 * (num_workers - 1) / num_workers
    sent = share * wide[strategy.wire]
    steps = strategy.period if strategy.unit == "steps" else max(1.0, strategy.period / step_samples)
    saved_bits = 8 * (share * num_bytes - sent / steps)
    cost_s = copy_s(numbers)
    if strategy.wire != "full":
        codec: Codec = {"float16": Float16(), "bfloat16": BFloat16(), "int8": EightBit(dense_below=0)}[
            strategy.wire
        ]
        measured = measure_codec(codec, module)
        cost_s += measured.encode_s + measured.decode_s * (num_workers if strategy.wire == "int8" else 1)
    first = f"{size_text(sent)} sent per rank at an averaging, every {steps:g} steps: {size_text(sent / steps)} a step"
    saves = f"saves {saved_bits / 1e5:.3g} ms a step at 100 Mbit/s, {saved_bits / 1e6:.3g} ms at 1 Gbit/s"
    lines = [
        f"messages    {first}",
        f"            {saves} beside allreduce",
        *break_even(share * num_bytes - sent / steps, cost_s / steps),
        "            but for what backward hides of allreduce. Two ranks on one host, period 16:",
        "            2.0 times the steps of allreduce for an MLP of 6.3 M numbers, none gained for a CNN of 0.4 M;",
        "            int8 costs more there than it saves (benchmarks/averaging.py)",
    ]
    if strategy.start:
        lines.append(f"            allreduce until {strategy.start} {strategy.unit} are done")
    if strategy.average_optimizer:
        lines.append("            the optimizer's state is averaged too, in full")
    return lines


def _decentralized(
    strategy: Decentralized, module: nn.Module, num_bytes: int, numbers: int, number: int, step_samples: int
) -> list[str]:
    """What a peer sends and holds under a decentralised strategy, and whether allreduce would send less."""
    cost = None if strategy.codec.is_none else measure_codec(strategy.codec, module)
    dtypes = {one.dtype for one in module.parameters() if one.requires_grad}
    held = numbers * max(torch.float32.itemsize, *(dtype.itemsize for dtype in dtypes))  # with masters
    plain = num_bytes if len(dtypes) == 1 else held
    message = plain if cost is None else cost.message_bytes
    num_messages = strategy.messages_to_workers(number)
    sent, reduced = num_messages * message, 2 * (number - 1) / number * num_bytes
    waits = (
        "waits for nobody" if strategy.asynchronous else f"waits for {len(strategy.senders(0, number, 0))}"
    )
    sends = f"{counted(num_messages, 'message')} of {size_text(message)}, {size_text(sent)} sent per rank and step"
    lines = [f"messages    {sends}; each {waits}"]
    if number > 1:
        ratio = sent / reduced
        advice = (
            f"{ratio:.2g} times the {size_text(reduced)} of allreduce(): it costs more on every link; use a codec, or "
            "fewer neighbours"
            if ratio >= 1
            else f"{1 / ratio:.3g} times less than allreduce()'s {size_text(reduced)}"
        )
        lines.append(f"            {advice}")
    if cost is not None:
        lines.append("            (coded messages as they are once their density is reached)")
        total_s = cost.encode_s + (1 + len(strategy.senders(0, number, 0))) * cost.decode_s
        lines.append(f"codec       costs {1e3 * total_s:.3g} ms of a core a step here")
        lines += break_even(reduced - sent, total_s)
    meetings = f"every {strategy.resync} steps and at the end" if strategy.resync else "at the end"
    lines.append(f"            all meet {meetings}: at most {size_text(3 * held)} sent per rank")
    if strategy.mixes:
        copies = len(strategy.senders(0, number, 0)) + 2
        lines.append(
            f"memory      {copies} copies of the model beside it on every rank: {size_text(copies * held)}"
        )
    return lines


_DESCRIBED: dict[type[Strategy], Callable[..., list[str]]] = {
    AllReduce: _allreduce,
    LocalSGD: _local_sgd,
    Decentralized: _decentralized,
}
