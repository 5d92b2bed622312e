"""Does this MPI carry device memory, to the bit? Run it as a step of its own: a wrong answer may be a crash.

Invariants: contents are compared, because an MPI that copies from the wrong place reports success. What it asks
is whether `MPITRAIN_GPU_BUFFERS=on` may be set; nothing is decided for the user. A library that says that it cannot is
believed, for it would crash, unless the variable is set already.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpitrain.errors import EXIT_OK, EXIT_PREFLIGHT_FAILED
from mpitrain.system.launched.launch_variables import node_name
from mpitrain.system.saying import say

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime

SIZES = (256, 1 << 21)  # numbers: an eager message and a rendezvous one


def run_canary(runtime: Runtime) -> int:
    """`doctor --gpu-mpi`: prints on rank 0; the exit code on every rank."""
    from mpitrain.devices import accelerator
    from mpitrain.mpi.memory.device_aware import SILENT, gpu_aware

    aware, why = gpu_aware()
    os.environ["MPITRAIN_GPU_BUFFERS"] = "on"  # the question is what happens then
    gpu_aware.cache_clear()
    kind = accelerator.kind()
    lacking = None if kind is not None else node_name()
    without = sorted({name for name in runtime.allgather(lacking) if name})
    if without:
        if runtime.rank == 0:
            say(f"unfit: no accelerator on {', '.join(without)}")
        return EXIT_PREFLIGHT_FAILED
    if not aware and why != SILENT:
        if runtime.rank == 0:
            say(f"unfit: {why}: device tensors go through pinned host memory")
        return EXIT_PREFLIGHT_FAILED
    assert kind is not None  # on this node as on every other
    device = accelerator.of_rank(kind, runtime.local_rank)
    return examine(runtime, device, lambda: accelerator.wait_for_all(device))


def examine(runtime: Runtime, device: Any, wait: Callable[[], None]) -> int:
    """Compare contents on one device a rank, print on rank 0 what came out wrong; the exit code on every rank.

    Args:
        device: this rank's, a `torch.device`.
        wait: returns when the device has done all that was asked of it: MPI knows no streams.
    """
    faults = [text for texts in runtime.allgather(_faults(runtime, device, wait)) for text in texts]
    if runtime.rank == 0:
        for text in faults:
            say(f"unfit: {text}")
        say("unfit" if faults else "fit: MPITRAIN_GPU_BUFFERS=on may be set")
    return EXIT_PREFLIGHT_FAILED if faults else EXIT_OK


def _faults(runtime: Runtime, device: Any, wait: Callable[[], None]) -> list[str]:
    """What came out wrong on this rank: a ring of point-to-point messages and an allreduce, small and large."""
    import torch

    from mpitrain.mpi.memory.buffers import message_of

    faults = []
    left, right = (runtime.rank - 1) % runtime.size, (runtime.rank + 1) % runtime.size
    for size in SIZES:
        sent = torch.arange(size, dtype=torch.float32, device=device) + runtime.rank
        got = torch.full_like(sent, -1.0)
        wait()
        requests = [runtime.comm.Irecv(message_of(got), left), runtime.comm.Isend(message_of(sent), right)]
        for request in requests:
            request.Wait()
        if not torch.equal(got, torch.arange(size, dtype=torch.float32, device=device) + left):
            faults.append(
                f"rank {runtime.rank} on {node_name()}: {size * 4} bytes from rank {left} arrived changed"
            )
        total = torch.ones(size, device=device)
        summed = torch.zeros_like(total)
        wait()
        runtime.comm.Allreduce(message_of(total, reduction=True), message_of(summed, reduction=True))
        if not torch.equal(summed, torch.full_like(summed, float(runtime.size))):
            faults.append(f"rank {runtime.rank} on {node_name()}: an allreduce of {size * 4} bytes is wrong")
    return faults
