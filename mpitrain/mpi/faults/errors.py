"""What an error says about other ranks: one is dead, or one has called the job off."""

from mpitrain.errors import MpitrainError
from mpitrain.mpi.bindings import MPI

CALLED_OFF = "another rank has ended the job; its message says why"


class CalledOffError(MpitrainError):
    """Another rank has ended the job, and has reported why."""


def is_dead_peer(error: BaseException) -> bool:
    """True if this error says that the very rank it was about is dead (ULFM), not that the job was called off."""
    dead = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)
    return isinstance(error, MPI.Exception) and error.Get_error_class() in dead


def is_lost_peer(error: BaseException) -> bool:
    """True if this error only says that another rank has failed (MPI error classes of ULFM).

    torch turns exceptions of a collective into a RuntimeError that keeps only the text, so the text counts too.
    """
    if isinstance(error, MPI.Exception):
        return error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
    return isinstance(error, CalledOffError) or any(
        name in str(error) for name in ("MPI_ERR_PROC_FAILED", "MPI_ERR_REVOKED")
    )
