"""Whether the drawn runs see faults of the roles: each fault alone in a copy of the package, until a seed fails.

    python -m tests.seeds.mutants [--minutes 10] [--jobs 2] [--unseen]

A fault is a text of one file and what stands there instead; `origin` is the commit that mended such a fault in this
project, where there was one. Those marked `unseen` were not tried while what is drawn was made better; `--unseen` runs
them too. What was found goes to `mutants.jsonl`: the first seed that fails, and the CPU seconds until then. Exit code 1
where one in ten or more is not found.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOUND = Path(__file__).parent / "mutants.jsonl"
SERVER, LEASES = "mpitrain/roles/server/server.py", "mpitrain/roles/server/leases.py"
TOLERANT, DEALER = "mpitrain/roles/server/fault_tolerant.py", "mpitrain/strategies/sampling/dealer.py"
COUNTS, RULES = "mpitrain/strategies/parameter_server/staleness.py", "mpitrain/strategies/parameter_server"


@dataclass(frozen=True)
class Fault:
    """One fault."""

    name: str
    path: str
    before: str
    after: str
    origin: str = ""
    unseen: bool = False


FAULTS = (
    Fault("what the dead had pushed to some shards is not dealt again", LEASES,
          "self.dealer.give_back(self._unconfirmed.pop(worker, []))", "self._unconfirmed.pop(worker, [])", "852b3ad6"),
    Fault("what the dead held is not dealt again", DEALER,
          "self.returned + self.kept.pop(worker, []) + self.outstanding.pop(worker, [])",
          "self.returned + self.kept.pop(worker, []) + self.outstanding.pop(worker, [])[:0]", "7c73593f"),
    Fault("a push that comes twice is added twice", SERVER,
          "again = lease is not None and not self.processed.add(lease)",
          "again = lease is not None and self.processed.add(lease) is None", "852b3ad6"),
    Fault("a worker that is told to stop keeps what it has pushed", SERVER,
          "            self.leases.take_back(worker)\n        self.counts.leave(worker)\n        if message",
          "            pass\n        self.counts.leave(worker)\n        if message", "c90df006"),
    Fault("a validator that one server has given up is sent no final model", TOLERANT,
          "return message.wants_final and not lets_go", "return False", "3195ad00", unseen=True),
    Fault("a run whose workers are all given up ends as if it were whole", TOLERANT,
          "if not self._over and self.leases.unfinished():", "if self._over and self.leases.unfinished():", "d20146c1"),
    Fault("an answer that crossed a restart counts as the next one", "mpitrain/roles/worker.py",
          "and (awaited is not Answer or message.step < self.step)", "and awaited is not Answer", "", unseen=True),
    Fault("what a worker that is gone held before a restart is lost", DEALER,
          "self.returned = sorted(self.returned + held)", "self.returned = sorted(self.returned)", "3730ae4e"),
    Fault("what other shards have processed is dealt again after a restart", DEALER,
          "self._leave_to_others(anywhere.runs(self.epoch))", "pass", "852b3ad6"),
    Fault("reads of before a restart stay under way", COUNTS,
          "        for worker in list(self.reads):\n            self.leave(worker)\n        if forget",
          "        if forget", "", unseen=True),
    Fault("a push that was overtaken leaves its read under way", COUNTS,
          "        self.leave(worker)\n        self.samples_dropped += num_samples",
          "        self.samples_dropped += num_samples"),
    Fault("one that has pushed and died stands in for those that live", f"{RULES}/sync.py",
          "if len(arrival.blocked) < quorum or len(arrival.blocked & arrival.active) < quorum:",
          "if len(arrival.blocked) < quorum:", "ad137b66"),
    Fault("nobody looks who waits when a worker leaves", f"{RULES}/sync.py",
          "    if not 0 < quorum <= len(blocked & active):", "    if True:", "96cea241"),
    Fault("who is lost takes part in updates", "mpitrain/roles/server/worker_state.py",
          "if record.state not in MAY_TAKE_PART and worker in self._active:",
          "if record.state not in MAY_TAKE_PART and worker in self._active and not event.name == 'LOSE':", "7a91e91b"),
    Fault("the next checkpoint is named before all parts of the last are written",
          "mpitrain/roles/server/checkpoint_schedule.py",
          "elif self._next_at <= self.last and not any(worker in present for worker in self._to_report):",
          "elif self._next_at <= self.last + 4:", "6a02e46b"),
    Fault("a server waits for norms of one that has ended", "mpitrain/roles/server/norm_exchange.py",
          "return set(self.others) <= self.ended | set(self._squares[number])",
          "return set(self.others) <= set(self._squares[number])", "", unseen=True),
    Fault("whose turn it is has no room", "mpitrain/roles/server/gathering.py",
          "last = self._num_passed + room - 1", "last = self._num_passed + room - 3"),
    Fault("what all shards have answered is never confirmed", LEASES,
          "        self._unconfirmed.pop(worker, None)", "        pass", "852b3ad6"),
    Fault("nobody stays for what others still hold", TOLERANT,
          "return not self._over and self.leases.has_nothing(worker) and self.leases.outstanding(but_for=worker)",
          "return False", "96cea241", unseen=True),
    Fault("a clock stays when its worker leaves", f"{RULES}/ssp.py",
          "            self._count(memory, clock, -1)\n        return Verdict(0.0, False",
          "            pass\n        return Verdict(0.0, False", "ad137b66"),
)  # fmt: skip

LOOK = """
import resource, sys
from tests.seeds.campaign import failure_of
from tests.seeds.draw import draw
most_s, seed = float(sys.argv[1]), 0
while True:
    why = failure_of(draw(seed))
    used = resource.getrusage(resource.RUSAGE_SELF)
    if why or used.ru_utime + used.ru_stime > most_s:
        break
    seed += 1
last = why.strip().splitlines()[-1][:200] if why else ""
print(__import__("json").dumps({"seed": seed if why else None, "why": last, "cpu_s": used.ru_utime + used.ru_stime}))
"""


def tried(fault: Fault, most_s: float) -> dict[str, Any]:
    """What the seeds make of a package with the fault."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("mpitrain", "tests"):
            shutil.copytree(ROOT / part, Path(folder) / part, ignore=shutil.ignore_patterns("__pycache__"))
        place = Path(folder) / fault.path
        text = place.read_text()
        assert text.count(fault.before) == 1, (
            f"{fault.name}: {fault.path} has its text {text.count(fault.before)} times"
        )
        place.write_text(text.replace(fault.before, fault.after))
        done = subprocess.run(
            [sys.executable, "-P", "-c", LOOK, str(most_s)], cwd=folder, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
    if done.returncode:
        return {
            "fault": fault.name,
            "seed": None,
            "why": f"stopped with {done.returncode}: {done.stderr[-200:]}",
            "cpu_s": 0.0,
        }
    return {"fault": fault.name, "unseen": fault.unseen, **json.loads(done.stdout)}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of CPU for each fault")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--unseen", action="store_true", help="those too that were kept back")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.unseen or not fault.unseen]
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda fault: tried(fault, 60 * options.minutes), faults):
            rows.append(row)
            found = f"seed {row['seed']}, {row['cpu_s']:.0f} s" if row["seed"] is not None else "NOT FOUND"
            print(f"{found:20} {row['fault']}: {row['why']}", flush=True)
    FOUND.write_text("".join(json.dumps(row) + "\n" for row in rows))
    missed = sum(row["seed"] is None for row in rows)
    print(f"{len(rows) - missed} of {len(rows)} found")
    return int(10 * missed > len(rows))


if __name__ == "__main__":
    sys.exit(main())
