"""What an encoder keeps from one message to the next: flat tensors beside the parts, keyed by parameter name.

Invariants: a slot (say "residual") has one flat tensor a part, so that a codec works on it at full speed;
when the layouts change (DDP rebuilds its buckets after the first step) everything moves over by name, and what
`state` returns does not depend on the layouts at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.codecs.layout import Layout, Part
from mpitrain.codecs.lazy import torch


class Memory:
    """Named slots of per-parameter numbers, zero at first."""

    def __init__(self) -> None:
        self._layouts: tuple[Layout, ...] = ()
        self._flats: dict[str, list[torch.Tensor]] = {}
        self._saved: dict[str, torch.Tensor] = {}

    def slot(self, name: str, parts: Sequence[Part]) -> list[torch.Tensor]:
        """The slot's flat tensors, one a part, of its size and on its device; changed in place."""
        layouts = tuple(part.layout for part in parts)
        if layouts != self._layouts:
            self._saved = self.state()
            self._flats, self._layouts = {}, layouts
        if name not in self._flats:
            self._flats[name] = [torch.zeros_like(part.flat) for part in parts]
            for flat, layout in zip(self._flats[name], layouts, strict=True):
                for field in layout:
                    saved = self._saved.pop(f"{name}/{field.name}", None)
                    if saved is not None:
                        flat[field.start : field.start + field.numel].copy_(saved.reshape(-1))
        return self._flats[name]

    def clear(self, name: str) -> None:
        """Make a slot zero."""
        self._saved = {key: value for key, value in self._saved.items() if not key.startswith(f"{name}/")}
        for flat in self._flats.get(name, []):
            flat.zero_()

    def norm(self, name: str) -> float:
        """Euclidean norm of a slot over all parts."""
        flats = self._flats.get(name, [])
        return float(sum(float(torch.linalg.vector_norm(flat)) ** 2 for flat in flats) ** 0.5)

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of every slot: "slot/parameter" -> tensor of the parameter's shape, in host memory."""
        found = dict(self._saved)
        for name, flats in self._flats.items():
            for flat, layout in zip(flats, self._layouts, strict=True):
                for field in layout:
                    piece = flat[field.start : field.start + field.numel]
                    found[f"{name}/{field.name}"] = piece.detach().cpu().clone().view(field.shape)
        return found

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Continue from what `state` returned."""
        self._flats, self._layouts = {}, ()
        self._saved = {name: tensor.detach().clone() for name, tensor in tensors.items()}
