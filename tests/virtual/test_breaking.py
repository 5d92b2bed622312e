"""Faults in virtual time: any worker may break in any way at any step, under every rule over parameter servers, and the
run takes every sample once and accounts for every read. The very roles that survive this run over MPI.
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mpitrain as mt
from mpitrain import strategies
from mpitrain.errors import DeadlockError, LostRankError, UsageError, WireError
from mpitrain.inject import Exit, Kill, KillAtEnd, Nan, Raise, Segv, Stop, Torn, Wedge
from mpitrain.virtual import Constant, Ideal
from tests import toy
from tests.virtual.course import COURSE, on_servers
from tests.virtual.test_course import samples_of
from tests.virtual.worlds import Shuffled, all_leases, play

WORKERS = 4
DEADLY, SILENT = (Kill, Segv, Raise, KillAtEnd), (Exit, Stop, Wedge)


@st.composite
def broken(draw):
    """Up to three of the four workers, each in its own way at its own step."""
    workers = draw(st.lists(st.integers(0, WORKERS - 1), min_size=1, max_size=WORKERS - 1, unique=True))
    faults = []
    for worker in workers:
        kind = draw(st.sampled_from(DEADLY + SILENT))
        if kind is KillAtEnd:
            faults.append(kind(worker))
            continue
        late = {"after_s": draw(st.sampled_from((0.0, 0.3, 2.0)))} if kind is Kill else {}
        faults.append(kind(worker, draw(st.integers(0, 9)), **late))
    return tuple(faults)


@settings(max_examples=150, deadline=None)
@given(
    row=st.sampled_from(sorted(COURSE)),
    servers=st.integers(1, 3),
    faults=broken(),
    shuffled=st.booleans(),
    seed=st.integers(0, 9),
)
@example("async", 1, (Kill(0, 3), Segv(1, 3), Stop(2, 5)), True, 0)
@example(
    "softsync, blocking", 1, (Exit(0, 0),), True, 0
)  # who was held for long is not silent when it is released
@example("sync", 3, (KillAtEnd(0), KillAtEnd(1), KillAtEnd(2)), True, 1)
@example("async", 2, (Kill(0, 29, after_s=2.0), Stop(1, 3)), True, 3)
def test_any_fault_of_any_worker_at_any_step_costs_no_sample_and_no_model(
    row, servers, faults, shuffled, seed
):
    rule = on_servers(COURSE[row](WORKERS), servers, WORKERS)
    network = Shuffled(seed, 0.5) if shuffled and "abort" not in row else Ideal()
    sizes = {"num_samples": 60, "batch_size": 2, "epochs": 2, "network": network, "seed": seed}
    seen = play(
        rule, WORKERS, compute=Constant(1.0, 0.3), faults=faults, least_silence_s=3.0, delivers=True, **sizes
    )
    assert samples_of(seen.leases()) == samples_of(all_leases(60, 2, 2))
    hit = {seen.workers[fault.worker]: fault for fault in faults}
    for trace in seen.traces:
        counts = trace.server.summary()
        assert counts["failure"] == ""
        assert counts["samples_accepted"] + counts["samples_dropped"] == 120
        assert trace.server.processed.num_samples() == 120
        left, right = counts["staleness_identity"]
        assert left == right
        for rank, how in trace.server.table.lost.items():
            assert how == ("died" if isinstance(hit[rank], DEADLY) else "silent")
    for rank, fault in hit.items():
        if seen.returned[rank].get("broken"):
            assert seen.returned[rank]["broken"] == fault.name.removesuffix("_at_end")
    told = seen.trace.server.delivered
    assert told["values"] == [trace.store.value for trace in seen.traces]
    assert "broken" not in seen.returned[told["by"]]
    assert not any(trace.server.delivered for trace in seen.traces[1:])


@pytest.mark.parametrize(
    "fault", [Kill(0, 2), Kill(2, 2, after_s=0.4), Segv(1, 0), Raise(3, 5), Stop(2, 4), KillAtEnd(0)]
)
@pytest.mark.parametrize("strategy", [mt.Async(), mt.Sync(servers=2)])
def test_simulate_goes_on_without_it_says_so_and_saves_a_model(tmp_path, fault, strategy):
    result = mt.simulate(
        toy.make_job(epochs=4), strategy, 4, Constant(1.0, 0.1), run_dir=str(tmp_path), quiet=True, inject=str(fault)
    )  # fmt: skip
    how = "silent" if isinstance(fault, Stop) else "died"
    assert result["status"] == "ok" and result["lost"] == {str(strategy.servers + fault.worker): how}
    assert result["samples"] == 4 * 48
    assert {"worker": fault.worker, "faults": [fault.name]}.items() <= result["injected"][0].items()


def test_a_gradient_that_is_not_finite_ends_the_run_or_is_left_out(tmp_path):
    def run(name, **changes):
        return mt.simulate(
            toy.make_job(**changes), mt.Async(), 2, run_dir=str(tmp_path / name), quiet=True, inject=str(Nan(1, 2))
        )  # fmt: skip

    assert "not finite" in run("stop")["failure"]
    left_out = run("skip", on_nonfinite="skip")
    assert left_out["status"] == "ok" and left_out["nonfinite"] == 1


@pytest.mark.parametrize(
    "strategy", [mt.Async(), mt.Sync(servers=2), mt.SoftSync(updates=2), mt.StaleSync(bound=1)]
)
@pytest.mark.parametrize("worker", [0, 2])
def test_a_worker_whose_gradients_are_never_finite_again_is_done_without(tmp_path, strategy, worker):
    """At the tenth such push in a row, on every shard alike; nine, or nine twice, are batches like others."""

    def run(steps):
        orders = [str(Nan(worker, step)) for step in steps]
        linear = toy.DYADIC["linear in float32"]  # whose gradients are the same wherever it goes
        job = toy.make_job(**linear, epochs=20, batch_size=4, on_nonfinite="skip")
        return mt.simulate(
            job, strategy, 3, Constant(1.0, 0.1), run_dir=str(tmp_path), quiet=True, inject=orders
        )  # fmt: skip

    spared = run([*range(2, 11), *range(12, 21)])
    assert (spared["status"], spared["lost"], spared["nonfinite"]) == ("ok", {}, 18)
    evicted = run(range(2, 60))
    assert (evicted["status"], evicted["nonfinite"]) == ("ok", 10)
    assert evicted["lost"] == {str(strategy.servers + worker): "not finite"}
    assert evicted["samples"] == (20 * 12 - 10) * 4 and evicted["samples_dropped"] == 10 * 4
    left, right = evicted["staleness_identity"]
    assert left == right


def test_when_no_gradient_is_finite_any_more_the_run_says_so(tmp_path):
    orders = [str(Nan(worker, step)) for worker in (0, 1) for step in range(12)]
    job = toy.make_job(epochs=20, batch_size=4, on_nonfinite="skip")
    result = mt.simulate(job, mt.Async(), 2, run_dir=str(tmp_path), quiet=True, inject=orders)
    assert (
        "has sent 10 gradients in a row that are not finite, and no other worker is left" in result["failure"]
    )


def test_what_nobody_survives_is_an_error_that_names_it(tmp_path):
    def run(strategy, *faults, workers=2):
        return mt.simulate(
            toy.make_job(), strategy, workers, run_dir=str(tmp_path), quiet=True, inject=[str(one) for one in faults]
        )  # fmt: skip

    with pytest.raises(WireError, match="payload of rank 1 is torn"):
        run(mt.Async(), Torn(0, 2))
    with pytest.raises(DeadlockError, match="rank 0 waits since t=.* s for a message from ranks 1, 2"):
        run(mt.Async(), Stop(0, 1), Wedge(1, 1))
    with pytest.raises(LostRankError, match="rank 1 died"):
        run(mt.Decentralized(), Kill(1, 1), workers=3)
    with pytest.raises(UsageError, match="has none"):
        run(mt.Decentralized(), Nan(1, 1))
    with pytest.raises(UsageError, match="has none"):
        run(mt.Decentralized(), KillAtEnd(1))
    assert "no other worker is left" in run(mt.Async(), Kill(0, 1), Kill(1, 1))["failure"]
    nobody = run(mt.Sync(servers=2), KillAtEnd(0), KillAtEnd(1))
    assert "no worker was left to save" in nobody["failure"] and nobody["model"] is None


def test_a_rule_that_waits_for_all_goes_on_when_one_is_known_to_be_dead():
    seen = play(strategies.Sync(), 3, num_samples=30, faults=(Kill(1, 2),), compute=Constant(1.0, 0.0))
    assert seen.counts["lost"] == {"2": "died"} and seen.now_s < 30
