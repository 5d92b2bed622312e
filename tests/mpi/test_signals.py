"""What a signal does is what the table in docs/fault-tolerance.md says, row by row for a sample that fits."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mpitrain.system.launched.end_requests import AGAIN_S
from tests.mpi.started import Started
from tests.ranks import ROOT, find_mpi, living, needs_open_mpi

INT, TERM, USR1, HUP, QUIT = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT
NUM_SAMPLES = 20 * 48


@pytest.fixture(autouse=True)
def have_mpi() -> None:
    find_mpi()


@pytest.fixture
def told_codes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], set[int]]:
    """Exit codes that the documentation's table allows for (receiver, signal, phase)."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "signals")
    signals = importlib.import_module("signals")
    rows = signals.read_table()
    return lambda to, name, phase: {
        code for row in signals.allowed(rows, to, name, {phase}) for code in row.codes
    }


@pytest.mark.parametrize(
    ("to", "name", "phase", "codes"),
    [
        ("launch", "TERM", "train", {75, 0, 3}),
        ("launch", "USR1", "train", {75, 0, 3}),
        ("launch", "HUP", "train", {75, 0, 3}),
        ("launch", "QUIT", "train", {0, 1, 3}),
        ("launch", "INT", "train", {130}),
        ("launch", "second TERM", "train", {143}),
        ("launch", "second INT", "start", {130}),
        ("launch", "TERM", "start", {75}),
        ("launch", "TERM", "validate", {75, 0, 3}),
        ("rank", "INT", "train", {130}),
        ("rank", "second TERM", "train", {143}),
        ("mpirun", "TERM", "train", {1}),
    ],
)
def test_the_table_says_what_the_tests_below_see(
    told_codes: Callable[[str, str, str], set[int]], to: str, name: str, phase: str, codes: set[int]
) -> None:
    assert told_codes(to, name, phase) == codes


def test_every_signal_has_a_row_for_every_receiver_and_phase_and_a_code_of_the_list(
    told_codes: Callable[[str, str, str], set[int]],
) -> None:
    for to in ("launch", "rank", "mpirun"):
        for name in ("INT", "TERM", "USR1", "HUP"):
            for phase in ("start", "train", "validate", "write", "end"):
                codes = told_codes(to, name, phase)
                assert codes and codes <= {0, 1, 2, 3, 4, 75, 130, 143}, (to, name, phase)


def test_term_to_a_launch_that_trains_leaves_a_checkpoint_and_75_and_the_next_goes_on(tmp_path: Path) -> None:
    run = Started(tmp_path / "a", "training")
    run.wait_until_at(0, 1)
    run.process.send_signal(TERM)
    assert run.code() == 75, run.told()
    told, mark = run.result(), run.checkpoint_at()
    assert (told["status"], told["samples"]) == ("requeue", mark) and 0 < mark < NUM_SAMPLES
    assert (
        f"--run-dir {run.run_dir} --resume auto goes on from the checkpoint at {mark} samples" in run.told()
    )
    assert "restart" not in run.told() and list(run.run_dir.glob(".launch-*")) == []
    again = Started(tmp_path / "a", "training", "--resume", "auto")
    assert again.code() == 0, again.told()
    assert (again.result()["resumed_from"], again.result()["samples"]) == (mark, NUM_SAMPLES)


def test_int_to_a_launch_that_trains_ends_it_without_a_checkpoint_and_nothing_starts_again(
    tmp_path: Path,
) -> None:
    """There are checkpoints from which it would have been started again."""
    run = Started(tmp_path / "a", "training", deaf=True)
    run.wait_until_at(0, 1)
    before = run.wait_until_written()
    run.process.send_signal(INT)
    assert run.code() == 130, run.told()
    assert run.checkpoint_at() == before > 0 and run.result() == {} and "restart" not in run.told()
    assert f"goes on from the checkpoint at {before} samples" in run.told()


def test_a_second_term_to_a_launch_ends_it_at_once_five_seconds_after_the_first(tmp_path: Path) -> None:
    """Its ranks do not listen. QUIT comes between, to the launch and to one rank, and both write their stacks."""
    run = Started(tmp_path / "a", "training", deaf=True)
    _, pid = run.wait_until_at(0, 1)
    for _ in range(2):
        run.process.send_signal(TERM)
        while not list(run.run_dir.glob(".launch-*/requests/stop")):
            time.sleep(0.02)
    heard_s = time.monotonic()  # the first, at the latest
    run.process.send_signal(QUIT)
    os.kill(pid, QUIT)
    stacks = [run.run_dir / "stacks" / f"rank-{rank}.txt" for rank in range(2)]
    while not all(path.exists() and "signalled.py" in path.read_text() for path in stacks):
        assert run.process.poll() is None, run.told()
        time.sleep(0.02)
    while "signalled.py" not in run.told() or time.monotonic() - heard_s < AGAIN_S:
        assert run.process.poll() is None, run.told()
        time.sleep(0.02)
    run.process.send_signal(HUP)
    assert run.code() == 143 and run.result() == {} and "restart" not in run.told(), run.told()


def test_term_to_a_launch_whose_ranks_start_ends_it_with_75_before_the_first_step(tmp_path: Path) -> None:
    run = Started(tmp_path / "a", "preparing", deaf=True)
    run.wait_until_at(1)
    run.process.send_signal(TERM)
    assert run.code() == 75 and run.checkpoint_at() == 0 and run.result() == {}, run.told()
    assert "asked to end before its first step" in run.told() and "no checkpoint was written" in run.told()


def test_term_to_a_launch_that_validates_for_the_last_time_lets_it_end(tmp_path: Path) -> None:
    run = Started(tmp_path / "a", "validating", "--epochs", "1", deaf=True)
    run.wait_until_at(0)
    run.process.send_signal(TERM)
    while not list(run.run_dir.glob(".launch-*/requests/stop")):
        time.sleep(0.02)
    (tmp_path / "a" / "go").touch()
    assert run.code() == 0 and run.result()["samples"] == 48, run.told()


def test_int_to_one_rank_ends_all_of_them_with_130(tmp_path: Path) -> None:
    run = Started(tmp_path / "a", "training", deaf=True)
    _, pid = run.wait_until_at(0, 1)
    before = run.wait_until_written()
    os.kill(pid, INT)
    assert run.code() == 130 and run.checkpoint_at() == before > 0, run.told()
    assert "rank 1 (worker, step 11): interrupted" in run.told() and "Traceback" not in run.told()


def test_a_second_term_to_one_rank_ends_all_of_them_with_143(tmp_path: Path) -> None:
    run = Started(tmp_path / "a", "training", deaf=True)
    _, pid = run.wait_until_at(0, 1)
    os.kill(pid, HUP)
    time.sleep(AGAIN_S + 1)  # the time is what is tried
    assert run.process.poll() is None, run.told()
    os.kill(pid, TERM)
    assert run.code() == 143 and "restart" not in run.told(), run.told()


def test_open_mpis_mpirun_kills_the_ranks_at_term_and_the_periodic_checkpoint_stands(tmp_path: Path) -> None:
    needs_open_mpi("is about Open MPI's mpirun")
    run = Started(tmp_path / "a", "training", deaf=True, by_mpirun=True)
    run.wait_until_at(0, 1)
    before = run.wait_until_written()
    run.process.send_signal(TERM)
    assert run.code() == 1 and run.checkpoint_at() == before > 0 and run.result() == {}, run.told()


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["allreduce()", "async(servers=1)"])
def test_a_job_that_was_suspended_as_a_whole_goes_on(tmp_path: Path, strategy: str) -> None:
    """As by `scontrol suspend`: for longer than the watchdog's time, in the middle of a step that others wait for."""
    run = Started(tmp_path / "a", "training", "--watchdog-s", "6", "--strategy", strategy, deaf=True)
    run.wait_until_at(1)
    stopped = [run.process.pid, *living(run.process.pid, run.ranks)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in stopped:
            os.kill(pid, number)
        time.sleep(30 if number == signal.SIGSTOP else 0)  # the time is what is tried
    (tmp_path / "a" / "go").touch()
    assert run.code() == 0 and run.result()["samples"] == NUM_SAMPLES, run.told()
    assert "no progress" not in run.told() and "restart" not in run.told()
