"""A shard's numbers in a buffer that can travel: 64 bytes, the numbers, 64 bytes.

Invariants: a wire buffer is used by whoever holds it and goes back to its pool when the last holder lets go;
nobody writes into a wire buffer that somebody else holds, not even a stamp. The 64 bytes at each end carry the stamp of
what is in it: it is written when the contents are sent for the first time and stays with them, however often they are
sent; the header of each message names it. So a buffer that was half overwritten, or only half arrived, is noticed for
the price of two stores. 64 bytes keep the numbers on a cache line.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch

from mpitrain.codecs import message_statistics
from mpitrain.errors import WireError

PAD_BYTES = 64
_STAMP_VALUES = 1 << 32  # what a header has room for
_stamps = itertools.count(1)  # of all contents that this process has sent


class FixedBuffer:
    """A buffer for `numel` numbers of `dtype`. `body` is the 1-D view of the numbers, `raw` all bytes
    including the pads.
    """

    def __init__(self, numel: int, dtype: torch.dtype, pool: BufferPool | None = None, pin: bool = False):
        size = numel * dtype.itemsize
        padded = -(-size // PAD_BYTES) * PAD_BYTES
        self.raw = torch.zeros(PAD_BYTES + padded + PAD_BYTES, dtype=torch.uint8, pin_memory=pin)
        self.body = self.raw[PAD_BYTES : PAD_BYTES + size].view(dtype)
        self._words = self.raw.numpy().data.cast("q")  # a stamp is the first, and the last
        self.message: Any = None  # of all bytes, for whoever carries them: made once
        self._pool = pool
        self.users = 1
        self._stamp = 0  # of the contents, once they have been sent
        self._count = threading.Lock()  # holders may be threads

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.raw.numel()

    def fit(self, num_bytes: int) -> bool:
        """Whether a payload of so many bytes goes in: of exactly its own size."""
        return num_bytes == self.num_bytes

    def statistics(self) -> dict[str, float]:
        """What there is to report of the numbers."""
        return {}

    def belong_to(self, pool: BufferPool) -> None:
        """It goes to this pool when the last holder lets go."""
        self._pool = pool

    def hold(self) -> FixedBuffer:
        """One holder more."""
        with self._count:
            self.users += 1
        return self

    def release(self) -> None:
        """One holder less; the last one gives the wire buffer back to its pool."""
        with self._count:
            assert self.users > 0, "a wire buffer was released more often than it was held"
            self.users -= 1
            left = self.users
        if left == 0 and self._pool is not None:
            self._pool.give_back(self)

    def rewrite(self, num_holders: int = 1) -> None:
        """Other contents begin, which nobody has been sent; so many holders know of it."""
        assert self.users <= num_holders, "a wire buffer is written into that somebody else holds"
        self._stamp = 0

    def stamp(self) -> int:
        """The stamp of the contents, at both ends from here on: nothing is written where they have one."""
        if not self._stamp:
            self._stamp = next(_stamps) % (_STAMP_VALUES - 1) + 1
            self._words[0] = self._words[-1] = self._stamp
        return self._stamp

    def stamps(self) -> tuple[int, int]:
        """What stands at the two ends."""
        return self._words[0], self._words[-1]


class VariableBuffer:
    """A coded message in a buffer that can travel: a wire buffer whose length is known when it arrives. `body` is the
    message; its length stands in the pad in front, behind the stamp. `take(num_bytes)`: where the buffer comes from.
    """

    def __init__(self, message: torch.Tensor | None = None, take: Callable[[int], FixedBuffer] | None = None):
        self._take = take or _fresh
        self._wire_buffer: FixedBuffer | None = None
        if message is not None:
            self._wire_buffer = FixedBuffer(message.numel(), torch.uint8)
            self._wire_buffer.body.copy_(message)
            self._wire_buffer.raw[8:16].view(torch.int64).fill_(message.numel())

    def fit(self, num_bytes: int) -> bool:
        """Make room for so many bytes."""
        self._wire_buffer = self._take(num_bytes - 2 * PAD_BYTES)
        return self._wire_buffer.num_bytes == num_bytes

    @property
    def wire_buffer(self) -> FixedBuffer:
        """The buffer, once there is one."""
        assert self._wire_buffer is not None, "an empty message"
        return self._wire_buffer

    @property
    def raw(self) -> torch.Tensor:
        """All bytes."""
        return self.wire_buffer.raw

    @property
    def message(self) -> Any:
        """As a wire buffer's."""
        return self.wire_buffer.message

    @message.setter
    def message(self, message: object) -> None:
        self.wire_buffer.message = message

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.wire_buffer.num_bytes

    @property
    def body(self) -> torch.Tensor:
        """The message.

        Raises:
            WireError: its length is not one that fits the buffer.
        """
        length = int(self.wire_buffer.raw[8:16].view(torch.int64))
        if not 0 <= self.wire_buffer.body.numel() - length < PAD_BYTES:
            raise WireError(f"a message of {self.wire_buffer.body.numel()} bytes claims to hold {length}")
        return self.wire_buffer.body[:length]

    def statistics(self) -> dict[str, float]:
        """What the message says of itself: density, bytes, and tau where there is one."""
        return message_statistics(self.body)

    def stamp(self) -> int:
        """As a wire buffer's."""
        return self.wire_buffer.stamp()

    def stamps(self) -> tuple[int, int]:
        """As a wire buffer's."""
        return self.wire_buffer.stamps()

    def hold(self) -> VariableBuffer:
        """One holder more."""
        self.wire_buffer.hold()
        return self

    def release(self) -> None:
        """One holder less."""
        self.wire_buffer.release()


def _fresh(num_bytes: int) -> FixedBuffer:
    return FixedBuffer(num_bytes, torch.uint8)


def wire_dtype(wire: str, full: torch.dtype) -> torch.dtype:
    """The dtype that a strategy's `push_wire` or `reply_wire` names."""
    return full if wire == "full" else {"float16": torch.float16, "bfloat16": torch.bfloat16}[wire]


class BufferPool:
    """Frames of one size, reused; `num_frames` is how many were ever needed at once (the peak of waiting
    buffers).
    """

    def __init__(self, numel: int, dtype: torch.dtype, pin: bool = False):
        self.numel, self.dtype, self.pin = numel, dtype, pin
        self.num_frames = 0
        self._free: list[FixedBuffer] = []

    def adopt(self, wire_buffer: FixedBuffer) -> None:
        """Use a buffer of somebody who needs it no more, and who is its only holder, if it is of this pool's kind."""
        if (wire_buffer.body.numel(), wire_buffer.body.dtype) == (self.numel, self.dtype):
            self.num_frames += 1
            wire_buffer.belong_to(self)
            wire_buffer.release()

    def take(self) -> FixedBuffer:
        """A wire buffer with one holder; its contents are whatever was left in it."""
        if self._free:
            wire_buffer = self._free.pop()
            wire_buffer.users = 1
            wire_buffer.rewrite()
            return wire_buffer
        self.num_frames += 1
        return FixedBuffer(self.numel, self.dtype, self, self.pin)

    def give_back(self, wire_buffer: FixedBuffer) -> None:
        """Called by the wire buffer itself."""
        self._free.append(wire_buffer)
