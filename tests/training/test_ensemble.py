"""Several trained models as one: what they answer together by hand, who is chosen, and whether soups are means."""

import json
import shutil
from pathlib import Path

import h5py
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.cli.main import main
from mpitrain.errors import UsageError
from mpitrain.reporting.targets import Choice
from mpitrain.training.ensembles.combine import combine, find_class_dim
from mpitrain.training.ensembles.members import choose_members
from mpitrain.training.ensembles.soups import greedy, mean_of
from tests import toy
from tests.ranks import find_mpi, run_ranks

JOB = """
import torch
from torch import nn
import mpitrain as mt
from tests import toy

shape = mt.Options("model", hidden=6, norm=False)

def model():
    layers = [nn.Linear(5, shape.hidden), nn.Tanh(), nn.Dropout(0.5), nn.Linear(shape.hidden, 3)]
    return nn.Sequential(*([nn.BatchNorm1d(5)] if shape.norm else []), *layers)

def classes(batch):
    return (batch["y"].squeeze(1) > -0.5).long() + (batch["y"].squeeze(1) > 0.5).long()

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), classes(batch))

def metrics(model, batch):
    return {"accuracy": (model(batch["x"]).argmax(1) == classes(batch)).float().mean()}

job = mt.Job(
    model=model, loss=loss, metrics=metrics, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2),
    data=toy.Memory(), validate=toy.Memory(29), test=toy.Memory(17), batch_size=8,
    predict=lambda model, batch: model(batch["x"]).softmax(1),
)
"""
RUNS = {
    "a": ["--seed", "1"], "b": ["--seed", "2", "--epochs", "3"], "c": ["--seed", "3"],
    "wide": ["--set", "model.hidden=9"], "normed": ["--set", "model.norm=true"],
    "renormed": ["--set", "model.norm=true", "--seed", "5"],
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ensemble")
    (folder / "job.py").write_text(JOB)
    for name, words in RUNS.items():
        run = ["simulate", str(folder / "job.py"), "--strategy", "sync()", "--workers", "2", "--quiet"]
        assert main([*run, "--run-dir", str(folder / name), *words]) == 0
        options = dict(word.split("=") for word in words if "=" in word)
        started = {
            "job_file": str(folder / "job.py"),
            "options": {key: json.loads(one) for key, one in options.items()},
        }
        (folder / name / "run.json").write_text(json.dumps(started))  # as a run on a cluster leaves it
    return folder


def dirs(made, names):
    return [str(made / name) for name in names.split()]


def data():
    batch = toy.MemoryReader(toy.Memory(29))
    y = batch.y.squeeze(1)
    return batch.x, (y > -0.5).long() + (y > 0.5).long()


def figures(probabilities, target):
    loss = -probabilities.gather(1, target[:, None]).log().mean()
    return {
        "validation_loss": float(loss),
        "accuracy": float((probabilities.argmax(1) == target).double().mean()),
    }


@torch.no_grad()
def by_hand(made, names, weights):
    """The mean of the members' probabilities, in float64."""
    x, _ = data()
    found = [mt.load(made / name).double()(x.double()).softmax(1) for name in names.split()]
    return sum(weight * one for weight, one in zip(weights, found, strict=True)) / sum(weights)


@torch.no_grad()
def by_hand_of(made, names, x):
    """The same of other samples, with equal weights."""
    found = [mt.load(made / name).double()(x.double()).softmax(1) for name in names.split()]
    return sum(found) / len(found)


def test_probabilities_are_averaged_and_figures_are_those_of_the_mean(made, tmp_path):
    done = mt.ensemble(dirs(made, "a b wide"), tmp_path / "e", weights=[3, 1, 4])
    expected = by_hand(made, "a b wide", [3, 1, 4])
    x, target = data()
    assert done.combine == "probabilities" and done.class_dim == 1 and done.num_samples == 29
    assert done.metrics == pytest.approx(figures(expected, target), abs=1e-6)
    for one in done.members:
        assert one.metrics == pytest.approx(figures(by_hand(made, one.name, [1]), target), abs=1e-6)
    assert [one.weight for one in done.members] == [0.375, 0.125, 0.5]
    best = max(done.members, key=lambda one: one.metrics["accuracy"])
    assert done.best == best.name
    assert done.is_better["accuracy"] == (done.metrics["accuracy"] > best.metrics["accuracy"])
    assert done.is_better["validation_loss"] == (
        done.metrics["validation_loss"] < best.metrics["validation_loss"]
    )
    loaded = mt.load(tmp_path / "e")
    with torch.no_grad():
        assert torch.allclose(loaded(x).exp(), expected.float(), atol=1e-6)
    assert json.loads((tmp_path / "e" / "ensemble.json").read_text())["metrics"] == done.metrics


def test_what_was_saved_needs_no_runs_and_is_predicted_and_exported(made, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(made / name, tmp_path / name)
    mt.ensemble([tmp_path / "a", tmp_path / "b"], tmp_path / "e")
    for name in ("a", "b"):
        shutil.rmtree(tmp_path / name)
    mt.predict(tmp_path / "e", toy.Memory(29), tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        found = torch.from_numpy(file["prediction"][:])
    assert torch.allclose(found, by_hand(made, "a b", [1, 1]).float(), atol=1e-6)
    done = mt.export(tmp_path / "e", tmp_path / "e.pt2", form="fp16")
    assert done.file_bytes[0] == sum(
        one.stat().st_size for one in tmp_path.glob("e/member-*/model.safetensors")
    )
    program, (x, _) = torch.export.load(str(done.path)).module(), data()
    assert torch.allclose(program(x[:4]).exp(), found[:4], atol=2e-3)


def test_the_best_model_of_each_run_is_taken_where_that_is_asked_for(made, tmp_path):
    """A run's best model stands beside its last one, with other weights."""
    for name in "ab":
        shutil.copytree(made / name, tmp_path / name)
        shutil.copyfile(made / "c" / "model.safetensors", tmp_path / name / "model-best.safetensors")
    done = mt.ensemble([tmp_path / "a", tmp_path / "b"], tmp_path / "e", which="best")
    x, target = data()
    assert done.metrics == pytest.approx(figures(by_hand(made, "c", [1]), target), abs=1e-6)
    with torch.no_grad():
        assert torch.allclose(mt.load(tmp_path / "e")(x), mt.load(made / "c")(x).log_softmax(1), atol=1e-6)


LOGITS = torch.tensor([[[9.0, 0, 0]], [[0, 1.0, 0]], [[0, 1.0, 0]], [[0.0, 0, 3]]])


def test_votes_go_by_members_and_ties_by_probability():
    three = list(LOGITS[:3])
    assert combine(three, [1 / 3] * 3, "probabilities", 1).argmax() == 0
    assert combine(three, [1 / 3] * 3, "votes", 1).argmax() == 1
    assert combine(three, [0.6, 0.2, 0.2], "votes", 1).argmax() == 0
    tie = combine([LOGITS[0], LOGITS[1]], [0.5, 0.5], "votes", -1)
    assert tie.argmax() == 0 and float(tie.exp().sum()) == pytest.approx(1)
    apart = combine([LOGITS[0].T, LOGITS[1].T], [0.5, 0.5], "votes", 0)
    assert torch.equal(apart.T, tie)


def test_outputs_are_averaged_leaf_by_leaf():
    answers = [
        {"x": torch.ones(2), "y": (torch.zeros(1),)},
        {"x": torch.full((2,), 3.0), "y": (torch.ones(1),)},
    ]
    found = combine(answers, [0.25, 0.75], "outputs", None)
    assert found["x"].tolist() == [2.5, 2.5] and found["y"][0].tolist() == [0.75]
    with pytest.raises(UsageError, match=r"member 1 returns \(3,\) and member 0 \(2,\)"):
        combine([torch.ones(2), torch.ones(3)], [0.5, 0.5], "outputs", None)
    with pytest.raises(UsageError, match="which have no mean"):
        combine([torch.ones(2).long()] * 2, [0.5, 0.5], "outputs", None)


CLASS_DIMS = {
    "cross-entropy": (lambda answer, y: nn.functional.cross_entropy(answer, y[:, 0, 0] % 4), (4,), 1),
    "of a sequence": (
        lambda answer, y: nn.functional.cross_entropy(answer.flatten(0, 1), y[:, :, 0].flatten() % 4), (3, 4), 2,
    ),
    "of a picture": (lambda answer, y: nn.functional.cross_entropy(answer, y % 4), (4, 3, 2), 1),
    "squares": (lambda answer, y: (answer - y[:, :, 0]).square().mean(), (3,), None),
    "yes or no": (
        lambda answer, y: nn.functional.binary_cross_entropy_with_logits(answer, (y[:, :, 0] > 1).float()), (3,), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("function", "shape", "dim"), CLASS_DIMS.values(), ids=CLASS_DIMS)
def test_the_loss_shows_which_dimension_holds_classes(function, shape, dim):
    torch.manual_seed(0)
    size = torch.Size(shape).numel()
    module = nn.Sequential(nn.Linear(5, size), nn.Unflatten(1, shape))
    batch = {"x": torch.randn(6, 5), "y": torch.randint(0, 8, (6, 3, 2))}
    job = toy.make_job(loss=lambda model, batch: function(model(batch["x"]), batch["y"]))
    assert find_class_dim(job, module, batch) == dim


def results(folder, **values):
    for name, result in values.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "result.json").write_text(json.dumps(result))
    return [folder]


def of(accuracy, **more):
    return {
        "status": "ok",
        "exit_code": 0,
        "metrics": {"accuracy": accuracy, "validation_loss": 1 - accuracy},
        **more,
    }


def chosen(folders, top=None, by=None, which="last"):
    return [run.name for run in choose_members(folders, top, by, which).runs]


def test_the_best_are_chosen_of_a_directory_and_the_named_are_all_taken(tmp_path):
    sweep = results(
        tmp_path / "s", p=of(0.5), q=of(0.9), r=of(0.7), s=of(0.8, best={"metric": "accuracy", "value": 0.99}),
        gone=of(1.0) | {"exit_code": 1, "failure": "why"}, nan=of(float("nan")), under_way={"exit_code": 75},
    )  # fmt: skip
    assert chosen(sweep) == ["q", "s", "r"]
    assert chosen(sweep, which="best", by=Choice("accuracy", False))[0] == "s"
    assert chosen(sweep, 2, Choice("validation_loss", False)) == ["p", "r"]
    found = choose_members(sweep, None, None, "last").passed_over
    assert found["gone"] == "it has failed: why" and found["under_way"] == "it is not finished"
    assert "no accuracy" in found["nan"]
    named = [tmp_path / "s" / name for name in "prqs"]
    assert chosen(named) == list("prqs") and chosen(named, 2) == ["q", "s"]
    with pytest.raises(UsageError, match="run .*/s/p is named twice"):
        chosen([named[0], named[0]])
    with pytest.raises(UsageError, match="and there is 1"):
        chosen(named[:1])


def test_a_setting_is_chosen_with_all_of_its_runs_and_by_their_mean(tmp_path):
    """Run b1 is the best of all, and its setting is the worst."""
    values = {"a": (0.6, 0.7), "b": (0.95, 0.1), "c": (0.8, 0.9), "d": (0.5, 0.7)}
    for name, two in values.items():
        for seed, value in enumerate(two):
            results(tmp_path / "s", **{f"{name}{seed + 1}": of(value, seed=seed, options={"m.x": name})})
    assert chosen([tmp_path / "s"], 2) == ["c1", "c2", "a1", "a2"]
    assert chosen([tmp_path / "s"]) == ["c1", "c2", "a1", "a2", "d1", "d2"]
    found = {"exit_code": 0, "metrics": {}, "seed": 7, "options": {"m.x": "c"}}
    results(tmp_path / "s", c3=found)
    made = choose_members([tmp_path / "s"], 2, None, "last")
    assert [run.name for run in made.runs] == ["a1", "a2", "d1", "d2"]
    assert made.passed_over["c1"] == "another run of its setting has no accuracy"
    for name, on in (("e", "elsewhere"), ("f", "here")):
        results(tmp_path / "s", **{name: of(0.99, seed=0, options={"m.x": name}, measured_on=on)})
    with pytest.raises(UsageError, match="different sets of validation data"):
        chosen([tmp_path / "s"], 2)


def test_what_was_chosen_is_measured_on_a_part_that_nothing_was_chosen_by(made, tmp_path, capsys):
    """The figures are those of the first 17 samples by hand; nothing of them stands in a run's result."""
    assert "accuracy" not in json.dumps(json.loads((made / "a" / "result.json").read_text())["held_out"])
    x, target = (one[:17] for one in data())
    by_run = [figures(by_hand_of(made, name, x), target) for name in "abc"]
    assert main(["runs", "best", *dirs(made, "a c"), "--metric", "accuracy", "--over-seeds"]) == 0
    out, err = capsys.readouterr()
    assert out.split() == dirs(made, "a c")
    two = [by_run[0]["accuracy"], by_run[2]["accuracy"]]
    assert f"held out: accuracy {sum(two) / 2:.6g}" in err
    together = figures(by_hand_of(made, "a b c", x), target)
    words = ["ensemble", *dirs(made, "a b c"), "-o", str(tmp_path / "e"), "--json", str(tmp_path / "j.json")]
    assert main(words) == 0
    held = json.loads((tmp_path / "j.json").read_text())["held_out"]
    best = next(name for name in held if name != "ensemble")
    assert held["ensemble"] == pytest.approx(together, rel=1e-5)
    assert held[best] == pytest.approx(by_run["abc".index(best)], rel=1e-5)
    assert "held out: ensemble: " in capsys.readouterr().out
    with mt.ShardWriter(tmp_path / "shards") as writer:
        writer.add({"x": x[:9].numpy(), "y": x[:9].sum(1, keepdim=True).numpy()})
    shards = str(tmp_path / "shards" / "*.h5")
    assert main(["runs", "best", *dirs(made, "b"), "--metric", "accuracy", "--test", shards]) == 0
    nine = figures(by_hand_of(made, "b", x[:9]), target[:9])
    assert f"held out: accuracy {nine['accuracy']:.6g}" in capsys.readouterr().err
    assert main(["runs", "best", *dirs(made, "b"), "--test", str(tmp_path / "none-*.h5")]) == 2


def test_a_held_out_part_is_no_part_of_what_is_trained_on(tmp_path, capsys):
    with mt.ShardWriter(tmp_path / "shards") as writer:
        writer.add({"x": torch.zeros(20, 5).numpy(), "y": torch.zeros(20, 1).numpy()})
    shards = tmp_path / "shards"
    (tmp_path / "job.py").write_text(
        JOB.replace("data=toy.Memory()", f"data=mt.Shards({str(shards / '*.h5')!r})")
    )
    run = [
        "simulate",
        str(tmp_path / "job.py"),
        "--workers",
        "2",
        "--run-dir",
        str(tmp_path / "r"),
        "--quiet",
    ]
    assert main([*run, "--test", str(shards / "*.h5")]) == 2
    assert "is in data=, too" in capsys.readouterr().err
    shutil.copytree(shards, tmp_path / "others")
    assert main([*run, "--test", str(tmp_path / "others" / "*.h5")]) == 0
    held = json.loads((tmp_path / "r" / "result.json").read_text())["held_out"]
    assert held["pattern"] == str(tmp_path / "others" / "*.h5")


def test_a_uniform_soup_has_the_mean_of_the_weights(made, tmp_path):
    done = mt.ensemble(dirs(made, "a b c"), tmp_path / "soup", soup="uniform", weights=[1, 1, 2])
    files = [load_file(made / name / "model.safetensors") for name in "abc"]
    for name, found in load_file(tmp_path / "soup" / "model.safetensors").items():
        expected = (files[0][name].double() + files[1][name].double() + 2 * files[2][name].double()) / 4
        assert torch.equal(found, expected.float()), name
    x, target = data()
    with torch.no_grad():
        answer = mt.load(tmp_path / "soup")(x).softmax(1)
    assert done.metrics == pytest.approx(figures(answer, target), abs=1e-6)
    assert json.loads((tmp_path / "soup" / "soup.json").read_text())["kind"] == "uniform soup"


def test_a_soup_measures_the_statistics_of_its_batch_norms_anew(made, tmp_path):
    mt.ensemble(dirs(made, "normed renormed"), tmp_path / "soup", soup="uniform")
    found, x = load_file(tmp_path / "soup" / "model.safetensors"), toy.MemoryReader(toy.Memory()).x
    assert torch.allclose(found["0.running_mean"], x.mean(0), atol=1e-6)
    assert torch.allclose(found["0.running_var"], x.var(0), atol=1e-6)


def line(value):
    layer = nn.Linear(1, 1)
    with torch.no_grad():
        layer.weight.fill_(value)
    return layer


def test_a_greedy_soup_takes_in_what_makes_it_no_worse():
    """The metric is how far the weight is from 1: 0.8 and 1.1 are better together, and 3 spoils it."""
    job = toy.make_job()
    ranked = [("a", line(1.1), 0.1), ("b", line(0.8), 0.2), ("c", line(3.0), 2.0), ("d", line(1.25), 0.25)]
    made, used = greedy(
        job, ranked, Choice("off", True), lambda module: {"off": abs(float(module.weight.detach()) - 1)}
    )
    assert used == ["a", "b", "d"]
    assert float(made.weight.detach()) == pytest.approx((1.1 + 0.8 + 1.25) / 3)
    assert float(mean_of(job, [line(1.0), line(4.0)], [2, 1]).weight.detach()) == 2.0


REFUSED = {
    "a wide --soup uniform": "architectures of a and wide do not agree: 0.weight is (6, 5) float32 in a and (9, 5)",
    "a b --soup uniform --combine votes": "leave out --combine",
    "a b --soup greedy --weights 1,2": "leave out --weights, or take --soup uniform",
    "a b --soup melted": "soup='melted'",
    "a b --combine vote": "did you mean 'votes'",
    "a b --weights 1,2,3": "3 weights for 2 members",
    "a b --weights=-1,2": "not negative",
    "a b --by accurate": "it reports accuracy, validation_loss",
    "a b --which best": "has kept no best model",
    "a nothing": "there is no directory",
    "a a": "named twice",
}


@pytest.mark.parametrize(("words", "said"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_made_is_said_and_leaves_nothing(made, tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(made)
    assert main(["ensemble", *words.split(), "-o", str(tmp_path / "e")]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_prints_members_beside_the_whole_in_80_columns(made, tmp_path, capsys):
    words = ["ensemble", *dirs(made, "a b c"), "-o", str(tmp_path / "e"), "--json", str(tmp_path / "f.json")]
    assert main([*words[:4], "-o", str(tmp_path / "f" / "g" / "h")]) == 0  # with those above it
    shutil.rmtree(tmp_path / "f")
    capsys.readouterr()
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()
    record = json.loads((tmp_path / "f.json").read_text())
    assert all(len(line) <= 80 for line in said[:-1])
    assert said[0] == "ensemble of 3: mean of probabilities; 29 samples"
    heads, rows = said[2].split()[1:], list(map(str.split, said[3:7]))
    together = dict(zip(heads, map(float, said[6].split()[1:]), strict=True))
    assert together == pytest.approx(record["metrics"], rel=1e-5)
    starred = next(row[1] for row in rows if row[0] == "*")
    assert starred == record["best"]
    beats = {"True": "it beats", "False": "its best member"}[str(record["is_better"]["accuracy"])]
    assert beats in said[-4] and said[-3].startswith("held out: ensemble: accuracy ")
    assert main(words) == 2 and "--overwrite to replace it" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--combine", "votes"]) == 0
    assert main(["ensemble", *dirs(made, "a"), str(tmp_path / "e"), "-o", str(tmp_path / "g")]) == 2
    assert "is an ensemble: name its members' runs" in capsys.readouterr().err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["e", "f.json"]
    (tmp_path / "mine").mkdir()
    assert main([*words[:4], "-o", str(tmp_path / "mine"), "--overwrite"]) == 2
    assert "exists and holds no ensemble" in capsys.readouterr().err


def test_a_damaged_ensemble_is_not_loaded(made, tmp_path):
    mt.ensemble(dirs(made, "a b"), tmp_path / "e")
    path = Path(tmp_path / "e" / "ensemble.json")
    with pytest.raises(UsageError, match="is an ensemble, which has one model"):
        mt.load(tmp_path / "e", which="best")
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"schema": 9}))
    with pytest.raises(UsageError, match="has schema 9"):
        mt.load(tmp_path / "e")
    path.write_text(json.dumps(whole | {"combine": "magic"}))
    with pytest.raises(UsageError, match="is damaged"):
        mt.load(tmp_path / "e")


RANKS = """
import sys
import mpitrain as mt
from mpitrain.cli.main import main
from mpitrain.mpi.runtime import start

for number, runs in enumerate((sys.argv[2:6], sys.argv[2:4])):
    done = mt.ensemble(runs, f"{sys.argv[1]}/by-ranks-{number}", ranks=start())
    assert [one.rank for one in done.members] == [i % 3 for i in range(len(runs))]
sys.exit(main(["ensemble", sys.argv[2], f"{sys.argv[1]}/no-run", "-o", f"{sys.argv[1]}/no"]))
"""


def test_ranks_divide_the_members_and_change_no_bit(made, tmp_path):
    """Four members on three ranks, then two, so that a rank has none; a run that is none is refused once."""
    names = dirs(made, "a b c wide")
    (tmp_path / "no-run").mkdir()
    (tmp_path / "ranks.py").write_text(RANKS)
    python = str(find_mpi()[0])
    refused = run_ranks(3, [python, str(tmp_path / "ranks.py"), str(tmp_path), *names])
    assert refused.code == 2 and refused.stderr.count("holds no run") == 1, refused
    assert not (tmp_path / "no").exists()
    for number, runs in enumerate((names, names[:2])):
        alone = mt.ensemble(runs, tmp_path / f"alone-{number}")
        record = json.loads((tmp_path / f"by-ranks-{number}" / "ensemble.json").read_text())
        assert record["metrics"] == alone.metrics
        assert [one["metrics"] for one in record["members"]] == [one.metrics for one in alone.members]
