"""A node's checks of itself, each with the fault that it is there for."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from mpitrain.cli.main import main
from mpitrain.doctor import node
from mpitrain.doctor.node import Check, Unfit, Wanted, collect, examine, write_report


def outcome(wanted: Wanted) -> dict[str, bool]:
    return {check.name: check.ok for check in examine(wanted)}


def test_a_fit_node_passes_and_each_planted_fault_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    for gpu in range(2):
        (tmp_path / f"n1-gpu{gpu}").touch()
    fit = Wanted(
        gpus=2, devices=f"{tmp_path}/$SLURMD_NODENAME-gpu*", disk=str(tmp_path), shared=str(tmp_path)
    )
    assert all(outcome(fit).values()), examine(fit)
    bad = Wanted(
        gpus=3, devices=fit.devices, disk=str(tmp_path), shared=str(tmp_path), data=str(tmp_path / "absent.h5"),
        min_memory_gib=1e6, min_free_gib=1e6,
    )  # fmt: skip
    assert outcome(bad) == {
        "memory": False,
        "disk": False,
        "locking": True,
        "clock": True,
        "hdf5": False,
        "devices": False,
    }
    details = {check.name: check.detail for check in examine(bad)}
    assert "2 of 3 device(s)" in details["devices"] and "wanted" in details["disk"]


def test_without_devices_cuda_is_asked(tmp_path: Path) -> None:
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(Unfit, match=f"CUDA sees {there} of {there + 1}"):
        node.check_devices(Wanted(gpus=there + 1))


def test_a_clock_that_is_off_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = node.time.time
    monkeypatch.setattr(node.time, "time", lambda: now_s() + 3600)
    with pytest.raises(Unfit, match=r"\+3600\.\d s off"):
        node.check_clock(Wanted(shared=str(tmp_path)))


def test_no_locks_are_a_fault_only_where_hdf5_wants_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(node.fcntl, "flock", refuse)
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)
    with pytest.raises(Unfit, match="HDF5_USE_FILE_LOCKING=FALSE"):
        node.check_locking(Wanted(shared=str(tmp_path)))
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "FALSE")
    assert "asks for none" in node.check_locking(Wanted(shared=str(tmp_path)))


def test_a_check_that_hangs_is_unfit_and_the_next_is_still_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(node, "check_disk", lambda wanted: str(never.wait()))
    checks = examine(Wanted(gpus=0), deadline_s=0.2)
    never.set()
    assert [check.detail for check in checks if check.name == "disk"] == ["no answer within 0.2 s"]
    assert any(check.ok for check in checks if check.name == "locking")


def test_unfit_and_silent_nodes_are_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report(tmp_path, "n1", [Check("disk", True, "fine")])
    write_report(tmp_path, "n2", [Check("disk", False, "full"), Check("clock", True, "fine")])
    (tmp_path / "n3.json").write_text('{"half')
    assert collect(tmp_path, ["n1", "n2", "n3", "n4"]) == {
        "n2": ["disk: full"], "n3": ["did not report"], "n4": ["did not report"],
    }  # fmt: skip
    failing = tmp_path / "failing_nodes.txt"
    words = ["doctor", "--collect", str(tmp_path), "--failing", str(failing), "--hosts"]
    assert main([*words, "n1 n2 n4"]) == 4 and failing.read_text() == "n2\nn4\n"
    assert "unfit: n2: disk: full" in capsys.readouterr().out
    assert main([*words, "n1"]) == 0 and failing.read_text() == ""


def test_the_command_reports_and_answers_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n9")
    words = ["doctor", "--node", "--report", str(tmp_path), "--disk", str(tmp_path), "--gpus", "0"]
    assert main(words) == 0
    assert json.loads((tmp_path / "n9.json").read_text())["node"] == "n9"
    assert main([*words, "--min-free-gib", "1e9"]) == 4
    assert os.listdir(tmp_path) == ["n9.json"]  # nothing else is left behind
