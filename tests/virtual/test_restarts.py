"""Checkpoints and restarts in virtual time: who writes what when, what it costs, and what the end of a job changes."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.cli import main as cli
from mpitrain.errors import LostRankError, UsageError
from mpitrain.inject import read
from mpitrain.simulation.checkpoints import Checkpoints, policy_of
from mpitrain.simulation.timing import Circumstances, Workload, time_run
from mpitrain.strategies.checkpoint_policy import CheckpointPolicy
from mpitrain.values import parse
from mpitrain.virtual import Cluster, Constant, Costs, Ideal, ShiftedExponential, VirtualWorld
from tests import toy

EVERYBODY = [
    "allreduce()",
    "allreduce(codec=topk())",
    "sharded()",
    "async(servers=2)",
    "async(push_wire=topk())",
    'async(optimizer="worker")',
    "sync()",
    'sync(aggregate="node")',
    "backup(spare=1)",
    "softsync(updates=2)",
    "ssp(bound=1)",
    "elastic()",
    "localsgd(period=3)",
    "localsgd(period=3, average_optimizer=True)",
    "decentralized()",
    'decentralized(topology="ring")',
    "decentralized(asynchronous=True, resync=5)",
]
COSTS = Costs(memory_gb_per_s=1e-4, checkpoint_gb_per_s=2e-4, restart_s=7.0)


NETWORK = Cluster(gbit_per_s=1e-2, latency_s=0.01, ranks_per_node=4)


def job_of(text="", **changes):
    fields = {"data": toy.Memory(120), "batch_size": 4, "epochs": 2, "validate": None, "optimizer": toy.adam}
    strategy = parse(text, "strategy") if text else None
    return toy.make_job(**{**fields, "checkpoint_every": "40", "strategy": strategy, **changes})


def run(path, text, workers=2, **options):
    return mt.simulate(
        job_of(text), workers=workers, compute=ShiftedExponential(0.5, 1.0),
        network=NETWORK, run_dir=str(path), quiet=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("text", EVERYBODY)
def test_a_job_that_crashes_ends_with_the_same_parameters_and_later_by_what_it_repeats(tmp_path, text):
    plain = run(tmp_path / "plain", text, costs=COSTS)
    crashed = run(tmp_path / "crashed", text, costs=COSTS, inject=["crash(at_s=40)"])
    assert plain["virtual_s"] > 40 and plain["leg"] == 1 and plain["restarts"]["num_restarts"] == 0
    assert plain["checkpoints"] == crashed["checkpoints"]
    # of 240 samples, one of two batches being dropped under backup(), and four being one push under elastic()
    assert 2 <= plain["checkpoints"]["num_written"] <= 6
    restarts = crashed["restarts"]
    assert restarts["num_restarts"] == 1 and restarts["starting_s"] == 7.0 and crashed["leg"] == 2
    assert 0 < restarts["repeated_s"] < 40
    later_s = crashed["virtual_s"] - plain["virtual_s"]
    assert later_s == pytest.approx(7.0 + restarts["repeated_s"], rel=1e-9)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "crashed"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [row["loss"] for row in plain["loss_curve"]] == [row["loss"] for row in crashed["loss_curve"]]
    rows = [json.loads(line) for line in (tmp_path / "crashed" / "metrics.jsonl").read_text().splitlines()]
    (said,) = [row for row in rows if row.get("event") == "restart"]
    assert said["virtual_s"] > 47 and said["repeated_s"] == restarts["repeated_s"]


ALIKE = [text for text in EVERYBODY if "topk" not in text and text[:5] not in ("allre", "shard")]


@pytest.mark.parametrize("text", ALIKE)
def test_without_gradients_checkpoints_and_crashes_take_as_long(tmp_path, text):
    orders = ("crash(mtbf_s=12)", "crash(at_s=10.5)", "kill(worker=1, at_step=9)")
    seen = run(tmp_path, text, 4, costs=COSTS, inject=orders)
    job = job_of(text)
    injections = read(orders)
    timed = time_run(
        job.strategy, Workload.of(job, checkpoints=True), 4, ShiftedExponential(0.5, 1.0), NETWORK,
        job.seed, Circumstances(injections, COSTS, policy=policy_of(job, None, COSTS, injections)),
    )  # fmt: skip
    assert timed["virtual_s"] == seen["virtual_s"] and seen["restarts"]["num_restarts"] > 0
    assert timed["restarts"] == seen["restarts"] and timed["checkpoints"] == seen["checkpoints"]


EVERY_SAMPLE = CheckpointPolicy(samples=1)


def alone(costs, policy, steps=60, **laws):
    """One worker that steps once a second, under a strategy in which it also writes the checkpoints."""
    load = Workload(1000, 10**6, 1, steps=steps, optimizer_bytes=8000)
    return time_run(
        mt.LocalSGD(period=1),
        load,
        1,
        Constant(1.0, 0.0),
        under=Circumstances(costs=costs, policy=policy, **laws),
    )


def test_a_rank_is_held_up_by_the_copy_and_by_a_write_that_is_not_over():
    """12 kB are copied in 0.25 s; the thread writes them in 2 s, or in 12 s, of which 10 have not passed when 10 more
    samples have."""
    copying = {"memory_gb_per_s": 2 * 12e3 / 0.25 / 1e9}
    every = CheckpointPolicy(samples=10)
    quick = alone(Costs(checkpoint_gb_per_s=6e-6, **copying), every)
    slow = alone(Costs(checkpoint_gb_per_s=1e-6, **copying), every)
    updates_s = 60 * 3 * 4000 / (copying["memory_gb_per_s"] * 1e9)
    final_s = 4e3 / 6e3, 4e3 / 1e3
    for found, waits_s, final in zip((quick, slow), (0.0, 5 * 2.0), final_s, strict=True):
        said = found["checkpoints"]
        assert said["num_written"] == 6 and said["num_bytes"] == 6 * 12000
        assert said["copy_s"] == pytest.approx(6 * 0.25)
        passed = 10 * 3 * 4000 / (copying["memory_gb_per_s"] * 1e9)  # of updates between two checkpoints
        assert said["wait_s"] == pytest.approx(max(0.0, waits_s - 5 * passed))
        took_s = found["virtual_s"] - 60.0 - updates_s - said["copy_s"] - said["wait_s"]
        assert took_s == pytest.approx(0.0, abs=1e-9) or took_s == pytest.approx(final)


def two_parts(*orders, policy=EVERY_SAMPLE):
    """Of 1 and 5 kB, taken at 10 and written at 1 kB/s, and the world they are in."""
    world = VirtualWorld(Constant(), Ideal())
    checkpoints = Checkpoints(world, policy, Costs(checkpoint_gb_per_s=1e-6), read(orders))
    small, large = checkpoints.writer(0, "shard-0", 1000.0), checkpoints.writer(1, "shard-1", 5000.0)
    world.now_s = 10.0
    small.save(8, {}, ("shard-0", "shard-1"))
    large.save(8, {}, ())
    return world, large


@pytest.mark.parametrize("at_s, repeats_s", [(12.0, 12.0), (14.5, 14.5), (15.5, 5.5)])
def test_a_checkpoint_is_whole_when_its_last_part_is(at_s, repeats_s):
    world, _ = two_parts(f"crash(at_s={at_s})")
    world.now_s = 100.0
    assert world.elapsed_s == 100.0 + repeats_s


def test_none_is_due_by_time_while_one_is_being_written():
    world, writer = two_parts(policy=CheckpointPolicy(seconds=2.0))
    due = []
    for world.now_s in (11.0, 14.0, 15.0):
        due.append(writer.time_is_up())
    assert due == [False, False, True]


def test_a_policy_that_counts_seconds_counts_virtual_ones():
    found = alone(Costs(), CheckpointPolicy(seconds=7.0), steps=100)
    assert found["checkpoints"]["num_written"] == 100 // 7
    # the first after 30 s, and then every sqrt(2 C M) seconds, for 12 kB at 1 kB/s and a failure in 24 s
    auto = alone(Costs(checkpoint_gb_per_s=1e-6), CheckpointPolicy(auto=True, mtbf_s=24.0), steps=200)
    assert auto["checkpoints"]["num_written"] == 1 + (200 - 30) // 24


def test_without_a_question_about_checkpoints_none_is_written(tmp_path):
    found = run(tmp_path, "async()", costs=Costs(memory_gb_per_s=1.0))
    assert "checkpoints" not in found and "restarts" not in found and found["leg"] == 1
    assert "checkpoints" in run(tmp_path, "async()", checkpoint_every="40")


def test_a_death_that_nobody_survives_starts_the_job_again_where_that_takes_time(tmp_path):
    for number, text in enumerate(("allreduce()", "decentralized()", 'sync(aggregate="node")')):
        faults = {"inject": ["kill(worker=1, at_step=20)"]}
        with pytest.raises(LostRankError, match="rank . died"):
            run(tmp_path / f"ends-{number}", text, **faults)
        found = run(tmp_path / f"again-{number}", text, costs=COSTS, **faults)
        assert found["status"] == "ok" and found["restarts"]["num_restarts"] == 1
    ends = ["crash(at_s=1000)", *faults["inject"]]
    with pytest.raises(LostRankError, match="rank . died"):
        run(tmp_path / "no-restart", "allreduce()", inject=ends)
    survived = run(tmp_path / "async", "async()", costs=COSTS, **faults)
    assert survived["lost"] and survived["restarts"]["num_restarts"] == 0


@pytest.mark.parametrize("fault", ["disk_full", "corrupt_file"])
def test_a_job_goes_on_from_the_checkpoint_before_one_that_is_damaged(tmp_path, fault):
    """They are taken every 10 s, and the job ends at 35."""
    every, orders = CheckpointPolicy(samples=10), read(["crash(at_s=35)", f"{fault}(at_write=2)"])
    good = alone(Costs(restart_s=1.0), every, injections=orders[:1])
    bad = alone(Costs(restart_s=1.0), every, injections=orders)
    assert (good["restarts"]["repeated_s"], bad["restarts"]["repeated_s"]) == (5.0, 15.0)
    assert (good["checkpoints"]["num_written"], bad["checkpoints"]["num_written"]) == (6, 5)


def test_what_makes_no_sense_is_refused(tmp_path, capsys):
    for text in ("crash()", "crash(mtbf_s=-1)", "crash(mtbf_s=1e-300)", 'crash(at_s="soon")'):
        with pytest.raises(UsageError, match="crash"):
            parse(text, "inject")
    with pytest.raises(UsageError, match="peers that never wait .* resync=R"):
        run(tmp_path, "decentralized(asynchronous=True)", checkpoint_every="40")
    with pytest.raises(UsageError, match="'never' writes none"):
        run(tmp_path, "allreduce()", checkpoint_every="never", inject=["disk_full()"])
    path = tmp_path / "job.py"
    path.write_text("from tests import toy\njob = toy.make_job()\n")
    again = [
        "simulate",
        "--replay",
        str(tmp_path),
        "--inject",
        "crash(at_s=1)",
        "--costs",
        "costs(restart_s=1)",
    ]
    assert cli.main(again) == 2 and "leave out --inject, --costs\n" in capsys.readouterr().err
    assert cli.main([*again[:3], "--strategy", "sync()", "--workers", "4", "--timing-only"]) == 2
    assert "leave out --workers, --strategy, --timing-only\n" in capsys.readouterr().err
    assert cli.main(["train", str(path), "--dry-run", "--inject", "crash(at_s=1)"]) == 2
    assert "virtual time" in capsys.readouterr().err


def test_rows_say_how_often_a_job_was_started_again(tmp_path, capsys):
    path, out, page = tmp_path / "job.py", tmp_path / "rows.json", tmp_path / "rows.html"
    path.write_text("from tests import toy\njob = toy.make_job(data=toy.Memory(400), validate=None)\n")
    code = cli.main(
        [
            "simulate", str(path), "--strategy", "allreduce()", "--strategy", "sync()", "--workers", "2",
            "--timing-only", "--checkpoint-every", "40", "--inject", "crash(mtbf_s=20)", "--costs",
            "costs(restart_s=3)", "--json", str(out), "--html", str(page), "--run-dir", str(tmp_path / "runs"),
        ]
    )  # fmt: skip
    assert code == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["restarts"]["num_restarts"] > 0 for row in rows] == [True, True]
    cells = "".join(f"<td[^>]*>{row['restarts']['starting_s']:.5g}</td>.*" for row in rows)
    assert re.search(f"s of starting.*{cells}", page.read_text(), re.DOTALL)
    printed, said = capsys.readouterr()
    assert [line.split()[0] for line in printed.splitlines()] == ["FOM", "FOM"]
    assert "started again" in said and max(map(len, said.splitlines())) <= 80


def test_auto_knows_how_often_crashes_are_ordered():
    every = [policy_of(job_of(checkpoint_every="auto"), None, Costs(), read(text)) for text in (
        ["crash(mtbf_s=300)"], ["crash(mtbf_s=300)", "crash(mtbf_s=600)"], ["crash(at_s=3)"])]  # fmt: skip
    assert [one.mtbf_s for one in every] == pytest.approx([300.0, 200.0, 86400.0])


def test_the_hold_up_of_the_last_checkpoint_counts(tmp_path):
    """Six samples in lockstep and one server each write at the end of their last step."""
    took_s = [
        run(tmp_path / text, text, 1, costs=Costs(memory_gb_per_s=1e-5), checkpoint_every="240", epochs=2)
        for text in ("allreduce()", "localsgd(period=1)")
    ]
    assert [one["checkpoints"]["num_written"] for one in took_s] == [1, 1]
    assert took_s[0]["virtual_s"] == pytest.approx(took_s[1]["virtual_s"])
    assert took_s[0]["checkpoints"]["copy_s"] > 0.1


@pytest.mark.parametrize(
    "text, least", [("elastic()", 1), ("async(push_wire=topk())", 4), ('async(optimizer="worker")', 4)]
)
def test_a_checkpoint_gets_whole_however_soon_the_next_one_is_due(tmp_path, text, least):
    """One is due with every push. Every worker writes a part, and learns of it when it is answered: the next one waits
    for that."""
    found = run(tmp_path, text, 4, checkpoint_every="4")
    assert found["checkpoints"]["num_written"] >= least
