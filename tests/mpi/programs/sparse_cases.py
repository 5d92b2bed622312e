"""Embeddings with sparse gradients under allreduce over four ranks: whole runs beside those with dense gradients."""

import os
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.errors import AgreedError
from mpitrain.mpi import runtime
from mpitrain.mpi.process_group import sparse_allreduce
from tests import small_jobs, sparse_jobs, toy
from tests.mpi.cases import raises, run_cases

OUT = Path(os.environ["SPARSE_OUT"])
added_up, adds_up = [], sparse_allreduce.adds_up


def noting(num_entries, num_different):
    added_up.append(adds_up(num_entries, num_different))
    return added_up[-1]


sparse_allreduce.adds_up = noting


def trained(name, job, **options):
    result = mt.train(job, mt.AllReduce(), run_dir=str(OUT / name), quiet=True, **options)
    assert result["status"] == "ok", result["failure"]
    return load_file(OUT / name / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def close(one, other):
    for name, tensor in other.items():
        torch.testing.assert_close(one[name], tensor, rtol=1e-5, atol=1e-6)


def case_the_bits_are_those_of_dense_gradients(rt):
    for layer, words, optimizer in (kind.split("-") for kind in os.environ["SPARSE_KINDS"].split()):
        kind, added_up[:] = {"layer": layer, "words": words, "optimizer": optimizer}, []
        found = trained(f"{layer}-{words}-{optimizer}", sparse_jobs.make_job(**kind))
        assert added_up == [words == "few"] * 6
        assert same(found, trained(f"dense-{layer}-{words}-{optimizer}", sparse_jobs.make_job(False, **kind)))


def case_clipping_accumulation_and_averages_see_the_rows(rt):
    for number, changes in enumerate(
        (
            {"clip_norm": 0.1}, {"clip_value": 0.01}, {"accumulate": 2, "batch_size": 2}, {"ema": 0.5},
            {"accumulate": 2, "batch_size": 2, "clip_norm": 0.1}, {"find_unused_parameters": True},
        )
    ):  # fmt: skip
        changes = changes | {"loss": sparse_jobs.square_loss, "optimizer": "adagrad"}
        found = trained(f"changed-{number}", sparse_jobs.make_job(**changes))
        close(found, trained(f"dense-changed-{number}", sparse_jobs.make_job(False, **changes)))


def case_a_resumed_run_makes_the_same_bits(rt):
    changes = {"loss": sparse_jobs.square_loss, "optimizer": "adagrad", "checkpoint_every": "48"}
    whole = trained("whole", sparse_jobs.make_job(epochs=3, **changes))
    trained("first", sparse_jobs.make_job(epochs=1, **changes))
    assert same(
        whole, trained("second", sparse_jobs.make_job(epochs=3, **changes), resume=str(OUT / "first"))
    )


def case_a_step_function_steps_a_sparse_and_a_dense_optimizer(rt):
    assert same(
        trained("joint", sparse_jobs.joint_job(True)), trained("dense-joint", sparse_jobs.joint_job(False))
    )


def case_sparse_adam_is_one_process_with_all_batches(rt):
    job = toy.make_job(
        model=lambda: nn.Sequential(nn.Embedding(sparse_jobs.ROWS, 4, sparse=True)), batch_size=4,
        loss=lambda model, batch: ((model(sparse_jobs.many(batch)).sum(1) - batch["y"]) ** 2).mean(),
        optimizer=lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.01),
    )  # fmt: skip
    close(trained("sparse adam", job), small_jobs.by_ranks(job, rt.size))


def case_a_loss_that_is_not_finite_is_refused_with_its_rows(rt):
    def loss(model, batch):
        value = sparse_jobs.linear_loss(model, batch, sparse_jobs.many)
        return value * (float("nan") if rt.rank == 2 and rt.step == 1 else 1.0)

    job = sparse_jobs.make_job(on_nonfinite="skip", epochs=1)
    result = mt.train(
        toy.dataclasses.replace(job, loss=loss), mt.AllReduce(), run_dir=str(OUT / "nan"), quiet=True
    )
    assert rt.rank or (result["nonfinite"] == 1 and result["status"] == "ok")
    assert all(tensor.isfinite().all() for tensor in load_file(OUT / "nan" / "model.safetensors").values())


class Halves(nn.Module):
    """Its second table is looked up by the first rank only."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (sparse_jobs.Summed(nn.Embedding, True) for _ in range(2))

    def forward(self, words):
        found = self.first(words)
        if runtime.start().rank == 0:
            return found + self.second.table(words).sum(1)
        return found + self.second.table(words[:0]).sum()


def case_a_table_of_which_a_rank_looks_up_no_row_is_trained(rt):
    named = {"loss": sparse_jobs.square_loss, "find_unused_parameters": True, "epochs": 1}
    found = trained("no rows", sparse_jobs.make_job(model=Halves, **named))
    assert not torch.equal(found["second.table.weight"], Halves().state_dict()["second.table.weight"])


def case_a_wrapped_loop_is_checked_before_its_first_step(rt):
    model = sparse_jobs.Summed(nn.Embedding, True)
    raises(
        AgreedError,
        "in a loop of your own nobody knows which rows the next batch looks up",
        lambda: mt.wrap(model, sparse_jobs.sgd(model.parameters()), mt.Async()),
    )
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    raises(AgreedError, "SGD(momentum=0.9)", lambda: mt.wrap(model, momentum))


run_cases(globals())
