"""Predictions whose answers are known in closed form, and the command around them."""

import json
import math
import os
from dataclasses import replace

import pytest

from mpitrain.cli.main import main
from mpitrain.planning.advice import SAVES_S, advise, check_criterion, option, rank, started_s
from mpitrain.planning.scaling import (
    NONE,
    Conditions,
    Setting,
    Times,
    reason,
    throughput,
)
from mpitrain.simulation.collective_costs import Collectives
from mpitrain.virtual.collectives import rabenseifner
from mpitrain.virtual.compute import Constant, Exponential, LogNormal, ShiftedExponential
from mpitrain.virtual.compute_laws import Bernoulli, Pareto
from mpitrain.virtual.link_costs import link_cost
from mpitrain.virtual.message_law import LinkCost
from mpitrain.virtual.network import Cluster
from mpitrain.virtual.serial_fraction import fit_serial_fraction
from tests.ranks import find_mpi, run_ranks

ALLREDUCE = Setting("allreduce()", "allreduce")
ASYNC = Setting("async(servers=1)", "async", 1)
SYNC = Setting("sync(servers=1)", "servers", 1)
BACKUP = Setting("backup(spare=10)", "servers", 1, 10)
EVEN = Times(Constant(0.1, 0.0))
GIVEN = ["--compute", "constant(0.02)", "--network", "gbe1()", "--workers", "1,2,4"]


def conditions(times=EVEN, between=None, **changes):
    return Conditions(times, 32, 1_000_000, LinkCost(), between or LinkCost(), **changes)


@pytest.mark.parametrize(("sigma", "kappa"), [(0.0, 0.0), (0.05, 0.0), (0.03, 0.001)])
def test_the_serial_fraction_of_a_synthetic_curve_is_found(sigma, kappa):
    counts = (1, 2, 4, 8, 16, 32)
    fit = fit_serial_fraction([(n, n / (1 + sigma * (n - 1) + kappa * n * (n - 1))) for n in counts])
    assert fit.sigma == pytest.approx(sigma, abs=1e-12) and fit.kappa == pytest.approx(kappa, abs=1e-12)
    assert fit.worst < 1e-9
    assert fit_serial_fraction([(1, 1.0)]) is None


@pytest.mark.parametrize(
    ("setting", "given", "batch", "expected"),
    [
        (ASYNC, conditions(between=LinkCost(0.0, 1e-7)), None, "server link"),
        (ASYNC, conditions(apply_s=0.1), None, "apply"),
        (SYNC, conditions(push_s=0.1), None, "apply"),
        (SYNC, conditions(between=LinkCost(0.5, 0.0)), None, "latency"),
        (ALLREDUCE, conditions(between=LinkCost(0.0, 1e-7)), None, "allreduce link"),
        (ALLREDUCE, conditions(Times(Exponential(0.1))), None, "straggler tail"),
        (ALLREDUCE, conditions(read_s=0.1), None, "batch reading"),
        (ALLREDUCE, conditions(fixed=0.5), 4, "batch size limit"),
        (ALLREDUCE, conditions(), None, NONE),
        (
            Setting("async(servers=8)", "async", 8),
            conditions(between=LinkCost(0.0, 1e-7), workers_per_node=8),
            None,
            "node link",
        ),
    ],
)
def test_what_holds_a_strategy_back_is_the_term_that_was_made_slow(setting, given, batch, expected):
    assert reason(setting, given, 8, batch)[0] == expected


def test_a_servers_link_caps_asynchronous_workers_at_the_closed_form():
    slow = conditions(between=LinkCost(0.0, 1e-7))  # 0.1 s a message, so 10 updates a second
    assert 320 * 64 / 66 < throughput(ASYNC, slow, 64) < 320  # so all but two of the workers wait at the link
    assert throughput(ASYNC, slow, 1) == pytest.approx(32 / (0.1 + 0.2), rel=1e-3)  # but for headers


def test_an_allreduce_that_nothing_hides_costs_its_formula():
    link = LinkCost(1e-5, 1e-10)
    expected = 8 * 32 / (0.1 + rabenseifner(8, 1_000_000, link).seconds)
    assert throughput(ALLREDUCE, conditions(between=link), 8) == pytest.approx(expected)


@pytest.mark.parametrize("gbit_per_s", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("setting", ["auto", "library", "direct", "hierarchical"])
def test_a_plan_and_a_simulation_take_the_same_time_for_an_allreduce(gbit_per_s, setting, monkeypatch):
    monkeypatch.setenv("MPITRAIN_ALLREDUCE", setting)
    for per_node, number in ((1, 8), (4, 4), (4, 16), (3, 8)):
        law = Cluster(ranks_per_node=per_node, gbit_per_s=gbit_per_s)
        given = conditions(between=link_cost(law, 0, per_node), workers_per_node=per_node)
        given = replace(given, inside=link_cost(law, 0, 1) if per_node > 1 else LinkCost())
        costs = Collectives(law, law.nodes(number))
        for num_bytes in (64, 1 << 16, 1 << 24):
            assert given.allreduce_s(number, num_bytes) == costs.allreduce(num_bytes, range(number)).seconds


def test_waiting_for_k_of_n_exponential_workers_takes_a_difference_of_harmonic_numbers():
    given = conditions(Times(Exponential(0.1)))
    for setting, accepted in ((SYNC, 100), (BACKUP, 90)):
        expected_s = 0.1 * sum(1 / number for number in range(100 - accepted + 1, 101))
        assert throughput(setting, given, 100) == pytest.approx(accepted * 32 / expected_s, rel=1e-9)


def harmonic_between(accepted, number):
    """Mean of the k-th of n exponential times of mean 1."""
    return sum(1 / one for one in range(number - accepted + 1, number + 1))


def pareto_order(accepted, number, alpha):
    """Mean of the k-th of n Pareto times of mean 1: a quotient of gamma functions (Malik 1966)."""
    parts = (number + 1, number - accepted + 1 - 1 / alpha), (number - accepted + 1, number + 1 - 1 / alpha)
    above, below = (sum(map(math.lgamma, part)) for part in parts)
    return (alpha - 1) / alpha * math.exp(above - below)


@pytest.mark.parametrize(
    ("accepted", "number"), [(1, 1), (1, 8), (8, 8), (90, 100), (1000, 1024), (10_240, 10_240)]
)
def test_the_kth_of_n_is_that_of_the_closed_form(accepted, number):
    """Nothing is drawn, so it is exact among ten thousand as among two, with heavy tails and with jumps."""
    laws = [
        (Exponential(0.1), 0.1 * harmonic_between(accepted, number)),
        (ShiftedExponential(1.0, 2.0), 1 + 2 * harmonic_between(accepted, number)),
        (Pareto(1.0, 1.5), pareto_order(accepted, number, 1.5)),
        (Pareto(2.0, 4.0), 2 * pareto_order(accepted, number, 4.0)),
        (Constant(2.0, 0.5), 1 + 2 * accepted / (number + 1)),
        (Constant(0.1, 0.0), 0.1),
        (Constant(0.0), 0.0),
    ]
    for law, expected_s in laws:
        times = Times(law)
        assert times.order_s(accepted, number) == pytest.approx(expected_s, rel=1e-9), law
        assert times.interval_s(number) is None
    if accepted == number:  # the last is slow unless nobody is
        slow = Times(Bernoulli(Constant(1.0, 0.0), 0.1, 5.0)).order_s(accepted, number)
        assert slow == pytest.approx(5 - 4 * 0.9**number, rel=1e-9)


def test_a_log_normal_has_its_mean_and_the_larger_of_two_the_closed_form():
    """E max = 2 E x Phi(sigma / sqrt 2)."""
    for sigma in (0.0, 0.3, 2.0):
        times = Times(LogNormal(2.0, sigma))
        assert times.mean_s == pytest.approx(2.0, rel=1e-9)
        assert times.order_s(2, 2) == pytest.approx(2 * (1 + math.erf(sigma / 2)), rel=1e-9)


def test_what_has_to_be_drawn_is_told_with_an_interval(capsys):
    """Workers that differ: the last of four is drawn; nothing is where the law is known."""
    words = ["plan", "jobs/digits.py", "--synthetic", *GIVEN]
    for law, drawn in (("persistent(exponential(0.02))", True), ("exponential(0.02)", False)):
        assert main([*words, "--compute", law, "--strategy", "sync()"]) == 0
        assert ("4 workers is drawn, and takes" in " ".join(capsys.readouterr().out.split())) == drawn
    low, high = Times((1.0, 2.0, 3.0)).interval_s(4)
    assert low < Times((1.0, 2.0, 3.0)).order_s(4, 4) < high


def test_criteria_rank_by_what_they_say():
    options = [
        option(setting, conditions(), number, False, 3200, 20, within_s=25.0)
        for setting, number in ((None, 1), (ASYNC, 8), (ALLREDUCE, 4))
    ]
    assert [one.text for one in rank(options, "speed")] == ["async(servers=1)", "allreduce()", "one device"]
    assert rank(options, "cost")[0].text == "one device"
    assert [one.text for one in rank(options, "accuracy")][-1] == "async(servers=1)"
    assert [one.epochs for one in options] == pytest.approx([2.5, 20, 10])
    assert rank(options, "accuracy-in=25s")[0].text == "async(servers=1)"
    assert check_criterion("accuracy-in=2h") == 7200 and check_criterion("cost") is None


def test_a_plan_by_hand_is_the_same_bytes_twice_and_fits_80_columns(tmp_path, capsys):
    texts, files = [], []
    for name in ("a", "b"):
        words = ["plan", "jobs/digits.py", "--synthetic", *GIVEN, "--best", "accuracy-in=1h"]
        assert main([*words, "--json", str(tmp_path / name)]) == 0
        texts.append(capsys.readouterr().out)
        files.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1] and files[0] == files[1]
    assert max(map(len, texts[0].splitlines())) <= 80
    assert "one device is better" in texts[0] and "no training was simulated" in texts[0]
    found = json.loads(files[0])
    assert found["bytes"]["optimizer"] >= 2 * found["bytes"]["gradients"]  # Adam's two moments
    assert [point["workers"] for point in found["curves"][0]["points"]] == [1, 2, 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--compute"),
        (["--compute", "constant(1)"], "the network"),
        (["--compute", "constant(1)", "--network", "ideal()"], "--workers"),
        ([*GIVEN, "--best", "luck"], "--best luck"),
        ([*GIVEN, "--nodes", "2"], "4 workers on 2 nodes"),
        ([*GIVEN, "--network", "gbe1(ranks_per_node=2)"], "puts 2 ranks on a node"),
    ],
)
def test_what_is_missing_or_wrong_is_named(words, message, capsys):
    assert main(["plan", "jobs/digits.py", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_launch_on_one_node_has_no_link_to_probe():
    words = ["plan", "jobs/digits.py", "--synthetic", "--workers", "1,2", "--probe"]
    run = run_ranks(2, [str(find_mpi()[0]), "-m", "mpitrain", *words])
    assert run.code == 2 and "all 2 ranks are on one node" in str(run)


def test_a_probe_measures_the_jobs_steps(tmp_path, capsys):
    file, machine = tmp_path / "plan.json", tmp_path / "machine.toml"
    machine.write_text('nodes = 2\nranks_per_node = 2\nmemory_gib = 80\nnetwork = "gbe10()"\n')
    words = ["--synthetic", "--probe", "--probe-s", "0.5", "--machine", str(machine), "--json", str(file)]
    assert main(["plan", "jobs/digits.py", *words]) == 0
    assert "it fits" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["workers"] == [1, 2, 4] and len(found["probe"]["steps_s"]) >= 3
    assert all(
        found["probe"][f"{name}_s"] > 0 for name in ("forward", "backward", "optimizer", "read", "apply")
    )
    probed = found["probe"]
    assert 0 < probed["low_s"] <= probed["gradient_s"] <= probed["high_s"] and probed["start_s"] > 0.1
    for curve in found["curves"]:  # the point itself is one end of what is known
        low, high = curve["points"][-1]["interval"]
        assert low <= high and curve["points"][-1]["speed_up"] in (low, high)
    (told,) = [row["answer"] for row in found["advice"] if row["question"] == "a launch"]
    assert told.startswith("stay on one device")  # a few seconds of work


def advice(samples, start_s=0.0, loaded=False, calm=None):
    fastest = [option(ALLREDUCE, conditions(), 8, False, samples, 1, None)]
    told = advise(conditions(), 0, 0, None, samples, 1, fastest, 8, start_s, calm, loaded)
    return dict(told)


def test_a_job_stays_on_one_device_unless_a_launch_saves_a_minute_start_up_included():
    """One device computes 320 samples a second, eight 2560: what is saved is 7/8 of the time."""
    samples = round(SAVES_S * 320 * 8 / 7)
    assert advice(round(0.99 * samples))["a launch"].startswith("stay on one device")
    assert not advice(round(1.01 * samples))["a launch"].startswith("stay")
    # a rank alone starts in 9 s, too; eight on a node take their time one after the other where cores are few
    extra_s = started_s(8, 8, 9.0) - 9.0
    assert extra_s == 9.0 * max(0.0, 8 / (os.cpu_count() or 1) - 1)
    late = advice(round(1.01 * samples), start_s=9.0)["a launch"]
    assert late.startswith("stay on one device") == (extra_s > 0.01 * SAVES_S)


def test_what_a_loaded_host_varies_by_is_not_taken_for_stragglers():
    assert advice(10**6)["waiting"].startswith("synchronous")
    loaded = advice(10**6, loaded=True)
    assert loaded["waiting"].startswith("not known") and loaded["a launch"].startswith(
        "stay on one device until"
    )
    slower = replace(conditions(), apply_s=0.0, between=LinkCost(0.05))
    low, _, high = advice(10**6, calm=slower)["one node"].split(" times")[0].partition(" to ")
    assert float(low) < float(high) == pytest.approx(8.0)
