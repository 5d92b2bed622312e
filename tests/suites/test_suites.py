"""The suites run as they are, and read the figures that the runs have left."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT
from tests.suites.reframe import SUITES, figures, needs_reframe, reframe

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "RFM_LOG_DIR": "",
}
pytestmark = pytest.mark.usefixtures("warm_children")


def run(command, folder):
    env = os.environ | ENVIRONMENT | {"TMPDIR": str(folder)}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


@needs_reframe
@pytest.mark.parametrize(
    "names", ["allreduce", pytest.param("sync|async|pipeline", marks=pytest.mark.extended)]
)
def test_reframe_starts_ranks_and_reads_their_figures(tmp_path, names):
    run(reframe(tmp_path / "report.json", "here:local", "-n", names), tmp_path)
    found = figures(tmp_path / "report.json")
    assert len(found) == names.count("|") + 1
    outputs = list((tmp_path / "reframe").glob("output/**/rfm_job.out"))
    assert len(outputs) == len(found)
    for path in outputs:
        (line,) = [line for line in path.read_text().splitlines() if line.startswith("FOM ")]
        said = dict(word.split("=", 1) for word in line.split()[1:])
        for key in ("samples_per_second", "samples_per_second_per_worker", "spread"):
            assert found[said["strategy"]][key] == float(said[key])


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("jube") is None, reason="JUBE is not installed: apt-get install jube")
def test_jube_starts_ranks_and_reads_their_figures(tmp_path):
    place = tmp_path / "benchmarks" / "suites"
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    place.mkdir(parents=True)
    text = (SUITES / "jube.yaml").read_text()
    (place / "jube.yaml").write_text(
        text.replace('{name: steps, type: int, _: "100"}', '{name: steps, type: int, _: "20"}')
    )
    run(["jube", "run", "benchmarks/suites/jube.yaml"], tmp_path)
    table = run(["jube", "result", "-a", "runs/jube"], tmp_path)
    rows = re.findall(r"^\| +(\S+) \| +(\d) \| +ok \| +([\d.]+) \| +([\d.]+) \|", table, re.MULTILINE)
    assert [row[:2] for row in rows] == [
        ("allreduce", "2"),
        ("sync(servers=1)", "3"),
        ("async(servers=1)", "3"),
    ]
    assert all(float(rate) == pytest.approx(2 * float(one), abs=0.11) for _, _, rate, one in rows)
