"""Contestants in processes of their own, each with libraries that no other has.

Invariants: a question is asked of all processes of a contestant before an answer is waited for, and who is not asked
sleeps on a pipe. Whatever a library prints goes to the standard error of the whole; answers have a pipe of their own.
This file imports nothing of the package: it runs wherever Python does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve()
_ROOT = _HERE.parents[2]
_ANSWERS = "MPITRAIN_BENCHMARK_ANSWERS"  # the descriptor of the pipe for answers


class Beside:
    """Processes of one contestant.

    Args:
        program: what each runs; it ends in `answer_with(...)`.
        settings: what the program is told with every question, and before the first one.
        libraries: a folder that goes before all that this Python has; None adds nothing.
        num_processes: torch's variables tell each of them its RANK, the WORLD_SIZE and where they meet.
        port: where they meet.
    """

    def __init__(
        self, program: Path, settings: Mapping[str, Any], libraries: Path | None, num_processes: int = 1, port: int = 0
    ):  # fmt: skip
        self._all: list[tuple[subprocess.Popen[str], Any]] = []
        places = [libraries, _HERE.parents[1], _ROOT, _ROOT / "tests" / "clients" / "programs" / "operators"]
        for rank in range(num_processes):
            reading, writing = os.pipe()
            env = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("OMPI_", "PMIX_", "PRTE_"))
            }
            env |= {
                "PYTHONPATH": os.pathsep.join(str(place) for place in places if place),
                _ANSWERS: str(writing), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes),
                "LOCAL_WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(program), json.dumps(settings)], stdin=subprocess.PIPE, text=True,
                env=env, pass_fds=[writing], stdout=sys.stderr, start_new_session=True,
            )  # fmt: skip
            os.close(writing)
            self._all.append((process, os.fdopen(reading)))

    def ask(self, **words: Any) -> Any:
        """What the first process answers, once all have.

        Raises:
            RuntimeError: one has ended instead.
        """
        for process, _ in self._all:
            assert process.stdin is not None
            process.stdin.write(json.dumps(words) + "\n")
            process.stdin.flush()
        answers = [answers.readline() for _, answers in self._all]
        for (process, _), answer in zip(self._all, answers, strict=True):
            if not answer:
                raise RuntimeError(f"{process.args} ended with {process.wait()} where it was asked {words}")
        return json.loads(answers[0])

    def close(self) -> None:
        """End the processes."""
        for process, answers in self._all:
            assert process.stdin is not None
            process.stdin.close()
            answers.close()
        for process, _ in self._all:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def settings() -> dict[str, Any]:
    """What a program has been told by who started it."""
    found: dict[str, Any] = json.loads(sys.argv[1])
    return found


def answer_with(answer: Callable[..., Any]) -> None:
    """Answer questions, one JSON line each, until there are no more."""
    with os.fdopen(int(os.environ[_ANSWERS]), "w") as answers:
        for line in sys.stdin:
            answers.write(json.dumps(answer(**json.loads(line))) + "\n")
            answers.flush()
