"""Measure the libraries that users would pick beside ours: `make opponents`, one environment on the disk at a time.

    python benchmarks/opponents/campaign.py [--only lance zarr] [-- --rounds 7 --record]

Of each library of `reading.py` an environment is made from the file of its name (`environments/`; h5py and torch are in
ours), the question is asked with it, and the environment is removed. What comes after `--` goes to `reading.py`. A
library that cannot be installed or does not run is named, with the last line that was said, and the others go on.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from reading import LIBRARIES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "opponents"


def failure_of(command: list[str]) -> str:
    """The last line of a command that has failed; empty if it has not."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""


def measure(name: str, words: list[str]) -> str:
    """Why a library was not measured, if so."""
    folder, needed = BUILD / name, HERE / "environments" / f"{name}.txt"
    try:
        if needed.exists():
            pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
            if why := failure_of([*pip, "--upgrade", "--target", str(folder), "-r", str(needed)]):
                return f"not installed: {why}"
        return failure_of([sys.executable, str(HERE / "reading.py"), name, *words])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Go through the libraries; the exit code says whether all were measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=sorted(LIBRARIES), default=sorted(LIBRARIES))
    parser.add_argument("words", nargs="*", help="after --: what reading.py is told")
    options = parser.parse_args()
    failed = False
    for name in options.only:
        print(f"{name}:", flush=True)
        if why := measure(name, options.words):
            failed = True
            print(f"{name}: {why}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
