"""What faults are planted, by hand, and that the committed sample, table and results belong together."""

from __future__ import annotations

import ast

from tests.mutants.campaign import NUM, ROOT, all_mutants, drawn, files_of, results, table
from tests.mutants.operators import mutants_of

SOURCE = b'''
"""Text of 1 + 1."""
def weight(staleness: int = 2) -> float:
    assert staleness > 0
    if staleness:
        note(staleness)
    return 1.0 / (1 + staleness)
'''


def test_each_operator_by_hand() -> None:
    found = {(one.operator, one.before, one.after) for one in mutants_of("m.py", SOURCE)}
    assert found == {
        ("constant", "2", "(3)"), ("condition", "staleness", "(not (staleness))"),
        ("left out", "note(staleness)", "pass"), ("return", "return 1.0 / (1 + staleness)", "return None"),
        ("operator", "1.0 / (1 + staleness)", "(1.0 * (1 + staleness))"),
        ("operator", "1 + staleness", "(1 - staleness)"), ("constant", "1.0", "(2.0)"), ("constant", "1", "(2)"),
    }  # fmt: skip
    for one in mutants_of("m.py", SOURCE):
        assert ast.dump(ast.parse(one.apply(SOURCE))) != ast.dump(ast.parse(SOURCE))


def test_a_change_elsewhere_draws_no_other_faults() -> None:
    before, after = mutants_of("m.py", SOURCE), mutants_of("m.py", b"x = 1\n" + SOURCE)
    assert {one.key for one in before} < {one.key for one in after}


def test_the_sample_has_tests_and_what_is_known_of_it_is_of_these_files() -> None:
    sample, named = drawn(list(all_mutants())), table()
    assert len({one.key for one in sample}) == NUM
    for path, tests in named.items():
        assert all((ROOT / one.partition("::")[0]).is_file() for one in tests), path
    assert {row.get("path", row["key"]) for row in results().values()} <= set(files_of())
