"""The table of outcomes, the list of expected differences, and what they say together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PASS, SKIP, FAIL, HANG, CRASH = "pass", "skip", "fail", "hang", "crash"
GLOO, OURS = "gloo", "mpi4py"
SIZES = (2, 3, 4)
Table = dict[str, dict[str, str]]  # column "gloo:2" -> test -> outcome
COLUMNS = [f"{backend}:{size}" for backend in (GLOO, OURS) for size in SIZES]
_NOT_RUN = "-"


@dataclass(frozen=True)
class Difference:
    """A test that gloo passes and ours does not, on some numbers of ranks, and why that is as it should be."""

    test: str
    sizes: tuple[int, ...]
    reason: str


def read_differences(text: str) -> list[Difference]:
    """Lines "TEST SIZES REASON", such as "test_x 2,3 because"; what begins with # is a comment. Raises ValueError."""
    found = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        fields = line.split(None, 2)
        if len(fields) < 3 or not re.fullmatch(r"[2-9](,[2-9])*", fields[1]):
            raise ValueError(f"not a test, its numbers of ranks and a reason: {line}")
        found.append(Difference(fields[0], tuple(map(int, fields[1].split(","))), fields[2]))
    return found


def judge(
    table: Mapping[str, Mapping[str, str]], differences: Iterable[Difference], whole: bool = True
) -> list[str]:
    """What is not as the list says, in the columns that the table has; `whole`: with every test."""
    listed = {(each.test, size) for each in differences for size in each.sizes}
    wrong = []
    for size in SIZES:
        ours, gloo = table.get(f"{OURS}:{size}", {}), table.get(f"{GLOO}:{size}", {})
        for test in sorted(ours):
            if ours[test] == PASS and (test, size) in listed:
                wrong.append(f"{test} on {size} ranks passes now: take it off differences.txt")
            elif gloo.get(test) == PASS and ours[test] != PASS and (test, size) not in listed:
                wrong.append(f"{test} on {size} ranks: gloo passes, {OURS}: {ours[test]}")
        if whole and ours and gloo:
            wrong += [
                f"differences.txt has {test} on {size} ranks, which is no test"
                for test, its_size in sorted(listed)
                if its_size == size and test not in ours
            ]
    return wrong


def summary(table: Mapping[str, Mapping[str, str]]) -> str:
    """How many of the tests that gloo passes pass here, over all numbers of ranks that both columns have."""
    lines = []
    whole = [0, 0, 0]
    for size in SIZES:
        ours, gloo = table.get(f"{OURS}:{size}", {}), table.get(f"{GLOO}:{size}", {})
        both = [test for test in ours if test in gloo]
        passed = [test for test in both if gloo[test] == PASS]
        counts = [
            len(passed),
            sum(ours[test] == PASS for test in passed),
            sum(ours[test] == PASS and gloo[test] != PASS for test in both),
        ]
        whole = [total + count for total, count in zip(whole, counts)]
        lines.append(_sentence(f"{size} ranks", counts))
    return "\n".join([*lines, _sentence("together", whole)])


def _sentence(where: str, counts: list[int]) -> str:
    passed, common, only_ours = counts
    return f"{where}: gloo passes {passed}, {OURS} {common} of them and {only_ours} that gloo does not"


def as_text(table: Mapping[str, Mapping[str, str]]) -> str:
    """The table, without tests that are skipped everywhere."""
    tests = sorted({test for column in table.values() for test in column})
    rows = [["test", *COLUMNS]]
    for test in tests:
        outcomes = [table.get(column, {}).get(test, _NOT_RUN) for column in COLUMNS]
        if not set(outcomes) <= {SKIP, _NOT_RUN}:
            rows.append([test, *outcomes])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def from_text(text: str) -> Table:
    """The table that `as_text` has written, wherever it begins in the text."""
    table: Table = {}
    columns: list[str] = []
    for line in text.splitlines():
        fields = line.split()
        if fields[:1] == ["test"]:
            columns = fields[1:]
        elif columns and len(fields) == len(columns) + 1:
            for column, outcome in zip(columns, fields[1:]):
                if outcome != _NOT_RUN:
                    table.setdefault(column, {})[fields[0]] = outcome
    return table
