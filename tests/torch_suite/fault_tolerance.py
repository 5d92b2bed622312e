"""Groups that are made anew (torch 2.14's reconfigure) over gloo and over mpi4py: torch's questions, and kills.

    python -m tests.torch_suite.fault_tolerance [--kills 20]                        (needs torch 2.14 or later)

torch's own file of tests of this is not in its wheel; `programs/fault_tolerance.py` asks the same under the same names,
on 3 ranks under MPI with ULFM. Then ranks are killed (kill -9) at random moments while tensors of 64 B to 16 MB are
added up, and the others make the group anew and go on (`programs/survivors.py`). Both go to `fault_tolerance.txt`.
Exit code 1 where a test fails that gloo passes, or survivors have not gone on within 30 s.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import ROOT, RanksHung, Result, run_ranks
from tests.torch_suite.table import CRASH, FAIL, GLOO, HANG, HERE, OURS, PASS, SKIP

RESULTS = HERE / "fault_tolerance.txt"
PROGRAMS = HERE / "programs"
NUM_RANKS = 3
LIMIT_S = 30.0
SIZES = ("16", "16,262144", "1048576", "4194304,16")  # elements of float32
_ULFM = ("--with-ft", "ulfm")


@dataclass(frozen=True)
class Kill:
    """What became of one kill: seconds from the death to the error, to the new group, and to the first sum in it, each
    of the last of the survivors; none where they have not gone on."""

    times_s: tuple[float, float, float] | None
    output: str = ""

    @property
    def went_on(self) -> bool:
        """Whether the survivors went on in time."""
        return self.times_s is not None and self.times_s[2] <= LIMIT_S


def all_tests() -> list[str]:
    """The names of the tests, in their order."""
    lines = (PROGRAMS / "fault_tolerance.py").read_text().splitlines()
    return [line.split("(")[0].removeprefix("def ") for line in lines if line.startswith("def test_")]


def ask(backend: str, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """(outcome, what was said) of each test over one backend."""
    found: dict[str, tuple[str, str]] = {}
    left = list(names)
    while left:
        with tempfile.TemporaryDirectory(prefix="reconfigure-") as folder:
            result, hung = _launch("fault_tolerance.py", [backend, folder, *left])
            for name in tuple(left):
                heard = [json.loads(path.read_text()) for path in sorted(Path(folder).glob(f"{name}.*"))]
                said = next((text for outcome, text in heard if outcome != PASS), "")
                if len(heard) == NUM_RANKS and all(outcome != FAIL for outcome, _ in heard):
                    found[name] = (SKIP if said else PASS), said
                    left.remove(name)
                    continue
                outcome = FAIL if heard and said else HANG if hung else CRASH
                found[name] = outcome, said or str(result)
                left.remove(name)
                break
    return found


def kill(backend: str, victim: int, after_s: float, sizes: str) -> Kill:
    """Kill a rank of a launch once."""
    with tempfile.TemporaryDirectory(prefix="survivors-") as folder:
        result, _ = _launch("survivors.py", [backend, folder, str(victim), str(after_s), sizes])
        told = [Path(folder, str(rank)) for rank in range(NUM_RANKS) if rank != victim]
        if not all(path.exists() for path in told):
            return Kill(None, str(result))
        times = zip(*(json.loads(path.read_text())[1:] for path in told), strict=True)
        error_s, made_s, sum_s = (max(each) for each in times)
        return Kill((error_s, made_s, sum_s))


def _launch(program: str, arguments: Sequence[str]) -> tuple[Result, bool]:
    argv = [sys.executable, str(PROGRAMS / program), *arguments]
    try:
        return run_ranks(NUM_RANKS, argv, timeout_s=10 * LIMIT_S, mpirun_args=_ULFM, warm=False), False
    except RanksHung as hung:
        return hung.result, True


def kills(backend: str, number: int, seed: int) -> list[Kill]:
    """So many kills, of every rank, at moments and sizes that `seed` draws."""
    drawn, outcomes = random.Random(seed), []
    for turn in range(number):
        moment_s = round(drawn.uniform(0.05, 1.0), 3)
        outcomes.append(kill(backend, turn % NUM_RANKS, moment_s, SIZES[turn % len(SIZES)]))
        print(f"{backend}: kill {turn + 1} of {number}: {outcomes[-1]}", flush=True)
    return outcomes


def describe(backend: str, outcomes: Sequence[Kill]) -> str:
    """One line about the kills of one backend."""
    times = [outcome.times_s for outcome in outcomes if outcome.times_s is not None and outcome.went_on]
    late = [outcome.times_s[2] for outcome in outcomes if outcome.times_s and not outcome.went_on]
    line = f"{backend}: {len(times)} of {len(outcomes)} kills: survivors went on within {LIMIT_S:g} s"
    if times:
        error, made, first = (list(each) for each in zip(*times, strict=True))
        line += (
            f"; from death to the next all_reduce median {statistics.median(first):.3f} s, largest {max(first):.3f} s"
            f" (error {statistics.median(error):.3f} s, new group {statistics.median(made):.3f} s)"
        )
    if late:
        line += f"; {len(late)} went on after their group's timeout of {LIMIT_S:g} s, at the latest {max(late):.1f} s"
    return line


def main() -> None:
    """Ask, kill, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="of each backend")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    import torch

    names = all_tests()
    asked = {backend: ask(backend, names) for backend in (GLOO, OURS)}
    width = max(map(len, names))
    rows = [f"{'test':{width}}  {GLOO:6}  {OURS}"]
    rows += [f"{name:{width}}  {asked[GLOO][name][0]:6}  {asked[OURS][name][0]}" for name in names]
    outcomes = {backend: kills(backend, arguments.kills, arguments.seed) for backend in (GLOO, OURS)}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    counts = [
        f"{backend}: {sum(outcome == PASS for outcome, _ in asked[backend].values())} of {len(names)} pass"
        for backend in (GLOO, OURS)
    ]
    text = "\n".join(
        [
            f"{commit.stdout.strip()} torch {torch.__version__}, {NUM_RANKS} ranks, mpirun --with-ft ulfm",
            *counts,
        ]
        + [describe(backend, outcomes[backend]) for backend in (GLOO, OURS)]
        + ["", *rows, ""]
    )
    RESULTS.write_text(text)
    print(text)
    worse = [name for name in names if asked[GLOO][name][0] == PASS and asked[OURS][name][0] != PASS]
    failed = [outcome for outcome in outcomes[OURS] if not outcome.went_on]
    print(*(f"{name}: {asked[OURS][name][1]}" for name in worse), *(each.output for each in failed), sep="\n")
    sys.exit(bool(worse or failed))


if __name__ == "__main__":
    main()
