"""Several batches to a step, in virtual time: the model, the samples and the time are those of one large batch."""

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.job import Overrides, apply_overrides
from mpitrain.messages import Lease
from mpitrain.model.gradient.accumulation import LeaseReader
from mpitrain.strategies.parameter_server.batch_size import PerRound
from mpitrain.virtual import Constant
from tests import toy

EVEN = Constant(jitter=0.0)
LOCKSTEP = [
    mt.Sync(), mt.Sync(servers=3), mt.Backup(spare=0), mt.Sync(optimizer="worker"), mt.Sync(push_wire=mt.TopK()),
    mt.Sync(batching=PerRound()), mt.LocalSGD(period=2), mt.LocalSGD(period=2, start=3), mt.Decentralized(),
    mt.Decentralized(codec=mt.TopK()),
]  # fmt: skip
ALONE = [
    mt.Async(), mt.Async(servers=2), mt.SoftSync(updates=2), mt.StaleSync(bound=1),
    mt.Bounded(staleness=1), mt.Elastic(), mt.Async(inflight=2),
]  # fmt: skip


def smooth_job(**changes):
    return toy.make_job(model=toy.smooth, **changes)


def simulated(path, job, strategy, workers=3, **options):
    options = {"run_dir": str(path), "quiet": True, "compute": EVEN} | options
    result = mt.simulate(job, strategy, workers, **options)
    return load_file(result["model"]), result


def both(tmp_path, strategy, batches, size, workers=3, **changes):
    """(model, result) of `batches` batches of `size` samples to a step, and of one large batch."""
    many = smooth_job(batch_size=size, accumulate=batches, **changes)
    one = smooth_job(batch_size=size * batches, **changes)
    return simulated(tmp_path / "many", many, strategy, workers), simulated(
        tmp_path / "one", one, strategy, workers
    )


@pytest.mark.parametrize(
    ("strategy", "clipped"),
    [
        *((strategy, {}) for strategy in LOCKSTEP),
        *((strategy, {"clip_norm": 0.3}) for strategy in LOCKSTEP),
    ],
    ids=str,
)
def test_a_step_in_batches_is_that_of_one_large_batch_where_workers_go_together(tmp_path, strategy, clipped):
    """Also where the last step of an epoch has fewer samples."""
    data = toy.Memory(77)
    (found, result), (expected, whole) = both(tmp_path, strategy, 3, 4, data=data, **clipped)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    counts = ("samples", "steps", "accepted", "samples_left_out")
    assert [result.get(key) for key in counts] == [whole.get(key) for key in counts]


@pytest.mark.parametrize("strategy", ALONE, ids=str)
def test_a_step_in_batches_is_that_of_one_large_batch_where_each_worker_goes_alone(tmp_path, strategy):
    (found, result), (expected, whole) = both(tmp_path, strategy, 3, 2, data=toy.Memory(72))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    assert (result["samples"], result["steps"]) == (whole["samples"], whole["steps"])
    assert result["samples"] == 2 * 72
    assert result["virtual_s"] == pytest.approx(3 * whole["virtual_s"])


@pytest.mark.parametrize("kind", toy.DYADIC)
@pytest.mark.parametrize(
    "strategy", [mt.Sync(), mt.Sync(servers=2), mt.Async(), mt.LocalSGD(period=1)], ids=str
)
def test_it_is_so_to_the_bit_where_sums_are_exact(tmp_path, strategy, kind):
    changes = toy.DYADIC[kind] | {"epochs": 1}
    found, _ = simulated(tmp_path / "many", toy.make_job(**changes, batch_size=4, accumulate=4), strategy, 2)
    expected, _ = simulated(tmp_path / "one", toy.make_job(**changes, batch_size=16), strategy, 2)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "strategy", [mt.Sync(), mt.Async(), mt.LocalSGD(period=2), mt.Decentralized(), mt.Elastic()], ids=str
)
def test_a_loss_that_returns_its_weight_is_divided_by_the_weight_of_all_batches(tmp_path, strategy):

    def loss(model, batch):
        return toy.weighted_loss(model, {name: tensor.double() for name, tensor in batch.items()})

    changes = {"data": toy.Memory(72), "model": lambda: toy.smooth().double(), "loss": loss}
    many = toy.make_job(**changes | {"batch_size": 2, "accumulate": 3})
    one = toy.make_job(**changes | {"batch_size": 6})
    found, _ = simulated(tmp_path / "many", many, strategy)
    expected, _ = simulated(tmp_path / "one", one, strategy)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


def test_every_batch_draws_its_own_random_numbers(tmp_path):
    """Dropout: one worker is torch's loop over the batches, each under a seed of its own."""
    seen = []

    def loss(model, batch):
        seen.append(torch.initial_seed())
        return toy.square_loss(model, batch)

    simulated(tmp_path, toy.make_job(loss=loss, accumulate=3, batch_size=4, epochs=1), mt.Async(), 2)
    assert len(seen) == len(set(seen)) == 12


def test_virtual_time_is_that_of_all_batches_the_last_ones_included(tmp_path):
    """One worker: 50 samples in steps of 4 x 6 take 4 + 4 + 1 batches."""
    job = toy.make_job(data=toy.Memory(50), accumulate=4, epochs=1)
    for strategy in (mt.Async(), mt.LocalSGD(period=2), mt.Decentralized()):
        _, result = simulated(tmp_path / str(strategy), job, strategy, 1)
        assert result["virtual_s"] == pytest.approx(9.0), strategy
        assert result["samples"] == 50 and result["accumulate"] == 4


def test_a_step_whose_one_batch_is_not_finite_is_refused_whole(tmp_path):
    def poisoned(model, batch):
        return toy.square_loss(model, batch) * (float("nan") if (batch["x"][0] == first).all() else 1.0)

    first = toy.MemoryReader(toy.Memory()).x[12]
    job = toy.make_job(loss=poisoned, on_nonfinite="skip", epochs=1, accumulate=2)
    for strategy in (mt.Sync(), mt.Async(), mt.LocalSGD(period=2), mt.Decentralized()):
        _, result = simulated(tmp_path / str(strategy), job, strategy, 1)
        assert result["nonfinite"] == 1 and result["status"] == "ok", strategy


def test_pushing_sums_and_accumulating_exclude_each_other():
    job = toy.make_job(accumulate=2)
    with pytest.raises(UsageError, match="push_every=2 pushes the sum over several batches already"):
        mt.simulate(job, mt.Async(push_every=2), 2, quiet=True)
    with pytest.raises(UsageError, match="accumulate must be a whole number of at least 1"):
        toy.make_job(accumulate=0)
    with pytest.raises(UsageError, match="--accumulate"):
        Overrides(accumulate=0).check()
    assert apply_overrides(job, Overrides(accumulate=5)).accumulate == 5


def test_the_next_batch_is_announced_while_this_one_is_computed():
    calls = []
    reader = LeaseReader(
        lambda *key: calls.append(("read", *key)), lambda *key: calls.append(("ahead", *key)), 4
    )
    reader.announce(Lease(0, 20, 10))
    for _, count in reader.read(Lease(0, 0, 10)):
        calls.append(("compute", count))
    assert calls == [
        ("read", 0, 0, 4), ("ahead", 0, 4, 4), ("compute", 4),
        ("read", 0, 4, 4), ("ahead", 0, 8, 2), ("compute", 4),
        ("read", 0, 8, 2), ("ahead", 0, 20, 4), ("compute", 2),
    ]  # fmt: skip
