"""Answers of members that other ranks compute.

Invariants: every rank gets every member's answer, so all of them combine the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpitrain.errors import UsageError
from mpitrain.training.agree import attempt

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime


def exchange_over(runtime: Runtime, num_members: int) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
    """What an `Ensemble` asks for answers, where member i is computed by rank i modulo the number of ranks. Collective:
    all ranks call it for the same batches."""
    from mpitrain.mpi.process_group.broadcast import broadcast_tensors

    def exchange(asked: Sequence[Any]) -> list[torch.Tensor]:
        def compute() -> dict[str, list[Any]]:
            return {str(number): _described(own[number]) for number in own}

        own: dict[int, torch.Tensor] = {}
        attempt(
            runtime, lambda: own.update({i: _tensor(ask()) for i, ask in enumerate(asked) if ask is not None})
        )
        described = {int(i): one for part in runtime.allgather(compute()) for i, one in part.items()}
        answers = []
        for number in range(num_members):
            shape, dtype = described[number]
            answer = own.get(number)
            if answer is None:
                answer = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast_tensors(runtime, [answer], root=number % runtime.size)
            answers.append(answer)
        return answers

    return exchange


def _tensor(answer: object) -> torch.Tensor:
    if not isinstance(answer, torch.Tensor):
        raise UsageError(
            f"a member answers with {type(answer).__name__}, and ranks exchange tensors: combine such models in one "
            "process, without `mpitrain launch`"
        )
    return answer.contiguous()


def _described(answer: torch.Tensor) -> list[Any]:
    return [list(answer.shape), str(answer.dtype).removeprefix("torch.")]
