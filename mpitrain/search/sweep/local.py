"""Several runs at a time on this host, each a `mpitrain launch` of its own.

Invariants: one thread waits for each run, and the main thread alone hears signals: it passes them on to every launch,
which knows what they mean (`launch/supervision.py`), and starts nothing more.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mpitrain.errors import EXIT_OK, EXIT_REQUEUE, EXIT_TARGET_MISSED
from mpitrain.launch.command import own_program
from mpitrain.launch.supervision import Requests
from mpitrain.search.sweep.check import Setup
from mpitrain.search.sweep.deal import Task
from mpitrain.search.sweep.journal import Dealer, Sweep
from mpitrain.search.sweep.runs import Proposer, Work
from mpitrain.system import background
from mpitrain.system.launched.launch_variables import usable_cores
from mpitrain.system.processes import identity

_LOOK_EVERY_S = 0.2
_OURS = re.compile(r"(?:\[[^\]]*\] ?)?mpitrain: (?:error: )?(.*)")  # a launcher may name the rank first


class Dealt(NamedTuple):
    """What became of the time: seconds from the first task to the last end, those in which each group of ranks (or
    each place for a run) had a task, and the exit code that a signal asks for (0 without one)."""

    elapsed_s: float
    busy_s: tuple[float, ...]
    code: int

    @property
    def idle_share(self) -> float:
        """Of the time of all groups."""
        whole = self.elapsed_s * len(self.busy_s)
        return max(0.0, 1 - sum(self.busy_s) / whole) if whole else 0.0


def default_parallel(ranks_per_run: int) -> int:
    """Runs at a time: so many that each rank has a GPU, or a core where there is none."""
    return max(1, (len(visible_gpus()) or usable_cores()) // ranks_per_run)


def visible_gpus() -> list[str]:
    """The accelerators of this host that can be dealt out, as the variable names them that hides them
    from a process."""
    from mpitrain.devices import accelerator

    name = accelerator.visible_variable(accelerator.kind() or "")
    if name is None:
        return []
    given = os.environ.get(name)
    if given is not None:
        return [one for one in given.split(",") if one.strip()]
    return [str(number) for number in range(accelerator.num_devices())]


def showing(gpus: list[str]) -> dict[str, str]:
    """What to set for a process to see these alone, if any."""
    from mpitrain.devices import accelerator

    name = accelerator.visible_variable(accelerator.kind() or "") if gpus else None
    return {} if name is None else {name: ",".join(gpus)}


def deal_locally(sweep: Sweep, setup: Setup, parallel: int, proposer: Proposer | None = None) -> Dealt:
    """Train what is left of a sweep, `parallel` runs at a time."""
    gpus = visible_gpus()
    num_ranks = setup.plan.ranks_per_run
    errors: list[BaseException] = []
    busy_s = [0.0] * parallel
    with Requests() as requests, Dealer(sweep) as dealer:
        launches = _Launches(setup.plan.job, num_ranks, parallel)

        def serve(place: int) -> None:
            def train(task: Task, words: list[str], log: Path) -> tuple[int, str]:
                devices = (
                    [gpus[(place * num_ranks + rank) % len(gpus)] for rank in range(num_ranks)]
                    if gpus
                    else []
                )
                return launches.run(words, log, devices, lambda pid: dealer.launched(task, identity(pid)))

            try:
                busy_s[place] = Work(
                    sweep, setup, dealer, train, lambda: requests.stop or bool(errors), proposer
                ).run()
            except BaseException as error:
                errors.append(error)

        began_s = time.monotonic()
        threads = [background.thread(f"sweep-{place}", serve, place) for place in range(parallel)]
        for thread in threads:
            thread.daemon = False  # an error here leaves no run without its journal
            thread.start()
        quits, sent = 0, None
        while any(thread.is_alive() for thread in threads):
            threads[0].join(_LOOK_EVERY_S) if threads[0].is_alive() else time.sleep(_LOOK_EVERY_S)
            if requests.num_quits > quits:
                quits = requests.num_quits
                launches.send(signal.SIGQUIT)
            number = signal.SIGINT if requests.abort else signal.SIGTERM
            if requests.stop and (number != sent or requests.at_once):
                sent = number
                launches.send(number, to_all=True)
    if errors:
        raise errors[0]
    code = requests.exit_code(EXIT_REQUEUE) if requests.stop else 0
    return Dealt(time.monotonic() - began_s, tuple(busy_s), code)


class _Launches:
    """The launches that are under way."""

    def __init__(self, job: str, num_ranks: int, parallel: int):
        self.command = own_program(["launch", f"-n{num_ranks}", "train", job])
        self.environment = dict(os.environ)
        threads = max(1, usable_cores() // (num_ranks * parallel))
        self.environment.setdefault("OMP_NUM_THREADS", str(threads))
        self._turn = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()
        self._sent: signal.Signals | None = None

    def run(
        self, words: list[str], log: Path, devices: list[str], launched: Callable[[int], None]
    ) -> tuple[int, str]:
        """Launch a run, report its process, and wait for its end; returns its exit code and the last thing that it has
        said."""
        environment = self.environment | showing(devices)
        with open(log, "ab") as out:
            at = out.tell()
            # in a session of its own: Ctrl-C reaches it through us, once
            child = subprocess.Popen(
                [*self.command, *words],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True,
            )  # fmt: skip
        with self._turn:
            self._children.add(child)
            if self._sent is not None:  # while it was being started
                child.send_signal(self._sent)
        try:
            launched(child.pid)
            code = child.wait()
        finally:
            with self._turn:
                self._children.discard(child)
        return code, "" if code in (EXIT_OK, EXIT_TARGET_MISSED) else last_words(log, at)

    def send(self, number: signal.Signals, to_all: bool = False) -> None:
        """Pass a signal on to those that are there, and `to_all` that will be."""
        with self._turn:
            self._sent = number if to_all else self._sent
            for child in self._children:
                if child.poll() is None:
                    child.send_signal(number)


def last_words(log: Path, at: int = 0) -> str:
    """The last line of ours in a log from there on, or the last line of all."""
    try:
        with open(log, "rb") as file:
            file.seek(max(at, os.fstat(file.fileno()).st_size - 2**16))
            lines = [
                line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()
            ]
    except OSError:
        return ""
    ours = [found[1] for line in lines if (found := _OURS.match(line))]
    return (ours or lines or [""])[-1][:300]
