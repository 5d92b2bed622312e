"""`mpitrain env`: what `env.json` of a run started here would hold."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from mpitrain.cli.common.options import command
from mpitrain.system.launched.launch_variables import is_rank, launched_rank
from mpitrain.system.saying import say

_DESCRIPTION = """\
Print the environment of a run started here, as JSON: package versions, the MPI
library and whether it takes GPU buffers, cores, GPUs, Slurm, git revisions.
Only named variables are shown, never the whole environment."""

_EPILOG = """\
examples:
  mpitrain env
  mpirun -n 4 mpitrain env          with the ranks' nodes; rank 0 prints"""

_PROBE_DEADLINE_S = 120


def add_parser(commands: Any) -> None:
    """Add `env` to the command's subparsers."""
    command(commands, "env", "print the environment of a run", run_env, _DESCRIPTION, _EPILOG)


def run_env(_arguments: argparse.Namespace) -> None:
    """Print the facts on rank 0."""
    facts = _probe_here() if is_rank() else _probe_apart()
    if launched_rank() == 0:
        say(json.dumps(facts, indent=2, sort_keys=True))


def _probe_here() -> dict[str, Any]:
    from mpitrain.reporting.environment import probe

    return probe()


def _probe_apart() -> dict[str, Any]:
    """Start MPI in another process: where it cannot start (a login node) the rest is still worth printing."""
    command = [sys.executable, "-m", "mpitrain.reporting.environment"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_DEADLINE_S)
        if run.returncode == 0:
            facts: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
            return facts | {"command": list(sys.argv)}
        reason = f"MPI does not start here (exit code {run.returncode}): {run.stderr.strip()[-500:]}"
    except subprocess.TimeoutExpired:
        reason = f"MPI did not start within {_PROBE_DEADLINE_S} s"
    from mpitrain.reporting.environment import collect

    return collect() | {"mpi": {"error": reason}}
