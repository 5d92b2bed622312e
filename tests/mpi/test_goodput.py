"""A real run that is killed and goes on: all its time and samples are accounted for, and drawn faults go on, too."""

import itertools
import json
import re
import sys
import time
from pathlib import Path

import pytest

from mpitrain.inject import Poisson
from mpitrain.inject.drawn import course
from mpitrain.system.legs import read_legs
from mpitrain.system.time_spent import read_spent
from tests.ranks import run_ranks

PROGRAM = Path(__file__).parent / "programs/dies_at_a_step.py"
COMMAND = [sys.executable, "-m", "mpitrain", "train", str(PROGRAM), "--run-dir", "run", "--resume", "auto"]
TOLD = re.compile(r"injected: (\w+) of the next checkpoint, fault (\d+) of the run, ([\d.]+) s old")


def test_a_run_that_was_killed_accounts_for_its_time_its_samples_and_its_drawn_faults(tmp_path):
    began_s = time.time()
    assert run_ranks(1, COMMAND, cwd=tmp_path).code != 0
    order = Poisson(0.02, "corrupt_file", seed=3)
    again = run_ranks(1, [*COMMAND, "--inject", str(order)], cwd=tmp_path).check()
    took_s = time.time() - began_s
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    found, seconds = result["goodput"], result["goodput"]["seconds"]
    legs = read_legs(tmp_path / "run")
    between_s = legs[1].began_s - legs[0].began_s

    assert (result["resumed_from"], result["samples"]) == (64, 384)
    assert (found["samples_useful"], found["samples_redone"]) == (384, 80 - 64)
    in_vain = 1  # the batch in which it died
    assert found["samples_processed"] == 8 * ((tmp_path / "calls").stat().st_size - in_vain)
    assert sum(seconds.values()) == pytest.approx(found["wall_s"]) and min(seconds.values()) >= 0
    first, last = read_spent(tmp_path / "run")  # which goes on for a moment when the result is made
    wall_s = (
        last.began_s - first.began_s + sum(last.seconds.values()) - last.seconds["ending"] + seconds["ending"]
    )
    assert found["wall_s"] == pytest.approx(wall_s, abs=1e-3)
    assert between_s + result["train_s"] <= found["wall_s"] <= took_s
    assert seconds["redone"] > 0 and seconds["useful"] > 0 and seconds["checkpoint"] > 0
    died_s = float((tmp_path / "died").read_text())
    assert seconds["restart"] + seconds["starting"] >= legs[1].began_s - died_s

    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (told_shares,) = [row for row in rows if row["event"] == "wall time"]
    assert told_shares["restart"] == pytest.approx(seconds["restart"] / found["wall_s"], abs=1e-3)

    told = [
        (kind, int(number), float(at_s)) for kind, number, at_s in TOLD.findall(again.stdout + again.stderr)
    ]
    faults = list(itertools.islice(course(order, 0, (), 1), told[-1][1] + 1))
    passed_by = [fault.number for fault in faults if fault.at_s <= between_s]
    assert passed_by and told[0][1] > passed_by[-1]
    assert all(
        faults[number].kind == kind and faults[number].at_s <= at_s + 0.1 for kind, number, at_s in told
    )
