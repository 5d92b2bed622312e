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
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.beside import Beside
from measuring.common import make_parser, median_ratio, table, write_row
from measuring.measurement import BASICS, ROOT, Measurement

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
)


class Library(NamedTuple):
    """A program below `libraries/`, and what `how` it is told by turns."""

    program: str
    ways: tuple


LIBRARIES = {
    "webdataset": Library("webdataset_tars", (0, 2)),
    "lance": Library("lance_rows", (1, 16, "ranges")),
    "streaming": Library("streaming_shards", (0, 2)),
    "zarr": Library("zarr_chunks", (1, 4)),
    "h5py": Library("h5py_chunks", (1, 4)),
    "torch": Library("torch_loader", (0, 2)),
}
SIZES = (12288, 4096, 64)
ENVIRONMENTS = ROOT / "build" / "opponents"


def batch_size(sample_bytes):
    return 1024 if sample_bytes < 4096 else 64


def compare(name, sample_bytes, options, scratch):
    """Samples a second of ours and of every way of the library, in every round."""
    library, folder = LIBRARIES[name], ENVIRONMENTS / name
    num_samples = max(8 * batch_size(sample_bytes), options.megabytes * 2**20 // (sample_bytes + 8))
    arrays = scratch / str(sample_bytes)
    arrays.mkdir()
    np.save(
        arrays / "x.npy", np.random.default_rng(0).integers(0, 256, (num_samples, sample_bytes), np.uint8)
    )
    np.save(arrays / "y.npy", np.arange(num_samples) % 10)
    told = {"arrays": str(arrays), "batch_size": batch_size(sample_bytes)}
    programs = Path(__file__).parent / "libraries"
    ours = {**told, "folder": str(arrays / "ours"), "how": None}
    readers = {"mpitrain": Beside(programs / "mpitrain_shards.py", ours, None)}
    for how in library.ways:
        own = {**told, "folder": str(arrays / name), "how": how}
        readers[f"{name} {how}"] = Beside(
            programs / f"{library.program}.py", own, folder if folder.exists() else None
        )
        readers[f"{name} {how}"].ask(seed=0, turn_s=options.turn_s)  # what is there is not written twice
    speeds = {way: [] for way in readers}
    try:
        for number in range(-1, options.rounds):
            for way in [*readers][:: -1 if number % 2 else 1]:
                speed = readers[way].ask(seed=number + 2, turn_s=options.turn_s)
                if number >= 0:
                    speeds[way].append(speed)
    finally:
        for reader in readers.values():
            reader.close()
    return speeds


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
        "reading", {"library": options.library, "libraries": installed(options.library), "cases": cases}
    )


def installed(name):
    """The versions in the library's environment, or of what our own has of it."""
    folder = ENVIRONMENTS / name
    found = sorted(path.name.removesuffix(".dist-info") for path in folder.glob("*.dist-info"))
    if found:
        return found
    from importlib.metadata import version

    return [f"{one}-{version(one)}" for one in ("h5py", "torch")]


if __name__ == "__main__":
    main()
