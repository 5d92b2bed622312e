"""Commands that every rank of a launch runs, and that run alone as well."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from mpitrain.errors import AgreedError
from mpitrain.system.launched.launch_variables import launched_task


def with_ranks(work: Callable[[argparse.Namespace, Any], int], arguments: argparse.Namespace) -> int:
    """`work(arguments, ranks)` on every rank of the launch, or alone where there is none; MPI is started only if."""
    task = launched_task()
    if task is None or task.size == 1:
        from mpitrain.data.write.ranks import ALONE

        return work(arguments, ALONE)
    return on_ranks(work, arguments)


def on_ranks(work: Callable[[argparse.Namespace, Any], int], arguments: argparse.Namespace) -> int:
    """`work(arguments, runtime)` on every rank of the launch."""
    from mpitrain.mpi.runtime import start

    runtime = start()
    try:
        code = work(arguments, runtime)
    except AgreedError as error:
        code = error.exit_code
    except BaseException as error:
        runtime.end_job(error)
    runtime.exit_code = code
    runtime.finish()
    return code
