"""k-fold cross-validation: every sample is held out once, and trained on in all other folds, whatever is read how."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import mpitrain as mt
from mpitrain.data.datasets.folds import Fold, folded, read_fold
from mpitrain.errors import UsageError
from mpitrain.job import Overrides, apply_overrides

SAMPLES, FOLDS = 41, 4


@pytest.fixture
def shards(tmp_path: Path) -> mt.Shards:
    mt.pack({"x": np.arange(SAMPLES, dtype=np.float32)}, tmp_path, shard_samples=19, chunk_samples=6)
    return mt.Shards(str(tmp_path / "*.h5"), window_chunks=2)


def ids(batches) -> list[int]:
    return [int(value) for batch in batches for value in batch["x"].flatten()]


def read(source: Fold | mt.Shards, epoch: int | None, batch_size: int = 5, seed: int = 0) -> list[int]:
    catalogue = source.scan()
    with source.reader(catalogue, seed) as reader:
        if epoch is None:
            return ids(reader.sequential(batch_size))
        starts = range(0, catalogue.num_samples, batch_size)
        runs = [(start, min(batch_size, catalogue.num_samples - start)) for start in starts]
        return ids(reader.batches(epoch, runs))


def test_every_sample_is_held_out_once_and_trained_on_in_all_other_folds(shards: mt.Shards) -> None:
    held = []
    whole = read(shards, None)  # as the samples lie in the files
    for number in range(1, FOLDS + 1):
        trained, validated = folded(shards, number, FOLDS)
        part = read(validated, None)
        assert part == sorted(part, key=whole.index) and set(read(validated, 3)) == set(part)
        assert validated.scan().num_samples == len(part) and abs(len(part) - SAMPLES / FOLDS) <= 7 / 2
        for epoch in (0, 1):
            rest = read(trained, epoch)
            assert sorted(rest + part) == list(range(SAMPLES))
        assert read(trained, 0) != read(trained, 1) and read(trained, 0) == read(trained, 0, batch_size=7)
        assert read(trained, None, batch_size=3) == sorted(read(trained, 0), key=whole.index)
        held += part
    assert sorted(held) == list(range(SAMPLES))


def test_folds_do_not_depend_on_the_seed_of_the_run(shards: mt.Shards) -> None:
    trained, _ = folded(shards, 2, FOLDS)
    assert set(read(trained, 0, seed=0)) == set(read(trained, 0, seed=5))
    assert read(trained, 0, seed=0) != read(trained, 0, seed=5)


def test_folds_of_a_dataset_and_of_a_job_with_a_transform(shards: mt.Shards) -> None:
    """The job's own transform is for training; the samples that are held out stay as they are."""
    values = torch.arange(SAMPLES, dtype=torch.float32)
    samples = [{"x": value.reshape(1)} for value in values]
    trained, validated = folded(mt.Samples(samples), 1, FOLDS)
    assert sorted(read(trained, 0) + read(validated, None)) == list(range(SAMPLES))
    job = mt.Job(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch["x"]).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=shards,
        transform=lambda batch, random: {"x": batch["x"] + 1000},
    )
    changed = apply_overrides(job, Overrides(fold="3/4"))
    assert min(read(changed.data, 0)) >= 1000 and max(read(changed.validate, None)) < SAMPLES  # type: ignore[arg-type]
    assert sorted([one - 1000 for one in read(changed.data, 0)] + read(changed.validate, None)) == list(
        range(SAMPLES)
    )  # type: ignore[arg-type]


def test_a_fold_is_told_from_another_and_from_the_whole(shards: mt.Shards) -> None:
    """A run that goes on from a checkpoint compares this."""
    found = {shards.scan().digest()}
    for number in (1, 2):
        found |= {one.scan().digest() for one in folded(shards, number, FOLDS)}
    assert len(found) == 5
    assert len({folded(shards, 1, folds)[0].scan().digest() for folds in (2, 3)}) == 2


@pytest.mark.parametrize("text", ["0/5", "6/5", "1/1", "1", "a/b", "1/0", "-1/3"])
def test_a_fold_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="2/5"):
        read_fold(text)


def test_what_has_no_places_of_its_own_makes_no_folds(shards: mt.Shards) -> None:
    with pytest.raises(UsageError, match="a fold of Weighted"):
        Fold(mt.Weighted(shards, np.ones(SAMPLES)), 1, 2)
    with pytest.raises(UsageError, match="41 samples make no 42 folds"):
        Fold(shards, 1, 42).scan()
