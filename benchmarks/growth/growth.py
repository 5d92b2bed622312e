"""What does a rank cost at its start, at a step, a checkpoint, a resume and the end, as the number of ranks grows?

    python benchmarks/growth/growth.py [--ranks 2 8 32] [--strategies "allreduce()" "async(servers=1)"] [--rounds 1]
        [--starts]

A small job on synthetic data is trained by so many ranks on this machine, checkpointed, and gone on with; every rank
counts what it opens, sends and receives, and its CPU seconds (`growth_rank.py`). MPI's own start is a column of its
own. Beside it, in the same run, as many processes import torch and nothing else. What functions of the number of ranks
alone decide is computed up to 10,240: a rank's own lease, what ranks tell each other to agree, what everybody is given
at the end; and how long a completion takes among as many receives from this process itself.
"""

from __future__ import annotations

import compileall
import json
import math
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.common import make_parser, table, write_row
from measuring.measurement import LAUNCHED, ROOT, Command, Measurement

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.engine import Engine
from mpitrain.mpi.json_collectives import to_bytes
from mpitrain.strategies.sampling.dealer import BatchDealer
from mpitrain.strategies.sampling.step_partition import StepPartition
from mpitrain.system.launched.agreement_texts import digest_words
from mpitrain.training.session import without_rows

HERE = Path(__file__).resolve().parent
MEASUREMENT = Measurement(
    contestants=("as many processes that import torch and nothing else",),
    depends=(*LAUNCHED, "jobs/digits.py"),
    figures=("starts.*.first_step_s", "starts.*.torch_s"),
    commands=(
        Command("python benchmarks/growth/growth.py", minutes=8),
        Command(
            "python benchmarks/growth/growth.py --starts --ranks 32 --rounds 3",
            minutes=6,
            writes="growth_start",
        ),
    ),
)

JOB = ROOT / "jobs" / "digits.py"
STEPS, BATCH = 6, 16
SIZES = (2, 32, 128, 1024, 10_240)
COUNTED = ("cpu_s", "opens", "listings", "bytes", "messages")
EPOCH = {"num_samples": 100_000_000, "batch_size": 32, "window_samples": 1024}


def main() -> None:
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--strategies", nargs="+", default=["allreduce()", "async(servers=1)"])
    parser.add_argument("--resume-up-to", type=int, default=8, metavar="N", help="ranks; more do not go on")
    parser.add_argument("--rounds", type=int, default=1, help="starts and imports of torch, taking turns")
    parser.add_argument(
        "--starts", action="store_true", help="of the largest number of ranks, and nothing else"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="of the functions of N")
    options = parser.parse_args()
    # as an installed package is; where Python may not write bytecode every rank compiles every file of a checkout
    assert compileall.compile_dir(ROOT / "mpitrain", quiet=1)
    if options.starts:
        return show_starts(max(options.ranks), options.strategies, options.rounds)
    launches = [
        found
        for strategy in options.strategies
        for ranks in options.ranks
        for found in measure(strategy, ranks, ranks <= options.resume_up_to)
    ]
    starts = [
        start_against_torch(max(options.ranks), strategy)
        for _ in range(options.rounds)
        for strategy in options.strategies
    ]
    functions = [of_size(size, launches) for size in options.sizes]
    print(table([LAUNCH_HEAD, *(line for found in launches for line in launch_lines(found))]))
    for found in starts:
        print(
            f"{found['ranks']} ranks, {found['strategy']}: {found['first_step_s']:.1f} s to the first step, "
            f"{found['first_step_cpu_s']:.1f} s of CPU; as many processes: {found['torch_s']:.1f} s to import torch, "
            f"{found['torch_cpu_s']:.1f} s of CPU; with a step of their own {found['torch_step_s']:.1f} s, "
            f"{found['torch_step_cpu_s']:.1f} s of CPU"
        )
    print(table([FUNCTION_HEAD, *map(function_line, functions)]))
    write_row("growth", {"launches": launches, "starts": starts, "functions": functions})


# ---- measured


def measure(strategy: str, ranks: int, resumes: bool) -> list[dict[str, Any]]:
    """A run, and one that goes on from its checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        first = launch(Path(folder), "first", strategy, ranks, STEPS)
        return [first, launch(Path(folder), "again", strategy, ranks, STEPS + 4)] if resumes else [first]


def run_ranks(
    folder: Path, name: str, strategy: str, ranks: int, steps: int
) -> tuple[float, list[dict[str, Any]], dict[str, Any]]:
    """One launch: when it began, what its ranks have counted, and its result."""
    (folder / name).mkdir()
    every = 3 * BATCH * (ranks - (1 if "servers" in strategy else 0))
    words = {
        "strategy": strategy, "batch_size": BATCH, "steps": steps, "synthetic": True, "quiet": True,
        "run_dir": str(folder / "run"), "resume": "auto", "checkpoint_every": str(every),
    }  # fmt: skip
    began_s = time.time()
    start = [sys.executable, "-m", "mpitrain", "launch", "-n", str(ranks), "--start-timeout-s", "0"]
    program = [str(HERE / "growth_rank.py"), str(folder / name), str(JOB), json.dumps(words)]
    ended = subprocess.run([*start, *program], capture_output=True, text=True)
    rows = [json.loads(path.read_text()) for path in sorted((folder / name).glob("rank-*.json"))]
    assert len(rows) == ranks, ended.stderr[-3000:]
    return began_s, rows, json.loads((folder / "run" / "result.json").read_text())


def launch(folder: Path, name: str, strategy: str, ranks: int, steps: int) -> dict[str, Any]:
    """What the ranks of a launch have counted, by stage; `resumed` where it goes on."""
    began_s, rows, result = run_ranks(folder, name, strategy, ranks, steps)
    return {
        "strategy": strategy, "ranks": ranks, "resumed": name == "again",
        "first_step_s": max(first_step(row)["time_s"] for row in rows) - began_s,
        "first_step_cpu_s": sum(first_step(row)["cpu_s"] for row in rows),
        "stages": {
            "torch": between(rows, "python", "torch"), "package": between(rows, "torch", "package"),
            "MPI": between(rows, "package", "connected"), "start": between(rows, "connected", None),
            "step": per_step(rows), "end": between(rows, "trained", "ended"),
        },
        "checkpoint": checkpoints(rows),
        "row_bytes": len(json.dumps(result["ranks"])) // len(result["ranks"]),
        "summary_bytes": len(json.dumps(without_rows(result))),
    }  # fmt: skip


def steps_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What a rank had cost when its steps began, in their order."""
    return [one for one in row["stages"] if one["stage"].startswith("step ")]


def first_step(row: dict[str, Any]) -> dict[str, Any]:
    return steps_of(row)[0]


def between(rows: list[dict[str, Any]], begins: str, ends: str | None) -> dict[str, dict[str, float]]:
    """What a stage has cost: rank 0, and the largest of the others. `ends`: None for the first step."""
    costs = []
    for row in rows:
        stages = {one["stage"]: one for one in row["stages"]}
        last = first_step(row) if ends is None else stages[ends]
        costs.append({key: last[key] - stages[begins][key] for key in COUNTED})
    return of_ranks(costs)


def per_step(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The medians over the steps behind the first one."""
    costs = []
    for row in rows:
        pairs = list(zip(steps_of(row)[1:], steps_of(row)[2:], strict=False))
        costs.append({key: statistics.median(b[key] - a[key] for a, b in pairs) for key in COUNTED})
    return of_ranks(costs)


def of_ranks(costs: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    others = costs[1:]
    return {"rank 0": costs[0], "others": {key: max(one[key] for one in others) for key in COUNTED}}


def checkpoints(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of one checkpoint: its parts, what the largest of them takes, and what all of them take."""
    parts = [row["parts"][0] for row in rows if row["parts"]]
    most = {key: max((one[key] for one in parts), default=0) for key in ("cpu_s", "opens", "fsyncs", "bytes")}
    return {"parts": len(parts), **most, "all_opens": sum(one["opens"] for one in parts)}


IMPORT = "import torch"
ONE_STEP = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""


def show_starts(ranks: int, strategies: list[str], rounds: int) -> None:
    """Starts and imports of torch, taking turns, as a row of their own."""
    starts = [start_against_torch(ranks, strategy, False) for _ in range(rounds) for strategy in strategies]
    for found in starts:
        times, cpu = (found[f"first_step_{unit}"] / found[f"torch_{unit}"] for unit in ("s", "cpu_s"))
        print(
            f"{ranks} ranks, {found['strategy']}: {times:.2f} times as long as importing torch, {cpu:.2f} in CPU"
        )
    write_row("growth_start", {"starts": starts})


def start_against_torch(ranks: int, strategy: str, with_step: bool = True) -> dict[str, Any]:
    """From the launch to the first step, and as many processes that import torch, or make a step of their own."""
    with tempfile.TemporaryDirectory() as folder:
        ours = launch(Path(folder), "first", strategy, ranks, STEPS)
    found = {key: ours[key] for key in ("ranks", "strategy", "first_step_s", "first_step_cpu_s")}
    programs = {"torch": IMPORT, "torch_step": ONE_STEP} if with_step else {"torch": IMPORT}
    for name, program in programs.items():
        began_s, before_s = time.time(), cpu_of_children()
        alone = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(ranks)]
        codes = [one.wait() for one in alone]  # of all of them, before the clock is read
        assert not any(codes)
        found |= {f"{name}_s": time.time() - began_s, f"{name}_cpu_s": cpu_of_children() - before_s}
    return found


def cpu_of_children() -> float:
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ---- functions of the number of ranks


def of_size(size: int, launches: list[dict[str, Any]]) -> dict[str, Any]:
    """What follows from the number of ranks alone; bytes of rows are those of the launches here."""
    typical_s, epoch_s, position_bytes = own_leases(size)
    served = max(launches, key=lambda one: (one["strategy"].startswith("async"), one["ranks"]))
    summary, row = served["summary_bytes"], served["row_bytes"]
    names = {"parameters": [f"layers.{index}.weight (1024, 1024)" for index in range(400)]}
    return {
        "size": size, "lease_s": typical_s, "lease_before_s": dealing_to_all(size),
        "leases_of_epoch_s": epoch_s, "position_bytes": position_bytes,
        "agree_bytes": 2 * 8 * len(digest_words(names)), "agree_before_bytes": size * len(to_bytes(names)),
        "end_bytes": summary, "end_before_bytes": summary + size * row,
        "end_messages": math.ceil(math.log2(size)), "end_before_messages": 2 * (size - 1),
        "completion_s": completion(1, size), "completion_before_s": completion(size, size),
    }  # fmt: skip


def own_leases(size: int) -> tuple[float, float, int]:
    """CPU seconds for a rank's lease at a step in the middle of an epoch, and for all of them in its first epoch; and
    the bytes of a position in the data."""
    partition, costs, position = StepPartition(num_workers=size, **EPOCH, workers=(size // 3,)), [], 0
    began_s = time.process_time()
    while True:
        before_s = time.process_time()
        step = partition.take_step()
        partition.peek()
        partition.settle_step()
        costs.append(time.process_time() - before_s)
        if step is None:
            return statistics.median(costs), time.process_time() - began_s, position
        if len(costs) % 100 == 1:
            position = max(position, len(json.dumps(partition.state())))


def dealing_to_all(size: int) -> float:
    """CPU seconds for a step in which the batches of all workers are dealt."""
    dealer, costs = BatchDealer(num_epochs=1 << 62, num_workers=size, **EPOCH), []
    for _ in range(5):
        began_s = time.process_time()
        assert all(dealer.deal(worker) for worker in range(size))
        for worker in range(size):
            dealer.settle_lease(worker)
        costs.append(time.process_time() - began_s)
    return statistics.median(costs)


def completion(num_receives: int, size: int) -> float:
    """Seconds until the engine has completed a message of this process to itself, among so many receives."""
    engine, draw = Engine(MPI.COMM_SELF), random.Random(size)
    done, costs = [], []

    def listen(tag: int) -> None:
        source = MPI.ANY_SOURCE if num_receives == 1 else 0
        engine.irecv(bytearray(64), source, tag, passive=True).then(lambda op: done.append(op.tag))

    for tag in range(num_receives):
        listen(tag)
    for _ in range(200):
        engine.isend(bytes(64), 0, draw.randrange(num_receives))
        began_s = time.perf_counter()
        while not done:
            engine.poll()
        costs.append(time.perf_counter() - began_s)
        listen(done.pop())
    engine.stop()
    return statistics.median(costs)


# ---- shown

LAUNCH_HEAD = (
    "run",
    "N",
    "rank",
    "MPI CPU s",
    "start CPU s",
    "opens",
    "bytes",
    "step ms",
    "bytes",
    "end ms",
    "bytes",
)
FUNCTION_HEAD = ("N", "lease us", "before", "agree B", "before", "end B", "before", "completion us", "before")


def launch_lines(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rank 0, and the largest of the others."""
    name = found["strategy"].partition("(")[0] + (", resumed" if found["resumed"] else "")
    return [
        (name, str(found["ranks"]), *one) for one in (cost_line(found, who) for who in ("rank 0", "others"))
    ]


def cost_line(found: dict[str, Any], who: str) -> tuple[str, ...]:
    stages = {name: stage[who] for name, stage in found["stages"].items()}
    start, step, end = stages["start"], stages["step"], stages["end"]
    return (
        who, f"{stages['MPI']['cpu_s']:.2f}", f"{start['cpu_s']:.2f}", f"{start['opens']:.0f}",
        f"{start['bytes']:,.0f}",
        f"{1e3 * step['cpu_s']:.1f}", f"{step['bytes']:,.0f}", f"{1e3 * end['cpu_s']:.1f}", f"{end['bytes']:,.0f}",
    )  # fmt: skip


def function_line(found: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{found['size']:,}", f"{1e6 * found['lease_s']:.1f}", f"{1e6 * found['lease_before_s']:.1f}",
        f"{found['agree_bytes']:,}",
        f"{found['agree_before_bytes']:,}", f"{found['end_bytes']:,}", f"{found['end_before_bytes']:,}",
        f"{1e6 * found['completion_s']:.1f}", f"{1e6 * found['completion_before_s']:.1f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
