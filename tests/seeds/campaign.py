"""Whole runs in virtual time, one a seed, whatever befalls them: every sample counts once, and nobody waits for ever.

    python -m tests.seeds.campaign [--minutes 480] [--jobs 2] [--first N]      (`make seeds`)
    python -m tests.seeds.campaign --only SEED

The roles are the real ones, the model is one number a shard. `draw.py` draws a family, and `serving.py` (servers and
workers), `peering.py` or `stepping.py` (workers that take the same steps) what happens. A seed fails where a run ends
in an error or a deadlock, a sample counts twice or not at all, a gradient is staler than its strategy allows, a peer
has more updates under way than it has credit for, a validation is not of what it should be, shards have processed
different samples, the staleness of reads does not add up, or what has to give the same numbers gives others. A failing
one is printed as a command, and as a simpler course that still fails. What has passed is appended to `passed.jsonl`, a
line for each thousand, with the name of the generator: other draws give it another name, and the first sixty thousand
seeds are of one that knew servers and workers alone, with fewer faults. A campaign goes on after the last of them. Exit
code 1 where a seed has failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.seeds.courses import simpler
from tests.seeds.draw import Course, draw, generator

PASSED = Path(__file__).parent / "passed.jsonl"
BLOCK = 1000  # seeds of a line


def failure_of(course: Course) -> str:
    """Why a course fails; empty where it does not."""
    try:
        first = course.play()
        assert first == course.alike().play(), "what is the same course gives other numbers"
    except Exception:
        return traceback.format_exc()
    return ""


def shrunk(course: Course) -> Course:
    """A course in which as little happens as possible, and which still fails."""
    for one in simpler(course):
        if failure_of(one):
            return shrunk(one)
    return course


def failed(seeds: range) -> list[int]:
    """Those of these seeds that fail."""
    return [seed for seed in seeds if failure_of(draw(seed))]


def told(seed: int) -> str:
    """What is said of a failing seed."""
    course = shrunk(draw(seed))
    last = failure_of(course).strip().splitlines()[-1]
    return f"seed {seed} fails: python -m tests.seeds.campaign --only {seed}\n  {last}\n  {course!r}"


def blocks(first: int) -> Iterator[range]:
    """Without an end."""
    while True:
        yield range(first, first + BLOCK)
        first += BLOCK


def next_seed() -> int:
    """The first one that no campaign has passed."""
    rows = [json.loads(line) for line in PASSED.read_text().splitlines()] if PASSED.exists() else []
    return max((row["last"] + 1 for row in rows), default=0)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=480.0, help="begin no block after so many")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument(
        "--first", type=int, help="seed to begin with; after those that have passed by default"
    )
    parser.add_argument("--only", type=int, help="this seed alone, with its traceback")
    options = parser.parse_args()
    if options.only is not None:
        print(draw(options.only), why := failure_of(draw(options.only)) or "passes", sep="\n")
        return int(why != "passes")
    ends_s, num_failed = time.monotonic() + 60 * options.minutes, 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for block in blocks(next_seed() if options.first is None else options.first):
            began_s, pieces = (
                time.monotonic(),
                [block[at :: 4 * options.jobs] for at in range(4 * options.jobs)],
            )
            wrong = sorted(seed for found in pool.map(failed, pieces) for seed in found)
            num_failed += len(wrong)
            for seed in wrong:
                print(told(seed), flush=True)
            took_s = time.monotonic() - began_s
            row = {"first": block[0], "last": block[-1], "failed": wrong, "wall_s": round(took_s, 1)}
            row["generator"] = generator()
            with PASSED.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"seeds {block[0]} to {block[-1]}: {len(wrong)} failed, {took_s:.0f} s", flush=True)
            if time.monotonic() > ends_s:
                return int(num_failed > 0)
    raise AssertionError("blocks have no end")


if __name__ == "__main__":
    sys.exit(main())
