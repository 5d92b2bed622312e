"""What a job measures beside its loss: means over batches, and values of the whole validation set.

Invariants: every rank observes batches of its own, and one rank puts together what was observed, in the order of the
batches. The batches are the same however many ranks there are, so a value of the whole set does not depend on their
number, to the bit. No library of metrics is imported: an object with `update`, `compute` and `reset` is one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, Protocol

import torch

from mpitrain.data.read.batch import Batch, num_samples_in, reach, values_of
from mpitrain.errors import UsageError
from mpitrain.model.gradient.user_code import BatchFunction, Checked

Kept = Any  # what is kept of one batch: tensors in host memory, in lists and dicts
_FOLDED: dict[str, Callable[..., torch.Tensor]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
}
_JOINED = "dim_zero_cat"


class Collected:
    """Metrics of the whole validation set, such as an AUC or an F1: `Job(metrics=mpitrain.Collected(function))`.

    What `outputs` returns for each batch is gathered from all workers on one rank, in the order of the samples, and
    `function` is called with it once.

    Args:
        function: returns metrics by name. It gets what `outputs` returns, with the rows of all samples: the tensors of
            a tuple as arguments, a tensor or a dict of tensors as one.
        outputs: `outputs(model, batch) -> tensors`, each with a row for each sample; None: (predictions, targets), the
            job's `predict` function (or what the model returns for the array `x`) and the batch's other array; a dict
            of those where there are several.
    """

    def __init__(
        self, function: Callable[..., Mapping[str, Any]], outputs: BatchFunction | None = None
    ) -> None:
        for name, one in (("function", function), ("outputs", outputs)):
            if not (callable(one) or (one is None and name == "outputs")):
                raise UsageError(f"Collected: {name} must be a function, got {one!r}")
        self.function, self.outputs = function, outputs

    def __repr__(self) -> str:
        return f"Collected({getattr(self.function, '__name__', self.function)})"


class Observed(NamedTuple):
    """What one batch gave: metrics that are means over it, and what is kept of it for each metric of the whole set."""

    means: dict[str, Any]
    kept: list[Kept]


class _WholeSet(Protocol):
    def observe(self, model: object, batch: Batch) -> Kept:
        """What is kept of a batch."""

    def conclude(self, kept: list[Kept]) -> dict[str, float]:
        """The metrics, of what was kept of all batches in their order."""


class Metrics:
    """All metrics of a job.

    Args:
        declared: as in `Job`: a function, a `Collected`, a torchmetrics object, a dict of these objects by name, or a
            list of any of them; None is none.
        predict, precision: as in `Job`.
    """

    def __init__(self, declared: object, predict: BatchFunction | None = None, precision: str = "float32"):
        self._functions: list[Callable[[Any, Batch], Mapping[str, Any]]] = []
        self._whole: list[_WholeSet] = []
        for one in _flat(declared):
            if isinstance(one, Collected):
                self._whole.append(_Gathering(one, predict, precision))
            elif is_updated(one):
                self._whole.extend(_updated(one, predict, precision))
            elif isinstance(one, Mapping):
                named = ((name, metric) for name, metric in one.items())
                self._whole.extend(_Updating(name, metric, predict, precision) for name, metric in named)
            else:
                self._functions.append(
                    one if isinstance(one, Checked) else Checked(one, "metrics", precision)
                )

    def observe(self, model: object, batch: Batch) -> Observed:
        """What `model` gives for one batch."""
        means: dict[str, Any] = {}
        for function in self._functions:
            _merge(means, dict(function(model, batch)))
        return Observed(means, [one.observe(model, batch) for one in self._whole])

    def conclude(self, kept: Sequence[list[Kept]]) -> dict[str, float]:
        """The metrics of the whole set, of what was kept of all batches in their order."""
        found: dict[str, float] = {}
        for index, one in enumerate(self._whole):
            _merge(found, one.conclude([batch[index] for batch in kept]))
        return found


def check_metrics(declared: object, check_function: Callable[[Any], None]) -> None:
    """Refuse what declares no metrics; `check_function` looks at each plain function.

    Raises:
        UsageError: names the field of the job.
    """
    for one in _flat(declared):
        if isinstance(one, Mapping):
            for name, metric in one.items():
                if not isinstance(name, str) or not is_updated(metric) or hasattr(metric, "items"):
                    raise UsageError(
                        f"Job: metrics[{name!r}] must be a torchmetrics object, got {type(metric).__name__}"
                    )
        elif not isinstance(one, Collected) and not is_updated(one):
            check_function(one)


def reduction(declared: object) -> str:
    """In words, for results: how metrics are put together."""
    plain = [one for one in _flat(declared) if not (isinstance(one, Collected | Mapping) or is_updated(one))]
    whole = len(_flat(declared)) > len(plain)
    return " and ".join(["mean over batches"] * bool(plain) + ["whole set"] * whole)


def is_updated(metric: object) -> bool:
    """Whether `metric` is an object of torchmetrics, or works like one."""
    methods = ("update", "compute", "reset")
    return not isinstance(metric, type) and all(callable(getattr(metric, name, None)) for name in methods)


def _flat(declared: object) -> list[Any]:
    if declared is None:
        return []
    return list(declared) if isinstance(declared, list | tuple) else [declared]


def _merge(into: dict[str, Any], found: Mapping[str, object]) -> None:
    for name, value in found.items():
        if name in into:
            raise UsageError(f"Job: two of the metrics are called {name!r}")
        into[name] = value


class _Gathering:
    """A `Collected`: what is kept is what `outputs` returns."""

    def __init__(self, declared: Collected, predict: BatchFunction | None, precision: str):
        self.declared, self.outputs = declared, _outputs(declared.outputs, predict, precision)

    def observe(self, model: object, batch: Batch) -> Kept:
        found = self.outputs(model, batch)
        _check_rows(found, num_samples_in(batch))
        return _on_host(found)

    def conclude(self, kept: list[Kept]) -> dict[str, float]:
        whole = _joined(kept)
        function = self.declared.function
        found = function(*whole) if isinstance(whole, list) else function(whole)
        if not isinstance(found, Mapping):
            raise UsageError(
                f'Job: metrics: {self.declared} must return a dict such as {{"auc": value}}, got '
                f"{type(found).__name__}"
            )
        return {name: _number(name, value) for name, value in found.items()}


class _Updating:
    """A torchmetrics object. Its state after each batch alone is kept, where such states add up to that of all batches
    one after the other, to the bit for sums of whole numbers; otherwise what it is updated with, which one rank then
    does for all batches."""

    def __init__(self, name: str, metric: object, predict: BatchFunction | None, precision: str):
        self.name, self.metric = name, _alone(metric)
        self.outputs = _outputs(None, predict, precision)
        self.adds_up = _adds_up(self.metric)

    def observe(self, model: object, batch: Batch) -> Kept:
        found = self.outputs(model, batch)
        arguments = list(found) if isinstance(found, list | tuple) else [found]
        if not self.adds_up:
            return _on_host(arguments)
        metric = self.metric.to(arguments[0].device) if hasattr(self.metric, "to") else self.metric
        metric.reset()
        metric.update(*arguments)
        return {name: _on_host(getattr(metric, name)) for name in metric._reductions}

    def conclude(self, kept: list[Kept]) -> dict[str, float]:
        metric = self.metric.to("cpu") if hasattr(self.metric, "to") else self.metric
        metric.reset()
        if self.adds_up:
            for name, reduce in metric._reductions.items():
                setattr(metric, name, _reduced([one[name] for one in kept], reduce.__name__))
            metric._update_count = len(kept)
        else:
            for arguments in kept:
                metric.update(*arguments)
        return dict(self._named(metric.compute()))

    def _named(self, value: object, name: str = "") -> Iterator[tuple[str, float]]:
        name = name or self.name
        if isinstance(value, Mapping):
            for key, one in value.items():
                yield from self._named(one, f"{name}_{key}")
        elif isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.numel() != 1):
            for index, one in enumerate(value):
                yield from self._named(one, f"{name}_{index}")
        else:
            yield name, _number(name, value)


def _updated(metric: object, predict: BatchFunction | None, precision: str) -> Iterator[_Updating]:
    """A metric by the name of its class, or those of a collection by the names that it gives them."""
    if hasattr(metric, "items"):
        for name, one in copy.deepcopy(metric).items(keep_base=False, copy_state=True):
            yield _Updating(name, one, predict, precision)
    else:
        yield _Updating(type(metric).__name__, metric, predict, precision)


def _alone(metric: object) -> Any:
    """A copy that asks no other rank: what all have observed is put together here."""
    metric = copy.deepcopy(metric)
    for one in [metric, *(metric.modules() if hasattr(metric, "modules") else ())]:
        if is_updated(one):
            one.sync_on_compute = one.dist_sync_on_step = False
            one.distributed_available_fn = _nobody_else
    return metric


def _nobody_else() -> bool:
    return False


def _adds_up(metric: object) -> bool:
    """Whether the states of batches add up: sums, extremes and lists do; means, states that are put together by hand
    and those of metrics inside others do not."""
    reductions = getattr(metric, "_reductions", None)
    inside = [one for one in getattr(metric, "modules", list)() if one is not metric and is_updated(one)]
    if not reductions or inside or getattr(metric, "full_state_update", None):
        return False
    names = {name: getattr(one, "__name__", "") for name, one in reductions.items()}
    return all(
        known == _JOINED if isinstance(getattr(metric, name), list) else known in _FOLDED
        for name, known in names.items()
    )


def _reduced(states: list[Any], how: str) -> Any:
    """One state of all batches, of those of each."""
    if how == _JOINED:
        return [tensor for state in states for tensor in state]
    total = states[0]
    for state in states[1:]:
        total = _FOLDED[how](total, state)
    return total


def _outputs(outputs: BatchFunction | None, predict: BatchFunction | None, precision: str) -> Checked:
    function = outputs or (lambda model, batch: _predictions_and_targets(model, batch, predict))
    return Checked(function, "outputs of metrics", precision)


def _predictions_and_targets(model: object, batch: Batch, predict: BatchFunction | None) -> tuple[Any, Any]:
    """What a model says of a batch, and what is right."""
    predictions = (predict or predict_x)(model, batch)
    held = values_of(batch)
    others = {name: one for name, one in held.items() if name != "x"} if "x" in held else {}
    if not others:
        raise UsageError(
            f"Job: metrics: the data hold {', '.join(held)}, which does not say what is predicted and what the target "
            "is: mpitrain.Collected(function, outputs=lambda model, batch: (predictions, targets))"
        )
    return predictions, next(iter(others.values())) if len(others) == 1 else others


def predict_x(model: Any, batch: Batch) -> Any:
    """What a job's model returns where the job does not say what to predict."""
    held = values_of(batch)
    arrays = ["x"] if "x" in held else list(held)
    if len(arrays) > 1:
        raise UsageError(
            f"the data hold {', '.join(arrays)}, and the job does not say what its model takes: "
            f"Job(predict=lambda model, batch: model({reach(batch, arrays[0])}))"
        )
    return model(held[arrays[0]])


def _leaves(found: object) -> Iterator[Any]:
    if isinstance(found, Mapping):
        for one in found.values():
            yield from _leaves(one)
    elif isinstance(found, list | tuple):
        for one in found:
            yield from _leaves(one)
    else:
        yield found


def _check_rows(found: object, num_samples: int | None) -> None:
    for one in _leaves(found):
        if not isinstance(one, torch.Tensor) or one.dim() == 0 or num_samples not in (None, len(one)):
            got = f"a tensor of shape {tuple(one.shape)}" if isinstance(one, torch.Tensor) else f"{one!r}"
            raise UsageError(
                "Job: metrics: what Collected gathers must be tensors with a row for each of the batch's "
                f"{num_samples or ''} samples, got {got}"
            )


def _on_host(found: object) -> Any:
    if isinstance(found, Mapping):
        return {name: _on_host(one) for name, one in found.items()}
    if isinstance(found, list | tuple):
        return [_on_host(one) for one in found]
    return found.detach().to("cpu", copy=True) if isinstance(found, torch.Tensor) else torch.as_tensor(found)


def _joined(parts: list[Any]) -> Any:
    """The rows of all batches, in the structure of the first."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, list):
        return [_joined([part[index] for part in parts]) for index in range(len(first))]
    return torch.cat(parts)


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, Real):
        return float(value)
    if getattr(value, "shape", None) == ():  # numpy's
        return float(value)
    raise UsageError(f"Job: metric {name!r} must be one number, got {type(value).__name__}")
