"""Batch scripts are pure text: the templates in `slurm/` are the renderer's own, compared whole, and clean bash."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mpitrain.errors import UsageError
from mpitrain.slurm import KINDS, Script, het_parts, may_requeue, render, render_site, script_parts
from mpitrain.slurm.limits import LIMIT, lead
from mpitrain.slurm.requeue import decide, decide_without_checkpoint
from mpitrain.slurm.script import make
from mpitrain.slurm.status import describe
from mpitrain.system.files.run_directory import NO_PROGRESS, Progress
from mpitrain.system.launched.time_limit import needs_now

ROOT = Path(__file__).resolve().parents[2]
FILLED = Script(
    "tolerant",
    job="jobs/my job.py",
    options=("--strategy", "async(servers=2,placement='beside')", "--lr", "1e-3"),
    name="big",
    nodes=9,
    gpus_per_node=8,
    time="1-12",
    account="phys",
    partition="a100",
    qos="long",
    constraint="nvme",
    switches="1@10:00",
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_templates_are_what_render_gives(kind: str) -> None:
    """After a change to `mpitrain/slurm`: mpitrain slurm render KIND > slurm/KIND.sbatch"""
    assert (ROOT / "slurm" / f"{kind}.sbatch").read_text() == render(Script(kind))


def test_there_is_no_template_that_nobody_renders() -> None:
    assert {path.stem for path in (ROOT / "slurm").glob("*.sbatch")} == set(KINDS)


def test_what_is_filled_in_stands_in_the_head() -> None:
    text = render(FILLED)
    assert text.partition("\ncd ")[0] == (
        "#!/bin/bash\n"
        "# Train on several nodes and a spare one: when a node dies, go on with the healthy ones.\n"
        "#\n"
        "# Written by `mpitrain slurm render`, which also fills in job, nodes and limits.\n"
        "\n"
        "#SBATCH --job-name=big --time=1-12\n"
        "#SBATCH --output=%x-%j.out --open-mode=append\n"
        "#SBATCH --signal=B:USR1@300 --requeue\n"
        "#SBATCH --account=phys\n"
        "#SBATCH --qos=long\n"
        "#SBATCH --nodes=9 --exclusive --mem=0 --gpus-per-node=8\n"
        "#SBATCH --partition=a100\n"
        "#SBATCH --constraint=nvme\n"
        "#SBATCH --switches=1@10:00\n"
        "#SBATCH --no-kill\n"
    )
    line = """set -- 'jobs/my job.py' --strategy 'async(servers=2,placement='"'"'beside'"'"')' --lr 1e-3\n"""
    assert line in text and text.replace(line, "") == text.replace(line, "", 1)


@pytest.mark.parametrize("tool", [("bash", "-n"), ("shellcheck",)])
def test_scripts_are_clean(tool: tuple[str, ...], tmp_path: Path) -> None:
    if shutil.which(tool[0]) is None:
        pytest.skip(f"no {tool[0]}: apt-get install {tool[0]}")
    texts = {kind: render(Script(kind)) for kind in KINDS}
    texts |= {"filled": render(FILLED), "site": (ROOT / "slurm" / "site.sh").read_text()}
    paths = []
    for name, text in texts.items():
        paths.append(tmp_path / name)
        paths[-1].write_text(text)
    for each in [paths] if tool[0] == "shellcheck" else [[path] for path in paths]:
        run = subprocess.run([*tool, *each], capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("multinode", {}, "did you mean 'multi-node'"),
        ("tolerant", {"node": 3}, "did you mean 'nodes'"),
        ("tolerant", {"nodes": 0}, "at least 1"),
        ("tolerant", {"time": "soon"}, "minutes"),
        ("tolerant", {"account": "a b"}, "one word"),
        ("tolerant", {"job": "a\nrm -rf /"}, "line ends"),
        ("hetjob", {"name": "my-hetjob"}, "border between components"),
        ("array-sweep", {"job": "jobs/digits.py"}, "sweep="),
    ],
)
def test_what_makes_no_script_is_said(kind: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make(kind, **options)


def test_a_restart_needs_a_checkpoint_progress_and_a_number_left() -> None:
    def before(*samples: int) -> list[tuple[int, str]]:
        return [(number, "first") for number in samples]

    here = Progress(100, "run", "first")
    assert decide(here, [], 20).again and decide(here, before(50), 20).again
    assert "no checkpoint" in decide(NO_PROGRESS, [], 20).reason
    assert "no progress" in decide(here, before(20, 100), 20).reason
    assert not decide(here, before(20, 100), 20).again
    # the one at 100 was damaged; but a checkpoint of another name with the same samples is none
    assert decide(Progress(80, "run", "second", since=20), before(20, 100), 20).again
    assert not decide(Progress(100, "run", "second", since=100), before(20, 100), 20).again
    assert not decide(here, before(1, 2, 3), 3).again and decide(here, before(1, 2), 3).again
    assert not decide(here, before(1), 3, count=3).again  # by Slurm itself, or by hand


def test_progress_takes_time_and_not_single_steps() -> None:
    """Starts that are signalled at once make a step each, and a checkpoint of it."""

    def answer(*shares: float | None):
        before = [(number, "first") for number in range(len(shares) - 1)]
        return decide(Progress(100, "run", "first"), before, 20, None, shares)

    assert answer(0.01).again and answer(0.01, 0.01, 0.01).again
    assert not answer(0.5, 0.01, 0.01, 0.0, 0.09).again
    assert "have trained for less than 10 % of their time" in answer(0.0, 0.0, 0.0, 0.0).reason
    assert answer(0.0, 0.0, 0.0, 0.2).again and answer(0.0, 0.2, 0.0, 0.0).again
    assert answer(0.0, 0.0, 0.0, None).again  # unknown


def test_the_share_of_time_is_read_from_results_and_written_down(tmp_path: Path) -> None:
    answers = []
    for mark in range(4):
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        whole(tmp_path, mark + 1)
        (tmp_path / "REQUEUE").touch()
        (tmp_path / "result.json").write_text('{"train_s": 0.1, "wall_s": 20.0}')
        answers.append(may_requeue(tmp_path))
    assert [answer.again for answer in answers] == [True, True, True, False]


@pytest.mark.parametrize(
    ("limit_s", "lead_s"), [(0, 300), (14400, 300), (1500, 300), (600, 120), (300, 60), (120, 30)]
)
def test_the_lead_follows_the_limit(limit_s: int, lead_s: int) -> None:
    assert lead(limit_s, 300) == lead_s
    text = render(Script("single-node", time=f"0:{limit_s // 60}:{limit_s % 60}"))
    assert f"--signal=B:USR1@{lead_s} --requeue" in text


CLOCK = """
date() { echo "$NOW"; }
sleep() { echo "in $1 s" >>"$TOLD"; }
kill() { echo "$1" >>"$TOLD"; }
requeue() { echo requeue >>"$TOLD"; }
nothing_runs() { echo "nothing runs" >>"$TOLD"; exit 75; }
"""


@pytest.mark.parametrize(
    ("limit_s", "after_s", "number", "told"),
    [
        (300, 2, "USR1", "in 238 s -USR1"),  # at the start of a job in a debug queue, whose script has 300 s
        (300, 2, "TERM", "nothing runs"),  # a preemption
        (300, 239, "USR1", "nothing runs"),  # put off until now
        (900, 599, "USR1", "in 121 s -USR1"),
        (900, 200, "USR1", "nothing runs"),  # somebody's own
        (14400, 14100, "USR1", "nothing runs"),
        (14400, 7, "USR1", "nothing runs"),
    ],
)
def test_a_signal_that_comes_too_early_for_a_short_limit_is_put_off(
    tmp_path: Path, limit_s: int, after_s: int, number: str, told: str
) -> None:
    known = {"@signal_s@": "300", "@least_lead_s@": "30", "@least_s@": "90", "@least_minutes@": "2"}
    limit = LIMIT
    for name, value in known.items():
        limit = limit.replace(name, value)
    env = {"NOW": str(1000 + after_s), "TOLD": str(tmp_path / "told"), "PATH": "/usr/bin:/bin"}
    env |= {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": str(1000 + limit_s)}
    hear = "now=1; on_signal" if number == "TERM" else "on_signal"
    text = f"set -euo pipefail\nsignals=0 now=0\n{limit}{script_parts.SIGNALS}{CLOCK}{hear}\nwait\n"
    subprocess.run(["bash", "-c", text], env=env, capture_output=True)
    assert " ".join((tmp_path / "told").read_text().split("\n")).strip() == told


WAITS = "until [[ $(cut -d ' ' -f 3 /proc/$$/stat) != R ]]; do :; done"  # the script does
RANK = f"""
trap 'exit 75' USR1
{WAITS.replace("$$", "$PPID")}
kill -USR1 $PPID
read -r _ <fifo # it has been put off
{WAITS.replace("$$", "$PPID")}
kill -USR1 $PPID
for _ in {{1..200}}; do sleep 0.05; done
"""
# A step that has the script signalled, and ends after that.
STEP = f"""
srun() {{
    {WAITS}
    kill -USR1 $$
    read -r _ <fifo
    {WAITS}
    echo "the step ends"
}}
"""


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ('run bash -c "$RANK" >/dev/null || echo "ended with $?"', "ended with 75\n"),
        ("on_each n1 -- doctor && echo 'and its code is 0'", "the step ends\nand its code is 0\n"),
        ("ask_each n1; echo 'and then this'", "the step ends\nand then this\n"),
    ],
)
def test_a_script_waits_on_after_a_signal_that_was_put_off(tmp_path: Path, what: str, told: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    put_off = "note() { :; }\nput_off() { ((heard == 1)) && echo >fifo; }\n"
    parts = f"{script_parts.SIGNALS}{script_parts.EACH}{script_parts.CHECK_NODES}{STEP}"
    text = f"set -euo pipefail\nsignals=0 now=0 RUN_DIR=. MPITRAIN=() DOCTOR=()\n{put_off}{parts}listen\n{what}\n"
    env = {"RANK": RANK, "PATH": "/usr/bin:/bin"}
    with open(tmp_path / "out", "w") as out:  # a pipe would stay open while the script's helpers sleep
        subprocess.run(["bash", "-c", text], cwd=tmp_path, env=env, stdout=out, timeout=60)
    assert (tmp_path / "out").read_text() == told


# Writes what a run leaves behind, and goes on for ever where it is to.
OUTLIVING = """#!/bin/bash
printf '{\n  "exit_code": %d,\n  "ranks": [{\n    "exit_code": 9}]}' "$1" >result.json
if (($2)); then while :; do sleep 0.1; done; fi
exit 1
"""


@pytest.mark.parametrize(
    ("code", "waits_on", "ends_with"),
    [(0, True, 0), (75, True, 75), (0, False, 1)],
    ids=["trained", "to-be-requeued", "what-ends-by-itself"],
)
def test_an_srun_that_outlives_its_ranks_is_ended(tmp_path, code, waits_on, ends_with):
    (tmp_path / "srun").write_text(OUTLIVING)
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "hosts").touch()
    os.utime(tmp_path / "hosts", (1, 1))
    body = het_parts.BODY.partition("outlived &")
    parts = f"{script_parts.SIGNALS}{het_parts.OUTLIVED}"
    begin = (
        f"set -euo pipefail\nsignals=0 now=0 rc=0 RUN_DIR=. MPITRAIN=() LAUNCH=(./srun {code} {waits_on:d})\n"
    )
    names = "SERVER_HOSTS=(n1) WORKER_HOSTS=(n2) servers=1 workers=1 WORKERS=1 cores=1 BIND=() train=()\n"
    ways = 'note() { :; }\nfinish() { exit "$1"; }\n'
    env = {"PATH": "/usr/bin:/bin", "SRUN_GRACE_S": "0.1" if waits_on else "60", "SRUN_LOOK_S": "0.1"}
    with open(tmp_path / "out", "w+") as out:
        ended = subprocess.run(
            ["bash", "-c", f"{begin}{names}{ways}{parts}{''.join(body[1:])}"],
            cwd=tmp_path, env=env, stdout=out, stderr=out, timeout=60, check=False,
        )  # fmt: skip
    assert ended.returncode == ends_with
    assert ("srun still waits" in (tmp_path / "out").read_text()) == waits_on


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_function_of_a_script_returns_what_stood_before_a_signal(kind: str) -> None:
    """In a trap, and in what it calls, a bare `return` gives the code of what the signal has interrupted, and `set -e`
    then ends the script."""
    assert not re.findall(r"\breturn(?=\s*(?:;|$))", render(Script(kind)), re.MULTILINE)


def test_a_limit_that_is_too_short_ends_the_script_before_anything_starts() -> None:
    text = render(Script("single-node"))
    limit = text[text.index("left=0 LEAD=") : text.index("export MPITRAIN_LEAD_S")]
    env = {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1060", "PATH": "/usr/bin:/bin"}
    run = subprocess.run(["bash", "-c", limit], env=env, capture_output=True, text=True)
    assert run.returncode == 2 and "within a limit of 60 s" in run.stderr
    env["SLURM_JOB_END_TIME"] = "1120"
    assert subprocess.run(["bash", "-c", limit], env=env).returncode == 0


@pytest.mark.parametrize(
    ("times", "known"),
    [
        ("StartTime=2026-01-01T10:00:00 EndTime=2026-01-01T10:10:00 Deadline=N/A", "600 lead 120"),
        ("StartTime=2026-01-01T10:00:00 EndTime=Unknown Deadline=N/A", "0 lead 300"),  # no limit
        ("", "0 lead 300"),  # no such program, or no such job
    ],
)
def test_a_slurm_that_sets_no_times_is_asked_for_them(tmp_path: Path, times: str, known: str) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "   RunTime=00:00:01 TimeLimit=00:10:00"\necho "   {times}"\n')
    scontrol.chmod(0o755)
    text = render(Script("single-node"))
    limit = text[text.index("left=0 LEAD=") : text.index("put_off()")]
    told = 'echo "$limit lead $MPITRAIN_LEAD_S"; env | grep -c ^SLURM_JOB_.*_TIME || true'
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    run = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{limit}{told}"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split("\n")[:2] == [known, "2" if known.startswith("6") else "0"]


def test_a_rank_asks_by_itself_where_a_checkpoint_takes_longer_than_the_lead() -> None:
    env = {"MPITRAIN_LEAD_S": "300", "SLURM_JOB_END_TIME": "10000"}
    assert not needs_now(100.0, 9999.0, env)  # the script asks
    assert not needs_now(200.0, 9569.0, env) and needs_now(200.0, 9571.0, env)
    assert not needs_now(200.0, 9999.0, {"SLURM_JOB_END_TIME": "10000"})  # not in a script of ours


def test_what_had_no_chance_to_write_a_checkpoint_runs_again_a_few_times() -> None:
    assert decide_without_checkpoint("not started", [], 20).reason.startswith(
        "restart 1 of at most 20: it was asked"
    )
    assert decide_without_checkpoint("node died", ["not started"] * 2, 20).again
    answer = decide_without_checkpoint("not started", ["not started", "node died", "not started"], 20)
    assert not answer.again and "ask for more time" in answer.reason
    assert decide_without_checkpoint("not started", ["not started"] * 3 + ["checkpointed"], 20).again
    assert not decide_without_checkpoint("not started", [], 4, count=4).again


def test_restarts_without_a_checkpoint_are_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        assert may_requeue(tmp_path, cause="not started").again
    assert not may_requeue(tmp_path, cause="not started").again
    (tmp_path / "checkpoints").mkdir()
    whole(tmp_path, 64)  # one of them has made progress
    assert may_requeue(tmp_path, cause="node died").reason.startswith("restart 4 of at most 20: the node")
    (tmp_path / "REQUEUE").touch()
    assert may_requeue(tmp_path).again  # the restart before was not of this checkpoint's
    monkeypatch.setenv("SLURM_RESTART_COUNT", "20")
    assert "restarted 20 times" in may_requeue(tmp_path, cause="node died").reason


def whole(run_dir: Path, mark: int) -> None:
    (run_dir / f"checkpoints/{mark:012d}").mkdir(exist_ok=True)
    record = '{"parts": ["shard-0"], "run": "r", "attempt": "a"}'
    (run_dir / f"checkpoints/{mark:012d}/shard-0.json").write_text(record)


def test_a_log_of_restarts_that_cannot_be_written_is_told_and_the_job_not_requeued(tmp_path: Path) -> None:
    (tmp_path / "REQUEUE").touch()
    (tmp_path / "checkpoints").mkdir()
    whole(tmp_path, 64)
    (tmp_path / "restarts.jsonl").mkdir()
    answer = may_requeue(tmp_path)
    assert not answer.again and "restarts.jsonl cannot be written: Is a directory" in answer.reason


def test_requeues_are_written_down_and_compared(tmp_path: Path) -> None:
    assert "has ended by itself" in may_requeue(tmp_path).reason
    (tmp_path / "REQUEUE").touch()
    assert not may_requeue(tmp_path).again
    for name in ("000000000064", "notes", "9" * 20, "000000000900"):  # the last one was never finished
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    whole(tmp_path, 64)
    assert may_requeue(tmp_path).reason == "restart 1 of at most 20, from 64 samples"
    assert "no progress" in may_requeue(tmp_path).reason
    whole(tmp_path, 128)
    with (tmp_path / "restarts.jsonl").open("a") as log:
        log.write("[1]\n" + "[" * 10**5 + '\n{"again": true}\n{"again": true, "samp')  # torn
    assert may_requeue(tmp_path).reason == "restart 2 of at most 20, from 128 samples"
    assert "no progress" in may_requeue(tmp_path).reason  # nor was the answer lost
    told = describe(tmp_path)
    assert (
        "start it again with --resume auto" in told and "at 128 samples" in told and "restarts    2" in told
    )


def test_status_of_what_has_ended_and_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run directory"):
        describe(tmp_path / "absent")
    assert "no result" in describe(tmp_path)
    (tmp_path / "result.json").write_text(
        '{"status": "missed", "exit_code": 3, "metrics": {"accuracy": 0.5}, "failure": "too low"}'
    )
    (tmp_path / "failing_nodes.txt").write_text("n7\n")
    told = describe(tmp_path)
    assert (
        "status=missed, exit code 3 accuracy=0.5" in told
        and "failure     too low" in told
        and "unfit       n7" in told
    )


def test_a_machine_without_the_packages_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.slurm import cluster

    monkeypatch.setattr(cluster.shutil, "which", lambda name: None if name == "slurmctld" else f"/bin/{name}")
    assert "slurmctld missing): apt-get install slurm-wlm munge" in str(cluster.why_not())


@pytest.mark.parametrize(
    "value", ["a\tb", "a\rb", "a'b", 'a"b', "a\\b", "a#b", "$(id)", "`id`", "a\x1b[2J", "a\u2028b"]
)
@pytest.mark.parametrize("name", ["partition", "name", "account", "constraint"])
def test_a_directive_is_one_word_whatever_is_set(value, name):
    with pytest.raises(UsageError, match=name):
        make("multi-node", **{name: value})


def test_what_a_script_hands_on_is_one_line():
    with pytest.raises(UsageError, match="options.*without line ends"):
        make("multi-node", job="a.py", options=("--lr", "1\n#SBATCH --uid=0"))
    with pytest.raises(UsageError, match="image"):
        render_site("openmpi", "a\tb")
