"""Verdicts on links and nodes that are planted: whose fault it is, and when nobody can say."""

from __future__ import annotations

from itertools import combinations

import pytest

from mpitrain.doctor.judge import (
    ALL_PAIRS,
    Link,
    common_faults,
    disjoint,
    judge,
    rounds,
    sharing,
    slow_nodes,
)


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


def test_many_nodes_meet_a_few_partners_each() -> None:
    """Above `ALL_PAIRS` nodes the number of rounds stays: everybody meets as many others, none twice."""
    assert len(list(rounds(ALL_PAIRS, 10))) == ALL_PAIRS - 1
    for num_nodes in (ALL_PAIRS + 1, 128, 10_240):
        found = list(rounds(num_nodes, 10))
        partners: dict[int, list[int]] = {node: [] for node in range(num_nodes)}
        for pairs in found:
            assert all(a < b for a, b in pairs)
            for a, b in pairs:
                partners[a].append(b)
                partners[b].append(a)
        least = 10 - num_nodes % 2  # of an odd number one node pauses in each round
        assert len(found) == 10 and all(len(set(one)) == len(one) >= least for one in partners.values())
        assert found == list(rounds(num_nodes, 10))  # every rank draws the same


def test_suspicions_are_measured_again_without_two_on_a_node() -> None:
    pairs = [(0, 1), (0, 2), (1, 2), (3, 4)]
    again = list(disjoint(pairs))
    assert again == [[(0, 1), (3, 4)], [(0, 2)], [(1, 2)]]


def test_settings_that_differ_a_little_are_found_and_speeds_are_not() -> None:
    usual = {"gpu_max_clock_mhz": 1980.0, "matmul_gflop_per_s": 100.0}
    nodes = dict.fromkeys("abc", ("kind", usual))
    nodes["d"] = ("kind", {"gpu_max_clock_mhz": 1410.0, "matmul_gflop_per_s": 71.0})
    assert slow_nodes(nodes) == {"d": ["highest GPU clock 1410 MHz, the others' median is 1980 MHz"]}


def test_a_disk_is_slow_below_a_quarter() -> None:
    nodes = dict.fromkeys("abc", ("kind", {"disk_write_mb_per_s": 800.0}))
    assert slow_nodes({**nodes, "d": ("kind", {"disk_write_mb_per_s": 210.0})}) == {}
    assert list(slow_nodes({**nodes, "d": ("kind", {"disk_write_mb_per_s": 190.0})})) == ["d"]


def test_most_is_more_than_half_and_more_than_one() -> None:
    assert common_faults({"a": {"x"}, "b": {"x", "y"}}, 4) == {}
    assert common_faults({"a": {"x"}, "b": {"x", "y"}}, 3) == {"x": 2}
    assert common_faults({"a": {"x"}}, 1) == {}


def test_ranks_that_share_a_device_are_named() -> None:
    assert sharing(["GPU-1", "GPU-2", None, "GPU-1", None]) == [("GPU-1", [0, 3])]
    assert sharing([None, None]) == []
