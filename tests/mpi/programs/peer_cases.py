"""Peers on four real ranks: nobody waits for who sleeps, replicas agree to the bit, and counts add up."""

import os
import time
from pathlib import Path

import torch

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.roles.peer_credits import CREDITS
from tests import toy
from tests.mpi.cases import run_cases

OUT = Path(os.environ["PEERS_OUT"])
PAUSE = ("pause(worker=1, at_step=2, seconds=0.5)",)


def train(name, strategy, inject=(), **changes):
    """The result with the rows of all ranks, which `mt.train` returns on rank 0 alone."""
    job = toy.make_job(**changes)
    return start().broadcast(mt.train(job, strategy, run_dir=str(OUT / name), quiet=True, inject=inject))


def case_asynchronous_peers_do_not_wait_for_one_that_sleeps(rt):
    """How far the others were ahead of rank 1 when their messages reached it: at most a step where all wait. Where
    nobody does, rank 1 stays in its third batch until rank 0 is in its tenth: whoever waited would wait for ever."""
    leads = {}
    for asynchronous in (False, True):
        calls, far_ahead = [], OUT / "far-ahead"

        def loss(model, batch, calls=calls, asynchronous=asynchronous, far_ahead=far_ahead):
            calls.append(1)
            if rt.rank == 0 and len(calls) == 10:
                far_ahead.touch()
            while asynchronous and rt.rank == 1 and len(calls) == 3 and not far_ahead.exists():
                time.sleep(0.01)
            return toy.square_loss(model, batch)

        far_ahead.unlink(missing_ok=True)
        rt.barrier()
        rule = mt.Decentralized(asynchronous=asynchronous)
        result = train(f"paused-{asynchronous}", rule, PAUSE, epochs=8, batch_size=1, loss=loss)
        leads[asynchronous] = result["ranks"][1]["max_steps_ahead"]
        assert result["injected"] == [{"worker": 1, "sleeps": 1, "slept_s": 0.5}]
        assert result["accepted"] == 4 * 96 and result["samples"] == 384
        assert sum(one["messages"] for one in result["ranks"]) == 3 * 4 * 96
        assert result["drift"] < 1e-5  # everybody took every update, in another order
    assert leads[False] <= 1 and leads[True] >= 5, leads


def case_a_peer_that_stands_still_is_sent_a_bounded_number_of_updates(rt):
    """Rank 1 stays in its third batch while its messages are received; the others run out of credit and wait."""
    calls, far_ahead = [], OUT / "out-of-credit"

    def loss(model, batch):
        calls.append(1)
        if rt.rank == 0 and len(calls) == CREDITS:
            far_ahead.touch()
        if rt.rank == 1 and len(calls) == 3:
            while not far_ahead.exists():
                time.sleep(0.01)
            time.sleep(0.5)  # for as many steps as they like
        return toy.square_loss(model, batch)

    result = train("credits", mt.Decentralized(asynchronous=True), epochs=8, batch_size=1, loss=loss)
    most = [one["max_unanswered"] for one in result["ranks"]]
    assert max(most) <= CREDITS and most[0] > CREDITS // 2, most
    assert result["accepted"] == 4 * 96 and result["samples"] == 384
    assert sum(one["messages"] for one in result["ranks"]) == 3 * 4 * 96
    assert result["drift"] < 1e-5


def case_synchronous_full_topology_keeps_replicas_the_same_to_the_bit(rt):
    codec = mt.Threshold(density=0.2, tau=2.0**-6, dense_below=0)
    for warmup in (mt.Warmup(), mt.Warmup(2, epochs=1)):
        rule = mt.Decentralized(codec=codec, resync=5, warmup=warmup)
        result = train(f"threshold-{warmup.epochs}", rule, batch_size=2)
        assert result["replicas_identical"] and result["drift_max"] < 1e-7
        assert 0 < result["ranks"][0]["density"] < 1 and result["ranks"][0]["codec_ms"] > 0
        assert result["averagings"] == 1 + (result["steps"] // 5) + bool(warmup.epochs)
    loose = train("loose", mt.Decentralized("ring"), batch_size=2)
    assert not loose["replicas_identical"] and loose["drift"] > 1e-4


def case_every_graph_and_codec_comes_to_its_end(rt):
    for topology in ("ring", "torus", "exponential"):
        for codec in (mt.Uncompressed(), mt.EightBit()):
            rule = mt.Decentralized(topology, codec=codec, asynchronous=topology == "torus")
            result = train(f"{topology}-{codec.name}", rule, batch_size=5)
            assert result["status"] == "ok" and result["samples"] == 2 * 48 and result["steps"] == 6
            assert sum(one["samples"] for one in result["ranks"]) == 2 * 48


def case_a_ring_for_the_other_world(rt):
    """What tests/mpi/test_peer_ranks.py repeats in virtual time."""
    for codec in (mt.Uncompressed(), mt.EightBit()):
        rule = mt.Decentralized("ring", codec=codec, resync=4)
        train(f"twin-{codec.name}", rule, optimizer=toy.adam, batch_size=3)


def case_the_own_loop(rt):
    """Last: one wrap a process. On dyadic data the mean of four updates is one process on the whole batch."""
    expected, model = toy.linear_float32(), toy.linear_float32()
    optimizer = toy.dyadic_sgd(expected.parameters())
    model, wrapped = mt.wrap(model, toy.dyadic_sgd(model.parameters()), mt.Decentralized(resync=2))
    reader = toy.Memory().reader(None, 0)
    for number in range(3):
        batch = reader.batch(0, 16 * number, 16)
        optimizer.zero_grad()
        toy.linear_loss(expected, batch).backward()
        optimizer.step()
        wrapped.zero_grad()
        share = {name: tensor[mt.worker_index() :: mt.num_workers()] for name, tensor in batch.items()}
        toy.linear_loss(model, share).backward()
        wrapped.step()
    mt.finish()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


run_cases(globals())
