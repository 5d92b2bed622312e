"""Periodic averaging in virtual time: what stragglers and links cost it, and that it stops as it should."""

import pytest

from mpitrain import LocalSGD, simulate
from mpitrain.errors import UsageError
from mpitrain.inject import Slow
from mpitrain.simulation.report import VirtualLog
from mpitrain.virtual import Constant, Ideal, Link
from mpitrain.virtual.collectives import library_allreduce
from mpitrain.virtual.link_costs import link_cost
from tests import toy


def run_virtually(path, strategy, workers=4, compute=Constant(1.0, 0.0), network=Ideal(), **changes):  # noqa: B008 - frozen
    job = toy.make_job(**changes)
    return simulate(job, strategy, workers, compute, network, run_dir=str(path), quiet=True)


def test_an_averaging_takes_what_its_all_reduce_takes_and_is_taken_once_a_period(tmp_path):
    """12 steps of 1 s, and, every `period`, as much as the MPI library takes for few bytes."""
    link = Link(gbit_per_s=1e-6, latency_s=0.5)
    numbers = 5 * 7 + 7 + 7 + 1
    each_s = library_allreduce(4, 4 * numbers, link_cost(link)).seconds
    for period in (2, 6):
        run = run_virtually(
            tmp_path / str(period), LocalSGD(period=period), network=link, batch_size=2, epochs=2
        )
        assert run["steps"] == 12 and run["averagings"] == 12 // period
        assert run["averaging_bytes"] == 12 // period * 1.5 * 4 * numbers
        assert run["virtual_s"] == pytest.approx(12.0 + 12 // period * each_s, rel=1e-12)


def test_a_straggler_is_waited_for_at_averagings_only(tmp_path):
    job = toy.make_job(batch_size=2)
    for period, waits in ((1, 12), (6, 2)):
        run = simulate(
            job, LocalSGD(period=period), 4, Constant(1.0, 0.0), run_dir=str(tmp_path / str(period)), quiet=True,
            inject=(str(Slow(2, 3.0)),),
        )  # fmt: skip
        assert run["virtual_s"] == pytest.approx(
            36.0
        )  # twelve steps of the slow one, however they are grouped
        assert run["averagings"] == waits
        idle = [one["wait_s"] for one in run["ranks"]]
        assert idle[2] == 0.0 and idle[0] == pytest.approx(24.0)


def test_waiting_for_a_straggler_before_a_validation_is_training_and_no_pause(tmp_path, monkeypatch):
    """All hold different parameters until they validate: whoever is first there waits for the others' steps."""
    pauses, ended = [], []
    monkeypatch.setattr(VirtualLog, "pause", lambda self, seconds: pauses.append(seconds))
    monkeypatch.setattr(VirtualLog, "until_now", lambda self: ended.append(self.world.now_s))
    job = toy.make_job(batch_size=2, epochs=2, validate=toy.Memory())
    run = simulate(
        job, LocalSGD(period=100), 4, Constant(1.0, 0.0), run_dir=str(tmp_path), quiet=True,
        inject=(str(Slow(2, 3.0)),),
    )  # fmt: skip
    assert run["virtual_s"] == pytest.approx(36.0) and run["steps"] == 12
    assert pauses == [0.0]  # that of the first epoch; the last epoch's comes after all
    assert ended == [pytest.approx(36.0)]


def test_a_gradient_that_is_not_finite_stops_all_at_the_next_averaging_or_is_counted(tmp_path):
    poison = toy.Memory().reader(None, 0).batch(0, 6, 6)["x"]

    def loss(model, batch):
        bad = batch["x"].shape == poison.shape and bool((batch["x"] == poison).all())
        return toy.square_loss(model, batch) * (float("nan") if bad else 1.0)

    stopped = run_virtually(tmp_path / "stop", LocalSGD(period=2), loss=loss)
    assert stopped["status"] == "fail" and "rank 1 (worker, step 0)" in stopped["failure"]
    assert stopped["steps"] == 2
    skipped = run_virtually(tmp_path / "skip", LocalSGD(period=2), loss=loss, on_nonfinite="skip")
    assert skipped["status"] == "ok" and skipped["nonfinite"] == 2 and skipped["steps"] == 4
    early = run_virtually(tmp_path / "start", LocalSGD(period=2, start=3), loss=loss)
    assert early["failure"] == "rank 1 (worker, step 0): loss is nan" and early["steps"] == 1


def test_too_many_workers_are_refused(tmp_path):
    with pytest.raises(UsageError, match="49 workers for 48 training samples: use at most 48 workers"):
        run_virtually(tmp_path, LocalSGD(), workers=49)
