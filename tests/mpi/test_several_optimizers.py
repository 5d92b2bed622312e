"""Jobs and loops with several optimizers, beside torch's own loop in one process."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.training.measure import build, same_model
from tests import toy
from tests.mpi import gan
from tests.mpi.cases import launch_program
from tests.virtual.test_step_functions import accumulated, by_hand


@pytest.fixture(scope="module", params=[1, 3])
def launched(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(f"ranks-{request.param}")
    return path, launch_program(request.param, "gan_runs", str(path), cwd=path, timeout_s=300).check()


def assert_close(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "clip_norm"), [("plain", None), ("clipped", 0.1), ("resumed", None)])
def test_a_gan_as_a_job_trains_as_in_one_process(launched, name, clip_norm):
    """With one worker to the bit. Of the last batch of an epoch each of three has two samples, or three."""
    path, _ = launched
    found, expected = load_file(path / name / "model.safetensors"), gan.serial(clip_norm)
    assert_close(found, expected)
    if json.loads((path / name / "result.json").read_text())["workers"] == 1:
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_step_of_several_batches_is_one_process_with_those_of_all(launched):
    path, _ = launched
    num_ranks = json.loads((path / "accumulated" / "result.json").read_text())["workers"]
    expected = accumulated(2, gan.BATCH // num_ranks // 2, num_ranks)
    assert_close(load_file(path / "accumulated" / "model.safetensors"), expected)


def test_workers_that_step_by_themselves_are_averaged_or_replayed(launched, tmp_path):
    path, _ = launched
    num_ranks = json.loads((path / "plain" / "result.json").read_text())["workers"]
    runs = sorted(path.glob("job *"))
    assert len(runs) == {1: 1, 3: 4}[num_ranks]  # where there are servers, and a rank beside them
    for run in runs:
        num_workers = json.loads((run / "result.json").read_text())["workers"]
        if "async" in run.name:
            job = gan.make_job(batch_size=4, data=toy.Memory(24))
            again = mt.simulate(job, replay=str(run), run_dir=str(tmp_path), quiet=True)
            assert again["replay_identical"] and num_workers == 2
        elif run.name == "job sync()":
            assert_close(load_file(run / "model.safetensors"), accumulated(1, 4, num_workers))
        else:
            assert_close(load_file(run / "model.safetensors"), by_hand(num_workers, 4), 1e-11)


def test_options_of_a_job_act_on_all_its_optimizers(launched):
    path, _ = launched
    files = [path / name / "model.safetensors" for name in ("plain", "scheduled", "clipped")]
    for part in ("generator", "discriminator"):
        first, *others = ({n: t for n, t in load_file(f).items() if n.startswith(part)} for f in files)
        assert all(any(not torch.equal(first[n], other[n]) for n in first) for other in others)
    assert not same_model(*(path / "checkpointed" / f"model{end}.safetensors" for end in ("", "-ema")))
    rows = [json.loads(line) for line in (path / "plain" / "metrics.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["event"] == "progress")
    assert row["loss"] == pytest.approx(row["loss_generator"] + row["loss_discriminator"])


@pytest.mark.parametrize("text", ["allreduce()", "localsgd(period=1)"])
def test_several_models_of_a_loop_go_on_where_they_were_saved(launched, text):
    path, _ = launched
    assert same_model(path / f"{text}.safetensors", path / f"{text} resumed.safetensors")


def test_several_models_of_a_loop_train_as_in_one_process(launched):
    path, _ = launched
    torch.manual_seed(0)
    model, reader = gan.networks(), gan.DATA.reader(None, 0)
    optimizers = {
        "generator": gan.OPTIMIZERS["generator"](model["generator"].parameters()),
        "discriminator": gan.OPTIMIZERS["discriminator"](model["discriminator"].named_parameters()),
    }
    for number in range(6):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        gan.step(model, optimizers, reader.batch(0, 12 * (number % 2), gan.BATCH))
    assert_close(load_file(path / "allreduce().safetensors"), model.state_dict())


def test_a_second_model_is_refused_by_name_where_there_can_be_one(launched):
    _, ended = launched
    for text, words in (
        ("async()", "its servers serve the first model alone"),
        ("decentralized()", "its peers hold one model alone"),
        ("localsgd(period=2)", "another model of this program is trained under localsgd("),
    ):
        (line,) = {row for row in ended.stdout.splitlines() if row.startswith(f"refused {text}")}
        assert words in line


def test_mistakes_of_such_jobs_are_reported_by_name():
    with pytest.raises(UsageError, match="go together"):
        toy.make_job(step=gan.step)
    with pytest.raises(UsageError, match="go together"):
        toy.make_job(optimizer={"0": toy.sgd})
    with pytest.raises(UsageError, match="step is called with"):
        gan.make_job(step=lambda model: None)
    with pytest.raises(UsageError, match="takes backward itself"):
        gan.make_job(precision="float16")
    with pytest.raises(UsageError, match="no part of this name; it has 'generator', 'discriminator'"):
        build(gan.make_job(optimizer={"critic": toy.sgd}), None, torch.device("cpu"))
    shared = nn.Linear(2, 2)
    twice = gan.make_job(
        model=lambda: nn.ModuleDict({"a": shared, "b": shared}), optimizer={"a": toy.sgd, "b": toy.sgd}
    )
    with pytest.raises(UsageError, match="'a' and 'b' hold the same parameter"):
        build(twice, None, torch.device("cpu"))
    for strategy in (mt.Async(), mt.LocalSGD(start=2), mt.Decentralized()):
        with pytest.raises(UsageError, match=r"several optimizers: .*use .*allreduce\(\)"):
            mt.simulate(gan.make_job(), strategy)
