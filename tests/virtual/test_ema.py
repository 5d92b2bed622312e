"""The moving average of the weights, in virtual time against torch's own."""

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.model.optimizers.ema import Ema
from mpitrain.model.wire.flat import make_layout
from mpitrain.system.files.atomic import write_all
from mpitrain.training.measure import save_model
from mpitrain.training.validations import averaged_model
from mpitrain.values import parse
from tests import toy

DECAY = 0.8


def trained(path, job, strategy, workers=1):
    mt.simulate(job, parse(strategy, "strategy"), workers=workers, run_dir=str(path), quiet=True)
    return [load_file(path / name) for name in ("model.safetensors", "model-ema.safetensors")]


def close(one, other, **limits):
    assert one.keys() == other.keys()
    for name in other:
        torch.testing.assert_close(one[name], other[name], **(limits or {"rtol": 1e-5, "atol": 1e-6}))


@pytest.mark.parametrize("model", [toy.smooth, toy.normed])
@pytest.mark.parametrize(
    "strategy",
    [
        "sync()", "sync(servers=3)", "async()", 'async(servers=2, optimizer="worker")', "localsgd(period=1)",
        "localsgd(start=100)", "decentralized()",
    ],
)  # fmt: skip
def test_of_one_worker_it_is_torchs_and_the_model_is_as_without(strategy, model, tmp_path):
    job = toy.make_job(ema=DECAY, model=model)
    last, average = trained(tmp_path / "a", job, strategy)
    expected = toy.serial_ema(job, DECAY)
    close(last, expected[0])
    close(average, expected[1])
    loaded = mt.load(tmp_path / "a", job, which="ema").state_dict()
    assert all(torch.equal(loaded[name], average[name]) for name in average)
    plain = toy.make_job(model=model)
    mt.simulate(plain, parse(strategy, "strategy"), workers=1, run_dir=str(tmp_path / "b"), quiet=True)
    without = load_file(tmp_path / "b" / "model.safetensors")
    assert all(torch.equal(last[name], without[name]) for name in last)
    assert not (tmp_path / "b" / "model-ema.safetensors").exists()


@pytest.mark.parametrize("strategy", ["sync()", "sync(servers=2)", "localsgd(start=100)", "decentralized()"])
def test_of_workers_in_lockstep_it_is_that_of_one_process_with_their_whole_batch(strategy, tmp_path):
    job = toy.make_job(
        ema=DECAY, model=toy.smooth, batch_size=4, optimizer=lambda p: torch.optim.SGD(p, lr=0.05)
    )
    serial = toy.make_job(model=toy.smooth, batch_size=12, optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
    close(trained(tmp_path / "a", job, strategy, 3)[1], toy.serial_ema(serial, DECAY)[1])


def test_swapped_back_no_bit_differs_and_a_state_goes_on():
    held = [torch.randn(5)]
    ema = Ema(0.5, lambda: held)
    ema.update()
    held[0].add_(1.0)
    before = held[0].clone()
    ema.update()
    with ema.swapped():
        assert torch.allclose(held[0], before - 0.5)
    assert torch.equal(held[0], before)
    other = Ema(0.5, lambda: held)
    other.restore(ema.state())
    assert torch.equal(other.values()[0], ema.values()[0])


def test_servers_write_it_once_and_leave_nothing_beside_it(tmp_path, monkeypatch):
    written = []

    def counted(file, data):
        written.append(len(data))
        write_all(file, data)

    monkeypatch.setattr(averaged_model, "write_all", counted)
    trained(tmp_path, toy.make_job(ema=DECAY, model=toy.normed), "sync(servers=3)", 2)
    assert sum(written) == (tmp_path / "model-ema.safetensors").stat().st_size
    assert not list(tmp_path.glob(".*"))


def test_without_the_elements_of_a_server_there_is_none(tmp_path):
    module = toy.smooth()
    layout = make_layout(module, torch.optim.SGD(module.parameters(), lr=0.1), 2)
    file = averaged_model.AverageFile(tmp_path, "start", module, layout)
    save_model(module, tmp_path / "model.safetensors", {})
    file.write_part(1, torch.zeros(layout.size(1)))
    file.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_tied_weights_are_averaged_under_both_names(tmp_path):
    def tied():
        model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 1))
        model[1].weight = model[0].weight
        return model

    _, average = trained(tmp_path / "a", toy.make_job(ema=DECAY, model=tied), "sync(servers=2)", 2)
    assert torch.equal(average["0.weight"], average["1.weight"])


@pytest.mark.parametrize("decay", [1.0, -0.1, True, "0.9"])
def test_a_decay_is_in_its_range(decay):
    with pytest.raises(UsageError, match="ema must be a decay"):
        toy.make_job(ema=decay)


def test_a_run_without_says_what_keeps_one(tmp_path):
    job = toy.make_job()
    mt.simulate(job, mt.Sync(), workers=2, run_dir=str(tmp_path / "a"), quiet=True)
    with pytest.raises(UsageError, match="has kept no ema model: a job with ema="):
        mt.load(tmp_path / "a", job, which="ema")


def test_it_counts_as_torchs_averaged_model_does():
    module = torch.nn.Linear(3, 2)
    torchs, own = (
        AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        Ema(0.9, lambda: [*module.parameters()]),
    )
    for _ in range(4):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter))
        torchs.update_parameters(module)
        own.update()
    for one, other in zip(own.values(), torchs.module.parameters(), strict=True):
        torch.testing.assert_close(one, other)
