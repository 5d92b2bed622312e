"""`mpitrain export`: a trained model as one file, in fewer bits or for other programs."""

from __future__ import annotations

import argparse
from typing import Any

from mpitrain.cli.common.options import option, switch
from mpitrain.errors import EXIT_OK
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
    parser = commands.add_parser(
        "export", help="write a trained model as one file", description=_DESCRIPTION, epilog=_EPILOG
    )
    option(parser, "run_dir", "RUN_DIR", "of the finished run")
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument(
        "--int8", dest="form", action="store_const", const="int8", help="weights of linear layers in 8 bits"
    )
    form.add_argument(
        "--fp16",
        dest="form",
        action="store_const",
        const="fp16",
        help="parameters and what is computed in 16 bits",
    )
    form.add_argument(
        "--torchscript",
        dest="form",
        action="store_const",
        const="torchscript",
        help="TorchScript, for programs in C++ and older ones in Python",
    )
    form.add_argument(
        "--onnx",
        dest="form",
        action="store_const",
        const="onnx",
        help="ONNX, for runtimes of other makers (pip install mpitrain[onnx])",
    )
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
    parser.set_defaults(run=run_export)


def run_export(arguments: argparse.Namespace) -> int:
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
    return EXIT_OK
