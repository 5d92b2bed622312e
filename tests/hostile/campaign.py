"""Files made to do harm, and what may come of reading them: a message, and nothing else.

    python -m tests.hostile.campaign [--seeds 400] [--first 0]        (`make hostile`)

The fixed cases are in `cases.py`; then valid files of every kind are damaged at random, by seed. Every case must end
with exit code 0, 1 or 2 and without a traceback, a crash or a hang, take no more than `BOUND_MIB` of memory, print
nothing that steers a terminal, and leave the files of a folder beside unread and unchanged.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.measuring.measurement import Measurement
from tests.hostile import cases

MEASUREMENT = Measurement(
    depends=("mpitrain",),
    wanted="every case ends with a message, within its memory",
    figures=("cases", "failed", "peak_mib"),
    campaign=("make hostile",),
)
ROOT = Path(__file__).parents[2]
BOUND_MIB = 1024  # with --max-gib 0.25: what a file declares, its columns beside it, and what libraries keep
BATCH_S = 600


def judge(outcome: dict[str, Any]) -> list[str]:
    """What is wrong with an outcome."""
    wrong = []
    if outcome["code"] not in (0, 1, 2):
        wrong.append(f"ended with {outcome['code']}")
    if "Traceback" in outcome["said"]:
        wrong.append("a traceback")
    if outcome["mib"] > BOUND_MIB:
        wrong.append(f"{outcome['mib']} MiB")
    if outcome["outside"]:
        wrong.append(f"touched {outcome['outside']}")
    if not all(each.isprintable() or each == "\n" for each in outcome["said"]):
        wrong.append("unprintable output")
    return wrong


def run(chosen: Iterable[cases.Case], outside: Path) -> list[dict[str, Any]]:
    """Outcomes of cases, in a child that is started anew where one has killed it."""
    left = list(chosen)
    outcomes: list[dict[str, Any]] = []
    while left:
        lines = "".join(json.dumps(case._asdict()) + "\n" for case in left)
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.hostile.child", str(outside)]
        try:
            child = subprocess.run(
                command, input=lines, capture_output=True, text=True, cwd=ROOT, timeout=BATCH_S
            )
            told, said, code = child.stdout, child.stderr, child.returncode
        except subprocess.TimeoutExpired as error:
            told, said, code = (error.stdout or b"").decode(), "", 98
        heard = [json.loads(line) for line in told.splitlines()]
        done = [each for each in heard if "begun" not in each]
        outcomes += done
        left = left[len(done) :]
        if not left:
            break
        crashed = {"name": left[0].name, "code": code, "said": said[-4000:], "outside": [], "mib": 0}
        outcomes.append(crashed)
        left = left[1:]
    return outcomes


def fingerprint(folder: Path) -> str:
    """Of all files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(f"{path} {path.is_file()}".encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


def main() -> None:
    """All fixed cases, and as many damaged files as asked for; one row of results."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from measuring.common import make_parser, write_row

    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--seeds", type=int, default=400, help="damages of each kind of file")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    sys.argv[0] = "tests/hostile/campaign.py"  # in the row, wherever this is
    began_s, failed, worst, count, codes = time.monotonic(), 0, 0, 0, {0: 0, 1: 0, 2: 0}
    with tempfile.TemporaryDirectory() as scratch:
        outside = cases.make_outside(Path(scratch))
        before = fingerprint(outside)
        batches = [cases.fixed(Path(scratch), outside)]
        seeds = range(options.first, options.first + options.seeds)
        batches += [cases.damaged(Path(scratch), [seed]) for seed in seeds]
        for start in range(0, len(batches), 20):
            batch = [case for part in batches[start : start + 20] for case in part]
            for outcome in run(batch, outside):
                count, worst = count + 1, max(worst, outcome["mib"])
                codes[outcome["code"]] = codes.get(outcome["code"], 0) + 1
                if wrong := judge(outcome):
                    failed += 1
                    print(f"{outcome['name']}: {'; '.join(wrong)}\n{outcome['said']}", flush=True)
        assert fingerprint(outside) == before
    row = {
        "cases": count,
        "failed": failed,
        "seeds": [seeds.start, seeds.stop],
        "peak_mib": worst,
        "bound_mib": BOUND_MIB,
    }
    row |= {"codes": {str(code): number for code, number in sorted(codes.items())}}
    print(
        f"{count} hostile inputs: {failed} wrong, at most {worst} MiB, {time.monotonic() - began_s:.0f} s; {codes}"
    )
    write_row("hostile", row)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
