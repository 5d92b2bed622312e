"""`mpitrain examples`: the example jobs, into a folder of one's own."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from mpitrain.cli.common.options import command, option
from mpitrain.system.files.new_files import write_new
from mpitrain.system.saying import say, tell

_DESCRIPTION = """\
Write the example jobs into a folder: the folder jobs/ of mpitrain's sources.
Each begins with the commands that prepare its data and train it. What is there
already stays as it is, and nothing is written then."""

_EPILOG = """\
examples:
  mpitrain examples
  mpitrain examples mine"""

# In the checkout a link to `jobs/`, in an installed copy the files themselves.
_FOLDER = Path(__file__).parents[1] / "examples"


def add_parser(commands: Any) -> None:
    """Add `examples` to the command's subparsers."""
    parser = command(
        commands, "examples", "write the example jobs into a folder", run_examples, _DESCRIPTION, _EPILOG
    )
    option(parser, "folder", "DIR", "where they are to lie (default: jobs)", default="jobs", nargs="?")


def run_examples(arguments: argparse.Namespace) -> None:
    """Write them, and say what each is."""
    folder = Path(arguments.folder)
    paths = sorted(path for pattern in ("*.py", "scripts/*.py") for path in _FOLDER.glob(pattern))
    texts = {path.relative_to(_FOLDER).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    write_new(folder, texts)
    for name, text in texts.items():
        say(f"{folder / name}  {text[3:].partition(chr(10))[0]}")
    job = shlex.quote(str(folder / "digits.py"))
    tell(f"mpitrain: to train one: mpitrain data pack digits data/digits && mpitrain launch -n 4 train {job}")
