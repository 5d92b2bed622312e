"""Laws of computing time against their closed forms, with tolerances of five standard errors."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mpitrain.errors import UsageError
from mpitrain.values import parse
from mpitrain.virtual import Constant, Gamma
from mpitrain.virtual.compute import BLOCK, WorkerTimes

COUNT = 40_000


def drawn(text, worker=0, count=COUNT, seed=5):
    law = parse(text, "compute")
    assert parse(str(law), "compute") == law
    times = WorkerTimes(law, seed, worker)
    return np.array([times.next() for _ in range(count)])


@pytest.mark.parametrize(
    ("text", "mean", "variance"),
    [
        ("constant(2, jitter=0.3)", 2.0, (2 * 0.3) ** 2 / 3),
        ("exponential(0.5)", 0.5, 0.25),
        ("shifted_exponential(1, 2)", 3.0, 4.0),
        ("lognormal(2, 0.5)", 2.0, 4 * math.expm1(0.25)),
        ("gamma(2, shape=3)", 2.0, 4 / 3),
        ("gamma(1, shape=0.5)", 1.0, 2.0),
        ("pareto(2, alpha=6)", 2.0, 4 / (6 * 4)),
        ("bernoulli(constant(1, jitter=0), chance=0.1, factor=5)", 1.4, 16 * 0.09),
        ("bernoulli(gamma(2, shape=4), chance=0.25, factor=3)", 3.0, (4 + 1) * (0.75 + 0.25 * 9) - 9),
        ("persistent(gamma(1, shape=2), factors=[3])", 3.0, 9 / 2),
    ],
)
def test_mean_and_variance_are_those_of_the_closed_form(text, mean, variance):
    times = drawn(text)
    assert times.mean() == pytest.approx(mean, abs=5 * math.sqrt(variance / COUNT))
    error = np.std((times - mean) ** 2) / math.sqrt(COUNT)
    assert times.var() == pytest.approx(variance, abs=5 * error)


@pytest.mark.parametrize("alpha", [1.5, 3.0])
def test_the_tail_of_a_pareto_has_its_index(alpha):
    """Hill's estimator over all draws has the standard error alpha / sqrt(n), where the least time is known."""
    times, least = drawn(f"pareto(1, alpha={alpha})"), (alpha - 1) / alpha
    assert times.min() >= least
    assert COUNT / np.log(times / least).sum() == pytest.approx(alpha, abs=5 * alpha / math.sqrt(COUNT))


def test_a_worker_keeps_its_factor_and_its_times():
    alone = [drawn("gamma(1)", worker, 600) for worker in range(40)]
    factors = []
    for worker, times in enumerate(alone):
        ratio = drawn("persistent(gamma(1), sigma=0.4)", worker, 600) / times
        assert np.ptp(ratio) < 1e-12
        factors.append(ratio[0])
    assert len(set(factors)) == 40
    assert np.log(factors).mean() == pytest.approx(-0.08, abs=5 * 0.4 / math.sqrt(40))
    assert np.log(factors).std() == pytest.approx(0.4, abs=5 * 0.4 / math.sqrt(80))
    given = [drawn("persistent(gamma(1), factors=[1, 2.5])", worker, 600) for worker in range(4)]
    for worker, times in enumerate(given):
        assert np.array_equal(times, (1, 2.5)[worker % 2] * alone[worker])


def test_what_is_slow_at_times_is_as_fast_as_ever_at_others():
    plain, slow = drawn("gamma(1)", 3), drawn("bernoulli(gamma(1), chance=0.2, factor=4)", 3)
    ratio = slow / plain
    assert np.array_equal(ratio == 1, ~np.isclose(ratio, 4))
    assert (ratio > 1).mean() == pytest.approx(0.2, abs=5 * math.sqrt(0.16 / COUNT))
    twice = drawn("bernoulli(bernoulli(gamma(1), chance=0.5, factor=2), chance=0.5, factor=8)", 3) / plain
    shares = [np.isclose(twice, one).mean() for one in (1, 2, 8, 16)]
    assert shares == pytest.approx([0.25] * 4, abs=5 * math.sqrt(0.19 / COUNT))  # drawn independently


def test_a_trace_is_replayed_exactly_and_over_again(tmp_path):
    def span(name, began_us, took_us):
        return {"name": name, "ph": "X", "ts": began_us, "dur": took_us, "tid": 0, "cat": "compute"}

    first = [span("gradient", at, took) for at, took in ((0, 1500.25), (2000, 2500.5), (5000, 3000.125))]
    second = [
        span("gradient", 0, 1000),
        span("forward", 10, 100),
        span("forward", 500, 100),
        span("apply", 0, 9),
    ]
    for rank, rows in enumerate([[span("apply", 0, 7)], first, second]):  # rank 0 is a server
        text = json.dumps({"traceEvents": [{"name": "process_name", "ph": "M"}, *rows]})
        (tmp_path / f"trace-rank-{rank}.json").write_text(text)
    text = f'trace("{tmp_path}")'
    wanted = [1500.25 / 1e6, 2500.5 / 1e6, 3000.125 / 1e6]
    count = 2 * BLOCK + 5
    assert drawn(text, 0, count).tolist() == (wanted * count)[:count]
    assert drawn(text, 1, 5).tolist() == [5e-4] * 5
    assert drawn(text, 2, 3).tolist() == wanted
    with pytest.raises(UsageError, match="no traced gradients"):
        parse(f'trace("{tmp_path / "none"}")', "compute")


def test_what_a_traced_gradient_has_waited_is_no_computing(tmp_path):
    """200 us, of which a wait within the wait has 100; 50 that reach beyond the end; and another thread's."""
    spans = [
        ("gradient", "compute", 0, 1000, 0), ("wait for the mean gradient", "wait", 700, 200, 0),
        ("wait: allreduce", "wait", 750, 100, 0), ("wait: barrier", "wait", 950, 250, 0), ("wait", "wait", 100, 500, 1),
    ]  # fmt: skip
    rows = [dict(zip(("name", "cat", "ts", "dur", "tid"), one, strict=True), ph="X") for one in spans]
    (tmp_path / "trace-rank-0.json").write_text(json.dumps({"traceEvents": rows}))
    assert drawn(f'trace("{tmp_path}")', 0, 2).tolist() == [750 / 1e6] * 2


@pytest.mark.parametrize(
    "text",
    [
        "gamma(shape=0)", "pareto(alpha=1)", "bernoulli(chance=2)", "bernoulli(factor=-1)", "persistent(sigma=-1)",
        "persistent(factors=['a'])", "persistent(factors=[-1])", "persistent(factors=3)", "bernoulli(law=ideal())",
    ],
)  # fmt: skip
def test_what_makes_no_law_is_refused(text):
    with pytest.raises(UsageError):
        parse(text, "compute")


def test_laws_print_as_they_are_written():
    assert (
        str(parse("persistent(gamma(2), factors=[1, 2])", "compute"))
        == "persistent(law=gamma(mean=2),factors=[1,2])"
    )
    assert Gamma(1.0, 4.0) == Gamma() and Constant() != Gamma()
