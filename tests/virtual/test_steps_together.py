"""Strategies whose ranks take the same steps, in virtual time: what a step takes, and what ends a run."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.errors import DeadlockError, LostRankError, UsageError
from mpitrain.job import Overrides
from mpitrain.simulation.base import VirtualRun
from mpitrain.simulation.collective_costs import Collectives
from mpitrain.simulation.lockstep import simulate_lockstep
from mpitrain.virtual import Cluster, Constant, Ideal, Link, LogNormal
from mpitrain.virtual.collectives import (
    Cost,
    direct_allreduce,
    hierarchical_allreduce,
    library_allreduce,
    smp_allreduce,
)
from mpitrain.virtual.compute_laws import Persistent, Resampled
from mpitrain.virtual.link_costs import link_cost
from mpitrain.virtual.lockstep import Bucket, Clock, Overlapped
from mpitrain.virtual.split_steps import PipelineSteps, ShardedSteps, Unit, pipeline_ends_s
from tests import toy
from tests.mpi import gan

EVEN = Constant(1.0, 0.0)
SLOW_LINK = Link(gbit_per_s=1e-6, latency_s=0.5)


def run(path, strategy=mt.AllReduce(), workers=4, compute=EVEN, network=Ideal(), inject=(), **changes):  # noqa: B008
    job = toy.make_job(**changes)
    return mt.simulate(job, strategy, workers, compute, network, run_dir=str(path), quiet=True, inject=inject)


def clock_alone(path, strategy, workers, compute, network=Ideal(), steps=None, **changes):  # noqa: B008
    """The same run without gradients."""
    job = toy.make_job(strategy=strategy, **changes)
    options = Overrides(run_dir=str(path), quiet=True, steps=steps)
    return simulate_lockstep(VirtualRun(job, options, workers, compute, network), gradients=False)


def one_step(schedule, took_s, began_s=None):
    took = np.array(took_s, dtype=float)
    began = np.zeros_like(took) if began_s is None else np.array(began_s, dtype=float)
    return schedule.end_s(began, np.zeros_like(took), took)


# ---- allreduce


def test_a_step_lasts_until_the_slowest_is_there_and_all_is_reduced(tmp_path):
    result = run(tmp_path / "ideal", compute=Constant(1.0, 0.5))
    even = run(tmp_path / "even")
    assert even["virtual_s"] == 4.0 and result["virtual_s"] > 4.0
    numbers = 5 * 7 + 7 + 7 + 1
    linked = run(tmp_path / "linked", network=SLOW_LINK)
    cost = library_allreduce(4, 4 * numbers, link := link_cost(SLOW_LINK))
    ours = direct_allreduce(4, 4 * numbers, link)
    assert linked["virtual_s"] == pytest.approx(4 * (1 + cost.seconds))  # small: the library carries it
    assert linked["sent_bytes_a_step"] == cost.sent_bytes and ours.seconds != cost.seconds
    assert set(linked["allreduce"].values()) == {"library"}


def test_large_gradients_go_in_buckets_behind_the_backward_pass_by_the_algorithm_of_a_run(tmp_path):
    def model():
        return torch.nn.Sequential(
            torch.nn.Linear(5, 600), torch.nn.Linear(600, 600), torch.nn.Linear(600, 1)
        )

    link = Link(gbit_per_s=1.0, latency_s=1e-4)
    result = run(tmp_path, model=model, network=link, epochs=1)
    assert "direct" in result["allreduce"].values()  # what a run takes on Ethernet
    long = max(map(int, result["allreduce"]))
    exposed = result["virtual_s"] - 2.0
    # the first layer's gradients come last, and few: most of the rest travels while the backward pass goes on
    assert 0 < exposed < 2 * direct_allreduce(4, long, link_cost(link)).seconds


def test_ranks_of_a_node_are_reduced_before_nodes_are(tmp_path):
    cluster = Cluster(ranks_per_node=2, gbit_per_s=1.0, latency_s=1e-3)
    inside, between = link_cost(cluster, 0, 1), link_cost(cluster, 1, 2)
    assert (inside.alpha_s, between.alpha_s) == (cluster.local_latency_s, 1e-3)
    assert (inside.beta_s, between.beta_s) == (1 / 10e9, 1 / 125e6)
    costs = Collectives(cluster, (0, 0, 1, 1))
    size = 1 << 20
    assert costs.allreduce(size, [0, 1]) == library_allreduce(2, size, inside)  # within a node
    ours = hierarchical_allreduce([2, 2], size, inside, between)
    assert costs.allreduce(size, range(4)) == ours and costs.used[size] == "hierarchical"
    assert costs.allreduce(64, range(4)) == smp_allreduce([2, 2], 64, inside, between)
    result = run(tmp_path, network=cluster)
    cost = smp_allreduce([2, 2], 4 * 50, inside, between)
    assert result["nodes"] == 2 and result["virtual_s"] == pytest.approx(4 * (1 + cost.seconds))


def test_a_bucket_waits_for_all_ranks_and_for_the_bucket_before_it():
    buckets = [Bucket(0.25, Cost(0.5, 0)), Bucket(0.5, Cost(0.25, 0)), Bucket(1.0, Cost(0.125, 0))]
    steps = Overlapped(buckets, forward_share=0.5)
    # one rank takes 4 s: ready at 4 (0.5 + 0.5 share) = 2.5, 3, 4; the other is never the last
    assert one_step(steps, [4.0, 1.0]) == 4.125
    # ready at 9.625, 9.75 and 10, reduced at 10.125, 10.375 and 10.5
    assert one_step(steps, [4.0, 1.0], began_s=[0.0, 9.0]) == 10.5
    long = Overlapped([Bucket(0.25, Cost(8.0, 0)), Bucket(1.0, Cost(2.0, 0))], forward_share=0.5)
    assert one_step(long, [4.0, 1.0]) == 2.5 + 8 + 2
    whole = Overlapped([Bucket(1.0, Cost(0.5, 0))])
    assert one_step(whole, [4.1, 1.0]) == 4.1 + 0.5  # nothing is hidden


@pytest.mark.parametrize("law", ["itself", "in another"])
def test_buckets_are_ready_when_the_law_of_the_batches_has_measured_it(tmp_path, law):
    """A batch takes 1 s, half of it forward; gradients of the first bucket are there after a fifth of the rest, and
    those of the second after three."""
    measured = Resampled((1.0,), 0.5, (0.2, 0.6))
    compute = measured if law == "itself" else Persistent(measured, factors=(1.0,))
    link = Link(gbit_per_s=0.1, latency_s=0.01)
    changes = {"model": lambda: nn.Sequential(nn.Linear(5, 300_000), nn.Linear(300_000, 1)), "validate": None}
    result = run(tmp_path, workers=2, compute=compute, network=link, epochs=1, **changes)
    found = [
        Collectives(link, (0, 1)).allreduce(4 * numbers, (0, 1)).seconds for numbers in (300_001, 6 * 300_000)
    ]
    first_s, second_s = sorted(found)
    assert first_s < 0.2 < second_s
    assert result["step_s"] == pytest.approx(0.8 + second_s)


@pytest.mark.parametrize("strategy", [mt.Sharded(), mt.Pipeline(microbatches=2)], ids=str)
def test_split_models_take_the_forward_share_that_was_measured(tmp_path, strategy):
    took_s = [
        run(
            tmp_path / str(share), strategy, 2, Resampled((1.0,), share), SLOW_LINK, epochs=1,
            model=lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)),
        )["virtual_s"]
        for share in (0.1, 1 / 3)
    ]  # fmt: skip
    assert took_s[0] != took_s[1]


def test_waiting_and_computing_add_up_to_the_run():
    clock = Clock(3, Overlapped([Bucket(1.0, Cost(0.5, 0))]))
    for number in range(4):
        clock.step(np.zeros(3), np.array([1.0, 2.0, 3.0 + number]), apply_s=0.25)
    assert clock.now_s == sum(3.0 + number + 0.75 for number in range(4))
    assert clock.computed_s.tolist() == [4.0, 8.0, 18.0]
    assert (clock.computed_s + clock.waited_s).tolist() == [clock.now_s] * 3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_clock_alone_gives_the_seconds_of_the_run_with_gradients(tmp_path, accumulate):
    law, changes = LogNormal(1.0, 0.5), {"batch_size": 5, "accumulate": accumulate}
    whole = run(tmp_path / "whole", compute=law, network=SLOW_LINK, **changes)
    alone = clock_alone(tmp_path / "alone", mt.AllReduce(), 4, law, SLOW_LINK, **changes)
    for key in ("virtual_s", "steps", "samples", "samples_left_out", "compute_s", "wait_s", "ranks"):
        assert alone[key] == whole[key], key
    assert whole["gradients"] and not alone["gradients"]


def test_ten_thousand_workers_take_no_longer_than_their_draws(tmp_path):
    data = {"data": toy.Memory(60_000), "epochs": 2}
    result = clock_alone(tmp_path, mt.AllReduce(), 10_000, LogNormal(1.0, 0.5), steps=2, **data)
    assert (result["steps"], result["samples"], len(result["ranks"])) == (2, 120_000, 10_000)
    first = clock_alone(tmp_path / "first", mt.AllReduce(), 10_000, LogNormal(1.0, 0.5), steps=1, **data)
    slowest = max(one["compute_s"] for one in first["ranks"])
    assert first["virtual_s"] == slowest > 4.0  # the last of 10,000
    for one in result["ranks"][::1000]:
        assert one["compute_s"] + one["wait_s"] == pytest.approx(result["virtual_s"])


def test_a_cast_halves_what_travels(tmp_path):
    numbers = 5 * 7 + 7 + 7 + 1
    for path, codec, num_bytes in (("whole", None, 4 * numbers), ("half", mt.BFloat16(), 2 * numbers)):
        strategy = mt.AllReduce() if codec is None else mt.AllReduce(codec=codec)
        runs = [
            run(tmp_path / path, strategy, network=SLOW_LINK),
            clock_alone(tmp_path / f"{path} alone", strategy, 4, EVEN, SLOW_LINK),
        ]
        assert [list(one["allreduce"]) for one in runs] == [[str(num_bytes)]] * 2
        assert runs[0]["virtual_s"] == runs[1]["virtual_s"]
    with pytest.raises(UsageError, match="depends on the gradients"):
        clock_alone(tmp_path / "topk", mt.AllReduce(codec=mt.TopK()), 4, EVEN)


def test_a_setting_of_the_algorithm_holds_in_virtual_time_too(tmp_path, monkeypatch):
    monkeypatch.setenv("MPITRAIN_ALLREDUCE", "direct")
    cost = direct_allreduce(4, 4 * 50, link_cost(SLOW_LINK))
    result = run(tmp_path, network=SLOW_LINK)
    assert set(result["allreduce"].values()) == {"direct"}
    assert result["virtual_s"] == pytest.approx(4 * (1 + cost.seconds))


def test_stragglers_sleep_after_their_step_and_everybody_waits(tmp_path):
    slow = run(tmp_path / "slow", inject=("slow(worker=2, factor=3)",))
    assert slow["virtual_s"] == 1 + 3 * 3  # the last sleep delays nobody
    paused = run(tmp_path / "pause", inject=("pause(worker=1, at_step=1, seconds=7)",))
    assert paused["virtual_s"] == 4 + 7
    assert paused["injected"] == [{"worker": 1, "sleeps": 1, "slept_s": 7.0}]
    plain = run(tmp_path / "plain")
    assert plain["metrics"] == slow["metrics"] and plain["virtual_s"] == 4.0


def test_a_death_ends_the_run_and_silence_leaves_the_others_waiting(tmp_path):
    with pytest.raises(LostRankError, match=r"rank 2 died \(kill\) at t=2.000 s, and nobody can go on"):
        run(tmp_path / "kill", inject=("kill(worker=2, at_step=1)",))
    with pytest.raises(LostRankError, match="t=2.500 s"):
        run(tmp_path / "later", inject=("kill(worker=2, at_step=1, after_s=0.5)",))
    late = run(tmp_path / "late", inject=("kill(worker=2, at_step=1, after_s=50)",))
    assert late["status"] == "ok"
    said = r"ranks \[0, 1, 3\] wait since then, in the allreduce of step 2, for rank 2"
    with pytest.raises(DeadlockError, match=said):
        run(tmp_path / "stop", inject=("stop(worker=2, at_step=1)",))


def test_a_gradient_that_is_not_finite_is_named_or_left_out(tmp_path):
    poison = toy.Memory().reader(None, 0).batch(0, 6, 6)["x"]

    def loss(model, batch):
        bad = batch["x"].shape == poison.shape and bool((batch["x"] == poison).all())
        return toy.square_loss(model, batch) * (float("nan") if bad else 1.0)

    stopped = run(tmp_path / "stop", loss=loss)
    assert stopped["failure"] == "rank 1 (worker, step 0): loss is nan" and stopped["steps"] == 1
    skipped = run(tmp_path / "skip", loss=loss, on_nonfinite="skip")
    assert (skipped["nonfinite"], skipped["accepted"], skipped["status"]) == (2, 2, "ok")


def test_a_validation_may_end_the_run_early(tmp_path):
    result = run(
        tmp_path,
        validate=toy.Memory(40),
        patience=1,
        epochs=30,
        optimizer=stands_still,
    )
    assert result["ended_early"] and result["steps"] < 10


def stands_still(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


def test_what_needs_all_ranks_in_the_middle_of_a_batch_is_refused(tmp_path):
    with pytest.raises(UsageError, match="sync_batchnorm looks at the batches of all ranks"):
        run(tmp_path, model=toy.normed, sync_batchnorm=True)
    with pytest.raises(UsageError, match="several optimizers: the step function averages gradients"):
        mt.simulate(gan.make_job(), mt.AllReduce(), run_dir=str(tmp_path), quiet=True)
    with pytest.raises(UsageError, match="49 workers for 48 training samples"):
        run(tmp_path, workers=49)


# ---- models in parts


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (2, 2), (4, 4), (4, 12), (3, 8)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipeline_of_equal_stages_idles_for_its_bubble_exactly(stages, microbatches, schedule):
    ends = pipeline_ends_s(
        [0.0] * stages, [1.0] * stages, [2.0] * stages, [0.0] * (stages - 1), microbatches, schedule
    )
    assert max(ends) == 3.0 * (microbatches + stages - 1)
    if microbatches >= stages:
        bubble = mt.Pipeline(stages, microbatches, schedule).bubble
        assert 1 - 3.0 * microbatches / max(ends) == pytest.approx(bubble, abs=1e-15)
    steps = PipelineSteps(
        [list(range(stages))],
        [1 / stages] * stages,
        microbatches,
        schedule,
        [0.0] * (stages - 1),
        [0.25] * stages,
    )
    took_s = 3.0 * stages * microbatches  # of the whole model
    assert one_step(steps, [took_s] * stages) == pytest.approx(max(ends) + 0.25)


def test_messages_of_a_pipeline_fill_and_drain_it():
    ends = pipeline_ends_s([0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [0.5], 4, "gpipe")
    assert max(ends) == (4 + 2 - 1) * 2.0 + 2 * 0.5


def test_shares_of_parameters_are_gathered_twice_and_reduced_once():
    units = [Unit(0.5, 2.0, 1.0), Unit(0.5, 3.0, 0.5)]
    idle = [0.0, 0.0]
    assert one_step(ShardedSteps(units), idle) == (2 + 3) + (3 + 2) + (0.5 + 1)  # nothing to hide behind
    kept = [units[0]._replace(stays=True), units[1]]
    assert one_step(ShardedSteps(kept), idle) == (2 + 3) + 3 + (0.5 + 1)
    # with much to compute: forward gathers, the first gather backward and the last reduction are seen
    assert one_step(ShardedSteps(units, forward_share=0.5), [64.0, 32.0]) == 64 + (2 + 3) + 3 + 1


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        (mt.Sharded(), {}),
        (mt.Sharded(replicas=2), {}),
        (mt.Pipeline(microbatches=3), {"model": toy.three_layers}),
        (mt.TensorParallel(), {"model": toy.three_layers, "tensor_plan": {"0": "column", "2": "row"}}),
    ],
    ids=["sharded", "replicas", "pipeline", "tensor"],
)
def test_models_in_parts_cost_more_on_slower_links_and_train_as_whole_ones(tmp_path, strategy, changes):
    fast = run(tmp_path / "fast", strategy, compute=LogNormal(1.0, 0.5), **changes)
    slow = run(tmp_path / "slow", strategy, compute=LogNormal(1.0, 0.5), network=SLOW_LINK, **changes)
    assert slow["virtual_s"] > fast["virtual_s"] > 0 and slow["status"] == "ok"
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("fast", "slow")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    alone = clock_alone(tmp_path / "alone", strategy, 4, LogNormal(1.0, 0.5), SLOW_LINK, **changes)
    assert alone["virtual_s"] == slow["virtual_s"] and alone["steps"] == slow["steps"]


def test_ranks_that_do_not_divide_are_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be divided into models of 2 ranks"):
        run(tmp_path, mt.Pipeline(microbatches=3), workers=3, model=toy.three_layers)
    with pytest.raises(UsageError, match="hold whole models"):
        run(tmp_path, mt.Sharded(), inject=("slow(worker=0, factor=2)",))
