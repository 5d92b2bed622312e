"""The encoder: gradients in, one message a step out, what was not sent kept for the next.

Invariants: with x the clipped gradient and r the residual,

    u = r + x;  send q = C(u);  r = u - q

so what was sent and what is kept add up to the gradients (error feedback: Seide et al. 2014, Karimireddy et al.
2019). Clipping comes before the residual, per worker, at clip / sqrt(num_workers) (Lin et al. 2018). A NaN or
infinite gradient never enters the residual: the message says so and poisons what it is added to. An encoder's
messages are a function of its state, seed and gradients alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mpitrain.codecs import message_format
from mpitrain.codecs.layout import Layout, Part, Plan, plan_of
from mpitrain.codecs.lazy import torch
from mpitrain.system.looking import is_only_looked_at


@dataclass(eq=False)
class Encoder:
    """Base of the codecs' encoders: one for every stream of messages from one worker.

    Args:
        dense_below: fields of fewer numbers travel in full.
        warmup_steps: so many messages travel in full at first.
        clip: largest norm of the mean gradient this worker may contribute to, 0 for no clipping.
        num_workers: how many contribute to a sum.
        seed, worker: key of the randomness where there is any.
    """

    dense_below: int = 1024
    warmup_steps: int = 0
    clip: float = 0.0
    num_workers: int = 1
    seed: int = 0
    worker: int = 0

    # slots whose sum with what was sent is conserved; "" where nothing is kept
    residual: ClassVar[str] = "residual"

    def __post_init__(self) -> None:
        self.memory = Memory()
        self.step = 0
        self.last: dict[str, float] = {}

    @property
    def is_dense(self) -> bool:
        """Whether the next message travels in full."""
        return self.step < self.warmup_steps

    def encode(self, parts: Sequence[Part], dense: bool = False) -> torch.Tensor:
        """The next message (uint8, host memory), for the gradients in `parts`, which are not changed.

        `dense` sends everything in full, the residual too, which is zero afterwards: what a resynchronisation
        or a change of workers needs.

        Raises:
            UsageError: parts that are not flat float32 tensors of their layout's size.
        """
        plan = plan_of(parts, self.dense_below)
        alpha = self._alpha(parts)
        if alpha is None:
            message = message_format.assemble(
                message_format.Header(message_format.POISON, plan.num_coded, self.dense_below), []
            )
        elif dense or self.is_dense:
            message = self._in_full(parts, plan, alpha)
        else:
            message = self._encode(parts, plan, alpha)
        self.step += 1
        self.last["bytes"] = message.numel()
        return message

    def accumulate(self, parts: Sequence[Part]) -> None:
        """Change `parts` into what a dense message of them would send, and count it as sent: for who sums
        dense numbers by other means."""
        plan = plan_of(parts, self.dense_below)
        alpha = self._alpha(parts)
        if alpha is None:
            for part in parts:
                part.flat.fill_(math.nan)
        else:
            for part in parts:
                part.flat.mul_(alpha)
            for mine, part in zip(self._drain(parts, plan), parts, strict=True):
                part.flat.copy_(mine)
        self.step += 1
        self.last.update(density=1.0, bytes=4.0 * sum(part.flat.numel() for part in parts))

    def residual_norm(self) -> float:
        """Euclidean norm of what is kept back."""
        return self.memory.norm(self.residual) if self.residual else 0.0

    def statistics(self) -> dict[str, float]:
        """Of the last message: density (share of the coded numbers that were sent), bytes, and whatever the
        codec adds."""
        return dict(self.last)

    def state(self) -> dict[str, Any]:
        """{"step", "numbers": JSON-able, "tensors": by "slot/parameter", in host memory}."""
        return {"step": self.step, "numbers": self._numbers(), "tensors": self.memory.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned, to the bit."""
        self.step = state["step"]
        self._restore_numbers(state["numbers"])
        self.memory.restore(state["tensors"])

    # ---- what a codec fills in

    def _encode(self, parts: Sequence[Part], plan: Plan, alpha: float) -> torch.Tensor:
        """The compressed message; changes the memory."""
        raise NotImplementedError

    def reduce(self, parts: Sequence[Part], mean: Callable[[torch.Tensor], None]) -> None:
        """Replace `parts` by their compressed mean over workers; `mean` averages a tensor in place over all. Only for
        codecs that say `averages`."""
        raise NotImplementedError

    def _numbers(self) -> dict[str, float]:
        return {}

    def _restore_numbers(self, numbers: dict[str, float]) -> None:
        pass

    def _drain(self, parts: Sequence[Part], plan: Plan) -> list[torch.Tensor]:
        """What a dense message sends for already clipped `parts`; leaves the residual zero."""
        if not self.residual:
            return [part.flat for part in parts]
        kept = self.memory.slot(self.residual, parts)
        sent = [part.flat + mine for part, mine in zip(parts, kept, strict=True)]
        self.memory.clear(self.residual)
        return sent

    # ---- shared

    def _alpha(self, parts: Sequence[Part]) -> float | None:
        """The factor that clips, or None where a gradient is not finite."""
        # a NaN or an infinity is in the sum of the squares too, at the price of one pass over the memory
        squares = sum(float(torch.dot(part.flat, part.flat)) for part in parts)
        if not math.isfinite(squares) and not all(bool(torch.isfinite(part.flat).all()) for part in parts):
            return None
        if not self.clip:
            return 1.0
        norm = math.hypot(*(float(torch.linalg.vector_norm(part.flat)) for part in parts))
        limit = self.clip / math.sqrt(self.num_workers)
        return limit / norm if norm > limit else 1.0

    def _in_full(self, parts: Sequence[Part], plan: Plan, alpha: float) -> torch.Tensor:
        scaled = parts if alpha == 1.0 else [Part(part.flat * alpha, part.layout) for part in parts]
        sent = [Part(mine, part.layout) for mine, part in zip(self._drain(scaled, plan), parts, strict=True)]
        coded = [sent[part].flat[start:stop].cpu() for part, start, stop, _ in plan.runs]
        self.last["density"] = 1.0
        header = message_format.Header(message_format.DENSE, plan.num_coded, self.dense_below)
        return message_format.assemble(header, [message_format.dense_numbers(sent, plan, 1.0), *coded])

    def _header(self, plan: Plan, kind: int, **fields: Any) -> message_format.Header:
        return message_format.Header(kind, plan.num_coded, self.dense_below, **fields)


# ---- What an encoder keeps from one message to the next: flat tensors beside the parts, keyed by parameter name.
#
# Invariants: a slot (say "residual") has one flat tensor a part, so that a codec works on it at full speed; when the
# layouts change (DDP rebuilds its buckets after the first step) everything moves over by name, and what `state` returns
# does not depend on the layouts at all.


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
        """A copy of every slot: "slot/parameter" -> tensor of the parameter's shape, in host memory; where it is only
        looked at, no copy."""
        found, is_looked_at = dict(self._saved), is_only_looked_at()
        for name, flats in self._flats.items():
            for flat, layout in zip(flats, self._layouts, strict=True):
                for field in layout:
                    piece = flat[field.start : field.start + field.numel]
                    own = piece.detach().cpu()
                    found[f"{name}/{field.name}"] = (own if is_looked_at else own.clone()).view(field.shape)
        return found

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Continue from what `state` returned."""
        self._flats, self._layouts = {}, ()
        self._saved = {name: tensor.detach().clone() for name, tensor in tensors.items()}
