"""The backend's name for torch.distributed."""

BACKEND = "mpi4py"
