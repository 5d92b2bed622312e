"""The README's table of troubles: each row has its script, which runs as printed and shows what the row says."""

import os
import re
import subprocess
import sys

import pytest

from docs.pages import ROOT
from tests.ranks import needs_open_mpi

FOLDER = ROOT / "jobs" / "troubles"
SHOWS = {
    "dead-rank": r"'status': 'ok', 'lost': \{'1': 'died'\}, 'samples': 2876",
    "exact-resume": r"both models are the same to the bit",
    "two-jobs": r"(?s)accuracy 0\.\d+.*accuracy 0\.\d+",
    "signal": r"exit code 75, and REQUEUE is there",
    "uneven-data": r"'status': 'ok', 'samples': 1438, 'epochs': 1, 'samples_left_out': 0",
    "loader-workers": r"(?s)num_workers=2.*accuracy 0\.\d+",
    "rate-after-resume": r'two-ranks after 2876 samples: ("lr": \S+)\ntwo-then-four after 2876 samples: \1\n',
    "memory": r"'grown_mib': \d{1,2}\.",
    "nan": r"(?s)gradient.* not finite.*exit code 1\n.*'status': 'ok', 'resumed_from': [1-9]",
    "mpi-backend": r"(?s)init_process_group\(\"mpi4py\"\).*accuracy 0\.\d+",
    "which-rank": r"(?s)rank 1 .*exit code 1\n.*rank-0\.txt\nrank-1\.txt\nrank-2\.txt",
    "energy": r"'energy_joules': (None|\d)",
}
SAMPLE = ("dead-rank",)


def test_each_row_has_its_script_and_each_script_its_row():
    rows = re.findall(r"^\|.*\| `([a-z-]+)` \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    scripts = {path.stem for path in FOLDER.glob("*.sh")} - {"common"}
    assert sorted(rows) == sorted(scripts) == sorted(SHOWS)
    for name in scripts:
        assert re.match(r"# .*\([\w.-]+/[\w.-]+#\d+\)", (FOLDER / f"{name}.sh").read_text().splitlines()[0])


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.extended) for name in SHOWS]
)
def test_a_script_shows_what_its_row_says(name):
    if name == "dead-rank":
        needs_open_mpi("starts ranks under ULFM")
    env = {**os.environ, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    command = ["sh", str(FOLDER / f"{name}.sh")]
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout
    assert re.search(SHOWS[name], done.stdout), done.stdout
