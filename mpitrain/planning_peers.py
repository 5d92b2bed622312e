"""What a dry run says of strategies without a server: bytes a step, and where they do not pay.

Law of this file: sizes come from the functions that the run asks; what is compared with is allreduce at its bound,
2 (N - 1)/N of the model a step and rank.
"""

from __future__ import annotations

from typing import Any

from mpitrain.rules import Decentralized, LocalSGD


def averaging(
    strategy: LocalSGD, num_bytes: int, numbers: int, num_workers: int, step_samples: int
) -> list[str]:
    """What periodic averaging sends, and where allreduce would have hidden it."""
    wide = {"full": num_bytes, "float16": 2 * numbers, "bfloat16": 2 * numbers, "int8": 65 * numbers / 64}
    share = 2 * (num_workers - 1) / num_workers
    sent = share * wide[strategy.wire]
    steps = strategy.period if strategy.unit == "steps" else max(1.0, strategy.period / step_samples)
    saved_bits = 8 * (share * num_bytes - sent / steps)
    first = f"{size_text(sent)} sent per rank at an averaging, every {steps:g} steps: {size_text(sent / steps)} a step"
    saves = f"saves {saved_bits / 1e5:.3g} ms a step at 100 Mbit/s, {saved_bits / 1e6:.3g} ms at 1 Gbit/s"
    lines = [
        f"messages    {first}",
        f"            {saves} beside allreduce",
        "            pays where that is more than backward hides of an allreduce. Two ranks on one host, period 16:",
        "            2.0 times the steps of allreduce for an MLP of 6.3 M numbers, none gained for a CNN of 0.4 M;",
        "            int8 costs more there than it saves (benchmarks/averaging.py)",
    ]
    if strategy.start:
        lines.append(f"            allreduce until {strategy.start} {strategy.unit} are done")
    if strategy.average_optimizer:
        lines.append("            the optimizer's state is averaged too, in full")
    return lines


def peers(strategy: Decentralized, module: Any, num_bytes: int, number: int) -> list[str]:
    """What a peer sends and holds, and whether allreduce would send less."""
    from mpitrain.model.compression import message_bytes

    message = message_bytes(strategy.codec, module)
    near = strategy.receivers(0, number, 0)
    sent, reduced = len(near) * message, 2 * (number - 1) / number * num_bytes
    waits = (
        "waits for nobody" if strategy.asynchronous else f"waits for {len(strategy.senders(0, number, 0))}"
    )
    told = f"{size_text(message)} to each of {len(near)} peers, {size_text(sent)} sent per rank and step"
    lines = [f"messages    {told}; each {waits}"]
    if number > 1:
        ratio = sent / reduced
        advice = (
            f"{ratio:.2g} times the {size_text(reduced)} of allreduce(): it costs more on every link; use a codec, or "
            "fewer neighbours"
            if ratio >= 1
            else f"{1 / ratio:.3g} times less than allreduce()'s {size_text(reduced)}"
        )
        lines.append(f"            {advice}")
    if not strategy.codec.is_none:
        lines.append("            (coded messages as they are once their density is reached)")
    meetings = f"every {strategy.resync} steps and at the end" if strategy.resync else "at the end"
    lines.append(f"            all meet {meetings}: at most {size_text(3 * num_bytes)} sent per rank")
    if strategy.mixes:
        copies = len(strategy.senders(0, number, 0)) + 2
        lines.append(
            f"memory      {copies} copies of the model beside it on every rank: {size_text(copies * num_bytes)}"
        )
    return lines


def size_text(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError
