"""Files of killed launches go once nobody uses them, and no others."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mpitrain.launch import left_behind
from mpitrain.launch.left_behind import remove_left_behind


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def made(path: Path) -> Path:
    path.write_bytes(b"x" * mmap.PAGESIZE)
    return path


def test_shared_memory_that_no_process_maps_or_has_open_is_removed(folder: Path) -> None:
    names = ("mpich_shm_1_0", "mpich_shm_2_0", "mpich_shm_3_0", "sm_segment.h.0.1.0", "mpich_other")
    nobodys, mapped, opened, open_mpis, others = (made(folder / name) for name in names)
    (folder / "mpich_shm_4_0").symlink_to(others)
    with open(mapped, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; f = open(sys.argv[1]); print(flush=True); input()", opened],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stdout.readline()
    assert set(remove_left_behind()) >= {nobodys, open_mpis}
    assert mapped.exists() and opened.exists() and others.exists() and (folder / "mpich_shm_4_0").is_symlink()
    memory.close()
    child.communicate(b"\n")
    assert set(remove_left_behind()) >= {mapped, opened}


def test_a_description_of_the_machine_is_its_launchers_while_that_lives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(folder / "hydra_hwloc_xmlfile_aB3xYz")
    monkeypatch.setattr(left_behind, "_HYDRA_NAMES", (Path("/proc/self/comm").read_text().strip(),))
    monkeypatch.setattr(left_behind, "_MAKES_WITHIN_S", 1e6)
    assert path not in remove_left_behind()
    monkeypatch.setattr(left_behind, "_MAKES_WITHIN_S", 60.0)
    os.utime(path, (time.time() + 1e6,) * 2)
    assert path in remove_left_behind()
