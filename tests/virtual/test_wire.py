"""16 bits on the wire: gradients and parameters are rounded where they travel, and nowhere else."""

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.model.recipe import seed_step
from tests import toy

ROUND = {"full": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def serial_with_rounding(job, push, reply):
    """One process that rounds as the wire does: the parameters on their way out, the gradient on its way back."""
    torch.manual_seed(job.seed)
    module, reader, step = job.model(), job.data.reader(None, 0), 0
    master = [parameter.detach().clone().requires_grad_() for parameter in module.parameters()]
    optimizer = job.optimizer(master)
    for epoch in range(job.epochs):
        for start in range(0, 48, 6):
            with torch.no_grad():
                for parameter, full in zip(module.parameters(), master, strict=True):
                    parameter.copy_(full.to(ROUND[reply]).float())
            seed_step(0, 0, step)
            module.zero_grad(set_to_none=True)
            job.loss(module, reader.batch(epoch, start, 6)).backward()
            for full, parameter in zip(master, module.parameters(), strict=True):
                full.grad = parameter.grad.to(ROUND[push]).float()
            optimizer.step()
            step += 1
    return dict(zip(module.state_dict(), (full.detach() for full in master), strict=True))


@pytest.mark.parametrize(
    ("push", "reply"),
    [("bfloat16", "full"), ("float16", "float16"), ("full", "bfloat16"), ("bfloat16", "bfloat16")],
)
def test_one_worker_is_serial_training_with_rounding_bit_for_bit(tmp_path, push, reply):
    job = toy.make_job(optimizer=toy.adam)
    strategy = mt.Async(push_wire=push, reply_wire=reply)
    result = mt.simulate(job, strategy, workers=1, run_dir=str(tmp_path / "16"), quiet=True)
    expected, trained = serial_with_rounding(job, push, reply), load_file(result["model"])
    for name, tensor in expected.items():
        assert torch.equal(trained[name], tensor), name
    full = mt.simulate(job, mt.Async(), workers=1, run_dir=str(tmp_path / "32"), quiet=True)
    assert not torch.equal(load_file(full["model"])["0.weight"], trained["0.weight"])


def test_bytes_are_halved_where_they_should_be(tmp_path):
    job = toy.make_job(model=lambda: torch.nn.Linear(5, 400), loss=lambda m, b: m(b["x"]).square().mean())
    sizes = {}
    for push, reply in (("full", "full"), ("bfloat16", "full"), ("full", "float16")):
        run_dir = str(tmp_path / f"{push}-{reply}")
        strategy = mt.Async(push_wire=push, reply_wire=reply)
        result = mt.simulate(job, strategy, workers=3, run_dir=run_dir, quiet=True)
        sizes[push, reply] = (result["pushed_bytes"], result["replied_bytes"])
    pads = 128
    numbers = 5 * 400 + 400
    wire_buffer = {"full": numbers * 4, "half": numbers * 2}
    assert sizes["full", "full"][0] == 16 * (-(-wire_buffer["full"] // 64) * 64 + pads)
    assert sizes["bfloat16", "full"][0] == 16 * (-(-wire_buffer["half"] // 64) * 64 + pads)
    assert sizes["bfloat16", "full"][1] == sizes["full", "full"][1] > sizes["full", "float16"][1]


def test_a_gradient_that_overflows_16_bits_is_refused_not_applied(tmp_path):
    job = toy.make_job(loss=lambda m, b: toy.square_loss(m, b) * 1e6)
    strategy = mt.Async(push_wire="float16")
    result = mt.simulate(job, strategy, workers=2, run_dir=str(tmp_path), quiet=True)
    assert result["status"] == "fail" and "not finite" in result["failure"]


def test_an_unknown_wire_is_refused():
    with pytest.raises(UsageError, match="did you mean 'bfloat16'"):
        mt.Async(push_wire="bfloat")
