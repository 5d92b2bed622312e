"""The weights that a run starts from where the job names a file of them, and how a file's tensors fit a module.

Invariants: rank 0 alone reads the file, and the other ranks take its parameters and buffers over with those of the
model. A run that goes on from a checkpoint does not read the file again. Nothing is left out silently: what does not
fit is an error, or, where only a part is asked for, reported by name.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from mpitrain.devices import draws
from mpitrain.errors import UsageError
from mpitrain.job import Job
from mpitrain.model.in_place import refuse_renormed
from mpitrain.model.wire.masters import without_masters
from mpitrain.strategies.features import MPI, why_not
from mpitrain.training.agree import attempt
from mpitrain.training.measure import build
from mpitrain.training.memory import tell_memory

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

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        with runtime.building():
            module, optimizer = build(job, lr, device)
        runtime.built(module)
        strategy = session.strategy
        if strategy.num_servers() or runtime.size > 1:
            refuse_renormed(module, why_not("changes in place", strategy, MPI))
        return module, optimizer

    made = attempt(runtime, make)
    warn_without_masters(session, made[0])
    tell_memory(session, *made)
    if job.init is not None and session.resume is None:
        fields = attempt(runtime, lambda: start_from(job, made[0]) if runtime.rank == 0 else {})
        if runtime.rank == 0:
            session.report.event("initial weights", **fields)
    return made


def warn_without_masters(session: Session, module: nn.Module) -> None:
    """Tell of parameters in 16 bits that are stepped as they are."""
    if session.runtime.rank == 0 and (text := without_masters(module, session.strategy)):
        session.report.event("warning", text=text)


def start_from(
    job: Job, module: nn.Module, later: dict[int, tuple[WeightsFile, str]] | None = None
) -> dict[str, Any]:
    """Load the weights that the job starts from, if it names any; returns what is to be reported.

    Args:
        later: where given, nothing is loaded: it gets the name of every tensor of the module that is to be.

    Raises:
        UsageError: they cannot be read, or do not fit.
    """
    if job.init is None:
        return {}
    path = Path(job.init)
    weights = WeightsFile(path, "init")
    misfit = compare_weights(module, weights)
    num_tensors = len(module.state_dict())
    if misfit and not job.init_partial:
        raise UsageError(
            f"init {path} does not fit the model: {misfit}; give the weights of this model, or load what fits by name "
            "with --init-partial (init_partial=True)"
        )
    left = len(misfit.not_in_file) + len(misfit.other_shapes)
    if left == num_tensors:
        raise UsageError(f"init {path}: none of its tensors fits the model by name and shape: {misfit}")
    if later is None:
        load_weights(module, weights)
    else:
        state = module.state_dict(keep_vars=True)
        later.update({id(state[name]): (weights, name) for name in _fitting(module, weights)})
    return {
        "file": str(path),
        "loaded": f"{num_tensors - left} of {num_tensors} tensors",
        **{kind: names for kind, names in misfit._asdict().items() if names},
    }


class WeightsFile:
    """The tensors of a safetensors file, by name; each is read when it is asked for.

    Raises:
        UsageError: `what` says whose file it is that cannot be read.
    """

    def __init__(self, path: Path, what: str):
        from safetensors import SafetensorError, safe_open

        if path.is_dir():
            raise UsageError(f"{what} {path} is a directory; give the file in it, such as model.safetensors")
        try:
            self._file = safe_open(path, framework="pt")
            names = self._file.keys()
            self.shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in names}
        except FileNotFoundError:
            raise UsageError(f"{what} {path}: there is no such file (looked in {Path.cwd()})") from None
        except (OSError, SafetensorError) as error:
            if is_pickle(path):
                raise UsageError(
                    f"{what} {path} is a file of torch.save, a pickle; write its weights anew with "
                    f"safetensors.torch.save_file(torch.load({str(path)!r}), {str(path.with_suffix('.safetensors'))!r})"
                    ' (of a checkpoint that holds more, the entry with the weights: torch.load(...)["model"])'
                ) from None
            raise UsageError(
                f"{what} {path} cannot be read as safetensors ({error}); write such a file with "
                "safetensors.torch.save_file(module.state_dict(), path)"
            ) from None

    def __getitem__(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._file.get_tensor(name)
        return found


def is_pickle(path: Path) -> bool:
    """Whether a file begins as those of `torch.save`: as an archive, or, of before torch 1.6, as a pickle."""
    try:
        with open(path, "rb") as file:
            return file.read(4).startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04"))
    except OSError:
        return False


def compare_weights(module: nn.Module, weights: WeightsFile) -> Misfit:
    """What does not fit. Of tied weights one name is enough."""
    state = module.state_dict(keep_vars=True)
    filled = {id(state[name]) for name in weights.shapes if name in state}
    return Misfit(
        [name for name, tensor in state.items() if name not in weights.shapes and id(tensor) not in filled],
        [name for name in weights.shapes if name not in state],
        [
            f"{name} {weights.shapes[name]}, in the model {tuple(tensor.shape)}"
            for name, tensor in state.items()
            if name in weights.shapes and weights.shapes[name] != tuple(tensor.shape)
        ],
    )


def load_weights(module: nn.Module, weights: WeightsFile) -> None:
    """Copy tensors into the module's parameters and buffers of the same names and shapes."""
    module.load_state_dict({name: weights[name] for name in _fitting(module, weights)}, strict=False)


def _fitting(module: nn.Module, weights: WeightsFile) -> list[str]:
    state = module.state_dict()
    return [n for n, shape in weights.shapes.items() if n in state and tuple(state[n].shape) == shape]


class RandomNumbers:
    """The states of all random numbers that a constructor may draw from, as they are now."""

    def __init__(self) -> None:
        self._python, self._torch = random.getstate(), draws.RandomStates()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def restore(self) -> None:
        """Go back to them."""
        random.setstate(self._python)
        self._torch.restore()
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
