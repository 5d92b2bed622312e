"""One job at a time in a run directory; and no lock that outlives its job."""

import json
import multiprocessing
import os
import signal
import socket
import threading

import pytest

from mpitrain.errors import OutputError, UsageError
from mpitrain.system.files import run_lock
from mpitrain.system.files.run_lock import LOCK_FILE, RunLock, _who_we_are

FORK = multiprocessing.get_context("fork")


def hold(run_dir, ready):
    RunLock(run_dir, "theirs").take()
    ready.set()
    signal.pause()


@pytest.fixture
def holder(tmp_path):
    ready = FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(60)
    yield process
    process.kill()
    process.join()


def test_a_second_job_is_told_host_and_process_and_a_killed_one_blocks_nobody(tmp_path, holder):
    told = f"in use by process {holder.pid} on host {socket.gethostname()}.*choose another run directory"
    with pytest.raises(UsageError, match=told) as error:
        RunLock(tmp_path, "ours").take()
    assert error.value.exit_code == 2
    RunLock(tmp_path, "ours").release()  # is not its own
    assert (tmp_path / LOCK_FILE).exists()
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet waited for
    lock = RunLock(tmp_path, "ours")
    lock.take()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.release()
    assert not list(tmp_path.iterdir())


def left(run_dir, **changes):
    """A lock that nobody touches."""
    (run_dir / LOCK_FILE).write_text(json.dumps({"attempt": "theirs", **_who_we_are(), **changes}))


def test_a_process_number_that_somebody_else_has_now_is_nobodys(tmp_path):
    left(tmp_path, pid=os.getppid(), began="1")
    lock = RunLock(tmp_path, "ours")
    lock.take()
    lock.release()


def test_a_requeued_slurm_job_knows_that_its_earlier_run_has_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(run_lock, "QUIET_S", 1e9)
    left(tmp_path, host="elsewhere", restart="0")
    lock = RunLock(tmp_path, "ours")
    lock.take()
    lock.release()


def test_another_rank_of_the_same_start_takes_over(tmp_path, holder):
    lock = RunLock(tmp_path, "theirs")
    lock.take()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.release()


@pytest.mark.parametrize("text", [None, b"", b"[" * 9000, b"[]", b'{"pid": -1, "host": "\\u001b[2J"}'])
def test_a_lock_of_another_host_or_a_torn_one_is_nobodys_once_it_is_quiet(
    tmp_path, monkeypatch, capsys, text
):
    monkeypatch.setattr(run_lock, "QUIET_S", 0.3)
    left(tmp_path, host="elsewhere", pid=4711)
    if text is not None:
        (tmp_path / LOCK_FILE).write_bytes(text)
    lock = RunLock(tmp_path, "ours")
    lock.take()
    told = capsys.readouterr().err
    assert "waiting to see whether it lives" in told and "\x1b" not in told
    assert text is not None or "process 4711 on host elsewhere" in told
    lock.release()


def test_a_lock_of_another_host_that_is_touched_is_somebodys(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "QUIET_S", 1e9)
    left(tmp_path, host="elsewhere", pid=4711)
    over = threading.Event()

    def touch():
        number = 0
        while not over.is_set():
            number += 1
            os.utime(tmp_path / LOCK_FILE, ns=(number, number))

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(UsageError, match="in use by process 4711 on host elsewhere"):
            RunLock(tmp_path, "ours").take()
    finally:
        over.set()
        thread.join()


def compete(run_dir, number, gate, got, done):
    gate.wait()
    try:
        RunLock(run_dir, f"one-{number}").take()
        got.put(number)
    except UsageError:
        got.put(-1)
    done.wait()  # nobody's lock becomes free meanwhile


@pytest.mark.parametrize("stale", [True, False])
def test_of_many_that_come_at_once_one_gets_it(tmp_path, stale):
    for trial in range(5):
        run_dir = tmp_path / str(trial)
        run_dir.mkdir()
        if stale:
            left(run_dir, pid=os.getppid(), began="1")
        gate, got, done = FORK.Barrier(4), FORK.Queue(), FORK.Event()
        jobs = [FORK.Process(target=compete, args=(run_dir, n, gate, got, done)) for n in range(4)]
        for job in jobs:
            job.start()
        numbers = [got.get(timeout=60) for _ in jobs]
        done.set()
        for job in jobs:
            job.join(60)
        assert sorted(numbers)[:3] == [-1] * 3 and max(numbers) >= 0


def test_the_guard_of_a_removal_is_taken_away_when_it_was_quiet_by_our_own_clock(tmp_path, monkeypatch):
    """Another host makes it right now, and its file server's clock is behind ours."""
    left(tmp_path, host="elsewhere", pid=4711)
    guard = tmp_path / f".{LOCK_FILE}.removing"
    guard.touch()
    os.utime(guard, (1, 1))
    lock = RunLock(tmp_path, "ours")
    seen = lock._look()
    lock._remove(seen)
    assert guard.exists()
    monkeypatch.setattr(run_lock, "QUIET_S", 0.0)
    lock._remove(seen)
    assert not guard.exists()


def test_a_holder_keeps_it_fresh_makes_it_again_and_learns_when_it_was_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "REFRESH_S", 0.0)
    lock = RunLock(tmp_path, "ours")
    lock._make()
    looks = []

    def look(timeout_s):
        path = tmp_path / LOCK_FILE
        looks.append(path.stat().st_mtime_ns if path.exists() else None)
        if len(looks) == 1:
            os.utime(path, ns=(1, 1))
        elif len(looks) == 2:
            path.unlink()
        elif len(looks) == 3:
            left(tmp_path, host="elsewhere", pid=4711)
        return False

    monkeypatch.setattr(lock._over, "wait", look)
    with pytest.raises(OutputError, match="taken over by process 4711 on host elsewhere"):
        lock._refresh()
    assert looks[1] > 1 and looks[2] is not None
    lock.release()
    assert (tmp_path / LOCK_FILE).exists()


def test_who_gives_the_lock_up_does_not_make_it_again(tmp_path, monkeypatch):
    """The thread that keeps it fresh finds no file any more, a moment after its release."""
    lock = RunLock(tmp_path, "ours")
    lock._make()
    waits = iter([False, True])
    monkeypatch.setattr(lock._over, "wait", lambda timeout_s: next(waits))
    lock.release()
    lock._refresh()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_link_that_leads_nowhere_is_refused_and_not_tried_for_ever(tmp_path):
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="lock is a link: remove it"):
        RunLock(tmp_path, "ours").take()


def test_what_is_no_file_is_refused_and_a_folder_that_cannot_be_written(tmp_path):
    os.mkfifo(tmp_path / LOCK_FILE)
    with pytest.raises(UsageError, match="lock cannot be read: it is no regular file; remove it"):
        RunLock(tmp_path, "ours").take()
    with pytest.raises(UsageError, match="cannot write .*nowhere/lock: No such file"):
        RunLock(tmp_path / "nowhere", "ours").take()
