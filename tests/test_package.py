"""What an installed copy of the package holds besides its modules."""

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import mpitrain

ROOT = Path(mpitrain.__file__).parents[1]


def test_the_package_ships_its_types_its_format_and_the_example_jobs(tmp_path: Path) -> None:
    """Type checkers of programs that use the package need `py.typed` (PEP 561); readers of the data need its page."""
    pytest.importorskip("setuptools")
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(
        ROOT / "mpitrain", tmp_path / "mpitrain", ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
    )
    built = tmp_path / "built"
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import setuptools; setuptools.setup()",
            "-q",
            "build_py",
            "--build-lib",
            built,
        ],
        cwd=tmp_path,
        check=True,
    )
    shipped = {path.relative_to(built).as_posix() for path in built.rglob("*") if path.is_file()}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mpitrain").rglob("*.py")}
    jobs = [path for pattern in ("*.py", "scripts/*.py") for path in (ROOT / "jobs").glob(pattern)]
    examples = {f"mpitrain/examples/{path.relative_to(ROOT / 'jobs')}" for path in jobs}
    modules = {path for path in modules if not path.startswith("mpitrain/examples/")} | examples
    assert shipped == modules | {"mpitrain/py.typed", "mpitrain/data/FORMAT.md"}


def test_the_changelog_and_the_citation_have_the_packages_version() -> None:
    changes = (ROOT / "docs" / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+)", changes, re.MULTILINE).group(1) == mpitrain.__version__  # type: ignore[union-attr]
    assert f"\nversion: {mpitrain.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.extended
def test_an_sdist_tests_itself(tmp_path: Path) -> None:
    """It holds every file of the repository, and its tests run on its own package."""
    build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q"]
    copied = tmp_path / "copy"
    copied.mkdir()
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in (name for name in files if (ROOT / name).exists()):
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copied / name, follow_symlinks=False)
    subprocess.run([*build, "sdist", "-d", tmp_path], cwd=copied, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    assert [name for name in files if not (unpacked / name).exists()] == []
    where = "import mpitrain; print(mpitrain.__file__)"
    told = subprocess.run(
        [sys.executable, "-c", where], cwd=unpacked, capture_output=True, text=True, check=True
    )
    assert Path(told.stdout).is_relative_to(unpacked)
    tests = ["tests/test_walls.py", "tests/cli/test_completion.py", "tests/slurm/test_slurm_site.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *tests], cwd=unpacked, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
