"""A file that is replaced is the old one or the new one, and keeps the promise that its writer gives."""

import errno
import os
from pathlib import Path

import pytest

from mpitrain.errors import UsageError
from mpitrain.system.files import atomic


@pytest.mark.parametrize("manager", [atomic.replaced, atomic.durably_replaced])
def test_a_failure_leaves_the_old_file_and_nothing_else(manager, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), manager(path) as temporary:
        temporary.write_text("half")
        assert path.read_text() == "old"
        raise ZeroDivisionError
    assert path.read_text() == "old" and [each.name for each in tmp_path.iterdir()] == ["a.json"]


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """What is fsynced and renamed, in order."""
    calls, fsync, replace = list[str](), os.fsync, os.replace

    def spy(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(f"rename {Path(b).name}"), replace(a, b)))
    return calls


def test_a_durable_write_syncs_the_file_before_the_rename_and_the_directory_after(tmp_path, calls) -> None:
    atomic.write_durable(tmp_path / "a", b"new")
    assert calls == [".a.tmp", "rename a", tmp_path.name] and (tmp_path / "a").read_bytes() == b"new"
    calls.clear()
    atomic.write_whole(tmp_path / "a", "newer", tag="7")
    assert calls == ["rename a"] and (tmp_path / "a").read_text() == "newer"


def test_two_files_are_synced_before_either_is_renamed_and_their_directory_once(tmp_path, calls) -> None:
    with atomic.all_durably_replaced(tmp_path / "b", tmp_path / "a") as temporaries:
        for path, text in zip(temporaries, ("first", "second"), strict=True):
            path.write_text(text)
    assert calls == [".b.tmp", ".a.tmp", "rename b", "rename a", tmp_path.name]
    assert (tmp_path / "b").read_text() == "first" and (tmp_path / "a").read_text() == "second"
    with (
        pytest.raises(ZeroDivisionError),
        atomic.all_durably_replaced(tmp_path / "b", tmp_path / "a") as files,
    ):
        files[0].write_text("half")
        raise ZeroDivisionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert (tmp_path / "b").read_text() == "first"


@pytest.mark.parametrize(
    ("number", "passes"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)]
)
def test_only_a_file_system_without_directory_fsync_is_excused(tmp_path, monkeypatch, number, passes) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    if passes:
        atomic.sync_directory(tmp_path)
    else:
        with pytest.raises(OSError, match="Input/output"):
            atomic.sync_directory(tmp_path)


def test_a_place_where_no_file_can_be_made_is_refused_and_left_alone(tmp_path, monkeypatch) -> None:
    (tmp_path / "old").write_text("old")
    for fine in (None, tmp_path / "new", tmp_path / "old"):
        atomic.check_output(fine, "--json")
    refused = {
        tmp_path: "name a file in it",
        tmp_path / "no" / "x": f"there is no directory {tmp_path / 'no'}",
    }
    for path, why in refused.items():
        with pytest.raises(UsageError, match=f"^--json {path}: .*{why}"):
            atomic.check_output(path, "--json")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="no file can be made in"):
        atomic.check_output(tmp_path / "new", "--json")
    assert [each.name for each in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "old"
