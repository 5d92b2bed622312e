"""The commands that the documentation prints, and which of them the tests run.

Every line of a `sh` block is a command. What needs more than a machine with MPI is marked on its page: a comment
`<!-- needs: Slurm -->` before the block, or `# needs Slurm` behind the line. `ELSEWHERE` says which others are not run
by `tests/test_readme.py`, and why. These are parsed. The table in `tests/README.md` is made from here.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from docs.pages import PAGES, ROOT
from tests.ranks import run_plain

ELSEWHERE = (
    (
        r"^(?!sbatch).*(script|use|my_job)\.py|runs/four|^mpitrain slurm init$",
        "run as printed, in their order, by `tests/test_ten_minutes.py`",
    ),
    (r"^make (train|test)( ARGS=.*)?$", "the commands of a fresh clone: they are run by hand"),
    (r"^make (chaos|hostile)$", "takes minutes to hours; small runs are in the tests of their programs"),
    (r"launch -n 4 train jobs/digits\.py$", "run as printed by `tests/mpi/test_digits.py`"),
    (
        r"launch -n 5 train jobs/digits\.py --strategy \"async\(\)\"$",
        "is run as printed with three workers: `async(servers=1)` is `async()`",
    ),
    (r"^(sbatch|srun|mpitrain slurm) ", "needs Slurm: `tests/slurm`"),
    (r" report (--follow )?runs/", "needs finished runs: `tests/reporting/test_page.py`"),
    (r" predict (runs|ensembles)/", "needs a finished run: `tests/mpi/test_predict.py`"),
    (r"^mpitrain compare ", "needs finished runs: `tests/reporting/test_compare.py`"),
    (r" ensemble runs/", "needs finished runs: `tests/training/test_ensemble.py`"),
    (r" runs table ", "needs finished runs: `tests/search/test_table.py`"),
    (r" sweep ", "takes tens of seconds: `tests/search/test_sweep.py`"),
    (
        r"^(RFM_\S+ reframe|jube) ",
        "needs these suites: `tests/suites/test_suites.py`, `tests/slurm/test_reframe.py`",
    ),
    (r"^mpitrain bench ", "takes minutes: `tests/search/test_bench.py`"),
    (
        r" export (runs|ensembles)/",
        "needs a finished run: `tests/training/test_export.py`, `test_export_formats.py`",
    ),
    (r" --threads \d", "takes tens of seconds: `tests/threads`"),
    (r"^mpitrain plan ", "needs a machine to plan for: `tests/planning/test_plan.py`"),
    (r"--ft heartbeat ", "needs MPICH under Slurm: `tests/slurm/test_heartbeat.py`"),
    (r"--hostfile |hosts\.py ", "needs several hosts, or root to emulate them"),
    (
        r"--ft ulfm |--checkpoint-every |mpirun |^mpitrain simulate ",
        "takes tens of seconds: see `tests/mpi`, `tests/virtual`",
    ),
    (
        r"benchmarks/\w+\.py",
        "takes minutes: `tests/test_benchmarks.py` runs it smaller, or checks its options",
    ),
)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language on a page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for said, text in found if said == language]


class Command(NamedTuple):
    """A line without its comment, the page that prints it, and what the page says that it needs."""

    text: str
    page: Path
    needs: str


def printed(page: Path) -> Iterator[Command]:
    """Every command of a page, in its order."""
    found = re.findall(
        r"^(?:<!-- needs: (.+?) -->\n)?```sh\n(.*?)^```$",
        page.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    for needs, block in found:
        for line in block.splitlines():
            command, _, said = re.sub(r"(^|\s+)#(.*)", r"\0\2", line).partition("\0")
            own = re.match(r" needs ([^:]*)", said)
            if command:
                yield Command(command, page, own[1] if own else needs)


def commands() -> Iterator[tuple[str, Path]]:
    """Every command once, and the first page that prints it; with or without `.venv/bin/`."""
    seen = set()
    for page in PAGES:
        for command in printed(page):
            if (bare := command.text.replace(".venv/bin/", "")) not in seen:
                seen.add(bare)
                yield command.text, page


@cache
def _needs() -> dict[str, str]:
    return {command.text: command.needs for page in PAGES for command in printed(page) if command.needs}


def reason(command: str) -> str:
    """Why the tests do not run a command as it is printed; empty where they do."""
    if needs := _needs().get(command):
        return f"needs {needs}"
    return next((why for pattern, why in ELSEWHERE if re.search(pattern, command)), "")


class Folder:
    """A folder that looks like the repository, with data and runs of its own: lines of the documentation run in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        for path in ROOT.iterdir():
            if path.name in ("slurm", "jobs"):  # into which commands write
                shutil.copytree(path, folder / path.name)
            elif path.name not in ("data", "runs", ".git", ".venv", ".pytest_cache"):
                (folder / path.name).symlink_to(path)
        (folder / ".venv").symlink_to(Path(sys.prefix))
        make_sources(folder)
        (folder / "commands").mkdir()  # found before those of the machine
        beside = Path(sys.executable).parent
        self.env = {
            "PATH": os.pathsep.join([str(folder / "commands"), str(beside), os.environ["PATH"]]),
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "HOME": str(folder), "RANKING_SAMPLES": "50000",
            "RANKING_ROWS": "16384",  # a third of them are enough for its target
        }  # fmt: skip
        self.run("mpitrain data pack digits data/digits --validate 0.2")  # what `make train` does first

    def run(self, command: str) -> str:
        """What bash prints for it; an exit code other than 0 fails the test."""
        words = [f"{name}={value}" for name, value in self.env.items()]
        return run_plain(["env", *words, "bash", "-c", command], cwd=self.folder)


def make_sources(folder: Path) -> None:
    """What the page on data packs: arrays, a folder of photos, a table, and WebDataset's archives."""
    import io
    import tarfile

    import numpy as np

    pil, pyarrow, parquet = (
        pytest.importorskip(name) for name in ("PIL.Image", "pyarrow", "pyarrow.parquet")
    )
    draw = np.random.default_rng(0)
    np.savez(folder / "samples.npz", x=draw.random((40, 3)), y=draw.integers(0, 2, 40))
    parquet.write_table(
        pyarrow.table({name: draw.random(40) for name in ("a", "b", "label")}), folder / "table.parquet"
    )
    photo = io.BytesIO()
    pil.fromarray(draw.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(photo, "JPEG")
    for name in ("cats", "dogs"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(3):
            (folder / "photos" / name / f"{number}.jpg").write_bytes(photo.getvalue())
    for part in range(2):
        with tarfile.open(folder / f"train-{part}.tar", "w") as tar:
            for number in range(16):
                for suffix, data in (("jpg", photo.getvalue()), ("cls", b"1")):
                    info = tarfile.TarInfo(f"{part}{number:04}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
