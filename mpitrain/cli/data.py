"""`mpitrain data`: make shards, and see what is in them."""

from __future__ import annotations

import argparse
from typing import Any

from mpitrain.cli.parser import natural, positive
from mpitrain.environment import launched_rank
from mpitrain.errors import EXIT_OK

_DESCRIPTION = """\
Make HDF5 shards from samples, and show what shards hold."""

_PACK_DESCRIPTION = """\
Pack samples into HDF5 shards: DEST/train-00000.h5, ... and, for what is held
back, DEST/validate-00000.h5, ... The samples are permuted by the seed, then
split. The same source and options give the same shards: a complete pack is
left alone, an interrupted one redone."""

_PACK_EPILOG = """\
sources:
  digits                           scikit-learn's 1,797 handwritten digits: x
                                   float32 (1, 8, 8) in [0, 1], y int64
  topics                           the text that ships with Python: text uint8
                                   (65,), 64 ASCII characters and the next
  FILE.npz                         arrays with one entry per sample, as
                                   numpy.savez(FILE, x=..., y=...) writes them

examples:
  mpitrain data pack digits data/digits
  mpitrain data pack samples.npz data/mine --validate 0.1 --shard-samples 100000"""

_STAGE_DESCRIPTION = """\
Copy a pack to a folder on a node's own disk and compare every shard with its
SHA-256. Run it once a node; a second call finds the copy."""

_INFO_EPILOG = """\
examples:
  mpitrain data info "data/digits/*.h5"    with quotes: mpitrain expands it"""


def add_parser(commands: Any) -> None:
    """Add `data` and its own subcommands to the command's subparsers."""
    parser = commands.add_parser("data", help="make and inspect training data", description=_DESCRIPTION)
    actions = parser.add_subparsers(title="commands", dest="action", metavar="COMMAND", required=True)
    _add_pack(actions)
    _add_stage(actions)
    info = actions.add_parser(
        "info", help="show what shards hold", description="Show what shards hold.", epilog=_INFO_EPILOG
    )
    info.add_argument("pattern", metavar="PATTERN", help='shards, such as "data/digits/train-*.h5"')
    info.set_defaults(run=run_info)


def _add_pack(actions: Any) -> None:
    pack = actions.add_parser(
        "pack", help="pack samples into shards", description=_PACK_DESCRIPTION, epilog=_PACK_EPILOG
    )
    pack.add_argument("source", metavar="SOURCE", help="digits, topics, or a .npz file")
    pack.add_argument("dest", metavar="DEST", help="directory for the shards")
    pack.add_argument(
        "--validate",
        type=_fraction,
        default=0.2,
        metavar="FRACTION",
        help="part for validation (default: 0.2)",
    )
    pack.add_argument(
        "--shard-samples", type=positive, metavar="N", help="samples per shard (default: about 256 MiB)"
    )
    pack.add_argument(
        "--chunk-samples", type=positive, metavar="N", help="samples read at once (default: about 1 MiB)"
    )
    pack.add_argument(
        "--seed", type=natural, default=0, metavar="S", help="of permutation and split (default: 0)"
    )
    pack.set_defaults(run=run_pack)


def _add_stage(actions: Any) -> None:
    stage = actions.add_parser(
        "stage", help="copy a pack to a node's own disk, verified", description=_STAGE_DESCRIPTION
    )
    stage.add_argument("source", metavar="PACK", help="folder that `data pack` wrote")
    stage.add_argument("dest", metavar="DEST", help="folder to copy it into; $VARIABLES are this node's")
    stage.set_defaults(run=run_stage)
    told = "Compare every shard of a pack with its SHA-256."
    check = actions.add_parser("check", help="compare shards with their SHA-256", description=told)
    check.add_argument("source", metavar="PACK", help="folder that `data pack` wrote")
    check.set_defaults(run=run_check)


def _fraction(text: str) -> float:
    """A number in [0, 1)."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number in [0, 1)")
    return value


def run_pack(arguments: argparse.Namespace) -> int:
    """Pack; prints one line for each kind of shard."""
    if launched_rank() != 0:  # under mpirun: packing is one process' work
        return EXIT_OK
    from pathlib import Path

    from mpitrain.data.pack import PackOptions, pack
    from mpitrain.data.sources import load_source

    options = PackOptions(
        arguments.validate, arguments.shard_samples, arguments.chunk_samples, arguments.seed
    )
    directory = Path(arguments.dest).expanduser()
    manifest, written = pack(load_source(arguments.source), directory, options, arguments.source)
    for split in ("train", "validate"):
        counts = [samples for name, samples in manifest.files.items() if name.startswith(split)]
        shards = f"{len(counts)} shard{'s' * (len(counts) != 1)}"
        print(f"{directory / split}-*.h5: {sum(counts)} samples in {shards}")
    print("packed" if written else "already packed: nothing to do")
    return EXIT_OK


def run_stage(arguments: argparse.Namespace) -> int:
    """Copy; prints where the shards are now. srun starts one on each node, so every caller copies."""
    import os
    from pathlib import Path

    from mpitrain.data.stage import stage

    dest = Path(os.path.expandvars(arguments.dest)).expanduser()
    target, copied = stage(Path(arguments.source).expanduser(), dest)
    print(f"{target}: " + (f"staged, {copied / 2**20:.1f} MiB" if copied else "already there"))
    return EXIT_OK


def run_check(arguments: argparse.Namespace) -> int:
    """Compare; what is wrong is one error that names every shard."""
    if launched_rank() != 0:
        return EXIT_OK
    from pathlib import Path

    from mpitrain.data.stage import damaged
    from mpitrain.errors import DataError

    problems = list(damaged(Path(arguments.source).expanduser()))
    if problems:
        raise DataError("; ".join(problems))
    print(f"{arguments.source}: every shard is what was packed")
    return EXIT_OK


def run_info(arguments: argparse.Namespace) -> int:
    """Print counts, shapes, dtypes and what reading takes."""
    if launched_rank() != 0:
        return EXIT_OK
    from mpitrain.data import Shards
    from mpitrain.data.cache import slots_for

    catalogue = Shards(arguments.pattern).scan()
    for file in catalogue.files:
        print(f"{file.path}: {file.num_samples} samples, {file.chunk_samples} to a chunk")
    for name, spec in catalogue.arrays.items():
        print(f"array {name}: {spec}, {spec.sample_bytes} bytes a sample")
    total = catalogue.num_samples * catalogue.sample_bytes
    print(f"total: {catalogue.num_samples} samples, {total / 2**20:.1f} MiB decoded")
    memory = slots_for(catalogue) * catalogue.chunk_bytes
    mixed = min(catalogue.num_samples, catalogue.window_chunks * catalogue.files[0].chunk_samples)
    print(
        f"reading: windows of {catalogue.window_chunks} chunks mix about {mixed} samples"
        f" and take up to {memory / 2**20:.1f} MiB"
    )
    return EXIT_OK
