"""Codec hooks (`programs/codec_cases.py`) on 3 ranks; a run with a codec by the command line; gloo's group."""

import json
import sys

import pytest

from tests.mpi.cases import assert_passed, case_names, launch
from tests.ranks import ROOT, run_ranks

CASES = case_names("codec_cases")


@pytest.fixture(scope="module")
def three():
    return launch(3, "codec_cases")


@pytest.mark.parametrize("case", CASES)
def test_on_three_ranks(three, case):
    assert_passed(three, case)


def test_a_run_tells_what_its_codec_did(tmp_path):
    """By the command line: density, tau, residual norm, bytes and milliseconds in result.json and metrics.jsonl."""
    strategy = "allreduce(codec=threshold(density=0.05))"
    argv = [
        sys.executable,
        "-m",
        "mpitrain",
        "train",
        str(ROOT / "jobs/digits.py"),
        "--synthetic",
        "--steps",
        "12",
    ]
    run = run_ranks(2, [*argv, "--strategy", strategy, "--run-dir", str(tmp_path)]).check()
    assert f"strategy={strategy} " in run.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["steps"], result["samples"]) == (12, 12 * 16 * 2)  # --synthetic needs no data
    told = result["codec"]
    assert told["name"] == "threshold(density=0.05)"
    assert 0 < told["density"] < 1 and told["tau"] > 0 and told["residual_norm"] > 0 and told["codec_ms"] > 0
    assert 0 < told["bytes"] < 4 * 29000 / 5
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["event"] == "codec"]
    assert {key: row[key] for key in told if key != "name"} == {k: v for k, v in told.items() if k != "name"}
