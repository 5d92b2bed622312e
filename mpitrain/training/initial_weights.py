"""The weights that a run starts from where the job names a file of them, and how a file's tensors fit a module.

Invariants: rank 0 alone reads the file, and the other ranks take its parameters and buffers over with those of the
model. A run that goes on from a checkpoint does not read the file again. Nothing is left out silently: what does not
fit is an error, or, where only a part is asked for, reported by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from mpitrain.errors import UsageError
from mpitrain.job import Job
from mpitrain.training.agree import attempt
from mpitrain.training.measure import build

if TYPE_CHECKING:
    from mpitrain.training.session import Session

MOST_NAMES = 4  # in a message


class Misfit(NamedTuple):
    """Names of a module's tensors that a file lacks, of the file's tensors that the module lacks, and those that have
    another shape there."""

    not_in_file: list[str]
    not_in_model: list[str]
    other_shapes: list[str]

    def __bool__(self) -> bool:
        return any(self)

    def __str__(self) -> str:
        kinds = zip(("not in the file", "not in the model", "of another shape"), self, strict=True)
        return "; ".join(f"{kind}: {_some(names)}" for kind, names in kinds if names)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def build_on_ranks(
    session: Session, device: torch.device, lr: float | None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Collective: the job's module and optimizer on every rank; on rank 0 with the weights that the job starts from, so
    `share_module` has to follow.

    Raises:
        AgreedError: the job's functions make something else, or the weights cannot be read or do not fit.
    """
    runtime, job = session.runtime, session.job
    made = attempt(runtime, lambda: build(job, lr, device))
    if job.init is not None and session.resume is None:
        fields = attempt(runtime, lambda: start_from(job, made[0]) if runtime.rank == 0 else {})
        if runtime.rank == 0:
            session.report.event("initial weights", **fields)
    return made


def start_from(job: Job, module: nn.Module) -> dict[str, Any]:
    """Load the weights that the job starts from, if it names any; returns what is to be reported.

    Raises:
        UsageError: they cannot be read, or do not fit.
    """
    if job.init is None:
        return {}
    path = Path(job.init)
    weights = read_weights(path, "init")
    misfit = load_weights(module, weights, partial=job.init_partial)
    num_tensors = len(module.state_dict())
    if misfit and not job.init_partial:
        raise UsageError(
            f"init {path} does not fit the model: {misfit}; give the weights of this model, or load what fits by name "
            "with --init-partial (init_partial=True)"
        )
    left = len(misfit.not_in_file) + len(misfit.other_shapes)
    if left == num_tensors:
        raise UsageError(f"init {path}: none of its tensors fits the model by name and shape: {misfit}")
    return {
        "file": str(path),
        "loaded": f"{num_tensors - left} of {num_tensors} tensors",
        **{kind: names for kind, names in misfit._asdict().items() if names},
    }


def read_weights(path: Path, what: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, by name.

    Raises:
        UsageError: `what` says whose file it is that cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.is_dir():
        raise UsageError(f"{what} {path} is a directory; give the file in it, such as model.safetensors")
    try:
        found: dict[str, torch.Tensor] = load_file(path)
    except FileNotFoundError:
        raise UsageError(f"{what} {path}: there is no such file (looked in {Path.cwd()})") from None
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"{what} {path} cannot be read as safetensors ({error}); write such a file with "
            "safetensors.torch.save_file(module.state_dict(), path)"
        ) from None
    return found


def load_weights(module: nn.Module, weights: dict[str, torch.Tensor], partial: bool) -> Misfit:
    """Copy tensors into the module's parameters and buffers of the same names; returns what does not fit. Where
    something does not, `partial` loads the rest, and otherwise nothing is loaded. Of tied weights one name is enough.
    """
    state = module.state_dict(keep_vars=True)
    filled = {id(state[name]) for name in weights if name in state}
    misfit = Misfit(
        [name for name, tensor in state.items() if name not in weights and id(tensor) not in filled],
        [name for name in weights if name not in state],
        [
            f"{name} {tuple(weights[name].shape)}, in the model {tuple(tensor.shape)}"
            for name, tensor in state.items()
            if name in weights and weights[name].shape != tensor.shape
        ],
    )
    if partial or not misfit:
        fits = {n: w for n, w in weights.items() if n in state and state[n].shape == w.shape}
        module.load_state_dict(fits, strict=False)
    return misfit
