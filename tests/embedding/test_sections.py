"""What travels beside dense numbers comes back as it was, and what is damaged is an error."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.embedding.sections import Section, What, join, split
from mpitrain.errors import WireError

SIZES, WIDTHS = [1000, 70_000], [4, 1]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def rows(table, count, dtype, seed=0):
    draw = np.random.default_rng(seed)
    slots = np.sort(draw.choice(SIZES[table], count, replace=False)).astype(np.int64)
    return Section(What.ROWS, table, slots, torch.randn(count, WIDTHS[table]).to(dtype))


def same(one, other):
    assert (one.what, one.table) == (other.what, other.table)
    assert (one.slots is None) == (other.slots is None)
    assert one.slots is None or np.array_equal(one.slots, other.slots)
    assert (one.values is None) == (other.values is None)
    assert one.values is None or (
        one.values.dtype == other.values.dtype and torch.equal(one.values, other.values)
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 40), st.integers(0, 300), st.sampled_from(DTYPES), st.integers(0, 99))
def test_sections_come_back_as_they_were(few, many, dtype, seed):
    sent = [
        Section(What.DENSE, values=torch.randn(few).to(dtype)),
        rows(0, few, dtype, seed),
        rows(1, many, dtype, seed),
        rows(1, few, torch.float32, seed)._replace(what=What.WANTED, values=None),
        Section(What.CODED, values=torch.arange(few).to(torch.uint8)),
    ]
    for one, other in zip(sent, split(join(sent, SIZES), SIZES, WIDTHS), strict=True):
        same(one, other)


def test_the_bytes_are_those_of_rows_and_coded_ids():
    """5 % more than rows x (4 width + the bytes that the coder takes) at the most."""
    section = rows(1, 7000, torch.float32)
    from mpitrain.codecs.index_coding import encode

    _, ids = encode(section.slots, SIZES[1])
    assert len(ids) < 7000  # less than a byte an id where one of ten rows is touched
    assert join([section], SIZES).numel() <= 1.05 * (7000 * 4 + len(ids))


@pytest.mark.parametrize("at", [0, 5, 9, 12, 20, 30])
def test_a_damaged_message_is_an_error(at):
    message = join([rows(0, 10, torch.float32), rows(1, 10, torch.float32)], SIZES)
    message[at] ^= 0xFF
    with pytest.raises(WireError):
        split(message, SIZES, WIDTHS)


def test_a_message_that_is_cut_off_is_an_error():
    message = join([rows(0, 10, torch.float32)], SIZES)
    for end in (0, 3, 8, 20, 60, message.numel() - 8):
        with pytest.raises(WireError):
            split(message[:end].clone(), SIZES, WIDTHS)


def test_slots_beyond_a_server_s_part_are_an_error():
    message = join([rows(1, 50, torch.float32)], SIZES)
    with pytest.raises(WireError):
        split(message, [10, 10], WIDTHS)
