"""Jobs with several optimizers whose workers step by themselves: in virtual time and in threads, beside torch's own
loops."""

import copy
import functools
import json
import threading

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.errors import AgreedError, UsageError
from mpitrain.model.recipe import seed_step
from mpitrain.values import parse
from tests import toy
from tests.mpi import gan

SINGLE = ["localsgd(period=2)", 'async(optimizer="worker")', 'sync(optimizer="worker", servers=2)']


def trained(path, job, text, workers, **options):
    strategy = parse(text, "strategy")
    mt.simulate(job, strategy, workers=workers, run_dir=str(path), quiet=True, **options)
    return load_file(path / "model.safetensors")


def assert_close(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize(("text", "num_workers"), [("sync()", 1), ("sync()", 3), ("sync(servers=3)", 3)])
def test_servers_take_every_step_of_a_batch_with_the_mean_of_all_workers(
    text, num_workers, clip_norm, tmp_path
):
    """The last batch of an epoch is an incomplete one. With one worker to the bit."""
    job = gan.make_job(batch_size=gan.BATCH // num_workers, clip_norm=clip_norm, ema=0.5)
    found, expected = trained(tmp_path, job, text, num_workers), gan.serial(clip_norm)
    assert_close(found, expected)
    if num_workers == 1:
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["samples"] for row in rows if row["event"] == "end"] == [gan.EPOCHS * gan.SAMPLES]


def test_the_average_of_the_weights_follows_whole_batches(tmp_path):
    def once(model, optimizers, batch):  # the mean of both steps would be another average
        return gan.step(model, optimizers, batch)

    trained(tmp_path, gan.make_job(step=once, ema=0.5), "sync()", 1)
    expected, averaged = None, load_file(tmp_path / "model-ema.safetensors")
    torch.manual_seed(0)
    model, reader, number = gan.networks(), gan.DATA.reader(None, 0), 0
    optimizers = {
        "generator": gan.OPTIMIZERS["generator"](model["generator"].parameters()),
        "discriminator": gan.OPTIMIZERS["discriminator"](model["discriminator"].named_parameters()),
    }
    for epoch in range(gan.EPOCHS):
        for start in range(0, gan.SAMPLES, gan.BATCH):
            seed_step(0, 0, number)
            gan.step(model, optimizers, reader.batch(epoch, start, min(gan.BATCH, gan.SAMPLES - start)))
            now = {name: one.detach().clone() for name, one in model.state_dict().items()}
            expected = now if expected is None else {n: (expected[n] + now[n]) / 2 for n in now}
            number += 1
    assert_close(averaged, expected)


class Hooked(torch.optim.SGD):
    elementwise = True

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.register_step_pre_hook(lambda *_: None)


def slowing(model, optimizers, batch):
    optimizers["generator"].param_groups[0]["lr"] *= 0.5
    return gan.step(model, optimizers, batch)


def by_turns_of_their_own(model, optimizers, batch):
    """Which optimizer steps goes by the worker's own batch."""
    losses = gan.step(model, {name: Deaf(one) for name, one in optimizers.items()}, batch)
    optimizers["generator" if is_first(batch) else "discriminator"].step()
    return losses


def leaving_one_out(model, optimizers, batch):
    deaf = {"generator": Deaf(optimizers["generator"]), "discriminator": optimizers["discriminator"]}
    losses = gan.step(model, deaf, batch)
    if is_first(batch):
        optimizers["generator"].step()
    return losses


class Deaf:
    """Steps nothing."""

    def __init__(self, optimizer):
        self.zero_grad, self.step = optimizer.zero_grad, lambda: None


def is_first(batch):
    first = gan.DATA.reader(None, 0).batch(0, 0, gan.SAMPLES)["x"]
    return bool((batch["x"][0] == first[: gan.BATCH]).all(1).any())


def looked_up():
    model = gan.networks()
    model["generator"].append(torch.nn.Embedding(5, 2, sparse=True))
    return model


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": {**gan.OPTIMIZERS, "generator": Hooked}}, "'generator' has step hooks.*optimizer=\"worker\""),
        ({"step": slowing}, "changes options of an optimizer whose steps servers take.*scheduler="),
        ({"on_nonfinite": "skip"}, "others wait for it in the middle of a batch"),
        ({"step": by_turns_of_their_own}, r"steps '\w+' on one worker where it steps '\w+' on another"),
        ({"step": leaving_one_out}, r"on one worker where it (ends|steps 'generator') on another"),
        ({"model": looked_up}, "sparse=True.: the gradients of a step function"),
    ],
)  # fmt: skip
def test_what_a_server_could_not_follow_is_refused(changes, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        trained(tmp_path, gan.make_job(**changes), "sync()", 2)


def test_a_run_that_ends_in_the_middle_of_a_batch_leaves_no_thread(tmp_path):
    before = threading.active_count()
    result = mt.simulate(gan.make_job(step=poisoned), mt.Sync(), workers=2, run_dir=str(tmp_path), quiet=True)
    assert result["status"] == "fail" and "the gradient is not finite" in result["failure"]
    assert threading.active_count() == before


def test_a_function_that_fails_in_its_middle_fails_the_run(tmp_path):
    def failing(model, optimizers, batch):
        gan.step(model, optimizers, batch)
        raise OverflowError("in the middle")

    with pytest.raises(OverflowError, match="in the middle"):
        trained(tmp_path, gan.make_job(step=failing), "sync()", 2)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("text", SINGLE)
def test_one_worker_takes_the_steps_of_torchs_own_loop(text, clip_norm, tmp_path):
    found, expected = trained(tmp_path, gan.make_job(clip_norm=clip_norm), text, 1), gan.serial(clip_norm)
    if text.startswith("localsgd"):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert_close(found, expected)  # servers add what has been subtracted


def by_hand(num_workers, size, samples=24):
    """The mean of workers that each step by themselves on their share of every batch, as torch does it."""
    torch.manual_seed(0)
    first = gan.networks()
    workers = [copy.deepcopy(first) for _ in range(num_workers)]
    optimizers = [
        {
            "generator": gan.OPTIMIZERS["generator"](model["generator"].parameters()),
            "discriminator": gan.OPTIMIZERS["discriminator"](model["discriminator"].named_parameters()),
        }
        for model in workers
    ]
    reader = toy.Memory(samples).reader(None, 0)
    for epoch in range(gan.EPOCHS):
        for start in range(0, samples, num_workers * size):
            for rank, (model, own) in enumerate(zip(workers, optimizers, strict=True)):
                gan.step(model, own, reader.batch(epoch, start + rank * size, size))
            with torch.no_grad():
                for held in zip(*(model.parameters() for model in workers), strict=True):
                    mean = torch.stack([one.detach() for one in held]).mean(0)
                    for one in held:
                        one.copy_(mean)
    return workers[0].state_dict()


@pytest.mark.parametrize("text", ["localsgd(period=1)", 'sync(optimizer="worker")'])
def test_workers_that_meet_after_every_batch_hold_the_mean_of_their_steps(text, tmp_path):
    job = gan.make_job(batch_size=4, data=toy.Memory(24))
    assert_close(trained(tmp_path, job, text, 3), by_hand(3, 4), 1e-11)


def accumulated(num_parts, size, num_ranks=1):
    """torch's own loop with gradients that are added up by hand before each optimizer steps; a part is that of all
    ranks."""
    torch.manual_seed(0)
    model = gan.networks()
    optimizers = {
        "generator": gan.OPTIMIZERS["generator"](model["generator"].parameters()),
        "discriminator": gan.OPTIMIZERS["discriminator"](model["discriminator"].named_parameters()),
    }

    class Adds:
        def __init__(self, name):
            self.own, self.sums = optimizers[name], None
            self.parameters = [one for group in self.own.param_groups for one in group["params"]]

        def zero_grad(self):
            self.own.zero_grad()

        def step(self):
            parts = [one.grad / num_parts for one in self.parameters]
            self.sums = parts if self.sums is None else [a + b for a, b in zip(self.sums, parts, strict=True)]
            if self.last:
                for one, total in zip(self.parameters, self.sums, strict=True):
                    one.grad = total
                self.own.step()
                self.sums = None

    adding = {name: Adds(name) for name in optimizers}
    reader = toy.Memory(24).reader(None, 0)
    for epoch in range(gan.EPOCHS):
        for start in range(0, 24, num_ranks * num_parts * size):
            for part in range(num_parts):
                for one in adding.values():
                    one.last = part == num_parts - 1
                firsts = [start + (rank * num_parts + part) * size for rank in range(num_ranks)]
                batches = [reader.batch(epoch, first, size) for first in firsts]
                gan.step(model, adding, {"x": torch.cat([batch["x"] for batch in batches])})
    return model.state_dict()


@pytest.mark.parametrize("text", ["localsgd()", 'async(optimizer="worker")', "sync()"])
def test_a_step_of_several_batches_steps_with_their_mean(text, tmp_path):
    job = gan.make_job(batch_size=4, accumulate=3, data=toy.Memory(24))
    found = trained(tmp_path, job, text, 1)
    assert_close(found, accumulated(3, 4))
    assert_close(
        trained(tmp_path / "b", gan.make_job(batch_size=12, data=toy.Memory(24)), text, 1), accumulated(1, 12)
    )


def in_float32():
    return gan.networks().float()


def float_step(model, optimizers, batch):
    return gan.step(model, optimizers, {"x": batch["x"].float()})


@pytest.mark.parametrize("text", ["localsgd()", 'async(optimizer="worker")', "sync()"])
def test_bfloat16_is_autocast_around_the_whole_function(text, tmp_path, monkeypatch):
    monkeypatch.setattr(gan, "real_of", lambda batch: batch["x"][:, 3:])
    monkeypatch.setattr(gan, "noise_of", lambda batch: batch["x"][:, :3])
    job = gan.make_job(model=in_float32, step=float_step, precision="bfloat16", data=toy.Memory(24))
    found = trained(tmp_path, job, text, 1)
    plain = trained(
        tmp_path / "plain", gan.make_job(model=in_float32, step=float_step, data=toy.Memory(24)), text, 1
    )
    torch.manual_seed(0)
    model, reader, number = in_float32(), toy.Memory(24).reader(None, 0), 0
    optimizers = {
        "generator": gan.OPTIMIZERS["generator"](model["generator"].parameters()),
        "discriminator": gan.OPTIMIZERS["discriminator"](model["discriminator"].named_parameters()),
    }
    for epoch in range(gan.EPOCHS):
        for start in range(0, 24, gan.BATCH):
            seed_step(0, 0, number)
            with torch.autocast("cpu", torch.bfloat16):
                float_step(model, optimizers, reader.batch(epoch, start, gan.BATCH))
            number += 1
    assert_close(found, model.state_dict(), 1e-6)
    assert any(not torch.equal(found[name], plain[name]) for name in found)


@pytest.mark.parametrize("text", ["localsgd(period=1)", 'sync(optimizer="worker")', "sync(servers=2)"])
def test_threads_train_the_same_and_a_resumed_run_goes_on(text, tmp_path):
    run = functools.partial(mt.train, strategy=parse(text, "strategy"), threads=2, quiet=True)
    make = functools.partial(gan.make_job, batch_size=6, data=toy.Memory(24), checkpoint_every="1")
    run(make(epochs=2), run_dir=str(tmp_path / "whole"))
    run(make(epochs=1), run_dir=str(tmp_path / "cut"))
    run(make(epochs=2), run_dir=str(tmp_path / "cut"), resume="auto")
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert_close(cut, whole)
    assert_close(trained(tmp_path / "virtual", make(epochs=2), text, 2), whole)


def poisoned(model, optimizers, batch):
    losses = gan.step(model, optimizers, batch)
    optimizers["generator"].zero_grad()
    (model["generator"](gan.noise_of(batch)).sum() * float("nan")).backward()
    optimizers["generator"].step()
    return losses


def test_a_step_that_is_not_finite_moves_nothing_where_it_is_skipped(tmp_path):
    job = gan.make_job(step=poisoned, on_nonfinite="skip", data=toy.Memory(24))
    found = trained(tmp_path, job, 'async(optimizer="worker")', 1)
    torch.manual_seed(0)
    assert_close(found, gan.networks().state_dict(), 0)


def test_what_steps_by_turns_with_some_batches_only_is_told(tmp_path):
    count = iter(range(99))

    def uneven(model, optimizers, batch):
        losses = gan.step(model, optimizers, batch)
        if next(count) % 2 == 0:
            optimizers["generator"].step()
        return losses

    with pytest.raises(
        UsageError, match="has stepped 'generator' with one batch of a step and not with the last one"
    ):
        trained(tmp_path, gan.make_job(step=uneven, accumulate=2), "localsgd()", 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("async()", "to servers a batch is one gradient, but under sync"),
        ("hybrid()", "to servers a batch is one gradient, but under sync"), ("sharded()", "here a batch is one"),
        ("decentralized()", "here a batch is one gradient; use allreduce"), ("localsgd(start=3)", "leave start out"),
    ],
)  # fmt: skip
def test_what_cannot_take_several_steps_in_a_batch_is_refused(text, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        trained(tmp_path, gan.make_job(), text, 2)
    with pytest.raises(
        (UsageError, AgreedError), match="one random generator|one gradient|leave start out|cuts one model"
    ):
        mt.train(gan.make_job(), parse(text, "strategy"), threads=2, run_dir=str(tmp_path), quiet=True)
    with pytest.raises(UsageError, match="float16.*takes backward itself"):
        gan.make_job(precision="float16")
