"""Is a rank's memory what `--dry-run` tells?

    python benchmarks/memory/memory_told.py [--layers 1 16] [--optimizers sgd adam]

Every strategy trains a model of 25 million numbers (100 MB), in one layer and in 16 equal ones, without checkpoints.
What each rank had in memory at most (`peak_bytes` of `result.json`) stands beside the sum of the parts that the dry run
tells for its kind; its activations, which that leaves out, are a few kilobytes here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.common import make_parser, table, write_row
from measuring.launching import finish, launch, search_path
from measuring.measurement import LAUNCHED, Command, Measurement

HERE = Path(__file__).resolve().parent
MEASUREMENT = Measurement(
    contestants=("the peak that was measured",),
    wanted="told / measured between 0.85 and 1.15",
    depends=LAUNCHED,
    keys=("layers", "optimizer"),
    figures=("ways.*.*.told", "ways.*.*.measured"),
    commands=(Command("python benchmarks/memory/memory_told.py", minutes=6),),
)

WAYS = {
    "allreduce()": 2,
    "sync()": 9,
    "async()": 5,
    "async(servers=2)": 4,
    "localsgd(period=2)": 2,
    "localsgd(period=2,wire='int8')": 2,
    "localsgd(period=2,outer=diloco())": 2,
    "decentralized()": 3,
}
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def main() -> None:
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--optimizers", nargs="+", choices=("sgd", "adam"), default=["sgd", "adam"])
    parser.add_argument("--rounds", type=int, default=1, help="launches, of which the largest peak counts")
    options = parser.parse_args()
    for layers in options.layers:
        for optimizer in options.optimizers:
            env = {"TOLD_LAYERS": str(layers), "TOLD_OPTIMIZER": optimizer, "OMP_NUM_THREADS": "1"}
            found = {way: compare(way, ranks, env, options.rounds) for way, ranks in WAYS.items()}
            rows = [("strategy", "rank", "told, MB", "measured, MB", "told / measured")]
            for way, kinds in found.items():
                rows += [(way, kind, *figures(one)) for kind, one in kinds.items()]
            print(f"{layers} layers, {optimizer}\n{table(rows)}", flush=True)
            row = {"layers": layers, "optimizer": optimizer, "rounds": options.rounds}
            write_row("memory_told", row | {"ways": found})


def figures(one: dict[str, float]) -> tuple[str, str, str]:
    """Of one kind of rank."""
    return (
        f"{one['told'] / 1e6:.0f}",
        f"{one['measured'] / 1e6:.0f}",
        f"{one['told'] / one['measured']:.2f}",
    )


def compare(way: str, ranks: int, env: dict[str, str], rounds: int) -> dict[str, dict[str, float]]:
    """By kind of rank: bytes that are told, and the most that a rank of it had."""
    told, measured = tell(way, ranks, env), [measure(way, ranks, env) for _ in range(rounds)]
    assert all(set(told) == set(peaks) for peaks in measured), (told, measured)
    return {
        kind: {"told": num_bytes, "measured": max(peaks[kind] for peaks in measured)}
        for kind, num_bytes in told.items()
    }


def tell(way: str, ranks: int, env: dict[str, str]) -> dict[str, float]:
    """The sums of the parts that a dry run tells, whose own sums are rounded to tenths of a GiB."""
    command = [sys.executable, "-m", "mpitrain", "train", str(HERE / "memory_told_job.py"), "--strategy", way]
    command += ["--dry-run", "--ranks", str(ranks)]
    path = {"PYTHONPATH": search_path(HERE)}
    text = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **env, **path}
    ).stdout
    parts = text[text.index("\nmemory") : text.index("while a checkpoint is written")]
    kinds = re.split(r"each (server|worker): [\d.]+ \w+\n", parts)[1:]
    return {
        kind: sum(
            float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+)\s+([KMG]?i?B)\b", listed)
        )
        for kind, listed in zip(kinds[::2], kinds[1::2], strict=True)
    }


def measure(way: str, ranks: int, env: dict[str, str]) -> dict[str, float]:
    """The largest peak of each kind of rank in a run."""
    with tempfile.TemporaryDirectory() as folder:
        process = launch(Path(folder), ranks, HERE / "memory_told_job.py", ["--strategy", way], "", env, "")
        assert finish(process) and process.returncode == 0, (Path(folder) / "out").read_text()
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "result.json").read_text())["ranks"]
    peaks: dict[str, float] = {}
    for row in rows:
        kind = row.get("role", "worker")
        peaks[kind] = max(peaks.get(kind, 0.0), row["peak_bytes"])
    return peaks


if __name__ == "__main__":
    main()
