"""The commands that the documentation prints.

Every line of a `sh` block is a command. What needs more than a machine with MPI is marked on its page: a comment
`<!-- needs: Slurm -->` before the block, or `# needs Slurm` behind the line. Those of the README and of `docs/` are run
by `make pages`; of those on other pages `ELSEWHERE` says who runs them. All are parsed by `tests/test_readme.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from docs.pages import PAGES, ROOT
from tests.ranks import run_plain

ELSEWHERE = (
    (r"^make (chaos|hostile)$", "takes minutes to hours; small runs are in the tests of their programs"),
    (r"^make opponents\b", "installs libraries of others, and takes minutes"),
    (r"hosts\.py ", "needs root, to emulate several hosts"),
    (
        r"benchmarks/[\w/]+\.py",
        "takes minutes: `tests/test_benchmarks.py` runs it smaller, or checks its options",
    ),
    (
        r"^(sbatch|mpitrain (slurm|train|data)) ",
        "run word for word in a Slurm by `tests/slurm/test_walkthrough.py`",
    ),
)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language on a page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for said, text in found if said == language]


def changed(text: str, diff: str) -> str:
    """The text with every hunk of a diff in its place; hunks are divided by an empty line."""
    for hunk in diff.strip("\n").split("\n\n"):
        lines = [line for line in hunk.splitlines() if line]
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
        assert text.count(old) == 1, hunk
        text = text.replace(old, new)
    return text


def files_of_newcomers(page: Path) -> dict[str, str]:
    """The files that `docs/ten-minutes.md` shows, by name."""
    files = dict(zip(("script.py", "my_job.py", "use.py"), blocks(page, "python"), strict=False))
    (diff,) = blocks(page, "diff")
    return files | {"loop.py": changed(files["script.py"], diff)}


MADE_TO_RUN = [page for page in PAGES if page == ROOT / "README.md" or ROOT / "docs" in page.parents]


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


def elsewhere() -> Iterator[tuple[str, str]]:
    """Every command of a page that `make pages` leaves alone, and who runs it."""
    for command, page in commands():
        if page not in MADE_TO_RUN:
            yield command, next(why for pattern, why in ELSEWHERE if re.search(pattern, command))


LEFT_OUT = ("data", "runs", ".git", ".venv", ".pytest_cache")


class Folder:
    """A folder that looks like the repository, with data and runs of its own: lines of the documentation run in it."""

    def __init__(self, folder: Path):
        self._begin(folder)
        there = {path.name for path in folder.iterdir()}
        for path in ROOT.iterdir():
            if path.name in (*LEFT_OUT, *there):
                continue
            if path.name in ("slurm", "jobs"):  # into which commands write
                shutil.copytree(path, folder / path.name)
            else:
                (folder / path.name).symlink_to(path)
        (folder / ".venv").symlink_to(Path(sys.prefix))
        make_sources(folder)
        self.run("mpitrain data pack digits data/digits --validate 0.2")  # what `make train` does first

    def _begin(self, folder: Path) -> None:
        """An empty folder, and what commands are found there."""
        self.folder = folder
        (folder / "commands").mkdir()  # found before those of the machine
        beside = Path(sys.executable).parent
        self.env = {
            "PATH": os.pathsep.join([str(folder / "commands"), str(beside), os.environ["PATH"]]),
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "HOME": str(folder), "RANKING_SAMPLES": "50000",
            "RANKING_ROWS": "16384",  # a third of them are enough for its target
        }  # fmt: skip

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
