"""torch.distributed's process group, written on mpi4py."""
