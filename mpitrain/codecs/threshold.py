"""Threshold coding: +tau or -tau where a number has grown to tau (Strom, "Scalable distributed DNN training using
commodity GPU cloud computing", Interspeech 2015).

    u = r + x;  q_i = tau sign(u_i) where |u_i| >= tau, else 0;  r = u - q

Invariants: the tau in use is rounded to an eighth of its power of two (or to that power, as is usual), so
that u - q is exact in float32 as long as |u| < 2^20 tau; it travels with each message. tau is steered towards a
density in both directions: it shrinks by d while the mean density is below density / band, grows by 1/d while it is
above density * band, d = 0.5^(1/20) (Deeplearning4j's rule), so after k steps out of band it is tau0 d^(+-k). The
first tau is the quantile of the first gradient that gives the density, where none is set. From there it climbs:
residuals that do a random walk of step s cross tau at a rate of (s/tau)^2, so the climb, in which more is sent, is
a warm-up.

Why an eighth: when the tau in use doubles, no residual reaches it for a while, and when it halves, most of them do
at once. On Gaussian gradients and a target of 1e-3 powers of two swing between 0 and 0.17 (0.005 in the mean);
eighths come to rest (`tests/codecs/test_laws.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from mpitrain.codecs import index_coding, message_format
from mpitrain.codecs.base import Feedback
from mpitrain.codecs.encoder import Encoder
from mpitrain.codecs.layout import Part, Plan
from mpitrain.codecs.lazy import np, torch
from mpitrain.codecs.message_format import Decoder
from mpitrain.codecs.sparse import Search, pack_signs, scatter, split, unpack_signs
from mpitrain.errors import UsageError
from mpitrain.values import register

THRESHOLD = 5  # kinds on the wire

DECAY = 0.5 ** (1 / 20)
SAMPLE = 1 << 16
# tau follows the density's mean over so many messages: by the last message alone a step up, after which little
# reaches tau for a moment, would be undone at once, for ever.
MEMORY_STEPS = 5
# Above this density a bitmap is used (Deeplearning4j's rule).
BITMAP_ABOVE = 1 / 16
ROUNDINGS = ("eighth", "power_of_two", "none")


class ThresholdEncoder(Encoder):
    """Args: density: share of the numbers to send; tau: the first threshold, 0 for the quantile; adaptive: steer it;
    band: how far off the density may be before tau moves; rounding: of the tau in use, "eighth" (of its power of
    two), "power_of_two" or "none"; coding: of the indices.
    """

    def __init__(
        self, density: float = 1e-3, tau: float = 0.0, adaptive: bool = True, band: float = 2.0,
        rounding: str = "eighth", coding: str = "auto", **shared: Any,
    ):  # fmt: skip
        super().__init__(**shared)
        self.density, self.tau, self.adaptive, self.band = density, tau, adaptive, band
        self.rounding, self.coding = rounding, coding
        self.mean_density = -1.0  # none yet

    def tau_in_use(self) -> float:
        """tau as it is sent: rounded to `rounding`, and to float32."""
        tau = min(max(self.tau, 2.0**-120), 2.0**120)
        if self.rounding == "power_of_two":
            return 2.0 ** round(math.log2(tau))
        if self.rounding == "eighth":
            mantissa, exponent = math.frexp(tau)
            return math.ldexp(round(mantissa * 16) / 16, exponent)
        return float(np.float32(tau))

    def _encode(self, parts: Sequence[Part], plan: Plan, alpha: float) -> torch.Tensor:
        kept = self.memory.slot("residual", parts)
        if not self.tau:
            self.tau = self._quantile([part.flat for part in parts], plan) * alpha
        tau = self.tau_in_use()
        indices = self._select(parts, kept, plan, alpha, tau)
        negative = np.empty(len(indices), bool)
        for run, low, high in split(plan, indices):
            residual = kept[run.part]
            where = torch.from_numpy(indices[low:high] + (run.start - run.offset)).to(residual.device)
            signs = residual[where].sign()
            residual.index_add_(0, where, signs, alpha=-tau)
            negative[low:high] = (signs < 0).cpu().numpy()
        coding = self.coding
        if coding == "auto" and len(indices) > BITMAP_ABOVE * plan.num_coded:
            coding = "bitmap"
        coder, coded = index_coding.encode(indices, plan.num_coded, coding)
        density = len(indices) / max(1, plan.num_coded)
        self.last.update(density=density, tau=tau)
        if self.adaptive:
            self._steer(density)
        header = self._header(
            plan, THRESHOLD, coder=coder, num_sent=len(indices), scale=tau, extra=len(coded)
        )
        return message_format.assemble(
            header, [message_format.dense_numbers(parts, plan, alpha), pack_signs(negative), coded]
        )

    def _select(
        self, parts: Sequence[Part], kept: list[torch.Tensor], plan: Plan, alpha: float, tau: float
    ) -> np.ndarray:
        """Add the gradients to the residual and find what has reached tau, a cache-sized piece at a time."""
        found, search = [], Search()
        for part, start, stop, offset in plan.chunks():
            u = kept[part][start:stop].add_(parts[part].flat[start:stop], alpha=alpha)
            found.append(search.find(u, tau).add_(offset))
        return torch.cat(found).cpu().numpy() if found else np.zeros(0, np.int64)

    def _quantile(self, flats: Sequence[torch.Tensor], plan: Plan) -> float:
        """The |x| that only `density` of the numbers exceed, from every n-th of those that are not zero."""
        stride = max(1, plan.num_coded // SAMPLE)
        pieces = [flats[part][start:stop:stride].abs() for part, start, stop, _ in plan.runs]
        sample = torch.cat(pieces) if pieces else torch.zeros(0)
        sample = sample[sample > 0]
        if not sample.numel():
            return 2.0**-10  # nothing to go by: Strom's order of magnitude, steered from there
        rank = max(1, min(sample.numel(), round(self.density * sample.numel())))
        return float(sample.topk(rank).values[-1])

    def _steer(self, density: float) -> None:
        if self.mean_density < 0:
            self.mean_density = density
        self.mean_density += (density - self.mean_density) / MEMORY_STEPS
        if self.mean_density < self.density / self.band:
            self.tau *= DECAY
        elif self.mean_density > self.density * self.band:
            self.tau /= DECAY

    def _numbers(self) -> dict[str, float]:
        return {"tau": self.tau, "mean_density": self.mean_density}

    def _restore_numbers(self, numbers: dict[str, float]) -> None:
        self.tau = numbers.get("tau", self.tau)  # absent where another codec wrote the state
        self.mean_density = numbers.get("mean_density", self.mean_density)


def add(received: message_format.Received) -> None:
    """parts += weight * (+-tau) at the indices."""
    header, reader, parts, plan, weight = received
    signs = unpack_signs(reader.take((header.num_sent + 7) // 8, "|u1"), header.num_sent)
    indices = index_coding.decode(
        header.coder, reader.take(header.extra, "|u1"), header.num_sent, plan.num_coded
    )
    scatter(parts, plan, indices, signs.mul_(header.scale * weight))


@register("codec", "threshold")
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

    encoder: ClassVar = ThresholdEncoder
    decoders: ClassVar = {THRESHOLD: Decoder(add, is_sparse=True, scale="tau")}

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
        self.hold_known("rounding", ROUNDINGS)
