"""`mpitrain doctor --site` against the plugins that a real Slurm has."""

from __future__ import annotations

import pytest

from tests.slurm.conftest import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def test_a_launch_line_is_compared_with_what_slurm_has(site: Site) -> None:
    own = site.cluster.site(site.python, "openmpi")
    said = site.run("mpitrain", "doctor", "--site", str(own))
    has = said.partition("launcher: srun --mpi=pmix: Slurm has ")[2].strip()
    assert "UNFIT" not in said and {"none", "pmi2", "pmix"} <= set(has.split(", "))
    other = site.folder / "other.sh"
    for line, told in (
        ("LAUNCH=(srun --mpi=pmix_v9)", f"this Slurm has no plugin pmix_v9; it has {has}"),
        ("LAUNCH=(srun --mpi=pmi2)", "mpi4py loads openmpi here, which wants --mpi=pmix"),
    ):
        other.write_text(f"source {own}\n{line}\n")
        assert f"UNFIT launcher: {line[8:-1]}: {told}" in site.run(
            "mpitrain", "doctor", "--site", str(other), code=4
        )
    other.write_text(f"source {own}\nLAUNCH=(srun)\n")  # MpiDefault of the cluster is pmix
    assert "ok    launcher: srun: Slurm has" in site.run("mpitrain", "doctor", "--site", str(other))
