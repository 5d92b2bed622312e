"""What signals to a launch mean, when a launch is given up, and that it then ends."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.launch.command import relaunch
from mpitrain.launch.supervision import Outcome, Requests, Supervisor, died_early, launch_folder
from mpitrain.launch.watch import Watch
from mpitrain.system.launched import rank_status
from mpitrain.system.launched.rank_status import ENDED, IMPORTING, READY, STARTED, STARTING_MPI, RankStatus
from mpitrain.system.launched.status_slots import Slot, path_of
from mpitrain.system.processes import identity

PROGRAMS = Path(__file__).parent / "programs"

INT, TERM, USR1, HUP, QUIT = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT


@pytest.mark.parametrize(
    ("numbers", "abort", "at_once"),
    [
        ([], 0, False),
        ([TERM], 0, False),
        ([HUP], 0, False),
        ([USR1, USR1, USR1], 0, False),
        ([USR1, TERM], 0, False),  # Slurm's, some minutes before the limit and at the limit
        ([INT], 130, False),
        ([INT, INT], 130, True),
        ([TERM, TERM], 143, True),
        ([HUP, TERM], 143, True),
        ([TERM, HUP], 143, True),
        ([TERM, INT], 130, False),
        ([INT, TERM], 130, True),
        ([INT, USR1], 130, False),
        ([INT, QUIT], 130, False),
        ([TERM, QUIT, QUIT], 0, False),
        ([TERM, TERM, INT], 143, True),
    ],
)
@pytest.mark.parametrize("every_s", [1.0, 5.0])
def test_signals_to_a_launch(
    numbers: list[int], abort: int, at_once: bool, every_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, and inside a batch job, where a preemption sends TERM twice, as a closing terminal does HUP."""
    requests = Requests()
    for index, number in enumerate(numbers):
        requests.hear(number, 100.0 + every_s * index)
    if abort == 143 and every_s < 5.0:
        abort, at_once = (130, False) if INT in numbers else (0, False)
    asked = [number for number in numbers if number != QUIT]
    assert (requests.stop, requests.abort, requests.at_once) == (bool(asked), abort, at_once)
    assert requests.num_quits == len(numbers) - len(asked)


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"])
def test_no_second_term_ends_a_launch_inside_a_batch_job(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "17")
    requests = Requests()
    for at_s in (0.0, 0.5, 5.0, 60.0):
        requests.hear(TERM, at_s)
    assert requests.stop and not requests.abort and not requests.at_once


def test_stacks_are_asked_of_every_rank_as_often_as_quit_comes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, quits = Requests(), iter([1, 0, 1, 0])
    monkeypatch.setattr("mpitrain.launch.supervision.LOOK_EVERY_S", 0.0)
    with launch_folder(tmp_path, True) as folder:
        assert folder is not None
        rank_status.open_folder(folder, 1.0)
        ranks = [rank_status.Reporter(folder, rank) for rank in range(2)]

        def ended(_: object) -> int | None:
            for rank in ranks:
                rank.look()
            number = next(quits, None)
            if number:
                requests.hear(QUIT)
            return 0 if number is None else None

        monkeypatch.setattr("mpitrain.launch.supervision._ended", ended)
        supervisor = Supervisor("openmpi", requests, folder, trains=True, stacks=str(tmp_path / "stacks"))
        assert supervisor._watch_over(None).code == 0  # type: ignore[arg-type]
    for rank in range(2):
        text = (tmp_path / "stacks" / f"rank-{rank}.txt").read_text()
        assert text.count("SIGQUIT to its launch") == 2 and "in look" in text
    assert capfd.readouterr().err.count("the ranks write their stacks to") == 2


def test_the_callers_signal_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (INT, TERM, USR1, HUP, QUIT)]
    with Requests():
        assert before != [signal.getsignal(number) for number in (INT, TERM, USR1, HUP, QUIT)]
    assert before == [signal.getsignal(number) for number in (INT, TERM, USR1, HUP, QUIT)]


# ---- nothing is started again


def write_checkpoint(run_dir: Path, mark: int) -> None:
    folder = run_dir / "checkpoints" / f"{mark:012d}"
    folder.mkdir(parents=True)
    (folder / "shard-0.json").write_text(json.dumps({"parts": ["shard-0"], "run": "a", "attempt": "b"}))


@pytest.mark.parametrize(
    ("number", "code"), [(INT, 130), (TERM, 75), (HUP, 75), (USR1, 75)], ids=["INT", "TERM", "HUP", "USR1"]
)
def test_after_a_signal_nothing_is_started_again(tmp_path: Path, number: int, code: int) -> None:
    """The run fails with a newer checkpoint each time, and a signal comes during its second start."""
    requests, starts = Requests(), []

    def once(more: list[str]) -> Outcome:
        starts.append(more)
        write_checkpoint(tmp_path, len(starts))
        if len(starts) == 2:
            requests.hear(number)
        return Outcome(1)

    assert relaunch(once, tmp_path, 9, requests) == code
    assert starts == [[], ["--resume", "auto"]]


@pytest.mark.parametrize("code", [0, 2, 3, 4, 75, 130, 143])
def test_such_an_end_is_final(tmp_path: Path, code: int) -> None:
    def once(more: list[str]) -> Outcome:
        write_checkpoint(tmp_path, 1)
        return Outcome(code if not more else 99)

    assert relaunch(once, tmp_path, 3, Requests()) == code


# ---- when a launch is given up


def status(rank: int, state: str = READY, host: str = "a", beat: int = 1, **more: object) -> RankStatus:
    """Of a rank whose process cannot be seen from here."""
    return RankStatus(rank, host, "elsewhere:1:1:1", state, beat=beat, **more)  # type: ignore[arg-type]


def told(*statuses: RankStatus) -> dict[int, RankStatus]:
    return {one.rank: one for one in statuses}


def watch(num_ranks: int = 3, **options: object) -> Watch:
    return Watch(num_ranks, **({"owed": READY, "start_timeout_s": 60.0, "host_timeout_s": 20.0} | options))  # type: ignore[arg-type]


def after(found: Watch, seconds: int, statuses: dict[int, RankStatus]) -> str:
    """What `found` says when it has looked every second at ranks that say nothing new."""
    for second in range(seconds):
        if why := found.look(float(second), statuses):
            return why
    return ""


@pytest.mark.parametrize(
    ("statuses", "names"),
    [
        # rank 2 is stopped while it imports, the others wait for it in MPI_Init
        (
            told(status(0, STARTING_MPI), status(1, STARTING_MPI), status(2, IMPORTING, host="b")),
            "rank 2 on host b",
        ),
        (
            told(status(0, STARTING_MPI), status(2, STARTING_MPI)),
            "rank 1 (nothing was heard of it; the others",
        ),
        # rank 1 is busy with the job file, the others wait for it
        (
            told(status(0, STARTED, waits=True), status(1, STARTED), status(2, STARTED, waits=True)),
            "rank 1 on host a (preparing)",
        ),
        (told(), "rank 0 (nothing was heard of it"),
    ],
)
def test_who_does_not_begin_to_train_is_named(statuses: dict[int, RankStatus], names: str) -> None:
    assert after(watch(), 61, statuses) == ""
    why = after(watch(), 62, statuses)
    assert why.startswith(names) and "did not begin to train within 60 s (--start-timeout-s)" in why
    assert after(watch(start_timeout_s=0.0), 999, statuses) == ""


def test_who_trains_or_has_left_began_in_time() -> None:
    ranks = told(status(0), status(1), status(2, ENDED, code=2))
    assert after(watch(host_timeout_s=0.0), 999, ranks) == ""


def test_a_script_owes_nothing_until_one_of_its_ranks_starts_mpi() -> None:
    found = watch(owed=STARTED)
    assert after(found, 999, {}) == ""
    gone = dataclasses.replace(status(1, IMPORTING), process=identity().rsplit(":", 1)[0] + ":1")
    assert after(watch(owed=STARTED), 999, told(status(0, IMPORTING), gone)) == "", "it needs no MPI"
    waits = told(status(0, STARTING_MPI))
    assert [found.look(999.0 + second, waits) for second in range(60)] == [""] * 60
    assert found.look(1060.0, waits).startswith("rank 1")


def test_a_rank_that_dies_before_it_trains_is_noticed_where_it_can_be_seen() -> None:
    child = subprocess.Popen(["sleep", "600"])
    process = identity(child.pid)
    ranks = told(status(0, STARTING_MPI), dataclasses.replace(status(1, IMPORTING), process=process))
    found = watch(2)
    assert after(found, 10, ranks) == ""
    child.kill()
    child.wait()
    assert found.look(10.0, ranks) == found.look(15.0, ranks) == "", "its launcher may be ending the job"
    assert found.look(16.0, ranks) == "rank 1 on host a (importing) died before it began to train"


def silent(found: Watch, seconds: int, moving: dict[int, RankStatus], dead: dict[int, RankStatus]) -> str:
    for second in range(seconds):
        living = {rank: dataclasses.replace(one, beat=second) for rank, one in moving.items()}
        if why := found.look(float(second), living | dead):
            return why
    return ""


@pytest.mark.parametrize(("others_need_s", "patience_s"), [(2.0, 60.0), (50.0, 150.0)])
def test_a_rank_that_died_before_its_first_words_is_missed_once_all_others_wait(
    others_need_s: float, patience_s: float
) -> None:
    """As the file of a rank that was killed before it had imported anything would show it: there is none."""
    watched = watch(3, start_timeout_s=600.0, host_timeout_s=0.0)
    came = told(status(0, STARTING_MPI), status(1, STARTING_MPI))
    one_works = told(status(0, IMPORTING), status(1, STARTING_MPI))
    end_s = others_need_s + patience_s
    times = [
        (second, one_works if second < others_need_s else came) for second in range(0, int(end_s) + 1, 2)
    ]
    assert all(watched.look(float(at_s), there) == "" for at_s, there in times)
    reason = watched.look(end_s + 1, came)
    assert reason.startswith("rank 2 (nothing was heard of it") and "died" in reason and watched.died


def test_nobody_is_missed_while_one_of_the_others_works_or_in_a_script() -> None:
    waiting = status(0, STARTING_MPI)
    for owed, there in ((READY, told(waiting, status(1, STARTED))), (STARTED, told(waiting))):
        watched = watch(3, owed=owed, start_timeout_s=600.0, host_timeout_s=0.0)
        assert all(watched.look(float(at_s), there) == "" for at_s in range(0, 590, 5))


def test_a_host_of_which_nothing_is_heard_ends_the_launch_and_is_named() -> None:
    moving, dead = told(status(0)), told(status(1, host="b"), status(2, host="b"))
    assert silent(watch(), 21, moving, dead) == ""
    assert silent(watch(), 30, moving, dead).startswith("host b (rank 1, 2) has been silent for 21 s")
    assert silent(watch(host_timeout_s=0.0), 999, moving, dead) == ""
    assert silent(watch(2), 999, told(status(0), status(1)), {}) == "", "who lives may wait for long"
    left = told(status(1, ENDED, host="b"), status(2, ENDED, host="b"))
    assert silent(watch(), 999, moving, left) == "", "its ranks have ended"


def test_a_run_that_goes_on_without_a_host_is_left_alone() -> None:
    found = watch(2)
    for second in range(999):
        moving = told(status(0, beat=second, progress=float(second)))
        assert found.look(float(second), moving | told(status(1, host="b"))) == ""


def test_ranks_that_are_there_and_do_not_stand_still_are_no_silent_host() -> None:
    """One that cannot say so, such as one in a long call into a library that lets no thread run."""
    here = dataclasses.replace(status(0), process=identity())
    assert after(watch(1), 999, told(here)) == ""


def test_a_launch_that_was_suspended_gives_its_ranks_their_time_again() -> None:
    found, ranks = watch(2), told(status(0), status(1, host="b"))
    assert after(found, 15, ranks) == ""
    for second in range(16, 36):  # the clock has stood for an hour
        assert found.look(float(second), ranks, 1) == ""
    assert found.look(37.0, ranks, 1).startswith("host a")


def test_a_file_that_cannot_be_read_for_a_moment_is_no_rank_that_is_gone() -> None:
    """Long after the time in which ranks had to begin."""
    found, ranks = watch(2, host_timeout_s=0.0), told(status(0), status(1))
    assert after(found, 100, ranks) == ""
    assert found.look(100.0, told(status(0))) == found.look(101.0, {}) == ""


def test_where_nobody_can_tell_anything_nobody_is_given_up(tmp_path: Path) -> None:
    """Ranks on other hosts cannot write their files; without the folder they cannot either."""
    found = watch(1, host_timeout_s=0.001)
    with launch_folder(tmp_path, True) as folder:
        assert folder is not None
        rank_status.open_folder(folder, 1.0)
        supervisor = Supervisor("openmpi", Requests(), folder, found)
        supervisor._statuses = told(status(0))
        assert supervisor._why_give_up(0.0) == ""
        assert supervisor._why_give_up(1.0).startswith("host a (rank 0) has been silent")
        rank_status.remove_folder(folder)
        assert supervisor._why_give_up(2.0) == "" and not found.silent


@pytest.mark.parametrize(
    ("num_ranks", "host_timeout_s", "beat_s"),
    [
        (4, 120.0, 10.0),
        (4, 20.0, 2.0),
        (4, 1.0, 0.5),
        (4, 0.0, 10.0),
        (2000, 120.0, 20.0),
        (99999, 120.0, 30.0),
    ],
)
def test_how_often_ranks_say_that_they_live(num_ranks: int, host_timeout_s: float, beat_s: float) -> None:
    assert rank_status.beat_s(num_ranks, host_timeout_s) == beat_s


def test_before_mpi_is_up_one_rank_of_a_node_looks_for_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    for number in ("", "0", "1"):
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", number)
        looks.append(rank_status.Reporter(tmp_path, 1).looks)
    assert looks == [True, True, False]


# ---- a rank that dies before the first step


@pytest.mark.parametrize(
    ("ranks", "code", "tolerant", "early", "names"),
    [
        # who is left has told its end
        (
            [status(0, ENDED, code=1), status(1, STARTED), status(2, ENDED, code=1)],
            1,
            True,
            True,
            "rank 1 on host a (preparing) died before the first step",
        ),
        (
            [status(0, ENDED, code=1), status(1, READY)],
            1,
            True,
            True,
            "rank 1 on host a (about to train) died",
        ),
        (  # rank 0 has ended because of rank 2, and the launcher has killed rank 1 then
            [status(0, ENDED, code=1, dead=[2]), status(1, STARTED), status(2, STARTED)],
            1,
            True,
            True,
            "rank 2 on host a (preparing) died before the first step",
        ),
        ([status(0, ENDED, code=1, step=3), status(1, READY)], 1, True, False, ""),
        ([status(0, ENDED, code=1), status(1, ENDED, code=1)], 1, True, False, ""),  # an error that was told
        ([status(0, ENDED, code=2), status(1, STARTED)], 1, True, False, ""),  # a mistake of the user's
        ([status(0, IMPORTING), status(1, IMPORTING)], 1, True, False, ""),  # all have met the same
        # the launcher has killed the others
        ([status(0, STARTED), status(1, STARTED)], 137, False, True, ""),
        ([status(0, STARTED)], 139, False, True, ""),
        (
            [status(0, STARTED)],
            128 + USR1,
            False,
            False,
            "",
        ),  # somebody wanted an end, before Python could hear it
        ([status(0, IMPORTING), status(1, IMPORTING)], 1, False, False, ""),  # an error of Python's
        ([status(0, STARTED), status(1, ENDED, code=1)], 137, False, False, ""),
        ([status(0), status(1)], 137, False, False, ""),  # it may be at any step
        ([status(0, STARTED), status(1, step=0)], 137, False, False, ""),
    ],
)
def test_who_died_before_the_first_step(
    ranks: list[RankStatus], code: int, tolerant: bool, early: bool, names: str
) -> None:
    found, told_who = died_early(told(*ranks), 2 if len(ranks) == 1 else len(ranks), code, tolerant)
    assert found is early and told_who.startswith(names) and bool(told_who) is bool(names)


def test_a_start_that_a_death_ended_before_the_first_step_is_tried_once_more_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts: list[list[str]] = []

    def once(more: list[str]) -> Outcome:
        starts.append(more)
        if len(starts) == 3:
            write_checkpoint(tmp_path, 100)
            return Outcome(1)
        return Outcome(1, early=True)

    assert relaunch(once, tmp_path, 9, Requests()) == 1 and starts == [[], []]
    assert "not started again: again a rank has died before the first step" in capsys.readouterr().err
    assert relaunch(once, tmp_path, 9, Requests()) == 1
    again = ["--resume", "auto"]
    assert starts[2:] == [[], again, again], "once after every progress"
    starts.clear()
    assert relaunch(once, tmp_path, 0, Requests()) == 1 and starts == [[]]


def test_under_faults_at_a_rate_a_start_without_progress_is_followed_by_another(tmp_path: Path) -> None:
    """Always the same run: what the starts before have left is not moved aside."""
    starts: list[list[str]] = []

    def once(more: list[str]) -> Outcome:
        starts.append(more)
        return Outcome(1, early=len(starts) < 3)

    again = ["--resume", "auto"]
    assert relaunch(once, tmp_path, 4, Requests(), insists=True) == 1
    assert starts == [[], again, again, again, again]
    assert relaunch(lambda more: Outcome(2), tmp_path, 4, Requests(), insists=True) == 2, (
        "a mistake of the user's"
    )


# ---- a launcher that is watched over


def test_a_run_directory_that_nobody_has_used_does_not_stay(tmp_path: Path) -> None:
    """The job file is wrong, for instance, which the ranks tell before they make it."""
    with launch_folder(tmp_path / "run", True) as folder:
        assert folder is not None and folder.parent == tmp_path / "run"
    assert list(tmp_path.iterdir()) == []
    with launch_folder(tmp_path / "run", True):
        (tmp_path / "run" / "run.json").touch()
    with launch_folder(tmp_path / "run", True):
        pass
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("numbers", "heard", "code"),
    [
        ([USR1, USR1, INT], ["SIGUSR1", "SIGUSR1", "SIGTERM"], 130),  # INT ends, whatever the script does
        ([INT, INT], ["SIGTERM"], 130),
        ([TERM], ["SIGTERM"], 143),  # nothing is known of a script that could end in order
        ([HUP], ["SIGTERM"], 143),
    ],
    ids=["USR1-USR1-INT", "INT-INT", "TERM", "HUP"],
)
def test_a_script_gets_usr1_and_is_ended_by_the_others(
    numbers: list[int], heard: list[str], code: int
) -> None:
    grace = "600" if numbers == [INT, INT] else "0.5"
    launch = subprocess.Popen(  # a session of its own has no terminal, so SIGINT is not the terminal's
        [sys.executable, PROGRAMS / "supervises.py", grace, PROGRAMS / "reports_signals.py"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert launch.stdout is not None
    try:
        assert launch.stdout.readline() == "ready\n"
        for number, name in zip(numbers, heard, strict=False):
            launch.send_signal(number)
            assert launch.stdout.readline() == f"{name}\n"
        for number in numbers[len(heard) :]:
            launch.send_signal(number)
        assert launch.wait(timeout=60) == code
    finally:
        if launch.poll() is None:
            os.killpg(launch.pid, signal.SIGKILL)
        launch.stdout.close()


def test_the_exit_code_comes_back() -> None:
    def run(code: str) -> int:
        return Supervisor("openmpi", Requests()).run(["/bin/sh", "-c", code], {"CODE": "75"}).code

    assert run("exit $CODE") == 75
    assert run("kill -TERM $$") == 128 + signal.SIGTERM


def test_a_launcher_that_does_not_end_after_the_result_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitrain.launch.supervision.RESULT_GRACE_S", 0.0)
    outcome = Supervisor("openmpi", Requests(), finished=lambda: True).run(["sleep", "600"], {})
    assert outcome.code == 0 and outcome.final and "after a complete result" in outcome.reason


def reported(folder: Path, told: RankStatus) -> None:
    """As a rank does it."""
    Slot(path_of(folder, "", "here")).write(json.dumps(dataclasses.asdict(told)))


def test_a_launcher_that_stays_after_its_last_rank_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks without a result to end the launch by: they have failed, and a host of the launcher's is gone."""
    monkeypatch.setattr("mpitrain.launch.supervision.RESULT_GRACE_S", 0.0)
    monkeypatch.setattr("mpitrain.launch.supervision.LOOK_EVERY_S", 0.1)
    with launch_folder(tmp_path, True) as folder:
        assert folder is not None
        rank_status.open_folder(folder, 1.0)
        for rank in range(2):
            reported(folder, status(rank, ENDED, code=rank))
        supervisor = Supervisor("openmpi", Requests(), folder, watch(2), trains=True)
        outcome = supervisor.run(["sleep", "600"], {})
    assert (outcome.code, outcome.final) == (1, False) and "after its last rank" in outcome.reason


def test_a_launcher_is_not_left_behind_when_watching_over_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(
        "mpitrain.launch.supervision.subprocess.Popen",
        lambda *words, popen=subprocess.Popen, **more: (children.append(popen(*words, **more)), children[0])[
            1
        ],
    )

    def fail() -> bool:
        raise OSError("the file system is away")

    with pytest.raises(OSError, match="away"):
        Supervisor("openmpi", Requests(), finished=fail).run(["sleep", "600"], {})
    assert children[0].poll() == -signal.SIGTERM


def test_a_request_is_not_looked_for_in_every_ranks_file_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times a second it would be, for as long as the run takes to write and to end."""
    looks, requests = [], Requests()
    requests.hear(USR1)
    monkeypatch.setattr(
        "mpitrain.launch.supervision.rank_status.read_all", lambda folder: looks.append(1) or {}
    )
    monkeypatch.setattr("mpitrain.launch.supervision._any_began", lambda told: True)
    polls = iter([None] * 50 + [0])
    monkeypatch.setattr("mpitrain.launch.supervision._ended", lambda child: next(polls))
    with launch_folder(tmp_path, True) as folder:
        assert folder is not None
        rank_status.open_folder(folder, 1.0)
        monkeypatch.setattr("mpitrain.launch.supervision.LOOK_EVERY_S", 600.0)
        Supervisor("openmpi", requests, folder, trains=True)._watch_over(None)  # type: ignore[arg-type]
    assert len(looks) == 2, "at the request, and at the end"


def test_a_rank_that_its_launcher_has_left_behind_is_ended(tmp_path: Path) -> None:
    left = subprocess.Popen(["sleep", "600"])
    with launch_folder(tmp_path, True) as folder:
        assert folder is not None
        rank_status.open_folder(folder, 1.0)
        reported(folder, RankStatus(0, "here", identity(left.pid), READY))
        assert Supervisor("openmpi", Requests(), folder).run(["/bin/true"], {}).code == 0
    assert left.wait(60) == -signal.SIGKILL


def test_a_request_before_the_first_step_ends_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpitrain.launch.supervision.UNHEARD_S", 0.0)
    requests = Requests()
    with launch_folder(tmp_path, True) as folder:
        assert folder is not None
        rank_status.open_folder(folder, 1.0)
        command = [
            "/bin/sh",
            "-c",
            f"while [ ! -e {folder}/requests/stop ]; do sleep 0.05; done; exec sleep 600",
        ]
        supervisor = Supervisor("openmpi", requests, folder, trains=True)
        monkeypatch.setattr(
            "mpitrain.launch.supervision.subprocess.Popen",
            lambda *words, popen=subprocess.Popen, **more: (popen(*words, **more), requests.hear(TERM))[0],
        )
        outcome = supervisor.run(command, {})
    assert (outcome.code, outcome.final) == (75, True) and "before its first step" in outcome.reason
    assert list(tmp_path.iterdir()) == [], "the folder is gone"
    assert supervisor.run(["/bin/false"], {}) == Outcome(75, final=True), "nothing is started after a request"
