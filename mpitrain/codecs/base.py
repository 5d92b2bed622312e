"""Codecs by name: what travels in place of float32 gradients, and what it costs.

Invariants: a codec is a frozen value whose fields are the arguments of its encoder. Everything a codec does not send
is kept for the next message, but for float16, bfloat16 and qsgd, which keep nothing. Strategies know this file and
`none.py` only. A new codec is one file in this folder and one row in `strategies/registry.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mpitrain.codecs.encoder import Encoder
from mpitrain.codecs.message_format import Decoder
from mpitrain.errors import UsageError
from mpitrain.values import Value

CODINGS = ("auto", "raw", "bitmap", "elias_fano", "rice")


@dataclass(frozen=True, repr=False)
class Codec(Value):
    """Base of the codecs.

    encoder: the class that makes the messages; decoders: by kind of message, a number that no other codec has, since
    the receiver chooses by it (0 and 1 are taken; a number keeps its meaning for ever, checkpoints hold messages);
    averages: whether data-parallel ranks average what it makes (the encoder then has `reduce`, unless `cast` names the
    dtype that gradients are averaged in), in place of handing every message to all; sends_all: whether every number
    travels, if rounded; has_residual: whether what was not sent is kept for the next message.
    """

    encoder: ClassVar[type[Encoder]]
    decoders: ClassVar[Mapping[int, Decoder]] = {}
    averages: ClassVar[bool] = False
    cast: ClassVar[str] = ""
    sends_all: ClassVar[bool] = False
    has_residual: ClassVar[bool] = False

    def check(self) -> None:
        """Fields that several codecs have, where they are there."""
        if getattr(self, "dense_below", 0) < 0:
            raise UsageError(f"{self.name}: dense_below must not be negative")
        if getattr(self, "warmup_steps", 0) < 0:
            raise UsageError(f"{self.name}: warmup_steps must not be negative")
        if not 0 <= getattr(self, "clip", 0.0) < float("inf"):
            raise UsageError(f"{self.name}: clip must be finite and not negative, 0 is off")
        if not 0 < getattr(self, "density", 0.5) <= 1:
            raise UsageError(f"{self.name}: density must be in (0, 1]")
        if hasattr(self, "coding"):
            self.hold_known("coding", CODINGS)

    @property
    def is_none(self) -> bool:
        """Whether numbers travel as they are."""
        return False


@dataclass(frozen=True, repr=False)
class Feedback(Codec):
    """Base of the codecs that keep a residual, and of qsgd.

    Args:
        dense_below: parameters of fewer numbers travel in full.
        warmup_steps: so many steps travel in full at first.
        clip: largest norm of the mean gradient; each worker clips its own at clip / sqrt(workers), before the residual
            (Lin et al. 2018). 0 is off.
    """

    has_residual: ClassVar[bool] = True

    dense_below: int = 1024
    warmup_steps: int = 0
    clip: float = 0.0
