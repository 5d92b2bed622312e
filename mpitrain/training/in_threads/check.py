"""Whether this launch may train in threads of one process."""

from __future__ import annotations

from mpitrain.errors import UsageError
from mpitrain.system.launched.launch_variables import launched_task


def check_launch(num_threads: int) -> None:
    """Refuse threads in each of several ranks.

    Raises:
        UsageError: says how many ranks there are.
    """
    if num_threads < 1:
        raise UsageError(f"--threads must be at least 1, got {num_threads}")
    task = launched_task()
    if task is not None and task.is_one_of_several():
        ranks = task.size or f"at least {task.rank + 1}"
        raise UsageError(
            f"--threads {num_threads} trains in one process, and this launch has {ranks} ranks: start it without a "
            "launcher, or leave --threads out and train over MPI"
        )
