"""Communication hooks for DDP that only this backend can offer.

    ddp.register_comm_hook(None, bfloat16_wire)

halves the bytes of float32 gradients as torch's own bf16_compress_hook does, but the sums are in float32 and the
conversion happens piece by piece while other pieces travel.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from mpitrain.errors import UsageError
from mpitrain.mpi.process_group.reductions import Reductions


def bfloat16_wire(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Mean of the gradients with bfloat16 on the wire; `state` is the process group, or None for the default one."""
    return _mean(state, bucket, torch.bfloat16)


def float16_wire(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Mean of the gradients with float16 on the wire: more digits than bfloat16, but nothing above 65504."""
    return _mean(state, bucket, torch.float16)


def _mean(state: Any, bucket: dist.GradBucket, wire: torch.dtype) -> Future[torch.Tensor]:
    group = dist.group.WORLD if state is None else state
    if not isinstance(group, Reductions):
        raise UsageError(f"a 16-bit wire needs the mpi4py backend, not {dist.get_backend(group)}")
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    future = group.allreduce_on_wire(bucket.buffer(), wire, options).get_future()
    return future.then(lambda done: done.value()[0])
