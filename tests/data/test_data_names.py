"""What people call their files, folders, columns and layers: a name is a name before it is a pattern."""

import os

import h5py
import numpy as np
import pytest
from torch import nn

from mpitrain.data import Shards
from mpitrain.data.sources import open_source
from mpitrain.data.sources.base import Selection
from mpitrain.data.tools.check import check
from mpitrain.data.tools.info import info
from mpitrain.data.write.pack import pack
from mpitrain.errors import DataError, UsageError
from mpitrain.model.building.activation_checkpointing import checkpoint_activations
from mpitrain.model.building.layer_cuts import slices
from mpitrain.system.files.outside import at_home, expanded, find_files
from mpitrain.training.trained.predict import _source

# A folder, and a neighbour that its name matches as a pattern.
NEIGHBOURS = [
    ("run[1]", "run1"),
    ("v?", "v2"),
    ("lr=*", "lr=0.5"),
    ("[!a]", "b"),
    ("a[", "a"),
    ("**", "deep"),
]
PLAIN = ["a b", "größe", "x{1,2}", "$HOME", "~me", "-dash", "%d", "{0}", "a,b", "line\nbreak", "[[]x]"]


def shard(path, value, rows=3):
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["x"] = np.full((rows, 2), value, "f4")


def values(pattern):
    return sorted({float(batch["x"].max()) for batch in Shards(str(pattern)).batches(4)})


@pytest.mark.parametrize(("mine", "other"), NEIGHBOURS)
def test_a_folder_that_looks_like_a_pattern_is_read_and_not_its_neighbour(tmp_path, mine, other):
    shard(tmp_path / mine / "train-0.h5", 1)
    shard(tmp_path / other / "train-0.h5", 99)
    for pattern in (tmp_path / mine / "train-0.h5", tmp_path / mine / "train-*.h5"):
        assert values(pattern) == [1.0]
        assert check(str(pattern)).num_samples == 3
        assert any(line.startswith("total: 3 samples") for line in info(str(pattern)))
        assert open_source(str(pattern)).num_samples == 3
    assert any(line.startswith("total: 3 samples") for line in info(str(tmp_path / mine)))
    assert [file.path for file in _source(tmp_path / mine).scan().files] == [
        str(tmp_path / mine / "train-0.h5")
    ]


@pytest.mark.parametrize("name", [*PLAIN, *(mine for mine, _ in NEIGHBOURS)])
def test_a_relative_path_with_signs_in_it_is_that_path(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    shard(tmp_path / name / name / "train-0.h5", 1)
    assert values(os.path.join(name, name, "train-*.h5")) == [1.0]
    assert values(os.path.join("*", name, "train-0.h5")) == [1.0]
    assert open_source(os.path.join(name, name, "train-0.h5")).num_samples == 3


def test_the_name_of_a_file_is_a_name_and_without_one_it_is_a_pattern(tmp_path):
    shard(tmp_path / "train-[0].h5", 1)
    shard(tmp_path / "train-0.h5", 99)
    assert values(tmp_path / "train-[0].h5") == [1.0]
    (tmp_path / "train-[0].h5").unlink()
    assert values(tmp_path / "train-[0].h5") == [99.0]
    assert find_files(str(tmp_path / "train-[0-9].h5")).root == str(tmp_path)
    assert find_files(str(tmp_path / "train-0.h5")).root is None


def test_a_link_out_of_a_folder_that_looks_like_a_pattern_is_still_seen(tmp_path):
    shard(tmp_path / "elsewhere" / "train-0.h5", 1)
    (tmp_path / "run[1]").mkdir()
    (tmp_path / "run[1]" / "train-0.h5").symlink_to(tmp_path / "elsewhere" / "train-0.h5")
    with pytest.raises(DataError, match=r"lies outside of .*run\[1\]"):
        Shards(str(tmp_path / "run[1]" / "train-*.h5")).scan()
    assert values(tmp_path / "run[1]" / "train-0.h5") == [1.0]  # named itself


def test_a_pack_in_a_folder_that_looks_like_a_pattern_misses_its_shards(tmp_path):
    folder = tmp_path / "v[1]"
    pack({"x": np.zeros((6, 2), "f4")}, folder, validate=0, shard_samples=2)
    assert Shards(str(folder / "train-*.h5")).scan().num_samples == 6
    (folder / "train-00001.h5").unlink()
    with pytest.raises(DataError, match="train-00001.h5: shard is missing"):
        Shards(str(folder / "train-*.h5")).scan()


def test_home_and_variables_give_way_to_what_is_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/somewhere")
    with pytest.raises(UsageError, match="no user 'me_too'"):
        at_home("~me_too/x")
    (tmp_path / "~me_too").mkdir()
    (tmp_path / "$HOME").mkdir()
    assert str(at_home("~me_too/x")) == "~me_too/x"
    assert str(expanded("$HOME")) == "$HOME" and str(expanded("$HOME/x")) == "/somewhere/x"
    assert str(at_home("~/x")) == "/somewhere/x"


def test_columns_with_signs_in_their_names(tmp_path):
    columns = {
        name: np.arange(2.0) + number for number, name in enumerate(["a", "b", "a+b", "T, max", "u=v"])
    }
    made = Selection("s=a+b,t=T, max,u=u=v+a,both=T, max+a+b").of(columns)
    assert made["s"].tolist() == [2, 3] and made["t"].tolist() == [3, 4]
    assert made["u"].tolist() == [[4, 0], [5, 1]] and made["both"].tolist() == [[3, 2], [4, 3]]
    assert Selection("s=a+b").of({"a": np.zeros(2), "b": np.ones(2)})["s"].tolist() == [[0, 1], [0, 1]]
    with pytest.raises(UsageError, match="expected NAME=COLUMN"):
        Selection("t=T, (max").of({"a": np.zeros(2)})


def test_layers_whose_names_look_like_patterns():
    model = nn.ModuleDict({"up[1]": nn.Linear(4, 4), "up1": nn.Linear(4, 4)})
    assert slices(model, {"up[1]": "column"}, 2) == {"up[1]": "column"}
    assert slices(nn.ModuleDict({"up1": nn.Linear(4, 4)}), {"up[1]": "column"}, 2) == {"up1": "column"}
    checkpoint_activations(model, ["up[1]"])
    assert type(model["up1"]) is nn.Linear and type(model["up[1]"]) is not nn.Linear
