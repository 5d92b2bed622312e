"""How fast is virtual time? Seconds of one core for runs without gradients.

    .venv/bin/python benchmarks/virtual_speed.py [--rounds 3] [--pushes 1000000] [--workers 512] [--ranks 10000]

Two runs. One over a parameter server: so many workers, exponential times, links that carry one message at a time; the
servers and workers are those of every run. Beside it, in the same round, the bound of any such program in Python: a
heap of as many events, each taken out and put back with a later time. The other is `allreduce()` on ten thousand
ranks, a hundred steps. CPU seconds of this process, medians of the rounds.
"""

from __future__ import annotations

import heapq
import random
import statistics
import tempfile
import time
from pathlib import Path

from measuring.common import make_parser, median_ratio, table, write_row
from measuring.measurement import VIRTUAL, Command, Measurement

MEASUREMENT = Measurement(
    bound="a heap of as many events",
    depends=VIRTUAL,
    figures=("async.us_a_push", "async.us_an_event"),
    commands=(Command("python benchmarks/virtual_speed.py", minutes=6),),
)

STEPS = 100  # of the ranks that all-reduce


def timed(task):
    """(CPU seconds, what came of it)."""
    began_s = time.process_time()
    found = task()
    return time.process_time() - began_s, found


def pushes(workers: int, number: int):
    """So many pushes to one server; the result of the run."""
    from mpitrain.simulation.timing import time_run
    from mpitrain.simulation.workload import Workload
    from mpitrain.strategies import Async
    from mpitrain.virtual import Exponential, Link

    load = Workload(num_parameters=100_000, num_samples=10**7, step_samples=32, steps=-(-number // workers))
    return time_run(Async(), load, workers, Exponential(1.0), Link())


def heap_alone(workers: int, events: int) -> None:
    """As many events, of which nothing follows but the next one."""
    draw = random.Random(0).random
    heap = [(draw(), number, None, None) for number in range(workers)]
    heapq.heapify(heap)
    for serial in range(events):
        at_s, _, process, event = heapq.heappop(heap)
        heapq.heappush(heap, (at_s + draw(), workers + serial, process, event))


def steps(ranks: int, folder: Path):
    """A hundred steps of so many ranks that all-reduce; the row of the comparison."""
    import contextlib
    import io

    import torch

    import mpitrain as mt
    from mpitrain.job import Overrides
    from mpitrain.simulation.comparison import Comparison
    from mpitrain.virtual import Exponential, Link

    def loss(model, batch):
        return model(batch["x"]).square().mean()

    job = mt.Job(
        model=lambda: torch.nn.Linear(64, 64), loss=loss, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        data=mt.Synthetic(1_000_000, x=((64,), "float32")), epochs=1, batch_size=1,
    )  # fmt: skip
    options = Overrides(run_dir=str(folder), quiet=True, steps=STEPS)
    with contextlib.redirect_stdout(io.StringIO()):
        runs = Comparison(job, options, Exponential(1.0), Link(), timing_only=True)
        (row,) = runs.run([mt.AllReduce()], [ranks])["rows"]
    return row


def main() -> None:
    """Measure, print and write the row."""
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pushes", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=10_000)
    options = parser.parse_args()
    pushes(8, 100)  # imports
    runs, heaps, lockstep = [], [], []
    for _ in range(options.rounds):
        took_s, found = timed(lambda: pushes(options.workers, options.pushes))
        runs.append(took_s)
        events = found["num_events"]
        heaps.append(timed(lambda events=events: heap_alone(options.workers, events))[0])
        with tempfile.TemporaryDirectory() as folder:
            took_s, row = timed(lambda: steps(options.ranks, Path(folder)))
        lockstep.append(took_s)
        print(f"{runs[-1]:.1f} s, heap alone {heaps[-1]:.2f} s, allreduce {lockstep[-1]:.1f} s", flush=True)
    median_s = statistics.median(runs)
    ratio = median_ratio(runs, heaps)
    found_row = {
        "rounds": options.rounds,
        "async": {
            "workers": options.workers, "pushes": found["pushes"], "events": events, "cpu_s": runs,
            "us_a_push": 1e6 * median_s / found["pushes"], "us_an_event": 1e6 * median_s / events,
            "over_heap": ratio, "virtual_s": found["virtual_s"],
        },
        "allreduce": {"ranks": options.ranks, "steps": row["steps"], "cpu_s": lockstep},
    }  # fmt: skip
    lines = [("run", "CPU s", "us a push", "us an event", "over a heap alone")]
    one = found_row["async"]
    lines.append((
        f"async, {options.workers} workers, {one['pushes']} pushes", f"{median_s:.1f}", f"{one['us_a_push']:.1f}",
        f"{one['us_an_event']:.1f}", f"{ratio[0]:.1f}",
    ))  # fmt: skip
    lines.append((
        f"allreduce, {options.ranks} ranks, {row['steps']} steps", f"{statistics.median(lockstep):.1f}", "", "", "",
    ))  # fmt: skip
    print(f"\n{table(lines)}")
    write_row("virtual_speed", found_row)


if __name__ == "__main__":
    main()
