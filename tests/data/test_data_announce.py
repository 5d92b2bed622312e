"""What is read next is announced to the system: the right parts of the file, before they are read, and only advice."""

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain.data import Shards
from mpitrain.data.read import announce
from mpitrain.data.read.chunk_cache import ChunkCache
from mpitrain.data.read.reader import ChunkReader
from mpitrain.data.read.shard_files import ShardFiles
from mpitrain.data.write.shard_file import write_shard


class Recorded(ShardFiles):
    """Notes what it is asked for, in turn; `fails`: it takes no announcement."""

    def __init__(self, catalogue, fails=False):
        super().__init__(catalogue)
        self.fails, self.asked = fails, []

    def announce(self, chunks):
        self.asked += [("announced", chunk) for chunk in chunks]
        if self.fails:
            raise OSError("no advice is taken here")
        super().announce(chunks)

    def read(self, chunk, into):
        self.asked.append(("read", chunk))
        super().read(chunk, into)


def pack(directory: Path, num_samples: int = 96, chunk: int = 8) -> Shards:
    arrays = {"x": np.arange(num_samples * 3, dtype=np.float32).reshape(-1, 3), "y": np.arange(num_samples)}
    write_shard(directory / "s.h5", arrays, np.arange(num_samples), chunk)
    return Shards(str(directory / "s.h5"), window_chunks=2)


def epoch(source: Shards, store: Recorded) -> list[int]:
    catalogue = source.scan()
    with ChunkReader(catalogue, 0, ChunkCache(catalogue, store)) as reader:
        runs = [(start, 4) for start in range(0, catalogue.num_samples, 4)]
        return [int(y) for batch in reader.batches(0, runs) for y in batch["y"]]


def test_chunks_are_announced_once_and_before_they_are_read(tmp_path):
    source = pack(tmp_path)
    store = Recorded(source.scan())
    epoch(source, store)
    announced = [chunk for what, chunk in store.asked if what == "announced"]
    assert sorted(announced) == list(range(12))
    for chunk in range(12):
        assert store.asked.index(("announced", chunk)) < store.asked.index(("read", chunk))
    # a window ahead: what comes after the next window is under way before that is read
    order = ChunkReader(source.scan(), 0, ChunkCache(source.scan(), ShardFiles(source.scan()))).order.epoch(0)
    first, third = int(order.chunks_of(1)[-1]), int(order.chunks_of(2)[0])
    assert store.asked.index(("announced", third)) < store.asked.index(("read", first))


def test_samples_are_the_same_where_no_advice_is_taken(tmp_path):
    source = pack(tmp_path)
    assert epoch(source, Recorded(source.scan())) == epoch(source, Recorded(source.scan(), fails=True))


@pytest.mark.parametrize("layout", [{}, {"chunks": (4, 3)}, {"chunks": (4, 2), "compression": "gzip"}])
def test_places_hold_what_the_file_has_of_these_rows(tmp_path, layout):
    values = np.arange(90, dtype=np.int32).reshape(30, 3)
    with h5py.File(tmp_path / "one.h5", "w") as file:
        file.create_dataset("x", data=values, **layout)
    with h5py.File(tmp_path / "one.h5") as file:
        dataset = file["x"].id
        parts = announce.Places(dataset).of(8, 8)
        stored = b"".join(os.pread(file.id.get_vfd_handle(), size, at) for at, size in parts)
        if not layout:
            assert stored == values[8:16].tobytes()
        else:
            corners = [(row, column) for row in (8, 12) for column in range(0, 3, layout["chunks"][1])]
            chunks = [dataset.read_direct_chunk(corner)[1] for corner in corners]
            assert sorted(stored.hex()) == sorted(b"".join(chunks).hex())
            assert len(parts) == len(chunks)


def test_places_of_rows_that_no_chunk_holds_are_none(tmp_path):
    with h5py.File(tmp_path / "none.h5", "w") as file:
        file.create_dataset("x", (30, 3), "i4", chunks=(4, 3))
    with h5py.File(tmp_path / "none.h5") as file:
        assert announce.Places(file["x"].id).of(8, 8) == []


def test_the_system_is_asked_for_all_parts_in_the_order_of_the_file(tmp_path, monkeypatch):
    """What lies close together in one go; in pieces that it does not cut off."""
    path, asked = tmp_path / "cold", []
    path.write_bytes(b"x")
    monkeypatch.setattr(announce, "_is_here", lambda descriptor, part: False)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, size, how: asked.append((at, at + size, how)))
    far = 3 * announce.PIECE_BYTES
    with path.open("rb") as file:
        announcer = announce.Announcer()
        announcer.announce(file.fileno(), [(far + 500, 100), (far, 400), (0, announce.PIECE_BYTES + 7)])
        announcer.close()
    ranges = [(0, announce.PIECE_BYTES), (announce.PIECE_BYTES, announce.PIECE_BYTES + 7), (far, far + 600)]
    assert asked == [(begin, end, os.POSIX_FADV_WILLNEED) for begin, end in ranges]


def test_nothing_is_begun_for_what_is_in_memory(tmp_path):
    path = tmp_path / "warm"
    path.write_bytes(b"x" * 4096)
    with path.open("rb") as file:
        file.read()
        announcer = announce.Announcer()
        announcer.announce(file.fileno(), [(0, 4096)])
        assert announcer._thread is None
