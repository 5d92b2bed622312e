"""How long does a small collective take after ranks have been silent, and what of that is the scheduler's?

    mpitrain launch -n 2 benchmarks/after_pause.py [--pauses-ms 0 1 100 10000] [--rounds 50] [--busy] [--bound]

An all-reduce of 64 bytes by our process group, in float32 and in bfloat16, by gloo, and by bare mpi4py on the thread
that calls. Before each call all ranks sleep; the call is measured from the entry of the rank that comes last to the
exit of the rank that leaves last, on the clock that all ranks of a machine share, so that what a sleep takes too long
counts for nobody. Ways take turns in blocks; where a pause lasts a second or more, their pauses overlap, and there are
as many calls as three minutes allow. `--bound` puts all threads of a rank on a core of its own, `--busy` has one more
process compute meanwhile: what differs with them is the scheduler's, what differs between the ways is theirs.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from measuring.common import machine, make_parser, table, write_row
from measuring.gloo import never_destroyed, start_gloo
from measuring.measurement import BASICS, Command, Measurement

from mpitrain.mpi.runtime import start

runtime = start()  # before mpi4py.MPI is imported: it chooses the thread level
from mpi4py import MPI  # noqa: E402

MEASUREMENT = Measurement(
    contestants=("gloo", "bare mpi4py"),
    bound="bare mpi4py's Allreduce",
    wanted=(
        "a call in a row 5 of bare, in 16 bits 3 of float32; one after 10 s of silence 3 of one in a row, or bare's own"
    ),
    depends=(*BASICS, "mpitrain/devices", "mpitrain/mpi"),
    keys=("ranks", "bound", "busy"),
    figures=("median_us.mpitrain.*",),
    commands=(
        Command("mpitrain launch -n 2 benchmarks/after_pause.py", minutes=5, covers={"bound": False, "busy": False}),
        Command(
            "mpitrain launch -n 2 benchmarks/after_pause.py --bound", minutes=5, covers={"bound": True, "busy": False}
        ),
        Command(
            "mpitrain launch -n 2 benchmarks/after_pause.py --busy", minutes=5, covers={"bound": False, "busy": True}
        ),
    ),
)  # fmt: skip

NUM_NUMBERS = {torch.float32: 16, torch.bfloat16: 32}  # 64 bytes
LONG_S, MOST_S = 1.0, 180.0  # pauses that overlap, and how long all calls after them may take


def reduction(group, dtype):
    """What makes one call."""
    tensor = torch.ones(NUM_NUMBERS[dtype], dtype=dtype)

    def call():
        dist.all_reduce(tensor, group=group)
        tensor.fill_(1)

    return call


def bare():
    numbers, comm = torch.ones(NUM_NUMBERS[torch.float32]).numpy(), runtime.comm.Dup()
    return lambda: comm.Allreduce(MPI.IN_PLACE, [numbers, MPI.FLOAT])


def timed(call, pause_s):
    """Entry and exit of one call after a pause."""
    if pause_s:
        time.sleep(pause_s)
    entered_s = time.monotonic()
    call()
    return entered_s, time.monotonic()


def measure(ways, pause_s, num_calls):
    """Microseconds of every call of each way: from the last entry to the last exit."""
    own = {way: [] for way in ways}
    if pause_s < LONG_S:
        for way, call in ways.items():
            timed(call, 0)
            own[way] = [timed(call, pause_s) for _ in range(num_calls)]
    else:
        for call in ways.values():
            call()
        for _ in range(max(5, min(num_calls, int(MOST_S / pause_s)))):
            for way, call in ways.items():
                own[way].append(timed(call, pause_s / len(ways)))
    told = runtime.allgather(own)
    return {
        way: [
            (max(exit_s for _, exit_s in ranks) - max(entry_s for entry_s, _ in ranks)) * 1e6
            for ranks in zip(*(each[way] for each in told), strict=True)
        ]
        for way in ways
    }


def bind():
    """All threads of this rank on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), {cores[runtime.rank % len(cores)]})


def computing(busy):
    """A process that computes, until it is told to end."""
    if not busy or runtime.rank:
        return None
    return subprocess.Popen([sys.executable, "-c", "while True: sum(range(10**6))"])


def show(found, options):
    """Prints the table and writes the row."""
    pauses = [*found]
    lines = [("way", *(f"after {pause:g} ms" if pause else "in a row" for pause in pauses))]
    middle = {way: {f"{p:g}": statistics.median(found[p][way]) for p in pauses} for way in found[pauses[0]]}
    high = {
        way: {f"{p:g}": sorted(found[p][way])[int(0.9 * len(found[p][way]))] for p in pauses}
        for way in middle
    }
    for way, times in middle.items():
        lines.append((way, *(f"{times[at]:.0f} ({high[way][at]:.0f})" for at in times)))
    print(f"{machine()['cpu']}, {runtime.size} ranks; us, median and 90th percentile")
    print(table(lines))
    row = {
        "ranks": runtime.size, "bound": options.bound, "busy": options.busy, "rounds": options.rounds,
        "median_us": middle, "ninetieth_us": high,
        "num_calls": {f"{p:g}": len(found[p]["mpitrain"]) for p in pauses},
    }  # fmt: skip
    write_row("after_pause", row)


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--pauses-ms", type=float, nargs="+", default=[0, 1, 100, 10_000])
    parser.add_argument("--rounds", type=int, default=50, help="calls of each way after each pause")
    parser.add_argument("--bound", action="store_true", help="each rank on a core of its own")
    parser.add_argument("--busy", action="store_true", help="beside one process that computes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gloo, ours = start_gloo(runtime), dist.new_group(backend="mpi4py")
    if options.bound:
        bind()
    ways = {
        "mpitrain": reduction(ours, torch.float32),
        "mpitrain, 16 bits": reduction(ours, torch.bfloat16),
        "gloo": reduction(gloo, torch.float32),
        "bare mpi4py": bare(),
    }
    beside = computing(options.busy)
    try:
        found = {pause: measure(ways, pause / 1e3, options.rounds) for pause in options.pauses_ms}
    finally:
        if beside:
            beside.kill()
            beside.wait()
    if runtime.rank == 0:
        show(found, options)
    never_destroyed(gloo)
    dist.destroy_process_group()
    runtime.finish()


if __name__ == "__main__":
    main()
