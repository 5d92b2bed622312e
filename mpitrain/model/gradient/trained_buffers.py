"""Buffers that take part in training: what a forward pass reads that is no parameter, and may have changed.

Invariants: running statistics of torch's BatchNorm and InstanceNorm are none of them, since a training step reads only
the statistics of its batch; all others may be (a spectral norm's vectors, a codebook, a queue, a running scale).
"""

from __future__ import annotations

from torch import nn

from mpitrain.torch_versions import NormWithStatistics


def trained_buffers(module: nn.Module) -> list[str]:
    """Their names."""
    return [
        f"{prefix}{'.' if prefix else ''}{name}"
        for prefix, one in module.named_modules()
        if not isinstance(one, NormWithStatistics)
        for name, buffer in one.named_buffers(recurse=False)
        if buffer is not None
    ]
