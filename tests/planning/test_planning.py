"""The dry run asks the functions that the run asks, so its numbers can be checked against them."""

import itertools
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import mpitrain as mt
from mpitrain.cli.main import main
from mpitrain.errors import UsageError
from mpitrain.job import Overrides, apply_overrides
from mpitrain.planning import codec_cost
from mpitrain.planning.codec_cost import measure_codec
from mpitrain.planning.dry_run import block_nodes, describe
from mpitrain.planning.units import break_even
from mpitrain.values import parse
from tests import sparse_jobs, toy
from tests.ranks import ROOT


def plan(strategy, ranks, nodes=1, **changes):
    job = apply_overrides(toy.make_job(strategy=strategy, name="toy", **changes), Overrides())
    return describe(job, Overrides(), ranks, nodes)


def test_ranks_fill_nodes_in_even_blocks():
    assert block_nodes(5, 2) == (0, 0, 0, 1, 1)
    assert block_nodes(4, 4) == (0, 1, 2, 3)
    with pytest.raises(UsageError, match="every node needs"):
        block_nodes(2, 3)


def test_roles_batches_and_bytes_of_a_server_run():
    text = plan(mt.Async(servers=2, push_wire="bfloat16"), 6, 2)
    assert "2 worker(s); rank 2 serves shard 0" in text and "2 worker(s); rank 5 serves shard 1" in text
    assert "rank 0 validates and saves the model; rank 2 deals batches" in text
    assert "16 batches dealt as leases, about 4 a worker" in text  # 2 epochs of 48 samples in batches of 6
    numbers = 5 * 7 + 7 + 7 + 1
    assert f"{numbers} trainable numbers, {numbers * 4} B" in text
    assert f"each worker sends {numbers * 2} B and receives {numbers * 4} B per batch" in text
    assert f"shard 1 (rank 5): push {numbers // 2 * 2} B, reply {numbers // 2 * 4} B" in text


def test_models_in_16_bits_travel_in_16_and_meet_in_32():
    text = plan(mt.Async(servers=2, push_wire="float16"), 6, **toy.LINEAR_BFLOAT16)
    assert "each worker sends 48 B and receives 48 B per batch" in text  # 24 numbers
    text = plan(mt.Decentralized("ring"), 5, **toy.LINEAR_BFLOAT16)
    assert (
        "2 messages of 48 B, 96 B sent per rank" in text and "at the end: at most 288 B sent per rank" in text
    )
    assert "4 copies of the model beside it on every rank: 384 B" in text


def test_aggregators_are_named_with_what_they_send():
    text = plan(mt.Sync(aggregate="node"), 9, 2)
    assert "3 worker(s); rank 4 serves shard 0; rank 3 stands between them and the servers" in text
    assert "3 worker(s); rank 8 stands between them and the servers" in text
    assert "each of 2 aggregator(s) sends the sum of its workers' pushes, 200 B an update" in text
    assert "those together that have come while the server was busy" in plan(mt.Async(aggregate="node"), 4)
    with pytest.raises(UsageError, match="no node has 3 ranks besides servers"):
        plan(mt.Sync(aggregate="node"), 3)


def test_allreduce_says_its_steps_and_the_least_it_sends():
    text = plan(mt.AllReduce(), 4)
    assert "4 worker(s)" in text and "4 steps of 4 x 6 samples" in text
    assert "allreduce of 200 B a step; at least 300 B sent per rank" in text


def test_a_codec_says_its_bytes():
    codec = mt.EightBit(dense_below=0)
    text = plan(mt.AllReduce(codec=codec), 3)
    size = 32 + 50 + 4 * 4  # header, a byte a number, a scale for each of four parameters
    assert f"eightbit(dense_below=0): {size} B a message" in text and "2.0 times fewer" in text
    assert f"each rank receives {2 * size} B" in text
    assert "averaged: at least" in plan(mt.AllReduce(codec=mt.PowerSGD()), 3)
    assert "codec" not in plan(mt.AllReduce(), 3)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (mt.Async(servers=4), "leave no worker"),
        (mt.Backup(spare=3), "leaves none to wait for"),
        (mt.Backup(stragglers="abort"), "no MPI worker can stop"),
        (mt.SoftSync(updates=9, blocking=True), "would wait for ever"),
    ],
)
def test_what_the_run_would_refuse_the_plan_refuses(strategy, said):
    with pytest.raises(UsageError, match=said):
        plan(strategy, 4)


def test_averaging_and_peers_say_what_they_send_beside_allreduce():
    text = plan(mt.LocalSGD(period=4, average_optimizer=True, start=2), 4)
    assert "300 B sent per rank at an averaging, every 4 steps: 75 B a step" in text
    assert "allreduce until 2 steps are done" in text and "the optimizer's state is averaged too" in text
    assert "every 2 steps" in plan(mt.LocalSGD(period=48, unit="samples"), 4)  # 4 x 6 samples a step
    text = plan(mt.Decentralized("ring", resync=7), 5)
    assert "2 messages of 200 B, 400 B sent per rank and step; each waits for 2" in text
    assert "1.2 times the 320 B of allreduce(): it costs more on every link" in text
    assert "all meet every 7 steps and at the end: at most 600 B sent per rank" in text
    text = plan(mt.Decentralized("exponential", asynchronous=True, codec=mt.EightBit(dense_below=0)), 8)
    assert "each waits for nobody" in text and "7 copies of the model" in text


def test_a_dry_run_on_ranks_starts_no_mpi_for_the_others_have_left(tmp_path):
    job = tmp_path / "job.py"
    job.write_text("from tests import toy\njob = toy.make_job(name='toy', data=toy.Memory(256))\n")
    code = f"""
import sys
from mpitrain.cli.main import main
for strategy in "allreduce()", "localsgd()", "async(servers=2)", "decentralized()", "sharded()":
    assert main(["train", {str(job)!r}, "--dry-run", "--strategy", strategy]) == 0
    assert "mpi4py.MPI" not in sys.modules, strategy
"""
    env = {**os.environ, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "4 ranks on 1 node(s)" in done.stdout


def test_sixteen_nodes_of_four_gpus_are_planned_without_slurm(capsys, tmp_path):
    job = tmp_path / "job.py"
    job.write_text("from tests import toy\njob = toy.make_job(name='toy', data=toy.Memory(256))\n")
    words = ["train", str(job), "--dry-run", "--gpus-per-node", "4"]
    assert main([*words, "--nodes", "16", "--strategy", "async(servers=8)"]) == 0
    told = capsys.readouterr().out
    assert "72 ranks on 16 node(s)" in told
    rows = [line for line in told.splitlines() if "worker(s)" in line]
    assert len(rows) == 16 and all("4 worker(s)" in row for row in rows)
    assert sum("serves shard" in row for row in rows) == 8
    hosts = tmp_path / "hosts"
    named = ["--hosts", "s1 g1 g2", "--server-nodes", "1", "--write-hosts", str(hosts)]
    assert main([*words, *named, "--strategy", "async(servers=2)"]) == 0
    assert hosts.read_text().split() == ["s1"] * 2 + ["g1"] * 4 + ["g2"] * 4
    assert (
        "s1  0-1          0 worker(s); rank 0 serves shard 0, rank 1 serves shard 1"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "2", "--write-hosts", "x"], "needs the nodes' names"),
        (["--nodes", "2", "--hosts", "a b c"], "3 names in --hosts"),
        (["--ranks", "4"], "follows from --gpus-per-node"),
    ],
)
def test_a_machine_that_contradicts_itself_is_refused(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "job.py", "--dry-run", "--gpus-per-node", "2", *words])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_run_takes_no_nodes(capsys):
    with pytest.raises(SystemExit):
        main(["train", "job.py", "--gpus-per-node", "2"])
    assert "--gpus-per-node describes a --dry-run" in capsys.readouterr().err


def wide(widths=(64, 256, 64)):
    layers = [torch.nn.Linear(n, m) for n, m in itertools.pairwise((5, *widths, 1))]
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize(
    "strategy",
    [
        mt.AllReduce(codec=mt.Threshold(density=0.01)), mt.AllReduce(codec=mt.PowerSGD()),
        mt.Async(servers=2, push_wire=mt.Threshold(density=0.01), reply_wire=mt.EightBit()),
        mt.Decentralized(codec=mt.TopK(density=0.01)), mt.LocalSGD(period=4, wire="int8"), mt.LocalSGD(period=4),
    ],
    ids=str,
)  # fmt: skip
def test_a_plan_says_the_link_rate_above_which_saving_bytes_does_not_pay(strategy):
    text = plan(strategy, 5, model=wide)
    found = re.findall(r"pays on links below (\S+) (\S+), does not pay above \1 \2 \(break-even\)", text)
    assert found and all(float(rate) > 0 for rate, _ in found)


def test_what_saves_nothing_is_said_to_pay_nowhere():
    assert "does not pay on any link" in plan(
        mt.AllReduce(codec=mt.EightBit(dense_below=0)), 24, data=toy.Memory(96)
    )
    assert break_even(1e6, 0.008) == [
        "            pays on links below 1 Gbit/s, does not pay above 1 Gbit/s (break-even)"
    ]
    assert "2.5 Mbit/s" in break_even(2500, 0.008)[0]


@pytest.mark.parametrize("codec", [mt.Threshold(density=0.01), mt.EightBit(), mt.TopK(density=0.02)], ids=str)
def test_a_part_of_a_model_tells_the_bytes_of_all_of_it(monkeypatch, codec):
    whole = measure_codec(codec, wide())
    monkeypatch.setattr(codec_cost, "TRIED", 12000)
    part = measure_codec(codec, wide())
    assert whole.measured == whole.total == part.total > 2 * part.measured
    assert part.message_bytes == pytest.approx(whole.message_bytes, rel=0.1)


class Crowded(sparse_jobs.Summed):
    """Of whose three rows every batch touches all."""

    def __init__(self):
        super().__init__(nn.Embedding, True)
        self.table = nn.Embedding(3, 4, sparse=True)

    def forward(self, words):
        return super().forward(words % 3)


def test_a_plan_says_what_a_row_of_a_table_on_servers_takes():
    job = sparse_jobs.make_job(strategy=parse("async(servers=2,push_wire='float16')", "strategy"))
    said = describe(job, Overrides(), 6, 1)
    assert "table: 85 rows of 4, 1.3 KiB, by hash over 2 servers, begun with the layer's own" in said
    assert "a push carries 8 bytes of each row that a batch touches and its answer 16, with their ids" in said
    batch = job.data.reader(None, 0).batch(0, 0, 4)
    assert f"the first batch touches {len(set(sparse_jobs.many(batch).flatten().tolist()))} rows" in said
    few = describe(toy.dataclasses.replace(job, model=Crowded), Overrides(), 6, 1)
    assert "the first batch touches 3 rows: with sparse_as_dense=True about as much would travel" in few
    assert "each worker sends 16 B and receives 32 B per batch" in said
    alone = toy.dataclasses.replace(job, strategy=parse("hybrid(servers=2,tables='servers')", "strategy"))
    said = describe(alone, Overrides(), 6, 1)
    assert (
        "allreduce of 36 B a step among the workers; at least 54 B sent by each" in said
    )  # 8 numbers and a share
    assert "table: 85 rows of 4" in said and "shard" not in said.split("model  ")[1].split("tables  ")[0]
    served = toy.dataclasses.replace(job, model=sparse_jobs.Served)
    assert "on the servers alone" in describe(served, Overrides(), 6, 1)
