"""Commands that every rank of a launch runs, and that run alone as well."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from mpitrain.errors import AgreedError, UsageError
from mpitrain.system.launch_variables import is_rank, launched_size


def with_ranks(work: Callable[[argparse.Namespace, Any], int], arguments: argparse.Namespace) -> int:
    """`work(arguments, ranks)` on every rank of the launch, or alone where there is none; MPI is started only if."""
    if not is_rank() or launched_size() == 1:
        from mpitrain.data.write.ranks import ALONE

        return work(arguments, ALONE)
    return on_ranks(work, arguments)


def on_ranks(work: Callable[[argparse.Namespace, Any], int], arguments: argparse.Namespace) -> int:
    """`work(arguments, runtime)` on every rank of the launch."""
    from mpitrain.mpi.runtime import start

    runtime = start()
    try:
        if runtime.size == 1 < (launched_size() or 1):  # all of them would write the same files
            raise UsageError(
                f"MPI knows one rank and the launcher {launched_size()}: it belongs to another MPI; use"
                " `mpitrain launch`, which finds the right one"
            )
        code = work(arguments, runtime)
    except AgreedError as error:
        code = error.exit_code
    except BaseException as error:
        runtime.end_job(error)
    runtime.exit_code = code
    runtime.finish()
    return code
