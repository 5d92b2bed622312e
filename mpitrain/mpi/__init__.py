"""The only folder that imports mpi4py.

    bindings.py         `MPI`, imported after `mpi4py.rc` is set: every other file takes it from there
    runtime.py          this process among the others: what all ranks agree on, the orderly end
    thread_level.py     the level at which MPI was started, and a warning where it is a wrong one
    world.py            answers the effects of roles over the engine; message_header.py is their header on the wire
    engine/             the one progress engine: posting, waiting, the communication thread, queues of collectives
    process_group/      torch.distributed over MPI; register.py makes it known (standard library only at import)
    memory/             from a tensor to an MPI message, also through pinned host memory
    faults/             dead ranks: error reports, abort, agreement, shrinking, the level of fault tolerance
    json_collectives.py, json_messages.py   JSON between ranks, never pickle
    allreduce_plan.py   what decides which algorithm carries an allreduce, and how a resume keeps it
    ping_pong.py        latency and rate between two ranks, for `mpitrain doctor`

This file imports nothing, so that register.py stays light.
"""
