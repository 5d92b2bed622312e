"""The jobs of the literature: what their generators make is right, and what their models may see is what they may."""

import dataclasses
import gzip
import runpy

import numpy as np
import pytest
import torch

import mpitrain as mt
from mpitrain.training.job_file import load_job
from tests.ranks import ROOT

JOBS = ROOT / "jobs"


@pytest.mark.parametrize("name", ["cnn", "nmt", "pixelcnn"])
def test_each_trains_on_synthetic_samples_with_servers_too(tmp_path, name):
    job = load_job(str(JOBS / f"{name}.py"))
    result = mt.simulate(
        job,
        mt.Async(servers=1),
        workers=2,
        synthetic=True,
        steps=2,
        batch_size=2,
        quiet=True,
        run_dir=tmp_path,
    )
    assert (result["status"], result["job"], result["synthetic"]) == ("ok", name, True)
    assert result["samples"] == 2 * 2 * 2 and job.target


SMALL_GPT = [
    f"model.{name}"
    for name in ("layers=2", "width=16", "heads=2", "context=12", "vocabulary=256", "dropout=0.0")
]


def test_gpt_has_the_parameters_of_gpt2_and_predicts_from_no_later_token():
    with torch.device("meta"):
        full = load_job(str(JOBS / "gpt.py")).model()
    padding = (50304 - 50257) * 768
    assert sum(one.numel() for one in full.parameters()) == 124_439_808 + padding
    torch.manual_seed(0)
    model, tokens = load_job(str(JOBS / "gpt.py"), SMALL_GPT).model(), torch.randint(256, (1, 12))
    before = model(tokens)
    for place in (0, 5, 11):
        differs = (model(tokens.index_fill(1, torch.tensor(place), 7)) != before).any(dim=2)[0]
        assert not differs[:place].any() and differs[place:].all()


@pytest.mark.parametrize(
    "strategy", [mt.AllReduce(), mt.Sync(), mt.LocalSGD(2), mt.Pipeline(stages=2, microbatches=2)], ids=str
)
def test_gpt_trains_whole_and_split(tmp_path, strategy):
    """It begins as a uniform guess, and a few steps are better than that."""
    tied = f"model.tied={'false' if strategy.splits_model else 'true'}"
    job = load_job(str(JOBS / "gpt.py"), [*SMALL_GPT, tied])
    few = {"text": ((13,), "uint8", 20)}
    job = dataclasses.replace(job, data=mt.Synthetic(128, **few), validate=mt.Synthetic(16, **few), epochs=1)
    found = []
    for steps in (1, 30):
        folder = tmp_path / str(steps)
        result = mt.simulate(job, strategy, workers=2, steps=steps, quiet=True, run_dir=folder)
        found.append(result["metrics"]["validation_loss"])
    assert found[0] == pytest.approx(np.log(256), rel=0.02) and found[1] < found[0] - 0.3


def test_a_pixel_is_predicted_from_those_before_it_and_all_of_them_matter():
    torch.manual_seed(0)
    model, images = runpy.run_path(str(JOBS / "pixelcnn.py"))["model"](), torch.rand(1, 1, 8, 8)
    before = model(images).flatten(2)
    for pixel in (0, 11, 36, 63):
        changed = images.clone()
        changed.view(-1)[pixel] += 0.5
        differs = (model(changed).flatten(2) != before).any(dim=1)[0]
        assert not differs[: pixel + 1].any()
        assert differs[pixel + 1 : pixel + 2].all()  # the next one, where there is one


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (0, "zero", "null"),
        (17, "seventeen", "siebzehn"),
        (90, "ninety", "neunzig"),
        (47, "forty seven", "sieben und vierzig"),
        (100_321, "one hundred thousand three hundred twenty one", "ein hundert tausend drei hundert ein und zwanzig"),
    ],
)  # fmt: skip
def test_numbers_in_words(number, english, german):
    made = runpy.run_path(str(JOBS / "nmt.py"))
    assert (" ".join(made["english"](number)), " ".join(made["german"](number))) == (english, german)


def test_the_longest_number_fits_and_no_two_have_the_same_words(monkeypatch):
    monkeypatch.setenv("NMT_SAMPLES", "3000")
    made = runpy.run_path(str(JOBS / "nmt.py"))
    assert len(made["german"](777_777)) + 1 == made["LENGTH"]
    pairs = made["numbers"]()
    for words in pairs.values():
        assert len(np.unique(words, axis=0)) == 3000
        assert ((words == made["END"]).sum(axis=1) == 1).all()


def test_a_translation_has_the_most_likely_word_after_those_before_it_and_ends_once():
    made = runpy.run_path(str(JOBS / "nmt.py"))
    torch.manual_seed(0)
    model, source = made["Translator"](), torch.randint(2, len(made["ENGLISH"]) + 2, (40, made["LENGTH"]))
    with torch.no_grad():
        model.words.bias[made["END"]] += 0.1  # so that some end early
        found = made["translate"](model, {"source": source})
        likely = made["logits"](model, {"source": source, "target": found}).argmax(dim=2)
    end, behind = made["END"], (found == made["END"]).cumsum(dim=1).cumsum(dim=1) > 1
    assert 0 < (found == end).any(dim=1).sum() < 40
    assert (likely == found)[~behind].all() and (found[behind] == made["PAD"]).all()


def test_independent_pixels_cost_at_least_the_entropy_of_their_counts():
    """Of one pixel with two levels equally often a bit, of the other 63 nothing."""
    made = runpy.run_path(str(JOBS / "pixelcnn.py"))
    x = torch.zeros(8, 1, 8, 8)
    x[:4, 0, 3, 5] = 1.0
    with torch.no_grad():
        found = made["metrics"](made["model"](), {"x": x})
    assert float(found["independent_bits"]) == pytest.approx(1 / 64)
    assert float(found["bits_per_dimension"]) == pytest.approx(4.09, rel=0.1)  # it knows nothing yet


def test_fashion_mnist_is_read_and_framed(tmp_path, monkeypatch):
    images = np.arange(2 * 784, dtype=np.uint32).astype(np.uint8)
    for name, head, data in (("images-idx3", 16, images), ("labels-idx1", 8, np.array([7, 3], np.uint8))):
        packed = gzip.compress(bytes(head) + data.tobytes())
        (tmp_path / f"t10k-{name}-ubyte.gz").write_bytes(packed)
    monkeypatch.setenv("CNN_FASHION", str(tmp_path))
    made = runpy.run_path(str(JOBS / "cnn.py"))["fashion"]()
    assert made["x"].shape == (2, 3, 32, 32) and made["y"].tolist() == [7, 3]
    assert (made["x"][:, :, :2] == -0.5).all()
    assert made["x"][1, 2, 2, 2] == pytest.approx(int(images[784]) / 255 - 0.5, abs=1e-6)


def test_every_kind_of_shape_has_an_area_of_its_own(monkeypatch):
    monkeypatch.setenv("CNN_SAMPLES", "50")
    made = runpy.run_path(str(JOBS / "cnn.py"))
    rows, columns = np.mgrid[-1:1:201j, -1:1:201j]
    areas = {kind: made["mask"](kind, columns, rows) for kind in made["KINDS"]}
    assert len({area.tobytes() for area in areas.values()}) == len(areas)
    assert areas["disc"].mean() == pytest.approx(np.pi / 4, abs=0.01)
    assert areas["diamond"].mean() == pytest.approx(0.5, abs=0.01)
    images = made["shapes"]()
    assert images["x"].shape == (50, 3, 32, 32) and set(images["y"]) == set(range(10))


def test_records_of_cifar_are_read(tmp_path, monkeypatch):
    records = np.arange(2 * 3073, dtype=np.uint32).astype(np.uint8).reshape(2, 3073)
    records.tofile(tmp_path / "data_batch_1.bin")
    monkeypatch.setenv("CNN_CIFAR", str(tmp_path))
    samples = list(runpy.run_path(str(JOBS / "cnn.py"))["cifar"]())
    assert [int(sample["y"]) for sample in samples] == records[:, 0].tolist()
    assert samples[1]["x"][2, 31, 31] == np.float32(records[1, -1]) / 255 - 0.5
