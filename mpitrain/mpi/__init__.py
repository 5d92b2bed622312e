"""The only folder that imports mpi4py.

    register.py        makes torch.distributed know the name "mpi4py"; imports neither torch nor MPI (stdlib
    only) runtime.py         start and ordered end, who is where, collective agreement; ending.py: the end
    after an error op.py waiting.py progress.py engine.py   the one progress engine buffers.py
    tensor -> MPI message, guarded; gpu.py: can this MPI read device memory? process_group.py
    torch.distributed over MPI world.py           answers the effects of roles over the engine

This file imports nothing: `mpi4py.rc` must be set before `mpi4py.MPI` is imported, and only `runtime.start`
may do that.
"""
