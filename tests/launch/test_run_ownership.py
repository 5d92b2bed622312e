"""A launch owns its run: the directory from before its ranks start until it ends, and it reads what is its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mpitrain.cli.main import main
from mpitrain.launch import supervision
from mpitrain.launch.command import completed, has_result, relaunch
from mpitrain.launch.discover import Launcher
from mpitrain.launch.supervision import Outcome, Requests, Supervisor
from mpitrain.system.files.run_directory import CHECKPOINTS
from mpitrain.system.files.run_lock import LAUNCH_LOCK_FILE
from mpitrain.system.launched import rank_status
from mpitrain.system.launched.rank_status import ENDED, READY, RankStatus

# A launcher whose only rank leaves a result of this start, of another job's, or none, and ends with a code.
ENDS = """#!{python}
import json, os, sys, time
from pathlib import Path
if "--version" in sys.argv:
    sys.exit(print("mpirun (Open MPI) 5.0.11"))
run = Path(os.environ["MPITRAIN_RUN_DIR"])
told = json.loads((Path(os.environ["MPITRAIN_LAUNCH_DIR"]) / "launch.json").read_text())
result = {result}
result["attempt"] = result.pop("of", told["attempt"])
(run / "result.json").write_text(json.dumps(result))
(run / "locked").write_text(str((run / "launch-lock").exists()))
sys.exit({code})
"""


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, object], int], int]:
    def run(result: dict[str, object], code: int) -> int:
        mpirun = tmp_path / "mpirun"
        mpirun.write_text(ENDS.format(python=sys.executable, result=result, code=code))
        mpirun.chmod(0o755)
        (tmp_path / "job.py").touch()
        monkeypatch.setattr(
            "mpitrain.launch.discover.find_launcher", lambda wanted: Launcher("openmpi", str(mpirun))
        )
        words = ["launch", "-n", "1", "train", str(tmp_path / "job.py"), "--run-dir", str(tmp_path / "run")]
        return main(words)

    return run


@pytest.mark.parametrize(
    ("result", "code", "meant"),
    [
        ({"status": "ok", "exit_code": 0}, 137, 0),  # a rank was killed when all was done
        ({"status": "missed", "exit_code": 3}, 0, 3),
        ({"status": "ok", "exit_code": 0, "of": "another"}, 137, 137),
        ({"status": "ok", "exit_code": 0, "of": "another"}, 0, 1),  # ours left none
    ],
)
def test_a_complete_result_is_the_exit_code_if_it_is_of_this_start(
    launch: Callable[[dict[str, object], int], int], result: dict[str, object], code: int, meant: int,
    tmp_path: Path,
) -> None:  # fmt: skip
    assert launch(result, code) == meant
    assert (tmp_path / "run/locked").read_text() == "True"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["locked", "result.json"]


HOLDS = """
import sys
from pathlib import Path
from mpitrain.system.files.run_lock import LAUNCH_LOCK_FILE, RunLock
RunLock(Path(sys.argv[1]), "theirs", LAUNCH_LOCK_FILE).take()
print("held", flush=True)
input()
"""


def test_a_second_launch_is_refused_until_the_first_has_ended(
    launch: Callable[[dict[str, object], int], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ranks have ended, their lock is free, and the launch has yet to read what they left."""
    (run := tmp_path / "run").mkdir()
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdout is not None and first.stdout.readline() == b"held\n"
    assert launch({"status": "ok"}, 0) == 2
    assert "is in use by process" in capsys.readouterr().err
    assert [path.name for path in run.iterdir()] == [LAUNCH_LOCK_FILE], "no rank was started"
    first.kill()
    first.communicate()
    assert launch({"status": "ok"}, 0) == 0, "who is gone holds nothing"


def test_a_result_is_read_by_the_start_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"status": "ok", "attempt": "aa.1"}))
    assert has_result(tmp_path, None, "aa"), "of the same start, after a death"
    assert not has_result(tmp_path, None, "ab")
    assert completed(tmp_path, None, 0, attempt="ab") == 1


def test_a_run_is_not_started_again_from_a_checkpoint_of_another_job(tmp_path: Path) -> None:
    starts = []

    def once(words: list[str]) -> Outcome:
        starts.append(words)
        folder = tmp_path / CHECKPOINTS / "000000000048"
        folder.mkdir(parents=True)
        (folder / "shard-0.json").write_text(
            json.dumps({"parts": ["shard-0"], "run": "r", "attempt": "theirs.1"})
        )
        return Outcome(1)

    assert relaunch(once, tmp_path, 3, Requests(), lambda attempt: attempt == "ours") == 1 and starts == [[]]


def test_ranks_whose_ends_come_one_by_one_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the processes take their time to end; only a standstill ends the launcher."""
    monkeypatch.setattr(supervision, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(supervision, "RESULT_GRACE_S", 100.0)
    now_s, looks = [0.0], []
    monkeypatch.setattr(supervision.awake, "now_s", lambda: now_s[0])
    statuses = {rank: RankStatus(rank, "a", "", READY) for rank in range(5)}

    def look(child: object) -> None:
        now_s[0] += 60.0
        looks.append(1)
        if len(looks) <= 5:
            statuses[len(looks) - 1].state = ENDED

    monkeypatch.setattr(supervision, "_ended", look)
    monkeypatch.setattr(rank_status, "read_all", lambda folder: dict(statuses))
    supervisor = Supervisor("openmpi", Requests(), tmp_path, finished=lambda: True)
    ends: list[str] = []
    monkeypatch.setattr(
        supervisor, "_end", lambda child, code, reason, final: (ends.append(reason), Outcome(code))[1]
    )
    supervisor._watch_over(None)  # type: ignore[arg-type]
    assert len(looks) == 7 and "after a complete result" in ends[0]
