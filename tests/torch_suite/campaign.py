"""torch's own tests of torch.distributed over gloo and over mpi4py, and where the two differ.

    python -m tests.torch_suite.campaign [--columns gloo:2 mpi4py:2] [--tests REGEX]        (`make test-torch`)

The tests are those inside the torch wheel that need no GPU: collectives, DistributedDataParallel, messages between two
ranks. Each column of the table is a backend on a number of ranks. Tests run many to a launch; one that fails, hangs or
crashes ends its launch, the others go on in a new one, and the failed one is run again alone: that outcome counts.
Exit code 1 where a test that gloo passes does not pass here and is not in `differences.txt`, or one in it passes.
What failing tests have printed lies in `build/torch_suite/`. A run of whole columns writes them to `results.txt`;
any other is compared with gloo's columns there, if it has none of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.ranks import ROOT, RanksHung, Result, find_mpi, run_ranks
from tests.torch_suite import table as tables
from tests.torch_suite.table import CRASH, FAIL, GLOO, HANG, HERE, PASS, SKIP, Table

PROGRAM = HERE / "programs" / "torch_tests.py"
RESULTS = HERE / "results.txt"
DIFFERENCES = HERE / "differences.txt"
LOGS = ROOT / "build" / "torch_suite"
TESTS_PER_LAUNCH = 30
LIMIT_S = 120.0
# What torch lets only its own MPI backend try: these run in a launch of their own, with the conditions of that one.
_FOR_MPI = re.compile("Only MPI supports")
_TIMED_OUT = "Timeout (0:"  # faulthandler's


class Launch:
    """One launch of some tests, and what became of them."""

    def __init__(self, column: str, names: Sequence[str], guards: str = GLOO, mpi: str = "openmpi"):
        backend, _, size = column.partition(":")
        self.messages: dict[str, str] = {}
        self.outcomes: dict[str, str] = {}
        with tempfile.TemporaryDirectory(prefix="torch-suite-") as scratch:
            argv = [str(find_mpi(mpi)[0]), str(PROGRAM), backend, guards, scratch, str(LIMIT_S), *names]
            try:
                self.result: Result = run_ranks(int(size), argv, timeout_s=LIMIT_S * len(names) + 60, mpi=mpi)
            except RanksHung as hung:
                self.result = hung.result
            for name in names:
                if not self._read(Path(scratch), name, int(size)):
                    break

    def _read(self, folder: Path, name: str, size: int) -> bool:
        """The outcome of a test on all ranks; whether the launch went on after it."""
        heard = [
            json.loads(path.read_text())
            for rank in range(size)
            if (path := folder / f"{name}.{rank}").exists()
        ]
        outcomes = [outcome for outcome, _ in heard]
        if FAIL in outcomes:
            outcome = FAIL
        elif len(heard) < size:
            outcome = HANG if _TIMED_OUT in self.result.stderr else CRASH
        else:
            outcome = SKIP if set(outcomes) == {SKIP} else PASS
        self.outcomes[name] = outcome
        self.messages[name] = "\n".join(message for _, message in heard if message)
        return outcome in (PASS, SKIP)


def all_tests() -> list[str]:
    """The names of torch's tests that are not for GPUs."""
    program = (
        "from tests.torch_suite.programs import torch_tests as t\n"
        "print(*(n for n in dir(t.torch_module('gloo', 2).DistributedTest._DistTestBase) if n.startswith('test')))"
    )
    listed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split() if not re.search("cuda|nccl", name)]


def run_column(column: str, names: Sequence[str], mpi: str) -> dict[str, str]:
    """The outcomes of the tests in one column."""
    outcomes, reasons = _run_all(column, names, GLOO, mpi)
    for_mpi = [name for name in names if outcomes[name] == SKIP and _FOR_MPI.search(reasons[name])]
    if for_mpi:
        outcomes |= _run_all(column, for_mpi, "mpi", mpi)[0]
    return outcomes


def _run_all(
    column: str, names: Sequence[str], guards: str, mpi: str
) -> tuple[dict[str, str], dict[str, str]]:
    """(outcomes, messages) of tests, in as many launches as it takes."""
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    left = list(names)
    while left:
        launch = Launch(column, left[:TESTS_PER_LAUNCH], guards, mpi)
        last = list(launch.outcomes)[-1]
        left = left[len(launch.outcomes) :]
        if launch.outcomes[last] not in (PASS, SKIP):
            again = Launch(column, [last], guards, mpi)
            launch.outcomes |= again.outcomes
            launch.messages |= again.messages
            _keep_log(column, last, launch if again.outcomes[last] in (PASS, SKIP) else again, again)
        outcomes |= launch.outcomes
        messages |= launch.messages
        print(f"{column}: {len(outcomes)} of {len(names)} tests", flush=True)
    return outcomes, messages


def _keep_log(column: str, name: str, shown: Launch, alone: Launch) -> None:
    """Write what a test has printed that failed at least once."""
    LOGS.mkdir(parents=True, exist_ok=True)
    text = f"alone: {alone.outcomes[name]}\n{shown.messages[name]}\n{shown.result}"
    (LOGS / f"{name}.{column.replace(':', '.')}.log").write_text(text)
    print(f"{column}: {name} failed; alone: {alone.outcomes[name]}", flush=True)


def write_results(outcomes: Table) -> Table:
    """Put these columns in the place of those in `results.txt`; returns the whole table."""
    import torch
    from mpi4py import __version__ as mpi4py_version

    table = {**(tables.from_text(RESULTS.read_text()) if RESULTS.exists() else {}), **outcomes}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    head = f"{commit.stdout.strip()} torch {torch.__version__} mpi4py {mpi4py_version}"
    RESULTS.write_text(f"{head}\n{tables.summary(table)}\n\n{tables.as_text(table)}\n")
    return table


def main() -> None:
    """Run the columns, write and print the table, and say what is not as the list says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--columns", nargs="+", choices=tables.COLUMNS, default=tables.COLUMNS)
    parser.add_argument("--tests", default="", metavar="REGEX", help="only these; results.txt stays as it is")
    parser.add_argument(
        "--mpi", choices=("openmpi", "mpich"), default="openmpi", help="mpich: no results.txt"
    )
    parser.add_argument("--judge", action="store_true", help="run nothing: judge results.txt")
    options = parser.parse_args()
    began_s = time.monotonic()
    if options.judge:
        table = tables.from_text(RESULTS.read_text())
    else:
        names = [name for name in all_tests() if re.search(options.tests, name)]
        table = {column: run_column(column, names, options.mpi) for column in options.columns}
        if not options.tests and options.mpi == "openmpi":
            table = write_results(table)
        else:  # what gloo has done before is what the columns of this run are compared with
            before = tables.from_text(RESULTS.read_text())
            gloo = {column: before[column] for column in before if column.startswith(GLOO)}
            known = {column: {n: gloo[column][n] for n in names if n in gloo[column]} for column in gloo}
            table = {**known, **table}
    print(tables.as_text(table))
    print(tables.summary(table))
    wrong = tables.judge(table, tables.read_differences(DIFFERENCES.read_text()), not options.tests)
    print("\n".join(wrong) or "no difference that is not listed")
    print(f"{time.monotonic() - began_s:.0f} s")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
