"""Staging: whole, verified, once; and a check that sees one flipped bit."""

import errno
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import mpitrain as mt
from mpitrain.cli.main import main
from mpitrain.data.read import stage_users
from mpitrain.data.read.stage import stage, staged, unstage
from mpitrain.data.tools.check import check
from mpitrain.errors import DataError
from mpitrain.system.launched.launch_variables import node_name


@pytest.fixture
def packed(tmp_path):
    import numpy as np

    np.savez(tmp_path / "a.npz", x=np.arange(4000.0, dtype=np.float32).reshape(1000, 4))
    assert main(["data", "pack", str(tmp_path / "a.npz"), str(tmp_path / "a"), "--shard-samples", "300"]) == 0
    return tmp_path / "a"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_pack_is_staged_once_and_is_the_same(packed, tmp_path, capsys):
    assert main(["data", "stage", str(packed), str(tmp_path / "local")]) == 0
    assert "staged" in capsys.readouterr().out
    names = sorted(path.name for path in packed.iterdir())
    assert sorted(path.name for path in (tmp_path / "local" / "a").iterdir()) == names
    assert main(["data", "stage", str(packed), str(tmp_path / "local")]) == 0
    assert "already there" in capsys.readouterr().out
    assert main(["data", "check", str(tmp_path / "local" / "a")]) == 0


def test_a_damaged_copy_is_made_anew_and_a_damaged_original_is_refused(packed, tmp_path):
    target, _ = stage(packed, tmp_path / "local")
    shard = sorted(target.glob("train-*.h5"))[1]
    flip(shard)
    assert [shard.name in problem for problem in check(str(target)).problems] != []
    assert stage(packed, tmp_path / "local")[1] > 0 and not check(str(target)).problems
    flip(packed / shard.name)
    shutil.rmtree(target)
    with pytest.raises(DataError, match=f"{shard.name}: its SHA-256.*copy it again from where it is whole"):
        stage(packed, tmp_path / "local")
    assert list((tmp_path / "local").iterdir()) == []


def test_what_is_no_pack_or_has_no_room_is_said(packed, tmp_path, monkeypatch):
    with pytest.raises(DataError, match="no pack; make one with"):
        stage(tmp_path, tmp_path / "local")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(DataError, match="0.00 GiB free; stage elsewhere"):
        stage(packed, tmp_path / "local")
    assert list((tmp_path / "local").iterdir()) == []


def test_shards_are_read_from_the_nodes_copy_and_from_nobody_elses(packed, tmp_path, monkeypatch):
    """Where MPITRAIN_STAGED leads to a copy of this very pack; another pack of the same name is none, and gives way."""
    other = tmp_path / "other" / "a"
    assert main(["data", "pack", str(tmp_path / "a.npz"), str(other), "--seed", "5"]) == 0
    monkeypatch.setenv("NODE_DISK", str(tmp_path))
    monkeypatch.setenv("MPITRAIN_STAGED", "$NODE_DISK/local")
    shard = next(iter(sorted(packed.glob("train-*.h5"))))
    assert staged(str(shard)) == str(shard)
    stage(other, tmp_path / "local")
    assert staged(str(shard)) == str(shard)
    copy, copied = stage(packed, tmp_path / "local")
    assert copied > 0 and staged(str(shard)) == str(copy / shard.name) != str(shard)
    shards = mt.Shards(str(packed / "train-*.h5"))
    catalogue = shards.scan()
    for path in packed.glob("train-*.h5"):  # gone where they were scanned: only the copy can be what is read
        path.unlink()
    with shards.reader(catalogue, 0) as reader:
        assert reader.batch(0, 0, 10)["x"].shape == (10, 4)


def test_a_staged_pack_goes_with_its_last_user(packed: Path, tmp_path: Path) -> None:
    """Two jobs and one who staged by hand, who is asked by nobody; then nothing of it is left."""
    local = tmp_path / "local"
    target, copied = stage(packed, local, user="job 1")
    assert copied and stage(packed, local, user="job 2")[1] == 0
    assert unstage(packed, local, "job 1") == (target, ["job 2"]) and not check(str(target)).problems
    assert unstage(packed, local, "job 3") == (target, ["job 2"])  # never one of them
    assert unstage(packed, local, "job 2") == (target, []) and list(local.iterdir()) == []
    assert unstage(packed, local, "job 2") == (target, [])
    assert stage(packed, local)[1] > 0 and stage(packed, local, user="job 4")[1] == 0
    assert unstage(packed, local, "job 4")[1] == ["kept"] and target.exists()
    assert (
        unstage(Path("a"), local) == (target, []) and list(local.iterdir()) == []
    )  # the pack's name will do


def test_another_pack_of_the_name_is_not_replaced_while_it_is_in_use(packed: Path, tmp_path: Path) -> None:
    other, local = tmp_path / "others" / packed.name, tmp_path / "local"
    assert main(["data", "pack", str(tmp_path / "a.npz"), str(other), "--seed", "1"]) == 0
    target, _ = stage(packed, local, user="job 1")
    with pytest.raises(DataError, match="is in use by job 1, and is not .*stage to another folder"):
        stage(other, local, user="job 2")
    assert not check(str(target)).problems
    unstage(packed, local, "job 1")
    assert stage(other, local, user="job 2")[1] > 0


@pytest.mark.parametrize("locks", [True, False])
def test_stagers_at_the_same_time_leave_one_whole_copy(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """Without locks another one finishes while this one copies; with them, what a killed one has left is cleared."""
    local = tmp_path / "local"
    local.mkdir()
    left = local / f".{packed.name}.{node_name()}.0.tmp"
    left.mkdir()
    if locks:
        with ThreadPoolExecutor(3) as pool:
            found = [task.result() for task in [pool.submit(stage, packed, local) for _ in range(3)]]
        assert sorted(copied > 0 for _, copied in found) == [False, False, True]
    else:

        def no_locks(file: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(stage_users.fcntl, "flock", no_locks)
        usage = shutil.disk_usage

        def while_copying(path: Path) -> object:
            monkeypatch.setattr(shutil, "disk_usage", usage)
            stage(packed, local)
            inode.append((local / packed.name).stat().st_ino)
            return usage(path)

        inode: list[int] = []
        monkeypatch.setattr(shutil, "disk_usage", while_copying)
        stage(packed, local)
        assert inode == [(local / packed.name).stat().st_ino]  # readers of it are not disturbed
    assert not check(str(local / packed.name)).problems and left.exists() is not locks
    assert [path.name for path in local.glob(".*.tmp")] == [left.name] * (not locks)
