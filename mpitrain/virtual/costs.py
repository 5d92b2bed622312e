"""What ranks do besides computing gradients and sending messages, and how long it takes in virtual time.

Invariants: a frozen value that knows neither ranks nor effects; whoever runs the world tells it the bytes. All costs
are zero unless they are given.
"""

from __future__ import annotations

import math

from mpitrain.errors import UsageError
from mpitrain.values import Value, register

LEAST_GB_PER_S = 1e-12  # so that seconds stay finite


@register("costs", "costs")
class Costs(Value):
    """Seconds that are charged besides those of the compute law. 0 everywhere: nothing is charged.

    Args:
        memory_gb_per_s: of the memory of a server, or of a rank that updates its own parameters, through which an
            update goes `passes` times; of an aggregator, too, through which each gradient goes 3 times.
        passes: over its parameters in one update: reading the gradient, reading and writing the parameters; 2 more for
            each number that the optimizer keeps a parameter.
        codec_gb_per_s: of gradients that a worker encodes, where the strategy has a codec.
        read_s: of reading a batch, where that is not hidden behind computing.
        validate_s: of a whole validation on one rank; ranks that divide it take their parts of that.
        checkpoint_gb_per_s: of what is written, to a checkpoint (in the background, when the rank has copied its part
            through its memory) or as the trained model.
        decode_gb_per_s: of gradients that are decoded, each by itself: by a server, or by every rank where all ranks
            send what they have encoded to all others.
        push_s: of a server's processor for each push, besides its update and what is decoded: headers, the role's code
            and the reply (the last table of `python benchmarks/server.py --saturate`).
        restart_s: from the end of a job to when it works again, from its newest checkpoint on. 0: a death that nobody
            survives ends the run, and what `crash` orders takes no time beside the work that is repeated.
    """

    memory_gb_per_s: float = 0.0
    passes: float = 3.0
    codec_gb_per_s: float = 0.0
    read_s: float = 0.0
    validate_s: float = 0.0
    checkpoint_gb_per_s: float = 0.0
    decode_gb_per_s: float = 0.0
    push_s: float = 0.0
    restart_s: float = 0.0

    def check(self) -> None:
        for key, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise UsageError(f"costs: {key} must be finite and not negative, got {value}")
            if key.endswith("gb_per_s") and 0 < value < LEAST_GB_PER_S:
                raise UsageError(f"costs: {key} must be at least {LEAST_GB_PER_S:g}, or 0, got {value}")

    def seconds(
        self,
        what: str,
        num_bytes: float,
        num_batches: float = 1,
        size: float = 1.0,
        codes: bool = False,
        updates: bool = False,
    ) -> float:
        """Of one task.

        Args:
            what: as in `Compute`; num_bytes: of the parameters that the rank holds.
            num_batches, size: as in `Compute`; codes: whether gradients are encoded; updates:
                whether the rank that has computed it updates its own parameters with it.
        """
        if what == "gradient":
            coded_s = _at(num_bytes, self.codec_gb_per_s) if codes else 0.0
            return (
                num_batches * size * self.read_s + coded_s + (self._update_s(num_bytes) if updates else 0.0)
            )
        if what == "apply":
            decoded_s = num_batches * _at(num_bytes, self.decode_gb_per_s) if codes else 0.0
            return self._update_s(num_bytes) + decoded_s
        if what == "sum":  # a gradient and the sum are read, and the sum is written
            return num_batches * _at(3 * num_bytes, self.memory_gb_per_s)
        if what == "validate":
            return size * self.validate_s
        return size * _at(num_bytes, self.checkpoint_gb_per_s)

    def copy_s(self, num_bytes: float) -> float:
        """Of a copy, which is read and written."""
        return _at(2 * num_bytes, self.memory_gb_per_s)

    def _update_s(self, num_bytes: float) -> float:
        return _at(self.passes * num_bytes, self.memory_gb_per_s)


def _at(num_bytes: float, gb_per_s: float) -> float:
    return num_bytes / (gb_per_s * 1e9) if gb_per_s else 0.0
