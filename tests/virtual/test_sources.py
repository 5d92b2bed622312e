"""Datasets of torch train to the same bits as shards of the same samples, under every family of strategies."""

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import mpitrain as mt
from tests import toy

STRATEGIES = [
    mt.Sync(),
    mt.Async(servers=2),
    mt.StaleSync(bound=1),
    mt.LocalSGD(period=2),
    mt.Decentralized(),
]
SAMPLES = toy.MemoryReader(toy.Memory(50))
DATASET = TensorDataset(SAMPLES.x, SAMPLES.y)


class InOrder(IterableDataset):
    def __len__(self):
        return 50

    def __iter__(self):
        return iter(DATASET)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    with mt.ShardWriter(folder) as writer:
        writer.add({"x": SAMPLES.x.numpy(), "y": SAMPLES.y.numpy()})
    return mt.Shards(f"{folder}/*.h5")


def trained(path, strategy, data, **changes):
    job = toy.make_job(data=data, batch_size=None if isinstance(data, DataLoader) else 6, **changes)
    result = mt.simulate(job, strategy, 3, run_dir=str(path), quiet=True)
    return load_file(result["model"]), result


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_dataset_trains_to_the_bits_of_shards_with_the_same_samples(tmp_path, shards, strategy):
    expected, result = trained(tmp_path / "shards", strategy, shards, validate=shards)
    sources = {
        "dataset": DATASET,
        "loader": DataLoader(DATASET, 6, shuffle=True, num_workers=2, prefetch_factor=3),
    }
    for name, data in sources.items():
        found, said = trained(tmp_path / name, strategy, data, validate=DataLoader(DATASET, 10))
        assert same(found, expected), name
        assert said["metrics"] == pytest.approx(result["metrics"])
        assert said["samples"] == result["samples"]


def noisy(batch, random):
    return {**batch, "x": batch["x"] + 0.1 * random.normal(5)}


@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=str)
def test_a_transform_and_weights_do_so_too(tmp_path, shards, strategy):
    weights = [1 + number % 3 for number in range(50)]
    for name, wrap, changes in (
        ("plain", lambda source: source, {}),
        ("transform", lambda source: source, {"transform": noisy}),
        ("weighted", lambda source: mt.Weighted(source, weights, 40), {}),
        ("both", lambda source: mt.Weighted(source, weights, 40), {"transform": noisy}),
    ):
        expected, result = trained(tmp_path / f"{name}-shards", strategy, wrap(shards), **changes)
        found, _ = trained(tmp_path / name, strategy, wrap(mt.Samples(DATASET)), **changes)
        assert same(found, expected), name
        assert result["samples"] == 2 * (40 if "weighted" in name or name == "both" else 50)
        if name != "plain":
            assert not same(found, load_file(tmp_path / "plain" / "model.safetensors"))


@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[-1]], ids=str)
def test_a_stream_trains_in_its_own_order(tmp_path, strategy):
    expected, _ = trained(tmp_path / "memory", strategy, toy.Memory(50))  # which is in order, too
    for num_workers in (0, 1):
        found, result = trained(
            tmp_path / str(num_workers), strategy, DataLoader(InOrder(), 6, num_workers=num_workers)
        )
        assert same(found, expected) and result["samples"] == 100
