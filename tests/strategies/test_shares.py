"""The course that peers walk without a dealer: every sample once, equally many steps for all."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mpitrain import Warmup
from mpitrain.strategies.sampling.dealer import share_out
from mpitrain.strategies.sampling.peer_partition import PeerPartition


def course(*arguments, **options):
    shares = PeerPartition(*arguments, **options)
    turns = []
    while True:
        ahead, turn = shares.peek(), shares.next()
        assert ahead == turn
        if turn is None:
            break
        turns.append(turn)
        assert len(turns) < 10_000
    return turns, shares


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 60), st.integers(1, 3), st.integers(1, 9), st.integers(1, 7), st.booleans(),
    st.one_of(st.none(), st.integers(1, 30)), st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0]),
)  # fmt: skip
def test_peers_cover_every_sample_once_in_equally_many_steps(
    num_samples, epochs, batch_size, peers, drop_last, steps, first, warm
):
    assume(num_samples >= peers)
    walked = [
        course(num_samples, epochs, batch_size, peers, peer, steps, drop_last, Warmup(first, warm))
        for peer in range(peers)
    ]
    assert len({len(turns) for turns, _ in walked}) == 1
    if steps is not None:
        assert len(walked[0][0]) == steps
    seen = {}
    for together in zip(*(turns for turns, _ in walked), strict=True):
        leases = [turn.lease for turn in together if turn.lease is not None]
        assert len(leases) == together[0].num_active
        assert sum(lease.num_samples for lease in leases) == together[0].num_samples
        assert abs(sum(turn.weight for turn in together if turn.lease) - len(leases)) < 1e-9
        for lease in leases:
            assert lease.num_samples > 0
            covered = seen.setdefault(lease.epoch, [])
            covered += range(lease.start, lease.start + lease.num_samples)
    for covered in seen.values():
        assert covered == list(range(len(covered)))
    if steps is None:
        assert sum(map(len, seen.values())) + walked[0][1].num_left_out == num_samples * epochs


def test_without_warm_up_it_is_the_cut_of_allreduce():
    for peer in range(4):
        turns, shares = course(30, 1, 3, 4, peer)
        expected = [share_out(0, 12, 4, peer), share_out(12, 12, 4, peer), share_out(24, 6, 4, peer)]
        assert [(turn.lease.start, turn.lease.num_samples) for turn in turns] == expected
        assert shares.num_left_out == 0 and [turn.samples_before for turn in turns] == [0, 12, 24]


def test_a_restored_course_goes_on_where_it_was_with_another_number_of_peers():
    first = PeerPartition(50, 2, 4, 3, 0)
    for _ in range(3):
        first.next()
    second = PeerPartition(50, 2, 4, 2, 1)
    second.restore(first.state())
    turn = second.next()
    assert turn.samples_before == 36 and turn.lease.start == 36 + 4 and turn.step == 3
