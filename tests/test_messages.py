"""Messages that the documentation quotes are texts of the package, and pages that the package names exist."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from docs.pages import PAGES, ROOT

QUOTING = ROOT / "docs" / "when-something-goes-wrong.md"
VALUE = "\0"  # what an f-string puts in


@functools.cache  # a second and a half, and every process that runs tests imports this file
def texts() -> list[str]:
    """Every text of the package, its values left out."""
    found = []
    for path in (ROOT / "mpitrain").rglob("*.py"):
        inside = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                inside |= {id(part) for part in node.values}
                found.append(
                    "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                found.append(node.value)
    return found


def is_said(message: str) -> bool:
    """Whether one text has the pieces between the values in this order."""
    pieces = [re.escape(piece.strip()) for piece in message.split("...") if piece.strip(" ;:")]
    return any(re.search(f"[^\n]*?{VALUE}?[^\n]*?".join(pieces), text) for text in texts())


def quoted() -> list[str]:
    """What the first cells of the tables put between backticks, if it is a sentence or a part of one."""
    cells = re.findall(r"^\| (.*?) \|", QUOTING.read_text(encoding="utf-8"), re.MULTILINE)
    return [one for cell in cells for one in re.findall(r"`([^`]*)`", cell) if " " in one and "--" not in one]


@pytest.mark.parametrize("message", quoted())
def test_a_message_that_is_quoted_is_one_of_the_package(message: str) -> None:
    assert is_said(message)


def test_messages_are_found_and_a_made_up_one_is_found_out() -> None:
    assert len(quoted()) >= 20
    assert not is_said("no such message is said by ...") and not is_said("start at least ... leave no worker")


def test_pages_that_texts_of_the_package_name_are_there() -> None:
    known = {page.relative_to(ROOT).as_posix() for page in PAGES}
    named = {
        name
        for text in texts()
        for name in re.findall(r"\b(?:docs|slurm|benchmarks|tests)/[\w/-]+\.md\b", text)
    }
    assert named <= known, sorted(named - known)


def test_variables_that_pages_name_are_read_by_something() -> None:
    code = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("mpitrain", "slurm", "benchmarks", "jobs", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sh", ".sbatch", ".j2", ".pbs", ".lsf", ".flux", ".def", ".lua")
    )
    for page in PAGES:
        for name in set(re.findall(r"\bMPITRAIN_[A-Z_]+\b", page.read_text(encoding="utf-8"))):
            assert re.search(rf"\b{name}\b", code), (page.name, name)
