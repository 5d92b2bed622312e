"""The table of all pairs of features: it names every pair, none of which fails, and a sample of it is as it says."""

import pytest

from tests import pairs

ROWS = pairs.TABLE.read_text(encoding="utf-8").splitlines()
# the first pair that was ever tried, and some of each kind that runs in virtual time
SAMPLE = [
    number
    for number, row in enumerate(ROWS)
    if row.startswith("activation_checkpointing | compile |")
    or (number % 97 == 5 and pairs.pair(number).is_virtual)
]


def test_the_table_has_every_pair_and_none_fails():
    assert len(ROWS) == len(pairs.PAIRS)
    for number, row in enumerate(ROWS):
        assert row.startswith(pairs.line(number, ""))
        outcome = row.removeprefix(pairs.line(number, ""))
        assert outcome == "works" or outcome.startswith(("refused: ", "one field: ")), row


@pytest.mark.parametrize("number", SAMPLE, ids=lambda number: ROWS[number].rpartition(" | ")[0])
def test_a_pair_does_what_the_table_says(number):
    assert pairs.line(number, pairs.run([number])[number]) == ROWS[number]
