"""What is charged besides gradients and messages, in simulated runs against closed forms."""

from __future__ import annotations

import pytest

import mpitrain as mt
from mpitrain.effects import Compute, Recv, Send
from mpitrain.errors import UsageError
from mpitrain.messages import Wake
from mpitrain.values import parse
from mpitrain.virtual import Constant, Costs, Ideal, VirtualWorld
from tests import toy


def test_seconds_are_bytes_over_rates():
    costs = parse("costs(memory_gb_per_s=2, passes=5, codec_gb_per_s=4, read_s=0.5, validate_s=3)", "costs")
    assert costs.seconds("apply", 4e9) == 10.0
    assert costs.seconds("gradient", 4e9, num_batches=3, size=2.0) == 3.0
    assert costs.seconds("gradient", 4e9, codes=True) == 0.5 + 1.0
    assert costs.seconds("gradient", 4e9, updates=True) == 0.5 + 10.0
    assert costs.seconds("validate", 4e9) == 3.0 and costs.seconds("validate", 4e9, size=0.0) == 0.0
    assert costs.seconds("checkpoint", 4e9) == 0.0
    assert Costs(checkpoint_gb_per_s=8.0).seconds("deliver", 4e9) == 0.5
    with pytest.raises(UsageError):
        Costs(read_s=-1.0)


def test_a_server_that_applies_hears_nothing_meanwhile_and_messages_wait():
    """Three messages at 0, each of which is applied for 2 s: answered at 2, 4, 6."""
    world = VirtualWorld(Constant(1.0, 0.0), Ideal())
    world.charge = lambda rank, effect: 2.0 if effect.what == "apply" else 0.25
    done = []

    def server():
        for _ in range(3):
            yield Recv()
            done.append((yield Compute(lambda: world.now_s, "apply")))
        return world.now_s

    def worker():
        for _ in range(3):
            yield Send(0, Wake(False))
        yield Compute(lambda: None)
        return world.now_s

    assert world.run({0: server(), 1: worker()}) == {0: 6.0, 1: 1.25}
    assert done == [0.0, 2.0, 4.0]


def test_a_simulated_run_lasts_as_much_longer_as_its_updates_take(tmp_path):
    """One worker, one server: every step waits for its update."""

    def seconds(name, **options):
        result = mt.simulate(
            toy.make_job(),
            mt.Async(),
            1,
            Constant(1.0, 0.0),
            steps=6,
            run_dir=str(tmp_path / name),
            quiet=True,
            **options,
        )
        return result["virtual_s"], result["costs"]

    num_bytes = sum(one.nbytes for one in toy.make_job().model().parameters())
    plain_s, _ = seconds("plain")
    applied_s, text = seconds("applied", costs=Costs(memory_gb_per_s=1e-6))
    read_s, _ = seconds("read", costs=Costs(read_s=0.5, codec_gb_per_s=1e-9))  # there is no codec
    assert text == "costs(memory_gb_per_s=1e-06)"
    assert applied_s - plain_s == pytest.approx(6 * 3 * num_bytes / 1e3)
    assert read_s - plain_s == pytest.approx(6 * 0.5)
