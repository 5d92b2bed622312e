"""A worker that reads what it is sent late: its senders hold it meanwhile, and nobody writes into what they hold.

Every payload is stamped as it would be over MPI when it is sent, and looked at when it is read: not a bit of it may
have changed.
"""

import pytest
import torch

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.messages import payloads_of
from mpitrain.model.wire.buffers import FixedBuffer, VariableBuffer
from mpitrain.strategies.base import ServerStrategy
from mpitrain.values import parse
from mpitrain.virtual import Constant, VirtualWorld
from tests import toy
from tests.virtual.course import COURSE, on_servers

WORKERS = 3
PEERS = {
    text: parse(text, "strategy")
    for text in (
        "decentralized()",
        "decentralized(asynchronous=True)",
        "decentralized(codec=topk(density=0.5))",
    )
}
CODED = mt.TopK(density=0.5)
STRATEGIES = (
    {row: on_servers(make(WORKERS), 2, WORKERS) for row, make in COURSE.items() if "abort" not in row}
    | {
        "coded": mt.Async(servers=2, push_wire=CODED, reply_wire=CODED),
        "rounded": mt.Async(servers=2, push_wire="bfloat16", reply_wire="bfloat16"),
        "corrected": mt.Async(servers=2, damping=mt.DelayCompensated()),
    }
    | PEERS
)


class Seen:
    """Payloads that are under way, by their message."""

    def __init__(self):
        self.sent, self.num_read = {}, 0

    def send(self, message):
        payloads = [one for one in payloads_of(message) if isinstance(one, FixedBuffer | VariableBuffer)]
        stamps = [one.stamp() for one in payloads]
        bits = [one.raw.clone() for one in payloads]
        self.sent[id(message)] = (message, payloads, stamps, bits)

    def read(self, message):
        _, payloads, stamps, bits = self.sent.pop(id(message))
        self.num_read += len(payloads)
        for payload, stamp, sent in zip(payloads, stamps, bits, strict=True):
            assert payload.stamps() == (stamp, stamp) and torch.equal(payload.raw, sent), message


@pytest.fixture
def seen(monkeypatch):
    seen, send, advance = Seen(), VirtualWorld._send, VirtualWorld._advance

    def on_send(self, source, effect):
        seen.send(effect.message)
        send(self, source, effect)

    def on_advance(self, process, answer):
        role = process.role

        class Read:
            @staticmethod
            def send(answer):
                if isinstance(answer, tuple) and len(answer) == 2 and id(answer[1]) in seen.sent:
                    seen.read(answer[1])
                return role.send(answer)

        process.role = Read
        try:
            advance(self, process, answer)
        finally:
            process.role = role

    monkeypatch.setattr(VirtualWorld, "_send", on_send)
    monkeypatch.setattr(VirtualWorld, "_advance", on_advance)
    return seen


ALWAYS = ("sync", "async", "ssp", "bounded", "elastic", "coded", "rounded", "corrected", "decentralized()")


@pytest.mark.parametrize(
    "row", [row if row in ALWAYS else pytest.param(row, marks=pytest.mark.extended) for row in STRATEGIES]
)
def test_what_a_slow_reader_is_sent_stays_as_it_was(tmp_path, seen, row):
    strategy = STRATEGIES[row]
    orders = ["slow_reader(worker=1, seconds=2.5)"]
    if isinstance(strategy, ServerStrategy) and not strategy.blocks_apart:
        orders.append("kill(worker=2, at_step=1)")  # what it had in hand is dealt again
    job = toy.make_job(epochs=1, batch_size=4)
    took_s = []
    for inject in (orders[1:], orders):
        run_dir = str(tmp_path / str(len(inject)))
        result = mt.simulate(
            job, strategy, WORKERS, Constant(1.0, 0.3), run_dir=run_dir, quiet=True, inject=inject
        )
        assert result["status"] == "ok", result["failure"]
        took_s.append(result["virtual_s"])
    assert took_s[1] > took_s[0] and seen.num_read


@pytest.mark.parametrize("strategy", [mt.AllReduce(), mt.LocalSGD()], ids=str)
def test_a_slow_reader_of_no_messages_is_refused(tmp_path, strategy):
    with pytest.raises(UsageError, match="sent no messages that could be read late"):
        mt.simulate(
            toy.make_job(), strategy, 2, run_dir=str(tmp_path), inject="slow_reader(worker=1, seconds=1)"
        )
