"""`make pages`: its table is of the commands that the pages print, nothing in it has failed, and a sample runs here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import documented, pages

ROWS = pages.kept()
COMMANDS = pages.commands()
NOT_YET = [row for row in ROWS.values() if row.result == pages.NOT_YET]
# Short, and of each kind: a plan, a dry run, a pack, the imports of a floor.
SAMPLE = (
    r"plan jobs/digits\.py --compute",
    r'"pipeline\(.*--dry-run',
    r"data pack samples\.npz",
    r"docs\.floors.*'codecs'",
)


def test_the_table_has_a_row_for_each_command_and_none_has_failed() -> None:
    wanted = {(pages.named(command.page), command.text) for command in COMMANDS}
    assert set(ROWS) == wanted, "run `make pages ARGS=PAGE` for the pages whose commands have changed"
    assert [row for row in ROWS.values() if row.result.startswith("FAILED")] == []


def test_what_was_not_run_is_what_the_pages_mark() -> None:
    for command in COMMANDS:
        row = ROWS[pages.named(command.page), command.text]
        why = pages.not_run(command)
        assert (
            (row.result, row.seconds < 0) == (why, True)
            if why
            else row.result.startswith("ok") or row in NOT_YET
        )


def test_the_first_line_counts() -> None:
    first = pages.TABLE.read_text(encoding="utf-8").partition("\n")[0]
    ran = sum(row.seconds >= 0 for row in ROWS.values())
    assert first.startswith(f"{len(ROWS)} commands: {ran} run, 0 failed, ")
    assert f"{len(NOT_YET)} {pages.NOT_YET}" in first or not NOT_YET


def test_a_mark_is_read_from_its_block_or_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\nhere   # a word\nthere   # needs Slurm: more\n```\n\n<!-- needs: root -->\n```sh\nboth\n```\n"
        "```python\nnone\n```\n"
    )
    found = [(command.text, command.needs) for command in documented.printed(page)]
    assert found == [("here", ""), ("there", "Slurm"), ("both", "root")]


def test_a_row_is_read_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[next(iter(ROWS))]
    monkeypatch.setattr(pages, "TABLE", tmp_path / "pages.txt")
    pages.write({(row.page, row.command): row._replace(seconds=1.5, result="ok")})
    assert pages.kept()[row.page, row.command] == row._replace(seconds=1.5, result="ok")
    assert set(pages.kept()) == set(ROWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> documented.Folder:
    return documented.Folder(tmp_path_factory.mktemp("printed"))


@pytest.mark.parametrize("pattern", SAMPLE)
def test_a_sample_runs_as_printed(folder: documented.Folder, pattern: str) -> None:
    command = next(
        command for command in COMMANDS if re.search(pattern, command.text) and not pages.not_run(command)
    )
    folder.run(command.text)
