"""What a signal does to a launch of four ranks under MPICH is what it does under Open MPI, and a launch that is killed
leaves nobody and nothing behind under either."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.mpi.started import Started
from tests.ranks import is_intel

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
NUM_SAMPLES = 20 * 48


def started(folder: Path, phase: str, *words: str, deaf: bool = False) -> Started:
    return Started(folder, phase, *words, deaf=deaf, mpi="mpich", options=("-n", "4"))


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.extended)])
def test_a_killed_launch_has_its_ranks_write_a_checkpoint_and_end(tmp_path: Path, mpi: str) -> None:
    run = Started(tmp_path / "a", "training", mpi=mpi, options=("-n", "2"))
    run.wait_until_at(0, 1)
    run.process.kill()
    assert run.code() == -signal.SIGKILL
    assert run.result()["status"] == "requeue" and run.checkpoint_at() == run.result()["samples"], run.told()
    assert "the launch was killed" in run.told() and folders_left(run) == []


def folders_left(run: Started) -> list[Path]:
    """Of the launch, which are removed once its ranks have ended."""
    deadline_s = time.monotonic() + 60
    while (left := list(run.run_dir.glob(".launch-*"))) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return left


@pytest.mark.extended
def test_a_second_term_to_a_rank_ends_all_with_143_and_nothing_starts_again(tmp_path: Path) -> None:
    """Hydra returns the signal's number, mixed with that of the signal that it kills the others with."""
    run = started(tmp_path / "a", "training", deaf=True)
    pid = run.wait_until_at(0, 1, 2, 3)[1]
    run.wait_until_written()
    before = left_in_memory()
    os.kill(pid, TERM)
    while run.process.poll() is None:
        time.sleep(1.0)
        try:
            os.kill(pid, TERM)
        except ProcessLookupError:
            break
    assert run.code() == 143 and "restart" not in run.told(), run.told()
    assert left_in_memory() <= before, "what the ranks shared is there though nobody uses it"


def left_in_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("mpich_shm_*")}


def test_term_while_ranks_start_ends_the_launch_with_75(tmp_path: Path) -> None:
    """Hydra is asked to end by INT, which the ranks report as an end with 130."""
    run = started(tmp_path / "a", "preparing", deaf=True)
    run.wait_until_at(1)
    run.process.send_signal(TERM)
    assert run.code() == 75 and run.checkpoint_at() == 0 and run.result() == {}, run.told()


@pytest.mark.extended
@pytest.mark.parametrize("number", [TERM, USR1])
def test_a_launch_that_trains_leaves_a_checkpoint_and_75_and_the_next_goes_on(
    tmp_path: Path, number: int
) -> None:
    run = started(tmp_path / "a", "training")
    run.wait_until_at(0, 1, 2, 3)
    run.process.send_signal(number)
    assert run.code() == 75, run.told()
    told, mark = run.result(), run.checkpoint_at()
    assert (told["status"], told["samples"]) == ("requeue", mark) and 0 < mark < NUM_SAMPLES
    again = started(tmp_path / "a", "training", "--resume", "auto")
    assert again.code() == 0, again.told()
    assert (again.result()["resumed_from"], again.result()["samples"]) == (mark, NUM_SAMPLES)


@pytest.mark.extended
@pytest.mark.parametrize("to", ["launch", "rank"])
def test_int_ends_it_without_a_checkpoint_and_nothing_starts_again(tmp_path: Path, to: str) -> None:
    run = started(tmp_path / "a", "training", deaf=True)
    pid = run.wait_until_at(0, 1, 2, 3)[1]
    before = run.wait_until_written()
    os.kill(run.process.pid if to == "launch" else pid, INT)
    assert run.code() == 130, run.told()
    assert run.checkpoint_at() == before > 0 and run.result() == {} and "restart" not in run.told()


@pytest.mark.extended
def test_a_killed_rank_has_the_launch_start_again(tmp_path: Path) -> None:
    run = started(tmp_path / "a", "training", deaf=True)
    pid = run.wait_until_at(0, 1, 2, 3)[1]
    run.wait_until_written()
    os.kill(pid, signal.SIGKILL)
    assert run.code() == 0 and run.result()["samples"] == NUM_SAMPLES, run.told()
    code = 255 if is_intel("mpich") else 137  # Intel's does not say of which signal
    assert f"exit code {code}" in run.told() and "restart 1" in run.told()
