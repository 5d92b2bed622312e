"""Whether replicas that must agree do: what they hold is compared by fingerprints.

Invariants: every rank comes to the same comparisons, at steps that counts alone decide, at every validation and before
every checkpoint, and reaches the same verdict. Where nothing has parted, a rank sends a few bytes for each tensor. Sums
that other processors round otherwise are told, and end nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Any

import torch

from mpitrain.errors import ReplicasPartedError
from mpitrain.model.in_place import COLUMNS, WAY_OUT, Rarely, fingerprints
from mpitrain.strategies.base import Strategy

if TYPE_CHECKING:
    from mpitrain.system.launched.ranks import Ranks

ROUNDING = 1e-6  # of a tensor's length


class ReplicaGuard:
    """Compares what ranks hold.

    Args:
        runtime: of all ranks; strategy: under which they train.
        held: this rank's tensors by name, which those with the same `part` hold, too.
        tell: told on rank 0 of what differs by rounding, once.
        changed: parameters that this rank's forward passes have changed in place, as far as is known.
    """

    def __init__(
        self,
        runtime: Ranks,
        strategy: Strategy,
        held: Callable[[], list[tuple[str, torch.Tensor]]],
        tell: Callable[..., None] | None = None,
        changed: Callable[[], Collection[str]] = tuple,
        part: Hashable = 0,
    ):
        self.runtime, self.strategy, self.part = runtime, strategy, part
        self._held, self._changed, self._due = held, changed, Rarely()
        self._tell = tell if runtime.rank == 0 else None

    def after_step(self) -> None:
        """Compare, if it is time to; every rank calls it after every step at which all hold the same."""
        if self._due():
            self.compare()

    def compare(self) -> None:
        """Collective.

        Raises:
            ReplicasPartedError: the ranks hold different numbers; on all ranks.
        """
        runtime = self.runtime
        if runtime.size == 1:
            return
        named = self._held()
        everybody = runtime.allgather([self.part, fingerprints([one for _, one in named]).tolist()])
        first: dict[Any, tuple[int, list[int]]] = {}
        for rank, (part, prints) in enumerate(everybody):
            other, expected = first.setdefault(part, (rank, prints))
            if prints != expected:
                index = next(
                    i for i, pair in enumerate(zip(prints, expected, strict=True)) if pair[0] != pair[1]
                )
                self._judge(part, index, rank, other)
                return

    def _judge(self, part: Any, index: int, rank: int, other: int) -> None:
        """Two ranks of a part hold another tensor of this number."""
        runtime = self.runtime
        sketches = runtime.allgather(self._sketch(index) if part == self.part else None)
        name, length, own, changed = sketches[rank]
        of_other = torch.tensor(sketches[other][2])
        distance = float((torch.tensor(own) - of_other).norm()) / (sketches[other][1] or length or 1.0)
        if distance <= ROUNDING:
            tell, self._tell = self._tell, None
            if tell is not None:
                tell("replicas differ by rounding", tensor=name, ranks=[other, rank], distance=distance)
            return
        step, why = runtime.step + 1, ""
        if changed:
            why = f", and the forward pass or the loss changes {changed!r} in place: {WAY_OUT}"
        else:
            why = (
                ": a parameter must be changed by its optimizer alone, by gradients of the loss that is returned, and "
                "what a forward pass changes must not depend on the batch; torch.distributed.all_reduce in it makes a "
                "buffer the mean of all"
            )
        raise ReplicasPartedError(
            f"{self.strategy}: after step {step}, {name!r} of rank {rank} is no longer that of rank {other} "
            f"(apart by {distance:.2g} of its length), though all must hold the same{why}"
        )

    @torch.no_grad()
    def _sketch(self, index: int) -> list[Any]:
        """(name, length, sums of columns, a parameter that is changed in place) of one tensor."""
        name, tensor = self._held()[index]
        flat = tensor.detach().reshape(-1)
        flat = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).to("cpu", torch.float64)
        flat = torch.nan_to_num(torch.cat([flat, flat.new_zeros(-flat.numel() % COLUMNS)]))
        changed = next(iter(self._changed()), "")
        return [name, float(flat.norm()), flat.view(-1, COLUMNS).sum(0).tolist(), changed]
