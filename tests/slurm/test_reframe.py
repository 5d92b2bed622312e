"""ReFrame's `squeue` scheduler and `srun` on the mini-cluster: a check runs as it is and reads the figure of merit."""

import pytest

from tests.slurm.conftest import Site
from tests.suites.reframe import figures, needs_reframe, reframe

pytestmark = [needs_reframe, pytest.mark.slurm, pytest.mark.timeout(300)]


def test_reframe_submits_and_reads_the_figure_of_merit(site: Site) -> None:
    report = site.folder / "reframe" / "report.json"
    report.parent.mkdir()
    environment = {"MPITRAIN_SITE": str(site.cluster.site(site.python)), "MPITRAIN_PARTITION": "gpu"}
    site.run(*reframe(report, "here:slurm", "-n", "async"), **environment)
    found = figures(report)
    assert list(found) == ["async(servers=1)"] and found["async(servers=1)"]["samples_per_second"] > 0
