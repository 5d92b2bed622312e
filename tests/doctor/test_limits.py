"""Limits under which a node's processes run, each planted, and quotas as the commands print them."""

from __future__ import annotations

import resource
import stat
from pathlib import Path

import pytest

from mpitrain.doctor import limits
from mpitrain.doctor.checks import Unfit, Wanted
from mpitrain.system import control_groups, memory

# Columns of `lfs quota -q -u` on one line, and wrapped after a long name of a file system; of `quota -u -w -p`.
LFS = "       /lustre 4200956*      0 4194304 6d23h59m   37461       0 1000000       -\n"
LFS_WRAPPED = (
    "/lustre/projects/a-long-name\n        102400       0 4194304       -   37461       0  0       -\n"
)
QUOTA = """\
Disk quotas for user alice (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
fs1:/home  3145728 10485760 12582912       0  250000*  200000  250000 1790000000
"""


def test_a_quota_is_read_from_what_the_commands_print() -> None:
    assert list(limits.parse_lfs_quota(LFS)) == [("KiB", 4200956, 4194304), ("files", 37461, 1000000)]
    assert list(limits.parse_lfs_quota(LFS_WRAPPED)) == [("KiB", 102400, 4194304), ("files", 37461, 0)]
    assert list(limits.parse_lfs_quota("Unexpected quotactl error: Operation not supported\n")) == []
    assert list(limits.parse_quota(QUOTA)) == [
        ("fs1:/home", "KiB", 3145728, 12582912),
        ("fs1:/home", "files", 250000, 250000),
    ]


@pytest.mark.parametrize(
    ("command", "text", "said"),
    [("lfs", LFS, "KiB: 4200956 of 4194304 used"), ("quota", QUOTA, "fs1:/home: files: 250000 of 250000")],
)
def test_a_quota_that_is_reached_is_unfit(
    command: str, text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert limits.check_quota(Wanted()) == "no command here tells one"
    script = tmp_path / command
    script.write_text(f"#!/bin/sh\nexec /bin/echo '{text}'\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(Unfit, match=said.replace("/", ".")):
        limits.check_quota(Wanted())
    script.write_text(f"#!/bin/sh\nexec /bin/echo '{LFS_WRAPPED}'\n")
    if command == "lfs":
        assert limits.check_quota(Wanted()) == "2% of it used"


def test_memory_is_what_the_control_group_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "left_in_groups", lambda: iter([2.0 * 2**30, 0.5 * 2**30]))
    assert limits.check_memory(Wanted(min_memory_gib=0.25)) == (
        "0.5 GiB of memory available within the job's control group"
    )
    with pytest.raises(Unfit, match="within the job's control group, 1 wanted"):
        limits.check_memory(Wanted())


@pytest.mark.parametrize("version", [1, 2])
def test_cached_files_of_a_control_group_make_room(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training data that has been read fills the group, and is given up for whoever needs memory."""
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "own")
    folder = tmp_path / "memory" / "job" if version == 1 else tmp_path / "job"
    folder.mkdir(parents=True)
    limit, used = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    (folder / f"memory.{limit}").write_text("1000\n")
    (folder / f"memory.{used}").write_text("990\n")
    name = "total_inactive_file" if version == 1 else "inactive_file"
    (folder / "memory.stat").write_text(f"anon 100\n{name} 700\nfile 800\n")
    (tmp_path / "own").write_text("5:memory:/job\n" if version == 1 else "0::/job\n")
    assert list(memory.left_in_groups()) == [710]


def test_limits_of_processes_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has = {resource.RLIMIT_NOFILE: 4096, resource.RLIMIT_MEMLOCK: 64 * 1024}
    monkeypatch.setattr(limits.resource, "getrlimit", lambda what: (has[what], has[what]))
    monkeypatch.setattr(limits, "SHM", tmp_path)
    monkeypatch.setattr(limits, "RDMA", tmp_path / "infiniband")
    wanted = Wanted(min_shm_gib=0)
    assert limits.check_limits(wanted).startswith("4096 open files, 64 KiB of memory may be locked")
    with pytest.raises(Unfit, match="4096 files may be open at a time, 8192 wanted"):
        limits.check_limits(Wanted(min_open_files=8192, min_shm_gib=0))
    with pytest.raises(Unfit, match=r"GiB free in .*, 1e\+06 wanted"):
        limits.check_limits(Wanted(min_shm_gib=1e6))
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    with pytest.raises(Unfit, match=r"64 KiB of memory may be locked, and RDMA \(mlx5_0\)"):
        limits.check_limits(wanted)
    has[resource.RLIMIT_MEMLOCK] = resource.RLIM_INFINITY
    assert "any memory may be locked" in limits.check_limits(wanted)
