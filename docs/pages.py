"""The pages of the documentation: what the tests read, what `make docs` fills, and what the site is made of."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "strategies").glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "slurm", "slurm/packaging", "tests")),
    ROOT / "mpitrain" / "data" / "FORMAT.md",
]
