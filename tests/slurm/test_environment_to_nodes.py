"""The lines of slurm/README.md that send a packed environment to the nodes of a job."""

from __future__ import annotations

import re
import tarfile

import pytest

from tests.ranks import ROOT
from tests.slurm.conftest import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

BLOCK = re.compile(r"```text\n(.*?sbcast.*?)```", re.S)
JOB = """#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=1 --output=send-%j.out
set -e
{lines}
srun bash -c 'echo "$SLURMD_NODENAME $WHERE $(cat {folder}/env/data)"'
"""


@pytest.mark.extended
def test_a_packed_environment_is_sent_unpacked_and_activated(site: Site) -> None:
    there = site.cluster.root / "local"  # nodes of one machine share its /tmp
    there.mkdir()  # one node, for several would unpack into it at once
    made = site.folder / "made" / "env"
    (made / "bin").mkdir(parents=True)
    (made / "bin" / "activate").write_text(f"export WHERE={there}/env\n")
    (made / "data").write_text("unpacked")
    with tarfile.open(site.folder / "env.tar", "w") as archive:
        archive.add(made, arcname="env")
    found = BLOCK.search((ROOT / "slurm" / "README.md").read_text())
    assert found
    lines = "\n".join(line.strip().replace("/tmp", str(there)) for line in found[1].splitlines())
    (site.folder / "send.sbatch").write_text(JOB.format(lines=lines, folder=there))
    said = site.wait(site.sbatch("send.sbatch"))
    assert said.split() == [site.cluster.names[0], f"{there}/env", "unpacked"]
