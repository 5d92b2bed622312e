"""Measure the libraries that users would pick beside ours: `make opponents`, one environment on the disk at a time.

    python benchmarks/opponents/campaign.py [--questions sweeps] [--only ray] [-- --rounds 7 --record]

Of each library of a question (`opponents.py`) an environment is made from the file of its name (`environments/`; what
has none is in ours), the question is asked with it, and the environment is removed. What comes after `--` goes to the
questions. A library that cannot be installed or does not run is named, with the last line that was said, and the others
go on.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.measurement import ROOT
from opponents import ENVIRONMENTS, HERE, NUM_RANKS, OPPONENTS


def failure_of(command: list[str]) -> str:
    """The last line of a command that has failed; empty if it has not."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""


def asking(question: str, name: str, words: list[str]) -> list[str]:
    """The command that asks a question of a library."""
    launch = ["-m", "mpitrain", "launch", f"-n{NUM_RANKS[question]}"] if question in NUM_RANKS else []
    return [sys.executable, *launch, str(HERE / f"{question}.py"), name, *words]


def measure(question: str, name: str, words: list[str]) -> str:
    """Why a library was not measured, if so."""
    folder, needed = ENVIRONMENTS / name, HERE / "environments" / f"{name}.txt"
    try:
        if needed.exists():
            pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
            if why := failure_of([*pip, "--upgrade", "--target", str(folder), "-r", str(needed)]):
                return f"not installed: {why}"
        return failure_of(asking(question, name, words))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Go through questions and libraries; the exit code says whether all were measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted({name for found in OPPONENTS.values() for name in found})
    parser.add_argument("--questions", nargs="+", choices=sorted(OPPONENTS), default=list(OPPONENTS))
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="of their libraries")
    parser.add_argument("words", nargs="*", help="after --: what the questions are told")
    options = parser.parse_args()
    failed = False
    for question in options.questions:
        for name in sorted(OPPONENTS[question].keys() & set(options.only)):
            print(f"{question}, {name}:", flush=True)
            if why := measure(question, name, options.words):
                failed = True
                print(f"{question}, {name}: {why}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
