"""`mpitrain export`: a trained model as one file, in fewer bits or for other programs."""

from __future__ import annotations

import argparse
from typing import Any

from mpitrain.cli.common.options import command, option, switch
from mpitrain.system.saying import say

_DESCRIPTION = """\
Write the model of a finished run, or of an ensemble, as one file that needs
neither mpitrain nor the job. In fewer bits, torch.export.load(FILE).module() is
the model (of int8: once torchao.quantization is imported); of TorchScript,
torch.jit.load(FILE); of ONNX, any ONNX runtime reads it.
Size, speed and the job's metrics are printed before and after."""

_EPILOG = """\
examples:
  mpitrain export runs/mine --int8 -o model.pt2
  mpitrain export runs/mine --int8 --activations dynamic -o model.pt2
  mpitrain export runs/mine --fp16 -o half.pt2
  mpitrain export runs/mine --torchscript -o model.pt
  mpitrain export ensembles/best --onnx -o model.onnx"""


def add_parser(commands: Any) -> None:
    """Add `export` to the command's subparsers."""
    parser = command(
        commands, "export", "write a trained model as one file", run_export, _DESCRIPTION, _EPILOG
    )
    option(parser, "run_dir", "RUN_DIR", "of the finished run")
    form = parser.add_mutually_exclusive_group(required=True)
    for name, text in (
        ("int8", "weights of linear layers in 8 bits"),
        ("fp16", "parameters and what is computed in 16 bits"),
        ("torchscript", "TorchScript, for programs in C++ and older ones in Python"),
        ("onnx", "ONNX, for runtimes of other makers (pip install mpitrain[onnx])"),
    ):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=text)
    option(
        parser, "--activations", "HOW",
        "what an int8 layer takes in: full (default), dynamic (8 bits, each row scaled as it comes) or calibrated "
        "(8 bits, scaled by the validation set)",
        default="full",
    )  # fmt: skip
    option(parser, "-o --out", "FILE", "the file to write", required=True)
    switch(parser, "--overwrite", "replace FILE if it exists")
    option(parser, "--job", "JOB", "job file, where the run's own has moved")
    option(
        parser, "--which", "NAME", "which of the run's models: last (default), best or ema", default="last"
    )


def run_export(arguments: argparse.Namespace) -> None:
    """Export, and print what it is like."""
    from mpitrain.system.sizes import size_text
    from mpitrain.training.trained.export import export

    done = export(
        arguments.run_dir,
        arguments.out,
        form=arguments.form,
        activations=arguments.activations,
        job=arguments.job,
        which=arguments.which,
        overwrite=arguments.overwrite,
    )
    lines: list[tuple[str, ...]] = [("", "before", "after", "after / before")]
    sizes = [(f"{len(done.layers)} layers", done.layer_bytes)] * bool(done.layers)
    for name, pair in (*sizes, ("file", done.file_bytes)):
        lines.append((name, *map(size_text, pair), f"{pair[1] / pair[0]:.2f}"))
    before_ms, after_ms = (seconds * 1e3 for seconds in done.batch_s)
    lines.append(
        ("a batch", f"{before_ms:.3g} ms", f"{after_ms:.3g} ms", f"{done.batch_s[1] / done.batch_s[0]:.2f}")
    )
    for name, value in done.metrics[0].items():
        after = done.metrics[1][name]
        lines.append((name, f"{value:.4g}", f"{after:.4g}", f"{after - value:+.2g} absolute"))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    for line in lines:
        say(
            "  ".join(
                [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]
            )
        )
    for layer, why in done.left.items():
        say(f"as it was: layer {layer}: {why}")
    say(f"written to {done.path}")
