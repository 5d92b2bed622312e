"""Every optimizer that torch ships, and two of a third party: over servers the serial run to the bit, or a refusal that
names the ways out, which are then taken."""

import inspect

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.model.optimizers.optimizer import ELEMENTWISE
from tests import toy

SHIPPED = {
    name: one
    for name, one in vars(torch.optim).items()
    if inspect.isclass(one) and issubclass(one, torch.optim.Optimizer) and one is not torch.optim.Optimizer
}
NOWHERE = {"LBFGS": "evaluates the loss several times a step", "SparseAdam": "takes sparse gradients only"}


class Lion(torch.optim.Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms, 2023."""

    elementwise = True

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in (each for each in group["params"] if each.grad is not None):
                state = self.state[one]
                if not state:
                    state["momentum"] = torch.zeros_like(one)
                first, second = group["betas"]
                one.mul_(1 - group["lr"] * group["weight_decay"])
                one.add_(
                    state["momentum"].mul(first).add(one.grad, alpha=1 - first).sign_(), alpha=-group["lr"]
                )
                state["momentum"].mul_(second).add_(one.grad, alpha=1 - second)


class Trusting(torch.optim.SGD):
    """Steps as long as the layer's weights, as LARS and LAMB."""

    @torch.no_grad()
    def step(self, closure=None):
        for one in (each for group in self.param_groups for each in group["params"]):
            one.grad.mul_(one.norm() / (one.grad.norm() + 1e-6))
        return super().step(closure)


def matrices():
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 1, bias=False))


def job_of(cls):
    return toy.make_job(model=matrices, optimizer=lambda parameters: cls(parameters, lr=0.01))


def trained(path, job, strategy):
    return load_file(mt.simulate(job, strategy, 1, run_dir=str(path), quiet=True)["model"])


@pytest.mark.parametrize("cls", [*SHIPPED.values(), Lion, Trusting], ids=lambda cls: cls.__name__)
def test_an_optimizer_runs_over_servers_as_in_one_process_or_is_refused_with_ways_out(tmp_path, cls):
    job, served = job_of(cls), mt.Async(servers=2)
    if cls.__name__ in NOWHERE:
        for strategy in (served, mt.Async(optimizer="worker"), mt.LocalSGD(), mt.Decentralized()):
            with pytest.raises(UsageError, match=NOWHERE[cls.__name__]):
                trained(tmp_path, job, strategy)
        return
    expected = toy.serial(job)
    if cls is Lion or cls.__name__ in ELEMENTWISE:
        found = trained(tmp_path / "served", job, served)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    else:
        with pytest.raises(UsageError, match=r'cannot run .* Use optimizer="worker" .*, or allreduce\(\)'):
            trained(tmp_path, job, served)
    for strategy in (mt.Async(servers=2, optimizer="worker"), mt.LocalSGD(period=1), mt.Decentralized()):
        found = trained(tmp_path / strategy.name, job, strategy)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)
