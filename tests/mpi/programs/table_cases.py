"""Tables on servers over five ranks: whole runs, resumed with other servers, and the memory of a large table."""

import os
import resource
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.errors import AgreedError, UsageError
from mpitrain.values import parse
from tests import sparse_jobs, toy
from tests.mpi.cases import run_cases

OUT = Path(os.environ["TABLES_OUT"])


def trained(name, job, text, **options):
    result = mt.train(job, parse(text, "strategy"), run_dir=str(OUT / name), quiet=True, **options)
    assert result["status"] == "ok", result["failure"]
    return result


def weights(name):
    return load_file(OUT / name / "model.safetensors")


def same(one, other):
    one, other = weights(one), weights(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def served(**changes):
    return sparse_jobs.make_job(model=sparse_jobs.Served, **changes)


def case_the_bits_are_those_of_dense_gradients(rt):
    for number, (layer, words, optimizer) in enumerate(sparse_jobs.KINDS[::3]):
        kind = {"layer": layer, "words": words, "optimizer": optimizer}
        for sparse in (True, False):
            trained(f"{number}-{sparse}", sparse_jobs.make_job(sparse, **kind), "sync(servers=2)")
        assert same(f"{number}-True", f"{number}-False")


def case_rows_that_servers_alone_hold_are_trained_and_validated(rt):
    job = served(optimizer="adagrad", loss=sparse_jobs.square_loss, validate=toy.Memory())
    result = trained("served", job, "sync(servers=2)")
    if rt.rank == 0:
        model = mt.load(OUT / "served", job=job)
        with torch.no_grad():
            batch = toy.Memory().reader(None, 0).batch(0, 0, 48)
            loss = float(sparse_jobs.square_loss(model, batch, sparse_jobs.many))
        assert abs(result["metrics"]["validation_loss"] - loss) < 1e-5 * loss


def case_a_run_goes_on_with_other_numbers_of_servers_to_the_bit(rt):
    """The gradients of a linear loss depend on no parameter, and dyadic sums on no order. Asynchronous shards write
    their parts of a checkpoint at pushes of their own, so what one has processed the next may not have."""
    for make, kind in ((sparse_jobs.make_job, "held"), (served, "served")):
        job = partial(make, checkpoint_every="20", keep_checkpoints=9)
        trained(f"{kind} whole", job(epochs=4), "async(servers=2)")
        trained(f"{kind} first", job(epochs=1), "async(servers=3)")
        trained(f"{kind} second", job(epochs=2), "async()", resume=str(OUT / f"{kind} first"))
        trained(f"{kind} third", job(epochs=4), "async(servers=2)", resume=str(OUT / f"{kind} second"))
    assert same("held whole", "held third")
    tables = [sparse_jobs.table_of(OUT / name, served()) for name in ("served whole", "served third")]
    assert torch.equal(*tables) and tables[0].abs().sum() > 0


def case_a_resumed_run_keeps_what_is_remembered_of_rows(rt):
    changes = {"optimizer": "adagrad", "loss": sparse_jobs.square_loss, "checkpoint_every": "48"}
    trained("remembered whole", sparse_jobs.make_job(epochs=3, **changes), "sync(servers=2)")
    trained("remembered first", sparse_jobs.make_job(epochs=1, **changes), "sync(servers=2)")
    resumed = sparse_jobs.make_job(epochs=3, **changes)
    trained("remembered second", resumed, "sync(servers=2)", resume=str(OUT / "remembered first"))
    assert same("remembered whole", "remembered second")


def case_an_asynchronous_run_is_replayed_to_the_bit(rt):
    job = sparse_jobs.make_job(loss=sparse_jobs.square_loss, optimizer="adagrad", validate=toy.Memory())
    trained("recorded", job, "async(servers=2)")
    if rt.rank == 0:
        found = mt.simulate(job, replay=str(OUT / "recorded"), run_dir=str(OUT / "replayed"), quiet=True)
        assert found["replay_identical"]


def case_an_allreduce_beside_servers_trains_their_bits_and_goes_on_with_others(rt):
    """Sums of a linear loss are exact, in whatever order MPI makes them."""
    for make, kind in ((sparse_jobs.make_job, "held"), (served, "served")):
        job = partial(make, validate=toy.Memory(), checkpoint_every="48")
        trained(f"{kind} alone", job(epochs=3), "sync(servers=2)")
        trained(f"{kind} beside", job(epochs=3), "hybrid(servers=2,tables='servers')")
        trained(f"{kind} begun", job(epochs=1), "hybrid(servers=2,tables='servers')")
        resume = str(OUT / f"{kind} begun")
        trained(f"{kind} gone on", job(epochs=3), "hybrid(servers=2,tables='servers')", resume=resume)
        assert same(f"{kind} alone", f"{kind} beside") and same(f"{kind} alone", f"{kind} gone on")
    tables = [
        sparse_jobs.table_of(OUT / f"served {name}", served()) for name in ("alone", "beside", "gone on")
    ]
    assert torch.equal(tables[0], tables[1]) and torch.equal(tables[0], tables[2])


def case_an_allreduce_beside_servers_goes_on_with_as_many_workers_alone(rt):
    job = partial(sparse_jobs.make_job, optimizer="adagrad", loss=sparse_jobs.square_loss)
    trained("three", job(epochs=1, checkpoint_every="48"), "hybrid(servers=2,tables='servers')")
    try:
        trained("four", job(epochs=2), "hybrid(tables='servers')", resume=str(OUT / "three"))
    except (AgreedError, UsageError) as error:
        assert "its number of workers, which step together, is 3, this job's is 4" in str(error)
    else:
        raise AssertionError("accepted")


def case_an_allreduce_beside_servers_is_what_is_simulated(rt):
    """To the rounding of its sums."""
    job = sparse_jobs.make_job(loss=sparse_jobs.square_loss, optimizer="adagrad", epochs=2)
    trained("numbers", job, "hybrid(servers=2,tables='servers')")
    if rt.rank == 0:
        strategy = parse("hybrid(servers=2,tables='servers')", "strategy")
        mt.simulate(job, strategy, workers=3, run_dir=str(OUT / "virtual"), quiet=True)
        for name, tensor in weights("virtual").items():
            torch.testing.assert_close(weights("numbers")[name], tensor, rtol=1e-6, atol=1e-7)


class Large(nn.Module):
    """A gigabyte of rows."""

    def __init__(self):
        super().__init__()
        self.table, self.head = mt.ServedEmbedding(1 << 22, 64), nn.Linear(64, 4)

    def forward(self, words):
        return self.head(self.table(words * 240_007 % (1 << 22)).sum(1))


def case_no_rank_takes_memory_for_rows_that_nobody_asks_for(rt):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trained("large", sparse_jobs.make_job(model=Large, loss=sparse_jobs.square_loss), "async(servers=2)")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 << 10, f"{grown} KiB"


def case_a_table_in_no_group_of_the_optimizer_is_refused_on_all_ranks(rt):
    def head_only(parameters):
        return torch.optim.SGD(list(parameters)[1:], lr=0.1)

    job = toy.dataclasses.replace(served(), optimizer=head_only)
    try:
        trained("no group", job, "async()")
    except (AgreedError, UsageError) as error:
        assert "table 'table' is in no group of the optimizer" in str(error)
    else:
        raise AssertionError("accepted")


if __name__ == "__main__":
    run_cases(globals())
