"""The codecs of all ranks of an allreduce in one process: what their messages make of the gradients.

Invariants: as `training/synchronous/codec_hooks.py`, with the encoders of all ranks side by side: the same buckets, the
same messages in the order of ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import nn

from mpitrain.codecs import Field, Layout, Part, add_message
from mpitrain.codecs.base import Codec
from mpitrain.errors import UsageError
from mpitrain.model.recipe import Gradients
from mpitrain.model.wire.codec_registry import make_encoder
from mpitrain.system import background

Gradient = list[torch.Tensor | None]


class CodecsInOneProcess:
    """The codec of every rank.

    Args:
        codec: any but `none`; size: how many ranks; seed: of its randomness.
        buckets: the numbers of the trained parameters that travel together, as `gradient_buckets` gives them.

    Attributes:
        averaged_bytes, gathered_bytes: of the last step: what an allreduce took each time, and what each rank's
            message was padded to, or 0.
    """

    def __init__(self, codec: Codec, size: int, seed: int, buckets: Sequence[Sequence[int]]):
        self.codec, self.size, self.buckets = codec, size, buckets
        self.owns: Sequence[Gradients] = ()
        self.cast: torch.dtype | None = getattr(torch, codec.cast) if codec.cast else None
        self.encoders = [] if self.cast else [make_encoder(codec, size, rank, seed) for rank in range(size)]
        self.averaged_bytes: list[int] = []
        self.gathered_bytes, self.num_steps, self.sent_bytes = 0, 0, 0.0

    def attach(self, module: nn.Module, owns: Sequence[Gradients]) -> None:
        """Take the names of the parameters, and what shapes every rank's gradient before the codec."""
        self.owns = owns
        named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        odd = [name for name, one in named if one.dtype != torch.float32]
        if odd and not self.cast:
            raise UsageError(
                f"{self.codec}: gradients must be float32; {odd[0]} is not. float16() and bfloat16() take any"
            )
        self._names = {id(one): name for name, one in named}

    @property
    def exchanges_at_end(self) -> bool:
        """Whether nothing travels before the whole gradient is there."""
        return self.cast is None or self.owns[0].rule.shapes

    def statistics(self) -> dict[str, float]:
        """As the hook's of the run over MPI, without what takes real time."""
        found = self.encoders[0].statistics() if self.encoders else {"bytes": float(sum(self.averaged_bytes))}
        if self.encoders and self.encoders[0].residual:
            found["residual_norm"] = self.encoders[0].residual_norm()
        return found | {"mean_bytes": self.sent_bytes / max(1, self.num_steps)}

    @torch.no_grad()
    def reduce(self, parameters: Sequence[nn.Parameter], everybody: list[Gradient]) -> None:
        """What the ranks' messages make of their gradients becomes the gradient."""
        layouts = [self._layout([parameters[index] for index in bucket]) for bucket in self.buckets]
        parts = [self._parts(parameters, gradient, layouts) for gradient in everybody]
        for own, some in zip(self.owns, parts, strict=True):
            own.shape([part.flat for part in some])
        self.averaged_bytes, self.gathered_bytes = [], 0
        self.num_steps += 1
        self._exchange(parts)
        for bucket, part in zip(self.buckets, parts[0], strict=True):
            pieces = part.flat.split([parameters[index].numel() for index in bucket])
            for index, piece in zip(bucket, pieces, strict=True):
                parameters[index].grad = piece.view_as(parameters[index]).clone()

    def _layout(self, parameters: Sequence[nn.Parameter]) -> Layout:
        fields, start = [], 0
        for parameter in parameters:
            fields.append(Field(self._names[id(parameter)], tuple(parameter.shape), start))
            start += parameter.numel()
        return tuple(fields)

    def _parts(
        self, parameters: Sequence[nn.Parameter], gradient: Gradient, layouts: Sequence[Layout]
    ) -> list[Part]:
        parts = []
        for bucket, layout in zip(self.buckets, layouts, strict=True):
            whole = [(gradient[index], parameters[index]) for index in bucket]
            flat = [(torch.zeros_like(one) if own is None else own).reshape(-1) for own, one in whole]
            parts.append(Part(torch.cat(flat), layout))
        return parts

    def _exchange(self, parts: list[list[Part]]) -> None:
        """The first rank's parts become what all ranks get."""
        if self.cast is not None:
            for together in zip(*parts, strict=True):
                small = [part.flat.to(self.cast).div_(self.size) for part in together]
                together[0].flat.copy_(self._sum(small))
                self._count(small[0].numel() * small[0].element_size())
            self.sent_bytes += sum(self.averaged_bytes)
            return
        if self.encoders[0].is_dense:
            for encoder, own in zip(self.encoders, parts, strict=True):
                encoder.accumulate(own)
            for together in zip(*parts, strict=True):
                self._average([part.flat for part in together])
        elif self.codec.averages:
            self._average_together(parts)
        else:
            messages = [encoder.encode(own) for encoder, own in zip(self.encoders, parts, strict=True)]
            self.gathered_bytes = -(-max(message.numel() for message in messages) // 8) * 8
            for part in parts[0]:
                part.flat.zero_()
            for message in messages:
                add_message(message, parts[0], 1.0 / self.size)
        self.sent_bytes += int(self.encoders[0].statistics()["bytes"])

    def _sum(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """In the order of ranks, 16-bit floats in float32."""
        total = tensors[0].float() if tensors[0].itemsize == 2 else tensors[0].clone()
        for tensor in tensors[1:]:
            total.add_(tensor)
        return total.to(tensors[0].dtype)

    def _average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Every one of them becomes their mean."""
        mean = self._sum(tensors).div_(self.size)
        for tensor in tensors:
            tensor.copy_(mean)
        self._count(mean.numel() * mean.element_size())

    def _count(self, num_bytes: int) -> None:
        self.averaged_bytes.append(num_bytes)

    def _average_together(self, parts: list[list[Part]]) -> None:
        """Encoders ask for means in the middle of their work: each works in a thread, one after another between two
        questions."""
        asked: list[torch.Tensor | None] = [None] * self.size
        failures: list[BaseException] = []
        all_asked = threading.Barrier(
            self.size, lambda: self._average([one for one in asked if one is not None])
        )

        def work(rank: int) -> None:
            def mean(tensor: torch.Tensor) -> None:
                asked[rank] = tensor
                all_asked.wait()

            try:
                with torch.no_grad():
                    self.encoders[rank].reduce(parts[rank], mean)
            except BaseException as error:  # raised again below
                failures.append(error)
                all_asked.abort()

        threads = [background.start(f"codec-{rank}", work, rank) for rank in range(self.size)]
        for thread in threads:
            thread.join()
        for error in failures:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
