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
    assert Costs(decode_gb_per_s=2.0).seconds("apply", 4e9, num_batches=3, codes=True) == 6.0
    assert Costs(decode_gb_per_s=2.0).seconds("apply", 4e9, num_batches=3) == 0.0
    assert costs.seconds("validate", 4e9) == 3.0 and costs.seconds("validate", 4e9, size=0.0) == 0.0
    assert costs.seconds("checkpoint", 4e9) == 0.0
    assert Costs(checkpoint_gb_per_s=8.0).seconds("deliver", 4e9) == 0.5
    assert Costs(checkpoint_gb_per_s=8.0).seconds("checkpoint", 4e9, size=0.0) == 0.0
    with pytest.raises(UsageError):
        Costs(read_s=-1.0)


@pytest.mark.parametrize("strategy", ["localsgd(period=2)", "decentralized()"])
def test_who_writes_nothing_pays_for_no_checkpoint(tmp_path, strategy):
    took_s = [
        mt.simulate(
            toy.make_job(), parse(strategy, "strategy"), workers=2, run_dir=str(tmp_path / str(number)),
            quiet=True, compute=Constant(1.0, 0.0), costs=costs,
        )["virtual_s"]
        for number, costs in enumerate((Costs(), Costs(checkpoint_gb_per_s=1e-6)))
    ]  # fmt: skip
    assert took_s[0] == took_s[1] > 0


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


@pytest.mark.parametrize(
    "rule, num_decoded", [("async(push_wire=topk())", 12), ("sync(push_wire=topk())", 12), ("sync()", 0)]
)
def test_a_server_decodes_every_push_that_is_encoded(tmp_path, rule, num_decoded):
    """Three workers push four times each, and compute in next to no time, so the server's decoding is all there is."""

    def seconds(name, costs):
        result = mt.simulate(
            toy.make_job(validate=None), parse(rule, "strategy"), 3, Constant(1e-9, 0.0), costs=costs, steps=4,
            run_dir=str(tmp_path / name), quiet=True,
        )  # fmt: skip
        return result["virtual_s"]

    num_bytes = sum(one.nbytes for one in toy.make_job().model().parameters())
    longer_s = seconds("decoded", Costs(decode_gb_per_s=1e-6)) - seconds("plain", Costs())
    assert longer_s == pytest.approx(num_decoded * num_bytes / 1e3, rel=1e-6)


def test_every_rank_decodes_what_all_have_encoded(tmp_path):
    def seconds(name, workers, costs):
        result = mt.simulate(
            toy.make_job(validate=None), parse("allreduce(codec=topk())", "strategy"), workers, Constant(1.0, 0.0),
            costs=costs, steps=4, run_dir=str(tmp_path / f"{name}-{workers}"), quiet=True,
        )  # fmt: skip
        return result["virtual_s"]

    num_bytes = sum(one.nbytes for one in toy.make_job().model().parameters())
    for workers in (2, 5):
        longer_s = seconds("decoded", workers, Costs(decode_gb_per_s=1e-6)) - seconds(
            "plain", workers, Costs()
        )
        assert longer_s == pytest.approx(4 * workers * num_bytes / 1e3, rel=1e-6)


@pytest.mark.parametrize("rule", ["allreduce()", "localsgd(period=2)"])
def test_validations_are_pauses_where_they_are_over_mpi(tmp_path, rule):
    job = toy.make_job(
        strategy=parse(rule, "strategy"), epochs=3, validate=toy.Memory(12)
    )  # one batch, the first one's
    found = mt.simulate(
        job,
        workers=2,
        compute=Constant(1.0, 0.0),
        costs=Costs(validate_s=8.0),
        run_dir=str(tmp_path),
        quiet=True,
    )
    assert num_validations(tmp_path) == 2 and found["paused_s"] == pytest.approx(2 * 8.0)


def num_validations(run_dir):
    rows = (run_dir / "metrics.jsonl").read_text().splitlines()
    return sum('"event": "validation"' in row for row in rows)
