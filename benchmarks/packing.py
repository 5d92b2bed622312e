"""How fast are samples packed, what do more ranks give, and are the bytes the same?

    mpitrain launch -n 4 benchmarks/packing.py [--rounds 3] [--megabytes 1024]

An .npz of `--megabytes` (x 12 KiB a sample, values 0 to 15, and an int64 label y) becomes 16 shards or more, permuted.
By turns, into a fresh directory each time:

    copy           the same bytes in the file's own order, written and synced: what the disk allows
    h5py           a script of ten lines: the permuted samples into one file, no checksums, no sums, no sync
    one rank       `mt.pack` on rank 0
    N ranks        the same by all ranks
    ... gzip:1     both again, where computing costs more than writing

`same bytes`: every file of the N ranks, index and all, is the one rank's. Ratios are to the copy of the same round;
seconds count from the opened source to the last synced file, without start-up.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.measurement import BASICS, Command, Measurement

import mpitrain as mt
from mpitrain.mpi.runtime import start

MEASUREMENT = Measurement(
    contestants=("a script of ten lines of h5py",),
    bound="the same bytes copied",
    depends=(*BASICS, "mpitrain/data", "mpitrain/mpi", "mpitrain/strategies"),
    figures=("ways.*.of_copy",),
    commands=(Command("mpitrain launch -n 2 benchmarks/packing.py", minutes=5),),
)

SHAPE = (3, 64, 64)
SAMPLE_BYTES = 3 * 64 * 64


def make(path, num_samples):
    random = np.random.default_rng(0)
    np.savez(path, x=random.integers(0, 16, (num_samples, *SHAPE), dtype=np.uint8), y=np.arange(num_samples))


def copy(source, directory):
    directory.mkdir()
    with open(source, "rb") as read, open(directory / "copy", "wb") as write:
        shutil.copyfileobj(read, write, 1 << 24)
        write.flush()
        os.fsync(write.fileno())


def by_h5py(source, directory):
    directory.mkdir()
    with np.load(source) as file, h5py.File(directory / "all.h5", "w") as out:
        rows = np.random.default_rng(0).permutation(len(file["y"]))
        for name in ("x", "y"):
            array = file[name]
            out.create_dataset(name, data=array[rows], chunks=(min(85, len(rows)), *array.shape[1:]))


def packer(compression, num_samples, ranks=None):
    def work(source, directory):
        settings = {"shard_samples": -(-num_samples // 16), "compression": compression}
        mt.pack(source, directory, **settings, **({"ranks": ranks} if ranks else {}))

    return work


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=1024)
    options = parser.parse_args()
    runtime = start()
    num_samples = max(64, int(options.megabytes * 2**20 / SAMPLE_BYTES))
    many = f"{runtime.size} ranks"
    ways = {"copy": copy, "h5py": by_h5py}
    for suffix, compression in (("", None), (" gzip:1", "gzip:1")):
        ways["one rank" + suffix] = packer(compression, num_samples)
        ways[many + suffix] = packer(compression, num_samples, runtime)
    made = tempfile.mkdtemp(prefix="packing-") if runtime.rank == 0 else None
    scratch = Path(runtime.broadcast(made))
    try:
        if runtime.rank == 0:
            make(scratch / "a.npz", num_samples)
        seconds = {name: [] for name in ways}
        same = True
        for _ in range(options.rounds):
            for name, work in ways.items():
                seconds[name].append(turn(runtime, scratch, name, work))
            if runtime.rank == 0:
                same &= all(alike(scratch / f"one rank{s}", scratch / f"{many}{s}") for s in ("", " gzip:1"))
                for name in ways:
                    shutil.rmtree(scratch / name)
            runtime.barrier()
        if runtime.rank == 0:
            show(options, runtime, num_samples, seconds, same)
    finally:
        if runtime.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
    runtime.finish()


def turn(runtime, scratch, name, work):
    """Seconds of one way; what is one process' work rank 0 does, and the others wait."""
    runtime.barrier()
    began_s = time.perf_counter()
    if runtime.rank == 0 or name.startswith(f"{runtime.size} ranks"):
        work(str(scratch / "a.npz"), scratch / name)
    runtime.barrier()
    return time.perf_counter() - began_s


def alike(one, other):
    names = sorted(path.name for path in one.iterdir())
    return names == sorted(path.name for path in other.iterdir()) and not any(
        not filecmp.cmp(one / name, other / name, shallow=False) for name in names
    )


def show(options, runtime, num_samples, seconds, same):
    megabytes = num_samples * SAMPLE_BYTES / 2**20
    rows, ways = [("way", "MiB/s", "of the copy", "95 % interval")], {}
    for name, values in seconds.items():
        ratio, low, high = median_ratio(seconds["copy"], values)  # of speeds
        speed = megabytes / statistics.median(values)
        ways[name] = {"mebibytes_per_second": speed, "of_copy": [ratio, low, high]}
        rows.append((name, f"{speed:.0f}", f"{ratio:.2f}", f"{low:.2f} - {high:.2f}"))
    print(f"{machine()['cpu']}, {machine()['num_cores']} cores; {megabytes:.0f} MiB, {num_samples} samples")
    print(table(rows))
    print(f"same bytes: {'yes' if same else 'NO'}", flush=True)
    row = {"rounds": options.rounds, "megabytes": megabytes, "ranks": runtime.size, "ways": ways}
    write_row("packing", row | {"same_bytes": same})


if __name__ == "__main__":
    main()
