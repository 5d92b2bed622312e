"""A real run, repeated in virtual time in its recorded order of arrival, gives the same parameters to the bit."""

import json
import shutil

import pytest

from mpitrain import load, simulate
from mpitrain.cli.main import main
from mpitrain.errors import UsageError
from mpitrain.roles.replay import OrderFile, load_order, recording
from mpitrain.values import parse
from tests import toy
from tests.mpi.cases import launch_program
from tests.ranks import find_mpi, run_ranks

STRATEGIES = (
    "async()",
    "async(servers=2,damping=inverse())",
    "softsync(updates=2,damping=power(1.0))",
    "ssp(bound=1,servers=2)",
    "backup(spare=1,warmup=warmup(epochs=0.5))",
    "async(damping=delay_compensated())",
    "async(damping=gap_aware())",
    "async(damping=drop(limit=2))",
    "async(servers=2,push_wire='bfloat16',reply_wire='float16')",
    "async(servers=2,inflight=2)",
    "async(optimizer='worker',push_every=3,pull_every=2)",
    "softsync(updates=2,inflight=2,push_every=2)",
    "elastic(push_every=3,servers=2)",
    "ssp(bound=1,pull_every=3,push_wire='bfloat16',optimizer='worker')",
    "sync(batching=per_round())",
    "async(servers=2,push_wire=threshold(density=0.1,dense_below=0),reply_wire=eightbit(dense_below=0))",
    "ssp(bound=1,push_wire=qsgd(dense_below=0))",
    "softsync(updates=2,inflight=2,push_wire=onebit(dense_below=0))",
    "bounded(staleness=1,servers=2)",
    "sync(servers=2,aggregate='node')",
    "async(servers=2,aggregate='node')",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("real")
    launch_program(5, "recorded_runs", str(path), *STRATEGIES).check()
    return path


@pytest.mark.parametrize("number", [0, 1, 4096, 10_000])
def test_the_order_goes_to_the_file_while_the_run_goes_on(tmp_path, number):
    """Memory and file are looked at in the middle: of ten thousand senders, not half stay in memory."""
    senders = [index % 7 for index in range(number)]
    with recording(tmp_path, 0) as order:
        for sender in senders:
            order.append(sender)
        held, (file,) = len(order._held), tmp_path.iterdir()
        assert held == number % OrderFile.NUM_HELD and file.name == ".arrivals-0.json.tmp"
    assert load_order(tmp_path, 0) == senders and len(list(tmp_path.iterdir())) == 1


def test_of_a_run_that_fails_no_order_stays(tmp_path):
    with pytest.raises(FileNotFoundError, match="of the user's"), recording(tmp_path, 0) as order:
        order.append(1)
        raise FileNotFoundError("of the user's")
    assert not list(tmp_path.iterdir())


def test_replay_is_bit_for_bit_for_every_rule(runs, tmp_path):
    orders = set()
    for index, text in enumerate(STRATEGIES):
        job = toy.make_job(optimizer=toy.sgd if index % 2 else toy.adam, epochs=2, batch_size=5)
        replayed = simulate(
            job,
            parse(text, "strategy"),
            replay=str(runs / str(index)),
            run_dir=str(tmp_path / f"v{index}"),
            quiet=True,
        )
        real = json.loads((runs / str(index) / "result.json").read_text())
        assert replayed["replay_identical"], text
        for key in ("accepted", "dropped", "late", "versions_skipped", "staleness_histogram", "samples"):
            assert replayed[key] == real[key], (text, key)
        orders.add((runs / str(index) / "arrivals-0.json").read_text())
    assert len(orders) > 1  # real runs do differ in what they leave to chance


def test_another_order_gives_other_parameters(runs, tmp_path):
    """The comparison has teeth: swap two arrivals of a real run and the bits differ."""
    shutil.copytree(runs / "0", tmp_path / "0")
    path = tmp_path / "0" / "arrivals-0.json"
    order = json.loads(path.read_text())
    job = toy.make_job(optimizer=toy.adam, epochs=2, batch_size=5)
    swaps = [i for i in range(len(order) - 1) if order[i] != order[i + 1]]
    # two whose numbers are alike, or that are no gradients, may be swapped
    for number, first in enumerate(swaps):
        swapped = [*order[:first], order[first + 1], order[first], *order[first + 2 :]]
        path.write_text(json.dumps(swapped))
        replayed = simulate(job, replay=str(tmp_path / "0"), run_dir=str(tmp_path / f"v{number}"), quiet=True)
        if not replayed["replay_identical"]:
            assert replayed["status"] == "fail"
            return
    pytest.fail(f"the bits are those of any order: {order}")


def test_what_cannot_be_replayed_is_said(tmp_path):
    with pytest.raises(UsageError, match=r"no run\.json"):
        simulate(toy.make_job(), replay=str(tmp_path), run_dir=str(tmp_path / "v"))


JOB = """
import mpitrain as mt
from tests import toy

shape = mt.Options("model", hidden=5)
job = toy.make_job(model=lambda: toy.wide(shape.hidden), epochs=1)
"""


def test_parameters_of_the_job_file_are_those_of_the_run_in_its_replay_and_its_module(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    words = ["train", "job.py", "--strategy", "async()", "--run-dir", "run", "--set", "model.hidden=9"]
    python = str(find_mpi()[0])
    run_ranks(2, [python, "-m", "mpitrain", *words, "--quiet"], cwd=tmp_path).check()
    assert load(tmp_path / "run")[0].out_features == 9
    assert main(["simulate", "--replay", str(tmp_path / "run"), "--run-dir", str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again" / "result.json").read_text())["replay_identical"] is True
