"""What workers may do between two reads, held to its laws: own optimizers, rarer pushes and pulls, two pushes in
flight, elastic averaging, batches of unequal size.
"""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.model.recipe import seed_step
from mpitrain.strategies import PerWorker
from mpitrain.strategies.parameter_server.batch_size import _divide
from mpitrain.virtual import Constant, LogNormal
from tests import toy
from tests.sampling import sampled


def run(path, job, strategy, workers=1, **options):
    return mt.simulate(job, strategy, workers=workers, run_dir=str(path / "run"), quiet=True, **options)


def trained(path, job, strategy, workers=1, **options):
    return load_file(run(path, job, strategy, workers, **options)["model"])


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def close(one, other):
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in one
    )


# --- whose optimizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("data", toy.DYADIC)
@pytest.mark.parametrize("push_every", [1, 3, 4])
@pytest.mark.parametrize("servers", [1, 2])
def test_one_worker_with_its_own_optimizer_is_serial_training(tmp_path, servers, push_every, data):
    """Whatever is pushed together: on dyadic data the sum of the updates is exact, momentum and all."""
    job = toy.make_job(**toy.DYADIC[data], epochs=1, batch_size=16 if "float64" in data else 8)
    strategy = mt.Async(servers=servers, optimizer="worker", push_every=push_every)
    assert same(trained(tmp_path, job, strategy), toy.serial(job))


@pytest.mark.parametrize("optimizer", [toy.sgd, toy.adam, toy.two_groups])
def test_any_optimizer_may_run_on_the_worker(tmp_path, optimizer):
    job = toy.make_job(optimizer=optimizer)
    assert close(trained(tmp_path, job, mt.Async(optimizer="worker", push_every=2)), toy.serial(job))


class NormedSGD(torch.optim.SGD):
    """Looks at a whole layer: no server may run it."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm() + 1.0)
        return super().step(closure)


def test_optimizers_that_need_whole_layers_run_on_workers_only(tmp_path):
    job = toy.make_job(optimizer=lambda parameters: NormedSGD(parameters, lr=0.1))
    with pytest.raises(UsageError, match="cannot run on a parameter server"):
        run(tmp_path, job, mt.Async(servers=2))
    assert close(trained(tmp_path, job, mt.Async(servers=2, optimizer="worker")), toy.serial(job))


def test_synchronous_updates_of_workers_are_the_mean_of_their_parameters(tmp_path):
    """sync() with optimizer="worker" and push_every=H is periodic parameter averaging: H = 1 with plain SGD is
    allreduce's arithmetic, on dyadic data to the bit."""
    changes = toy.DYADIC["linear in float32"] | {"optimizer": lambda p: torch.optim.SGD(p, lr=2.0**-4)}
    job = toy.make_job(**changes, batch_size=2)
    averaged = trained(tmp_path / "a", job, mt.Sync(optimizer="worker"), workers=4)
    gradients = trained(tmp_path / "b", job, mt.Sync(), workers=4)
    rarely = trained(tmp_path / "c", job, mt.Sync(optimizer="worker", push_every=3), workers=4)
    # a linear loss has the same gradient everywhere, so it does not matter where the local steps were taken
    assert same(averaged, gradients) and same(rarely, gradients)


# --- pushes and pulls of their own pace ----------------------------------------------------------------


@pytest.mark.parametrize("push_every", [2, 5])
def test_a_rare_push_of_a_constant_gradient_is_so_many_single_ones(tmp_path, push_every):
    changes = toy.DYADIC["linear in float32"] | {"optimizer": lambda p: torch.optim.SGD(p, lr=2.0**-4)}
    job = toy.make_job(**changes, batch_size=4, epochs=3)
    often = run(tmp_path / "a", job, mt.Async(), workers=3)
    rarely = run(tmp_path / "b", job, mt.Async(push_every=push_every), workers=3)
    assert same(load_file(often["model"]), load_file(rarely["model"]))
    assert rarely["accepted"] == 3 * -(-12 // push_every) and often["accepted"] == 36
    assert rarely["pushed_bytes"] * often["accepted"] == often["pushed_bytes"] * rarely["accepted"]


def test_momentum_under_rare_pushes_is_the_workers_to_keep(tmp_path):
    job = toy.make_job(**toy.DYADIC["linear in float32"], batch_size=6)
    serial = toy.serial(job)
    assert same(trained(tmp_path / "a", job, mt.Async(optimizer="worker", push_every=4)), serial)
    assert not close(trained(tmp_path / "b", job, mt.Async(push_every=4)), serial)


def test_pulls_cost_what_they_say_and_the_identity_holds(tmp_path):
    """12 batches: a read to begin with, and one for every `pull_every` batches that a push or pull brings."""
    job = toy.make_job(batch_size=4, epochs=1, optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
    shard_bytes = {}
    for name, strategy, replies in (
        ("every push", mt.Async(), 13),
        ("every third", mt.Async(pull_every=3), 5),
        ("within pushes", mt.Async(push_every=6, pull_every=2), 7),
        ("never the same", mt.Async(push_every=4, pull_every=6, optimizer="worker"), 3),
    ):
        result = run(tmp_path / name, job, strategy)
        shard_bytes[name] = result["replied_bytes"] / replies
        assert result["staleness_identity"][0] == result["staleness_identity"][1]
    assert len(set(shard_bytes.values())) == 1


@pytest.mark.parametrize(
    "strategy",
    [
        mt.Async(inflight=2),
        mt.Async(servers=2, push_every=3, pull_every=2, optimizer="worker"),
        mt.SoftSync(updates=3, inflight=2, damping=mt.Inverse()),
        mt.StaleSync(bound=1, pull_every=2, damping=mt.Drop(limit=2)),
        mt.Elastic(push_every=3),
    ],
)
@pytest.mark.parametrize("workers", [2, 5])
def test_staleness_identity_is_exact_for_every_way_of_reading(tmp_path, workers, strategy):
    job = toy.make_job(epochs=4, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
    result = run(tmp_path, job, strategy, workers, compute=LogNormal(1.0, 1.0))
    for shard in result["shards"]:
        assert shard["staleness_identity"][0] == shard["staleness_identity"][1]
        assert shard["samples_accepted"] + shard["samples_dropped"] == 4 * 48


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sync(inflight=2)", "present version only"),
        ("backup(pull_every=2)", "present version only"),
        ("async(inflight=2,pull_every=3)", "leave pull_every out"),
        ("async(inflight=3)", "1 or 2"),
        ("async(optimizer='both')", "Known: server, worker"),
        ("async(optimizer='worker',damping=delay_compensated())", "finished updates are pushed"),
        ("async(push_every=2,damping=delay_compensated())", "the square of one gradient"),
        ("async(pull_every=3,damping=delay_compensated())", "the square of one gradient"),
        ("elastic(optimizer='server')", "own optimizer"),
        ("elastic(damping=inverse())", "nothing to damp"),
        ("async(batching=by_speed(0))", r"\(0, 1\]"),
    ],
)
def test_what_makes_no_sense_together_is_refused(text, said):
    from mpitrain.values import parse

    with pytest.raises(UsageError, match=said):
        parse(text, "strategy")


def test_local_steps_beside_a_server_that_runs_adam_are_refused(tmp_path):
    with pytest.raises(UsageError, match='use optimizer="worker"'):
        run(tmp_path, toy.make_job(optimizer=toy.adam), mt.Async(push_every=2))


# --- two in flight -------------------------------------------------------------------------------------


def delayed(job):
    """Serial training in which every gradient is computed on the parameters before the last update."""
    torch.manual_seed(job.seed)
    module = job.model()
    optimizer = job.optimizer(module.parameters())
    reader = job.data.reader(None, job.seed)
    previous = [parameter.detach().clone() for parameter in module.parameters()]
    for step in range(job.epochs * job.data.num_samples // job.batch_size):
        seed_step(job.seed, 0, step)
        now = [parameter.detach().clone() for parameter in module.parameters()]
        with torch.no_grad():
            for parameter, old in zip(module.parameters(), previous, strict=True):
                parameter.copy_(old)
        optimizer.zero_grad()
        start = step * job.batch_size % job.data.num_samples
        job.loss(module, reader.batch(0, start, job.batch_size)).backward()
        with torch.no_grad():
            for parameter, new in zip(module.parameters(), now, strict=True):
                parameter.copy_(new)
        optimizer.step()
        previous = now
    return module.state_dict()


@pytest.mark.parametrize("servers", [1, 3])
def test_one_worker_with_two_in_flight_is_sgd_with_a_delay_of_one(tmp_path, servers):
    job = toy.make_job()
    result = run(tmp_path, job, mt.Async(servers=servers, inflight=2))
    assert result["staleness_histogram"] == {"0": 1, "1": 15}
    assert same(load_file(result["model"]), delayed(job))


def test_two_in_flight_make_staleness_two_n_less_one(tmp_path):
    """N workers in turn, two reads each: 2N - 1 once everybody has begun (the identity with R = 2)."""
    job = toy.make_job(epochs=20)
    result = run(tmp_path, job, mt.Async(inflight=2), workers=4, compute=Constant(1.0, 0.0))
    histogram = result["staleness_histogram"]
    assert max(map(int, histogram)) == 7 and histogram["7"] >= 160 - 2 * 8


def test_two_in_flight_hide_a_slow_network(tmp_path):
    """Push and answer take as long as a gradient each: in turn a batch takes 3, overlapped 2."""
    from mpitrain.virtual import Link

    job, link = toy.make_job(epochs=4), Link(gbit_per_s=100.0, latency_s=1.0)
    waits = run(tmp_path / "a", job, mt.Async(), compute=Constant(1.0, 0.0), network=link)
    hides = run(tmp_path / "b", job, mt.Async(inflight=2), compute=Constant(1.0, 0.0), network=link)
    assert waits["virtual_s"] / hides["virtual_s"] == pytest.approx(3 / 2, rel=0.05)


# --- elastic averaging ---------------------------------------------------------------------------------


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))


def quadratic_job(rate, **changes):
    """f = w^2 / 2 for one number, started at 1."""
    return toy.make_job(
        model=Scalar,
        loss=lambda model, batch: (model.w**2).sum() / 2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        batch_size=1,
        **changes,
    )


@pytest.mark.parametrize("rate", sampled([0.25, 1.0, 1.5], [1.0]))
def test_elastic_averaging_is_stable_up_to_its_limit(tmp_path, rate):
    """0 <= a <= (4 - 2 eta) / (4 - eta): converges at 0.98 of it, diverges at 1.02 (reference section 4.5)."""
    limit = (4 - 2 * rate) / (4 - rate)
    job = quadratic_job(rate, epochs=40)

    def end(share):
        model = trained(tmp_path / str(share), job, mt.Elastic(moving_rate=share, push_every=1))
        return abs(float(model["w"]))

    assert end(0.98 * limit) < 1e-3
    assert not end(1.02 * limit) < 1e3


def elastic_pair(job, share, num_exchanges):
    """Centre and worker by the paper's algorithm 1, one local step an exchange."""
    worker, centre = 1.0, 1.0
    for _ in range(num_exchanges):
        slope, difference = worker, share * (worker - centre)
        worker, centre = worker - job * slope - difference, centre + difference
    return centre


def test_the_centre_moves_as_the_paper_says(tmp_path):
    job = quadratic_job(0.25, epochs=1)
    centre = float(trained(tmp_path, job, mt.Elastic(moving_rate=0.5, push_every=1))["w"])
    assert centre == elastic_pair(0.25, 0.5, 48)  # dyadic: exact until 2^-52, and the same operations beyond


def test_an_exchange_conserves_the_sum_and_a_share_of_one_swaps():
    from mpitrain.model import ElasticStore, FlatModel

    module = nn.Linear(5, 3, bias=False)
    model = FlatModel(module, torch.optim.SGD(module.parameters(), lr=1.0), 1)
    draw = torch.Generator().manual_seed(1)

    def numbers():
        return torch.randint(-64, 65, (15,), generator=draw) / 64.0

    for share in (0.25, 1.0):
        first = numbers()
        store = ElasticStore(model.layout, 0, first, share)
        workers = {rank: numbers() for rank in (1, 2, 3)}
        total = first + sum(workers.values())
        for rank in (1, 2, 3, 2, 2, 1):
            wire_buffer = store.wire_buffer()
            wire_buffer.body.copy_(workers[rank])
            before, centre = workers[rank].clone(), store.centre.body.clone()
            store.add(rank, wire_buffer, 1.0)
            store.apply()
            difference = store.read(rank)
            workers[rank] -= difference.body
            difference.release()
            assert torch.equal(store.centre.body + sum(workers.values()), total)
            if share == 1.0:
                assert torch.equal(workers[rank], centre) and torch.equal(store.centre.body, before)


def test_elastic_workers_stay_apart_and_the_centre_is_the_model(tmp_path):
    result = run(tmp_path, toy.make_job(epochs=30), mt.Elastic(push_every=4), workers=3)
    assert result["status"] == "ok" and result["accepted"] == 30 * 2
    losses = [row["loss"] for row in result["loss_curve"]]
    assert losses[-1] < losses[0] / 2


# --- batches of unequal size ---------------------------------------------------------------------------


def test_batching_per_round_divides_the_jobs_batch(tmp_path):
    """mu * lambda = batch size: four workers take 2, 2, 1 and 1 samples; a round of sync() takes one batch."""
    job = toy.make_job(batch_size=6, epochs=3)
    result = run(tmp_path, job, mt.Sync(batching=mt.PerRound()), workers=4)
    assert result["steps"] == 3 * 8 and result["samples"] == 3 * 48


def test_batching_by_speed_gives_the_slow_worker_less_and_ends_sooner(tmp_path):
    job = toy.make_job(batch_size=12, epochs=1, data=toy.Memory(num_samples=960))
    slow = ("slow(worker=1,factor=3)",)
    even = run(tmp_path / "a", job, mt.Sync(), workers=4, inject=slow, compute=Constant(1.0, 0.0))
    fair = run(
        tmp_path / "b", job, mt.Sync(batching=mt.BySpeed()), workers=4, inject=slow, compute=Constant(1.0, 0.0)
    )  # fmt: skip
    # 3 + 1/3 workers' worth of speed for four: a round takes 4 / (10/3) = 1.2 instead of 3, once it is known
    assert even["virtual_s"] == 3 * 20
    assert 1.2 * 20 <= fair["virtual_s"] < 1.5 * 20
    assert fair["samples"] == even["samples"]


def test_an_update_by_speed_is_still_the_mean_over_all_samples(tmp_path):
    """A linear loss: the mean of the whole epoch moves the parameters, however the samples were shared out."""
    changes = toy.DYADIC["linear in float32"] | {"optimizer": lambda p: torch.optim.SGD(p, lr=2.0**-4)}
    job = toy.make_job(**changes, batch_size=12, epochs=8)
    slow = ("slow(worker=0,factor=2)",)
    even = trained(tmp_path / "a", job, mt.Sync(), workers=4)
    fair = trained(tmp_path / "b", job, mt.Sync(batching=mt.BySpeed()), workers=4, inject=slow)
    assert close(even, fair)


@given(st.integers(1, 400), st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9))
def test_division_by_weights_adds_up_and_is_fair(total, weights):
    assume(total >= len(weights))
    parts = _divide(total, weights)
    exact = [total * weight / sum(weights) for weight in weights]
    assert sum(parts) == total and min(parts) >= 1
    if min(exact) >= 1:
        assert all(abs(part - share) < 1 for part, share in zip(parts, exact, strict=True))


def test_the_default_is_everybody_alike():
    assert PerWorker().size({}, 3, (1, 2, 3), 32) == 32 and mt.Async() == mt.Async(batching=PerWorker())
