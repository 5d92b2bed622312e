"""Whether all workers of a wrapped loop train on the same samples, as where nobody has divided them: told once.

Invariants: it costs no message. A worker whose own first gradient points where the mean of all does computes what all
others do; scaling and clipping turn no gradient. Of each parameter's gradient the first numbers are looked at.
"""

from __future__ import annotations

import torch

from mpitrain.system.saying import tell

_NUM_LOOKED_AT = 1000  # of each gradient
_APART = 1e-10  # of which a cosine is less than 1, where roundings alone differ


class SameSamples:
    """Looks at the first gradient of a worker that is one of `num_workers`."""

    def __init__(self, num_workers: int):
        self.num_workers = num_workers
        self.looks = num_workers > 1
        self._own: dict[torch.Tensor, torch.Tensor] = {}

    def see(self, parameter: torch.Tensor, gradient: object) -> None:
        """This worker's own is about to be averaged, and is the first."""
        if not isinstance(gradient, torch.Tensor) or gradient.is_sparse or parameter.grad is not None:
            self.looks = False
            return
        self._own[parameter] = gradient.detach().reshape(-1)[:_NUM_LOOKED_AT].clone()

    def judge(self) -> str:
        """Before a step, what there is to tell; afterwards nothing is looked at any more."""
        looked, own = self.looks, self._own
        self.looks, self._own = False, {}
        pairs = [
            (mine, one.grad.reshape(-1)[:_NUM_LOOKED_AT]) for one, mine in own.items() if one.grad is not None
        ]
        if not looked or not pairs:
            return ""
        mine, mean = (torch.cat([pair[at].double() for pair in pairs]) for at in (0, 1))
        length = float(mine.norm() * mean.norm())
        if not length or not float(mine @ mean) / length > 1 - _APART:
            return ""
        return (
            f"this worker's first gradient is the mean of all {self.num_workers} workers': do they train on the same "
            "samples? mpitrain.worker_index() of mpitrain.num_workers() is whose part is whose, as in "
            "DistributedSampler(dataset, mpitrain.num_workers(), mpitrain.worker_index())"
        )

    def tell(self, rank: int) -> None:
        """Judge, and let one of them say so."""
        if (text := self.judge()) and rank == 0:
            tell(f"mpitrain: {text}")
