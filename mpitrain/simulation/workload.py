"""What a job is to time alone: bytes, samples and steps.

Invariants: a frozen value; only `Workload.of` imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mpitrain.codecs.base import Codec
from mpitrain.errors import UsageError
from mpitrain.strategies.base import Strategy

PAD_BYTES = 64  # a payload's numbers are padded to a multiple of these, and stand between two pads
MASTER_BYTES = 4  # of a number that peers step, and take the mean of; of the model it may have 16 bits
NUMBER_BYTES = {"float16": 2.0, "bfloat16": 2.0, "int8": 65 / 64}  # of numbers that are rounded to travel


@dataclass(frozen=True)
class Workload:
    """What a job is to time alone.

    Args:
        num_parameters: that are trained; number_bytes: of each.
        num_samples: of the data set.
        step_samples: of a worker's step; part_samples: that it computes at once, 0 for all of them.
        epochs: passes over the data; steps: of every worker, in place of epochs.
        drop_last, window_samples: as in `BatchDealer`.
        buffer_bytes, optimizer_bytes: of floating buffers and of the optimizer's state, which `localsgd` can average
            and checkpoints hold.
        push_share, reply_share: bytes of a push, or of a reply, as a share of the same in full numbers; they must be
            given where a codec decides how many numbers travel, or batches do, which touch rows of tables.
        reduced_bytes: of what workers over servers all-reduce among themselves.
    """

    num_parameters: int
    num_samples: int
    step_samples: int
    number_bytes: int = 4
    part_samples: int = 0
    epochs: int = 1
    steps: int | None = None
    drop_last: bool = False
    window_samples: int = 0
    buffer_bytes: int = 0
    optimizer_bytes: int = 0
    push_share: float | None = None
    reply_share: float | None = None
    reduced_bytes: int = 0

    @classmethod
    def of(cls, job: Any, steps: int | None = None, checkpoints: bool = False, **changes: Any) -> Workload:
        """The workload of a job (which imports torch).

        Args:
            checkpoints: whether any are written, for which the optimizer's state is weighed: it takes a step.
            changes: fields that are to be different.
        """
        import torch

        from mpitrain.model.optimizers.optimizer import state_bytes
        from mpitrain.model.wire.flat import trainable
        from mpitrain.training.measure import build
        from mpitrain.training.routes import choose_routes, reduced_bytes

        module, optimizer = build(job, None, torch.device("cpu"))
        numbers = [parameter for _, parameter, _ in trainable(module, optimizer)]
        catalogue = job.data.scan()
        choose_routes(job, module, catalogue)
        fields = {
            "num_parameters": sum(one.numel() for one in numbers),
            "number_bytes": max(one.element_size() for one in numbers),
            "num_samples": catalogue.num_samples,
            "window_samples": catalogue.window_samples,
            "step_samples": job.step_samples,
            "part_samples": job.part_samples,
            "epochs": job.epochs,
            "steps": steps,
            "drop_last": job.drop_last,
            "buffer_bytes": sum(
                one.numel() * one.element_size() for one in module.buffers() if one.is_floating_point()
            ),
            "reduced_bytes": reduced_bytes(job, module, optimizer),
        }
        if checkpoints or (job.strategy is not None and job.strategy.average_optimizer):
            fields["optimizer_bytes"] = state_bytes(numbers, optimizer) or 0
        return cls(**{**fields, **changes})

    def shard_numbers(self, servers: int) -> list[int]:
        """Numbers of each shard."""
        cuts = [self.num_parameters * shard // servers for shard in range(servers + 1)]
        return [end - start for start, end in zip(cuts, cuts[1:], strict=False)]

    def payload_bytes(self, numbers: int, wire: str, codec: Codec, share: float | None, name: str) -> int:
        """Bytes on the wire of so many numbers.

        Raises:
            UsageError: a codec decides, and nothing is known of it.
        """
        if codec.is_none and share is None:
            num_bytes = numbers * NUMBER_BYTES.get(wire, self.number_bytes)
        elif share is not None:
            num_bytes = numbers * self.number_bytes * share
        else:
            raise UsageError(
                f"how many bytes {codec} sends depends on gradients, and timing only has none: give the workload's "
                f"{name}, the share of full numbers that travel"
            )
        return 2 * PAD_BYTES + -(-math.ceil(num_bytes) // PAD_BYTES) * PAD_BYTES


def codec_of(strategy: Strategy) -> Codec | None:
    """What a worker's gradients are encoded with, where they are."""
    wire = next(iter(strategy.wires), "full")
    return wire if isinstance(wire, Codec) and not wire.is_none else None
