"""`make gpu`: everything that wants a GPU, on one machine, within ten minutes, and one file to send.

    python -m tests.gpu [--minutes 10] [--simulated] [--results tests/gpu.txt]

Parts run one after the other, each in a session of its own that is ended at its limit, or at the end of the whole; what
was not run, or not to its end, is named. A part has passed where tests passed, none failed and none was skipped. The
file holds the machine, what MPI says of the device's memory, each part's outcome and time, and samples a second over
each way. `--simulated` rehearses all that on the accelerator of `tests/devices/simulated.cpp`: no GPU is needed, and
the file says so.

Exit codes: 0 passed; 1 something failed, or was not run to its end; 4 there is no accelerator, or something that the
tests import is missing. The standard library alone is imported here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "gpu.txt"
PASSED, FAILED, NO_DEVICE = 0, 1, 4
NEEDED = ("torch", "mpi4py", "numpy", "h5py", "safetensors", "pytest", "pytest_timeout", "hypothesis")
GRACE_S = 8.0  # to end in, of a part's limit
MOST_LINES = 20  # of what failed
PYTEST = ("-m", "pytest", "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider")
OF_GPU = "tests/mpi/test_gpu.py"
RATES = "tests/devices/programs/gpu_rates.py"
# Files whose ranks may compute on a GPU, and do where they see one.
WHOLE_FILES = (
    *(f"tests/data/test_{name}.py" for name in ("data_batches", "datasets")),
    *(
        f"tests/mpi/test_{name}.py"
        for name in (
            "bad_runs", "best_models", "digits", "faults", "initial_weights", "injected_faults", "model_methods",
            "precision", "predict", "ranks", "recovery", "saved_loops", "signals", "splitting", "stragglers",
            "torch_parallel", "traces",
        )
    ),
    *(f"tests/threads/test_{name}.py" for name in ("last_checkpoint", "own_state")),
    *(f"tests/training/test_{name}.py" for name in ("ensemble", "export", "load")),
)  # fmt: skip


class Part(NamedTuple):
    """Words for this Python, at most so many seconds; `why_not`: it is not run."""

    name: str
    limit_s: float
    words: tuple[str, ...]
    why_not: str = ""


class Outcome(NamedTuple):
    """What became of a part; `lines` are of its failures, `rows` what it has measured."""

    part: Part
    result: str
    seconds: float = 0.0
    counts: Counter[str] = Counter()
    lines: tuple[str, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether nothing failed, and nothing was left that should have run."""
        return self.result.startswith(("passed", "measured", "skipped"))


def parts(kind: str, num_devices: int, simulated: bool) -> list[Part]:
    """What there is to run, the most telling first."""
    models, rounds = (("small",), "2") if simulated else (("mlp", "cnn"), "10")

    def measure(num_ranks: int) -> tuple[str, ...]:
        return ("-m", "mpitrain", "launch", "-n", str(num_ranks), RATES, rounds, *models)

    beside = (
        "samples a second of two ranks" if num_devices > 1 else "samples a second of two ranks on one device"
    )
    workers = ("-n", "4", "--dist", "loadfile") if importlib.util.find_spec("xdist") else ()
    whole = (*PYTEST, *workers, "-m", "not host and not extended and not gpu", *WHOLE_FILES)
    return [
        Part("device tensors, as this MPI can", 120, (*PYTEST, OF_GPU, "-k", "device_tensors and auto")),
        Part("device tensors, by way of the host", 120, (*PYTEST, OF_GPU, "-k", "device_tensors and off")),
        Part(beside, 120, measure(2)),
        Part("samples a second of one rank", 120, measure(1)),
        Part(f"every family on {kind} beside the host", 240, (*PYTEST, OF_GPU, "-k", "not device_tensors")),
        Part(
            "tests whose ranks may compute on it", 400, whole, "their ranks see real devices only" if simulated else "",
        ),
    ]  # fmt: skip


def run(part: Part, left_s: float, env: dict[str, str]) -> Outcome:
    """Run it to its end, its limit or that of the whole, whichever is first."""
    if part.why_not:
        return Outcome(part, f"skipped: {part.why_not}")
    limit_s = min(part.limit_s, left_s)
    if limit_s <= 2 * GRACE_S:
        return Outcome(part, "NOT RUN: no time was left")
    began_s = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            [sys.executable, *part.words], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=said,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        in_time = _waited(process, limit_s - GRACE_S)
        if not in_time:
            _end(process)
        said.seek(0)
        text = said.read()
    seconds = time.monotonic() - began_s
    return judged(part, text, process.returncode, seconds, None if in_time else limit_s)


def _waited(process: subprocess.Popen[str] | subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[Any]) -> None:
    """As Ctrl-C would, and then for certain."""
    for number, seconds in ((signal.SIGINT, GRACE_S / 2), (signal.SIGKILL, GRACE_S / 2)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass
        if _waited(process, seconds):
            return


def judged(part: Part, text: str, code: int | None, seconds: float, limit_s: float | None) -> Outcome:
    """What the text and the exit code of a part come to; `limit_s`: the one at which it was ended."""
    rows = tuple(json.loads(line) for line in text.splitlines() if line.startswith('{"model"'))
    counts = counted(text)
    told = ", ".join(
        f"{counts[word]} {word}" for word in ("passed", "failed", "skipped", "error") if counts[word]
    )
    failed = [line for line in text.splitlines() if re.match(r"(FAILED|ERROR) tests/", line)]
    if limit_s is not None:
        total = re.search(r" (\d+) selected", text) or re.search(r"[\[ ](\d+) items", text)
        of = f" of {total[1]}" if total else ""
        result = f"STOPPED at {limit_s:.0f} s: {told or 'nothing done'}{of}"
    elif rows and code == 0:
        result = f"measured {', '.join(row['model'] for row in rows)}"
    elif code not in (0, None) or failed:
        result = f"FAILED: {told or f'exit code {code}'}"
        failed = failed or [line for line in text.splitlines() if line.strip()][-5:]
    elif RATES in part.words:
        result = "FAILED: nothing was measured"
    elif not counts["passed"]:
        result = f"skipped: {told or 'no test ran'}"
    elif counts["skipped"]:
        result = f"passed in part: {told}"
    else:
        result = f"passed: {told}"
    return Outcome(part, result, seconds, counts, tuple(failed), rows)


def counted(text: str) -> Counter[str]:
    """Tests by what became of them, from pytest's lines of each, which are there also where it was ended."""
    words = re.findall(
        r"^(?:\[gw\d+\] \[ *\d+%\] (\w+) tests/|tests/.*? (PASSED|FAILED|SKIPPED|ERROR) )", text, re.MULTILINE
    )
    return Counter((first or second).lower() for first, second in words)


def report(facts: Sequence[str], outcomes: Sequence[Outcome], seconds: float, minutes: float) -> str:
    """The file to send."""
    width = max(len(outcome.part.name) for outcome in outcomes)
    lines = [*facts, ""]
    lines += [f"{one.part.name:{width}}  {one.seconds:5.0f} s  {one.result}" for one in outcomes]
    rates = [row for outcome in outcomes for row in outcome.rows]
    if rates:
        lines += ["", "samples a second of DDP, in turns (time beside the way by the host, 95 %):"]
    for row in rates:
        ways = [
            f"{name} {rate:.0f} ({' '.join(f'{value:.2f}' for value in row['time_to_host'][name])})"
            for name, rate in row["samples_per_second"].items()
        ]
        lines.append(f"{row['model']}, {row['ranks']} rank(s): {'; '.join(ways)}")
    left_out = {f"{name} took no part: {why}" for row in rates for name, why in row["left_out"].items()}
    lines += sorted(left_out)
    failed = [line for outcome in outcomes for line in outcome.lines]
    lines += ["", *failed[:MOST_LINES]] if failed else []
    lines += [f"... and {len(failed) - MOST_LINES} more"] if len(failed) > MOST_LINES else []
    total = sum((outcome.counts for outcome in outcomes), Counter[str]())
    counts = [f"{total[word]} {word}" for word in ("passed", "failed", "skipped", "error") if total[word]]
    bad = sum(not outcome.is_good for outcome in outcomes)
    ended = f"{bad} of {len(outcomes)} parts failed or were not run to their end"
    spent = f"{seconds:.0f} s of {60 * minutes:.0f} s"
    lines += ["", f"{', '.join(counts) or 'no test ran'}; {ended}; {spent}"]
    return "\n".join(lines) + "\n"


def look(env: dict[str, str]) -> dict[str, Any]:
    """What `tests.devices.facts` finds, in a process of its own: MPI and the driver may take it down."""
    try:
        asked = subprocess.run(
            [sys.executable, "-m", "tests.devices.facts"], cwd=ROOT, env=env, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=120,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"kind": None, "why": "torch and MPI did not say within 120 s what they see"}
    found = [line for line in asked.stdout.splitlines() if line.startswith('{"kind"')]
    if not found:
        last = (asked.stderr or asked.stdout).strip().splitlines()[-1:] or [f"exit code {asked.returncode}"]
        return {"kind": None, "why": last[0]}
    told: dict[str, Any] = json.loads(found[0])
    return told


def main(words: Sequence[str] | None = None) -> int:
    """Run all parts; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="all parts together, and what came before them"
    )
    parser.add_argument(
        "--began", type=float, default=time.time(), help="when the command began, in Unix time"
    )
    parser.add_argument("--simulated", action="store_true", help="a rehearsal, without a GPU")
    parser.add_argument("--results", type=Path, default=None)
    options = parser.parse_args(words)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"make gpu: {sys.executable} lacks {', '.join(missing)}: install them", file=sys.stderr)
        return NO_DEVICE
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    env |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # as tests do in a container
    env |= {"MPITRAIN_TEST_DEVICE": "sim"} if options.simulated else {}
    found = look(env)
    if found["kind"] is None:
        print(f"make gpu: no accelerator: {found['why']}; nothing was run or written", file=sys.stderr)
        return NO_DEVICE
    env["MPITRAIN_TEST_DEVICE"] = found["kind"]
    set_up_s = time.time() - options.began
    end_s = time.monotonic() + 60 * options.minutes - set_up_s
    outcomes = []
    for part in parts(found["kind"], found["num_devices"], options.simulated):
        outcomes.append(run(part, end_s - time.monotonic(), env))
        print(f"{part.name}: {outcomes[-1].result} ({outcomes[-1].seconds:.0f} s)", flush=True)
    text = report(found["lines"], outcomes, time.time() - options.began, options.minutes)
    results = options.results or (ROOT / "build" / "gpu-simulated.txt" if options.simulated else RESULTS)
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {results}: please send it, whatever it says")
    return PASSED if all(outcome.is_good for outcome in outcomes) else FAILED


if __name__ == "__main__":
    sys.exit(main())
