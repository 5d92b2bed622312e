"""Small faults planted in the package, and whether the tests see them.

    python -m tests.mutants.campaign [--jobs 2] [--minutes 60] [--only PATH]        (`make mutants`)

Of all faults of `operators.py` in `PLACES` as many are drawn as `NUM` says, by the committed seed: those with the
smallest hash of seed and fault, so that a change of one file draws no others elsewhere. Each stands alone in a copy of
the last commit, and the tests that `table.json` names for its file run there, in one process, up to the first that
fails. That test then runs without the fault: one that fails there too has seen nothing, and is left out. An end by the
limit of CPU time counts as killed where all of the tests pass without the fault in a quarter of it.

What was found is appended to `results.jsonl` at once. A campaign that is started again takes from there what was killed
in a file that reads the same, and what survived the same tests. `equivalent.txt` gives, for survivors that change
nothing, the reason; all others count. Exit code 1 where less than `LEAST_KILLED` of those drawn were killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.mutants.operators import Mutant, mutants_of

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
TABLE, RESULTS, EQUIVALENT = HERE / "table.json", HERE / "results.jsonl", HERE / "equivalent.txt"
PLACES = ("strategies", "roles", "codecs", "checkpoint/parts.py", "data/read", "model")
SEED, NUM = 40, 200
LEAST_KILLED = 0.9
MOST_TESTS_S = 50.0  # CPU seconds of the tests of one file
WALL_S = 900.0
KILLED, SURVIVED, TIMED_OUT = "killed", "survived", "timed out"

Row = dict[str, Any]


def all_mutants(root: Path = ROOT) -> Iterator[Mutant]:
    """Every fault that can be planted."""
    for path in files_of(root):
        yield from mutants_of(path, (root / path).read_bytes())


def files_of(root: Path = ROOT) -> list[str]:
    """The files that faults are planted in."""
    found: list[Path] = []
    for place in PLACES:
        path = root / "mpitrain" / place
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [str(path.relative_to(root)) for path in found]


def drawn(mutants: Sequence[Mutant]) -> list[Mutant]:
    """The sample."""
    return sorted(mutants, key=lambda one: hashlib.sha256(f"{SEED} {one.key}".encode()).digest())[:NUM]


def table() -> dict[str, list[str]]:
    """The tests of each file."""
    return {path: list(tests) for path, tests in json.loads(TABLE.read_text()).items()}


def results() -> dict[str, Row]:
    """What is known, the last row of each fault, by its key; of a file without a fault, by its path."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    return {row["key"]: row for row in rows}


def equivalents() -> dict[str, str]:
    """Why a fault changes nothing, by its key."""
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    return {key: why for key, _, why in (line.partition(" ") for line in lines if line and line[0] != "#")}


def digest_of(root: Path, paths: Sequence[str]) -> str:
    """Of what stands in files."""
    return hashlib.sha256(b"".join((root / path).read_bytes() for path in paths)).hexdigest()[:16]


class Copy:
    """The last commit in a folder of its own, and a process there that runs tests."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        packed = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
        if (ROOT / "data").is_dir():
            shutil.copytree(ROOT / "data", folder / "data", dirs_exist_ok=True)
        environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        self._nursery = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py")], cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=lambda: os.nice(max(0, 10 - os.nice(0))),
        )  # fmt: skip

    def run(self, path: str, fault: Mutant | None, tests: Sequence[str], cpu_s: float) -> Row:
        """What the tests make of a file with a fault in it, or of the file as it is."""
        source = (self.folder / path).read_bytes()
        try:
            if fault is not None:
                (self.folder / path).write_bytes(fault.apply(source))
            return self._ask({"tests": list(tests), "cpu_s": cpu_s, "wall_s": WALL_S})
        finally:
            (self.folder / path).write_bytes(source)

    def _ask(self, order: dict[str, Any]) -> Row:
        assert self._nursery.stdin is not None and self._nursery.stdout is not None
        self._nursery.stdin.write(json.dumps(order) + "\n")
        self._nursery.stdin.flush()
        answer = json.loads(self._nursery.stdout.readline())
        text = answer.pop("said")
        code = answer.pop("code")
        failed = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
        by = failed[0].partition(" ")[2].partition(" - ")[0] if failed else text.strip()[-200:] * (code > 0)
        return {"outcome": SURVIVED if code == 0 else KILLED if code > 0 else TIMED_OUT, "by": by, **answer}

    def close(self) -> None:
        """End the process."""
        assert self._nursery.stdin is not None
        self._nursery.stdin.close()
        self._nursery.wait()


class Campaign:
    """What is known, and what is found out."""

    def __init__(self, copies: Sequence[Copy]):
        self.known, self.same, root = results(), equivalents(), copies[0].folder
        self._free: SimpleQueue[Copy] = SimpleQueue()
        for copy in copies:
            self._free.put(copy)
        self._turn = threading.Lock()
        self._passes: dict[tuple[str, ...], bool] = {}
        self.file = {path: digest_of(root, [path]) for path in files_of(root)}
        named = table()
        self.tests = {path: named.get(path, []) for path in self.file}
        self.test_digest = {
            path: digest_of(root, sorted({one.partition("::")[0] for one in tests}))
            for path, tests in self.tests.items()
        }

    def is_known(self, key: str, path: str) -> bool:
        """Whether nothing has changed since a row was written."""
        row = self.known.get(key)
        if row is None or row["file"] != self.file[path]:
            return False
        return row["outcome"] in (KILLED, TIMED_OUT) or row["tests"] == self.test_digest[path]

    def look_at(self, path: str) -> None:
        """See that the tests pass as long as there is no fault, and how long they take."""
        if self.is_known(path, path) and self.known[path]["outcome"] == SURVIVED:
            return
        row = self._run(path, None, self.tests[path], 10 * MOST_TESTS_S)
        self._note({"key": path} | row, path)
        if row["outcome"] != SURVIVED or row["cpu_s"] > MOST_TESTS_S:
            print(f"{path}: without a fault {row}", flush=True)

    def try_out(self, fault: Mutant) -> None:
        """Find out what becomes of a fault."""
        path = fault.path
        if self.is_known(fault.key, path) or (fault.key in self.known and fault.key in self.same):
            return
        base_s = self.known.get(path, {"cpu_s": MOST_TESTS_S})["cpu_s"]
        while True:
            row = self._run(path, fault, self.tests[path], max(20.0, 4 * base_s))
            if row["outcome"] == TIMED_OUT:
                self.look_at(path)
                if self.known[path]["outcome"] != SURVIVED or 4 * self.known[path]["cpu_s"] > row["cpu_s"]:
                    return
            seen_by = [one for one in self.tests[path] if _are_one(one, row["by"])] or self.tests[path]
            if row["outcome"] != KILLED or self._pass_without_a_fault(path, seen_by):
                break
            print(f"{path}: left out, since it fails without a fault: {seen_by} {row['by']}", flush=True)
            self.tests[path] = [one for one in self.tests[path] if one not in seen_by]
        told = {
            name: getattr(fault, name)
            for name in ("key", "path", "line", "function", "operator", "before", "after")
        }
        self._note(told | row, path)
        print(
            f"{row['outcome']}: {path}:{fault.line} {fault.before!r} -> {fault.after!r} {row['by']}",
            flush=True,
        )

    def _pass_without_a_fault(self, path: str, tests: Sequence[str]) -> bool:
        if tuple(tests) not in self._passes:
            row = self._run(path, None, tests, 4 * MOST_TESTS_S)
            self._passes[tuple(tests)] = row["outcome"] == SURVIVED
        return self._passes[tuple(tests)]

    def _run(self, path: str, fault: Mutant | None, tests: Sequence[str], cpu_s: float) -> Row:
        if not tests:
            return {"outcome": SURVIVED, "by": "no test", "cpu_s": 0.0, "wall_s": 0.0}
        copy = self._free.get()
        try:
            return copy.run(path, fault, tests, cpu_s)
        finally:
            self._free.put(copy)

    def _note(self, row: Row, path: str) -> None:
        row |= {"file": self.file[path], "tests": self.test_digest[path]}
        with self._turn:
            self.known[row["key"]] = row
            with RESULTS.open("a") as out:
                out.write(json.dumps(row) + "\n")


def _are_one(named: str, failed: str) -> bool:
    """Whether a test that the table names is what has failed, or holds it, or is held by it; by the beginning of its
    name, which may have been cut."""
    return failed.startswith(named) or bool(failed) and named.startswith(failed)


def summary(sample: Sequence[Mutant], known: dict[str, Row]) -> tuple[list[str], float]:
    """Lines for people, and the share of those tried that were killed; equivalent ones count neither way."""
    same, rows = equivalents(), [known[one.key] for one in sample if one.key in known]
    counted = [row for row in rows if row["outcome"] != SURVIVED or row["key"] not in same]
    killed = [row for row in counted if row["outcome"] != SURVIVED]
    lines = [
        f"survived: {row['key']} {row['path']}:{row['line']} {row['function']}: {row['before']!r} -> {row['after']!r}"
        for row in counted if row["outcome"] == SURVIVED
    ]  # fmt: skip
    share = len(killed) / max(1, len(counted))
    by_time = sum(row["outcome"] == TIMED_OUT for row in killed)
    lines.append(
        f"{len(rows)} of {len(sample)} faults tried: {len(killed)} killed ({by_time} by the limit of time), "
        f"{len(counted) - len(killed)} survived, {len(rows) - len(counted)} change nothing: {100 * share:.1f} % killed"
    )
    return lines, share


def tidy(sample: Sequence[Mutant], known: dict[str, Row]) -> None:
    """Keep the last row of each fault that is drawn, and of each file, in the order of the files."""
    keys = {one.key: (one.path, one.line) for one in sample} | {one.path: (one.path, 0) for one in sample}
    rows = sorted(
        (row for row in known.values() if row["key"] in keys), key=lambda row: (keys[row["key"]], row["key"])
    )
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> int:
    """Try what is not known, for as long as there is time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at a time (default: 2)")
    parser.add_argument(
        "--minutes", type=float, default=180, help="after which no more is begun (default: 180)"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="faults in files whose path contains it")
    parser.add_argument("--show", action="store_true", help="say what is known, and try nothing")
    options = parser.parse_args()
    until_s = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Copy(Path(folder) / str(place)) for place in range(1 if options.show else options.jobs)]
        sample = drawn(list(all_mutants(copies[0].folder)))
        campaign = Campaign(copies)
        todo = [one for one in sample if options.only in one.path and not options.show]
        todo.sort(key=lambda one: one.key not in campaign.known)  # first what new tests may see

        def in_time(work: Callable[[Any], None]) -> Callable[[Any], None]:
            return lambda one: work(one) if time.monotonic() < until_s else None

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(in_time(campaign.try_out), todo))
            list(pool.map(in_time(campaign.look_at), dict.fromkeys(one.path for one in todo)))
        for copy in copies:
            copy.close()
    tidy(sample, campaign.known)
    lines, share = summary(sample, campaign.known)
    print("\n".join(lines))
    return 0 if share >= LEAST_KILLED else 1


if __name__ == "__main__":
    sys.exit(main())
