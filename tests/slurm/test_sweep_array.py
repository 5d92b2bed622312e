"""A sweep as a Slurm array: 32 configurations of digits on two nodes, two at a time on each, killed in the middle."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter

import pytest

from mpitrain.search.sweep.journal import Sweep
from tests.slurm.conftest import Site

pytestmark = [pytest.mark.slurm, pytest.mark.extended, pytest.mark.timeout(580)]


def test_an_array_trains_every_configuration_once_also_after_a_kill(site: Site) -> None:
    words = ["mpitrain", "sweep", "--run-dir", "swept", "--slurm", "--runs-per-node", "2"]
    more = ["--slurm-set", "time=0:20:00", "--slurm-set", "gpus_per_node=1"]
    env = {"MPITRAIN_SITE": str(site.cluster.site(site.python))}
    rates = ",".join(f"{rate}e-4" for rate in range(2, 34, 4))
    vary = ["jobs/digits.py", "--vary", f"lr={rates}", "--vary", "batch-size=16,32,64,128", "--epochs", "1"]
    vary += ["--target", "accuracy=0"]
    refused = site.run(*words, *vary, "--vary", "epochs=x", *more, code=2, **env)
    assert "configuration 0" in refused and not (site.folder / "swept").exists()

    array = [*more, "--slurm-set", "array=0-1"]
    job = site.run(*words, *vary, *array, **env).splitlines()[0]
    sweep = Sweep(site.folder / "swept")

    def num_ended() -> int:
        return sum(row["event"] == "ended" for row in sweep.rows())

    site.cluster.wait_for(lambda: num_ended() >= 4, f"some runs of job {job}", 250)
    for lock in sweep.folder.glob("dealers/*/lock"):
        os.kill(json.loads(lock.read_text())["pid"], signal.SIGKILL)
    for element in (f"{job}_0", f"{job}_1"):
        site.wait(element, "FAILED")
    before = num_ended()
    assert 4 <= before < 32, before

    again = site.run(*words, *array, **env).splitlines()[0]
    outputs = "".join(site.wait(f"{again}_{element}") for element in (0, 1))
    found = Counter(
        row["number"] for row in sweep.rows() if row["event"] == "ended" and row["status"] == "ok"
    )
    assert found == dict.fromkeys(range(32), 1), outputs
    assert "best: " in outputs
    for number in range(32):
        result = json.loads((site.folder / "swept" / str(number) / "result.json").read_text())
        assert result["samples"] == 1438
    assert len(list(sweep.folder.glob("dealers/*"))) == 8  # two ranks on two nodes, twice
