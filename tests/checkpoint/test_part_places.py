"""Parts lie in folders of at most 256 of a kind; those of older checkpoints are read where they lie."""

import os
import sys

import pytest
import torch

from mpitrain.checkpoint import newest, read_part, write_part
from mpitrain.checkpoint.parts import corrupt_part, damage, folder_of, listed, survey
from mpitrain.checkpoint.pruning import Pruner
from mpitrain.errors import CheckpointError
from mpitrain.system.files.part_places import PARTS_PER_FOLDER, is_there, place_of
from mpitrain.system.files.run_directory import Identity, progress, why_no_room

NAMES = ("shard-0", "shard-256", "worker-0", "worker-255", "worker-256", "worker-300", "worker-512")
OURS = Identity("run", "attempt")
OPENED = []  # files below its first entry, as long as there is one


def note_open(event, arguments):
    if event != "open" or not OPENED:
        return
    path = str(arguments[0])
    if path.startswith(OPENED[0]) and path.endswith((".json", ".safetensors")):
        OPENED.append(path)


sys.addaudithook(note_open)


def write(run_dir, name, checkpoint_at=8, identity=OURS, value=0.0, size=100):
    folder = folder_of(run_dir, checkpoint_at)
    write_part(folder, name, {"x": torch.full((size,), value)}, identity, NAMES if name == "shard-0" else ())
    return folder


def write_all(run_dir, checkpoint_at=8):
    for number, name in enumerate(NAMES):
        folder = write(run_dir, name, checkpoint_at, value=float(number))
    return folder


def flatten(folder):
    """As checkpoints were written before."""
    for path in sorted(folder.glob("*/*")):
        path.rename(folder / path.name)
    for path in folder.glob("*/"):
        path.rmdir()


def test_every_part_lies_where_its_number_says_and_is_read_there(tmp_path):
    folder = write_all(tmp_path)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.json")}
    assert found == {
        "shard-0.json", "shard-256-511/shard-256.json", "worker-0.json", "worker-255.json",
        "worker-256-511/worker-256.json", "worker-256-511/worker-300.json", "worker-512-767/worker-512.json",
    }  # fmt: skip
    assert newest(tmp_path).parts == NAMES and progress(tmp_path).samples == 8
    for number, name in enumerate(NAMES):
        assert is_there(folder, name) and bool((read_part(folder, name, OURS)["x"] == number).all())


def test_ten_thousand_parts_lie_in_folders_of_256(tmp_path):
    places = [place_of(tmp_path, f"own-{number}") for number in range(10_240)]
    assert max(places.count(place) for place in set(places)) == PARTS_PER_FOLDER
    assert len(set(places)) == 40


def test_a_checkpoint_that_lies_in_one_folder_is_read_there(tmp_path):
    folder = write_all(tmp_path)
    flatten(folder)
    assert newest(tmp_path).parts == NAMES
    assert bool((read_part(folder, "worker-300", OURS)["x"] == NAMES.index("worker-300")).all())
    assert all(is_there(folder, name) for name in NAMES)


def test_what_is_written_anew_counts_and_not_what_was_left_in_the_folder_above(tmp_path):
    """A start that goes on from before writes this checkpoint again."""
    folder = write_all(tmp_path)
    flatten(folder)
    later = Identity("run", "later")
    for name in NAMES:
        write(tmp_path, name, identity=later, value=9.0)
    assert newest(tmp_path).identity.attempt == "later"
    assert bool((read_part(folder, "worker-300", later)["x"] == 9.0).all())


@pytest.mark.parametrize("name", ["worker-255", "worker-300"])
def test_a_part_that_is_missing_or_damaged_is_missed_wherever_it_lies(tmp_path, name):
    folder = write_all(tmp_path)
    corrupt_part(folder, name)
    (told,) = damage(survey(folder), NAMES)
    assert name in told
    with pytest.raises(CheckpointError, match=f"{place_of(folder, name) / name}.* is damaged"):
        read_part(folder, name, OURS)
    (place_of(folder, name) / f"{name}.json").unlink()
    assert not is_there(folder, name)
    assert newest(tmp_path) is None


def test_old_ones_go_with_their_folders_and_room_is_asked_for_all_of_it(tmp_path, monkeypatch):
    for checkpoint_at in (8, 16, 24):
        folder = write_all(tmp_path, checkpoint_at)
    write(tmp_path, "worker-300", 24, size=100_000)  # much more than the entries of folders
    Pruner(tmp_path).prune(1, 24, OURS, NAMES)
    assert [path.name for path in sorted(folder.parent.iterdir())] == [folder.name]
    files = [path for path in folder.rglob("*") if path.is_file()]
    asked = []
    monkeypatch.setattr(os, "posix_fallocate", lambda handle, start, size: asked.append(size))
    assert why_no_room(tmp_path) == ""
    assert asked[0] >= 2**20 + sum(path.stat().st_size for path in files)


def test_pruning_opens_no_part(tmp_path):
    """The names of the parts say what is complete, of as many ranks as there are."""
    pruner, left = Pruner(tmp_path), []
    for checkpoint_at in (8, 16, 24, 32):
        if checkpoint_at < 32:
            write_all(tmp_path, checkpoint_at)
        else:
            write(tmp_path, "shard-0", 32)  # the others are still writing
        OPENED[:] = [str(tmp_path)]
        pruner.prune(2, checkpoint_at, OURS, NAMES)
        assert [str(tmp_path)] == OPENED
        left.append([int(folder.name) for folder in listed(tmp_path)])
    OPENED.clear()
    assert left == [[8], [16, 8], [24, 16], [32, 24, 16]]


def test_what_another_start_has_left_in_the_same_folder_makes_no_checkpoint_complete(tmp_path):
    """All names are there, and some of them are of a start that died: the one before must stay."""
    dead = Identity("run", "dead")
    for name in NAMES[1:]:
        write(tmp_path, name, 16, dead)
    pruner = Pruner(tmp_path)
    write_all(tmp_path, 8)
    pruner.prune(1, 8, OURS, NAMES)
    write(tmp_path, "shard-0", 16)
    pruner.prune(1, 16, OURS, NAMES)
    assert [int(folder.name) for folder in listed(tmp_path)] == [16, 8]
    write_all(tmp_path, 16)
    pruner.prune(1, 16, OURS, NAMES)
    assert [int(folder.name) for folder in listed(tmp_path)] == [16]


def test_a_part_is_brought_to_disk_by_three_fsyncs(tmp_path, monkeypatch):
    """Of its two files, and once of their folder; whoever makes a folder has that of its parent besides."""
    calls, fsync, replace = [], os.fsync, os.replace

    def spy(descriptor):
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    folder = write_all(tmp_path)
    monkeypatch.setattr(os, "fsync", spy)
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(b.name), replace(a, b)))
    write(tmp_path, "worker-1")
    assert calls == [
        ".worker-1.safetensors.tmp", ".worker-1.json.tmp", "worker-1.safetensors", "worker-1.json", folder.name,
    ]  # fmt: skip


def test_a_power_cut_that_keeps_only_the_name_of_the_json_leaves_no_part(tmp_path):
    folder = write_all(tmp_path)
    (folder / "worker-0.safetensors").unlink()
    assert newest_or_reason(tmp_path).endswith("worker-0.safetensors: No such file or directory")


def test_a_power_cut_that_keeps_the_tensors_of_an_earlier_start_leaves_no_part(tmp_path):
    folder = write_all(tmp_path)
    before = (folder / "worker-0.safetensors").read_bytes()
    write(tmp_path, "worker-0", value=5.0)
    (folder / "worker-0.safetensors").write_bytes(before)
    assert "its checksum does not match" in newest_or_reason(tmp_path)


def newest_or_reason(run_dir):
    with pytest.raises(CheckpointError) as found:
        newest(run_dir)
    return str(found.value)
