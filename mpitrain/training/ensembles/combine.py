"""A module that answers what several trained modules answer together.

Invariants: members are combined in their order, so the bits do not depend on where each of them was computed. The
answer has the form of a member's, so a job's loss, metrics and predict take it as they take a single model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mpitrain.data.read.batch import Batch
from mpitrain.errors import UsageError
from mpitrain.job import Job
from mpitrain.model.gradient.loss import read_loss
from mpitrain.model.gradient.user_code import Checked
from mpitrain.torch_versions import pytree

HOWS = ("probabilities", "outputs", "votes")
TIE_BREAK = 1e-3  # share of the mean probability in what votes give

Exchange = Callable[[Sequence[Any]], list[torch.Tensor]]


class Ensemble(nn.Module):
    """Members and how they are combined.

    Args:
        members: in their order; None for one that is computed elsewhere, which `exchange` asks for.
        weights: of the members, which add up to 1.
        how: "probabilities", the mean of the members' probabilities, as its logarithm, which stands where a member
            has its logits; "outputs", the mean of what they return; "votes", the weight of the members whose largest
            number is that of a class, as a logarithm, and where classes have as many the larger probability.
        class_dim: of the members' answer, over which its probabilities add up to 1; not of "outputs".
        exchange: is called with one function for each member, None for those elsewhere, and returns what all of them
            return.
    """

    def __init__(
        self,
        members: Sequence[nn.Module | None],
        weights: Sequence[float],
        how: str,
        class_dim: int | None,
        exchange: Exchange | None = None,
    ):
        super().__init__()
        self.members = nn.ModuleList(nn.Identity() if one is None else one for one in members)
        self.is_here = [one is not None for one in members]
        self.weights, self.how, self.class_dim = tuple(weights), how, class_dim
        self._exchange = exchange

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """What the members answer together, on the device of the arguments."""
        if self._exchange is None:
            answers: list[Any] = [_ask(one, arguments, named) for one in self.members]
        else:
            asked = [
                (lambda one=one: _ask(one, arguments, named)) if here else None
                for one, here in zip(self.members, self.is_here, strict=True)
            ]
            answers = _moved(self._exchange(asked), _home(arguments, named))
        return combine(answers, self.weights, self.how, self.class_dim)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"an ensemble has no attribute {name!r}: its members are combined where the model is called"
            ) from None


def _ask(member: nn.Module, arguments: Any, named: Any) -> Any:
    """What a member answers, computed on its own device and brought back to that of the arguments."""
    held = next((one.device for one in member.parameters()), None)
    home = _home(arguments, named) or held
    if held is None or held == home:
        return member(*arguments, **named)
    there_arguments, there_named = _moved((arguments, named), held)
    return _moved(member(*there_arguments, **there_named), home)


def _home(arguments: object, named: object) -> torch.device | None:
    return next((one.device for one in _leaves((arguments, named)) if isinstance(one, torch.Tensor)), None)


def _moved(tree: Any, device: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) and device is not None else leaf, tree
    )


def _leaves(tree: object) -> list[Any]:
    found: list[Any] = pytree.tree_leaves(tree)
    return found


def combine(answers: Sequence[Any], weights: Sequence[float], how: str, class_dim: int | None) -> Any:
    """What the answers of the members give together; arguments as of `Ensemble`."""
    if not torch.jit.is_tracing():  # which would take the shapes for data
        _check_alike(answers)
    if how == "outputs":
        flat = [pytree.tree_flatten(one) for one in answers]
        means = [_mean(those, weights) for those in zip(*(leaves for leaves, _ in flat), strict=True)]
        return pytree.tree_unflatten(means, flat[0][1])
    assert class_dim is not None
    logs = [torch.log_softmax(one.float(), class_dim) for one in answers]
    logged = [math.log(weight) if weight else -math.inf for weight in weights]
    mean = torch.logsumexp(torch.stack([one + shift for one, shift in zip(logs, logged, strict=True)]), 0)
    if how == "votes":
        together = TIE_BREAK * mean.exp()
        for one, weight in zip(answers, weights, strict=True):
            vote = torch.zeros_like(mean).scatter(class_dim, one.argmax(class_dim, keepdim=True), 1.0)
            together = together + (1 - TIE_BREAK) * weight * vote
        mean = together.clamp_min(torch.finfo(together.dtype).tiny).log()
    return mean.to(answers[0].dtype)


def _mean(tensors: Sequence[Any], weights: Sequence[float]) -> torch.Tensor:
    if not all(isinstance(one, torch.Tensor) and one.is_floating_point() for one in tensors):
        raise UsageError(
            "the members return something else than floating-point numbers, which have no mean; give a job whose model "
            "returns its scores"
        )
    total = torch.zeros_like(tensors[0])
    for one, weight in zip(tensors, weights, strict=True):
        total += weight * one
    return total


def _check_alike(answers: Sequence[object]) -> None:
    first = _shapes(answers[0])
    for number, one in enumerate(answers):
        if _shapes(one) != first:
            raise UsageError(
                f"member {number} returns {_shapes(one)} and member 0 {first} for the same batch: models can be "
                "combined whose answers have one form"
            )


def _shapes(answer: object) -> str:
    return ", ".join(
        f"{tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        for leaf in _leaves(answer)
    )


@torch.no_grad()
def find_class_dim(job: Job, module: nn.Module, batch: Batch) -> int | None:
    """The dimension of the module's answer that holds the logits of classes: the one over which a log-softmax leaves
    the job's loss of this batch as it is, as it does where a cross-entropy or a negative log-likelihood of
    log-probabilities follows. None where there is none, or not one alone."""
    loss = Checked(job.loss, "loss", job.precision)
    answers: list[Any] = []
    with module.register_forward_hook(lambda _module, _arguments, answer: answers.append(answer)):
        plain = float(read_loss(loss(module, batch)).total)
    is_tensor = bool(answers) and isinstance(answers[0], torch.Tensor) and answers[0].is_floating_point()
    found = []
    for dim in range(1, answers[0].dim()) if is_tensor else ():
        with module.register_forward_hook(
            lambda _module, _arguments, answer, dim=dim: torch.log_softmax(answer, dim)
        ):
            changed = float(read_loss(loss(module, batch)).total)
        if answers[0].shape[dim] > 1 and abs(changed - plain) <= 1e-4 * abs(plain) + 1e-6:
            found.append(dim)
    return found[0] if len(found) == 1 else None
