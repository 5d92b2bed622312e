"""Does a signal do what the table says? INT, TERM, USR1, HUP and QUIT at random moments to `mpitrain launch`, to Open
MPI's mpirun and to single ranks, each end compared with its row of docs/fault-tolerance.md; and TERM twice, at once, as
a preemption without grace sends it, after 6 s by hand, and after 6 s with the variables of a batch job.

    python benchmarks/signals/signals.py [--kills 20] [--seed 0] [--ranks 2]

`--kills` launches for each signal, receivers in turn. The moment is drawn over the length of an undisturbed run, from
the first process that listens on; what the run was doing just then is read off its folder before and after the signal
is sent, and either is allowed.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.common import make_parser, table, write_row
from measuring.launching import search_path
from measuring.measurement import LAUNCHED, ROOT, Measurement

from mpitrain.checkpoint.parts import newest
from mpitrain.system.launched import rank_status

HERE = Path(__file__).resolve().parent
MEASUREMENT = Measurement(
    wanted="every end as docs/fault-tolerance.md says",
    depends=LAUNCHED,
    figures=("as_told", "launches", "hung"),
    campaign=("python benchmarks/signals/signals.py",),
)

PAGE = ROOT / "docs" / "fault-tolerance.md"
RECEIVERS = ("launch", "mpirun", "rank")
SIGNALS = ("INT", "TERM", "USR1", "HUP", "QUIT")
# The signals of each kind of end, with the seconds before each but the first.
ENDS: dict[str, tuple[tuple[str, ...], float]] = {name: ((name,), 0.0) for name in SIGNALS}
ENDS |= {"TERM at once": (("TERM", "TERM"), 0.3), "TERM later": (("TERM", "TERM"), 6.0)}
ENDS |= {"HUP and TERM later": (("HUP", "TERM"), 6.0), "TERM later, in a batch job": (("TERM", "TERM"), 6.0)}
DEADLINE_S = 300.0
PHASES = ("start", "train", "end")


class Row(NamedTuple):
    """One line of the table: what a signal does to ranks in some phase. `checkpoint`: whether one is written for it."""

    receiver: str
    signals: tuple[str, ...]
    phases: tuple[str, ...]
    codes: tuple[int, ...]
    checkpoint: str


def read_table(page: Path = PAGE) -> list[Row]:
    """The rows of the page's table of signals."""
    lines = page.read_text().splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("| to "))
    rows = []
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        to, numbers, phases, _, codes, checkpoint = (cell.strip() for cell in line.strip("|").split("|"))
        rows.append(
            Row(
                to.strip("`"),
                tuple(word.strip() for word in numbers.split(",")),
                tuple(re.findall(r"start|train|validate|write|end", phases)),
                tuple(map(int, re.findall(r"\d+", codes))),
                checkpoint,
            )
        )
    return rows


def allowed(rows: list[Row], receiver: str, name: str, phases: set[str]) -> Iterator[Row]:
    """Rows that hold for this signal in any of these phases."""
    for row in rows:
        if row.receiver == receiver and name in row.signals and phases.intersection(row.phases):
            yield row


class Run:
    """One start of the job. `receiver`: whom the signal is for."""

    def __init__(self, folder: Path, receiver: str, ranks: int, in_batch: bool = False):
        self.run_dir, self.receiver = folder / "run", receiver
        self.statuses = folder / "statuses"
        folder.mkdir()
        train = ["train", str(HERE / "signal_job.py"), "--quiet", "--run-dir", str(self.run_dir)]
        python = [sys.executable, "-m", "mpitrain"]
        env = {
            **os.environ,
            "PYTHONPATH": search_path(HERE),
            "OMP_NUM_THREADS": "1",
        } | ({"PBS_JOBID": "1.here"} if in_batch else {})
        if receiver == "launch":
            command = [*python, "launch", "-n", str(ranks), *train]
        else:
            beside = Path(sys.executable).parent / "mpirun"
            mpirun = str(beside) if beside.exists() else str(shutil.which("mpirun"))
            command = [mpirun, "--oversubscribe", "-n", str(ranks), *python, *train]
            rank_status.open_folder(self.statuses, 0.2)
            env |= {rank_status.VARIABLE: str(self.statuses)}
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        with open(folder / "out", "w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def told(self) -> dict[int, rank_status.RankStatus]:
        """What the ranks have told of themselves."""
        folders = [self.statuses] if self.receiver != "launch" else list(self.run_dir.glob(".launch-*"))
        return {} if not folders else rank_status.read_all(folders[0])

    def listens(self) -> bool:
        """Whether whoever is to get the signal has come so far as to listen to it."""
        if self.receiver == "launch":
            return bool(list(self.run_dir.glob(".launch-*/launch.json")))
        return len(self.told()) > 0

    def phase(self) -> str:
        """What the ranks are at."""
        if (self.run_dir / "result.json").exists():
            return "end"
        told = self.told()
        trains = told and any(one.state in (rank_status.READY, rank_status.ENDED) for one in told.values())
        return "train" if trains else "start"

    def send(self, name: str, draw: random.Random) -> bool:
        """All signals of this kind to the receiver; whether the last has come to one that was there."""
        pid = self.process.pid
        if self.receiver == "rank":
            pid = int(draw.choice(sorted(self.told().items()))[1].process.split(":")[2])
        numbers, between_s = ENDS[name]
        for index, number in enumerate(numbers):
            until_s = time.monotonic() + between_s * bool(index)
            while time.monotonic() < until_s and self.process.poll() is None:
                time.sleep(0.02)
            if self.process.poll() is not None:
                return False
            try:
                os.kill(pid, getattr(signal, f"SIG{number}"))
            except ProcessLookupError:
                return False
        return True

    def stacks(self) -> bool:
        """Whether there are stacks: in the run's folder, or among what its ranks have printed."""
        return bool(list((self.run_dir / "stacks").glob("rank-*.txt"))) or "most recent call first" in (
            self.run_dir.parent / "out"
        ).read_text(errors="replace")

    def code(self) -> int | None:
        """The exit code; None if it had to be ended."""
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return None
        return code if code >= 0 else 128 - code

    def result(self) -> dict[str, Any]:
        """What the run has left as its result."""
        path = self.run_dir / "result.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}


def one_run(
    folder: Path, receiver: str, name: str, rows: list[Row], draw: random.Random, options: Any
) -> dict[str, Any]:
    """Send one signal at a random moment, and compare."""
    run = Run(folder, receiver, options.ranks, "batch" in name)
    while not run.listens() and run.process.poll() is None:
        time.sleep(0.01)
    at_s = draw.uniform(0.0, options.length_s)
    time.sleep(at_s)
    before = run.phase()
    again = run.send(name, draw) if (sent := run.process.poll() is None) else False
    time.sleep(0.05)
    after = run.phase()
    sent_s = time.monotonic()
    code = run.code()
    phases = set(PHASES[PHASES.index(before) : PHASES.index(after) + 1])
    phases |= {"validate", "write"} if "train" in phases else set()
    first, *more = ENDS[name][0]
    found = list(allowed(rows, receiver, first, phases))
    if more and again and name not in ("TERM at once", "TERM later, in a batch job"):
        found += allowed(rows, receiver, f"second {more[0]}", phases)
    result = run.result()
    checkpoint = newest(run.run_dir) if (run.run_dir / "checkpoints").exists() else None
    written = (
        result.get("status") == "requeue"
        and checkpoint is not None
        and checkpoint.checkpoint_at == result["samples"]
    )
    fits = [
        row
        for row in found
        if code in row.codes and (written or not (code == 75 and row.checkpoint == "yes"))
    ]
    return {
        "receiver": receiver, "signal": name, "sent": sent, "at_s": round(at_s, 2), "phases": sorted(phases),
        "code": code,
        "written": written, "stacks": run.stacks(),
        "ended_after_s": round(time.monotonic() - sent_s, 2), "as_told": bool(fits),
        "started_again": "restart" in (folder / "out").read_text(),
    }  # fmt: skip


def main() -> None:
    """Parse the command line and run."""
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--kills", "--launches", dest="launches", type=int, default=20, help="of each signal")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--signals", nargs="+", choices=list(ENDS), default=list(ENDS))
    options = parser.parse_args()
    rows, draw, ran = read_table(), random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as scratch:
        calm = Run(Path(scratch) / "calm", "launch", options.ranks)
        while not calm.listens():
            time.sleep(0.01)
        began_s = time.monotonic()
        assert calm.code() == 0, (Path(scratch) / "calm" / "out").read_text()
        options.length_s = time.monotonic() - began_s
        for name in options.signals:
            for number in range(options.launches):
                folder, sent = Path(scratch) / f"{name}-{number}", False
                while not sent:  # a run that had ended before its moment came is done again
                    shutil.rmtree(folder, ignore_errors=True)
                    found = one_run(folder, RECEIVERS[number % 3], name, rows, draw, options)
                    sent = found.pop("sent")
                if name == "QUIT" and found["receiver"] != "mpirun":
                    found["as_told"] &= found["stacks"] or "end" in found["phases"]
                ran.append(found)
                print(ran[-1], flush=True)
                if not ran[-1]["as_told"]:
                    print((folder / "out").read_text(), flush=True)
    counts = {
        "launches": len(ran),
        "as_told": sum(one["as_told"] for one in ran),
        "hung": sum(one["code"] is None for one in ran),
        "started_again": sum(one["started_again"] for one in ran),
        "longest_to_end_s": max(one["ended_after_s"] for one in ran),
    }
    print(table([tuple(counts), tuple(map(str, counts.values()))]), flush=True)
    write_row("signals", {**counts, "length_s": options.length_s, "rows": ran})
    sys.exit(0 if counts["as_told"] == len(ran) and not counts["started_again"] else 1)


if __name__ == "__main__":
    main()
