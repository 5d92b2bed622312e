"""Gradient clipping, as torch's `clip_grad_norm_` and `clip_grad_value_` do it.

    g <- g * min(1, norm / (|g| + 1e-6))        then every number of g into [-value, value]

|g| is the Euclidean norm over all parameters. It is rounded as torch rounds it, but in 32 bits where numbers of 16 are
among them, and a limit that is not exceeded changes no bit.

Invariants: only a gradient whose numbers are all finite is clipped, as `model/recipe.py` sees to. One that is not stays
as it is, so that whoever judges gradients refuses it with clipping as without.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpitrain.model.wire.masters import SIXTEEN

_EPSILON = 1e-6  # torch's


@dataclass(frozen=True)
class Clipping:
    """What `Job(clip_norm=, clip_value=)` asks for; false where that is nothing."""

    norm: float | None = None
    value: float | None = None

    def __bool__(self) -> bool:
        return self.norm is not None or self.value is not None

    @torch.no_grad()
    def clip(
        self, gradient: list[torch.Tensor], scale: float = 1.0, total: torch.Tensor | None = None
    ) -> None:
        """Clip in place.

        Args:
            gradient: finite tensors, of any number.
            scale: by which the gradient has been multiplied already.
            total: its norm, where these tensors are only a part of it.
        """
        if not gradient or not scale:
            return
        if self.norm is not None:
            dtypes = {one.dtype for one in gradient}
            wide = torch.float32 if dtypes & set(SIXTEEN) else None  # whose norm 16 bits need not hold
            if total is None:
                total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradient, dtype=wide)))
            total = total.to(gradient[0].device, wide or gradient[0].dtype)
            torch._foreach_mul_(gradient, torch.clamp(self.norm * scale / (total + _EPSILON), max=1.0))
        if self.value is not None:
            torch._foreach_clamp_min_(gradient, -self.value * scale)
            torch._foreach_clamp_max_(gradient, self.value * scale)


NO_CLIPPING = Clipping()
