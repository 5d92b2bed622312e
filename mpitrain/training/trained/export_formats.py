"""Trained models as TorchScript and as ONNX, for programs that know those.

Invariants: the file is read back, and answers as the model does for batches of two sizes, before it has its name. What
is measured is measured of the file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpitrain.errors import UsageError
from mpitrain.reporting.report import writing
from mpitrain.system.files.atomic import durably_replaced
from mpitrain.torch_versions import pytree

FORMATS = ("torchscript", "onnx")
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-3  # of the largest number of the answer: kernels add in another order

Write = Callable[[Path], None]


def check_installed(form: str) -> None:
    """Refuse a format whose packages are not there.

    Raises:
        UsageError: says how to install them.
    """
    missing = [name for name in ONNX_PACKAGES if form == "onnx" and importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"onnx needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install mpitrain[onnx]"
        )


def write_format(
    form: str,
    module: nn.Module,
    arguments: tuple[object, ...],
    path: Path,
    make_program: Callable[[], torch.export.ExportedProgram],
) -> nn.Module:
    """Write the module to `path`, and return what the file does.

    Args:
        arguments: of a batch; make_program: the module's forward pass as a program of torch.export.

    Raises:
        UsageError: the format cannot hold the model, with the reason.
    """
    if form == "onnx":
        save, read = _onnx_writer(make_program()), lambda file: _OnnxModule(file, module, arguments)
    else:
        save, read = _torchscript_writer(module, arguments), _read_torchscript
    with writing(path), durably_replaced(path) as temporary:
        save(temporary)
        kept: nn.Module = read(temporary)
        for batch in (arguments, _shorter(arguments)):
            if why := _difference(module, kept, batch):
                raise UsageError(f"{form} does not hold this model: {why}")
    return kept


def _shorter(arguments: tuple[object, ...]) -> tuple[Any, ...]:
    """Of the first sample alone: what was traced may hold the size of its batch."""
    leaves = [one for one in pytree.tree_leaves(arguments) if isinstance(one, torch.Tensor) and one.dim()]
    size = len(leaves[0]) if leaves else 0
    return tuple(
        pytree.tree_map(
            lambda one: one[:1] if isinstance(one, torch.Tensor) and one.dim() and len(one) == size else one,
            arguments,
        )
    )


@torch.inference_mode()
def _difference(module: nn.Module, kept: Callable[..., Any], arguments: tuple[object, ...]) -> str:
    """How the answers differ, in words; empty where they do not, or where those of the model itself do."""
    expected, again = (pytree.tree_leaves(module(*arguments)) for _ in range(2))
    draws = any(
        isinstance(one, torch.Tensor) and not torch.equal(one, two) for one, two in zip(expected, again)
    )
    size = next((len(one) for one in arguments if isinstance(one, torch.Tensor) and one.dim()), 0)
    try:
        found = pytree.tree_leaves(kept(*arguments))
    except Exception as error:  # whatever its interpreter raises
        return f"for a batch of {size} it fails: {str(error).strip().splitlines()[-1]}"
    for one, other in zip(expected, found, strict=True):
        if not isinstance(one, torch.Tensor):
            continue
        if one.shape != other.shape:
            return f"for a batch of {size} it answers in shape {tuple(other.shape)} instead of {tuple(one.shape)}"
        if (
            one.numel()
            and not draws
            and not torch.allclose(
                other.double(),
                one.double(),
                rtol=0,
                atol=TOLERANCE * max(1.0, float(one.double().abs().max())),
            )
        ):
            off = float((other.double() - one.double()).abs().max())
            return f"for a batch of {size} its answer is off by {off:.3g}"
    return ""


def _torchscript_writer(module: nn.Module, arguments: tuple[object, ...]) -> Write:
    """Traced; compiled from its source where the trace depends on the data, which it cannot record."""
    with warnings.catch_warnings(record=True) as noticed, torch.no_grad():
        warnings.simplefilter("always")
        try:
            made: Any = torch.jit.trace(module, arguments, check_trace=False)
            why = next(
                (str(one.message) for one in noticed if issubclass(one.category, torch.jit.TracerWarning)), ""
            )
        except Exception as error:  # whatever the tracer meets
            made, why = None, str(error)
        if why:
            try:
                made = torch.jit.script(module)
            except Exception as error:  # whatever its compiler meets
                raise UsageError(
                    f"TorchScript cannot hold this model: its trace depends on the data ({_first_line(why)}), and its "
                    f"source cannot be compiled ({_first_line(str(error))})"
                ) from error

    def save(path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.save(made, str(path))

    return save


def _read_torchscript(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(str(path), map_location="cpu")


def _onnx_writer(program: torch.export.ExportedProgram) -> Write:
    with _quiet():
        try:
            made = torch.onnx.export(program, dynamo=True, verbose=False)
        except Exception as error:  # whatever its translator meets
            raise UsageError(f"ONNX cannot hold this model: {_first_line(_innermost(error))}") from error
    assert made is not None
    return lambda path: made.save(str(path))


class _OnnxModule(nn.Module):
    """An ONNX file as its runtime computes it, for the arguments of `module`, in the form of that one's answers."""

    def __init__(self, path: Path, module: nn.Module, arguments: tuple[object, ...]):
        super().__init__()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(
            path.read_bytes(), options, providers=["CPUExecutionProvider"]
        )
        with torch.inference_mode():
            self.form = pytree.tree_flatten(module(*arguments))[1]

    def forward(self, *arguments: Any) -> Any:
        """As the module's own."""
        given = [one for one in pytree.tree_leaves(arguments) if isinstance(one, torch.Tensor)]
        names = [one.name for one in self.session.get_inputs()]
        feed = {name: one.contiguous().numpy() for name, one in zip(names, given, strict=True)}
        found = [torch.from_numpy(one) for one in self.session.run(None, feed)]
        return pytree.tree_unflatten(found, self.form)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without notes on packages that are not needed and on what is to change in a later torch."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.strip().splitlines() if line.strip()), "")
