"""Runs beside one another: each row is the run by itself, and what is written is the same twice."""

import json
import time

import pytest

import mpitrain as mt
from mpitrain.cli import main as cli
from mpitrain.errors import UsageError
from mpitrain.job import Overrides
from mpitrain.simulation.comparison import Comparison
from mpitrain.simulation.comparison_text import comparison_text
from mpitrain.training.validations.validation import LEAST_BATCH
from mpitrain.values import parse
from mpitrain.virtual import Constant, Costs, Exponential, Link
from mpitrain.virtual.serial_fraction import fit_serial_fraction, limit
from tests import toy

LAWS = {"compute": Exponential(1.0), "network": Link(gbit_per_s=1e-4, latency_s=0.01)}
ALIKE = ["async(servers=2)", "backup(spare=1)", "allreduce()", "localsgd(period=2)", "decentralized()"]


def compared(tmp_path, strategies, counts, timing_only=False, job=None, options=None, **laws):
    job = job or toy.make_job()
    options = options or {}
    one = Overrides(run_dir=str(tmp_path / f"runs-{timing_only}"), quiet=True, **options)
    runs = Comparison(job, one, **{**LAWS, **laws}, timing_only=timing_only)
    return runs.run([parse(text, "strategy") for text in strategies], counts)


def test_each_row_is_the_run_by_itself(tmp_path):
    for row in compared(tmp_path, ALIKE, (2, 3))["rows"]:
        alone = mt.simulate(
            toy.make_job(strategy=parse(row["strategy"], "strategy")),
            workers=row["workers"],
            run_dir=str(tmp_path / f"alone-{row['strategy']}-{row['workers']}"),
            quiet=True,
            **LAWS,
        )
        assert {
            key: row[key] for key in ("virtual_s", "samples", "steps", "servers", "metrics", "loss_curve")
        } == {
            key: alone[key] for key in ("virtual_s", "samples", "steps", "servers", "metrics", "loss_curve")
        }


@pytest.mark.parametrize("costs", [Costs(), Costs(memory_gb_per_s=1e-5, read_s=0.1)])
def test_rows_without_gradients_take_as_long_and_send_as_much(tmp_path, costs):
    strategies = [*ALIKE, 'async(push_wire="float16")', "sharded()", "pipeline(microbatches=2)"]
    job = toy.make_job(validate=None)
    timed = compared(tmp_path, strategies, (2,), True, job, costs=costs)["rows"]
    trained = compared(tmp_path, strategies, (2,), False, job, costs=costs)["rows"]
    keys = ("strategy", "virtual_s", "samples", "speed_up", "staleness", "dropped_share", "server_bytes")
    assert [{key: row[key] for key in keys if key in row} for row in timed] == [
        {key: row[key] for key in keys if key in row} for row in trained
    ]
    assert not any("loss_curve" in row for row in timed)
    for row in timed[3:6]:
        run_dir = tmp_path / "none"
        alone = mt.simulate(
            job,
            parse(row["strategy"], "strategy"),
            2,
            costs=costs,
            timing_only=True,
            run_dir=str(run_dir),
            **LAWS,
        )
        assert [alone[key] for key in ("virtual_s", "samples")] == [
            row[key] for key in ("virtual_s", "samples")
        ]
        assert alone["timing_only"] and not alone.get("model") and "loss_curve" not in alone
        assert not run_dir.exists()


def test_a_replay_has_gradients():
    with pytest.raises(UsageError, match="leave out timing_only"):
        mt.simulate(toy.make_job(), replay="runs", timing_only=True)


def test_quiet_runs_say_what_was_refused_and_a_line_each(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "job.py"
    job.write_text("from tests import toy\njob = toy.make_job()\n", encoding="utf-8")
    words = ["--strategy", "async()", "--strategy", "backup(spare=3)", "--workers", "1,2", "--timing-only"]
    assert cli.main(["simulate", str(job), *words, "--quiet"]) == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ["FOM", "FOM"]
    told = [line for line in printed.err.splitlines() if not line.startswith(" ")]
    assert [line.partition(":")[0] for line in told] == [
        "backup(spare=3), 1 worker",
        "backup(spare=3), 2 workers",
    ]


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    texts = [
        json.dumps(compared(tmp_path, ALIKE, (1, 4), True, toy.make_job(seed=seed)), sort_keys=True)
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_one_worker_without_a_network_is_no_faster_than_one_device(tmp_path):
    found = compared(tmp_path, ["allreduce()", "localsgd(period=4)"], (1,), network=Link(1e9, 0.0))
    assert [row["speed_up"] for row in found["rows"]] == pytest.approx([1.0, 1.0])
    assert [row["utilisation"] for row in found["rows"]] == pytest.approx([1.0, 1.0])


def test_costs_of_steps_that_all_take_together_are_added_up(tmp_path):
    """Reading before a batch, the optimizer after it, and at the end the model is written."""
    num_bytes = sum(one.nbytes for one in toy.make_job().model().parameters())
    costs = Costs(memory_gb_per_s=1e-6, read_s=0.5, validate_s=2.0, checkpoint_gb_per_s=1e-5)
    laws = {"compute": Constant(1.0, 0.0), "network": Link(1e9, 0.0), "costs": costs}
    options = {"steps": 6}
    row = compared(tmp_path, ["allreduce()"], (1,), job=toy.make_job(validate=None), options=options, **laws)[
        "rows"
    ][0]
    assert row["virtual_s"] == pytest.approx(6 * (1.5 + 3 * num_bytes / 1e3) + num_bytes / 1e4)
    laws["costs"] = Costs(validate_s=2.0)
    seen = compared(tmp_path, ["allreduce()"], (1,), job=toy.make_job(validate=toy.Memory(8)), **laws)[
        "rows"
    ][0]
    epochs = [one for one in seen["validations"] if one["virtual_s"] < seen["virtual_s"]]
    assert seen["virtual_s"] == pytest.approx(seen["steps"] + 2.0 * len(epochs)) and epochs


def test_timing_alone_leaves_out_all_that_asks_for_a_validation(tmp_path):
    asks = {"validate_every": "6 samples", "keep_best": "validation_loss", "patience": 3, "ema": 0.5}
    job = toy.make_job(validate=toy.Memory(), validate_ema=True, **asks)
    rows = compared(tmp_path, ALIKE, (2,), True, job)["rows"]
    assert all(row["virtual_s"] > 0 for row in rows)


@pytest.mark.parametrize("strategy", ["allreduce()", "localsgd(period=2)", "decentralized()"])
def test_ranks_that_divide_a_validation_take_their_parts_of_its_time(tmp_path, strategy):
    """Four batches on four ranks."""
    laws = {"compute": Constant(1.0, 0.0), "network": Link(1e9, 0.0)}
    job = toy.make_job(validate=toy.Memory(4 * LEAST_BATCH))
    (tmp_path / "free").mkdir()
    free = compared(tmp_path / "free", [strategy], (4,), job=job, **laws)["rows"][0]
    row = compared(tmp_path, [strategy], (4,), job=job, costs=Costs(validate_s=2.0), **laws)["rows"][0]
    epochs = [
        one for one in row["validations"] if one["virtual_s"] < row["virtual_s"]
    ]  # but for the one of the end
    assert epochs and row["virtual_s"] == pytest.approx(free["virtual_s"] + 0.5 * len(epochs))


def test_the_target_is_met_by_the_first_validation_that_reaches_it(tmp_path):
    job = toy.make_job(epochs=4, validate=toy.Memory(16))
    seen = compared(tmp_path, ["allreduce()"], (2,), job=job)["rows"][0]["validations"]
    losses = [one["validation_loss"] for one in seen]
    bound = (losses[0] + min(losses)) / 2
    assert len(losses) >= 4 and losses[0] > bound
    (tmp_path / "again").mkdir()
    job = toy.make_job(epochs=4, validate=toy.Memory(16), target={"validation_loss": f"<{bound}"})
    row = compared(tmp_path / "again", ["allreduce()"], (2,), job=job)["rows"][0]
    expected = next(one for one in seen if one["validation_loss"] < bound)
    assert row["to_target"] == {key: expected[key] for key in ("virtual_s", "samples")}
    assert all(one["virtual_s"] <= row["virtual_s"] for one in row["validations"])


def test_what_one_refuses_stops_none_of_the_others(tmp_path):
    found = compared(tmp_path, ["backup(spare=1)", "async()"], (1, 2), True)
    refused = [row for row in found["rows"] if "refused" in row]
    assert [(row["strategy"], row["workers"]) for row in refused] == [("backup()", 1)]
    assert len(found["rows"]) == 4 and "backup(), 1 worker: backup: spare=1" in comparison_text(found)
    with pytest.raises(UsageError, match="spare=1"):
        compared(tmp_path, ["backup(spare=1)"], (1,), True)


def test_a_codec_sends_about_as_much_as_with_gradients(tmp_path):
    texts = [
        "async(push_wire=threshold(density=0.25, dense_below=0))",
        "decentralized(codec=threshold(density=0.25, dense_below=0))",
    ]
    options, pad_bytes = {"steps": 40}, 64  # to which a message of this small model is rounded up
    rows = [compared(tmp_path, texts, (2,), timing, options=options)["rows"] for timing in (True, False)]
    for timed, trained in zip(*rows, strict=True):
        key = "server_bytes" if "server_bytes" in trained else "rank_bytes"
        assert timed[key] == pytest.approx(trained[key], rel=0.15, abs=40 * pad_bytes)
    plain = compared(tmp_path, ["async()"], (2,), True, options=options)["rows"][0]
    assert rows[0][0]["server_bytes"] < plain["server_bytes"]


def test_the_table_has_80_columns_whatever_the_names(tmp_path):
    texts = ["async()", 'softsync(updates=2, damping=inverse(), push_wire="float16", servers=2)']
    job = toy.make_job(validate=toy.Memory(16), target={"validation_loss": "<9"})
    found = compared(tmp_path, texts, (2, 12), job=job)
    text = comparison_text(found)
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"{row['samples_per_s']:.4g}" in text for row in found["rows"])


def test_runs_that_an_earlier_comparison_has_left_are_set_aside(tmp_path):
    for _ in range(2):
        compared(tmp_path, ["async()"], (2,))
    (folder,) = [one for one in (tmp_path / "runs-False").iterdir() if one.name.startswith("earlier-")]
    assert (folder / "00-async-2" / "result.json").exists()
    lines = (tmp_path / "runs-False" / "00-async-2" / "metrics.jsonl").read_text().splitlines()
    assert sum('"end"' in line for line in lines) == 1


def test_a_fitted_curve_has_its_largest_value_at_its_limit():
    def speed_up(number):
        return number / (1 + 0.02 * (number - 1) + 1e-3 * number * (number - 1))

    fit = fit_serial_fraction([(number, speed_up(number)) for number in (1, 2, 4, 8, 16)])
    most, at = limit(fit)
    assert max(range(1, 200), key=speed_up) == round(at)
    assert most == pytest.approx(speed_up(at)) and most >= max(map(speed_up, range(1, 200)))
    assert limit(fit._replace(kappa=0.0)) == (pytest.approx(50, rel=1e-6), float("inf"))


def test_ten_thousand_workers_are_a_matter_of_seconds(tmp_path):
    """Per worker and step, no more than a hundred times what the same arithmetic takes for a hundred workers."""
    job, took_s = toy.make_job(data=toy.Memory(60_000), validate=None), []
    for number in (100, 10_000):
        began_s = time.process_time()
        row = compared(tmp_path, ["allreduce()"], (number,), True, job, {"steps": 5})["rows"][0]
        took_s.append((time.process_time() - began_s) / number)
        assert row["workers"] == number and row["steps"] == 5
    assert took_s[1] < 2 * took_s[0]


def test_the_command_writes_a_table_figures_of_merit_json_and_a_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "job.py"
    job.write_text("from tests import toy\njob = toy.make_job(name='<toy>')\n", encoding="utf-8")
    words = [
        "--strategy",
        "async()",
        "--strategy",
        "allreduce()",
        "--workers",
        "2,1,2",
        "--trace",
        "steps=1:3",
    ]
    out = ["--json", "s.json", "--html", "s.html", "--run-dir", "runs"]
    assert cli.main(["simulate", str(job), *words, *out]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("FOM ") == 4 and "speed-up" in printed.err
    found = json.loads((tmp_path / "s.json").read_text())
    assert [(row["strategy"], row["workers"]) for row in found["rows"]] == [
        ("async()", 1),
        ("async()", 2),
        ("allreduce()", 1),
        ("allreduce()", 2),
    ]
    page = (tmp_path / "s.html").read_text()
    assert "&lt;toy&gt;: 4 simulated runs" in page and "<toy>" not in page
    assert page.count("the traced steps of each rank</title>") == 4
    assert page.count("<title>Training loss, ") == 2
    timed = ["--timing-only", "--html", "t.html", "--run-dir", "timed", "--quiet"]
    assert cli.main(["simulate", str(job), *words, *timed]) == 0
    assert capsys.readouterr().err == ""
    page = (tmp_path / "t.html").read_text()
    assert page.count("the traced steps of each rank</title>") == 4 and "Training loss" not in page
    assert cli.main(["simulate", "--replay", "runs", "--json", "s.json"]) == 2
