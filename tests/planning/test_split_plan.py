"""What the dry run says of split models, and who refuses them: nothing here starts a rank."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.job import Overrides, apply_overrides
from mpitrain.planning.dry_run import describe
from mpitrain.planning.model_parallel import split_needs
from mpitrain.training.model_parallel.mesh import MeshStepper
from mpitrain.training.session import assign_roles
from tests import toy


def plan(strategy, ranks, nodes=1, overrides=None, **changes):
    overrides = overrides or Overrides()
    job = apply_overrides(toy.make_job(strategy=strategy, name="toy", **changes), overrides)
    return describe(job, overrides, ranks, nodes)


def test_stages_their_places_and_the_bubble():
    text = plan(mt.Pipeline(microbatches=3), 4, 2)
    places = [line.strip() for line in text.splitlines() if line.strip().startswith("rank")]
    assert places == [
        "rank 0 holds stage 0 of pipeline 0",
        "rank 1 holds stage 0 of pipeline 1",
        "rank 2 holds stage 1 of pipeline 0",
        "rank 3 holds stage 1 of pipeline 1",
        "rank 0 logs and saves the model",
    ]
    assert "48 samples; 8 steps of 2 x 6" in text  # 2 epochs
    assert "stage 0: 42 numbers" in text and "stage 1: 8 numbers" in text
    assert "3 pieces of 2 samples" in text and "averaged over 2 pipelines" in text
    assert "bubble      25 % of a step idle" in text


def test_slices_and_shards():
    text = plan(mt.TensorParallel(), 2, tensor_plan={"[03]": "gather"}, model=even)
    assert "0: gather, 1/2 per rank" in text and "3: gather, 1/2 per rank" in text
    assert "16 steps of 1 x 6" in text
    text = plan(mt.Sharded(replicas=2), 4, 2)
    assert "100 B of parameters per rank in 3 units" in text and "averaged over 2 replicas" in text
    assert "4 steps of 4 x 6" in text


def even():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.25), nn.Linear(6, 2))


L = 4 * 1000 * 1000


@pytest.mark.parametrize(("strategy", "ranks", "expected"), [
    # parameters, gradients, Adam's moments and two temporaries of what a rank holds of a layer; FSDP2 puts a layer and
    # its gradient together, and the next one
    (mt.Sharded(), 4, 1 + 1 + 2 + 2 / 4 + 3),
    (mt.Sharded(replicas=2), 4, 2 + 2 + 4 + 2 / 2 + 3),
    (mt.Pipeline(stages=2), 2, 2 + 2 + 4 + 2),
    (mt.TensorParallel(), 2, 2 + 2 + 4 + 2 / 2),
])  # fmt: skip
def test_a_rank_needs_what_it_holds_and_what_is_put_together(strategy, ranks, expected):
    module = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(4)))
    job = toy.make_job(strategy=strategy, model=lambda: module, tensor_plan={"[02]": "column", "[13]": "row"})
    (need,) = split_needs(strategy, job, (0,) * ranks, module, torch.optim.Adam(module.parameters()))
    assert need.num_bytes / L == pytest.approx(expected, rel=1e-3)


def test_what_a_rank_of_a_split_model_needs_is_told():
    text = plan(mt.Pipeline(microbatches=3), 2)
    assert "memory      each worker: " in text and "gradients 168 B" in text  # of the 42 numbers of stage 0


@pytest.mark.parametrize(
    ("strategy", "changes", "said"),
    [
        (mt.Pipeline(stages=3, microbatches=3), {}, "4 rank.* cannot be divided into models of 3"),
        (
            mt.Pipeline(stages=4),
            {"batch_size": 8, "stages": ("0", "3")},
            r"2 layer\(s\) cannot make 4 stages",
        ),
        (mt.Pipeline(), {}, "a batch of 6 samples cannot be cut into 4"),
        (mt.Pipeline(microbatches=3), {"stages": ("0", "2")}, "parameter 3.weight is in no stage"),
        (mt.TensorParallel(), {}, "which layers are sliced"),
        (mt.Sharded(replicas=3), {}, "cannot be divided into 3 replicas"),
    ],
)
def test_what_the_run_would_refuse_the_plan_refuses(strategy, changes, said):
    with pytest.raises(UsageError, match=said):
        plan(strategy, 4, **changes)


def test_stragglers_cannot_be_ordered_among_parts_of_a_model():
    with pytest.raises(UsageError, match="hold whole models"):
        plan(mt.Pipeline(microbatches=3), 2, overrides=Overrides(inject=("slow(worker=0, factor=2)",)))


@pytest.mark.parametrize("strategy", [mt.Pipeline(), mt.TensorParallel(), mt.Sharded()])
def test_wrap_refuses(strategy):
    with pytest.raises(UsageError, match="which `wrap` never does"):
        assign_roles(SimpleNamespace(nodes=(0, 0)), strategy, own_loop=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stages": 3}, "stages must be names of submodules or"),
        ({"stages": ()}, "stages must be names"),
        ({"tensor_plan": {"0": "colum"}}, "did you mean 'column'"),
    ],
)
def test_a_job_is_held_to_its_fields(changes, said):
    with pytest.raises(UsageError, match=said):
        toy.make_job(**changes)


@pytest.mark.parametrize("num_batches", [0, 1, 3, 4, 8])
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_all_ranks_validate_equally_often_and_every_batch_counts_once(num_batches, num_replicas):
    runs = [
        list(
            MeshStepper._rounds(
                SimpleNamespace(num_replicas=num_replicas, share=share), enumerate(range(num_batches))
            )
        )
        for share in range(num_replicas)
    ]
    assert len({len(rounds) for rounds in runs}) == 1
    counted = sorted(batch for rounds in runs for number, batch in rounds if number is not None)
    assert counted == list(range(num_batches))
