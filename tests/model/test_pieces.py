"""Tensors in pieces."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.model.pieces import cut


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(8, 200))
def test_all_pieces_together_are_all_numbers_in_their_order_and_none_is_larger_than_asked(sizes, piece_bytes):
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    tensors = [torch.arange(start, end) for start, end in zip(ends, ends[1:], strict=False)]
    pieces = [piece.of(tensors) for piece in cut(tensors, piece_bytes)]
    found = [number for piece in pieces for view in piece for number in view.tolist()]
    assert found == list(range(ends[-1]))
    assert all(sum(view.nbytes for view in piece) <= piece_bytes for piece in pieces)
    for before, after in itertools.pairwise(pieces):  # which could not have held what begins the next
        assert sum(view.nbytes for view in before) + after[0].nbytes > piece_bytes


def test_what_is_written_into_a_piece_is_in_the_tensors():
    tensors = [torch.zeros(5, 4), torch.zeros(3), torch.zeros(6, 7).t()]
    for number, piece in enumerate(cut(tensors, 32), start=1):
        for view in piece.of(tensors):
            view.fill_(number)
    assert all((tensor > 0).all() for tensor in tensors)
    assert tensors[2].unique().numel() == 1  # which lies in memory in another order, and so stays whole
    assert cut(tensors, 32)[0].pick([0.5, 1.0, 2.0]) == [0.5]
