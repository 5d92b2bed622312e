"""Every value that help texts and pages print is one that the parser knows, with the arguments that it has there: in an
example command they are words, which parse whatever they say."""

from __future__ import annotations

import contextlib
import importlib
import io
import re

import pytest

from mpitrain import values
from mpitrain.cli import main as cli
from mpitrain.errors import UsageError
from tests.cli.test_cli import COMMANDS
from tests.documented import PAGES, ROOT

for module in (
    "inject",
    "simulation.command",
    "search.sweep.asha",
    "search.sweep.axes",
    "strategies.schedules",
):
    importlib.import_module(f"mpitrain.{module}")  # which registers its values
KINDS = ("strategy", "compute", "network", "costs", "inject", "schedule", "codec", "damping")
NAMES = {name: kind for kind in KINDS for name in values.names(kind)}
# A name, and an argument list in which lists and values of its own may stand.
_VALUE = re.compile(r"(?<![\w.])([a-z][a-z0-9_]*)\(((?:[^()`\n]|\([^()`\n]*\))*)\)")
_PLACEHOLDER = re.compile(r"\.\.\.|<|=[A-Z]\b|=,|=\)|\b[A-Z]+\b")
_AS_TEXT = re.compile(r"--\w+[ =]|^  [a-z0-9_]+\(", re.M)


def found_in(text: str) -> list[tuple[str, str]]:
    """Values in a text that stand where a command takes one: after an option, or in a table of laws."""
    found = []
    for line in text.splitlines():
        if _AS_TEXT.search(line):
            for match in _VALUE.finditer(line):
                if match[1] in NAMES and not _PLACEHOLDER.search(match[2].replace('"', "'").split("'")[0]):
                    found.append((match[0], match[1]))
    return found


def helps(words: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    return out.getvalue()


def wrong(text: str) -> list[str]:
    """Values that nobody would accept, with the reason."""
    refused = []
    for value, name in found_in(text):
        reasons = []
        for kind in KINDS:
            if name in values.names(kind):
                try:
                    values.parse(value.replace('\\"', '"'), kind)
                    break
                except UsageError as error:
                    reasons.append(str(error))
        else:
            if any(re.search("No such file|holds no|is a word, which", reason) for reason in reasons):
                continue  # a file of the reader's own; a signature, as tables have it
            refused.append(f"{value}: {reasons}")
    return refused


@pytest.mark.parametrize("words", COMMANDS, ids=["-".join(words) or "mpitrain" for words in COMMANDS])
def test_every_value_in_a_help_is_one(words: list[str]) -> None:
    assert wrong(helps(words)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_value_in_a_command_of_a_page_is_one(page) -> None:
    assert wrong(page.read_text(encoding="utf-8")) == []


def test_such_a_value_would_be_found() -> None:
    text = (
        '  mpitrain simulate jobs/digits.py --costs "costs(read_s=1, reed_s=2)" --strategy "async(server=1)"'
    )
    assert all(map(values.names, KINDS))
    assert len(found_in(text)) == 2 and len(wrong(text)) == 2
