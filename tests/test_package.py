"""What an installed copy of the package holds besides its modules."""

import shutil
import subprocess
import sys
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
    examples = {
        f"mpitrain/examples/{path.relative_to(ROOT / 'jobs')}" for path in (ROOT / "jobs").rglob("*.py")
    }
    modules = {path for path in modules if not path.startswith("mpitrain/examples/")} | examples
    assert shipped == modules | {"mpitrain/py.typed", "mpitrain/data/FORMAT.md"}
