"""`mpitrain export`: a trained model as one file, which needs neither this package nor the job's code.

In fewer bits it is a program of `torch.export`: `torch.export.load(FILE).module()` is the model, for batches of any
size (of int8: once `torchao.quantization` is imported). The other formats are those of `export_formats.py`.

Invariants: layers are quantised by torchao, and those that it cannot quantise stay as they are and are named. What is
measured before and after is measured on the job's own validation set, on the host. The file has its name only when it
is whole.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from mpitrain.data.read.batch import Batch
from mpitrain.embedding.tables import served_layers
from mpitrain.errors import UsageError
from mpitrain.job import Job
from mpitrain.model.gradient.user_code import Checked
from mpitrain.reporting.report import writing
from mpitrain.system.files.atomic import check_new, durably_replaced
from mpitrain.system.interrupts import interruptible
from mpitrain.torch_versions import full_version, pytree, torchao_for
from mpitrain.training.ensembles.saved import model_bytes
from mpitrain.training.trained.export_formats import FORMATS, check_installed, write_format
from mpitrain.training.trained_model import FILES, load_with_job
from mpitrain.training.validations.validation import Measure
from mpitrain.values import nearest

FORMS = ("int8", "fp16", *FORMATS)
ACTIVATIONS = ("full", "dynamic", "calibrated")
ROUNDS = 15  # of the trained model and the exported one, in turn
LEVELS = 127  # of a signed byte, to either side


class Exported(NamedTuple):
    """What was written, and what it is like beside the trained model: pairs are (before, after).

    Attributes:
        layers: names of those that have fewer bits; left: those with parameters that stayed as they are, and why.
        layer_bytes: of the parameters of `layers`; file_bytes: of the model's file and of this one.
        batch_s: seconds of a forward pass over one batch, medians; metrics: on the validation set, empty without one.
    """

    path: Path
    layers: tuple[str, ...]
    left: dict[str, str]
    layer_bytes: tuple[int, int]
    file_bytes: tuple[int, int]
    batch_s: tuple[float, float]
    metrics: tuple[dict[str, float], dict[str, float]]


@interruptible()
def export(
    run_dir: str | Path,
    out: str | Path,
    *,
    form: str = "int8",
    activations: str = "full",
    job: Job | str | Path | None = None,
    which: str = "last",
    overwrite: bool = False,
) -> Exported:
    """Write the model of a finished run in fewer bits, or in another format.

    Args:
        run_dir, job, which: as of `mpitrain.load`.
        form: "int8": the weights of linear layers as bytes, with a scale for each row; "fp16": all parameters, and what
            is computed with them; "torchscript": `torch.jit.load(FILE)` is the model; "onnx": for ONNX runtimes.
        activations: of "int8": "full", 32-bit numbers; "dynamic", bytes whose scale is that of each row as it comes;
            "calibrated", bytes whose scale is the largest number that the layer has met in the validation set.
        overwrite: replace `out` if there is one.

    Raises:
        UsageError: as `mpitrain.load`; a package is not installed, or torchao has no layer to quantise; the model's
            forward pass cannot be written in this form, such as where an operator has none; the job has no data to
            calibrate on; `out` exists.
    """
    if form not in FORMS:
        raise UsageError(f"mpitrain.export: form={form!r}{nearest(form, list(FORMS))}")
    if activations not in ACTIVATIONS or (form != "int8" and activations != "full"):
        of = f" of form={form!r}" if activations in ACTIVATIONS else nearest(activations, list(ACTIVATIONS))
        raise UsageError(f"mpitrain.export: activations={activations!r}{of}; these are of int8")
    path = Path(out)
    check_new(path, overwrite)
    check_installed(form)
    made_by, module = load_with_job(run_dir, job, which)
    if served := served_layers(module):
        raise UsageError(
            f"the rows of {', '.join(served)} are in tables-0.safetensors and its kin of {run_dir}, and no program "
            "holds them: export a model whose layers hold their own weights"
        )
    module.requires_grad_(False)
    arguments = _first_arguments(made_by, module)
    names: list[str] = []
    if form in FORMATS:
        smaller = kept = write_format(form, module, arguments, path, lambda: _program(module, arguments))
    else:
        smaller, names = _halved(module) if form == "fp16" else _quantised(made_by, module, activations)
        program = _program(smaller, arguments)
        with writing(path), durably_replaced(path) as temporary, open(temporary, "wb") as file:
            torch.export.save(program, file)
        kept = torch.export.load(str(path)).module()
    held = smaller.module if isinstance(smaller, _Half) else smaller
    return Exported(
        path, tuple(names), {} if form in FORMATS else _left(module, names),
        (_layer_bytes(module, names), _layer_bytes(held, names)),
        (model_bytes(Path(run_dir), FILES[which]), path.stat().st_size),
        _in_turn(lambda: module(*arguments), lambda: kept(*arguments)),
        (_measured(made_by, module), _measured(made_by, smaller)),
    )  # fmt: skip


def _left(module: nn.Module, names: list[str]) -> dict[str, str]:
    """The layers that are none of these, and why they stayed as they were."""
    return {
        name: f"torchao quantises nn.Linear, this is {type(layer).__name__}"
        for name, layer in _layers(module).items()
        if name not in names
    }


class _Half(nn.Module):
    """A module of 16-bit numbers, for arguments and results of 32 bits."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return _cast(
            self.module(*_cast(arguments, torch.float32, torch.float16)), torch.float16, torch.float32
        )


def _halved(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """A copy in 16 bits, and the names of its layers."""
    return _Half(copy.deepcopy(module).half()), list(_layers(module))


def _cast(tree: object, before: torch.dtype, after: torch.dtype) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.to(after) if isinstance(leaf, torch.Tensor) and leaf.dtype is before else leaf, tree
    )


def _layers(module: nn.Module) -> dict[str, nn.Module]:
    """Those with parameters of their own."""
    return {
        name or type(layer).__name__: layer
        for name, layer in module.named_modules()
        if next(layer.parameters(recurse=False), None) is not None
    }


def _layer_bytes(module: nn.Module, names: list[str]) -> int:
    """Of the parameters of these layers, scales included."""
    layers = _layers(module)
    return sum(
        _tensor_bytes(parameter) for name in names for parameter in layers[name].parameters(recurse=False)
    )


def _tensor_bytes(tensor: torch.Tensor) -> int:
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_tensor_bytes(getattr(tensor, name)) for name in names)


def _first_arguments(job: Job, module: nn.Module) -> tuple[Any, ...]:
    """What the job's loss hands to the module for the first samples of the validation set, or of the training set."""
    data = job.validate or job.data
    catalogue, found = data.scan(), []

    def note(called: nn.Module, arguments: tuple[object, ...], options: dict[str, Any]) -> None:
        if options:
            raise UsageError(
                f"the job's loss calls its model with {', '.join(options)} by name, and a program takes its arguments "
                "by place: call it without names"
            )
        found.append(arguments)

    hook = module.register_forward_pre_hook(note, with_kwargs=True)
    with hook, data.reader(catalogue, job.seed) as reader, torch.inference_mode():
        count = min(catalogue.num_samples, max(2, job.batch_size))
        batch: Batch = next(iter(reader.sequential(count, 0, count)))
        Checked(job.loss, "loss")(module, batch)
    if not found:
        raise UsageError("the job's loss has not called its model, so nobody knows what it takes")
    return tuple(found[0])


def _quantised(job: Job, module: nn.Module, activations: str) -> tuple[nn.Module, list[str]]:
    """A copy whose linear layers are quantised, and their names."""
    torchao = _import_torchao()
    smaller = copy.deepcopy(module)
    names = [name for name, layer in smaller.named_modules() if type(layer) is nn.Linear]
    if not names:
        kinds = sorted({type(layer).__name__ for layer in _layers(module).values()})
        raise UsageError(
            f"torchao quantises nn.Linear, and this model has none: {', '.join(kinds)}; use --fp16"
        )
    if activations == "calibrated":
        for name, (largest, num_dims) in _largest(job, module, names).items():
            config: Any = torchao.Int8StaticActivationInt8WeightConfig(
                act_quant_scale=torch.full([1] * num_dims, largest / LEVELS),
                granularity=[torchao.PerTensor(), torchao.PerRow()],
            )
            torchao.quantize_(smaller, config, lambda layer, called, name=name: called == name)
    else:
        config = (
            torchao.Int8DynamicActivationInt8WeightConfig() if activations == "dynamic"
            else torchao.Int8WeightOnlyConfig()
        )  # fmt: skip
        torchao.quantize_(smaller, config, lambda layer, called: called in names)
    return smaller, [name or type(smaller).__name__ for name in names]


def _import_torchao() -> Any:
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it notes every kernel for GPUs that this host cannot load
    try:
        import torchao.quantization
    except ImportError as error:
        if importlib.util.find_spec("torchao") is None:
            why = "which is not installed: pip install mpitrain[int8]"
        else:
            known = torchao_for()
            way_out = f"pip install torchao=={known}" if known else "install another torchao"
            why = f"which does not go with torch {full_version()} ({error}): {way_out}, or use --fp16"
        raise UsageError(f"int8 is made by torchao, {why}") from None
    finally:
        logging.disable(disabled)
    return torchao.quantization


def _largest(job: Job, module: nn.Module, names: list[str]) -> dict[str, tuple[float, int]]:
    """The largest number, sign aside, that each of these layers takes in over the validation set, and in how many
    dimensions its numbers stand."""
    if job.validate is None:
        raise UsageError('activations="calibrated" needs data to calibrate on, and the job has no validate=')
    found, num_dims = dict.fromkeys(names, 0.0), dict.fromkeys(names, 2)

    def note(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def look(layer: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            found[name] = max(found[name], float(arguments[0].abs().max()))
            num_dims[name] = arguments[0].dim()

        return look

    hooks = [module.get_submodule(name).register_forward_pre_hook(note(name)) for name in names]
    try:
        _measured(job, module)
    finally:
        for hook in hooks:
            hook.remove()
    if never := [name for name, largest in found.items() if not largest]:
        raise UsageError(f"layer {never[0]!r} has met no number in the validation set, so it has no scale")
    return {name: (largest, num_dims[name]) for name, largest in found.items()}


def _program(module: nn.Module, arguments: tuple[object, ...]) -> torch.export.ExportedProgram:
    """The module's forward pass for any number of samples."""
    shapes = pytree.tree_map(
        lambda leaf: {0: torch.export.Dim.AUTO} if isinstance(leaf, torch.Tensor) and leaf.dim() else None,
        arguments,
    )
    try:
        with torch.no_grad():
            takes = inspect.signature(module.forward).parameters.values()
            as_list = any(one.kind is one.VAR_POSITIONAL for one in takes)
            by_place = (shapes,) if as_list else shapes
            return torch.export.export(module.eval(), arguments, dynamic_shapes=by_place)
    except Exception as error:  # whatever torch's tracer meets
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(
            f"torch.export cannot write this model's forward pass as a program: {why}"
        ) from error


def _in_turn(before: Callable[[], object], after: Callable[[], object]) -> tuple[float, float]:
    """Medians of the seconds of both, which take turns; the first round is not counted."""
    seconds: tuple[list[float], list[float]] = [], []
    with torch.inference_mode():
        for _ in range(ROUNDS + 1):
            for run, took in zip((before, after), seconds, strict=True):
                began_s = time.perf_counter()
                run()
                took.append(time.perf_counter() - began_s)
    return statistics.median(seconds[0][1:]), statistics.median(seconds[1][1:])


def _measured(job: Job, module: nn.Module) -> dict[str, float]:
    """The job's metrics of the module; empty where there is nothing to measure on."""
    if job.validate is None:
        return {}
    return Measure(job, module, job.validate.scan(), torch.device("cpu"))()
