"""`mpitrain data`: make shards, see what is in them, check and stage them."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from mpitrain.cli.common.options import asked, command, option, switch
from mpitrain.cli.common.ranks import with_ranks
from mpitrain.errors import DataError
from mpitrain.system.launched.launch_variables import launched_rank
from mpitrain.system.number_texts import fraction, natural, number, positive
from mpitrain.system.saying import say

_DESCRIPTION = """\
Make HDF5 shards from samples, and show what shards hold."""

_PACK_DESCRIPTION = """\
Pack samples into HDF5 shards: DEST/train-00000.h5, ... and, for what is held
back, DEST/validate-00000.h5, ... The samples are permuted by the seed, then
split. The same source and options give the same shards, whether one process
packs or many ranks do: a complete pack is left alone, an interrupted one is
gone on with."""

_PACK_EPILOG = """\
sources (several files: a pattern in quotes):
  digits                           scikit-learn's 1,797 handwritten digits: x
                                   float32 (1, 8, 8) in [0, 1], y int64
  topics                           the text that ships with Python: text uint8
                                   (65,), 64 ASCII characters and the next
  FILE.npz FILE.npy                arrays with one entry per sample, as
                                   numpy.savez(FILE, x=..., y=...) writes them
  FOLDER                           images in one subfolder per class: x uint8
                                   (3, height, width), of 16 bits and floats
                                   (1, height, width) as they are, y int64
                                   [images]
  FILE.csv FILE.parquet            columns, or arrays made of them  [table]
  FILE.tar                         WebDataset: an array per ending
  FILE.h5                          datasets of any HDF5 file
  MODULE:FUNCTION FILE.py:FUNCTION what it returns: arrays by name, a map-style
                                   dataset, or any iterable of samples
[extra]: needs pip install 'mpitrain[extra]'.

examples:
  mpitrain data pack digits data/digits
  mpitrain data pack samples.npz data/mine --validate 0.1 --shard-samples 100000
  mpitrain data pack photos data/photos --image-size 224x224 --compression gzip
  mpitrain data pack table.csv data/table --arrays "x=width+height,y=label"
  mpitrain launch -n 8 data pack "train-*.tar" data/big --encoded"""

_STAGE_DESCRIPTION = """\
Copy a pack to a folder on a node's own disk and compare every shard with its
SHA-256. Run it once a node; a second call finds the copy."""

_STAGE_EPILOG = """\
examples:
  mpitrain data stage data/big '$TMPDIR/big'    quoted: each node's own"""

_UNSTAGE_DESCRIPTION = """\
Remove the copy that `data stage` made on this node; the pack itself stays.
With --user the copy stays, too, while others use it."""

_UNSTAGE_EPILOG = """\
examples:
  mpitrain data unstage data/big '$TMPDIR/big'"""

_CHECK_DESCRIPTION = """\
Read every shard as a job would: compare its SHA-256 with the index, every
chunk with its checksum, and look for values that are not finite. Says what
would make reading slow. Many ranks share the work under `mpitrain launch`."""

_CHECK_EPILOG = """\
examples:
  mpitrain data check data/digits --workers 8
  mpitrain data check "others/*.h5"
  mpitrain launch -n 8 data check data/big"""

_INFO_EPILOG = """\
examples:
  mpitrain data info "data/digits/*.h5"    with quotes: mpitrain expands it"""


def add_parser(commands: Any) -> None:
    """Add `data` and its own subcommands to the command's subparsers."""
    parser = commands.add_parser("data", help="make and inspect training data", description=_DESCRIPTION)
    actions = parser.add_subparsers(title="commands", dest="action", metavar="COMMAND", required=True)
    _add_pack(actions)
    _add_stage(actions)
    info = command(actions, "info", "show what shards hold", run_info, "Show what shards hold.", _INFO_EPILOG)
    option(info, "pattern", "PATTERN", 'shards, such as "data/digits/train-*.h5", or a folder')
    _add_trust(info)


def _add_pack(actions: Any) -> None:
    pack = command(actions, "pack", "pack samples into shards", run_pack, _PACK_DESCRIPTION, _PACK_EPILOG)
    option(pack, "source", "SOURCE", "a name, a file, a folder or Python; see below")
    option(pack, "dest", "DEST", "directory for the shards")
    option(pack, "--validate", "FRACTION", "part for validation (default: 0.2)", fraction, 0.2)
    option(pack, "--shard-samples", "N", "samples per shard (default: about 256 MiB)", positive)
    option(pack, "--chunk-samples", "N", "samples read at once (default: about 1 MiB)", positive)
    option(pack, "--seed", "S", "of permutation and split (default: 0)", natural, 0)
    option(
        pack, "--compression", "NAME[:LEVEL]",
        "gzip, or zstd or blosc with pip install 'mpitrain[compression]' (default: none)",
    )  # fmt: skip
    _add_source_options(pack.add_argument_group("of the source"))


def _add_source_options(group: Any) -> None:
    option(
        group, "--arrays", "TEXT",
        'arrays to pack under which names, such as "x=a+b,y=label": columns side by side; "x=*": all '
        "numbers not named elsewhere",
    )  # fmt: skip
    option(
        group, "--variable", "NAME",
        "an array whose samples differ in length; may be given often",
        default=[], action="append",
    )  # fmt: skip
    option(group, "--image-size", "HxW", "scale and crop images to this size", _size)
    switch(group, "--encoded", "keep images as the bytes of their files")
    option(
        group, "--accept-loss", "WHAT,...",
        "what images may lose, otherwise they are refused: frames, transparency, depth (all but 8 bits), "
        "channels (all but the colours), colors (of CMYK and the like)",
        _losses, (),
    )  # fmt: skip
    _add_trust(group)


def _add_trust(group: Any, sizes: bool = True) -> None:
    """What files from elsewhere may do."""
    switch(
        group, "--allow-external",
        "read also what lies elsewhere: links out of the folder, HDF5 datasets in other files",
    )  # fmt: skip
    if sizes:
        option(
            group, "--max-gib", "G",
            "memory that a file may take by what it merely declares (default: 4)",
            _gib, 4.0,
        )  # fmt: skip


def _add_stage(actions: Any) -> None:
    stage = command(
        actions,
        "stage",
        "copy a pack to a node's own disk, verified",
        run_stage,
        _STAGE_DESCRIPTION,
        _STAGE_EPILOG,
    )
    option(stage, "source", "PACK", "folder that `data pack` wrote")
    option(stage, "dest", "DEST", "folder to copy it into; $VARIABLES are this node's")
    _add_trust(stage, sizes=False)
    _add_user(
        stage, "who needs it, such as 'job 12', until unstage is called for the same; without, it is kept"
    )
    unstage = command(
        actions,
        "unstage",
        "remove a staged copy from a node's own disk",
        run_unstage,
        _UNSTAGE_DESCRIPTION,
        _UNSTAGE_EPILOG,
    )
    option(unstage, "source", "PACK", "folder that was staged; only its name matters")
    option(unstage, "dest", "DEST", "folder that it was copied into")
    _add_user(unstage, "who does not need it any more; others may; without, it is removed all the same")
    check = command(
        actions,
        "check",
        "verify sums, chunks and values, and advise",
        run_check,
        _CHECK_DESCRIPTION,
        _CHECK_EPILOG,
    )
    option(check, "target", "PACK", "folder that `data pack` wrote, or a pattern of files")
    option(check, "--workers", "N", "are there chunks enough for N workers?", positive)
    _add_trust(check)


def _add_user(parser: Any, text: str) -> None:
    option(parser, "--user", "NAME", text, default="")


def _gib(text: str) -> float:
    """A size above 0."""
    return number(text, lambda value: 0 < value < math.inf, "a number of GiB above 0")


def _losses(text: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in text.split(",") if one.strip())


def _size(text: str) -> tuple[int, int]:
    """Height and width in pixels."""
    height, _, width = text.partition("x")
    if not (height.isdigit() and width.isdigit() and int(height) and int(width)):
        raise argparse.ArgumentTypeError(f"{text!r} is not HEIGHTxWIDTH in pixels, such as 224x224")
    return int(height), int(width)


@with_ranks
def run_pack(arguments: argparse.Namespace, ranks: Any) -> None:
    """Pack, alone or with the other ranks of the launch; rank 0 prints one line for each kind of shard."""
    from mpitrain.data.sources import SourceOptions, open_source
    from mpitrain.data.write.pack import PackOptions, pack
    from mpitrain.data.write.progress import Pace
    from mpitrain.reporting.console import Console
    from mpitrain.system.files.outside import at_home

    console = Console(sys.stderr, quiet=ranks.rank != 0)
    try:
        directory = at_home(arguments.dest)
        options = asked(PackOptions, arguments)
        source = open_source(
            arguments.source, asked(SourceOptions, arguments, variable=tuple(arguments.variable))
        )
    except Exception as error:
        ranks.agree(error)
        raise
    ranks.agree(None)

    def line(text: str) -> None:
        console.clear()
        say(text)

    def note(text: str) -> None:
        line(f"note: {text}")

    pace = Pace(console, f"packing into {directory}", "samples", ranks.size)
    try:
        manifest, written = pack(source, directory, options, ranks=ranks, progress=pace, say=note, tell=line)
    finally:
        console.clear()
    if ranks.rank == 0:
        for split in ("train", "validate"):
            counts = [samples for name, samples in manifest.files.items() if name.startswith(split)]
            shards = f"{len(counts)} shard{'s' * (len(counts) != 1)}"
            say(f"{directory / split}-*.h5: {sum(counts)} samples in {shards}")
        say("packed" if written else "already packed: nothing to do")
        if written and (idle := ranks.size - len(manifest.files)) > 0:
            say(f"note: {idle} of {ranks.size} ranks had no shard: smaller --shard-samples make more shards")


def run_stage(arguments: argparse.Namespace) -> None:
    """Copy; prints where the shards are now. srun starts one on each node, so every caller copies."""
    from mpitrain.data.read.stage import stage
    from mpitrain.data.read.stage_users import KEPT
    from mpitrain.system.files.outside import at_home, expanded

    source, dest = at_home(arguments.source), expanded(arguments.dest)
    target, copied = stage(source, dest, arguments.allow_external, arguments.user or KEPT)
    say(f"{target}: " + (f"staged, {copied / 2**20:.1f} MiB" if copied else "already there"))


def run_unstage(arguments: argparse.Namespace) -> None:
    """Remove; prints what became of the copy."""
    from mpitrain.data.read.stage import unstage
    from mpitrain.system.files.outside import at_home, expanded

    target, users = unstage(at_home(arguments.source), expanded(arguments.dest), arguments.user)
    say(f"{target}: " + (f"still used by {', '.join(users)}" if users else "removed"))


@with_ranks
def run_check(arguments: argparse.Namespace, ranks: Any) -> None:
    """Check, alone or with the other ranks; what is wrong is one error that names every place."""
    from mpitrain.data.tools.check import check
    from mpitrain.data.write.progress import Pace
    from mpitrain.reporting.console import Console
    from mpitrain.system.files.outside import Trust

    console = Console(sys.stderr, quiet=ranks.rank != 0)
    pace = Pace(console, "checking", "shards")
    trust = Trust(arguments.allow_external, arguments.max_gib)
    found = check(arguments.target, arguments.workers, ranks, pace, trust)
    console.clear()
    error = DataError("; ".join(found.problems)) if found.problems else None
    ranks.agree(error if ranks.rank == 0 else None)
    if ranks.rank == 0:
        for advice in found.advice:
            say(f"advice: {advice}")
        checked = "every shard is what was packed" if found.indexed else "every chunk can be read"
        size = f"{found.num_shards} shards, {found.num_samples} samples"
        say(f"{arguments.target}: {size}: {checked}, every value is finite")


def run_info(arguments: argparse.Namespace) -> None:
    """Print counts, shapes, dtypes, filters and what reading takes."""
    if launched_rank() != 0:
        return
    from mpitrain.data.tools.info import info
    from mpitrain.system.files.outside import Trust

    for line in info(arguments.pattern, Trust(arguments.allow_external, arguments.max_gib)):
        say(line)
