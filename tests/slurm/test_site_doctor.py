"""`mpitrain doctor --site` against the plugins that a real Slurm has, and with a rank that it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import find_mpi, is_intel
from tests.slurm.cluster import mpi_of
from tests.slurm.conftest import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
PLUGINS = {"openmpi": "pmix", "mpich": "pmi2"}


def test_a_launch_line_is_compared_with_what_slurm_has(site: Site) -> None:
    own, mpi = site.cluster.site(site.python), mpi_of(site.python)
    said = site.run("mpitrain", "doctor", "--site", str(own))
    has = said.partition(f"launcher: srun --mpi={PLUGINS[mpi]}: Slurm has ")[2].partition("\n")[0]
    assert "UNFIT" not in said and {"none", "pmi2", "pmix"} <= set(has.split(", "))
    assert "no rank was started, since this is no allocation" in said
    other = site.folder / "other.sh"
    absent = f"launcher: srun --mpi=pmix_v9: this Slurm has no plugin pmix_v9; it has {has}"
    lines = [("LAUNCH=(srun --mpi=pmix_v9)", absent)]
    if mpi == "openmpi":
        lines.append(("LAUNCH=(srun --mpi=pmi2)", "mpi4py loads openmpi here, which wants --mpi=pmix"))
        other.write_text(f"source {own}\nLAUNCH=(srun)\n")  # MpiDefault of the cluster is pmix
        assert "ok    launcher: srun: Slurm has" in site.run("mpitrain", "doctor", "--site", str(other))
    lines.append(("LAUNCH+=(--no-such)", "unrecognized option '--no-such'"))
    for line, told in lines:
        other.write_text(f"source {own}\n{line}\n")
        found = site.run("mpitrain", "doctor", "--site", str(other), code=4)
        assert told in found.partition("UNFIT")[2], found


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_inside_an_allocation_a_rank_is_started_by_the_very_line(
    site: Site, tmp_path: Path, mpi: str
) -> None:
    """A plugin that MPICH does not speak is there, and only a rank shows it; Intel MPI speaks it."""
    python = find_mpi(mpi)[0]
    own = site.cluster.site(python)
    alone = ("salloc", "--quiet", "--ntasks=1", str(python), "-m", "mpitrain", "doctor", "--site")
    said = site.run(*alone, str(own), mpi="mpich")
    assert f"starts one: {'Open MPI v' if mpi == 'openmpi' else ''}" in said and "UNFIT" not in said
    if mpi == "mpich":
        other = tmp_path / "site.sh"
        other.write_text(f"source {own}\nLAUNCH=(srun --mpi=pmix)\n")
        told = site.run(*alone, str(other), mpi="mpich", code=0 if is_intel(mpi) else 4)
        fit, said = (
            ("ok   ", "starts one: Intel(R) MPI") if is_intel(mpi) else ("UNFIT", "mpitrain env ended with")
        )
        assert said in told.partition(f"{fit} one rank: srun --mpi=pmix ")[2]
