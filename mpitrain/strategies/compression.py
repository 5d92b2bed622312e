"""Codecs by name: what travels in place of float32 gradients, and what it costs.

Invariants: values only. `model/codec_registry.py` makes the encoder a value asks for; the fields here carry the
names that the encoders in `codecs/` take. Everything a codec does not send is kept for the next message, but for
float16, bfloat16 and qsgd, which keep nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpitrain.errors import UsageError
from mpitrain.values import Value, nearest, register

CODINGS = ("auto", "raw", "bitmap", "elias_fano", "rice")
ROUNDINGS = ("eighth", "power_of_two", "none")


@dataclass(frozen=True, repr=False)
class Codec(Value):
    """Base of the codecs.

    encoder: the module below `mpitrain/codecs/` and the class in it that makes the messages; averages: whether
    data-parallel ranks average what it makes, in place of handing every message to all; sends_all: whether every number
    travels, if rounded; has_residual: whether what was not sent is kept for the next message.
    """

    encoder: ClassVar[str] = ""
    averages: ClassVar[bool] = False
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
        if (coding := getattr(self, "coding", "auto")) not in CODINGS:
            raise UsageError(f"{self.name}: unknown coding {coding!r}{nearest(coding, list(CODINGS))}")

    @property
    def is_none(self) -> bool:
        """Whether numbers travel as they are."""
        return False


@register("codec", "none")
@dataclass(frozen=True, repr=False)
class Uncompressed(Codec):
    """Numbers travel as they are."""

    averages: ClassVar[bool] = True
    sends_all: ClassVar[bool] = True

    @property
    def is_none(self) -> bool:
        return True


@register("codec", "float16")
@dataclass(frozen=True, repr=False)
class Float16(Codec):
    """Half the bytes; 10 bits of fraction, infinite above 65504. Sums are taken in float32 over MPI."""

    encoder: ClassVar[str] = "floats.Float16Encoder"
    averages: ClassVar[bool] = True
    sends_all: ClassVar[bool] = True


@register("codec", "bfloat16")
@dataclass(frozen=True, repr=False)
class BFloat16(Codec):
    """Half the bytes; 7 bits of fraction, the range of float32. Sums are taken in float32 over MPI."""

    encoder: ClassVar[str] = "floats.BFloat16Encoder"
    averages: ClassVar[bool] = True
    sends_all: ClassVar[bool] = True


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


@register("codec", "eightbit")
@dataclass(frozen=True, repr=False)
class EightBit(Feedback):
    """A quarter of the bytes: int8 with a float32 scale for 256 numbers.

    Dettmers et al., ICLR 2022.
    """

    encoder: ClassVar[str] = "eightbit.EightBitEncoder"
    sends_all: ClassVar[bool] = True


@register("codec", "threshold")
@dataclass(frozen=True, repr=False)
class Threshold(Feedback):
    """+tau or -tau where the residual has reached tau: 2500 times fewer bytes at a density of 1e-3.

    Strom, Interspeech 2015; 12.5 bits for each number sent.

    Args:
        density: share of the numbers to send, which tau is steered to.
        tau: the first threshold; 0 takes the quantile of the first gradient.
        adaptive: steer tau; False keeps it.
        band: tau stays while the density is within this factor of the target.
        rounding: of the tau in use: "eighth" of its power of two, "power_of_two", or "none". The first two make the
            residual exact; powers of two let the density swing.
        coding: of the indices: "auto" (the smallest, a bitmap above 1/16), "raw", "bitmap", "elias_fano", "rice".
    """

    encoder: ClassVar[str] = "threshold.ThresholdEncoder"

    density: float = 1e-3
    tau: float = 0.0
    adaptive: bool = True
    band: float = 2.0
    rounding: str = "eighth"
    coding: str = "auto"

    def check(self) -> None:
        super().check()
        if not 0 <= self.tau < float("inf") or not 1 <= self.band < float("inf"):
            raise UsageError("threshold: needs tau >= 0 (0 chooses it) and band >= 1")
        if self.rounding not in ROUNDINGS:
            raise UsageError(
                f"threshold: unknown rounding {self.rounding!r}{nearest(self.rounding, list(ROUNDINGS))}"
            )


@register("codec", "topk")
@dataclass(frozen=True, repr=False)
class TopK(Feedback):
    """The largest numbers of each parameter, by a sampled threshold.

    Lin et al., "Deep Gradient Compression", ICLR 2018.

    Args:
        density: share of each parameter's numbers to send.
        momentum: of the worker's own momentum, which is compressed in place of the gradient and masked where it was
            sent; the optimizer must then have none.
        nesterov: Nesterov's form of it.
        values: "float32" or "float16" on the wire.
        coding: of the indices, as in `threshold`.
    """

    encoder: ClassVar[str] = "topk.TopKEncoder"

    density: float = 1e-3
    momentum: float = 0.0
    nesterov: bool = False
    values: str = "float32"
    coding: str = "auto"

    def check(self) -> None:
        super().check()
        if not 0 <= self.momentum < 1:
            raise UsageError(f"topk: momentum must be in [0, 1), got {self.momentum}")
        if self.nesterov and not self.momentum:
            raise UsageError("topk: nesterov needs a momentum")
        if self.values not in ("float32", "float16"):
            raise UsageError(f"topk: values must be float32 or float16, got {self.values!r}")


@register("codec", "onebit")
@dataclass(frozen=True, repr=False)
class OneBit(Feedback):
    """Signs, and two means for what flows into each output: 32 times fewer bytes.

    Seide et al., Interspeech 2014.
    """

    encoder: ClassVar[str] = "onebit.OneBitEncoder"


@register("codec", "powersgd")
@dataclass(frozen=True, repr=False)
class PowerSGD(Feedback):
    """Each n x m matrix travels as rank (n + m) numbers.

    Vogels et al., NeurIPS 2019. The two thin matrices are averaged themselves, so nothing decodes N messages.
    """

    encoder: ClassVar[str] = "powersgd.PowerSgdEncoder"
    averages: ClassVar[bool] = True

    rank: int = 2

    def check(self) -> None:
        super().check()
        if self.rank < 1:
            raise UsageError(f"powersgd: rank must be at least 1, got {self.rank}")


@register("codec", "qsgd")
@dataclass(frozen=True, repr=False)
class QSGD(Feedback):
    """Unbiased stochastic levels -s..s of the largest of 512 numbers: 4 bits a number for s = 7.

    Alistarh et al., NeurIPS 2017.
    """

    encoder: ClassVar[str] = "qsgd.QsgdEncoder"
    has_residual: ClassVar[bool] = False

    levels: int = 7

    def check(self) -> None:
        super().check()
        if not 1 <= self.levels <= 127:
            raise UsageError(f"qsgd: levels must be 1 to 127, got {self.levels}")
