"""Small laws of roles: what a peer goes on with among fewer, and a record of arrivals."""

import json

import mpitrain as mt
from mpitrain.reporting.report import NullReport
from mpitrain.roles.peer import Peer
from mpitrain.roles.replay import OrderFile, load_order, recording
from mpitrain.strategies.sampling.peer_partition import PeerPartition


def peer_of(number: int) -> Peer:
    return Peer(0, number, mt.Decentralized(), PeerPartition(48, 2, 4, number, 0), None, NullReport())


def test_among_fewer_no_more_are_active_than_there_are():
    before = peer_of(4)
    before.batches, before.samples, before.drift = 3, 7, 0.5
    assert before.state()["num_active"] == 4
    for number, active in ((2, 2), (4, 4), (6, 4)):
        after = peer_of(number)
        after.restore(before.state())
        assert after.num_active == active
        assert (after.batches, after.samples, after.drift, after.sent_bytes) == (3, 7, 0.5, 0)


def test_a_record_of_arrivals_is_whole_or_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(OrderFile, "NUM_HELD", 3)
    for num_arrived in (0, 1, 2, 3, 4, 6, 7, 8):
        with recording(tmp_path, 1) as order:
            for sender in range(num_arrived):
                order.append(sender)
                assert len(order._held) < 3
            assert not (tmp_path / "arrivals-1.json").exists()
        assert load_order(tmp_path, 1) == list(range(num_arrived))
        assert json.loads((tmp_path / "arrivals-1.json").read_text()) == list(range(num_arrived))
        assert [path.name for path in tmp_path.iterdir()] == ["arrivals-1.json"]
        (tmp_path / "arrivals-1.json").unlink()


def test_a_record_that_could_not_be_written_on_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(OrderFile, "NUM_HELD", 1)

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, text):
            raise OSError("no space left")

        def close(self):
            self.file.close()

    with recording(tmp_path, 0) as order:
        order.append(4)
        order._file, file = Full(order._file), order._file
        order.append(5)
        assert order._file is None and file.closed
        order.append(6)
    assert list(tmp_path.iterdir()) == []
