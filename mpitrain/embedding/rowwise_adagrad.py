"""Adagrad with one number a row of a table, in place of one for each of the row's numbers.

    G_r <- G_r + mean_j g_rj^2,    w_r <- w_r - eta g_r / (sqrt(G_r) + eps)        for every row r of a table
    G   <- G + g^2,                w   <- w - eta g / (sqrt(G) + eps)              for every other number

The rule by rows is that of Mudigere et al., "Software-hardware co-design for fast and scalable training of deep
learning recommendation models", ISCA 2022; the other one is Duchi, Hazan and Singer, JMLR 12, 2011.

Invariants: a row whose gradient is zero stays as it is, with what is remembered of it, so sparse gradients train the
same bits as dense ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from mpitrain.errors import UsageError


class RowwiseAdagrad(Optimizer):
    """For models with tables: by rows where gradients are sparse or a parameter is a table, by numbers elsewhere.

    Args:
        params: as torch's optimizers take them; lr: the rate; eps: is added to the root; initial_accumulator_value:
            what G begins with.

    A parameter with an attribute `rowwise = True` is updated by rows whatever its gradient is.

    Raises:
        UsageError: a rate, eps or beginning below zero.
    """

    elementwise = True  # a server's dense shard has no rows, and its tables bring theirs

    def __init__(
        self, params: Iterable[Any], lr: float = 0.01, eps: float = 1e-10, initial_accumulator_value: float = 0.0
    ):  # fmt: skip
        for name, value in (
            ("lr", lr),
            ("eps", eps),
            ("initial_accumulator_value", initial_accumulator_value),
        ):
            if not value >= 0.0:
                raise UsageError(f"RowwiseAdagrad: {name} must be at least 0, got {value}")
        defaults = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if _is_rowwise(parameter):  # a server keeps as much for every row from its beginning
                    self._begin(parameter, group, by_rows=True)

    def _begin(self, parameter: torch.Tensor, group: dict[str, Any], by_rows: bool) -> None:
        shape = (len(parameter), 1) if by_rows else parameter.shape
        self.state[parameter]["sum"] = parameter.new_full(shape, group["initial_accumulator_value"])

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        by_rows = parameter.dim() == 2 and (gradient.is_sparse or _is_rowwise(parameter))
        if "sum" not in state:
            self._begin(parameter, group, by_rows)
        total = state["sum"]
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            part = total[rows] + _squares(values, by_rows)
            total[rows] = part
            parameter[rows] = parameter[rows].addcdiv(
                values, part.sqrt().add_(group["eps"]), value=-group["lr"]
            )
            return
        total.add_(_squares(gradient, by_rows))
        parameter.addcdiv_(gradient, total.sqrt().add_(group["eps"]), value=-group["lr"])


def _is_rowwise(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "rowwise", False) and parameter.dim() == 2


def _squares(values: torch.Tensor, by_rows: bool) -> torch.Tensor:
    squares = values * values
    return squares.mean(1, keepdim=True) if by_rows else squares
