"""The moving average of the weights that a job with `ema` leaves beside its model.

Invariants: what is not trained (buffers, frozen parameters) is that of the last model. Each server writes the elements
that it holds once, to where they lie in the file; the first rank adds the rest when all have, and only then the file
gets its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from mpitrain.checkpoint.tensor_file import body, describe, header, order_of
from mpitrain.model.wire.flat import Layout
from mpitrain.reporting.report import writing
from mpitrain.system.files.atomic import durably_replaced, write_all
from mpitrain.system.files.folders import make_private
from mpitrain.training.measure import MODEL_FILE

EMA_MODEL_FILE = "model-ema.safetensors"


class AverageFile:
    """The file, which is yet to be finished.

    Args:
        run_dir: of the run; attempt: id of this start of it; module: whose weights were trained; layout: of its shards.
    """

    def __init__(self, run_dir: Path, attempt: str, module: nn.Module, layout: Layout):
        self._run_dir, self._layout = run_dir, layout
        self._partial = run_dir / f".{EMA_MODEL_FILE}.{attempt}"
        shards = range(layout.num_shards)
        self._done = [self._partial.with_name(f"{self._partial.name}.{shard}") for shard in shards]
        state = module.state_dict(keep_vars=True)
        parameters = dict(module.named_parameters())
        # tied ones have several names
        self._names = [
            [name for name, tensor in state.items() if tensor is parameters[trained]]
            for trained in layout.names
        ]
        described = self._described = describe(state)
        self._head, self._places = header(described, {}), {}
        at = len(self._head)
        for name in order_of(described):
            self._places[name], at = at, at + described[name].num_bytes

    def write(self, averages: Sequence[torch.Tensor]) -> None:
        """Write and finish it, where one process has what all servers hold.

        Raises:
            OutputError: the disk is full or not writable.
        """
        for shard, average in enumerate(averages):
            self.write_part(shard, average)
        self.finish()

    def write_part(self, shard: int, average: torch.Tensor) -> None:
        """Write what a server holds.

        Raises:
            OutputError: the disk is full or not writable.
        """
        self._write(self._pieces(shard, average))
        with writing(self._done[shard]):
            self._done[shard].touch()

    def _pieces(self, shard: int, average: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        for index, start, stop, at in self._layout.pieces(shard):
            for name in self._names[index]:
                dtype = self._described[name].dtype
                yield self._places[name] + start * dtype.itemsize, average[at : at + stop - start].to(dtype)

    def finish(self) -> None:
        """Add the rest, where all servers have written what they hold, as is the model; otherwise leave nothing.

        Raises:
            OutputError: the disk is full or not writable.
        """
        from safetensors import safe_open

        model = self._run_dir / MODEL_FILE
        try:
            if model.is_file() and all(done.is_file() for done in self._done):
                averaged = {name for names in self._names for name in names}
                with safe_open(model, framework="pt") as last:
                    rest = [(name, last.get_tensor(name)) for name in self._places if name not in averaged]
                head = torch.frombuffer(bytearray(self._head), dtype=torch.uint8)
                self._write([(0, head), *((self._places[name], tensor) for name, tensor in rest)])
                with writing(path := self._run_dir / EMA_MODEL_FILE), durably_replaced(path) as temporary:
                    os.replace(self._partial, temporary)
        finally:
            for left in (self._partial, *self._done):
                left.unlink(missing_ok=True)

    def _write(self, pieces: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Write tensors to their places in the file, which others write to as well."""
        with writing(self._partial):
            make_private(self._run_dir)  # which somebody may have removed
        with (
            writing(self._partial),
            open(os.open(self._partial, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file,
        ):
            for at, tensor in pieces:
                file.seek(at)
                write_all(file, body(tensor))
            os.fsync(file.fileno())
