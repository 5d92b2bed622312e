"""Faults at a rate: the law of their course, which all ranks and all starts of a run share, and what is drawn."""

import itertools
import math
from types import SimpleNamespace

import pytest

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.inject import Due, Kill, Nan, Poisson, asks_for, falls_silent, mtbf_of, read
from mpitrain.inject.drawn import FILE_KINDS, KINDS, course, of_files, of_worker
from mpitrain.job import Overrides, apply_overrides
from mpitrain.job.asked import check
from mpitrain.strategies.features import MPI, THREADS
from mpitrain.training.injected import kinds_of
from mpitrain.values import parse
from mpitrain.virtual import Constant
from tests import toy

ORDER, WORKERS = Poisson(15.0, seed=3), 4


def first(number, order=ORDER, seed=1, workers=WORKERS):
    return list(itertools.islice(course(order, seed, tuple(KINDS), workers), number))


def test_times_between_faults_are_exponential_and_kinds_and_workers_alike():
    number = 20_000
    faults = first(number)
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(faults)]
    assert [fault.number for fault in faults] == list(range(number)) and min(gaps) > 0
    deviation = 1 / math.sqrt(number)  # of the mean of exponential times over that mean
    assert sum(gaps) / len(gaps) / 15 == pytest.approx(1, abs=4 * deviation)
    assert sum(gap > 15 for gap in gaps) / number == pytest.approx(math.exp(-1), abs=4 * deviation)
    for values, num_values in ((KINDS, len(KINDS)), (range(WORKERS), WORKERS)):
        share = 1 / num_values
        for value in values:
            hit = sum(value in (fault.kind, fault.worker) for fault in faults) / number
            assert hit == pytest.approx(share, abs=4 * math.sqrt(share / number)), value


def test_every_fault_is_one_ranks_and_a_start_goes_on_where_the_one_before_has_ended():
    """Whatever ranks and starts there are: together they take the course, but for what came while nobody was there."""
    clock = [0.0]

    def begin(is_mine):
        return Due([course(ORDER, 1, tuple(KINDS), WORKERS)], lambda: clock[0], is_mine)

    taken = []
    for began_s, ended_s in ((0.0, 400.0), (430.0, 1000.0), (1000.0, 2000.0)):
        clock[0] = began_s
        ranks = [begin(of_worker(worker)) for worker in range(WORKERS)] + [begin(of_files)]
        for now_s in (began_s + 1.0, (began_s + ended_s) / 2, ended_s):
            clock[0] = now_s
            taken += [kind for rank in ranks for kind in rank.take()]
        assert sum(len(rank.taken) for rank in ranks) > 5
    wanted = [fault.kind for fault in first(500) if fault.at_s <= 2000 and not 400 < fault.at_s <= 430]
    assert sorted(taken) == sorted(wanted)
    assert any(400 < fault.at_s <= 430 for fault in first(500)), "or nothing was passed by"


def test_a_course_is_of_the_seeds_alone():
    assert first(9) == first(9) != first(9, seed=2)
    assert first(9) != first(9, order=Poisson(15.0, seed=4))
    assert [fault.at_s for fault in first(9, workers=2)] == [fault.at_s for fault in first(9)]
    slower = first(9, order=Poisson(30.0, seed=3))
    assert [fault.at_s for fault in slower] == pytest.approx([2 * fault.at_s for fault in first(9)])
    assert mtbf_of([ORDER, Poisson(30.0), Kill(0, 1)]) == pytest.approx(10.0) and mtbf_of([]) == math.inf


def test_kinds_are_named_or_refused():
    (order,) = read(["poisson(mtbf_s=9, kinds='kill,nan')"])
    assert order.asked == ("kill", "nan") and parse(str(order), "inject") == order
    assert {fault.kind for fault in first(50, order=order)} == {"kill", "nan"}
    assert asks_for(order, Nan) and not asks_for(ORDER, Nan) and asks_for(Nan(0, 1), Nan)
    assert falls_silent([Poisson(9.0, "wedge")]) and not falls_silent([order])
    with pytest.raises(UsageError, match="unknown kind 'kil'; did you mean 'kill'"):
        Poisson(9.0, "kil")
    for mtbf_s in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UsageError, match="mtbf_s must be finite"):
            Poisson(mtbf_s)


def test_a_kind_that_is_named_is_refused_as_its_own_order_is():
    def why_not(strategy, inject, world=MPI):
        job, overrides = toy.make_job(), Overrides(inject=(inject,), strategy=strategy)
        with pytest.raises(UsageError) as error:
            check(apply_overrides(job, overrides), overrides, world, 2)
        return str(error.value)

    assert "needs a server" in why_not("allreduce()", "poisson(mtbf_s=9,kinds='kill,nan')")
    assert "hold parts" in why_not("sharded()", "poisson(mtbf_s=9,kinds='kill')")
    assert "--threads" in why_not("async()", "poisson(mtbf_s=9,kinds='stop')", THREADS)


def kinds(strategy, tolerance="none", threads=None, every="auto", watchdog_s=900.0, on_nonfinite="stop"):
    job = toy.make_job(
        checkpoint_every=every, on_nonfinite=on_nonfinite, strategy=parse(strategy, "strategy")
    )
    overrides = Overrides(inject=("poisson(mtbf_s=9)",), watchdog_s=watchdog_s)
    return set(kinds_of(SimpleNamespace(num_threads=threads, fault_tolerance=tolerance), job, overrides))


def test_a_run_draws_what_it_survives_or_is_started_again_from():
    deaths, files = {"kill", "segv", "raise"}, set(FILE_KINDS)
    assert kinds("allreduce()") == deaths | {"exit"} | files
    assert kinds("allreduce()", "ulfm") == deaths | files, "of an exit MPI does not tell"
    assert kinds("allreduce()", watchdog_s=5.0) == deaths | {"exit", "stop", "wedge"} | files
    assert kinds("allreduce()", watchdog_s=0.0) == deaths | {"exit"} | files, "nothing ends a hang"
    assert kinds("async()", on_nonfinite="skip") == deaths | {"exit", "torn", "nan"} | files
    assert kinds("async()", "ulfm", every="never") == deaths, "survived, and without checkpoints"
    assert kinds("sharded()") == files
    assert kinds("async()", threads=2, watchdog_s=5.0) == {"raise", "wedge"} | files
    with pytest.raises(UsageError, match="survives no death"):
        kinds("allreduce()", every="never")


def test_a_virtual_run_is_hit_as_a_real_one_would_be_and_says_by_what(tmp_path):
    """Each of 4 workers takes 1 s for a batch, and dies after the first that ends at or after its time."""
    job = toy.make_job(epochs=3, batch_size=4, seed=7, on_nonfinite="skip")
    order = Poisson(6.0, "kill,nan", seed=5)
    deaths: dict[int, float] = {}
    for fault in first(50, order=order, seed=7):
        if fault.kind == "kill":
            deaths.setdefault(fault.worker, fault.at_s)
    result = mt.simulate(
        job, mt.Async(), 4, Constant(1.0, 0.0), run_dir=str(tmp_path), quiet=True, inject=str(order)
    )  # fmt: skip
    died = {str(1 + worker) for worker, at_s in deaths.items() if math.ceil(at_s) < result["virtual_s"]}
    assert died and set(result["lost"]) == died and result["status"] == "ok", deaths
    assert result["samples"] + 4 * result["nonfinite"] == 3 * 48
    hit = [row for row in result["injected"] if "kill" in row["faults"]]
    assert {str(1 + row["worker"]) for row in hit} == died
