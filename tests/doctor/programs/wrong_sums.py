"""The canary on a stand-in device, the processor, over an MPI that changes messages: of a rank in `WRONG`, the named
buffer is read from the wrong place (a message), or the sum is taken of something else; both report success."""

from pathlib import Path

import torch

from mpitrain.doctor import canary, pairs
from mpitrain.mpi.memory import buffers
from mpitrain.mpi.runtime import start

# Rank -> which of a size's four buffers: received, sent, summed, the sum.
WRONG: tuple[dict[int, int], ...] = ({}, {1: 1}, {2: 4}, {0: 3, 2: 1})

runtime = start()
comm, gpu = pairs.run_comm(runtime, None, figures=Path("comm.json")), canary.run_canary(runtime)
print(f"codes {comm} {gpu}")
message_of = buffers.message_of
waits: list[int] = []
for wrong in WRONG:
    calls: list[int] = []

    def changing(tensor, *, wrong=wrong, calls=calls, **options):
        calls.append(1)
        changed = wrong.get(runtime.rank) == len(calls) - 1
        return message_of(torch.zeros_like(tensor) if changed else tensor, **options)

    buffers.message_of = changing
    code = canary.examine(runtime, torch.device("cpu"), lambda: waits.append(1))
    print(f"canary {code} of {len(calls)}, waited {len(waits)}")
