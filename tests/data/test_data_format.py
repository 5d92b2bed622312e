"""FORMAT.md holds: whoever follows the page with h5py, json and hashlib alone gets every sample."""

import contextlib
import hashlib
import io
import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest

import mpitrain.data
from mpitrain.data.format.catalogue import ITEM_BYTES
from mpitrain.data.format.manifest import Manifest
from mpitrain.data.write.pack import pack
from tests.data.mortal import no_power_cut  # noqa: F401

PAGE = Path(mpitrain.data.__file__).with_name("FORMAT.md").read_text()
TEXTS = ["", *("ä" * (i % 40) + str(i) for i in range(1, 500))]


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("format") / "data" / "mine"
    samples = [{"y": i, "x": np.full((2, 3), i, np.float32), "text": text} for i, text in enumerate(TEXTS)]
    pack(samples, directory, validate=0.2, shard_samples=150, chunk_samples=40, compression="gzip")
    return directory


def test_the_index_is_what_the_page_says(packed):
    index = json.loads((packed / "mpitrain-pack.json").read_text())
    table = PAGE.partition("## The index")[2].partition("## What never")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == set(index) == set(vars(Manifest({}, {})))
    assert index["complete"] and index["schema"] == 2
    assert sorted(path.name for path in packed.iterdir()) == sorted(["mpitrain-pack.json", *index["files"]])
    for name, total in index["sha256"].items():
        assert hashlib.sha256((packed / name).read_bytes()).hexdigest() == total
    assert index["arrays"]["x"] == {"shape": [2, 3], "dtype": "float32", "variable": False}
    assert index["arrays"]["text"] == {"shape": [], "dtype": "uint8", "variable": True}


def test_every_sample_is_found_by_the_page_alone(packed):
    index = json.loads((packed / "mpitrain-pack.json").read_text())
    found = []
    for name, num_samples in index["files"].items():
        with h5py.File(packed / name) as shard:
            chunk, step = shard.attrs["chunk_samples"], shard["text"].chunks[0]
            assert (
                set(shard.attrs) == {"mpitrain_schema", "chunk_samples"}
                and shard.attrs["mpitrain_schema"] == 2
            )
            assert set(shard) == {"x", "y", "text", "text_offsets"}
            spans, longest = shard["text_offsets"][()], 0
            for dataset in shard.values():
                assert dataset.fletcher32 and dataset.compression == "gzip"
            assert shard["x"].chunks == (chunk, 2, 3) and len(shard["x"]) == len(spans) == num_samples
            for first in range(0, num_samples, chunk):
                run = spans[first : first + chunk]
                assert run[0, 0] % step == 0 and (run[1:, 0] == run[:-1, 1]).all()
                longest = max(longest, run[-1, 1] - run[0, 0])
            assert shard["text"].attrs["max_chunk_entries"] == longest
            for i, (begin, end) in enumerate(spans):
                assert (shard["x"][i] == shard["y"][i]).all()
                found.append((int(shard["y"][i]), bytes(shard["text"][begin:end]).decode()))
    assert sorted(found) == list(enumerate(TEXTS))


def test_the_example_of_the_page_runs(packed, monkeypatch):
    monkeypatch.chdir(packed.parents[1])
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)
    with h5py.File(packed / "train-00000.h5") as shard:
        assert names["text"] == TEXTS[shard["y"][3]] and len(names["y"]) == 40


def test_the_page_names_every_dtype_and_the_packages_files_include_it():
    families = {name.rstrip("0123456789") for name in ITEM_BYTES} - {"bfloat"}  # torch's own, never in a file
    line = next(line for line in PAGE.splitlines() if line.startswith("- Values:"))
    assert all(family.removeprefix("u") in line for family in families)
    assert "mpitrain.data = FORMAT.md" in (Path(mpitrain.data.__file__).parents[2] / "setup.cfg").read_text()
