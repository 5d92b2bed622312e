"""What a stale gradient is worth: exact corrections, exact limits, and a weight that means the same for every
optimizer.

"""

import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.model import FlatModel, ShardStore
from mpitrain.model.factory import check_optimizer
from mpitrain.model.wire.reply_codec import ReplyReader
from mpitrain.strategies import (
    Async,
    BySpeed,
    DelayCompensated,
    Drop,
    EightBit,
    GapAware,
    Inverse,
    Keep,
    Power,
    SoftSync,
    StaleSync,
)
from mpitrain.virtual import Exponential, LogNormal
from tests import toy
from tests.sampling import sampled
from tests.virtual.worlds import Desk, play


def make_store(start, damping=Keep(), optimizer=torch.optim.SGD, **options):  # noqa: B008 - frozen
    """A shard of float64 numbers."""
    module = nn.Module()
    module.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    prototype = optimizer(module.parameters(), **options)
    flat = FlatModel(module, prototype, 1)
    return ShardStore(flat.layout, 0, flat.wire_buffers[0].body, prototype, Async(damping=damping))


def wire_buffer(store, *numbers):
    """A gradient."""
    taken = store.wire_buffer()
    taken.body.copy_(torch.tensor(numbers, dtype=torch.float64))
    return taken


def values(store):
    return store.live.body.tolist()


@pytest.mark.parametrize("optimizer", [toy.sgd, toy.adam])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_correction_of_nothing_is_plain_async_to_the_bit(tmp_path, servers, optimizer):
    def train(name, damping, workers):
        strategy = Async(servers=servers, damping=damping)
        options = {"workers": workers, "compute": Exponential(), "quiet": True}
        job = toy.make_job(optimizer=optimizer)
        return load_file(mt.simulate(job, strategy, run_dir=str(tmp_path / name), **options)["model"])

    def same(first, second):
        return all(torch.equal(first[name], second[name]) for name in first)

    alone, four = train("alone", Keep(), 1), train("four", Keep(), 4)
    for index, damping in enumerate((DelayCompensated(lam=2.0), GapAware())):
        assert same(train(f"{index}-alone", damping, 1), alone), "tau = 0 throughout"
        assert not same(train(f"{index}-four", damping, 4), four)
    assert same(train("zero", DelayCompensated(lam=0.0), 4), four)


@pytest.mark.parametrize("curvature", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("read", [1.0, -0.25, 4.0])
def test_delay_compensation_is_exact_on_the_quadratic(read, curvature):
    """lam = h / g^2 turns the stale gradient h * w_read into h * w_now: powers of two, so to the bit."""
    lam = curvature / (curvature * read) ** 2
    for now in (0.375, -1.625, 3.0):
        store = make_store([read], DelayCompensated(lam=lam), lr=0.125)
        desk = Desk(Async(damping=DelayCompensated(lam=lam)), store, (1, 2))
        desk.push(
            2, wire_buffer(store, (read - now) / 0.125)
        )  # moves w from read to now; 2 read w as it stands
        assert values(store) == [now]
        desk.push(1, wire_buffer(store, curvature * read))
        assert values(store) == [now - 0.125 * curvature * now]


def test_a_gradient_that_waits_is_corrected_for_its_own_read():
    """Its worker reads again at once and may push again before the update: neither may change what the first
    gradient is worth."""
    damping = DelayCompensated(lam=1.0)
    store = make_store([1.0], damping, lr=0.125)
    desk = Desk(SoftSync(updates=2, damping=damping), store, (1, 2, 3))
    for _ in range(2):
        desk.push(1, wire_buffer(store, 1.0))
    assert values(store) == [0.875]
    for worker in (2, 3):
        desk.push(worker, wire_buffer(store, 1.0))  # both read 1.0: h * w_now = 0.875 after compensation
    assert values(store) == [0.875 - 0.125 * 0.875]
    desk.push(2, wire_buffer(store, 0.5))  # 2 read 0.875 when it last pushed, and now reads what stands there
    desk.push(2, wire_buffer(store, 0.5))
    corrected = 0.5 + 0.5 * 0.5 * (0.765625 - 0.875)
    assert values(store) == [0.765625 - 0.125 * (corrected + 0.5) / 2]


def test_gap_aware_divides_by_the_gap_in_steps_and_leaves_alone_what_did_not_move():
    """decay = 0: C is the mean length of the last update's steps, here (0.5 + 0 + 1) / 3 = 0.5."""
    damping = GapAware(decay=0.0)
    store = make_store([1.0, 2.0, 3.0], damping, lr=0.5)
    desk = Desk(Async(damping=damping), store, (1, 2))
    desk.push(2, wire_buffer(store, 1.0, 0.0, -2.0))
    assert values(store) == [0.5, 2.0, 4.0]
    desk.push(1, wire_buffer(store, 1.0, 1.0, 1.0))  # gaps 0.5, 0, 1 are 1, 0 and 2 steps
    moved = [0.5 - 0.5 / 2, 2.0 - 0.5, 4.0 - 0.5 / 3]
    assert values(store) == pytest.approx(moved, rel=1e-15) and values(store)[:2] == moved[:2]


def test_gap_aware_remembers_the_length_of_steps_without_the_bias_of_its_start():
    damping = GapAware(decay=0.75)
    store = make_store([0.0], damping, lr=1.0)
    desk = Desk(Async(damping=damping), store, (1, 2))
    for length in (1.0, 3.0):
        desk.push(2, wire_buffer(store, length))
    mean = (0.75 * 0.25 * 1.0 + 0.25 * 3.0) / (1 - 0.75**2)
    desk.push(1, wire_buffer(store, 1.0))
    assert values(store) == pytest.approx([-4.0 - 1.0 / (1 + 4.0 / mean)], rel=1e-14)


@pytest.mark.parametrize("limit", [0, 2, 5])
@pytest.mark.parametrize("strategy", [Async, StaleSync, SoftSync])
def test_drop_drops_exactly_what_is_staler_than_its_limit_and_counts_it(strategy, limit):
    seen = play(strategy(damping=Drop(limit=limit)), 6, 400, compute=LogNormal(1.0, 1.0), slow={0: 4.0})
    stale = [push for push in seen.trace.pushes if push.staleness > limit]
    assert 0 < len(stale) < 400
    assert seen.counts["dropped"] == len(stale) and seen.counts["late"] == seen.counts["nonfinite"] == 0
    assert seen.counts["accepted"] == 400 - len(stale) == sum(map(len, seen.trace.store.updates))
    applied = [t - one.read for t, update in enumerate(seen.trace.store.updates) for one in update]
    assert max(applied) <= limit


ADAPTIVE = {
    "Adam": {"lr": 0.25},
    "AdamW": {"lr": 0.25, "weight_decay": 0.0},
    "Adagrad": {"lr": 0.25},
    "RMSprop": {"lr": 0.25},
}


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_weight_is_a_learning_rate_for_adaptive_optimizers(name):
    """Scaling the gradient would nearly cancel. Powers of two from 0: the step halves to the bit, the moments
    are those of the whole gradient, and the next step has its full rate."""
    stores = [make_store([0.0, 0.0], optimizer=getattr(torch.optim, name), **ADAPTIVE[name]) for _ in "12"]
    for store, weight in zip(stores, (1.0, 0.5), strict=True):
        store.add(1, wire_buffer(store, 0.3, -5.0), weight)
        store.apply()
    whole, half = (values(store) for store in stores)
    assert half == [number / 2 for number in whole] and whole != half
    before = half
    for store in stores:
        store.add(1, wire_buffer(store, 0.1, 0.7), 1.0)
        store.apply()
    steps = [[b - a for a, b in zip(start, values(store))] for start, store in zip((whole, before), stores)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-12)


def test_a_mean_of_weighted_gradients_for_adaptive_optimizers_is_their_weighted_mean():
    """Weights 1/4 and 3/4 of 2 gradients: the weighted mean as gradient, half the rate."""
    mixed, plain = (make_store([0.0], optimizer=torch.optim.Adam, lr=rate) for rate in (0.25, 0.125))
    mixed.add(1, wire_buffer(mixed, 8.0), 0.25)
    mixed.add(2, wire_buffer(mixed, 4.0), 0.75)
    plain.add(1, wire_buffer(plain, 5.0), 1.0)
    for store in (mixed, plain):
        store.apply()
    assert values(mixed) == values(plain)
    assert mixed.optimizer.param_groups[0]["lr"] == 0.25


def test_a_weight_scales_the_gradient_for_sgd():
    """With momentum it must be the gradient: a scaled rate would also scale what older gradients left."""
    store = make_store([0.0], lr=1.0, momentum=0.5)
    for weight in (1.0, 0.25):
        store.add(1, wire_buffer(store, 4.0), weight)
        store.apply()
    assert values(store) == [-4.0 - (0.5 * 4.0 + 0.25 * 4.0)]


def test_with_two_in_flight_each_gradient_is_corrected_for_the_read_it_was_computed_on():
    """The first two pushes are computed on the first read, every later one on the read before the last."""
    damping, rate, curvature = DelayCompensated(lam=0.5), 0.125, 2.0
    store = make_store([1.0], damping, lr=rate)
    desk = Desk(Async(inflight=2, damping=damping), store, (1,))
    path = [1.0]
    for number in range(12):
        read = path[max(0, number - 1)]
        slope = curvature * read
        desk.push(1, wire_buffer(store, slope), version=max(0, number - 1))
        path.append(path[-1] - rate * (slope + 0.5 * slope**2 * (path[-1] - read)))
        assert values(store) == pytest.approx([path[-1]], rel=1e-14), number
    assert desk.server.counts.staleness == {0: 1, 1: 11}
    assert store.pool.num_frames < 8, "what nobody computes on any more is let go"


def test_with_two_in_flight_a_coded_reply_is_corrected_for_as_it_was_told():
    """A worker computes on its copy, which 8 bits bring nearer to the parameters with every answer."""
    torch.manual_seed(0)
    module = nn.Linear(40, 30)
    prototype = torch.optim.SGD(module.parameters(), lr=0.5)
    layout = (flat := FlatModel(module, prototype, 1)).layout
    damping = DelayCompensated(lam=1.0)
    store = ShardStore(
        layout, 0, flat.wire_buffers[0].body, prototype, Async(damping=damping, reply_wire=EightBit())
    )
    reader = ReplyReader(layout)

    def read(uses):
        return reader.take(0, store.read(1, uses=uses)).body.clone()

    reads = [read(2)]
    for number in range(5):
        computed_on, now = reads[max(0, number - 1)], store.live.body.clone()
        given = torch.randn(len(now))
        payload = store.wire_buffer()
        payload.body.copy_(given)
        corrected = store.correct(1, payload, 2)
        wanted = given.clone().addcmul_(given * given, now - computed_on)
        assert torch.equal(corrected.body, wanted), number
        store.add(1, corrected, 1.0)
        store.apply()
        reads.append(read(1))
        assert number == 0 or not torch.equal(reads[-1], store.live.body)


@pytest.mark.parametrize("servers", [1, 2])
def test_one_worker_with_two_in_flight_is_corrected_for_its_delay_of_one(tmp_path, servers):
    """The whole way, against a loop of its own; the correction used to come to nothing."""
    damping, rate = DelayCompensated(lam=2.0), 2.0**-4
    changes = toy.DYADIC["quadratic in float64"] | {"optimizer": lambda p: torch.optim.SGD(p, lr=rate)}
    job = toy.make_job(**changes)
    strategy = Async(inflight=2, damping=damping, servers=servers)
    trained = load_file(mt.simulate(job, strategy, workers=1, quiet=True, run_dir=str(tmp_path))["model"])
    reader, module = job.data.reader(None, 0), job.model()
    now = read = module.weight.detach().clone()
    for _ in range(job.epochs):
        for start in range(0, job.data.num_samples, job.batch_size):
            module.weight.data = read.clone()
            module.weight.grad = None
            job.loss(module, reader.batch(0, start, job.batch_size)).backward()
            slope = module.weight.grad
            now, read = now - rate * (slope + 2.0 * slope * slope * (now - read)), now
    torch.testing.assert_close(trained["weight"], now, rtol=1e-13, atol=0.0)


DECAYING = {
    "SGD": (torch.optim.SGD, {"lr": 0.5}),
    "momentum": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "dampening": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "dampening": 0.5}),
    "nesterov": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "nesterov": True}),
    "maximize": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "maximize": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.5, "momentum": 0.9}),
} | {
    name: (getattr(torch.optim, name), {"lr": 0.5})
    for name in ("Adam", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam")
}
WEIGHTS = {"one": (0.5,), "a seventh": (1 / 7,), "several": (0.25, 0.75, 0.125)}


@pytest.mark.parametrize("name", DECAYING)
@pytest.mark.parametrize("damping", [Keep(), GapAware(decay=0.0)])
def test_where_gradient_and_decay_cancel_no_weight_moves_the_parameters(name, damping):
    """The fixed point is the optimizer's own, whatever its gradients weigh; decoupled decay is told below."""
    optimizer, options = DECAYING[name]
    start, decay = [1.0, -2.0, 0.5], 0.25
    store = make_store(start, damping, optimizer, weight_decay=decay, **options)
    there = [decay * number * (1 if options.get("maximize") else -1) for number in start]
    for weights in WEIGHTS.values():
        for _ in range(2):
            for worker, weight in enumerate(weights):
                payload = wire_buffer(store, *there)
                payload = store.correct(worker, payload, 1) if damping.corrects else payload
                store.add(worker, payload, weight)
            store.apply()
    assert values(store) == pytest.approx(start, abs=1e-6)
    assert store.optimizer.param_groups[0]["weight_decay"] == decay


def test_a_weight_scales_the_decay_of_its_own_update_and_momentum_keeps_what_it_was():
    store = make_store([1.0], lr=0.5, momentum=0.5, weight_decay=0.25)
    w, momentum = 1.0, 0.0
    for number, weight in enumerate((0.5, 0.125, 1.0)):
        store.add(1, wire_buffer(store, 2.0 + number), weight)
        store.apply()
        momentum = 0.5 * momentum + weight * (2.0 + number + 0.25 * w)
        w -= 0.5 * momentum
        assert values(store) == [w]


def test_a_weight_scales_decoupled_decay_with_the_rate():
    """AdamW's own: w <- (1 - rate * decay) w; without a gradient that is all."""
    store = make_store([1.0], optimizer=torch.optim.AdamW, lr=0.5, weight_decay=0.5)
    store.add(1, wire_buffer(store, 0.0), 0.25)
    store.apply()
    assert values(store) == [1.0 - 0.25 * 0.5 * 0.5]


def test_an_optimizer_that_raises_leaves_rate_and_decay_as_they_were(monkeypatch):
    store = make_store([1.0], optimizer=torch.optim.Adam, lr=0.5, weight_decay=0.25)
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "adam", lambda *arguments, **options: 1 / 0)
    store.add(1, wire_buffer(store, 2.0), 0.125)
    with pytest.raises(ZeroDivisionError):
        store.apply()
    group = store.optimizer.param_groups[0]
    assert group["lr"] == 0.5 and group["weight_decay"] == 0.25


RIDGE = {
    "async": Async(),
    "inverse": Async(damping=Inverse()),
    "power": Async(damping=Power(exponent=1.0)),
    "drop": Async(damping=Drop(limit=7)),
    "gap_aware": Async(damping=GapAware()),
    "softsync and inverse": SoftSync(updates=2, damping=Inverse()),
}


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("strategy", sampled(RIDGE, ["inverse", "drop", "gap_aware"]))
def test_the_fixed_point_of_eight_workers_is_that_of_ridge_regression(strategy, momentum):
    """Full-batch gradients by turns, staleness 7: ridge's solution with 0.2, not one that decays 7 times as hard."""
    decay = 0.2
    hessian = torch.tensor([[1.0, 0.2], [0.2, 0.8]], dtype=torch.float64)
    target = torch.tensor([1.0, -0.5], dtype=torch.float64)
    expected = torch.linalg.solve(hessian + decay * torch.eye(2), target)
    store = make_store(
        [0.0, 0.0], RIDGE[strategy].damping, lr=0.1 * (1 - momentum), momentum=momentum, weight_decay=decay
    )
    workers = tuple(range(1, 9))
    desk = Desk(RIDGE[strategy], store, workers)
    path = [store.live.body.clone()]
    for turn in range(2400):
        worker = workers[turn % 8]
        slope = hessian @ path[desk.answers[worker]] - target
        desk.push(worker, wire_buffer(store, *slope.tolist()))
        if len(path) == desk.server.counts.version:
            path.append(store.live.body.clone())
    assert values(store) == pytest.approx(expected.tolist(), rel=1e-4)


@pytest.mark.parametrize(
    "strategy", [Async(damping=Inverse()), Async(damping=GapAware()), Async(batching=BySpeed())]
)
def test_optimizers_that_no_rate_scales_are_not_weighed(strategy):
    parameters = [nn.Parameter(torch.zeros(3))]
    for optimizer in (torch.optim.Rprop(parameters), torch.optim.ASGD(parameters)):
        with pytest.raises(UsageError, match=f"{type(optimizer).__name__} keeps lengths of steps of its own"):
            check_optimizer(optimizer, strategy)
        check_optimizer(optimizer, Async(damping=Drop()))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_gradients_of_an_update_are_averaged_by_their_shares(optimizer):
    """3 samples and 1, weights 1 and 1/2: the mean over the samples of what each is worth, for SGD as a gradient, for
    Adam as its rate."""
    mixed, plain = (make_store([1.0], optimizer=optimizer, lr=0.25, weight_decay=0.5) for _ in "12")
    mixed.add(1, wire_buffer(mixed, 8.0), 1.0, 3)
    mixed.add(2, wire_buffer(mixed, 4.0), 0.5, 1)
    total = 3 * 1.0 + 1 * 0.5
    plain.add(1, wire_buffer(plain, (3 * 8.0 + 0.5 * 4.0) / total), total / 4)
    for store in (mixed, plain):
        store.apply()
    assert values(mixed) == pytest.approx(values(plain), rel=1e-14)


def test_an_update_of_which_no_sample_counts_has_no_gradient():
    store = make_store([1.0], lr=0.25)
    for worker in (1, 2):
        store.add(worker, wire_buffer(store, 8.0), 1.0, 0)
    store.apply()
    assert values(store) == [1.0]
