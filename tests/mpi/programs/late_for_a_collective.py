"""One rank does not come to a collective, in DDP's own code, within the timeout of the group."""

from datetime import timedelta

import torch
import torch._dynamo
import torch.distributed as dist

import mpitrain  # noqa: F401
from mpitrain.mpi.runtime import start

start().barrier()
dist.init_process_group("mpi4py", timeout=timedelta(seconds=5))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
if dist.get_rank() == 0:
    for call in (
        lambda: model(torch.ones(2, 3)).sum().backward(),
        dist.barrier,
    ):  # in DDP's C++, and ever after
        try:
            call()
        except (RuntimeError, TimeoutError) as error:
            assert "TimeoutError" in repr(error) and "not all ranks have called it" in str(error), error
            print("told: timeout", flush=True)
start().barrier()  # where rank 1 has been all the time
if dist.get_rank() == 1:
    try:
        dist.all_reduce(torch.ones(3))
    except TimeoutError as error:
        print(f"told: {error}", flush=True)
