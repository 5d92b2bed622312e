"""A node's checks of itself, each with the fault that it is there for."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from mpitrain.cli.main import main
from mpitrain.doctor import node
from mpitrain.doctor.checks import Check, Unfit, Wanted
from mpitrain.doctor.gpus import check_devices
from mpitrain.doctor.node import examine
from mpitrain.doctor.reports import collect, summary, write_report


def outcome(wanted: Wanted) -> dict[str, bool]:
    return {check.name: check.ok for check in examine(wanted)}


def test_a_fit_node_passes_and_each_planted_fault_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    for gpu in range(2):
        (tmp_path / f"n1-gpu{gpu}").touch()
    fit = Wanted(
        gpus=2,
        devices=f"{tmp_path}/$SLURMD_NODENAME-gpu*",
        disk=str(tmp_path),
        shared=str(tmp_path),
        speed_s=0,
    )
    assert all(outcome(fit).values()), examine(fit)
    bad = Wanted(
        gpus=3, devices=fit.devices, disk=str(tmp_path), shared=str(tmp_path), data=str(tmp_path / "absent.h5"),
        min_memory_gib=1e6, min_free_gib=1e6, min_open_files=10**12, speed_s=0,
    )  # fmt: skip
    assert [name for name, ok in outcome(bad).items() if not ok] == [
        "memory",
        "limits",
        "disk",
        "hdf5",
        "devices",
    ]
    details = {check.name: check.detail for check in examine(bad)}
    assert "2 of 3 device(s)" in details["devices"] and "wanted" in details["disk"]


def test_without_devices_torch_is_asked(tmp_path: Path) -> None:
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(Unfit, match=f"torch sees {there} of {there + 1}"):
        check_devices(Wanted(gpus=there + 1, speed_s=0))


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
    checks = examine(Wanted(gpus=0, speed_s=0), deadline_s=0.2)
    never.set()
    assert [check.detail for check in checks if check.name == "disk"] == ["no answer within 0.2 s"]
    assert any(check.ok for check in checks if check.name == "locking")


def test_imports_have_a_clock_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that takes longer than the deadline of a check: the node is fit, and what needs it is asked. One that
    fails is the cause, and what needs it is not asked."""
    began, go_on = threading.Event(), threading.Event()
    real = node.importlib.import_module

    def slow(name: str) -> object:
        began.set()
        go_on.wait()
        return real(name)

    monkeypatch.setattr(node.importlib, "import_module", slow)
    answers: list[list[Check]] = []
    asking = threading.Thread(
        target=lambda: answers.append(examine(Wanted(gpus=0, speed_s=0), deadline_s=3, imports_deadline_s=60))
    )
    asking.start()
    assert began.wait(60)
    asking.join(3.5)  # longer than the deadline of a check
    assert asking.is_alive()
    go_on.set()
    asking.join()
    found = {check.name: check for check in answers[0]}
    assert found["imports"].ok and found["hdf5"].ok and "h5py in" in found["imports"].detail

    def broken(name: str) -> object:
        raise ImportError("libcuda.so.1: no such file")

    monkeypatch.setattr(node.importlib, "import_module", broken)
    found = {check.name: check for check in examine(Wanted(gpus=0))}
    assert "libcuda.so.1" in found["imports"].detail and not found["imports"].ok
    assert not {"hdf5", "devices", "speed"} & set(found)


def test_unfit_and_silent_nodes_are_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report(tmp_path, "n1", [Check("disk", True, "fine")], "kind")
    write_report(tmp_path, "n2", [Check("disk", False, "full"), Check("clock", True, "fine")], "kind")
    (tmp_path / "n3.json").write_text('{"half')
    (tmp_path / "n5.json").write_text('{"checks": [{"name": "disk"}]}')
    silent = ["did not report"]
    assert collect(tmp_path, ["n1", "n2", "n3", "n4", "n5"]).wrong == {
        "n2": ["disk: full"], "n3": silent, "n4": silent, "n5": silent,
    }  # fmt: skip
    failing = tmp_path / "failing_nodes.txt"
    words = ["doctor", "--collect", str(tmp_path), "--failing", str(failing), "--hosts"]
    assert main([*words, "n1 n2 n4"]) == 4 and failing.read_text() == "n2\nn4\n"
    assert "unfit: n2: disk: full" in capsys.readouterr().out
    assert main([*words, "n1"]) == 0 and failing.read_text() == ""
    assert collect(tmp_path, ["n1.cluster.example", "n2.cluster.example"]).wrong == {
        "n2.cluster.example": ["disk: full"]
    }


def test_a_slow_node_is_named_among_its_kind(tmp_path: Path) -> None:
    def report(name: str, speed: float, kind: str = "big") -> None:
        check = Check("speed", True, "seen", {"matmul_gflop_per_s": speed, "memory_gb_per_s": 10.0})
        write_report(tmp_path, name, [check], kind)

    for name, speed in (("n1", 100.0), ("n2", 40.0), ("n3", 110.0), ("n4", 90.0)):
        report(name, speed)
    report("c1", 10.0, "small")  # two of another kind: nothing to compare one of them with
    report("c2", 1.0, "small")
    hosts = ["n1", "n2", "n3", "n4", "c1", "c2"]
    text = "slow: matrix product 40 GFLOP/s, the others' median is 100 GFLOP/s"
    assert collect(tmp_path, hosts).wrong == {"n2": [text]}
    assert collect(tmp_path, hosts, slow=0.3).wrong == {}
    assert collect(tmp_path, ["n1", "n2"]).wrong == {}


def test_nodes_that_the_launcher_has_not_reached_are_not_blamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when `srun` starts without the site's environment, on one node and on several."""
    for hosts in ("n1", "n1 n2", "n1 n2 n3"):
        words = ["--collect", str(tmp_path), "--hosts", hosts, "--failing", str(tmp_path / "unfit")]
        assert main(["doctor", *words]) == 4
        told = capsys.readouterr().out
        assert "no node is to blame" in told and "unfit:" not in told and "--exclude" not in told
        assert (tmp_path / "unfit").read_text() == ""


@pytest.mark.parametrize(("name", "blamed"), [("imports", ""), ("locking", ""), ("memory", "n1\n")])
def test_the_only_node_is_not_blamed_for_what_may_be_the_sites(
    name: str,
    blamed: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    write_report(tmp_path, "n1", [Check(name, False, "it is not there")], "kind")
    words = ["--collect", str(tmp_path), "--hosts", "n1", "--failing", str(tmp_path / "unfit")]
    assert main(["doctor", *words]) == 4
    assert (tmp_path / "unfit").read_text() == blamed
    told = capsys.readouterr().out
    assert ("--exclude=n1" in told) == bool(blamed) and ("only node" in told) != bool(blamed)


def test_what_most_nodes_fail_is_no_fault_of_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("n1", "n2", "n3", "n4"):
        checks = [Check("imports", name == "n4", "cannot import h5py"), Check("disk", name != "n2", "full")]
        write_report(tmp_path, name, checks, "kind")
    for variable in ("PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    hosts = ["n1", "n2", "n3", "n4"]
    verdict = collect(tmp_path, hosts)
    assert verdict.common == {"imports": 3} and verdict.own == ["n2"] and list(verdict.wrong) == hosts[:3]
    lines = summary(verdict, 4)
    assert any("most nodes fail alike (3 of 4: imports)" in line for line in lines)
    assert "again without them: sbatch --exclude=n2 ..." in lines and lines[-1] == "1 of 4 node(s) fit"
    (tmp_path / "n2.json").unlink()  # two of the three that have reported fail alike
    assert collect(tmp_path, hosts).own == ["n2"]
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setenv("LSB_JOBID", "7")
    assert "again without them: bsub -R 'select[hname!=n2]' ..." in summary(collect(tmp_path, hosts), 4)
    verdict = collect(tmp_path, ["n1", "n3"])
    assert verdict.common == {"imports": 2} and verdict.own == []
    assert not any("again without" in line for line in summary(verdict, 2))
    assert collect(tmp_path, ["n1"]).common == {}  # one node alone cannot tell


def test_the_command_reports_and_answers_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n9")
    folder = tmp_path / "run" / "doctor"  # not made before
    words = ["doctor", "--node", "--report", str(folder), "--disk", str(tmp_path), "--gpus", "0"]
    words += ["--speed-s", "0.01"]
    assert main(words) == 0
    report = json.loads((folder / "n9.json").read_text())
    assert report["node"] == "n9" and "0 GPUs" in report["kind"]
    speed = next(check for check in report["checks"] if check["name"] == "speed")
    assert all(value > 0 for value in speed["figures"].values()) and len(speed["figures"]) == 4
    assert main([*words, "--min-free-gib", "1e9", "--speed-s", "0"]) == 4
    assert os.listdir(folder) == ["n9.json"]  # nothing else is left behind
    capsys.readouterr()
    (tmp_path / "file").touch()
    assert main(["doctor", "--node", "--report", str(tmp_path / "file" / "x")]) == 2
    assert "no such directory can be made" in capsys.readouterr().err


def test_a_variable_that_is_not_set_is_not_the_systems_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOSUCH", raising=False)
    monkeypatch.delenv("TMPDIR", raising=False)
    with pytest.raises(Unfit, match="variable in it is not set"):
        node.check_disk(Wanted(disk="$NOSUCH/x"))
    assert "/tmp" in node.check_disk(Wanted(disk="$TMPDIR"))
