"""`mpitrain predict`: what a trained model says of each sample of a set, computed by all ranks, in one HDF5 file.

Invariants: row i of the file belongs to sample i in the order of the shards. Batches begin at the same samples however
many ranks there are, so their number changes no bit. The file has its name only when it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from mpitrain.data import Catalogue
from mpitrain.data.datasets.as_source import checked_source
from mpitrain.data.format.columns import Array
from mpitrain.data.read.batch import Batch, to_device
from mpitrain.data.read.reader import Source
from mpitrain.data.read.shards import Shards
from mpitrain.data.sources.python import looks_like_python, python_value
from mpitrain.data.write.ranks import ALONE, Ranks
from mpitrain.data.write.rows import join_rows, write_rows
from mpitrain.errors import UsageError
from mpitrain.job import Job
from mpitrain.model.gradient.user_code import Checked
from mpitrain.model.metrics import predict_x
from mpitrain.system.files.atomic import check_new
from mpitrain.system.interrupts import interruptible
from mpitrain.training.agree import attempt
from mpitrain.training.measure import pick_device
from mpitrain.training.trained_model import RunDir, load_with_job
from mpitrain.training.validations.validation import LEAST_BATCH

PREDICTION = "prediction"  # of a job whose function returns a tensor

Progress = Callable[[int, int | None], None]


class Predicted(NamedTuple):
    """Samples, and the arrays of the file as texts: name, shape of a sample, dtype."""

    num_samples: int
    arrays: tuple[str, ...]


@interruptible()
def predict(
    run_dir: RunDir,
    data: Source | str | Path,
    out: str | Path,
    *,
    job: Job | str | Path | None = None,
    which: str = "last",
    batch_size: int | None = None,
    overwrite: bool = False,
    ranks: Ranks = ALONE,
    progress: Progress = lambda done, total: None,
) -> Predicted:
    """Apply the model of a finished run to every sample of `data`, and write what it returns to `out`.

    Args:
        run_dir, job, which: as of `mpitrain.load`; the job's `predict` function says what is computed.
        data: a source, or a file, pattern or folder of shards; or, as a text, where Python has a source: `FILE.py:NAME`
            or `MODULE:NAME`, of a function what it returns.
        batch_size: samples that are computed at once; by default the job's, and at least 256.
        overwrite: replace `out` if there is one.
        ranks: who else takes part; each computes a run of batches, and writes it beside `out` until rank 0 puts the
            parts together.

    Raises:
        UsageError: as `mpitrain.load`; the job's function returns something else than a tensor or tensors by name, with
            a row for each sample; `out` exists.
        DataError: from the shards, or the disk is full; nothing is left at `out` then.
    """
    path, source = Path(out), _source(data)
    made_by, module = attempt(ranks, lambda: load_with_job(run_dir, job, which))
    text = attempt(ranks, lambda: _look(path, overwrite, source) if ranks.rank == 0 else "")
    catalogue = Catalogue.from_json(ranks.broadcast(text))
    batch_size = batch_size or max(LEAST_BATCH, made_by.batch_size)
    share = share_of(catalogue.num_samples, batch_size, ranks.rank, ranks.size)
    parts = [path.with_name(f".{path.name}.rank-{rank}") for rank in range(ranks.size)]

    def compute() -> list[str]:
        with source.reader(catalogue, made_by.seed) as reader:
            batches = _computed(made_by, module, reader.sequential(batch_size, *share), ranks.local_rank)
            return write_rows(parts[ranks.rank], batches, share[1] - share[0], progress)

    try:
        arrays = attempt(ranks, compute)
        everybodys = ranks.allgather(arrays)
        attempt(ranks, lambda: _check_alike(everybodys))
        attempt(ranks, lambda: join_rows(parts, path, catalogue.num_samples) if ranks.rank == 0 else None)
    finally:
        parts[ranks.rank].unlink(missing_ok=True)
    return Predicted(catalogue.num_samples, tuple(next(filter(None, everybodys))))


def share_of(num_samples: int, batch_size: int, rank: int, size: int) -> tuple[int, int]:
    """First sample of a rank and the first that is no longer its own: a run of whole batches, the last one aside."""
    num_batches = -(-num_samples // batch_size)
    bounds = (rank * num_batches // size * batch_size, (rank + 1) * num_batches // size * batch_size)
    return min(bounds[0], num_samples), min(bounds[1], num_samples)


def _source(data: Source | str | Path) -> Source:
    if not isinstance(data, str | Path):
        return checked_source(data, "predict")
    if isinstance(data, str) and looks_like_python(data) and not Path(data).exists():
        return checked_source(python_value(data), f"predict: {data}")
    data = Path(data)
    return Shards(str(data / "*.h5") if data.is_dir() else str(data))


def _look(path: Path, overwrite: bool, source: Source) -> str:
    """What there is to read, as JSON, once it is clear that the answer may be written."""
    check_new(path, overwrite)
    return source.scan().to_json()


def _computed(
    job: Job, module: nn.Module, batches: Iterable[Batch], local_rank: int
) -> Iterator[dict[str, Array]]:
    """What the job's function returns for each batch, in the job's precision, as arrays on the host."""
    device = pick_device(job, local_rank)
    module.to(device)
    function = Checked(job.predict or predict_x, "predict", job.precision)
    with torch.inference_mode():
        for batch in batches:
            found = function(module, to_device(batch, device))
            tensors = {PREDICTION: found} if isinstance(found, torch.Tensor) else found
            # numpy has no bfloat16
            yield {
                name: (one.float() if one.dtype is torch.bfloat16 else one).cpu().numpy()
                for name, one in tensors.items()
            }


def _check_alike(everybodys: Sequence[Sequence[str]]) -> None:
    """One set of arrays on all ranks that had samples: a shape may follow from the data."""
    found = [(rank, arrays) for rank, arrays in enumerate(everybodys) if arrays]
    for rank, arrays in found:
        if arrays != found[0][1]:
            raise UsageError(
                f"Job: predict has returned {', '.join(found[0][1])} on rank {found[0][0]} and {', '.join(arrays)} on "
                f"rank {rank}; return arrays of the same names, shapes and dtypes for all batches"
            )
