"""The only folder that imports mpi4py.

    register.py         makes torch.distributed know the name "mpi4py"; stdlib only, `import mpitrain` runs it
    bindings.py         `MPI`, imported after `mpi4py.rc` is set: everybody else takes it from there
    runtime.py          who this process is, what all ranks agree on, the orderly end; with
                        exchange.py (JSON, never pickle), places.py (names of ranks), ending.py (after an error)
    engine.py           the one progress engine: posting, waiting, the communication thread; with
                        op.py (what is under way), progress.py (tests requests), waiting.py (when to sleep)
    buffers.py          tensor -> MPI message, guarded; with staging.py and gpu.py for device memory
    process_group.py    torch.distributed over MPI; with reduction.py (which operation) and work.py (what is returned)
    world.py, wire.py   answers the effects of roles over the engine

This file imports nothing, so that register.py stays light.
"""
