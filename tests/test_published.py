"""The published curves: what they are simulated from is sourced and is what was recorded, the simulation meets closed
forms, and the table fits 80 columns.
"""

import dataclasses
import importlib
import json
import math
import os
import statistics
import subprocess
import sys

import pytest

from tests.ranks import ROOT

PROGRAM = ROOT / "benchmarks" / "published" / "published.py"


@pytest.fixture(scope="module")
def published():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROGRAM.parent))
        yield importlib.import_module("published")


@pytest.fixture(scope="module")
def curves(published):
    return {curve.name: curve for curve in published.CURVES}


@pytest.fixture(scope="module")
def recorded():
    """The newest row of each curve."""
    text = (ROOT / "benchmarks" / "results" / "published.jsonl").read_text()
    return {row["curve"]: row for row in map(json.loads, text.splitlines())}


def test_every_figure_says_where_it_comes_from(curves):
    for curve in curves.values():
        assert len(curve.published.source) > 20 and curve.published.low < curve.published.high
        assert len({one.name for one in curve.assumptions}) == len(curve.assumptions)
        for one in curve.assumptions:
            assert len(one.source) > 20 and one.source.endswith("."), (curve.name, one.name)
            assert math.isfinite(one.value) and one.value > 0
            assert not one.whole or one.value == int(one.value)


def test_every_recorded_curve_was_simulated_from_what_is_written_down(curves, recorded):
    assert set(recorded) == set(curves)
    for name, row in recorded.items():
        published = curves[name].published
        assert row["assumptions"] == [dataclasses.asdict(one) for one in curves[name].assumptions]
        assert row["bounds"] == [published.low, published.high if math.isfinite(published.high) else None]
        assert row["criterion"] == published.criterion and row["published"] == published.figure
        assert not row["hit"] or published.low <= row["simulated"] <= published.high, name
        assert set(row["sensitivity"]) >= {row["most_sensitive"]} - {""}


def test_the_recorded_table_has_80_columns_at_most(published, recorded):
    text = published.lines(list(recorded.values()))
    assert all(len(line) <= 80 for line in text.splitlines()), text
    assert sum(" hit " in line or " miss " in line for line in text.splitlines()) == len(recorded)


def test_any_result_fits_the_table(published, curves):
    """The widest figures that three digits make, for each assumption in turn."""
    for curve in curves.values():
        for one in curve.assumptions:
            row = {
                "curve": curve.name, "published": curve.published.figure, "hit": False, "shown": "44.4x",
                "most_sensitive": one.name, "sensitivity": {one.name: (0.123, 12.3)}, "other_rule": {}, "more": {},
                "strategy": curve.strategy,
            }  # fmt: skip
            assert max(map(len, published.lines([row]).splitlines())) <= 80, one.name


@pytest.mark.parametrize("workers", [2, 5, 16])
def test_mean_staleness_is_n_less_1_but_for_both_ends(published, curves, workers):
    """All but the last N updates make every other worker's gradient one update older."""
    values, steps = curves["staleness"].values(), 40
    load = published.Workload(1, published.ENDLESS, 1, steps=steps)
    times = published.law(values, 1.0)
    found = published.time_run(published.Async(), load, workers, times, published.Ideal(), 3)
    updates = steps * workers
    most = updates * (workers - 1) - workers * (workers - 1) // 2
    assert most - workers * (workers - 1) // 2 <= found["staleness_mean"] * updates <= most + 1e-6
    assert found["staleness_identity"][0] == found["staleness_identity"][1]


@pytest.fixture
def even(curves):
    """The assumptions of Inception, with times that do not spread."""
    still = {"spread_sigma": 0.0, "slow_chance": 0.0, "latency_s": 0.0}
    return {**curves["inception"].values(), **still}


def test_a_speed_up_is_the_number_of_workers_where_nothing_is_in_the_way(published, even):
    assert published.speedup("async", 6, 1000, 1.0, even, 0, 5, 17) == pytest.approx(6, rel=1e-3)
    assert published.speedup("sync", 6, 1000, 1.0, even, 0, 5, 17) == pytest.approx(6, rel=1e-3)


def test_a_speed_up_ends_at_the_link_of_the_servers(published, even):
    """Three servers of 8 Gbit/s take 3 GB/s, whatever eight workers could compute."""
    numbers, step_s = 100e6, 0.05
    found = published.speedup("async", 8, numbers, step_s, even, 0, 10, 17)
    assert found == pytest.approx(3 * 1e9 / (4 * numbers) * step_s, rel=0.03)


@pytest.mark.parametrize(("servers", "exchange_s"), [(1, 0.8), (4, 0.5)])
def test_a_speed_up_loses_the_time_of_the_transfers(published, even, servers, exchange_s):
    """One worker: 1 s of computing, then 400 MB there and back at 1 GB/s; a shard comes back while others leave."""
    values = {**even, "servers_per_worker": servers}
    assert published.speedup("async", 1, 100e6, 1.0, values, 0, 5, 17) == pytest.approx(
        1 / (1 + exchange_s), rel=1e-3
    )


def test_groups_of_servers_with_a_fast_link_are_as_good_as_one_by_one(published, curves):
    values = curves["inception"].values()
    each, grouped = (
        statistics.mean(published.speedup("async", 30, 60e6, 0.4, values, seed, 8, most) for seed in (0, 1))
        for most in (10, 5)
    )
    assert grouped == pytest.approx(each, rel=0.06)


def test_only_the_touched_rows_travel(published, curves):
    curve, effort = curves["rankbrain"], published.QUICK
    values = {**curve.values(), "dense_million": 0.001, "batch_samples": 10.0}
    small = dataclasses.replace(curve, num_workers=4)
    found = published.sparse(small, values, (0,), dataclasses.replace(effort, compares=True))
    rows = 10 * values["rows_per_sample"] * values["distinct_share"]
    assert found.more["push_bytes"] == pytest.approx(4 * (1000 + rows * (32 + 2)))
    assert found.more["all_rows"] < found.value / 10


def test_a_spare_is_worth_it_only_where_somebody_is_late(published, curves):
    """Nobody late: none is best. One in ten of twenty takes ten times as long, and is late for ten steps: some are."""
    curve, effort = curves["backup 18+2"], published.QUICK
    never = {"spread_sigma": 0.0, "slow_chance": 0.0, "slow_factor": 2.0}
    often = {"spread_sigma": 0.0, "slow_chance": 0.1, "slow_factor": 10.0}
    assert published.backup(curve, never, (0,), effort).value == 0
    assert published.backup(curve, often, (0,), effort).value >= 2


def test_a_curve_beside_its_bounds_misses(published, curves, monkeypatch):
    for value, holds, hit in ((6.0, True, True), (7.6, True, False), (6.0, False, False)):
        simulated = published.Found(value, f"{value}x", holds)
        monkeypatch.setitem(published.SIMULATORS, "nmt", lambda *_, found=simulated, **__: found)
        assert published.simulate_curve(curves["nmt"], 1, published.QUICK, False)["hit"] is hit


def test_the_most_sensitive_assumption_moves_the_result_by_the_largest_factor(published):
    ends = {"little": (9.0, 11.0), "down": (4.0, 12.0), "up": (10.0, 20.0)}
    assert published.most_sensitive(ends, 10.0) == "down"
    assert published.most_sensitive({"none": (10.0, 10.0)}, 10.0) == ""


def test_losses_over_the_shortest_period_are_the_larger_of_10_and_20(monkeypatch):
    monkeypatch.syspath_prepend(PROGRAM.parent)
    job = importlib.import_module("published_job")
    ratio, grows, losses = job.over_shortest([{1: 1.0, 10: 1.3, 20: 1.2, 100: 2.0}])
    assert (ratio, grows, losses["100"]) == (1.3, True, 2.0)
    assert job.over_shortest([{1: 1.0, 10: 1.3, 20: 1.2, 100: 1.25}])[1] is False


@pytest.mark.extended
def test_a_quick_run_prints_every_curve_and_writes_its_row(curves, tmp_path):
    env = {**os.environ, "MPITRAIN_BENCHMARK_RESULTS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), "--quick"]
    out = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True, timeout=240).stdout
    rows = [json.loads(line) for line in (tmp_path / "published.jsonl").read_text().splitlines()]
    assert [row["curve"] for row in rows] == list(curves)
    assert all(row["rounds"] == 1 and "commit" in row for row in rows)
    table = out[out.index("most sensitive to") - 80 :].splitlines()[1:]
    assert all(len(line) <= 80 for line in table) and all(
        any(name in line for line in table) for name in curves
    )
