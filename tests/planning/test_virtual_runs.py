"""Strategies without a closed form in a plan, and training in virtual time behind `--train`."""

import json
import textwrap
from dataclasses import replace

import pytest
import torch
from torch import nn

import mpitrain as mt
from mpitrain.cli.main import main
from mpitrain.errors import UsageError
from mpitrain.job import Overrides
from mpitrain.planning.advice import candidates, merged, option, rank, virtual_candidates
from mpitrain.planning.curves import curve
from mpitrain.planning.plan_text import messages
from mpitrain.planning.scaling import Conditions, Setting, Times, bucket_bytes, reason, throughput
from mpitrain.planning.virtual_runs import (
    Trained,
    VirtualRuns,
    rank_trained,
    setting_with_rows,
    virtual_setting,
    with_rows,
)
from mpitrain.reporting.targets import Choice
from mpitrain.system.sizes import size_text
from mpitrain.values import parse
from mpitrain.virtual import Cluster, Constant, LogNormal
from mpitrain.virtual.link_costs import link_cost
from mpitrain.virtual.message_law import LinkCost
from tests import sparse_jobs, toy

BATCH, WIDTH = 2, 100
NUM_BYTES = 4 * WIDTH * (WIDTH + 1)
JOB = """
    import torch
    import mpitrain as mt

    def loss(model, batch):
        return (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.02)

    data = mt.Synthetic(96, x=((4,), "float32"))
    job = mt.Job(model=lambda: torch.nn.Linear(4, 1), loss=loss, optimizer=sgd, data=data, validate=data,
                 epochs=2, batch_size=4, target={"validation_loss": "<100"})
"""
GIVEN = ["--compute", "lognormal(0.02, 0.3)", "--network", "gbe1()", "--workers", "1,3"]


@pytest.fixture(scope="module")
def runs():
    data = mt.Synthetic(100_000, x=((WIDTH,), "float32"))
    job = mt.Job(
        model=lambda: torch.nn.Linear(WIDTH, WIDTH), loss=lambda model, batch: model(batch["x"]).square().mean(),
        optimizer=toy.sgd, data=data, batch_size=BATCH,
    )  # fmt: skip
    return VirtualRuns(job, Overrides())


def conditions(law=Constant(0.1, 0.0), network=Cluster(), **changes):  # noqa: B008 - frozen
    return Conditions(
        Times(law),
        BATCH,
        NUM_BYTES,
        link_cost(network, 0, 1),
        link_cost(network, 0, 1),
        network=network,
        **changes,
    )


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("allreduce()", Setting("", "allreduce")),
        ("localsgd(period=5)", Setting("", "localsgd", period=5)),
        ("sync()", Setting("", "servers", 1)),
        ("async(servers=2)", Setting("", "async", 2)),
    ],
)
def test_a_run_in_virtual_time_says_what_the_closed_form_says_where_there_is_one(runs, text, closed):
    slow = conditions(network=Cluster(gbit_per_s=0.1))
    for given in (conditions(), conditions(read_s=0.05), slow, conditions(push_s=0.005)):
        ran = throughput(virtual_setting(text, runs), given, 6)
        assert ran == pytest.approx(throughput(closed, given, 6), rel=0.05)
    halved = conditions(fixed=0.5)
    assert throughput(virtual_setting(text, runs), halved, 6, 1) == pytest.approx(
        throughput(closed, halved, 6, 1), rel=0.05
    )


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("ssp(bound=1)", conditions(network=Cluster(gbit_per_s=0.003)), "link"),
        ("ssp(bound=1)", conditions(apply_s=0.1), "apply"),
        ("decentralized()", conditions(LogNormal(0.1, 1.0)), "straggler tail"),
        ("decentralized()", conditions(network=Cluster(latency_s=0.3)), "latency"),
        ("softsync(updates=2)", conditions(read_s=0.1), "batch reading"),
    ],
)
def test_what_holds_a_strategy_back_that_is_run_is_the_term_that_was_made_slow(runs, text, given, expected):
    name, gain = reason(virtual_setting(text, runs), given, 6)
    assert name == expected and gain > 1.3


def test_a_warm_up_is_no_part_of_a_strategys_speed(runs):
    slow, own = (
        throughput(virtual_setting(text, runs), conditions(), 6)
        for text in ("ssp(warmup=warmup(epochs=1))", "ssp()")
    )
    assert slow == own
    slow, own = (
        throughput(virtual_setting(text, runs), conditions(), 6)
        for text in ('localsgd(wire="bfloat16", start=1000)', 'localsgd(wire="bfloat16")')
    )
    assert slow == own


def test_every_setting_that_is_advised_can_be_given_to_train():
    for number in (1, 2, 3, 8, 100):
        settings = [one.text for one in candidates(number, 100_000, 8)] + virtual_candidates(number)
        assert len(set(settings)) == len(settings)
        assert all(isinstance(parse(text, "strategy"), mt.strategies.base.Strategy) for text in settings)


def test_an_allreduce_is_hidden_but_for_its_last_bucket_where_the_backward_pass_is_long():
    sizes = bucket_bytes(60 << 20)
    assert sizes == [1 << 20, 25 << 20, 25 << 20, 9 << 20] and bucket_bytes(1000) == [1000]
    link = LinkCost(0.0, 1e-9)
    given = Conditions(Times(Constant(1.0, 0.0)), 32, 60 << 20, LinkCost(), link, backward=0.9)
    last_s = given.allreduce_s(4, sizes[-1])
    assert throughput(Setting("", "allreduce"), given, 4) == pytest.approx(4 * 32 / (1 + last_s))
    bare = replace(given, backward=0.0)
    all_s = sum(given.allreduce_s(4, size) for size in sizes)
    assert throughput(Setting("", "allreduce"), bare, 4) == pytest.approx(4 * 32 / (1 + all_s))


def test_settings_that_differ_in_servers_alone_are_one():
    fast, slow = conditions(), conditions(network=Cluster(gbit_per_s=0.003))
    for given, criterion, kept in ((fast, "speed", 1), (slow, "speed", 2), (slow, "accuracy", 1)):
        options = [
            option(Setting(f"sync({servers})", "servers", servers), given, 4, False, 100, 1, None)
            for servers in (2, 1)
        ]
        found = merged(sorted(options, key=lambda one: -one.rate), criterion)
        assert len(found) == kept
        assert sum(len(one.alike) for one in found) == 2 - kept
    assert found[0].text == "sync(2)"  # the faster one, where speed is not what is asked


def test_more_servers_than_the_workers_can_keep_busy_are_no_setting_of_their_own():
    given = conditions(network=Cluster(gbit_per_s=0.03))
    options = [
        option(Setting(f"async({servers})", "async", servers), given, 64, False, 100, 1, None)
        for servers in (8, 60, 1, 2, 4, 64)
    ]
    rates = [one.rate for one in options]
    assert (
        rates[2] < 0.6 * rates[3]
        and rates[3] < 0.6 * rates[4]
        and rates[1] == pytest.approx(rates[5], rel=0.01)
    )
    found = merged(rank(options, "speed"), "speed")
    assert len({round(one.rate) for one in found}) == len(found) and found[0].alike


def test_trained_settings_are_ranked_by_what_was_asked():
    rows = [
        Trained("a", 4, 4, None, value=0.5, to_target_s=3.0),
        Trained("b", 4, 5, None, value=0.4, to_target_s=2.5),
        Trained("c", 1, 1, None, value=float("nan"), to_target_s=None),
        Trained("d", 1, 1, None, value=0.6, to_target_s=10.0),
    ]

    def order(less, criterion, some=rows):
        return "".join(one.strategy for one in rank_trained(some, Choice("m", less), criterion))

    assert order(True, "accuracy") == "badc" and order(False, "accuracy-in=1h") == "dabc"
    assert order(True, "speed") == "badc" and order(True, "cost") == "dabc"[0] + "abc"
    assert order(True, "speed", [one._replace(to_target_s=None) for one in rows]) == "badc"


def test_the_best_settings_are_trained_as_simulate_trains_them(tmp_path, capsys):
    path = tmp_path / "job.py"
    path.write_text(textwrap.dedent(JOB))
    words = ["plan", str(path), *GIVEN, "--best", "accuracy-in=1m", "--train", "2"]
    texts = []
    for name in "ab":
        assert main([*words, "--json", str(tmp_path / name)]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert max(map(len, texts[0].splitlines())) <= 80
    assert "trained in virtual time, validation_loss" in texts[0]
    best = json.loads((tmp_path / "a").read_text())["best"]
    assert best["metric"] == "validation_loss" and len(best["trained"]) == 2
    values = [row["value"] for row in best["trained"]]
    assert values == sorted(values)
    for row in best["trained"]:
        more = [] if row["lr"] is None else ["--lr", repr(row["lr"])]
        simulate = [
            "simulate",
            str(path),
            "--workers",
            str(row["workers"]),
            "--strategy",
            row["strategy"],
            *GIVEN[:4],
        ]
        out = tmp_path / "run"
        assert main([*simulate, *more, "--run-dir", str(out), "--quiet"]) == 0
        result = json.loads((out / "result.json").read_text())
        assert row["value"] == result["validation_loss"] and row["virtual_s"] == result["virtual_s"]


@pytest.mark.parametrize(("change", "failure"), [('"<100"', ""), ('"<1e-9"', ""), ("lr=1e30", "loss is inf")])
def test_a_missed_target_is_no_failure_and_a_model_that_diverged_is(tmp_path, capsys, change, failure):
    path = tmp_path / "job.py"
    old = "lr=0.02" if change.startswith("lr") else '"<100"'
    path.write_text(textwrap.dedent(JOB).replace(old, change))
    words = ["plan", str(path), *GIVEN, "--strategy", "allreduce()", "--best", "accuracy", "--train", "1"]
    assert main([*words, "--json", str(tmp_path / "found")]) == 0
    (row,) = json.loads((tmp_path / "found").read_text())["best"]["trained"]
    assert failure in row["failure"] and bool(failure) == bool(row["failure"])
    assert (row["value"] is None) == bool(failure)
    assert (row["to_target_s"] is not None) == (change == '"<100"')
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_time_that_is_too_short_for_a_validation_says_so(tmp_path, capsys):
    path = tmp_path / "job.py"
    path.write_text(textwrap.dedent(JOB))
    words = ["plan", str(path), *GIVEN, "--strategy", "ssp()", "--best", "accuracy-in=0.001s", "--train", "1"]
    assert main([*words, "--json", str(tmp_path / "found")]) == 0
    (row,) = json.loads((tmp_path / "found").read_text())["best"]["trained"]
    assert row["value"] is None and row["virtual_s"] > 0.001
    assert row["to_target_s"] <= row["virtual_s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train", "2"], "--best"),
        (["--synthetic", "--best", "speed", "--train", "2"], "validates nothing"),
        (["--synthetic", "--strategy", "pipeline(2)"], "pipeline"),
    ],
)
def test_what_cannot_be_trained_or_run_is_refused(words, message, capsys):
    assert main(["plan", "jobs/digits.py", *GIVEN, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("model", [lambda: sparse_jobs.Summed(nn.Embedding, True), sparse_jobs.Served])
def test_a_model_with_tables_is_planned_by_the_rows_that_batches_touch(tmp_path, model):
    """Of strategies with servers alone, in virtual time; the smaller a batch, the fewer rows."""
    job = toy.dataclasses.replace(sparse_jobs.make_job(), model=model, batch_size=8)
    runs = VirtualRuns(job, Overrides())
    found = with_rows([Setting("allreduce()", "allreduce"), Setting("sync(servers=1)", "servers", 1)], runs)
    assert [(one.text, one.kind) for one in found] == [("sync(servers=1)", "virtual")]
    asked = [parse("sync(servers=1)", "strategy"), 2, tmp_path / "run"]
    timed = []
    for batch in (2, 8):
        runs._asked.job = toy.dataclasses.replace(job, batch_size=batch)
        timed.append(runs._asked.timed(*asked))
    pushed = [sum(one["pushed_bytes"] for one in row["shards"]) / row["samples"] * size
              for row, size in zip(timed, (2, 8), strict=True)]  # fmt: skip
    assert pushed[0] < pushed[1] < 4 * pushed[0]
    with pytest.raises(UsageError, match=r"plan: allreduce\(\): the model has tables of rows: how many"):
        setting_with_rows("allreduce()", mt.AllReduce(), runs)
    with pytest.raises(
        UsageError, match=r"plan: localsgd\(\): the model has tables of rows: localsgd\(\) sends"
    ):
        setting_with_rows("localsgd()", mt.LocalSGD(), runs)


def test_a_plan_says_what_each_rank_sends_to_others(runs):
    """N - 1 messages a step where all tell all, one to each neighbour elsewhere."""
    given = conditions()
    for text, counts, sends in (("decentralized()", [5, 65], 4), ("decentralized(topology='ring')", [5], 2)):
        found = curve(virtual_setting(text, runs), given, counts, BATCH)
        assert [point["workers"] for point in found["points"]] == [5], "65 that name no topology are refused"
        assert found["points"][0]["messages"] == sends
        assert found["points"][0]["sent_bytes"] == sends * NUM_BYTES
        told = " ".join(" ".join(messages({"curves": [found]})).split())
        assert f"{sends} messages, {size_text(sends * NUM_BYTES)} a step" in told
    assert "messages" not in curve(Setting("allreduce()", "allreduce"), given, [5], BATCH)["points"][0]
