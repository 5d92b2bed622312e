"""What `slurm status` says of a run in every state of its job: with stand-ins for scontrol and squeue that answer as
Slurm 22.05 does."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.errors import UsageError
from mpitrain.reporting.report import write_json
from mpitrain.slurm.job_log import append_event, read_events
from mpitrain.slurm.status import describe

FACTS = (
    "JobId=12 JobName=big UserId=root(0) JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts={restarts} BatchFlag=1 ExitCode={code}:0 NodeList=n[1-3] BatchHost=n1"
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that makes Slurm say this of job 12, and this of its first node."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()

    def say(
        state: str, reason: str = "None", restarts: int = 0, code: int = 0, node: str = "ALLOCATED", queue=""
    ) -> None:
        facts = FACTS.format(state=state, reason=reason, restarts=restarts, code=code)
        first = f"NodeName=n1 State={node} Reason=x"
        answers = {
            "scontrol": f"case $4 in 12) echo '{facts}';; n1) echo '{first}';; *) false;; esac",
            "squeue": f"printf '{queue}'",
        }
        for name, text in answers.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)

    return say


def log(run_dir: Path, *events: str) -> Path:
    """A run directory whose batch script has written these lines, each with the count of restarts before it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"1795557958 12 {event}\n" for event in events)
    (run_dir / "job.log").write_text(f"{lines}no line of ours\n1795557958 12 0 torn?")
    return run_dir


WHILE = [
    ("PENDING", ["0 submitted"], {}, "waiting in the queue"),
    (
        "PENDING",
        ["0 started n1", "0 requeued by n2: the first node n1 is down"],
        {},
        "requeued by n2: the first node n1",
    ),
    ("PENDING", ["0 started n1", "0 ranks"], {"restarts": 1}, "requeued, waiting in the queue"),
    ("CONFIGURING", ["0 submitted"], {}, "starting: the batch script has not begun"),
    ("RUNNING", ["0 started n1"], {}, "starting: the batch script has begun"),
    ("RUNNING", ["0 started n1", "0 preflight"], {}, "starting: its nodes are looked at"),
    ("RUNNING", ["0 preflight", "0 staging data/big"], {}, "starting: staging in data/big"),
    ("RUNNING", ["0 preflight", "0 ranks"], {}, "running"),
    ("RUNNING", ["0 ranks", "0 requeued"], {"restarts": 1}, "starting: the batch script has not begun"),
    ("RUNNING", ["0 ranks"], {"node": "DOWN*+DRAIN"}, "dead: its first node n1 is down.*scontrol requeue 12"),
    ("COMPLETING", ["0 ranks", "0 requeued"], {}, "requeued, it will start again"),
    ("COMPLETING", ["0 ranks"], {}, "ending"),
    (
        "FAILED",
        ["0 preflight", "0 unfit n7", "0 ended 4"],
        {"code": 4},
        "preflight failed, exit code 4: 1 unfit",
    ),
    ("FAILED", ["0 preflight", "0 ended 75"], {"code": 75}, "asked to end before its ranks had begun"),
    (
        "FAILED",
        ["0 started n1", "0 ended 2"],
        {"code": 2},
        "no result: the batch script ended with exit code 2; see the job's log",
    ),
    (
        "TIMEOUT",
        ["0 started n1", "0 preflight"],
        {},
        "no result: Slurm says TIMEOUT, exit code 0 while its nodes are looked at",
    ),
    ("SUSPENDED", ["0 started n1", "0 ranks"], {}, "suspended by Slurm: it goes on when it is resumed"),
    (
        "CANCELLED",
        ["0 started n1", "0 ranks", "0 requeued", "0 ended 75"],
        {},
        "asked to end before its ranks had begun",
    ),
    (
        "FAILED",
        ["0 started n1", "0 preflight", "0 unfit", "0 ended 4"],
        {},
        "preflight failed, exit code 4, and no node",
    ),
    ("FAILED", ["0 submitted"], {"code": 2}, "no result: Slurm says FAILED, exit code 2; see the job's log"),
]


@pytest.mark.parametrize(("state", "events", "facts", "said"), WHILE)
def test_every_state_of_a_job_has_its_words(tmp_path, slurm, state, events, facts, said) -> None:
    import re

    slurm(state, **facts)
    run_dir = log(tmp_path / "big-12", *events)
    if "unfit n7" in " ".join(events):
        (run_dir / "failing_nodes.txt").write_text("n7\n")
    told = describe(run_dir)
    assert re.match(re.escape(f"{run_dir}: ") + said, told), told
    assert f"job         12: {state}" in told
    assert ("restarts    1" in told) == (facts.get("restarts") == 1)


def test_a_job_without_a_directory_is_found_by_the_name_it_will_have(tmp_path, slurm) -> None:
    slurm("PENDING", "Priority")
    assert (
        describe(tmp_path / "big-12")
        == f"{tmp_path}/big-12: waiting in the queue\njob         12: PENDING, Priority"
    )
    for name in ("other-12", "big-13", "big"):
        with pytest.raises(UsageError, match="no run directory"):
            describe(tmp_path / name)


def test_a_restart_that_slurm_made_itself_counts(tmp_path, slurm) -> None:
    slurm("RUNNING", restarts=2)
    told = describe(log(tmp_path / "big-12", "0 ranks", "2 started n2", "2 ranks"))
    assert "restarts    2; the last: by Slurm itself, or by hand" in told


def test_a_sweep_is_a_line_for_each_run(tmp_path, slurm) -> None:
    slurm("PENDING", queue="2 RUNNING None\\n3 PENDING JobArrayTaskLimit\\n0 COMPLETED None\\n")
    sweep = tmp_path / "sweep-12"
    log(sweep, "0 submitted")
    for index, exit_code in ((0, 0), (1, 3)):
        log(sweep / str(index), "0 started n1", "0 ranks", f"0 ended {exit_code}")
        status = "missed" if exit_code else "ok"
        write_json(
            sweep / str(index) / "result.json", {"status": status, "exit_code": exit_code, "metrics": {}}
        )
    log(sweep / "2", "0 started n1", "0 ranks")
    head, job, *runs = describe(sweep).splitlines()
    assert (
        head == f"{sweep}: 4 runs: 1 ok, 1 missed, 1 running, 1 waiting in the queue"
        and job == "job         12"
    )
    assert [line.split(maxsplit=1) for line in runs] == [
        ["0", "ended with status=ok, exit code 0"],
        ["1", "ended with status=missed, exit code 3"],
        ["2", "running"],
        ["3", "waiting in the queue"],
    ]


def test_the_log_of_a_job_may_hold_anything(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    append_event(tmp_path, "12", "submitted")
    with (tmp_path / "job.log").open("ab") as file:
        file.write(b"\xff\xfe 1 2\n" + b"9" * 50 + b" 1 1 started\n17 12 1 ended 0\n")
    assert [(one.job, one.restarts, one.name, one.words) for one in read_events(tmp_path)] == [
        ("12", 0, "submitted", ""),
        ("12", 1, "ended", "0"),
    ]
    (tmp_path / "job.log").unlink()
    (tmp_path / "job.log").mkdir()
    assert read_events(tmp_path) == []
