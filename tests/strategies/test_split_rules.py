"""Strategies that split a model: who holds what on which node, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import UsageError
from mpitrain.strategies import Pipeline, Sharded, TensorParallel
from mpitrain.strategies.model_parallel.mesh_layout import arrange
from mpitrain.values import parse


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 6),
    st.sampled_from(["parts", "replicas"]),
    st.randoms(),
)
def test_every_rank_has_one_place_and_no_group_straddles_nodes_without_need(
    sizes, num_parts, together, random
):
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    random.shuffle(nodes)
    nodes = nodes[: len(nodes) // num_parts * num_parts]
    if not nodes:
        return
    grid = arrange(tuple(nodes), num_parts, together)
    assert sorted(rank for row in grid.ranks for rank in row) == list(range(len(nodes)))
    assert (grid.num_replicas, grid.num_parts) == (len(nodes) // num_parts, num_parts)
    assert grid.place(0) == (0, 0)
    assert all(grid.ranks[r][p] == rank for rank in range(len(nodes)) for r, p in [grid.place(rank)])
    groups = grid.ranks if together == "parts" else list(zip(*grid.ranks))
    size = len(groups[0])
    on_one_node = sum(len({nodes[rank] for rank in group}) == 1 for group in groups)
    most = sum(nodes.count(node) // size for node in set(nodes))
    assert on_one_node >= most  # no placement keeps more groups within nodes


def test_what_talks_most_sits_on_one_node():
    nodes = (0, 0, 1, 1)
    assert TensorParallel().grid(nodes).ranks == ((0, 1), (2, 3))  # slices of a layer
    assert Pipeline().grid(nodes).ranks == ((0, 2), (1, 3))  # replicas of a stage
    assert Pipeline(together="stages").grid(nodes).ranks == ((0, 1), (2, 3))
    assert Sharded(replicas=2).grid(nodes).ranks == ((0, 1), (2, 3))
    assert Sharded().grid(nodes).ranks == ((0, 1, 2, 3),)


def test_how_many_batches_a_step_takes():
    assert Pipeline(stages=2).num_replicas(6) == 3
    assert TensorParallel(parallel=6).num_replicas(6) == 1
    assert Sharded(replicas=2).num_replicas(6) == 6


def test_the_bubble_is_that_of_the_schedule():
    assert Pipeline(stages=4, microbatches=8).bubble == 3 / 11
    assert Pipeline(stages=1, microbatches=8).bubble == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pipeline(stages=0)", "stages must be at least 1"),
        ("pipeline(microbatches=0)", "microbatches must be at least 1"),
        ("pipeline(schedule='1f2b')", "did you mean '1f1b'"),
        ("pipeline(together='stage')", "did you mean 'stages'"),
        ("pipeline(stages=4, microbatches=3)", "needs microbatches of at least 4"),
        ("tensor(parallel=0)", "at least 1"),
        ("sharded(replicas=0)", "at least 1"),
    ],
)
def test_values_without_sense_are_refused(text, said):
    with pytest.raises(UsageError, match=said):
        parse(text, "strategy")


def test_gpipe_takes_fewer_microbatches_than_stages():
    assert (
        str(parse("pipeline(4, 2, 'gpipe')", "strategy"))
        == "pipeline(stages=4,microbatches=2,schedule='gpipe')"
    )


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [(Pipeline(stages=3), 4), (TensorParallel(parallel=8), 4), (Sharded(replicas=3), 4)],
)
def test_ranks_that_do_not_divide_are_refused(strategy, num_ranks):
    with pytest.raises(UsageError, match="start a multiple of"):
        strategy.grid((0,) * num_ranks)


def test_a_batch_that_cannot_be_cut_is_refused():
    Pipeline(microbatches=4).check_batch(12)
    with pytest.raises(UsageError, match="batch of 10 samples cannot be cut into 4"):
        Pipeline(microbatches=4).check_batch(10)
