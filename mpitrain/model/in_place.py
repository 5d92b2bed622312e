"""Parameters that a forward pass or a loss changes in place: seen where it happens, and told apart cheaply.

    nn.Embedding(max_norm=)                 shortens the rows that a batch looks up, in the layer's weight
    weight.clamp_(), weight.data = ...      in a loss or a layer, as for Wasserstein GANs and unit vectors

Invariants: every pass is looked at by the tensors' version counters and addresses, which costs microseconds; what moves
neither (`weight.data.clamp_()`) is seen by fingerprints, at the first passes and ever more seldom after that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from mpitrain.errors import UsageError
from mpitrain.torch_versions import NormWithStatistics

COLUMNS, WORD = 1024, 8  # words in a row of a fingerprint, bytes in a word
STACKED = 512  # tensors of one row at most that are looked at in one pass
WAY_OUT = (
    "compute with a changed copy (torch.nn.functional.normalize(rows), weight.clamp(-c, c)), and leave max_norm of an "
    "Embedding out"
)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class InPlaceGuard:
    """Looks at parameters before and after a pass.

    Args:
        named: the parameters; lost: why what a pass changes of them cannot be kept, or "" where it can: then it is
            only noted.

    Attributes:
        changed: names of those that a pass has changed.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], lost: str):
        self.named, self.lost = list(named), lost
        self.changed: dict[str, None] = {}
        self._due = Rarely()
        self._interval: tuple[list[tuple[int, int]], torch.Tensor | None] | None = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """A pass over one batch, before the backward pass.

        Raises:
            UsageError: it has changed a parameter, and that cannot be kept.
        """
        before = self.marks(), self._contents()
        yield
        self.check(*before)

    def begin_interval(self) -> None:
        """Between two steps a loop of one's own runs, with its passes; a step is over, or the first one is to come."""
        self._interval = self.marks(), self._contents()

    def end_interval(self) -> None:
        """The next step is to come.

        Raises:
            UsageError: as `around`.
        """
        if self._interval is not None:
            self.check(*self._interval, who="the loop, its forward pass or its loss")

    def _contents(self) -> torch.Tensor | None:
        """For what marks do not show, where it matters and it is time to look."""
        return fingerprints([one for _, one in self.named]) if self.lost and self._due() else None

    def marks(self) -> list[tuple[int, int]]:
        """What moves with a tensor that is changed in place, or given other memory."""
        return [(one._version, one.data_ptr()) for _, one in self.named]

    def check(
        self,
        marks: list[tuple[int, int]],
        contents: torch.Tensor | None = None,
        who: str = "the forward pass or the loss",
    ) -> None:
        """Compare with what was there before; `who` may have changed it.

        Raises:
            UsageError: as `around`.
        """
        now = self.marks()
        found = [
            name for (name, _), before, after in zip(self.named, marks, now, strict=True) if before != after
        ]
        if contents is not None:
            same = (contents == fingerprints([one for _, one in self.named])).tolist()
            found += [name for (name, _), alike in zip(self.named, same, strict=True) if not alike]
        if not found:
            return
        self.changed |= dict.fromkeys(found)
        if self.lost:
            raise UsageError(
                f"{who} changes {found[0]!r} in place, and {self.lost}: {WAY_OUT}; "
                "localsgd() and elastic() keep what a worker changes"
            )


class Rarely:
    """Whether to look: at the first three times, and then each time twice as many have gone by; `most` are let go by at
    a time, the one at which to look counted in."""

    def __init__(self, most: int | None = None) -> None:
        self._num_calls, self._next, self._most = 0, 1, most

    def __call__(self) -> bool:
        self._num_calls += 1
        if self._num_calls < self._next:
            return False
        wait = 1 if self._num_calls < 3 else self._num_calls
        self._next = self._num_calls + (wait if self._most is None else min(wait, self._most))
        return True


def renormed(module: nn.Module) -> list[str]:
    """Trained layers that shorten rows of their weight in every forward pass."""
    return [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        and layer.max_norm is not None
        and layer.weight.requires_grad
    ]


def refuse_renormed(module: nn.Module, lost: str) -> None:
    """Refuse such layers where there is a reason to.

    Raises:
        UsageError: names one.
    """
    if lost and (names := renormed(module)):
        raise UsageError(
            f"max_norm of {names[0]!r} changes its weight in the forward pass, and {lost}: {WAY_OUT}"
        )


def held_alike(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What replicas must agree in: parameters, and buffers but for running statistics, which are each replica's own."""
    apart = {
        f"{name}.{key}" if name else key
        for name, layer in module.named_modules()
        for key in layer._buffers
        if isinstance(layer, NormWithStatistics) or key in STATISTICS
    }
    buffers = [(name, one) for name, one in module.named_buffers() if name not in apart]
    return [*module.named_parameters(), *buffers]


@torch.no_grad()
def fingerprints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A whole number of 64 bits for each, of its bits and where they stand, in host memory."""
    found = torch.zeros(len(tensors), dtype=torch.int64)
    alike: dict[tuple[torch.dtype, int, torch.device], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.nbytes > COLUMNS * WORD:
            found[number] = _fingerprint(tensor)
        elif tensor.nbytes:
            alike.setdefault((tensor.dtype, tensor.numel(), tensor.device), []).append(number)
    for numbers in alike.values():
        for start in range(0, len(numbers), STACKED):
            few = numbers[start : start + STACKED]
            found[few] = _row_fingerprints([tensors[number] for number in few]).cpu()
    return found


def _row_fingerprints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Those of tensors of one row at most, all of one dtype and as many numbers, at once."""
    rows = torch.stack([one.reshape(-1) for one in tensors]).resolve_conj()
    rows = (torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows).view(torch.uint8)
    num_bytes = rows.size(1)
    words = nn.functional.pad(rows, (0, -num_bytes % WORD)).view(torch.int64)
    return (words * _weights(rows.device)[: words.size(1)]).sum(1) + num_bytes


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of columns of words of 64 bits, weighed by odd numbers: one pass over the memory."""
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    data = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)
    whole = data.numel() // WORD * WORD
    rest = torch.cat([data[whole:], data.new_zeros(-data.numel() % WORD)])
    if data.storage_offset() % WORD:
        data = data.clone()
    words = data[:whole].view(torch.int64)
    rows = words.numel() // COLUMNS
    total = words[: rows * COLUMNS].view(rows, COLUMNS).sum(0)
    for more in (words[rows * COLUMNS :], rest.view(torch.int64)):
        total[: more.numel()] += more
    return (total * _weights(data.device)).sum() + data.numel()


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(COLUMNS)
    return (torch.randint(2**62, (COLUMNS,), generator=generator) * 2 + 1).to(device)
