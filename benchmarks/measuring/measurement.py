"""What a benchmark declares of itself in its file: `MEASUREMENT = Measurement(...)`, and a docstring that begins with a
question.

Invariants: a declaration is made of literals and of the names below: it can be read without running the program. Every
path of `depends` exists, and a recording fails whose process imported a module of the package outside of them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Parts of the package that are imported together, each by those after it.
BASICS = ("mpitrain/*.py", "mpitrain/system")
CODECS = (*BASICS, *(f"mpitrain/{part}" for part in (
    "codecs", "data", "devices", "embedding", "messages", "model", "strategies",
)))  # fmt: skip
STEPS = (*CODECS, *(f"mpitrain/{part}" for part in ("checkpoint", "job", "mpi", "reporting", "training")))
TRAINING = (*STEPS, "mpitrain/inject", "mpitrain/roles", "mpitrain/threads")
LAUNCHED = (*TRAINING, "mpitrain/cli", "mpitrain/launch")
VIRTUAL = (*TRAINING, "mpitrain/simulation", "mpitrain/virtual")


@dataclass(frozen=True)
class Command:
    """A command that records rows of a program anew.

    Attributes:
        line: as it is typed in the root of the repository, without `--record`.
        minutes: what it takes on two quiet cores, until a row says it.
        covers: the values of keys whose settings it measures, a tuple for one of several; empty for all settings.
        writes: the name of its rows, where it is not the program's.
    """

    line: str
    minutes: float
    covers: Mapping[str, Any] = field(default_factory=dict)
    writes: str = ""

    def measures(self, values: Mapping[str, Any]) -> bool:
        """Whether a setting with these values of the keys is one of its own."""
        return all(
            values[key] in (wanted if isinstance(wanted, tuple) else (wanted,))
            for key, wanted in self.covers.items()
        )


@dataclass(frozen=True)
class Measurement:
    """What stands beside our figure, and what the figure rests on.

    Attributes:
        depends: files and folders of the repository on whose code the figures rest, besides the program itself. `*`
            stands for the files of a folder.
        contestants: what is measured besides this package, in the same run; none where nothing is.
        bound: what no contestant can beat, measured or computed; empty where there is none.
        wanted: the figure that was asked for beforehand; empty where none was.
        keys: entries of a row that make up its setting. `KEY=VALUE` names the value of rows that have no such entry.
        figures: paths in a row to what is compared between the rows of a setting: `ratio.*` are all entries of `ratio`.
            A list stands for its first number, a median before its interval; with `mean ` before the path for its mean.
        commands: what `make evidence` runs. Each setting is measured by one of them.
        campaign: commands that take hours, root or a GPU, and are run on their own.
    """

    depends: Sequence[str]
    contestants: Sequence[str] = ()
    bound: str = ""
    wanted: str = ""
    keys: Sequence[str] = ()
    figures: Sequence[str] = ()
    commands: Sequence[Command] = ()
    campaign: Sequence[str] = ()

    def values(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the keys in a row."""
        named = (key.partition("=") for key in self.keys)
        return {
            key: row[key] if key in row else ast.literal_eval(default or "None") for key, _, default in named
        }

    def undeclared(self) -> list[str]:
        """Modules of the package that this process has imported and `depends` does not cover."""
        files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        paths = (Path(file) for file in files if file)
        inside = (path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT / "mpitrain"))
        return sorted(path.as_posix() for path in inside if not self.covers(path))

    def covers(self, path: Path) -> bool:
        """Whether a path of the repository is one of `depends`, or below one."""
        folders = [parent.as_posix() for parent in path.parents]
        return any(
            one in folders or (fnmatchcase(path.as_posix(), one) and str(Path(one).parent) == folders[0])
            for one in self.depends
        )


def program_of(name: str) -> Path:
    """The file of a question: at the top of `benchmarks/`, or in a folder with what it launches."""
    if name == "hostile":
        return ROOT / "tests" / "hostile" / "campaign.py"
    (found,) = (ROOT / "benchmarks").rglob(
        f"{name.removesuffix('_start')}.py"
    )  # growth.py writes two kinds of rows
    return found


def question(program: Path) -> str:
    """What a program asks: the first paragraph of its docstring."""
    told = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or ""
    return " ".join(told.split("\n\n")[0].split())


def declared(program: Path) -> Measurement:
    """What a program declares, without running it."""
    for statement in ast.parse(program.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "MEASUREMENT":
            found = eval(compile(ast.Expression(statement.value), str(program), "eval"), dict(globals()))
            assert isinstance(found, Measurement)
            return found
    raise ValueError(f"{program} declares no MEASUREMENT = Measurement(...)")


def missing(depends: Iterable[str]) -> list[str]:
    """Of these paths those that lead nowhere."""
    return [path for path in depends if not any(ROOT.glob(path))]
