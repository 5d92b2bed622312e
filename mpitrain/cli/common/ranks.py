"""Commands that every rank of a launch runs, and that run alone as well."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from mpitrain.errors import EXIT_OK, AgreedError
from mpitrain.system.launched.launch_variables import launched_task

Work = Callable[[argparse.Namespace, Any], int | None]


def with_ranks(work: Work) -> Callable[[argparse.Namespace], int | None]:
    """`work(arguments, ranks)` on every rank of the launch, or alone where there is none; MPI is started only if."""

    def run(arguments: argparse.Namespace) -> int | None:
        task = launched_task()
        if task is None or task.size == 1:
            from mpitrain.data.write.ranks import ALONE

            return work(arguments, ALONE)
        return on_ranks(work, arguments)

    return run


def on_ranks(work: Work, arguments: argparse.Namespace) -> int:
    """`work(arguments, runtime)` on every rank of the launch."""
    from mpitrain.mpi.runtime import start

    runtime = start()
    try:
        code = work(arguments, runtime) or EXIT_OK
    except AgreedError as error:
        code = error.exit_code
    except BaseException as error:
        runtime.end_job(error)
    runtime.exit_code = code
    runtime.finish()
    return code
