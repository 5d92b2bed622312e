"""How fast does a shuffled epoch come through the libraries that people read training data with, beside our shards?

    python benchmarks/opponents/reading.py LIBRARY [--rounds 7] [--megabytes 256]
                                                                                        (`make opponents` installs each)

One library at a time, with an environment of its own; ours takes turns with it in the same run, on the same samples: x
of 12 KiB, 4 KiB or 64 bytes and an int64 label, in the page cache, batches of 64 samples (1024 of 64 bytes). Each
writes its own layout, uncompressed, in shards of whatever size it likes, and reads it in each of the ways that its
documentation offers (`ways` below); a page shows the fastest. A turn is a shuffled epoch, opening included, or as much
of it as `--turn-s` allows; a loader with worker processes is on the clock when each of them has given a batch. Batches
are torch tensors. How well a reader mixes is not measured: a full permutation (Lance's rows, torch's loader) is more
than a few chunks at a time (ours, h5py, zarr), or a buffer of 1000 samples (WebDataset).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.beside import Beside
from measuring.common import make_parser, median_ratio, table, write_row
from measuring.measurement import BASICS, Measurement
from opponents import OPPONENTS, in_turns, installed, start_library

MEASUREMENT = Measurement(
    contestants=(
        "WebDataset",
        "Lance",
        "MosaicML streaming",
        "zarr",
        "h5py by whole chunks",
        "torch's DataLoader",
    ),
    depends=(*BASICS, "mpitrain/data", "mpitrain/devices", "mpitrain/strategies"),
    keys=("library",),
    figures=("cases.*.mpitrain_over.*",),
    campaign=('make opponents ARGS="--questions reading -- --record"',),
)


LIBRARIES = OPPONENTS["reading"]
SIZES = (12288, 4096, 64)


def batch_size(sample_bytes):
    return 1024 if sample_bytes < 4096 else 64


def compare(name, sample_bytes, options, scratch):
    """Samples a second of ours and of every way of the library, in every round."""
    num_samples = max(8 * batch_size(sample_bytes), options.megabytes * 2**20 // (sample_bytes + 8))
    arrays = scratch / str(sample_bytes)
    arrays.mkdir()
    np.save(
        arrays / "x.npy", np.random.default_rng(0).integers(0, 256, (num_samples, sample_bytes), np.uint8)
    )
    np.save(arrays / "y.npy", np.arange(num_samples) % 10)
    told = {"arrays": str(arrays), "batch_size": batch_size(sample_bytes)}
    ours = {**told, "folder": str(arrays / "ours"), "how": None}
    readers = {"mpitrain": Beside(Path(__file__).parent / "libraries" / "mpitrain_shards.py", ours, None)}
    for how in LIBRARIES[name].ways:
        own = {**told, "folder": str(arrays / name), "how": how}
        readers[f"{name} {how}"] = start_library("reading", name, own)
        readers[f"{name} {how}"].ask(seed=0, turn_s=options.turn_s)  # what is there is not written twice
    try:
        return in_turns(
            {way: partial(speed, one, options.turn_s) for way, one in readers.items()}, options.rounds
        )
    finally:
        for reader in readers.values():
            reader.close()


def speed(reader, turn_s, number):
    return reader.ask(seed=number + 1, turn_s=turn_s)


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("library", choices=sorted(LIBRARIES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--turn-s", type=float, default=1.0)
    options = parser.parse_args()
    rows, cases = [("samples/s", "mpitrain", options.library, "ours over it", "95 %")], {}
    with tempfile.TemporaryDirectory() as scratch:
        for sample_bytes in SIZES:
            speeds = compare(options.library, sample_bytes, options, Path(scratch))
            middle = {way: statistics.median(found) for way, found in speeds.items()}
            best = max((way for way in middle if way != "mpitrain"), key=middle.__getitem__)
            over = {way: median_ratio(speeds["mpitrain"], speeds[way]) for way in middle if way != "mpitrain"}
            cases[sample_bytes] = {"samples_per_second": middle, "mpitrain_over": over, "best": best}
            ratio, low, high = over[best]
            rows.append((f"{sample_bytes} B", f"{middle['mpitrain']:.0f}", f"{middle[best]:.0f} ({best})",
                         f"{ratio:.2f}", f"{low:.2f} - {high:.2f}"))  # fmt: skip
            print(table(rows), flush=True)
    write_row(
        "reading",
        {"library": options.library, "libraries": installed("reading", options.library), "cases": cases},
    )


if __name__ == "__main__":
    main()
