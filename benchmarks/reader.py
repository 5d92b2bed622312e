"""How fast are shuffled shards read, and does reading hide behind computing?

    python benchmarks/reader.py [--rounds 5] [--megabytes 256] [--compute-s 20] [--pairs]

One process, no MPI. A file of `--megabytes`, x and an int64 label y, 1 MiB
chunks of whole samples with fletcher32, as `mpitrain data pack` writes them; batches of 64 samples, 1024 of 64 bytes.
By turns:

    raw            h5py, whole chunks one after the other into one reused buffer: the limit, and no shuffle
    shuffled       the same chunks in a shuffled order: the limit of everybody who shuffles. From a disk that is slower,
                   because the system reads ahead of a file that is read from the front to the back
    mpitrain       a shuffled epoch of `Shards.batches`
    loader w       torch's DataLoader over h5py by sample, shuffled, w workers, of the same file
    rows           the same with 2 workers, of a file laid out for it: contiguous rows, no checksums
    WebDataset     2 workers, shuffle buffer of 1000 samples, tar of the same samples; where the package is there

The file is in the page cache. cold: the machine's page cache is dropped before every turn (what is below it, such as
a host's cache, is not). gzip: level 4, values 0 to 15. For DataLoader and WebDataset the clock starts when every
worker has given its first batch.

The second table: a loop that computes 20 ms a batch (matrix products, one thread) and reads shuffled shards, against
the same loop on one batch kept in memory, in turns of 40 steps; the ratio of step times. 1 means that reading hides.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.measurement import BASICS, Command, Measurement
from torch.utils.data import DataLoader, Dataset

import mpitrain as mt

MEASUREMENT = Measurement(
    contestants=("torch's DataLoader over h5py", "WebDataset"),
    bound="whole chunks by raw h5py, in order and shuffled",
    depends=(*BASICS, "mpitrain/data", "mpitrain/devices", "mpitrain/strategies"),
    keys=("pairs=False", "megabytes"),
    figures=("cases.*.mpitrain_over.*",),
    commands=(
        Command("python benchmarks/reader.py", minutes=4, covers={"pairs": False}),
        Command(
            "python benchmarks/reader.py --pairs --rounds 15",
            minutes=5,
            covers={"pairs": True, "megabytes": 256},
        ),
        Command(
            "python benchmarks/reader.py --pairs --rounds 9 --megabytes 1024",
            minutes=10,
            covers={"pairs": True, "megabytes": 1024},
        ),
    ),
)

try:
    import webdataset as wds
except ImportError:
    wds = None

CHUNK_BYTES = 1 << 20
TURN_S = 0.4  # of the contestants that need much longer for the whole file
TURN_STEPS, STEP_S = 40, 0.02
SIDE = 256  # of the matrices of the consumer


@dataclass(frozen=True)
class Case:
    """One column of the table."""

    sample_bytes: int
    cold: bool = False
    gzip: bool = False

    @property
    def batch_size(self):
        return 1024 if self.sample_bytes < 4096 else 64

    @property
    def title(self):
        size = f"{self.sample_bytes} B" if self.sample_bytes < 1024 else f"{self.sample_bytes >> 10} KiB"
        return size + (" cold" if self.cold else " gzip" if self.gzip else "")


CASES = (Case(12288), Case(4096), Case(64), Case(12288, cold=True), Case(12288, gzip=True))


@dataclass
class Files:
    """What one case reads."""

    case: Case
    directory: Path
    num_samples: int

    @property
    def stem(self):
        return f"{self.case.sample_bytes}{'-gzip' * self.case.gzip}"

    def path(self, kind):
        return str(self.directory / f"{self.stem}.{kind}")

    def make(self):
        """Write them, if another case has not."""
        if os.path.exists(self.path("h5")):
            return
        high = 16 if self.case.gzip else 256
        x = np.random.default_rng(0).integers(0, high, (self.num_samples, self.case.sample_bytes), np.uint8)
        y = np.arange(self.num_samples) % 10
        chunk = min(self.num_samples, CHUNK_BYTES // (self.case.sample_bytes + 8))
        how = {"compression": "gzip"} if self.case.gzip else {}
        with h5py.File(self.path("h5"), "w") as file, h5py.File(self.path("rows"), "w") as rows:
            for name, array in {"x": x, "y": y}.items():
                chunks = (chunk, *array.shape[1:])
                file.create_dataset(name, data=array, chunks=chunks, fletcher32=True, **how)
                rows.create_dataset(name, data=array)
        if wds is not None:
            for worker in range(2):
                write_tar(self.path(f"{worker}.tar"), x[worker:16384:2], y[worker::2])
        self.flush()

    def flush(self, drop=False):
        """Have all of it on the disk; `drop`: and not in the page cache."""
        for path in self.directory.glob(f"{self.stem}.*"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            if drop:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def write_tar(path, x, y):
    with wds.TarWriter(path) as tar:
        for number, sample in enumerate(x):
            tar.write({"__key__": f"{number:08d}", "x.bin": sample.tobytes(), "y.cls": int(y[number])})


def read_raw(files, shuffled=False):
    """Samples per second of whole chunks, in turn or in another order every time."""
    began_s = time.perf_counter()
    with h5py.File(files.path("h5"), "r", locking=False, rdcc_nbytes=0) as file:
        datasets = list(file.values())
        chunk = datasets[0].chunks[0]
        buffers = [np.empty(dataset.chunks, dataset.dtype) for dataset in datasets]
        order = list(range(0, files.num_samples, chunk))
        if shuffled:
            random.shuffle(order)
        for first in order:
            count = min(chunk, files.num_samples - first)
            for dataset, buffer in zip(datasets, buffers):
                dataset.read_direct(buffer, np.s_[first : first + count], np.s_[:count])
    return files.num_samples / (time.perf_counter() - began_s)


def read_ours(files):
    """Samples per second of one shuffled epoch, opening the file included."""
    batches = mt.Shards(files.path("h5")).batches(files.case.batch_size)
    began_s = time.perf_counter()
    num_samples = sum(len(batch["y"]) for batch in batches)
    assert num_samples == files.num_samples
    return num_samples / (time.perf_counter() - began_s)


class BySample(Dataset):
    """What the tutorials show."""

    def __init__(self, path, num_samples):
        self.path, self.num_samples, self.file = path, num_samples, None

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        if self.file is None:  # once in every worker
            self.file = h5py.File(self.path, "r")
        return torch.from_numpy(self.file["x"][index]), int(self.file["y"][index])


def read_by_sample(files, num_workers, kind="h5"):
    dataset = BySample(files.path(kind), files.num_samples)
    return draw(
        DataLoader(dataset, files.case.batch_size, shuffle=True, num_workers=num_workers), num_workers
    )


def read_webdataset(files):
    tars = [files.path(f"{worker}.tar") for worker in range(2)]
    samples = wds.WebDataset(tars, shardshuffle=False).repeat().shuffle(1000)
    samples = samples.map(lambda each: (np.frombuffer(each["x.bin"], np.uint8), int(each["y.cls"])))
    return draw(DataLoader(samples.batched(files.case.batch_size), None, num_workers=2), 2)


def draw(loader, num_workers):
    """Samples per second of a loader that has begun."""
    batches = iter(loader)
    for _ in range(max(1, num_workers)):
        next(batches)
    num_samples, began_s = 0, time.perf_counter()
    for _, y in batches:
        num_samples += len(y)
        if time.perf_counter() - began_s > TURN_S:
            break
    return num_samples / (time.perf_counter() - began_s) if num_samples else float("nan")


WAYS = {
    "raw": read_raw,
    "shuffled": lambda files: read_raw(files, shuffled=True),
    "mpitrain": read_ours,
    "loader 0": lambda files: read_by_sample(files, 0),
    "loader 2": lambda files: read_by_sample(files, 2),
    "loader 4": lambda files: read_by_sample(files, 4),
    "rows": lambda files: read_by_sample(files, 2, "rows"),
    "WebDataset": read_webdataset,
}


def compare(case, directory, options):
    """Samples per second of every way in every round."""
    num_samples = options.megabytes * 2**20 // (case.sample_bytes + 8)
    files = Files(case, directory, max(8 * case.batch_size, num_samples))
    files.make()
    ways = {way: read for way, read in WAYS.items() if way != "WebDataset" or wds is not None}
    if options.pairs:
        ways = {way: ways[way] for way in ("raw", "shuffled", "mpitrain")}
    speeds = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, read in ways.items():
            if case.cold:
                files.flush(drop=True)
            speeds[way].append(read(files))
    return files, speeds


class Consumer:
    """Computes for about `STEP_S` a step, longer where the machine is busy."""

    def __init__(self):
        self.matrix = torch.rand(SIDE, SIDE)
        self.num_products = 1
        one_s = min(self._time_one() for _ in range(200))
        self.num_products = max(1, round(STEP_S / one_s))

    def _time_one(self):
        began_s = time.perf_counter()
        self.step({"x": torch.zeros(1)})
        return time.perf_counter() - began_s

    def step(self, batch):
        float(batch["x"][0].sum())  # the batch is there
        for _ in range(self.num_products):
            self.matrix @ self.matrix


def hide(files, options):
    """(step times reading, step times on one batch in memory), in turns."""
    consumer = Consumer()
    batches, epoch = mt.Shards(files.path("h5")).batches(files.case.batch_size), 0
    passing = iter(batches)
    kept = next(passing)
    reading, memory = [], []
    began_s = time.perf_counter()
    while not reading or time.perf_counter() - began_s < options.compute_s:
        for times in (reading, memory):
            turn_s = time.perf_counter()
            for _ in range(options.turn_steps):
                if times is memory:
                    batch = kept
                elif (batch := next(passing, None)) is None:
                    epoch += 1
                    batches.set_epoch(epoch)
                    passing = iter(batches)
                    batch = next(passing)
                consumer.step(batch)
            times.append((time.perf_counter() - turn_s) / options.turn_steps)
    return reading, memory


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--compute-s", type=float, default=20)
    parser.add_argument("--turn-steps", type=int, default=TURN_STEPS)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many columns")
    parser.add_argument("--pairs", action="store_true", help="raw, shuffled and mpitrain alone, by turns")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", "This DataLoader will create"
    )  # more workers than cores: that is asked for
    if wds is None:
        print("no WebDataset here (pip install webdataset): left out")
    with tempfile.TemporaryDirectory(dir=os.environ.get("MPITRAIN_BENCHMARK_DIR")) as directory:
        found = {case: compare(case, Path(directory), options) for case in CASES[: options.cases]}
        cases = show_speeds(found)
        computing = CASES[: 0 if options.pairs else 2]
        hidden = show_hiding([files for case, (files, _) in found.items() if case in computing], options)
    row = {
        "pairs": options.pairs,
        "rounds": options.rounds,
        "megabytes": options.megabytes,
        "h5py": h5py.__version__,
    }
    row |= {"webdataset": getattr(wds, "__version__", None), "cases": cases, "computing_20_ms": hidden}
    write_row("reader", row)


def show_speeds(found):
    """Print the first table; returns what the row says of it."""
    ways = list(next(iter(found.values()))[1])
    others = [way for way in ways if way != "mpitrain"]
    speed_rows, ratio_rows, cases = (
        [("samples/s", *ways)],
        [("mpitrain over", "raw", "95 %", *others[1:])],
        {},
    )
    for case, (_, speeds) in found.items():
        middle = {way: statistics.median(speeds[way]) for way in ways}
        over = {other: median_ratio(speeds["mpitrain"], speeds[other]) for other in others}
        speed_rows.append((case.title, *(f"{middle[way]:.0f}" for way in ways)))
        ratio, low, high = over["raw"]
        medians = (f"{over[other][0]:.1f}" for other in others[1:])
        ratio_rows.append((case.title, f"{ratio:.2f}", f"{low:.2f}-{high:.2f}", *medians))
        cases[case.title] = {"sample_bytes": case.sample_bytes, "batch_size": case.batch_size}
        cases[case.title] |= {"samples_per_second": middle, "mpitrain_over": over}
    print(f"{machine()['cpu']}, {machine()['num_cores']} cores, h5py {h5py.__version__}")
    print(table(speed_rows))
    print(table(ratio_rows), flush=True)
    return cases


def show_hiding(all_files, options):
    """Run and print the second table; returns what the row says of it."""
    rows, hidden = [("20 ms a batch", "in memory", "reading", "ratio", "95 %", "turns")], {}
    for files in all_files:
        reading, memory = hide(files, options)
        ratio, low, high = median_ratio(reading, memory)
        middle = [1e3 * statistics.median(times) for times in (memory, reading)]
        hidden[files.case.title] = {
            "ratio": [ratio, low, high],
            "memory_ms": middle[0],
            "reading_ms": middle[1],
        }
        told = [f"{ms:.2f} ms" for ms in middle]
        rows.append((files.case.title, *told, f"{ratio:.3f}", f"{low:.3f} - {high:.3f}", str(len(reading))))
    print(table(rows), flush=True)
    return hidden


if __name__ == "__main__":
    main()
