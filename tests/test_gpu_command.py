"""`make gpu` where there is no GPU: what it says then, what becomes of parts, its deadline, and a rehearsal of all of
it on the simulated accelerator."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import gpu
from tests.devices import simulated
from tests.gpu import Outcome, Part

FACTS = ["Some GPU torch 2.13.0 Open MPI v5.0.11"]
NAMED = "tests/mpi/test_gpu.py::test_a[x] "
RATE = '{"model": "mlp", "ranks": 2, "samples_per_second": {"host": 10.0, "nccl": 30.0}, "time_to_host": '
RATE += '{"host": [1, 1, 1], "nccl": [0.3, 0.2, 0.4]}, "left_out": {"direct": "MPI does not say"}}'


def part(*words: str, limit_s: float = 60.0, why_not: str = "") -> Part:
    return Part("a part", limit_s, words, why_not)


def test_without_an_accelerator_it_says_so_in_one_line_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "look", lambda env: {"kind": None, "why": "torch is built for the host alone"})
    assert gpu.main(["--results", str(tmp_path / "gpu.txt")]) == gpu.NO_DEVICE == 4
    assert capsys.readouterr().err.splitlines() == [
        "make gpu: no accelerator: torch is built for the host alone; nothing was run or written"
    ]
    monkeypatch.setattr(gpu, "NEEDED", ("json", "no_such_module"))
    assert gpu.main(["--results", str(tmp_path / "gpu.txt")]) == gpu.NO_DEVICE
    assert "lacks no_such_module: install" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "code", "limit_s", "result", "is_good"),
    [
        (f"{NAMED}PASSED [50%]\n{NAMED}PASSED [99%]\n", 0, None, "passed: 2 passed", True),
        (f"{NAMED}PASSED [50%]\n{NAMED}SKIPPED [99%]\n", 0, None, "passed in part: 1 passed, 1 skipped", True),
        (f"{NAMED}SKIPPED [99%]\n", 0, None, "skipped: 1 skipped", True),
        ("collected 2 items\n", 5, None, "FAILED: exit code 5", False),
        ("", 0, None, "skipped: no test ran", True),
        (f"[gw1] [ 50%] FAILED {NAMED}\n{NAMED}PASSED [9%]\n", 1, None, "FAILED: 1 passed, 1 failed", False),
        (f"9 items / 5 selected\n{NAMED}PASSED [9%]\n", -2, 30.0, "STOPPED at 30 s: 1 passed of 5", False),
        (f"4 workers [7 items]\n[gw0] [ 1%] PASSED {NAMED}\n", -9, 30.0, "STOPPED at 30 s: 1 passed of 7", False),
        (f"{RATE}\n", 0, None, "measured mlp", True),
        (f"{RATE}\nTraceback\n", 1, None, "FAILED: exit code 1", False),
    ],
)  # fmt: skip
def test_what_a_part_said_is_what_the_file_says(
    text: str, code: int, limit_s: float | None, result: str, is_good: bool
) -> None:
    found = gpu.judged(part(), text, code, 1.0, limit_s)
    assert (found.result, found.is_good) == (result, is_good)


def test_a_measurement_that_says_nothing_has_failed() -> None:
    assert gpu.judged(part(gpu.RATES), "", 0, 1.0, None).result == "FAILED: nothing was measured"


def test_a_part_ends_at_its_limit_and_what_no_time_is_left_for_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "GRACE_S", 0.4)
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    began_s = time.monotonic()
    found = gpu.run(part("-c", deaf, limit_s=1.5), 60.0, {})
    assert found.result == "STOPPED at 2 s: nothing done" and not found.is_good
    assert time.monotonic() - began_s < 60.0  # it does not wait for the ten minutes
    assert gpu.run(part("-c", "pass"), 0.5, {}).result == "NOT RUN: no time was left"
    assert gpu.run(part("-c", "pass", why_not="a rehearsal"), 60.0, {}).result == "skipped: a rehearsal"


def test_the_file_names_the_machine_every_part_what_failed_and_what_took_no_part() -> None:
    failed = f"FAILED {NAMED}- AssertionError"
    outcomes = [
        gpu.judged(part(), f"{NAMED}PASSED [1%]\n{NAMED}FAILED [2%]\n{failed}\n", 1, 7.0, None),
        gpu.judged(part(), RATE, 0, 9.0, None),
        Outcome(part(), "NOT RUN: no time was left"),
    ]
    lines = gpu.report(FACTS, outcomes, 599.0, 10).splitlines()
    assert lines[0] == FACTS[0] and failed in lines and "direct took no part: MPI does not say" in lines
    assert "mlp, 2 rank(s): host 10 (1.00 1.00 1.00); nccl 30 (0.30 0.20 0.40)" in lines
    assert lines[2:5] == [
        "a part      7 s  FAILED: 1 passed, 1 failed", "a part      9 s  measured mlp",
        "a part      0 s  NOT RUN: no time was left",
    ]  # fmt: skip
    assert lines[-1] == "1 passed, 1 failed; 2 of 3 parts failed or were not run to their end; 599 s of 600 s"


def test_it_runs_every_test_that_wants_a_gpu_and_files_that_are_there() -> None:
    words = [word for one in gpu.parts("cuda", 1, simulated=False) for word in one.words]
    assert [word for word in words if word.endswith(".py") and not (gpu.ROOT / word).exists()] == []
    own = Path(__file__)
    marked = [
        path for path in own.parent.rglob("test_*.py") if path != own and "mark.gpu" in path.read_text()
    ]
    assert {path.relative_to(gpu.ROOT).as_posix() for path in marked} <= set(words)
    chosen = [one.words[-1] for one in gpu.parts("cuda", 1, simulated=False) if gpu.OF_GPU in one.words]
    assert chosen == ["device_tensors and auto", "device_tensors and off", "not device_tensors"]


@pytest.mark.extended
@pytest.mark.skipif(bool(simulated.why_not()), reason=simulated.why_not())
def test_a_rehearsal_runs_all_of_it_on_the_simulated_accelerator(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.gpu", "--simulated", "--results", str(tmp_path / "gpu.txt")]
    ended = subprocess.run(words, cwd=gpu.ROOT, capture_output=True, text=True, timeout=700)
    said = (tmp_path / "gpu.txt").read_text()
    assert ended.returncode == 0, (said, ended.stderr)
    assert (
        "a REHEARSAL on a simulated accelerator" in said
        and "50 passed, 2 skipped; 0 of 6 parts failed" in said
    )
    assert "small, 2 rank(s): host " in said and "direct took no part: MPI knows no memory of 'sim'" in said
