"""Tasks: generators that yield the operations they wait for, and are driven in the thread that owns MPI.

Invariants: what a task waits for brings it on; nobody waits for it here. It is thrown the error of the first operation
that has failed, once all of that wait are done.
"""

from collections.abc import Callable

from mpitrain.mpi.engine.collective_queue import Task, failing
from mpitrain.mpi.operation import Op

Complete = Callable[..., None]  # of an Op, with an error where it has failed


def drive(op: Op, task: Task, complete: Complete) -> None:
    """Run a task up to its next wait; its end completes `op`."""
    error: BaseException | None = None
    while not op.done:
        try:
            waited = list(task.send(None) if error is None else task.throw(error))
        except StopIteration as end:
            op.result = end.value
            complete(op)
            return
        except Exception as failure:
            complete(op, failure)
            return
        missing = [other for other in waited if not other.done]
        if missing:
            _resume_after(missing, op, task, waited, complete)
            return
        error = _first_error(waited)


def _resume_after(missing: list[Op], op: Op, task: Task, waited: list[Op], complete: Complete) -> None:
    left = len(missing)

    def one_done(_: Op) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            error = _first_error(waited)
            drive(op, task if error is None else failing(task, error), complete)

    for other in missing:
        other.then(one_done)


def _first_error(ops: list[Op]) -> BaseException | None:
    return next((op.error for op in ops if op.error is not None), None)
