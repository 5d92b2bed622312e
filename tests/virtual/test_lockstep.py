"""Synchronous rules: equal to one process with the full batch, bits that no timing changes, exact counts of
contributors, and the step time of the k-th of n workers.

"""

import itertools
import statistics

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.messages import Push
from mpitrain.strategies import Backup, SoftSync, Sync
from mpitrain.virtual import Constant, Exponential, LogNormal, ShiftedExponential
from mpitrain.virtual.compute import WorkerTimes
from tests import toy
from tests.sampling import cells
from tests.virtual.worlds import Desk, Number, NumberStore, Shuffled, by_batch, play, quadratic


def lockstep(num_workers, servers=1):
    """Four names for the same thing."""
    return (
        Sync(servers=servers),
        Backup(spare=0, servers=servers),
        SoftSync(updates=num_workers, blocking=True, servers=servers),
    )


def trained(path, job, **options):
    return load_file(mt.simulate(job, run_dir=str(path), quiet=True, **options)["model"])


@pytest.mark.parametrize("kind", toy.DYADIC)
@pytest.mark.parametrize(("num_workers", "servers"), [(2, 1), (4, 1), (4, 2)])
def test_lockstep_is_serial_training_with_the_full_batch_bit_for_bit(tmp_path, num_workers, servers, kind):
    changes = toy.DYADIC[kind] | {"epochs": 1}
    expected = toy.serial(toy.make_job(**changes, batch_size=16))
    for index, strategy in enumerate(lockstep(num_workers, servers)):
        job = toy.make_job(**changes, batch_size=16 // num_workers)
        options = {"strategy": strategy, "workers": num_workers, "compute": Exponential()}
        for name, tensor in trained(tmp_path / str(index), job, **options).items():
            assert torch.equal(tensor, expected[name]), (strategy, name)


@pytest.mark.parametrize("kind", toy.DYADIC)
@pytest.mark.parametrize(("num_workers", "num_samples", "batch_size"), [(2, 36, 8), (4, 36, 4), (3, 4, 8)])
def test_the_last_round_of_an_epoch_is_serial_training_with_what_is_left(
    tmp_path, num_workers, num_samples, batch_size, kind
):
    """4 samples are left: 2 and 2, one each, or 2, 1 and 1, weighed by their number."""
    changes = toy.DYADIC[kind] | {"data": toy.Memory(num_samples), "epochs": 2 if num_samples == 4 else 1}
    expected = toy.serial(toy.make_job(**changes, batch_size=num_workers * batch_size), 0)
    job = toy.make_job(**changes, batch_size=batch_size)
    for index, strategy in enumerate((*lockstep(num_workers), *lockstep(num_workers, servers=2))):
        options = {"strategy": strategy, "workers": num_workers, "compute": Exponential()}
        for name, tensor in trained(tmp_path / str(index), job, **options).items():
            assert torch.equal(tensor, expected[name]), (strategy, name)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_loss_that_tells_its_weight_is_divided_by_the_weight_of_all(tmp_path, servers):
    """sync() of 4 is one process with the whole batch; where each divides for itself, it is not."""
    expected = toy.serial(toy.make_job(**toy.WEIGHTED, batch_size=16), 0)
    job = toy.make_job(**toy.WEIGHTED, batch_size=4)
    for index, strategy in enumerate(lockstep(4, servers)):
        for name, tensor in trained(tmp_path / str(index), job, strategy=strategy, workers=4).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
    apart = toy.make_job(**toy.WEIGHTED | {"loss": toy.own_weighted_loss}, batch_size=4)
    away = trained(tmp_path / "apart", apart, strategy=Sync(servers=servers), workers=4)
    assert max((away[name] - expected[name]).abs().max() for name in expected) > 1e-3


def test_softsync_takes_the_mean_over_samples_of_what_makes_its_update():
    """Batches of 6 and 2 samples, by turns: each weighs as many."""
    store = NumberStore(rate=0.25)
    desk = Desk(SoftSync(updates=2), store, (1, 2))
    for worker, samples, value in ((1, 6, 1.0), (2, 2, 5.0)):
        payload = Number(value, 0)
        desk.feed(worker, Push(0, 0, samples, payload, share=samples))
    assert store.path == [1.0, 1.0 - 0.25 * (6 * 1.0 + 2 * 5.0) / 8]


def test_timing_changes_no_bit_of_lockstep(tmp_path):
    """Float32 on no dyadic grid, momentum, dropout, a ragged end: what counts is who contributed, not when."""
    job = toy.make_job(data=toy.Memory(50), batch_size=6)
    laws = (Constant(1.0, 0.0), LogNormal(1.0, 1.0), Exponential(), Constant(1.0, 0.9))
    for servers in (1, 3):
        options = [
            {"compute": law, "strategy": strategy} for law in laws for strategy in lockstep(4, servers)
        ]
        runs = [
            trained(tmp_path / f"{servers}-{index}", job, workers=4, **each)
            for index, each in enumerate(options[:1] + options[4:6] + options[7:])
        ]
        for run in runs[1:]:
            assert all(torch.equal(run[name], runs[0][name]) for name in run)


def peak(order):
    """How many gradients wait at most when each is added as soon as all of lower rank have been."""
    waiting, added, most = set(), 0, 0
    for worker in order:
        waiting.add(worker)
        most = max(most, len(waiting))
        while added + 1 in waiting:
            added += 1
            waiting.discard(added)
    return most


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3, 4))))
def test_gradients_are_added_in_rank_order_and_waiting_buffers_are_counted(order):
    values = {1: 0.1, 2: 1e16, 3: -1e16, 4: 0.3}  # every order of addition gives other bits
    for strategy in (*lockstep(4), SoftSync(updates=4)):
        store = NumberStore(rate=0.1)
        desk = Desk(strategy, store, (1, 2, 3, 4))
        for worker in order:
            desk.push(worker, Number(values[worker], 0))
        assert [one.worker for one in store.updates[0]] == [1, 2, 3, 4]
        assert store.path == [1.0, 1.0 - 0.1 * ((0.1 + 1e16 - 1e16 + 0.3) / 4)]
        turns = strategy != SoftSync(updates=4)  # where anybody may push next, nobody's turn is known
        assert desk.server.summary()["max_pending"] == (peak(order) if turns else 4), strategy


SPEEDS = {
    "nearly equal": {"compute": Constant(1.0, 0.3)},
    "exponential": {"compute": Exponential()},
    "one is slow": {"compute": LogNormal(1.0, 1.0), "slow": {0: 8.0}},
    "slow network": {"compute": Exponential(), "network": Shuffled(3)},
}


def adds_up(num_workers, spare, policy):
    """Of every version each worker's gradient was accepted, came late, was skipped, or is on its way."""
    full = []  # updates and fates so far, since the last worker has joined

    def look(trace):
        counts = trace.server.counts
        if not trace.complete(num_workers):
            return
        assert all(len(update) == num_workers - spare for update in trace.store.updates)
        assert all(one.read == at for at, update in enumerate(trace.store.updates) for one in update)
        accepted = (num_workers - spare) * trace.version
        full.append((trace.version, accepted + counts.late + counts.versions_skipped + trace.in_flight()))
        assert full[-1][1] - full[0][1] == num_workers * (full[-1][0] - full[0][0])
        if policy == "abort":
            assert (counts.late, counts.versions_skipped, trace.in_flight()) == (spare * trace.version, 0, 0)

    return look, full


@pytest.mark.parametrize("policy", ["finish", "abort"])
@pytest.mark.parametrize("speeds", SPEEDS)
@pytest.mark.parametrize(("num_workers", "spare"), [(2, 1), (4, 1), (5, 3), (12, 2)])
def test_backup_averages_exactly_the_quorum_at_every_update_and_counts_every_fate(
    num_workers, spare, speeds, policy
):
    look, full = adds_up(num_workers, spare, policy)
    strategy = Backup(spare=spare, stragglers=policy)
    seen = play(strategy, num_workers, 40 * num_workers, look=look, **SPEEDS[speeds])
    assert full[-1][0] > full[0][0] + 20
    assert seen.counts["late"] > 0


def test_whose_gradients_are_dropped_does_not_matter_when_all_have_the_same_batch():
    def paths(slope, policy):
        strategy, options = Backup(spare=1, stragglers=policy), {"slope": slope, "rate": 0.25}
        law = Exponential()
        runs = [
            play(strategy, 4, 96, compute=law, seed=seed, **options).trace.store.path for seed in range(4)
        ]
        return {tuple(path[:22]) for path in runs}

    for policy in ("finish", "abort"):
        assert paths(quadratic(1.0), policy) == {tuple(0.75**t for t in range(22))}  # exact: 44 bits
        assert len(paths(by_batch, policy)) == 4


# k -> E[time of a step] with n = 100 and shift = mean = 1: shift + mean * (H_n - H_(n-k))
STEP_S = {100: 6.187, 99: 5.187, 98: 4.687, 96: 4.104, 94: 3.737, 90: 3.258}


def keyed_times(num_steps, seed=0):
    """Sorted times of 100 workers in every step, drawn as the virtual world draws them."""
    law = ShiftedExponential(1.0, 1.0)
    workers = [WorkerTimes(law, seed, worker) for worker in range(100)]
    return [sorted(worker.next() for worker in workers) for _ in range(num_steps)]


@pytest.mark.parametrize("accepted", STEP_S)
def test_a_step_lasts_until_the_kth_of_n_under_abort(accepted):
    """Exactly, step by step: whoever is too slow starts anew with the others."""
    strategy = Backup(spare=100 - accepted, stragglers="abort")
    seen = play(strategy, 100, 1500, compute=ShiftedExponential(1.0, 1.0))
    now_s, expected = 0.0, []
    for times in keyed_times(12):
        now_s += times[accepted - 1]
        expected.append(now_s)
    assert seen.trace.update_s[:12] == expected


def test_the_table_of_step_times_holds_to_one_percent():
    """Every step of `abort` lasts what the test above says it does: its mean is that of the k-th draw."""
    harmonic = [0.0, *itertools.accumulate(1 / i for i in range(1, 101))]
    steps = keyed_times(4000)
    for accepted, mean_s in STEP_S.items():
        assert 1 + harmonic[100] - harmonic[100 - accepted] == pytest.approx(mean_s, abs=6e-4)
        assert statistics.fmean(times[accepted - 1] for times in steps) == pytest.approx(mean_s, rel=0.01)
    for accepted, finish_s in cells({90: 3.48, 94: 3.90}.items(), row=lambda _: "finish"):
        seen = play(Backup(spare=100 - accepted), 100, 100 * 100, compute=ShiftedExponential(1.0, 1.0))
        took_s = seen.trace.update_s[80] / 81
        assert took_s > STEP_S[accepted]
        assert took_s == pytest.approx(finish_s, rel=0.03)
