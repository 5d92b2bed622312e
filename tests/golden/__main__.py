"""Golden runs: what every family makes of small jobs in every world, as digests that a later state of the package is
compared with.

    python -m tests.golden --record FILE     # and FILE.kept/: checkpoints and orders of arrival
    python -m tests.golden --compare FILE    # exit code 1 where anything differs; it says which run and which part

A line of FILE is a run with its parts: the final model, its average (`ema`), the best model, rows of validations,
counts of `result.json`, tensors and records of all checkpoints, in virtual time also its clock. `--only TEXT` takes the
runs whose line has the text, with those they go on from; `--keep DIR` leaves the folders of the runs there.

Left out:
- Asynchronous runs of several workers over MPI and in threads: the order of arrival is left to chance. They are run
  (`fresh order`), and repeated in virtual time in the order that was recorded beside FILE (`recorded order`). With one
  worker, and in virtual time with several, they are recorded whole.
- `decentralized(asynchronous=True)` over MPI and in threads, which no replay repeats: in virtual time only.
- `sync(batching=by_speed())` and `async(batching=by_speed())` outside virtual time: batch sizes follow measured times.
- `backup(stragglers="abort")`: there is none outside virtual time.
- `compile`, whose compiler takes seconds a run; `precision="float16"`, which needs an accelerator; `validate_every` and
  `checkpoint_every` by seconds.
- Checkpoints in virtual time, which writes none.
- Of counts, outside virtual time, how many pushes waited for a server at once, in how many buffers, and how far ahead a
  neighbour was (`REAL_CHANCE`).
- Of checkpoints the numbers of tensors, which follow the order of first arrival.
"""

from __future__ import annotations

import argparse
import collections
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.golden.runs import Run, all_runs
from tests.golden.worlds import Folders, Parts, begins_with_kept, keep, run_all

NUM_DIGITS = 16  # of a digest; FILE stays small
FAILED = "FAILED"


def line(key: str, parts: Parts) -> str:
    """A row of the recording."""
    return "\t".join([key, *(f"{name}={digest[:NUM_DIGITS]}" for name, digest in parts.items())])


def read(path: Path) -> dict[str, Parts]:
    """The recording in a file."""
    found = {}
    for row in path.read_text().splitlines():
        key, *parts = row.split("\t")
        found[key] = dict(part.rsplit("=", 1) for part in parts)
    return found


def differences(recorded: dict[str, Parts], seen: dict[str, Parts]) -> list[str]:
    """Run and part of everything that differs."""
    found = []
    for key in sorted(recorded.keys() | seen.keys()):
        old, new = recorded.get(key), seen.get(key)
        if old is None or new is None:
            found.append(f"{key}: {'not recorded' if old is None else 'did not run'}")
            continue
        parts = [name for name in (*old, *(new.keys() - old.keys())) if old.get(name) != new.get(name)]
        if parts:
            found.append(f"{key}: {', '.join(parts)}")
    return found


def chosen(only: Sequence[str]) -> list[Run]:
    """The runs whose key has all these texts, and what they go on from."""
    runs = all_runs()
    assert len({run.key for run in runs}) == len(runs), "two runs have one name"
    by_key = {run.key: run for run in runs}
    wanted: set[str] = set()
    for run in runs:
        if all(text in run.key for text in only):
            wanted |= {run.key, *([run.of] if run.of else [])}
    return [by_key[key] for key in by_key if key in wanted]


def perform(runs: Sequence[Run], folders: Folders, num_processes: int) -> dict[str, Parts]:
    """Every run; what fails is told at once and counts as a part of its own."""
    seen: dict[str, Parts] = {}
    started_s = time.monotonic()
    kept = {run.of for run in runs if begins_with_kept(run)}
    for run, parts in run_all(runs, folders, num_processes):
        if folders.recording and run.key in kept:
            keep(run, folders)
        if isinstance(parts, str):
            print(f"{FAILED} {run.key}: {parts}", flush=True)
            parts = {FAILED: parts.split(":")[0]}
        seen[run.key] = {name: digest[:NUM_DIGITS] for name, digest in parts.items()}
        if len(seen) % 100 == 0:
            print(f"{len(seen)} of {len(runs)} runs, {time.monotonic() - started_s:.0f} s", flush=True)
    print(f"{len(seen)} runs in {time.monotonic() - started_s:.0f} s")
    for world, number in collections.Counter(run.world for run in runs).items():
        print(f"  {world}: {number}")
    parts_seen = collections.Counter(name for parts in seen.values() for name in parts)
    print("  parts: " + ", ".join(f"{name} {number}" for name, number in parts_seen.most_common()))
    return seen


def main(argv: Iterable[str] | None = None) -> int:
    """Record or compare; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description="golden runs")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", type=Path, metavar="FILE")
    what.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    arguments = parser.parse_args(argv if argv is None else list(argv))
    file: Path = arguments.record or arguments.compare
    kept = file.with_name(f"{file.name}.kept").resolve()
    if arguments.record:
        shutil.rmtree(kept, ignore_errors=True)
    runs = chosen(arguments.only)
    with tempfile.TemporaryDirectory(dir=SCRATCH if SCRATCH.is_dir() else None) as scratch:
        folders = Folders((arguments.keep or Path(scratch)).resolve(), kept, bool(arguments.record))
        folders.runs.mkdir(parents=True, exist_ok=True)
        seen = perform(runs, folders, arguments.processes)
    failed = [key for key, parts in seen.items() if FAILED in parts]
    if arguments.record:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(line(run.key, seen[run.key]) + "\n" for run in runs))
        return bool(failed)
    recorded = {key: parts for key, parts in read(file).items() if key in seen or not arguments.only}
    found = differences(recorded, seen)
    print("\n".join(found) or f"all {len(seen)} runs are the same to the bit")
    return bool(found or failed)


SCRATCH = Path("/dev/shm")  # hundreds of small runs, each of whose checkpoints is made durable

if __name__ == "__main__":
    sys.exit(main())
