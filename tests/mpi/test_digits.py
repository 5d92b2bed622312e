"""The main job, as the README starts it: real digits, synchronous and asynchronous, to the accuracy it promises."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.documented import commands
from tests.ranks import ROOT, run_plain
from tests.sampling import sampled

JOB = str(ROOT / "jobs" / "digits.py")
AS_PRINTED = "mpitrain launch -n 4 train jobs/digits.py"  # on a page of the documentation
FOM = re.compile(
    r"^FOM samples_per_second=[\d.]+ unit=samples/s status=ok job=digits strategy=(\S+) workers=\d+ servers=\d+ "
    r"nodes=1 steps=\d+ batch_size=16 device=(cpu|cuda) precision=float32 seed=0 synthetic=0 "
    r"samples_per_second_per_worker=[\d.]+ spread=0\.\d+ warmup_steps=(?:9|10) leg=1 schema=2$"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with the packed digits in data/digits."""
    folder = tmp_path_factory.mktemp("digits")
    run_plain([sys.executable, "-m", "mpitrain", "data", "pack", "digits", "data/digits"], cwd=folder)
    (folder / "jobs").symlink_to(ROOT / "jobs")
    return folder


@pytest.mark.parametrize(
    ("ranks", "strategy", "accuracy", "epochs"),
    sampled(
        [
            (4, "allreduce", 0.97, 20),  # `make pages` runs it, too
            (4, "allreduce", 0.85, 4),
            (4, "async(servers=1)", 0.96, 20),
            (5, "async(servers=2)", 0.96, 20),
        ],
        [(4, "allreduce", 0.85, 4)],
    ),
)
def test_digits(place, ranks, strategy, accuracy, epochs):
    """Under `allreduce`, the command as it is printed, or to an earlier end."""
    if strategy == "allreduce":
        assert AS_PRINTED in [command for command, _ in commands()]
        words = [
            "env",
            f"PATH={Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            *AS_PRINTED.split(),
        ]
    else:
        words = [sys.executable, "-m", "mpitrain", *f"launch -n {ranks} train jobs/digits.py".split()]
        words += ["--strategy", strategy]
    if epochs < 20:
        words += ["--epochs", str(epochs), "--target", f"accuracy={accuracy}"]
    before = set(place.glob("runs/*"))
    out = run_plain(words, cwd=place)
    (run_dir,) = set(place.glob("runs/*")) - before
    figures = FOM.match(out.strip().splitlines()[-1])
    assert figures and figures[1].removesuffix("()") == strategy, out
    result = json.loads((run_dir / "result.json").read_text())
    assert result["accuracy"] >= accuracy and result["status"] == "ok"
    assert result["samples"] == epochs * 1438
    model = load_file(run_dir / "model.safetensors")
    assert {tuple(tensor.shape) for tensor in model.values()} >= {(32, 1, 3, 3), (10, 1024)}
    assert json.loads((run_dir / "env.json").read_text())["packages"]["torch"]
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert (events[0]["event"], events[-1]["event"]) == ("start", "end")
    looked_at = [event["epoch"] for event in events if event["event"] == "validation"]
    if strategy == "allreduce":
        assert looked_at == list(range(1, epochs))
    else:  # a validator that is given no batch of an epoch has nothing to say about the one before
        assert looked_at == sorted(set(looked_at)) and set(looked_at) <= set(range(1, epochs)) and looked_at


def test_simulate_writes_staleness(place):
    options = [
        "--strategy",
        "async()",
        "--workers",
        "16",
        "--epochs",
        "2",
        "--run-dir",
        str(place / "virtual"),
    ]
    command = [sys.executable, "-m", "mpitrain", "simulate", JOB, *options]
    run_plain(command, cwd=place, code=3)  # two epochs miss the target, and it says so
    result = json.loads((place / "virtual" / "result.json").read_text())
    assert result["status"] == "missed" and "accuracy" in result["failure"]
    left, right = result["staleness_identity"]
    assert left == right and 12 < result["staleness_mean"] <= 15
    assert result["loss_curve"][-1]["loss"] < result["loss_curve"][0]["loss"]


def test_synthetic_needs_no_data_and_stops_after_its_steps(tmp_path):
    """Of a server: each of 2 workers makes 7 steps. Of allreduce: tests/mpi/test_codecs.py."""
    command = [sys.executable, "-m", "mpitrain", "launch", "-n", "3", "train", JOB, "--strategy", "async"]
    options = ["--synthetic", "--steps", "7", "--batch-size", "8", "--run-dir", str(tmp_path), "--quiet"]
    run_plain([*command, *options], cwd=tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["steps"], result["samples"]) == (14, 7 * 8 * 2)
