"""Periodic averaging on real ranks: whole runs beside those that theory says they equal, and the averager by itself."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.mpi.process_group.process_group import init_default_group
from mpitrain.training.local_sgd.averager import Averager
from mpitrain.training.local_sgd.means import Means
from mpitrain.training.synchronous.collectives import GroupCollectives
from tests import toy
from tests.mpi.cases import run_cases
from tests.mpi.simulated import PIECE_BYTES, RUNS, TOGETHER

Averager.piece_bytes = PIECE_BYTES

OUT = Path(os.environ["AVERAGING_OUT"])


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=2.0**-4)


def trained(name, strategy, **changes):
    """The model that `strategy` trains, and the run's result."""
    result = mt.train(toy.make_job(**changes), strategy, run_dir=str(OUT / name), quiet=True)
    assert result["status"] == "ok", result["failure"]
    return load_file(OUT / name / "model.safetensors"), result


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def case_period_one_with_plain_sgd_is_allreduce_on_dyadic_data(rt):
    for index, changes in enumerate(toy.DYADIC.values()):
        dyadic = changes | {"optimizer": plain_sgd, "epochs": 1, "batch_size": 16 // rt.size}
        expected, _ = trained(f"all-{index}", mt.AllReduce(), **dyadic)
        got, result = trained(f"one-{index}", mt.LocalSGD(period=1), **dyadic)
        assert same(got, expected) and result["averagings"] == result["steps"] == 3


def case_outer_rate_one_without_momentum_is_averaging_bit_for_bit(rt):
    mean, result = trained("mean", mt.LocalSGD(period=3))
    assert result["averagings"] == 2 and result["drift"] > 0  # 4 steps: one round of 3, one of 1
    assert same(trained("diloco", mt.LocalSGD(period=3, outer=mt.DiLoCo(rate=1.0, momentum=0.0)))[0], mean)
    assert same(trained("slowmo", mt.LocalSGD(period=3, outer=mt.SlowMo(beta=0.0)))[0], mean)
    assert not same(trained("moved", mt.LocalSGD(period=3, outer=mt.SlowMo(beta=0.5)))[0], mean)
    assert not same(
        trained("bf16", mt.LocalSGD(period=3, wire="bfloat16"))[0], mean
    )  # the wire is really used
    samples, _ = trained("samples", mt.LocalSGD(period=3 * 6 * rt.size, unit="samples"))
    assert rt.size != 4 or same(samples, mean)


def case_before_start_it_is_allreduce(rt):
    expected, _ = trained("allreduce", mt.AllReduce())
    got, result = trained("late", mt.LocalSGD(period=2, start=100))
    assert same(got, expected) and result["averagings"] == 0
    assert trained("post", mt.LocalSGD(period=2, start=2))[1]["averagings"] == 1


def case_a_gradient_that_is_not_finite_stops_all_at_the_next_averaging(rt):
    def loss(model, batch):
        value = toy.square_loss(model, batch)
        return value * float("nan") if rt.rank == 1 else value

    for action in ("stop", "skip"):
        job = toy.make_job(loss=loss, on_nonfinite=action)
        result = mt.train(job, mt.LocalSGD(period=2), run_dir=str(OUT / f"nan-{action}"), quiet=True)
        if action == "stop":
            assert result["exit_code"] == 1 and "rank 1 (worker, step 0)" in result["failure"], result[
                "failure"
            ]
            assert result["steps"] == 2
        else:
            assert result["status"] == "ok" and result["nonfinite"] == result["steps"] == 4


def case_what_a_simulation_has_to_make_of_it(rt):
    for name in json.loads(os.environ["SIMULATED"]):
        strategy, changes = (RUNS | TOGETHER)[name]
        trained(f"simulated-{name}", strategy, **changes)


class Group:
    """The default process group for as long as the context lasts."""

    def __init__(self, rt):
        self.rt = rt

    def __enter__(self):
        init_default_group(self.rt)

    def __exit__(self, *error):
        dist.destroy_process_group()
        self.rt.engine.stop()


def make(rt, strategy, optimizer=toy.adam):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 1))
    module = module.train()
    optimizer = optimizer(module.parameters())
    return module, optimizer, Averager(module, optimizer, strategy)


def step(rt, module, optimizer, averager, number):
    generator = torch.Generator().manual_seed(100 * number + rt.rank)
    averager.begin_step()
    optimizer.zero_grad()
    module(torch.randn(8, 40, generator=generator)).square().mean().backward()
    optimizer.step()
    if averager.end_step():
        averager.average()
        return True
    return False


def everybody(tensor):
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.detach().contiguous())
    return rows


def case_optimizer_state_and_buffers_are_averaged_where_asked(rt):
    with Group(rt):
        for averaged in (False, True):
            strategy = mt.LocalSGD(period=2, average_optimizer=averaged, average_buffers=averaged)
            module, optimizer, averager = make(rt, strategy)
            step(rt, module, optimizer, averager, 0)
            twin, twin_optimizer, alone = make(rt, mt.LocalSGD(period=100))
            for number in (0, 1):
                step(rt, twin, twin_optimizer, alone, number)
            assert step(rt, module, optimizer, averager, 1)
            for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
                rows = everybody(mine)
                assert all(torch.equal(row, rows[0]) for row in rows)
                for key in ("exp_avg", "exp_avg_sq"):
                    own, rows = optimizer.state[mine][key], everybody(twin_optimizer.state[theirs][key])
                    expected = sum(rows) / rt.size if averaged else rows[rt.rank]
                    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-9)
            rows = everybody(twin[1].running_mean)
            expected = sum(rows) / rt.size if averaged else rows[rt.rank]
            torch.testing.assert_close(module[1].running_mean, expected, rtol=1e-5, atol=1e-9)
            assert int(module[1].num_batches_tracked) == 2


def case_eight_bits_keep_what_they_round_off(rt):
    with Group(rt):
        means, total, true = Means("int8", GroupCollectives()), torch.zeros(1001), torch.zeros(1001)
        for number in range(6):
            mine = torch.randn(1001, generator=torch.Generator().manual_seed(10 * number + rt.rank))
            (mean,) = means.means_of([mine])
            assert all(torch.equal(row, mean) for row in everybody(mean))
            total, true = total + mean, true + sum(everybody(mine)) / rt.size
            bound = 4 / 127  # a block's largest is below 4: half a level on each way in, and the same out
            assert float((mean - sum(everybody(mine)) / rt.size).abs().max()) < 2 * bound
        # six rounds are no further off than one: the error is fed back, it does not add up
        assert 0 < float((total - true).abs().max()) < bound
        assert means.sent_bytes < 6 * 0.35 * 2 * 4 * 1001


def case_a_restored_averager_goes_on_to_the_bit(rt):
    strategy = mt.LocalSGD(period=2, outer=mt.DiLoCo(), wire="int8", average_optimizer=True)
    with Group(rt):
        module, optimizer, averager = make(rt, strategy)
        for number in range(5):
            step(rt, module, optimizer, averager, number)
        saved = averager.state(), module.state_dict(), optimizer.state_dict()
        other, other_optimizer, resumed = make(rt, strategy)
        other.load_state_dict({name: tensor.clone() for name, tensor in saved[1].items()})
        torch.save(saved[2], OUT / f"optimizer-{rt.rank}.pt")
        other_optimizer.load_state_dict(torch.load(OUT / f"optimizer-{rt.rank}.pt"))
        resumed.restore(saved[0])
        for number in range(5, 8):
            step(rt, module, optimizer, averager, number)
            step(rt, other, other_optimizer, resumed, number)
        assert averager.num_averagings == 4 and same(module.state_dict(), other.state_dict())


def case_the_own_loop(rt):
    """Last: one wrap a process."""
    expected = toy.linear_float32()
    optimizer = plain_sgd(expected.parameters())
    model, wrapped = toy.linear_float32(), None
    model, wrapped = mt.wrap(model, plain_sgd(model.parameters()), mt.LocalSGD(period=1))
    reader = toy.Memory().reader(None, 0)
    for number in range(3):
        batch = reader.batch(0, 16 * number, 16)
        optimizer.zero_grad()
        toy.linear_loss(expected, batch).backward()
        optimizer.step()
        wrapped.zero_grad()
        share = {name: tensor[mt.worker_index() :: mt.num_workers()] for name, tensor in batch.items()}
        toy.linear_loss(model, share).backward()
        wrapped.step()
    mt.finish()
    assert rt.size not in (1, 2, 4) or same(model.state_dict(), expected.state_dict())
    dist.destroy_process_group()
    rt.engine.stop()


run_cases(globals())
