"""Parameters in 16 bits: trained like one process that keeps 32-bit masters beside them."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.model import flat_model, local_steps, peer_model, shard_store
from mpitrain.model.gradient.clipping import Clipping
from mpitrain.model.optimizers.ema import Ema
from mpitrain.model.recipe import seed_step
from mpitrain.model.replicas.peer_replica import PeerReplica
from mpitrain.strategies.features import VIRTUAL
from tests import toy

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def perceptron(dtype, *in_float32):
    """With parameters of `dtype`, but those of the layers named."""

    def make():
        module = toy.perceptron().to(dtype)
        for number in in_float32:
            module[number].float()
        return module

    return make


def loss(model, batch):
    """Whatever the dtypes of its layers."""
    x = batch["x"]
    for layer in model:
        parameters = [*layer.parameters()]
        x = layer(x.to(parameters[0].dtype) if parameters else x)
    return ((x.float() - batch["y"]) ** 2).mean()


MODELS = {name: perceptron(dtype) for name, dtype in HALF.items()} | {"mixed": perceptron(torch.bfloat16, 3)}
DYADIC = toy.LINEAR_BFLOAT16 | {"optimizer": toy.dyadic_sgd, "epochs": 1}


def job_of(name, **changes):
    return toy.make_job(**{"model": MODELS[name], "loss": loss, "epochs": 1} | changes)


def serial(job, decay=0.0):
    """(parameters, their moving average) of one process: forward and backward in the model's dtypes, a step in
    float32."""
    torch.manual_seed(job.seed)
    module, reader, steps = job.model(), job.data.reader(None, job.seed), itertools.count()
    named = dict(module.named_parameters())
    masters = [nn.Parameter(one.detach().float().clone()) for one in named.values()]
    optimizer, average = job.optimizer(masters), []
    for start in range(0, job.data.num_samples, job.batch_size):
        seed_step(job.seed, 0, next(steps))
        module.zero_grad()
        job.loss(module, reader.batch(0, start, job.batch_size)).backward()
        for one, master in zip(named.values(), masters, strict=True):
            master.grad = one.grad.float()
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(masters, job.clip_norm)
        optimizer.step()
        now = [master.detach().clone() for master in masters]
        average = [one.lerp(other, 1 - decay) for one, other in zip(average or now, now, strict=True)]
        with torch.no_grad():
            for one, master in zip(named.values(), masters, strict=True):
                one.copy_(master)
    means = {name: mean.to(one.dtype) for (name, one), mean in zip(named.items(), average, strict=True)}
    return module.state_dict(), means


def run(folder, job, strategy, workers=1):
    result = mt.simulate(job, strategy, workers, run_dir=str(folder), quiet=True)
    assert result["status"] == "ok"
    return load_file(folder / "model.safetensors")


def same(one, other):
    assert one.keys() == other.keys()
    return all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


@pytest.mark.parametrize("optimizer", [toy.sgd, toy.adam])
@pytest.mark.parametrize("name", MODELS)
def test_one_worker_or_peer_is_serial_training_with_masters_to_the_bit(tmp_path, name, optimizer):
    job = job_of(name, optimizer=optimizer, ema=0.5)
    wanted, mean = serial(job, 0.5)
    for strategy in (mt.Sync(servers=3), mt.Decentralized("ring")):
        assert same(run(tmp_path / strategy.name, job, strategy), wanted), strategy
        assert same(load_file(tmp_path / strategy.name / "model-ema.safetensors"), mean), strategy


@pytest.mark.parametrize(
    "strategy, changes",
    [
        (mt.Sync(), {"clip_norm": 0.5}),
        (mt.Sync(servers=2, push_wire=mt.TopK(density=1.0, dense_below=0)), {}),
    ],
)
def test_clipping_and_codecs_act_on_32_bits(tmp_path, strategy, changes):
    job = job_of("bfloat16", **changes)
    assert same(run(tmp_path, job, strategy), serial(job)[0])


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_averaged_and_stepped_is_the_mean_of_the_widened_gradients(tmp_path, workers):
    wanted, _ = serial(toy.make_job(**DYADIC, batch_size=16))
    own = mt.Async(optimizer="worker") if workers == 1 else mt.Sync(optimizer="worker", servers=2)
    for number, strategy in enumerate((mt.Sync(servers=2), own, mt.Decentralized())):
        job = toy.make_job(**DYADIC, batch_size=16 // workers)
        assert same(run(tmp_path / str(number), job, strategy, workers), wanted), strategy


def stepped(strategy, optimizer=toy.adam, steps_before=0):
    """A bfloat16 model, its optimizer, which has stepped before, and the flat model of a worker or a peer."""
    torch.manual_seed(0)
    module = nn.Linear(5, 3).bfloat16()
    optimizer = optimizer(module.parameters())
    for _ in range(steps_before):
        back(module)
        optimizer.step()
    if strategy.has_servers:
        return module, optimizer, flat_model(module, optimizer, strategy)
    return module, optimizer, peer_model(module, optimizer, strategy, VIRTUAL)


def back(module):
    module.zero_grad()
    module(torch.ones(2, 5, dtype=torch.bfloat16)).square().mean().backward()


OWN = mt.Async(optimizer="worker", servers=2)


def test_what_an_optimizer_remembers_is_widened_and_restored_in_32_bits():
    for strategy in (OWN, mt.Decentralized()):
        states = []
        for number in range(2):
            module, optimizer, flat = stepped(strategy, steps_before=1)
            if strategy == OWN:
                stepper = local_steps(flat, optimizer, strategy)
                step = stepper.step
            else:
                stepper = PeerReplica(
                    flat, optimizer, strategy, 0, toy.recipe(loss), toy.leases(toy.Memory().reader(None, 0))
                )
                step = lambda peer=stepper: peer.collect(0.0, 1)  # noqa: E731
            if number:
                stepper.restore(states[0])
            else:
                back(module)
                step()
            assert module.weight.dtype == module.weight.grad.dtype == torch.bfloat16
            states.append(stepper.state())
        (first, second) = (state["optimizer"]["state"][0]["exp_avg"] for state in states)
        assert first.dtype == torch.float32 and torch.equal(first, second)
        assert not torch.equal(first, first.bfloat16().float())


def test_servers_widen_what_an_optimizer_has_remembered():
    _, optimizer, flat = stepped(mt.Sync(servers=2), steps_before=2)
    store = shard_store(flat, 1, optimizer, mt.Sync(servers=2))
    gradient = store.wire_buffer()
    assert gradient.body.dtype == torch.bfloat16
    gradient.body.fill_(1.0)
    store.add(0, gradient, 1.0)
    store.apply()
    kept = store.state()
    moments = kept["optimizer"]["state"][0]["exp_avg"]
    assert moments.dtype == kept["parameters"].dtype == torch.float32
    old = torch.cat([optimizer.state[one]["exp_avg"].reshape(-1) for one in flat.parameters])[-9:].float()
    assert torch.equal(moments, old.lerp(torch.ones(9), 0.1))


def test_what_a_pass_writes_into_a_parameter_goes_into_its_master_and_nothing_else():
    module, _, flat = stepped(mt.Elastic())
    [home] = flat.current()
    home.body += 2.0**-20  # which 16 bits do not hold
    flat.install(0)
    before = home.body.clone()
    with torch.no_grad():
        module.weight[1] = 0.5
    flat.refresh()
    assert home.body[5:10].tolist() == [0.5] * 5
    assert torch.equal(home.body[10:], before[10:]) and torch.equal(home.body[:5], before[:5])


@pytest.mark.parametrize(
    "strategy, pushed, read",
    [
        ("sync()", "bfloat16", "bfloat16"),
        ("sync(push_wire='float16')", "float16", "bfloat16"),
        ("elastic(reply_wire='float16')", "bfloat16", "float16"),
        ("async(optimizer='worker')", "bfloat16", "bfloat16"),
    ],
)
def test_what_travels_is_of_the_models_dtype_unless_a_wire_says_otherwise(strategy, pushed, read):
    strategy = mt.strategies.base.read_strategy(strategy)
    _, optimizer, flat = stepped(strategy)
    store = shard_store(flat, 0, optimizer, strategy)
    received = flat.buffer_for(0, False)
    for dtype, pair in (
        (pushed, [flat.push_buffers()[0], store.wire_buffer()]),
        (read, [received, store.read(0)]),
    ):
        assert {buffer.body.dtype for buffer in pair} == {HALF[dtype]}
    received.release()
    final = flat.buffer_for(0, True), store.read(0, full=True)
    assert {buffer.body.dtype for buffer in final} == {torch.bfloat16}


@pytest.mark.parametrize("number, dtype", [(1, torch.float32), (2, torch.bfloat16)])
def test_peers_send_16_bits_and_meet_in_32_and_one_alone_rounds_nothing(number, dtype):
    _, optimizer, flat = stepped(rule := mt.Decentralized())
    leases = toy.leases(toy.Memory().reader(None, 0))
    peer = PeerReplica(flat, optimizer, rule, 0, toy.recipe(loss, number), leases)
    assert {buffer.body.dtype for buffer in (peer.update(), peer.buffer_for(True))} == {dtype}
    assert {buffer.body.dtype for buffer in (peer.total(), peer.buffer_for(False))} == {torch.float32}


def test_an_average_of_16_bits_takes_in_what_they_would_not_hold():
    held = [torch.zeros(3, dtype=torch.bfloat16)]
    average = Ema(0.999, lambda: held)
    average.update()
    held[0].fill_(1.0)
    for _ in range(1000):
        average.update()
    assert torch.allclose(average.values()[0], torch.tensor(1 - 0.999**1000), rtol=1e-4)


def test_a_norm_that_16_bits_do_not_hold_is_clipped_to_the_limit():
    gradient = [torch.full((4,), 30000.0, dtype=torch.float16) for _ in range(2)]
    Clipping(norm=1.0).clip(gradient)
    assert torch.stack(gradient).tolist() == [pytest.approx([8**-0.5] * 4, rel=1e-3)] * 2


def test_models_that_have_no_masters_are_refused_by_name():
    def flat(module, strategy):
        optimizer = toy.sgd(module.parameters())
        mt.model.check_optimizer(optimizer, strategy)
        return flat_model(module, optimizer, strategy)

    of_complex = nn.Linear(2, 2, dtype=torch.complex64)
    of_both = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2))
    looked_up = toy.NORMED["looked up"]().bfloat16()
    for module, says in (
        (
            of_complex,
            r"async\(\): trains .*bias is complex64: .*allreduce\(\)",
        ),
        (of_both, r"0.bias is float64, 1.bias is float32: convert them"),
        (looked_up, r"async\(\): beside tables .* bfloat16.*make the model with float32"),
    ):
        with pytest.raises(UsageError, match=says):
            flat(module, mt.Async())
    with pytest.raises(UsageError, match="bias is complex64"):
        peer_model(of_complex, toy.sgd(of_complex.parameters()), mt.Decentralized(), VIRTUAL)
    with pytest.raises(UsageError, match="a node's sums would be rounded to torch.bfloat16.*leave aggregate"):
        flat(DYADIC["model"](), mt.Sync(aggregate="node"))
    flat(MODELS["mixed"](), mt.Sync(aggregate="node"))


def test_who_swaps_to_a_strategy_without_masters_is_told(tmp_path):
    job = toy.make_job(**DYADIC)
    for strategy, told in ((mt.AllReduce(), 1), (mt.LocalSGD(period=2), 1), (mt.Sync(), 0)):
        run(tmp_path / strategy.name, job, strategy)
        rows = (tmp_path / strategy.name / "metrics.jsonl").read_text().splitlines()
        warnings = [row for row in map(json.loads, rows) if "32-bit masters" in row.get("text", "")]
        assert len(warnings) == told, strategy
    mt.train(job, mt.AllReduce(), threads=2, run_dir=str(tmp_path / "threads"), quiet=True)
    assert "32-bit masters" in (tmp_path / "threads" / "metrics.jsonl").read_text()
