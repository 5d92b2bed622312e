"""What several threads of a process call at once, or for the first time."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from mpitrain.system.draws import LOCK

PROGRAMS = Path(__file__).parent / "programs"


def test_threads_read_texts_at_once_and_while_the_table_of_values_is_being_filled():
    ended = subprocess.run(
        [sys.executable, PROGRAMS / "first_use.py"], capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.splitlines() == ["0 of 8 threads failed"] * 2, ended.stdout + ended.stderr


def test_a_process_that_is_forked_while_a_thread_draws_can_draw_itself():
    """As a loader's processes are, beside replicas in other threads."""
    holds, forking, forked = threading.Event(), threading.Event(), threading.Event()

    def draw():
        with LOCK:
            holds.set()
            forking.wait()
            forked.wait(0.2)  # a fork that waits for nobody has happened by then

    thread = threading.Thread(target=draw)
    thread.start()
    holds.wait()
    forking.set()
    child = os.fork()
    if not child:
        os._exit(0 if LOCK.acquire(timeout=20) else 1)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert LOCK.acquire(blocking=False)
    LOCK.release()
