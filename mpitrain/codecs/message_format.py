"""A message: 32 bytes of header, the dense numbers, then what its kind puts there. Always host memory.

Invariants: a message holds all that its decoding needs but the layouts, which the receiver knows. Its length
is exactly what the sections take: the byte count of a message is `message.numel()`, nothing travels outside.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpitrain.codecs.layout import Part, Plan
from mpitrain.codecs.lazy import np, torch
from mpitrain.errors import WireError

_HEADER = struct.Struct("<2sBBIQQfI")
HEADER_BYTES = _HEADER.size
_MAGIC = b"mc"

# The kinds that any codec sends: everything in full, and a gradient that was not finite. Those from 2 on stand in the
# codecs' files.
DENSE, POISON = 0, 1


class Header(NamedTuple):
    """kind: which codec wrote it, and how; coder, scale, extra: the kind's own; num_sent: of those where the kind
    sends some only; num_coded: size of the coded space; dense_below: makes the plan.
    """

    kind: int
    num_coded: int
    dense_below: int
    coder: int = 0
    num_sent: int = 0
    scale: float = 0.0
    extra: int = 0


def assemble(header: Header, sections: Sequence[np.ndarray | torch.Tensor]) -> torch.Tensor:
    """One uint8 tensor of everything."""
    head = _HEADER.pack(
        _MAGIC, header.kind, header.coder, header.dense_below, header.num_coded, header.num_sent, header.scale,
        header.extra,
    )  # fmt: skip
    arrays = [np.frombuffer(head, np.uint8)]
    for section in sections:
        array = section.detach().cpu().contiguous().numpy() if torch.is_tensor(section) else section
        arrays.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return torch.from_numpy(np.concatenate(arrays))


class Sheet:
    """A message of sections whose sizes are known beforehand, written in place: large messages are not copied.

    Sections of wider numbers come first: a view of `dtype` begins at a multiple of its size.
    """

    def __init__(self, header: Header, dense: torch.Tensor, *sections: tuple[int, torch.dtype]):
        head = assemble(header, [dense])
        sizes = [count * dtype.itemsize for count, dtype in sections]
        self.message = torch.empty(head.numel() + sum(sizes), dtype=torch.uint8)
        self.message[: head.numel()] = head
        at = head.numel()
        self.sections: list[torch.Tensor] = []
        for size, (_, dtype) in zip(sizes, sections, strict=True):
            self.sections.append(self.message[at : at + size].view(dtype))
            at += size


def read_header(message: torch.Tensor) -> Header:
    """The header of `message`.

    Raises:
        WireError: these bytes are no message.
    """
    if message.numel() < HEADER_BYTES:
        raise WireError(f"a compressed message has at least {HEADER_BYTES} bytes, got {message.numel()}")
    magic, kind, coder, below, coded, count, scale, extra = _HEADER.unpack(
        message[:HEADER_BYTES].numpy().tobytes()
    )
    if magic != _MAGIC:
        raise WireError(f"not a compressed message: it starts with {magic!r}, kind {kind}")
    return Header(kind, coded, below, coder, count, scale, extra)


class Reader:
    """Takes sections off a message, one after another."""

    def __init__(self, message: torch.Tensor):
        self._bytes, self._at = message.numpy(), HEADER_BYTES

    def take(self, count: int, dtype: str) -> np.ndarray:
        """The next `count` numbers of a numpy dtype such as "<f4".

        Raises:
            WireError: the message is too short.
        """
        stop = self._at + count * np.dtype(dtype).itemsize
        if stop > len(self._bytes):
            raise WireError(f"a compressed message ends at byte {len(self._bytes)}, needs {stop}")
        section = self._bytes[self._at : stop]
        self._at = stop
        return section.view(dtype) if section.ctypes.data % 8 == 0 else section.copy().view(dtype)

    def tensor(self, count: int, dtype: str, device: torch.device) -> torch.Tensor:
        """The same as a tensor on a device."""
        return torch.from_numpy(self.take(count, dtype)).to(device)

    def rest(self) -> np.ndarray:
        """All bytes that are left."""
        return self.take(len(self._bytes) - self._at, "|u1")


def dense_numbers(parts: Sequence[Part], plan: Plan, alpha: float) -> torch.Tensor:
    """The numbers that travel in full, times alpha."""
    pieces = [parts[part].flat[start:stop] for part, start, stop, _ in plan.dense]
    return torch.cat(pieces).mul(alpha) if pieces else torch.zeros(0)


class Received(NamedTuple):
    """A message on its way into tensors.

    header: its own; reader: stands behind the dense numbers; parts, plan: what it is added to; weight: what it is
    multiplied by.
    """

    header: Header
    reader: Reader
    parts: Sequence[Part]
    plan: Plan
    weight: float


class Decoder(NamedTuple):
    """How messages of one kind are read: `add` adds what one says to its parts.

    is_sparse: it holds `num_sent` of the coded numbers, not all; scale: the name of the header's scale in statistics.
    """

    add: Callable[[Received], None]
    is_sparse: bool = False
    scale: str = ""


def add_dense(received: Received) -> None:
    """Add what `dense_numbers` sent."""
    _, reader, parts, plan, weight = received
    numbers = torch.from_numpy(reader.take(plan.num_dense, "<f4"))
    for part, start, stop, offset in plan.dense:
        flat = parts[part].flat
        flat[start:stop].add_(numbers[offset : offset + stop - start].to(flat.device), alpha=weight)
