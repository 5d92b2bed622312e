"""Where a job stands: in a file, or in a module that is found from a folder; and under which name there.

    jobs/digits.py             the file's `job`
    jobs/digits.py:small       what the file calls `small`: a job, or a function without arguments that makes one
    pkg.jobs, pkg.jobs:small   the same of a module beside the working directory, or of one that is installed
    ../code/pkg.jobs:small     the same of a module below that folder

Invariants: an existing file is meant literally. Nothing is imported to find a module, and what is written of a run is
the whole place, so another process finds it from any folder.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from mpitrain.errors import UsageError

_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_NAME = re.compile(r"[A-Za-z_]\w*")


class JobSource(NamedTuple):
    """`file`: that defines the job; `name`: of the job in it; `module`: as which `root` holds it, empty of a file that
    is run by itself."""

    file: Path
    name: str = ""
    module: str = ""
    root: Path = Path()

    @property
    def stem(self) -> str:
        """What a run of it is called."""
        return self.name or self.module.rpartition(".")[2] or self.file.stem

    def __str__(self) -> str:
        place = str(self.root / self.module) if self.module else str(self.file.resolve())
        return f"{place}:{self.name}" if self.name else place


def find_job(text: str) -> JobSource:
    """The place that a text names.

    Raises:
        UsageError: there is no such file, nor such a module.
    """
    if Path(text).is_file():
        return JobSource(Path(text))
    place, colon, name = text.rpartition(":")
    if not (colon and _NAME.fullmatch(name)):
        place, name = text, ""
    elif Path(place).is_file():
        return JobSource(Path(place), name)
    folder, _, module = place.rpartition("/")
    if not place.endswith(".py") and _MODULE.fullmatch(module):
        roots = [Path(folder or "/")] if "/" in place else [Path.cwd(), *map(Path, filter(None, sys.path))]
        for root in roots:
            below = root.joinpath(*module.split("."))
            for file in (below.with_name(f"{below.name}.py"), below / "__init__.py"):
                if file.is_file():
                    return JobSource(file, name, module, root.resolve())
        raise UsageError(
            f"no job file {place!r}, nor a module of this name (looked in {Path.cwd()} and where Python imports from)"
        )
    raise UsageError(f"no job file {place!r} (looked in {Path.cwd()})")
