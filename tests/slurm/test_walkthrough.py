"""`slurm/README.md`, word for word: its shell lines are run in order, as they stand."""

from __future__ import annotations

import re

import pytest

from tests.slurm.cluster import ROOT
from tests.slurm.conftest import Site
from tests.slurm.test_templates import fom

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(580)]


@pytest.mark.extended
def test_the_walkthrough_works_word_for_word(site: Site) -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / "slurm" / "README.md").read_text(), re.DOTALL)
    assert all(block.count(text) >= 1 for text in ("runs/mpitrain-1", "--dry-run", " status "))
    site_file = str(site.cluster.site(site.python))
    jobs = []
    for line in block.splitlines():
        if "runs/mpitrain-1" in line:  # whoever is the first to submit has job 1
            line = line.replace("mpitrain-1", f"mpitrain-{jobs[0]}")
            assert all(fom(site.wait(job))["status"] == "ok" for job in jobs)
        told = site.run("bash", "-c", line, MPITRAIN_SITE=site_file)
        if line.startswith("sbatch") or " submit " in line:
            jobs.append(told.split()[-1])
        elif "--dry-run" in line:
            assert "4 ranks on 2 node(s)" in told
        elif " status " in line:
            assert "ended with status=ok, exit code 0" in told
    assert len(jobs) == 2
