"""Asynchronous training in virtual time, held to its exact laws."""

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.values import parse
from mpitrain.virtual import Constant, Exponential, Link, LogNormal
from tests import toy


def run(tmp_path, job, **options):
    return mt.simulate(job, run_dir=str(tmp_path / "run"), quiet=True, **options)


@pytest.mark.parametrize("optimizer", [toy.sgd, toy.adam, toy.two_groups])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_one_worker_is_serial_training_bit_for_bit(tmp_path, optimizer, servers):
    job = toy.make_job(optimizer=optimizer)
    result = run(tmp_path, job, strategy=mt.Async(servers=servers), workers=1)
    trained, expected = load_file(result["model"]), toy.serial(job)
    assert trained.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(trained[name], tensor), name
    assert result["staleness_histogram"] == {"0": 16}


@pytest.mark.parametrize("compute", [Constant(1.0, 0.0), Constant(), Exponential(), LogNormal(1.0, 1.0)])
@pytest.mark.parametrize("workers", [2, 5, 16])
def test_staleness_identity_is_exact_for_any_speeds(tmp_path, compute, workers):
    result = run(
        tmp_path, toy.make_job(epochs=4), strategy=mt.Async(servers=2), workers=workers, compute=compute
    )
    for shard in result["shards"]:
        left, right = shard["staleness_identity"]
        assert left == right
        assert shard["accepted"] == shard["version"] == 32


def test_with_everybody_reading_all_the_time_the_sum_is_updates_times_workers_less_one(tmp_path):
    """While leases last every worker has a read in flight: T updates leave T(N-1) reads waiting, exactly."""
    from mpitrain.effects import Recv, Send
    from mpitrain.messages import Join, Push
    from mpitrain.roles import Server
    from mpitrain.strategies import Async

    server = Server(Async(), _Numbers(), (1, 2, 3, 4), _Quiet())
    role = server.run()
    role.send(None)
    answers = {}

    def feed(source, message):
        effect = role.send((source, message))
        while not isinstance(effect, Recv):
            if isinstance(effect, Send):
                answers[effect.to] = effect.message.version
                effect = role.send(None)
            else:
                effect = role.send(effect.task() if hasattr(effect, "task") else 0.0)

    for worker in (1, 2, 3, 4):
        feed(worker, Join(0))
    order = [1, 1, 2, 4, 1, 3, 3, 3, 2, 4, 4, 1, 2, 3, 1, 1]
    for worker in order:
        feed(worker, Push(answers[worker], 0, 1, _Number()))
    assert server.counts.identity() == (len(order) * 3, len(order) * 3)


class _Number:
    num_bytes = 4

    def statistics(self):
        return {}

    def release(self):
        pass


class _Numbers:
    def hear_options(self, text):
        pass

    def add(self, worker, payload, weight, share=1.0):
        pass

    def follow(self, samples, num_workers):
        pass

    def apply(self):
        pass

    def read(self, worker, full=False, uses=1):
        return _Number()


class _Quiet:
    def progress(self, *values, **fields):
        pass

    def event(self, *values, **fields):
        pass


def test_few_batches_for_each_worker_are_told(tmp_path, capsys):
    def told(workers, strategy):
        job = toy.make_job(data=toy.Memory(40), batch_size=2, epochs=1)
        mt.simulate(job, strategy, workers, run_dir=str(tmp_path / f"{workers}-{strategy.name}"))
        printed = capsys.readouterr()
        assert " virtual=1 " in printed.out
        return "20 batches are 6.7 for each of 3 workers" in printed.err

    for strategy in (mt.Async(), mt.LocalSGD(period=2), mt.Decentralized()):
        assert told(3, strategy) and not told(2, strategy)


def test_round_robin_staleness_is_workers_less_one(tmp_path):
    result = run(tmp_path, toy.make_job(epochs=6), strategy=mt.Async(), workers=4, compute=Constant(1.0, 0.0))
    histogram = result["staleness_histogram"]
    assert max(map(int, histogram)) == 3
    assert (
        histogram["3"] == 48 - 1 - 1 - 1
    )  # the first round reads version 0: staleness 0, 1, 2, then 3 for ever


def test_every_sample_is_dealt_once_per_epoch_and_fast_workers_do_more(tmp_path):
    result = run(
        tmp_path, toy.make_job(epochs=3), strategy=mt.Async(), workers=3, compute=LogNormal(1.0, 1.5)
    )
    assert result["samples"] == 3 * 48 and result["dropped"] == result["nonfinite"] == result["late"] == 0


def test_the_number_of_servers_changes_no_random_number(tmp_path):
    """Times, dropout and what a codec draws are the worker's own, whatever its rank is."""
    job = toy.make_job(data=toy.Memory(200), batch_size=4)
    strategies = [f"async(servers={servers},push_wire=qsgd(dense_below=0))" for servers in (1, 2, 3)]
    results = [
        mt.simulate(job, parse(text, "strategy"), 4, LogNormal(1.0, 1.0), run_dir=str(tmp_path / text), quiet=True)
        for text in strategies
    ]  # fmt: skip
    assert len({result["virtual_s"] for result in results}) == 1
    for result in results:
        steps = [(worker["steps"], worker["compute_s"]) for worker in result["per_worker"]]
        assert steps == [
            (worker["steps"], worker["compute_s"]) for worker in results[0]["per_worker"]
        ] and len(set(steps)) > 1  # fmt: skip


def test_a_run_is_a_function_of_its_seed(tmp_path):
    options = {
        "strategy": mt.Async(servers=2),
        "workers": 5,
        "compute": LogNormal(),
        "network": Link(0.001, 1e-3),
    }
    results = [
        mt.simulate(toy.make_job(), run_dir=str(tmp_path / str(i)), quiet=True, **options) for i in range(2)
    ]
    first, second = (load_file(result["model"]) for result in results)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert results[0]["virtual_s"] == results[1]["virtual_s"]
    third = mt.simulate(toy.make_job(seed=1), run_dir=str(tmp_path / "2"), quiet=True, **options)
    assert third["virtual_s"] != results[0]["virtual_s"]


def test_a_nonfinite_gradient_stops_the_run_and_is_not_applied(tmp_path):
    job = toy.make_job(loss=_bad_at(5))
    result = run(tmp_path, job, strategy=mt.Async(servers=2), workers=2)
    assert result["status"] == "fail" and result["exit_code"] == 1
    assert "worker, step" in result["failure"] and "nan" in result["failure"]
    assert all(torch.isfinite(tensor).all() for tensor in load_file(result["model"]).values())


def test_a_nonfinite_gradient_can_be_skipped_and_counted(tmp_path):
    job = toy.make_job(loss=_bad_at(5), on_nonfinite="skip")
    result = run(tmp_path, job, strategy=mt.Async(servers=2), workers=2)
    assert result["status"] == "ok"
    assert (result["accepted"], result["nonfinite"]) == (15, 1)
    left, right = result["staleness_identity"]
    assert left == right


def _bad_at(call):
    calls = []

    def loss(model, batch):
        calls.append(1)
        value = toy.square_loss(model, batch)
        return value * float("nan") if len(calls) == call else value

    return loss
