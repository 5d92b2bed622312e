"""Verdicts on links and nodes that are planted: whose fault it is, and when nobody can say."""

from __future__ import annotations

from itertools import combinations

import pytest

from mpitrain.doctor.judge import Link, judge, rounds, sharing


def fabric(names: str, slow_nodes: str = "", slow_links: tuple[str, ...] = (), late: str = "") -> dict:
    links = {}
    for a, b in combinations(names, 2):
        slow = a in slow_nodes or b in slow_nodes or a + b in slow_links
        links[a, b] = Link(1e-3 if late and late in (a, b) else 2e-6, 1e8 if slow else 1e9)
    return links


@pytest.mark.parametrize("names", ["abc", "abcd", "abcdefgh"])
def test_a_slow_node_is_named_and_its_links_are_not(names: str) -> None:
    assert judge(fabric(names, slow_nodes="b")) == (["b"], [])
    assert judge(fabric(names, late="c")) == (["c"], [])


@pytest.mark.parametrize("names", ["abc", "abcd", "abcdefgh"])
def test_a_slow_link_between_good_nodes_is_named(names: str) -> None:
    assert judge(fabric(names, slow_links=("ac",))) == ([], [("a", "c")])


def test_two_nodes_have_one_link_and_no_culprit() -> None:
    assert judge({("a", "b"): Link(1.0, 1.0)}) == ([], [])


def test_noise_below_the_threshold_names_nobody() -> None:
    links = {
        pair: Link(2e-6 * (1 + i), 1e9 * (1 - 0.06 * i)) for i, pair in enumerate(combinations("abcd", 2))
    }
    assert judge(links) == ([], [])


@pytest.mark.parametrize("num_nodes", range(1, 10))
def test_rounds_hold_every_pair_once_and_no_node_twice(num_nodes: int) -> None:
    pairs = [pair for pairs in rounds(num_nodes) for pair in pairs]
    assert sorted(pairs) == list(combinations(range(num_nodes), 2))
    for each in rounds(num_nodes):
        busy = [node for pair in each for node in pair]
        assert len(busy) == len(set(busy))


def test_ranks_that_share_a_device_are_named() -> None:
    assert sharing(["GPU-1", "GPU-2", None, "GPU-1", None]) == [("GPU-1", [0, 3])]
    assert sharing([None, None]) == []
