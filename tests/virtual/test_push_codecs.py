"""Codecs on pushes and replies: an identity changes no bit, and no codec loses any of a gradient."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.codecs import Part, write_message
from mpitrain.errors import UsageError
from mpitrain.model import FlatModel, PushCoder, Replica, push_coder, shard_store
from mpitrain.model.recipe import GradientRule
from mpitrain.model.replicas.worker_replica import Between
from mpitrain.model.wire.push_codec import fields_of
from mpitrain.model.wire.reply_codec import ReplyReader
from mpitrain.reporting.report import NullReport
from mpitrain.roles import FaultTolerantServer, Rhythm, Worker
from mpitrain.strategies.placement import assign
from mpitrain.strategies.sampling.dealer import BatchDealer
from mpitrain.training.measure import build
from mpitrain.values import parse
from mpitrain.virtual import Ideal, ShiftedExponential, VirtualWorld
from tests import toy

IDENTITY = mt.TopK(density=1.0, dense_below=0)
RULES = (
    mt.Sync(servers=2), mt.Backup(spare=1), mt.Async(servers=2, inflight=2), mt.Async(damping=mt.Inverse()),
    mt.Async(damping=mt.DelayCompensated()), mt.SoftSync(updates=2, servers=3, damping=mt.Power(1.0)),
    mt.StaleSync(bound=1), mt.Async(optimizer="worker", push_every=3, pull_every=2),
)  # fmt: skip


def simulated(job, strategy, path, workers=3):
    law = ShiftedExponential(1.0, 1.0)
    result = mt.simulate(job, strategy, workers, law, run_dir=str(path), quiet=True)
    return result, load_file(result["model"])


@pytest.mark.parametrize("strategy", RULES, ids=str)
def test_pushes_by_an_identity_change_no_bit(tmp_path, strategy):
    job = toy.make_job(
        optimizer=toy.adam if strategy.optimizer == "server" else toy.sgd, epochs=3, batch_size=5
    )
    plain, expected = simulated(job, strategy, tmp_path / "plain")
    coded, trained = simulated(job, dataclasses.replace(strategy, push_wire=IDENTITY), tmp_path / "coded")
    assert all(torch.equal(trained[name], tensor) for name, tensor in expected.items())
    assert coded["staleness_histogram"] == plain["staleness_histogram"]
    densities = [one["codec"]["density"] for one in coded["per_worker"]]
    assert max(densities) == pytest.approx(1.0) and min(densities) > 0.0, (
        "less where a unit has been dropped out"
    )


@pytest.mark.parametrize(
    "strategy", (mt.Sync(servers=2), mt.Async(servers=2), mt.StaleSync(bound=1)), ids=str
)
def test_replies_by_an_identity_change_no_bit_on_dyadic_data(tmp_path, strategy):
    job = toy.make_job(**toy.DYADIC["linear in float32"], epochs=3)
    _, expected = simulated(job, strategy, tmp_path / "plain")
    both = dataclasses.replace(strategy, push_wire=IDENTITY, reply_wire=IDENTITY)
    _, trained = simulated(job, both, tmp_path / "coded")
    assert all(torch.equal(trained[name], tensor) for name, tensor in expected.items())
    coarse = dataclasses.replace(strategy, reply_wire=mt.Threshold(density=0.1, dense_below=0))
    sparse, _ = simulated(toy.make_job(epochs=3), coarse, tmp_path / "coarse")
    dense, _ = simulated(toy.make_job(epochs=3), strategy, tmp_path / "dense")
    assert sparse["replied_bytes"] < dense["replied_bytes"]


# ---- what is applied and what is kept are the gradients

LINEAR = {"model": toy.linear_float32, "loss": toy.linear_loss}
RATE = 2.0**-4


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


class Parts:
    """Two servers and three workers, open to be looked into when they have run."""

    def __init__(self, job, strategy):
        self.job, roles = job, assign((0,) * (3 + strategy.servers), strategy.servers)
        module, optimizer = build(job, None, torch.device("cpu"))
        model, reader = FlatModel(module, optimizer, strategy.servers), job.data.reader(None, 0)
        self.layout = model.layout
        self.initial = torch.cat([wire_buffer.body.clone() for wire_buffer in model.wire_buffers])
        self.stores = [shard_store(model, shard, optimizer, strategy) for shard in roles.servers]
        dealer = BatchDealer(job.data.num_samples, job.epochs, job.batch_size)
        servers = [
            FaultTolerantServer(strategy, store, roles.workers, NullReport(), None if shard else dealer,
                job.on_nonfinite)
            for shard, store in enumerate(self.stores)
        ]  # fmt: skip
        for server in servers:
            server.tracker.least_silence_s = float("inf")
        self.replicas = [
            Replica(
                model, GradientRule(job.loss), toy.leases(reader), rank,
                Between(coder=push_coder(model, strategy, 3, rank, 0)), shared=True,
            )
            for rank in roles.workers
        ]  # fmt: skip
        workers = [
            Worker(rank, roles, replica, NullReport(), Rhythm(inflight=strategy.inflight))
            for rank, replica in zip(roles.workers, self.replicas, strict=True)
        ]
        world = VirtualWorld(ShiftedExponential(1.0, 1.0), Ideal(), 0)
        everybody = zip((*roles.servers, *roles.workers), (*servers, *workers), strict=True)
        self.returned = world.run({rank: role.run() for rank, role in everybody})

    def applied(self):
        """Sum of what the servers' steps have used, by plain SGD."""
        return (self.initial - torch.cat([store.live.body for store in self.stores])) / RATE

    def kept(self):
        """Sum of the workers' residuals, as one vector."""
        total = torch.zeros_like(self.initial)
        for replica in self.replicas:
            for shard, encoder in enumerate(replica.coder.encoders):
                tensors = encoder.state()["tensors"]
                for field in fields_of(self.layout, shard):
                    start = self.layout.cuts[shard] + field.start
                    total[start : start + field.numel] += tensors[f"residual/{field.name}"].reshape(-1)
        return total

    def gradients(self):
        """Sum of the gradients of all batches: the loss is linear, so they depend on no parameters."""
        module, total = self.job.model(), torch.zeros_like(self.initial)
        parameters = list(module.parameters())
        for _ in range(self.job.epochs):
            for start in range(0, self.job.data.num_samples, self.job.batch_size):
                batch = self.job.data.reader(None, 0).batch(0, start, self.job.batch_size)
                loss = self.job.loss(module, batch)
                if torch.isfinite(loss):
                    total += torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])
        return total


CODECS = (
    mt.Threshold(tau=0.125, adaptive=False, dense_below=0), mt.Threshold(density=0.1, dense_below=0),
    mt.TopK(density=0.1, dense_below=0), mt.TopK(density=0.1, values="float16", dense_below=0),
    mt.Threshold(density=0.1, dense_below=0, warmup_steps=3),
)  # fmt: skip


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("strategy", (mt.Async(servers=2), mt.StaleSync(bound=1, servers=2)), ids=str)
def test_what_is_applied_and_what_is_kept_are_the_gradients(strategy, codec):
    job = toy.make_job(**LINEAR, optimizer=plain_sgd, epochs=3, batch_size=4)
    run = Parts(job, dataclasses.replace(strategy, push_wire=codec))
    assert run.kept().abs().max() > 0
    assert torch.equal(run.applied() + run.kept(), run.gradients())


@pytest.mark.parametrize("how", ("gradient", "loss alone"))
def test_nothing_of_a_refused_gradient_is_kept(how):
    poison = toy.Memory().reader(None, 0).batch(0, 8, 4)["x"]

    def loss(model, batch):
        bad = torch.equal(batch["x"], poison)
        if how == "loss alone":  # refused as well, though its gradient is finite
            return toy.linear_loss(model, batch) + (float("inf") if bad else 0.0)
        return toy.linear_loss(model, batch) * (float("nan") if bad else 1.0)

    job = toy.make_job(
        model=toy.linear_float32, loss=loss, optimizer=plain_sgd, epochs=2, batch_size=4, on_nonfinite="skip"
    )
    run = Parts(job, mt.Async(servers=2, push_wire=CODECS[0]))
    assert run.returned[0]["nonfinite"] == 2
    assert torch.equal(run.applied() + run.kept(), run.gradients())


def test_bytes_are_what_was_sent(tmp_path):
    codec = mt.Threshold(density=0.05, dense_below=0)
    wide = toy.make_job(model=lambda: torch.nn.Linear(5, 4000), loss=lambda m, b: m(b["x"]).square().mean())
    result, _ = simulated(wide, mt.Async(servers=2, push_wire=codec), tmp_path)
    workers = [one["codec"] for one in result["per_worker"]]
    pushes = [one["steps"] for one in result["per_worker"]]
    told = sum(one["mean_bytes"] * count for one, count in zip(workers, pushes, strict=True))
    assert sum(shard["pushed_bytes"] for shard in result["shards"]) == pytest.approx(told)
    assert told < 0.1 * sum(pushes) * 4 * 24000
    rows = [line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if '"codec"' in line]
    assert len(rows) == 3 and all("residual_norm" in row and "codec_ms" in row for row in rows)


def test_clipping_is_by_the_whole_gradient_before_the_residual():
    model = torch.nn.Linear(5, 7)
    flat = FlatModel(model, plain_sgd(model.parameters()), 3)
    coder = PushCoder(flat.layout, mt.TopK(density=1.0, clip=2.0, dense_below=0), 4, 0, 0)
    gradient = torch.arange(42) / 8.0
    wire_buffers = flat.push_buffers()
    for wire_buffer, piece in zip(wire_buffers, gradient.split([14, 14, 14]), strict=True):
        wire_buffer.body.copy_(piece)
    sent = torch.zeros(42)
    for shard, wire_message in enumerate(coder.encode(wire_buffers, finite=True)):
        low, high = flat.layout.cuts[shard : shard + 2]
        write_message(wire_message.body, [Part(sent[low:high], fields_of(flat.layout, shard))])
    assert torch.allclose(sent, gradient / gradient.norm() * 2.0 / 2.0)


@pytest.mark.parametrize(
    "codec", (mt.Threshold(density=0.2, dense_below=0), mt.PowerSGD(dense_below=0)), ids=str
)
def test_what_was_kept_survives_other_cuts_and_other_workers(codec):
    generator = torch.Generator().manual_seed(3)

    def made(num_shards, contributors):
        model = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Linear(16, 3))
        flat = FlatModel(model, plain_sgd(model.parameters()), num_shards)
        return flat, PushCoder(flat.layout, codec, contributors, 0, 0)

    def whole(coder):
        pieces = [torch.cat([t.reshape(-1) for k, t in e.state()["tensors"].items() if k.startswith("residual/")])
                  for e in coder.encoders]  # fmt: skip
        return torch.cat(pieces)

    states, mean = [], 0.0
    for _ in range(3):
        flat, coder = made(2, 3)
        for _ in range(2):
            wire_buffers = flat.push_buffers()
            for wire_buffer in wire_buffers:
                wire_buffer.body.copy_(
                    torch.randint(-64, 64, wire_buffer.body.shape, generator=generator) / 64.0
                )
            coder.encode(wire_buffers, finite=True)
        states.append(coder.state())
        mean = mean + whole(coder) / 3
    _, again = made(2, 3)
    again.restore(states[:1])
    assert torch.equal(whole(again), whole_of(states[0])) and again.encoders[1].step == 2
    for shards, workers in ((2, 2), (3, 3), (1, 5), (4, 1)):
        kept = 0.0
        for worker in range(workers):
            _, coder = made(shards, workers)
            coder.restore(states[worker::workers], states[0])
            flats = [f"residual/{field.name}" for fields in coder.fields for field in fields]
            found = [{**e.state()["tensors"]} for e in coder.encoders]
            tensors = {key: value for one in found for key, value in one.items()}
            sizes = [field.numel for fields in coder.fields for field in fields]
            kept = kept + torch.cat(
                [
                    tensors.get(key, torch.zeros(size)).reshape(-1)
                    for key, size in zip(flats, sizes, strict=True)
                ]
            )
        torch.testing.assert_close(kept / workers, mean, rtol=1e-6, atol=1e-7)


def whole_of(state):
    return torch.cat(
        [t.reshape(-1) for s in state["shards"] for k, t in s["tensors"].items() if "residual/" in k]
    )


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="an elastic exchange carries parameters"):
        parse("elastic(push_wire=threshold())", "strategy")
    with pytest.raises(UsageError, match="neither a momentum nor a norm"):
        parse("async(reply_wire=topk(momentum=0.9))", "strategy")
    with pytest.raises(UsageError, match="push_wire must be a codec"):
        mt.Async(push_wire=mt.Keep())
    with pytest.raises(UsageError, match="replaces the optimizer's"):
        mt.simulate(toy.make_job(), mt.Async(push_wire=mt.TopK(momentum=0.9)), 2, quiet=True)
    wide = toy.make_job(**toy.DYADIC["quadratic in float64"])
    with pytest.raises(UsageError, match="takes parameters of float32 or 16 bits"):
        mt.simulate(wide, mt.Async(push_wire=mt.Threshold()), 2, quiet=True)
    elastic = parse("elastic(push_wire=bfloat16())", "strategy")
    assert elastic.push_numbers == "bfloat16" and elastic.push_codec.is_none


def test_a_correction_goes_by_what_the_worker_holds_and_not_by_what_it_was_told_of():
    """Coarse replies: delay compensation uses w - what, so a worker whose copy is far from w is corrected by that."""
    strategy = mt.Async(
        reply_wire=mt.Threshold(tau=0.25, adaptive=False, dense_below=0), damping=mt.DelayCompensated(lam=2.0)
    )
    module = toy.linear_float32()
    optimizer = plain_sgd(module.parameters())
    model = FlatModel(module, optimizer, 1)
    store, reader = shard_store(model, 0, optimizer, strategy), ReplyReader(model.layout)
    held = reader.take(0, store.read(5)).body
    assert torch.equal(held, store.live.body)

    def push(gradient):
        wire_buffer = store.wire_buffer()
        wire_buffer.body.copy_(gradient)
        return store.correct(5, wire_buffer, 1)

    store.add(5, push(torch.ones(24)), 1.0)
    store.apply()
    before = held.clone()
    reader.take(0, store.read(5))  # a change of 1/16 is below tau: nothing is told
    assert torch.equal(held, before) and not torch.equal(held, store.live.body)
    gradient = torch.arange(24) / 8.0
    corrected = push(gradient).body
    assert torch.allclose(corrected, gradient + 2.0 * gradient * gradient * (store.live.body - held))
    assert not torch.equal(corrected, gradient)
