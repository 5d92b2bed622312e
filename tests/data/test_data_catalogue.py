"""The catalogue: it travels to the other ranks as text and identifies the data wherever it lies."""

import json
from pathlib import Path

import numpy as np

from mpitrain.data import Catalogue, Shards
from mpitrain.data.write.shard_file import write_shard


def pack_plain(directory: Path, counts: list[int], chunk: int) -> None:
    y = np.arange(sum(counts))
    for number, end in enumerate(np.cumsum(counts).tolist()):
        write_shard(directory / f"s-{number}.h5", {"y": y}, y[end - counts[number] : end], chunk)


def test_catalogue_travels_as_text(tmp_path):
    pack_plain(tmp_path, [10, 3], 4)
    catalogue = Shards(f"{tmp_path}/*.h5").scan()
    text = catalogue.to_json()
    assert "\n" not in text and json.loads(text)
    assert Catalogue.from_json(text) == catalogue
    assert Catalogue.from_json(text).digest() == catalogue.digest()
    assert catalogue.num_samples == 13
    assert [file.num_chunks for file in catalogue.files] == [3, 1]


def test_digest_changes_with_what_fixes_the_order_and_not_with_the_directory(tmp_path):
    for name, chunk in (("one", 4), ("two", 4), ("three", 5)):
        (tmp_path / name).mkdir()
        pack_plain(tmp_path / name, [10, 3], chunk)
    one, two, three = (Shards(f"{tmp_path}/{name}/*.h5").scan().digest() for name in ("one", "two", "three"))
    assert one == two
    assert len({one, three, Shards(f"{tmp_path}/one/*.h5", window_chunks=9).scan().digest()}) == 3


def test_readers_agree_between_ranks_that_received_the_catalogue(tmp_path, monkeypatch):
    """A scan makes a relative pattern absolute: a rank in another directory reads the same files."""
    (tmp_path / "data").mkdir()
    pack_plain(tmp_path / "data", [9], 4)
    monkeypatch.chdir(tmp_path)
    source = Shards("data/*.h5")
    text = source.scan().to_json()
    monkeypatch.chdir("/")
    with source.reader(Catalogue.from_json(text), 0) as reader:
        assert sorted(reader.batch(0, 0, 9)["y"].tolist()) == list(range(9))
