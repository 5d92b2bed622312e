"""Variable arrays: whatever goes in comes out, in the order that the others have, in bounded memory."""

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import mpitrain as mt
from mpitrain.cli.main import main
from mpitrain.data.format.catalogue import Catalogue
from mpitrain.data.read.batch import num_samples_in
from mpitrain.data.read.chunk_cache import ChunkCache
from mpitrain.data.read.ragged import samples_of
from mpitrain.data.read.reader import ChunkReader
from mpitrain.data.read.shard_files import ShardFiles
from mpitrain.data.sources import open_source
from mpitrain.data.tools.check import check
from mpitrain.errors import DataError
from tests.data.mortal import no_power_cut  # noqa: F401

SHAPES = {"uint8": (), "float32": (3,), "int64": (2, 2)}


def make(lengths: list[int], dtype: str) -> list[np.ndarray]:
    return [np.full((length, *SHAPES[dtype]), i % 251, dtype) for i, length in enumerate(lengths)]


def write(directory: Path, samples: list[np.ndarray], **options: object) -> str:
    with mt.ShardWriter(directory, variable=("x",), **options) as writer:
        for start in range(0, len(samples), 7):
            part = samples[start : start + 7]
            writer.add({"x": part, "y": np.arange(start, start + len(part))})
    return f"{directory}/*.h5"


def unpacked(batch: dict[str, torch.Tensor]) -> dict[int, np.ndarray]:
    assert num_samples_in(batch) == len(batch["y"]) and len(batch["x_offsets"]) == len(batch["y"]) + 1
    assert batch["x_offsets"][0] == 0 and batch["x_offsets"][-1] == len(batch["x"])
    return {int(sample["y"]): sample["x"].numpy() for sample in samples_of(batch)}


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=60),
    st.sampled_from(sorted(SHAPES)),
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(1, 4),
    st.integers(1, 25),
    st.sampled_from([None, "gzip:1"]),
    st.sampled_from([None, 1]),
)
def test_every_sample_comes_back_whole_with_its_own_label(
    tmp_path_factory, lengths, dtype, chunk, shard, window, batch_size, compression, num_slots
):
    """For any lengths, none among them, and a cache with as few as one place."""
    samples = make(lengths, dtype)
    options = {"chunk_samples": chunk, "shard_samples": shard, "compression": compression}
    source = mt.Shards(write(tmp_path_factory.mktemp("ragged"), samples, **options), window)
    catalogue = Catalogue.from_json(source.scan().to_json())
    assert catalogue == source.scan()
    cache = ChunkCache(catalogue, ShardFiles(catalogue), num_slots)
    with ChunkReader(catalogue, 5, cache) as reader:
        found: dict[int, np.ndarray] = {}
        for start in range(0, len(samples), batch_size):
            count = min(batch_size, len(samples) - start)
            if start % 2:
                reader.prefetch(0, start, count)
            found |= unpacked(reader.batch(0, start, count))
        in_order = [unpacked(batch) for batch in reader.sequential(batch_size)]
    assert sorted(found) == list(range(len(samples)))
    assert [number for batch in in_order for number in batch] == list(range(len(samples)))
    for number, x in found.items():
        assert x.dtype == dtype and np.array_equal(x, samples[number])


def test_text_bytes_and_what_info_check_and_loaders_make_of_them(tmp_path, capsys):
    texts = ["ä" * (i % 9) + str(i) for i in range(300)]
    samples = ({"text": text, "raw": text.encode() * 2, "y": i} for i, text in enumerate(texts))
    mt.pack(samples, tmp_path / "a", validate=0, chunk_samples=32, compression="gzip")
    source = mt.Shards(f"{tmp_path}/a/*.h5")
    for batch in DataLoader(source.batches(50), batch_size=None):
        for sample in samples_of(batch):
            assert bytes(sample["text"].numpy()).decode() == texts[int(sample["y"])]
            assert bytes(sample["raw"].numpy()) == texts[int(sample["y"])].encode() * 2
    nested = torch.nested.nested_tensor_from_jagged(batch["text"], batch["text_offsets"])
    assert [bytes(text.numpy()) for text in nested.unbind()] == [
        bytes(s["text"].numpy()) for s in samples_of(batch)
    ]
    assert sorted(int(sample["y"]) for sample in source) == list(range(300))
    assert main(["data", "info", f"{tmp_path}/a/*.h5"]) == 0
    out = capsys.readouterr().out
    assert "array text: uint8[*], 1 bytes an entry, up to" in out and "offsets in text_offsets" in out
    assert check(str(tmp_path / "a")).problems == ()
    packed = open_source(f"{tmp_path}/a/train-00000.h5")  # and packed again from the shards
    mt.pack(packed, tmp_path / "b", validate=0)
    again = [sample for batch in mt.Shards(f"{tmp_path}/b/*.h5").batches(64) for sample in samples_of(batch)]
    assert sorted(bytes(s["text"].numpy()).decode() for s in again) == sorted(texts)


def test_runs_begin_on_chunks_and_memory_is_bounded(tmp_path):
    samples = [np.full(1000 + i % 7, i % 251, np.uint8) for i in range(2000)]
    path = write(tmp_path, samples, chunk_samples=100)
    with h5py.File(tmp_path / "train-00000.h5") as file:
        step = file["x"].chunks[0]
        assert step == 65536 and file["x"].fletcher32 and (file["x_offsets"][::100, 0] % step == 0).all()
        largest = max(file["x_offsets"][i + 99, 1] - file["x_offsets"][i, 0] for i in range(0, 2000, 100))
        assert file["x"].attrs["max_chunk_entries"] == largest and file.attrs["mpitrain_schema"] == 2
    source = mt.Shards(path, window_chunks=2)
    catalogue = source.scan()
    assert catalogue.chunk_bytes == largest + 100 * (16 + 8)
    with source.reader(catalogue, 0) as reader:
        reader.batch(0, 0, 50)
        assert reader.memory_bytes < 7 * catalogue.chunk_bytes + 4 * 100_000 + 100_000


def test_faults_of_variable_arrays_name_file_dataset_and_chunk(tmp_path):
    samples = make([5, 0, 7] * 20, "float32")
    samples[32][0, 1] = np.nan
    pattern = write(tmp_path, samples, chunk_samples=20)
    path = tmp_path / "train-00000.h5"
    assert check(str(tmp_path)).problems == (f"{path}: dataset 'x', chunk 1, sample 32 holds nan",)
    with h5py.File(path) as file:
        offset = file["x"].id.get_chunk_info(2).byte_offset
    whole = path.read_bytes()
    path.write_bytes(whole[: offset + 9] + bytes([whole[offset + 9] ^ 1]) + whole[offset + 10 :])
    assert "dataset 'x', chunk 2 (samples 40 to 59) fails its fletcher32" in check(str(tmp_path)).problems[-1]
    path.write_bytes(whole)
    with h5py.File(path, "r+") as file:
        file["x_offsets"][3] = [9, 1]
    with pytest.raises(
        DataError, match="dataset 'x_offsets', chunk 0 .samples 0 to 19. holds no offsets that rise"
    ):
        source = mt.Shards(pattern)
        source.reader(source.scan(), 0).batch(0, 0, 60)
    with h5py.File(path, "r+") as file:
        del file["x_offsets"]
    with pytest.raises(DataError, match="dataset 'x_offsets' is not the int64"):
        mt.Shards(pattern).scan()


def test_what_is_no_variable_array_is_refused(tmp_path):
    with mt.ShardWriter(tmp_path, variable=("x",)) as writer:
        writer.add({"x": ["a", b"bc"], "y": [0, 1]})
        for batch, message in (
            ({"x": [1, 2], "y": [0, 1]}, "'x' is variable: expected one array per sample"),
            ({"x": [], "y": []}, "array 'x' is empty"),
            (
                {"x": [np.zeros(2), np.zeros(3)], "y": [0, 1]},
                r"array 'x' is float64\[\*\], expected uint8\[\*\]",
            ),
            ({"x": ["a"], "x_offsets": [1]}, "'x_offsets' is what 'x' keeps its offsets in"),
            ({"x": ["a"], "y": [0, 1]}, "x has 1, y has 2"),
        ):
            with pytest.raises(DataError, match=message):
                writer.add(batch)
