"""Does a model that does not fit into the memory of one rank train where it is split?

    python benchmarks/memory/memory.py [--ranks 8] [--width 768] [--blocks 32] [--steps 2] [--rounds 1]

Parameters, gradients and the state of Adam take three times what a rank may use beyond its size before the model is
built: the kernel refuses it more (RLIMIT_DATA: private memory that can be written to). Under each strategy ranks train
some steps, write checkpoints and the whole model; then a second launch goes on from the checkpoint under the same
limit. `allreduce()`, under which every rank holds the whole model, shows that the limit is one.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.common import make_parser, table, write_row
from measuring.launching import finish, launch, notes
from measuring.measurement import LAUNCHED, Command, Measurement

HERE = Path(__file__).resolve().parent
MEASUREMENT = Measurement(
    contestants=("`allreduce()`, which holds the whole model on each rank",),
    bound="the limit of the kernel",
    wanted="what is split ends, and goes on",
    depends=LAUNCHED,
    keys=("ranks", "num_parameters"),
    figures=("ways.*.seconds",),
    commands=(Command("python benchmarks/memory/memory.py", minutes=6),),
)

BATCH = 64  # samples of all ranks together
REFUSED = re.compile(r"can't allocate memory|MemoryError|Cannot allocate memory|bad_alloc|out of memory")

LEAST_BYTES = 64e6  # stacks of threads, buffers of MPI: below, split models are refused memory, too


def main() -> None:
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ways", nargs="+", default=[], help="only these strategies")
    options = parser.parse_args()
    n = options.ranks
    ways = {
        "sharded()": BATCH // n,
        f"tensor(parallel={n})": BATCH,
        f"pipeline(stages={n},microbatches={n})": BATCH,
        "allreduce()": BATCH // n,
    }
    chosen = {
        way: size for way, size in ways.items() if not options.ways or way.partition("(")[0] in options.ways
    }
    numbers = options.blocks * (8 * options.width**2 + 5 * options.width)
    needed = 16 * numbers
    if needed / 3 < LEAST_BYTES:
        parser.error(f"of {numbers:,} parameters a rank would be allowed {needed / 3e6:.0f} MB, and needs "
                     f"{LEAST_BYTES / 1e6:.0f} MB whatever the model is: take more --width or --blocks")  # fmt: skip
    found: dict[str, Any] = {}
    for _ in range(options.rounds):
        for way, batch_size in chosen.items():
            found[way] = measure(options, way, batch_size)
            print(way, json.dumps(found[way]), flush=True)
    print(f"{n} ranks, {numbers / 1e6:.1f} million parameters: {needed / 1e6:.0f} MB in all, ", end="")
    print(f"{needed / 3e6:.0f} MB beyond its size before allowed to a rank")
    print(
        table(
            [
                ("strategy", "end", "size before, MB", "most beyond, MB", "resumed, MB", "s"),
                *map(row_of, found.items()),
            ]
        )
    )
    write_row(
        "memory",
        {
            "ranks": n,
            "num_parameters": numbers,
            "needed": needed,
            "allowed": needed / 3,
            "ways": found,
        },
    )


def row_of(item: tuple[str, dict[str, Any]]) -> tuple[str, ...]:
    """A line of the table."""
    way, found = item
    more = [
        f"{max(found[key]) / 1e6:.0f}" if found[key] else "" for key in ("before", "more", "resumed_more")
    ]
    return way, found["end"], *more, f"{found['seconds']:.0f}"


def measure(options: Any, way: str, batch_size: int) -> dict[str, Any]:
    """Train with one strategy, and go on."""
    with tempfile.TemporaryDirectory() as directory:
        began_s = time.monotonic()
        first = run(options, Path(directory), "first", way, batch_size, options.steps)
        found = {
            **first, "resumed_more": [], "model_bytes": 0, "seconds": time.monotonic() - began_s
        }  # fmt: skip
        if first["end"] == "trained":
            again = run(options, Path(directory), "again", way, batch_size, options.steps + 1)
            assert again["end"] == "trained", again
            found |= {"resumed_more": again["more"], "losses": first["losses"] + again["losses"]}
            found["model_bytes"] = (Path(directory) / "run" / "model.safetensors").stat().st_size
        return found


def run(options: Any, folder: Path, name: str, way: str, batch_size: int, steps: int) -> dict[str, Any]:
    """One launch."""
    notes_folder, run_dir = folder / name, folder / "run"
    notes_folder.mkdir()
    env = {
        "MEMORY_FOLDER": str(notes_folder), "MEMORY_WIDTH": str(options.width), "MEMORY_BLOCKS": str(options.blocks),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = ["--strategy", way, "--batch-size", str(batch_size), "--steps", str(steps)]
    words += ["--checkpoint-every", str(BATCH * options.steps), "--resume", "auto", "--log-every", "1"]
    process = launch(run_dir, options.ranks, HERE / "memory_job.py", words, "", env, "")
    finished = finish(process)
    text = (run_dir / "out").read_text(errors="replace")
    sizes = sorted(notes(notes_folder, "sizes"), key=lambda one: one["rank"])
    told: dict[str, Any] = {
        key: [one[key] for one in sizes] for key in ("before", "more", "resident_before", "resident")
    }
    if not finished:
        return told | {"end": "hung", "losses": [], "said": text[-2000:]}
    if process.returncode == 0:
        result = json.loads((run_dir / "result.json").read_text())
        assert (result["status"], result["steps"]) == ("ok", steps), result
        return told | {"end": "trained", "losses": losses(run_dir)}
    said = [line for line in text.splitlines() if REFUSED.search(line)]
    if not said:
        return told | {"end": "failed", "losses": [], "said": text[-3000:]}
    return told | {"end": "refused memory", "losses": [], "said": said[0]}


def losses(run_dir: Path) -> list[float]:
    """The losses of the steps that this launch has reported."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


if __name__ == "__main__":
    main()
