"""What is said where a launch asks for a fault-tolerance level that its MPI or launcher does not have: by the launch
before ranks exist, and by the ranks of one that was made by hand. Standard library only.
"""

# What there is without ULFM: Cray's and Intel's users cannot take another MPI.
WITHOUT_ULFM = (
    "leave it out, which is `restart`: `mpitrain launch` starts the run again from its newest checkpoint; under srun, "
    "MPICH, Cray MPICH, Intel MPI and MVAPICH have `heartbeat` (mpitrain launch --ft heartbeat), by which strategies "
    "with servers go on without a worker that dies"
)
