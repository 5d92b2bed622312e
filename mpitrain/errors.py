"""Every error mpitrain raises on purpose, and the only list of exit codes.

    MpitrainError            exit 1   something failed while running
    |- NonFiniteError        exit 1   a loss or gradient is NaN or infinite and the job says stop
    |- WireError             exit 1   a message arrived damaged, short, or out of order
    |- MismatchError         exit 1   the ranks of a group call different collectives (also a ValueError)
    |- MonitoredBarrierError exit 1   ranks did not come in time (also a TimeoutError, and torch's RuntimeError)
    |- CheckpointError       exit 1   a checkpoint is damaged, missing or cannot be written
    |- OutputError           exit 1   a file of the run cannot be written: a full disk
    |- DeadlockError         exit 1   virtual world: everybody waits and nothing is under way
    |- LostRankError         exit 1   a rank is dead that the others cannot do without
    |- ReplicasPartedError   exit 1   ranks that must hold the same parameters hold different ones
    |- EvictedError          exit 1   this rank was silent for too long, and the others have gone on
    |- AgreedError           exit n   some rank failed at start-up; already reported once, all ranks leave together
    `- UsageError            exit 2   the user's input is wrong (also a ValueError)
       `- DataError          exit 2   a shard is missing, truncated or disagrees with the others

`UsageError` and its children are for users: the message says what was given, what exists and what to do. Our
own mistakes are `assert`s. This file imports nothing, so every floor may use it.
"""

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_TARGET_MISSED = 3
EXIT_PREFLIGHT_FAILED = 4
EXIT_REQUEUE = 75
EXIT_INTERRUPTED = 130
EXIT_ENDED_AT_ONCE = 143


class MpitrainError(Exception):
    """Base of all deliberate errors; `exit_code` is what the process ends with."""

    exit_code = EXIT_ERROR


class NonFiniteError(MpitrainError):
    """A NaN or infinite loss or gradient under `on_nonfinite="stop"`."""


class WireError(MpitrainError):
    """A message failed its checksum, byte count or sequence stamp."""


class MismatchError(MpitrainError, ValueError):
    """The ranks of a group have not called the same collective with the same shapes and dtypes."""


class MonitoredBarrierError(MpitrainError, TimeoutError, RuntimeError):
    """Not all ranks have come to a monitored barrier in time, where torch's gloo raises a RuntimeError."""


class CheckpointError(MpitrainError):
    """A checkpoint that does not verify, or that cannot be written; names the file."""


class OutputError(MpitrainError):
    """A file that a run leaves cannot be written; names the file and the way out."""


class DeadlockError(MpitrainError):
    """Virtual time cannot advance: every rank waits for a message that nobody has sent."""


class LostRankError(MpitrainError):
    """A rank has died that the others cannot do without."""


class ReplicasPartedError(MpitrainError):
    """Ranks that must hold the same parameters, buffers that train, or optimizer state, hold different ones; names the
    tensor. `by_rounding`: they differ by no more than sums that processors round otherwise do."""

    by_rounding = False


class EvictedError(MpitrainError):
    """The others have gone on without this rank."""


class AgreedError(MpitrainError):
    """Raised on all ranks together after rank 0 has printed what went wrong and where."""

    def __init__(self, message: str, exit_code: int = EXIT_ERROR):
        super().__init__(message)
        self.exit_code = exit_code


class InjectedError(RuntimeError):
    """Ordered by `--inject raise(...)`: an exception as from a user's own code, and so none of ours."""


class UsageError(MpitrainError, ValueError):
    """The input is wrong: an option, a job file, a strategy text."""

    exit_code = EXIT_USAGE


class DataError(UsageError):
    """The data is wrong; names the file, the dataset and the way out, on one line whatever these are called."""

    def __init__(self, message: str):
        super().__init__(printable(message).replace("\n", "\\n"))


def printable(text: str) -> str:
    """`text` with every character escaped that is no letter, sign or blank, but for line ends: what stands in a file's
    or a dataset's name must not steer the terminal that shows it. Our own progress line is drawn by `console.py`.
    """
    if text.isprintable():
        return text
    return "".join(
        each
        if each == "\n" or each.isprintable()
        else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )
