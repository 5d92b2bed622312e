"""Zeros that take memory where they are written, and not before.

Invariants: the kernel commits a page of 4 KiB when it is first touched, and counts nothing before that, so a table may
be larger than what is there as long as what is used of it is not. Larger pages are declined: a row would commit 2 MiB.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's, where this Python does not name it


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros in host memory of its own.

    Raises:
        MemoryError: the address space is used up.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if not num_bytes:
        return torch.zeros(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except OSError as error:
        raise MemoryError(f"{num_bytes:,} bytes for a tensor of shape {shape}: {error}") from error
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).view(shape)
