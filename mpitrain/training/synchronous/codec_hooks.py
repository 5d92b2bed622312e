"""DDP communication hooks for codecs: over the "mpi4py" group and any other that torch has.

Invariants: every rank adds the same messages in rank order, so replicas hold the same bits. Three ways:

    float16, bfloat16   each bucket is cast and averaged by the group's allreduce, while backward still runs
    powersgd            the thin matrices are averaged, once a step
    all others          one message a rank and step, for all buckets together, handed to all (allgather)

The last two exchange when the last bucket is ready: their messages are so small that two collectives a step beat
two a bucket. Where gradients are clipped, all do: each rank clips its own, before the codec, and its norm is known
when all buckets are there. While a codec's warm-up lasts, buckets are averaged in full. Replaces DDP's own reduction,
so a parameter that got no gradient counts as zero.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from mpitrain import torch_versions
from mpitrain.codecs import Encoder, Field, Layout, Part, add_message
from mpitrain.codecs.base import Codec
from mpitrain.devices import accelerator
from mpitrain.errors import UsageError
from mpitrain.model.gradient.loss_pass import passed
from mpitrain.model.recipe import GradientRule
from mpitrain.model.wire.codec_registry import make_encoder, merge_states
from mpitrain.system import trace

_allgather = torch_versions.all_gather_single()


class CodecHook:
    """The state of the hook: an encoder, the buckets of the step under way, and what was measured.

    Args:
        parameters: (name, parameter) as the module has them; residuals are kept by these names.
        codec: any but `none`.
        group: the ranks, default all.
        seed: of the codec's randomness.

    Attributes:
        own_gradients: shape this rank's gradient before the codec.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        codec: Codec,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ):
        self.codec, self.group = codec, group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.own_gradients = GradientRule().begin(self.rank)
        self._names = {id(parameter): name for name, parameter in parameters}
        self._cast: torch.dtype | None = getattr(torch, codec.cast) if codec.cast else None
        self.encoder: Encoder | None = None if self._cast else make_encoder(codec, self.size, self.rank, seed)
        self._waiting: list[tuple[Part, Future[Any]]] = []
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self.num_steps, self.sent_bytes, self.codec_s = 0, 0, 0.0
        self._cast_bytes = 0

    def __call__(self, state: object, bucket: dist.GradBucket) -> Future[Any]:
        """What DDP calls for every bucket; the future's value replaces the bucket."""
        if self._cast is not None and not self.own_gradients.rule.shapes:
            return self._cast_and_reduce(bucket.buffer(), bucket.index() == 0, bucket.is_last())
        future: Future[Any] = Future(devices=accelerator.for_future(bucket.buffer()))
        self._waiting.append((Part(bucket.buffer(), self._layout(bucket)), future))
        if bucket.is_last():
            waiting, self._waiting = self._waiting, []
            parts = [part for part, _ in waiting]
            self.own_gradients.shape([part.flat for part in parts])
            self._exchange(parts)
            for part, done in waiting:
                done.set_result(part.flat)
        return future

    def statistics(self, with_norm: bool = True) -> dict[str, float]:
        """Of the last step: density, bytes sent by this rank and what the codec adds (tau); bytes and codec
        milliseconds as means over the steps; the residual's norm now, which costs a pass over it."""
        found = {"bytes": float(self._cast_bytes)} if self.encoder is None else self.encoder.statistics()
        if with_norm and self.encoder is not None and self.encoder.residual:
            found["residual_norm"] = self.encoder.residual_norm()
        steps = max(1, self.num_steps)
        return found | {"mean_bytes": self.sent_bytes / steps, "codec_ms": 1e3 * self.codec_s / steps}

    def state(self) -> dict[str, Any]:
        """The encoder's: {"step", "numbers", "tensors"}; empty for a cast."""
        return self.encoder.state() if self.encoder is not None else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        if self.encoder is not None:
            self.encoder.restore(state)

    def restore_shares(self, first: Any, states: list[dict[str, Any]], num_written: int) -> None:
        """Continue from what `num_written` ranks had, of which `states` fall to this one and `first` was rank 0's
        (None: start anew): the mean over ranks of what was kept back stays what it was."""
        if self.encoder is not None and first:
            self.restore(merge_states(first, states, self.size / num_written))

    def _layout(self, bucket: dist.GradBucket) -> Layout:
        parameters = bucket.parameters()
        key = tuple(id(parameter) for parameter in parameters)
        if key not in self._layouts:
            fields, start = [], 0
            for parameter in parameters:
                fields.append(Field(self._names[id(parameter)], tuple(parameter.shape), start))
                start += parameter.numel()
            self._layouts[key] = tuple(fields)
        return self._layouts[key]

    def _cast_and_reduce(self, flat: torch.Tensor, is_first: bool, is_last: bool) -> Future[Any]:
        began_s = time.perf_counter()
        with trace.span("cast", trace.CODEC):
            small = flat.to(self._cast).div_(self.size)
        self._count(small.numel() * small.element_size(), began_s, is_last, is_first)
        work = dist.all_reduce(small, group=self.group, async_op=True)
        assert work is not None

        def back(done: Future[Any]) -> torch.Tensor:
            done.value()  # raises what the collective raised
            return flat.copy_(small)

        future: Future[Any] = work.get_future()
        return future.then(back)

    def _count(self, num_bytes: int, began_s: float, is_last: bool, is_first: bool) -> None:
        self._cast_bytes = num_bytes + (0 if is_first else self._cast_bytes)
        self.sent_bytes += num_bytes
        self.codec_s += time.perf_counter() - began_s
        self.num_steps += is_last

    def _exchange(self, parts: list[Part]) -> None:
        if self._cast is not None:
            last = len(parts) - 1
            casts = [
                self._cast_and_reduce(part.flat, number == 0, number == last)
                for number, part in enumerate(parts)
            ]
            for cast in casts:
                cast.wait()
            return
        encoder = self.encoder
        assert encoder is not None
        self.num_steps += 1
        if encoder.is_dense:
            encoder.accumulate(parts)
            for part in parts:
                self._mean(part.flat)
        elif self.codec.averages:
            exchanged_s = [0.0]

            def mean(tensor: torch.Tensor) -> None:
                started_s = time.perf_counter()
                self._mean(tensor)
                exchanged_s[0] += time.perf_counter() - started_s

            began_s = time.perf_counter()
            with trace.span("encode and decode", trace.CODEC):
                encoder.reduce(parts, mean)
            self.codec_s += time.perf_counter() - began_s - exchanged_s[0]
        else:
            began_s = time.perf_counter()
            with trace.span("encode", trace.CODEC):
                message = encoder.encode(parts)
            self.codec_s += time.perf_counter() - began_s
            messages = self._allgather(message, parts[0].flat.device)
            began_s = time.perf_counter()
            with trace.span("decode", trace.CODEC):
                for part in parts:
                    part.flat.zero_()
                for other in messages:
                    add_message(other, parts, 1.0 / self.size)
            self.codec_s += time.perf_counter() - began_s
        self.sent_bytes += int(encoder.statistics()["bytes"])

    def _mean(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)
        tensor.div_(self.size)

    def _allgather(self, message: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
        """Every rank's message, in rank order: sizes first, then all padded to the longest."""
        size = torch.tensor([message.numel()], dtype=torch.int64, device=device)
        sizes = size.new_zeros(self.size)
        _allgather(sizes, size, group=self.group)
        lengths = sizes.tolist()
        longest = -(-max(lengths) // 8) * 8
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: message.numel()] = message.to(device)
        everything = padded.new_empty(longest * self.size)
        _allgather(everything, padded, group=self.group)
        rows = everything.cpu().view(self.size, longest)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def attach_codec(
    parallel: DistributedDataParallel,
    codec: Codec,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
) -> CodecHook:
    """Make a DDP module exchange its gradients by `codec`; the returned hook has `statistics`,
    `state`, `restore`.

    Raises:
        UsageError: gradients that are not float32, where the codec is more than a cast.
    """
    named = [(name, p) for name, p in passed(parallel.module).named_parameters() if p.requires_grad]
    odd = [name for name, parameter in named if parameter.dtype != torch.float32]
    if odd and not codec.cast:
        raise UsageError(
            f"{codec}: gradients must be float32; {odd[0]} is not. float16() and bfloat16() take any"
        )
    hook = CodecHook(named, codec, group, seed)
    reattach(parallel, hook)
    return hook


def reattach(parallel: DistributedDataParallel, hook: CodecHook) -> None:
    """Go on with `hook` under another DDP of the same module."""
    parallel.register_comm_hook(None, _Call(hook))


class _Call:
    """DDP wants a callable with annotations of just these types and a name."""

    def __init__(self, hook: CodecHook):
        self._hook = hook
        self.__name__ = self.__qualname__ = f"{hook.codec.name}_hook"

    def __call__(self, state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        return self._hook(state, bucket)
