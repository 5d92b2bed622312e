"""Ordered stragglers in virtual time: exact times, exact counts, and nothing else changed."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.cli import main as cli
from mpitrain.cli.train import overrides
from mpitrain.effects import Compute, Interrupted, Now, Recv, Send, Sleep
from mpitrain.errors import UsageError
from mpitrain.inject import (
    CorruptFile,
    Crash,
    DiskFull,
    Exit,
    Flip,
    Kill,
    KillAtEnd,
    Nan,
    Pause,
    Poisson,
    Raise,
    Segv,
    Slow,
    SlowReader,
    Stall,
    Stop,
    Straggler,
    Torn,
    Wedge,
    read,
    texts,
)  # fmt: skip
from mpitrain.messages import Join
from mpitrain.values import parse, registered
from mpitrain.virtual import Constant
from tests import toy

EXACT = Constant(1.0, 0.0)


def run(tmp_path, strategy, workers, inject, name="run", **changes):
    """The toy job has 16 batches in 2 epochs; each takes exactly 1 s, and messages none."""
    return mt.simulate(
        toy.make_job(**changes), strategy, workers, EXACT, run_dir=str(tmp_path / name), quiet=True, inject=inject
    )  # fmt: skip


@pytest.mark.parametrize("servers", [1, 2])
def test_a_slow_worker_takes_exactly_factor_times_as_long_and_is_named_by_its_index(tmp_path, servers):
    result = run(tmp_path, mt.Async(servers=servers), 1, "slow(worker=0, factor=5)")
    assert result["virtual_s"] == 16 * 5.0
    assert result["injected"] == [{"worker": 0, "sleeps": 16, "slept_s": 16 * 4.0}]
    assert result["inject"] == ["slow(worker=0,factor=5)"]


def test_sync_goes_at_the_pace_of_the_slowest_and_backup_does_not(tmp_path):
    inject = "slow(worker=3, factor=5)"
    sync = run(tmp_path, mt.Sync(), 4, inject, "sync", epochs=3)
    assert sync["virtual_s"] == 24 / 4 * 5.0 and sync["steps"] == 6
    backup = run(tmp_path, mt.Backup(spare=1), 4, inject, "backup", epochs=3)
    # at t = 1, 2, 3, 4 the three others make an update each; the slow one's first gradient comes at 5, late
    assert backup["late"] >= 1 and backup["virtual_s"] < sync["virtual_s"]
    assert backup["staleness_histogram"] == {"0": backup["accepted"]}
    assert backup["accepted"] + backup["late"] == 24


def test_a_paused_worker_comes_back_with_as_much_staleness_as_the_others_made_updates(tmp_path):
    result = run(tmp_path, mt.Async(), 2, "pause(worker=1, at_step=2, seconds=10)")
    # worker 1 pushes at 1, 2, 13 and, having read ahead, 14; worker 0 at 1 to 12
    assert result["virtual_s"] == 14.0
    assert result["injected"] == [{"worker": 1, "sleeps": 1, "slept_s": 10.0}]
    assert result["staleness_max"] == 10 and result["staleness_histogram"]["10"] == 1


def test_injections_of_one_worker_add_up(tmp_path):
    inject = (
        "slow(worker=0, factor=3)",
        "pause(worker=0, at_step=5, seconds=7)",
        "slow(worker=0, factor=1.5)",
    )
    result = run(tmp_path, mt.Async(), 1, inject)
    assert result["virtual_s"] == 16 * (1 + 2 + 0.5) + 7
    assert result["injected"][0]["sleeps"] == 16


def test_a_stall_is_drawn_by_seed_worker_and_step_alone(tmp_path):
    order = Stall(0, 0.3, 4.0)

    def stalled(seed, worker=0):
        straggler = Straggler((dataclasses.replace(order, worker=worker),), worker, seed)
        return [straggler.sleep_s(compute_s) for compute_s in [0.1, 3.0] * 200]

    assert stalled(0) == stalled(0) and 80 < stalled(0).count(4.0) < 160
    assert stalled(0) != stalled(1) and stalled(0) != stalled(0, worker=1)
    result = run(tmp_path, mt.Async(), 1, order)
    num_stalls = stalled(0)[:16].count(4.0)
    assert num_stalls > 0 and result["virtual_s"] == 16 + 4.0 * num_stalls
    assert result["injected"] == [{"worker": 0, "sleeps": num_stalls, "slept_s": 4.0 * num_stalls}]


def test_under_the_abort_policy_a_sleep_is_broken_off_like_a_gradient(tmp_path):
    result = run(tmp_path, mt.Backup(spare=1, stragglers="abort"), 4, "slow(worker=3, factor=5)", epochs=6)
    # 48 batches: worker 3 is told to start again at every whole second and finishes nothing before the
    # others have done all 46 but its own two; these it then does alone
    assert result["late"] == 16 and result["accepted"] == 48 and result["dropped"] == 0
    assert result["virtual_s"] == 16 + 2 * 5.0 and result["steps"] == 16 + 2
    left, right = result["staleness_identity"]
    assert left == right


def test_a_pause_that_is_broken_off_does_not_come_again(tmp_path):
    inject = "pause(worker=3, at_step=1, seconds=0.5)"
    result = run(tmp_path, mt.Backup(spare=1, stragglers="abort"), 4, inject, epochs=6)
    assert result["injected"] == [{"worker": 3, "sleeps": 1, "slept_s": 0.5}]
    assert result["virtual_s"] == int(result["virtual_s"])  # nobody slept the half second out


def test_bits_do_not_depend_on_an_injection_where_they_do_not_depend_on_time(tmp_path):
    plain = run(tmp_path, mt.Sync(), 4, (), "plain")
    slowed = run(tmp_path, mt.Sync(), 4, ("slow(worker=1, factor=9)", "stall(2, 0.5, 3)"), "slowed")
    assert plain["inject"] == plain["injected"] == []
    assert slowed["virtual_s"] > plain["virtual_s"]
    one, other = load_file(plain["model"]), load_file(slowed["model"])
    assert all(torch.equal(one[name], other[name]) for name in one)


def answers_of(role, replies):
    """Drive a role by hand; returns the effects it yielded and what it returned."""
    seen, replies = [], iter(replies)
    effect = role.send(None)
    while True:
        seen.append(effect)
        try:
            effect = role.send(next(replies))
        except StopIteration as end:
            return seen, end.value


def test_every_effect_passes_through_and_only_a_gradient_is_followed_by_a_sleep():
    effects = [
        Send(0, Join(0)), Recv(), Now(), Compute(int, "validate"), Compute(int, "apply"),
        Compute(int, "gradient"), Recv(),
    ]  # fmt: skip
    heard = []

    def role():
        for effect in effects:
            heard.append((yield effect))
        return "end"

    straggler = Straggler((Slow(4, 3.0), Pause(5, 0, 1.0)), 4, 0)
    replies = [None, "a", 1.5, "b", "c", 10.0, "gradient", 12.0, None, "d"]
    seen, returned = answers_of(straggler.wrap(role()), replies)
    assert seen == [*effects[:5], Now(), effects[5], Now(), Sleep(4.0), effects[6]]
    assert all(any(one is other for one in seen) for other in effects)
    assert heard == [None, "a", 1.5, "b", "c", "gradient", "d"] and returned == "end"


@pytest.mark.parametrize(
    ("replies", "heard"),
    [
        ([0.0, None], None),  # no gradient: the caller's data has ended
        ([0.0, Interrupted()], Interrupted()),
        ([0.0, "gradient", 1.0, Interrupted()], Interrupted()),  # broken off while it slept
    ],
)
def test_what_is_no_finished_gradient_is_not_slowed(replies, heard):
    got = []

    def role():
        got.append((yield Compute(int)))

    straggler = Straggler((Slow(0, 3.0),), 0, 0)
    answers_of(straggler.wrap(role()), replies)
    assert got == [heard] and straggler.step == (len(replies) > 2)


def test_a_role_for_which_nothing_is_ordered_stays_itself():
    role = iter(())
    straggler = Straggler((Slow(1, 3.0),), 0, 0)
    assert straggler.wrap(role) is role and straggler.counts() == []


def test_a_straggler_goes_on_where_its_state_was_taken():
    orders = (Pause(0, 3, 2.0), Stall(0, 0.5, 1.0))
    whole, first, second = (Straggler(orders, 0, 7) for _ in range(3))
    slept = [whole.sleep_s(1.0) for _ in range(20)]
    begun = [first.sleep_s(1.0) for _ in range(2)]
    second.restore(first.state())
    assert begun + [second.sleep_s(1.0) for _ in range(18)] == slept
    assert second.counts() == whole.counts()


def test_texts_round_trip_and_values_are_taken_for_texts():
    values = (
        Slow(2, 5), Pause(1, 50, 2), Stall(0, 0.1, 1.5), Kill(2, 50, after_s=0.25), Segv(1, 0), Exit(0, 3), Raise(1, 2),
        KillAtEnd(1), Stop(0, 1), Wedge(3, 1), Nan(0, 7), Torn(1, 1), DiskFull(2), CorruptFile(1, "worker-0"),
        Crash(mtbf_s=60.0, at_s=5.0), SlowReader(1, 0.5), Poisson(15.0, "kill,stop", seed=2),
        Flip(1, 5, "optimizer", tensor=3, bit=7),
    )  # fmt: skip
    assert {type(value) for value in values} == set(registered("inject"))
    assert read(texts(values)) == values
    assert all(eval(repr(value)) == value == parse(str(value), "inject") for value in values)
    assert texts(values[0]) == texts(str(values[0])) == ("slow(worker=2,factor=5)",)


@pytest.mark.parametrize(
    ("inject", "told"),
    [
        ("slow(worker=4, factor=2)", "no worker 4. This run has 4 workers, 0 to 3"),
        (("slow(worker=0, factor=2)", "pause(worker=9, at_step=0, seconds=1)"), "no worker 9"),
        ("slow(worker=-1, factor=2)", "index from 0"),
        ("slow(worker=1, factor=0.5)", "at least 1"),
        ("slow(worker=1)", "needs factor"),
        ("slow(rank=1, factor=2)", "no argument 'rank'. Known: worker, factor"),
        ("slwo(worker=1, factor=2)", "did you mean 'slow'"),
        ("constant(1)", "pause, poisson, raise, segv, slow, slow_reader, stall"),
        ("pause(worker=1, at_step=-1, seconds=1)", "counts from 0"),
        ("pause(worker=1, at_step=1, seconds=-1)", "not negative"),
        ("stall(worker=1, chance=1.5, seconds=1)", "from 0 to 1"),
        ("slow(worker=1,", "cannot read inject text"),
    ],
)
def test_a_wrong_order_is_refused_with_what_exists(tmp_path, inject, told):
    with pytest.raises(UsageError) as error:
        run(tmp_path, mt.Async(), 4, inject)
    assert told in str(error.value)


def test_the_option_is_repeatable_and_reaches_both_commands():
    words = ["j.py", "--inject", "slow(worker=2, factor=5)", "--inject", "stall(0, 0.1, 1)"]
    for command in ("train", "simulate"):
        arguments = cli.parse([command, *words])
        made = overrides(arguments)
        assert made.injections == (Slow(2, 5), Stall(0, 0.1, 1))
        assert overrides(cli.parse([command, "j.py"])).inject == ()
