"""Chunks of gzip that are inflated here: as HDF5 decodes them, or left to it."""

import zlib

import h5py
import numpy as np
import pytest

from mpitrain.data import Shards
from mpitrain.data.format.chunk_lengths import ChunkLengths
from mpitrain.data.read.gzip_chunks import GzipChunks
from mpitrain.errors import DataError

ROWS = 8
CHUNK = bytes(range(ROWS)) * 4  # of (ROWS, 4) bytes
STREAM = zlib.compress(CHUNK)


def values(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 99, shape).astype(kind)


def datasets_read_by_hdf5(monkeypatch, path) -> set[str]:
    """Which datasets of a shard go by the check, and so by HDF5, when all of it is read as an epoch."""
    seen = set()
    check = ChunkLengths.check
    monkeypatch.setattr(
        ChunkLengths, "check", lambda self, *run: seen.add(h5py.h5i.get_name(self._id)) or check(self, *run)
    )
    source = Shards(str(path))
    with source.reader(source.scan(), 0) as reader, h5py.File(path) as file:
        for batch in reader.sequential(5):
            at = int(batch["at"][0])
            for name, tensor in batch.items():
                assert np.array_equal(tensor.numpy(), file[name][at : at + len(tensor)]), name
    return {name.decode().lstrip("/") for name in seen}


def test_whole_rows_of_gzip_are_inflated_once_and_are_what_hdf5_reads(tmp_path, monkeypatch):
    gzip, num_samples = {"compression": "gzip"}, 3 * ROWS + 3
    plain = {
        **{kind: values(kind, (num_samples, 3)) for kind in ("u1", "i2", "f2", "f4", "f8", "c16", "?")},
        "at": np.arange(num_samples),
    }
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, array in plain.items():
            for shuffle in (False, True):
                for fletcher32 in (False, True):
                    how = {"shuffle": shuffle, "fletcher32": fletcher32, "chunks": (ROWS, *array.shape[1:])}
                    title = f"{name} {shuffle} {fletcher32}" if shuffle or fletcher32 else name
                    file.create_dataset(title, data=array, **how, **gzip)
        file.create_dataset("tiles", data=plain["f4"], chunks=(ROWS, 2), **gzip)
        file.create_dataset("swapped", data=plain["f4"].astype(">f4"), chunks=(ROWS, 3), **gzip)
        file.create_dataset("lzf", data=plain["f4"], chunks=(ROWS, 3), compression="lzf")
        file.create_dataset("not written", (num_samples, 3), "f4", chunks=(ROWS, 3), fillvalue=7, **gzip)
    others = {"tiles", "swapped", "lzf", "not written"}
    assert datasets_read_by_hdf5(monkeypatch, tmp_path / "a.h5") == others


@pytest.mark.parametrize(
    "data, mask, problem",
    [
        (STREAM, 0, ""),
        (STREAM + b"behind it", 0, ""),
        (STREAM.ljust(len(CHUNK)), 1, ""),  # as it is, by its mask
        (STREAM[:-1], 0, "cannot be read|checksum"),
        (STREAM[:-6], 0, "cannot be read|checksum|decodes to"),
        (STREAM[:-1] + bytes([STREAM[-1] ^ 1]), 0, "cannot be read|checksum"),
        (CHUNK, 0, "cannot be read|checksum"),
        (STREAM[:1], 0, "cannot be read|checksum|decodes to"),
        (zlib.compress(CHUNK[:-1]), 0, "decodes to 31 bytes, expected 32"),
        (zlib.compress(CHUNK + b"\0"), 0, "decodes to more bytes, expected 32"),
        (zlib.compress(CHUNK + bytes(1 << 26)), 0, "decodes to more bytes, expected 32"),
        (CHUNK[:-1], 1, "decodes to 31 bytes, expected 32"),
    ],
)
@pytest.mark.parametrize("has_sums", [False, True])
def test_what_is_no_whole_stream_is_told_and_nothing_is_written_behind_its_place(
    tmp_path, data, mask, problem, has_sums
):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset(
            "x", (ROWS, 4), "u1", chunks=(ROWS, 4), compression="gzip", fletcher32=has_sums
        ).id.write_direct_chunk((0, 0), data + has_sums * sum_of(tmp_path, data), mask)
    into = np.full((2 * ROWS, 4), 77, np.uint8)
    with h5py.File(tmp_path / "a.h5") as file:
        is_read = GzipChunks(file["x"]).read(0, into[:ROWS])
    assert is_read == (not problem and not mask) and (into[ROWS:] == 77).all()
    source = Shards(str(tmp_path / "a.h5"))
    with source.reader(source.scan(), 0) as reader:
        if not problem:
            (batch,) = reader.sequential(ROWS)
            assert batch["x"].numpy().tobytes() == (data if mask else CHUNK)
            return
        with pytest.raises(DataError, match=problem):
            next(reader.sequential(ROWS))


def sum_of(tmp_path, data: bytes) -> bytes:
    """The checksum that HDF5 itself puts behind these bytes."""
    with h5py.File(tmp_path / "sum.h5", "w") as file:
        dataset = file.create_dataset(
            "x", data=np.frombuffer(data, np.uint8), chunks=(len(data),), fletcher32=True
        )
        return dataset.id.read_direct_chunk((0,))[1][-4:]


@pytest.mark.parametrize("at", [0, len(STREAM) - 1, len(STREAM), len(STREAM) + 3])
def test_a_flipped_bit_of_a_chunk_or_its_sum_is_told(tmp_path, at):
    stored = bytearray(STREAM + sum_of(tmp_path, STREAM))
    stored[at] ^= 4
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset(
            "x", (ROWS, 4), "u1", chunks=(ROWS, 4), compression="gzip", fletcher32=True
        ).id.write_direct_chunk((0, 0), bytes(stored))
    source = Shards(str(tmp_path / "a.h5"))
    with source.reader(source.scan(), 0) as reader, pytest.raises(DataError, match="fletcher32 checksum"):
        next(reader.sequential(ROWS))
