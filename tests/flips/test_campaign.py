"""A fixed sample of the campaign's cases, and that it sees what it is for."""

import pytest

from tests.flips.campaign import MUST_BE_FOUND, missed, play, verdict
from tests.flips.draw import KINDS, draw

SAMPLE = range(8)


def test_a_fixed_sample_is_found_and_ends_in_the_bits_of_an_undisturbed_run(tmp_path):
    rows = play(SAMPLE, tmp_path)
    assert [row["number"] for row in rows] == [*SAMPLE], rows[-1]
    wrong = [row for row in rows if row["kind"] in MUST_BE_FOUND and row["verdict"] != "found"]
    assert wrong == []


def test_a_case_is_drawn_from_its_number_alone():
    assert [draw(number) for number in range(40)] == [draw(number) for number in range(40)]
    assert {draw(number).kind for number in range(4)} == set(KINDS)
    assert len({draw(number).order for number in range(40)}) == 40


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "found"),
        ({"redone_steps": 5}, "missed"),  # later than at the next comparison
        ({"same": False}, "missed"),
        ({"times": 0, "redone_steps": 0}, "vanished"),
        ({"times": 0, "redone_steps": 0, "same": False}, "missed"),
        ({"times": 2}, "missed"),
        ({"error": "rank 1: ..."}, "ended"),
    ],
)
def test_what_becomes_of_a_flip(changes, expected):
    row = {"times": 1, "redone_steps": 4, "same": True, "error": "", "options": {"compare_every": 4}}
    assert verdict(row | changes) == expected
    assert missed([{"kind": "payload", "verdict": expected}]) == (["payload"] if expected == "missed" else [])
