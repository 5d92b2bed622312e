"""Where packed samples come from: a name on the command line becomes a `Source` of samples or a `Stream` of them.

Add a source: one file in this folder and one line in `open_source`.
"""

from __future__ import annotations

import os
from pathlib import Path

from mpitrain.data.format.columns import Columns, check_columns
from mpitrain.data.sources import examples
from mpitrain.data.sources.base import ArraySource, Selection, Source, SourceOptions
from mpitrain.data.sources.files import load_npz, npy_source, npz_source
from mpitrain.data.sources.python import Stream, as_source, looks_like_python, python_source
from mpitrain.errors import UsageError
from mpitrain.system.files.outside import find_files

EXAMPLES = {"digits": examples.digits, "topics": examples.topics}
KINDS = {".npy": "npy", ".npz": "npz", ".csv": "CSV", ".csv.gz": "CSV", ".parquet": "Parquet", ".tar": "tar"}
KINDS |= dict.fromkeys((".h5", ".hdf5", ".hdf", ".he5"), "HDF5")
# What of `SourceOptions` each kind of source takes.
TAKES: dict[str, tuple[str, ...]] = dict.fromkeys(KINDS.values(), ("arrays", "allow_external", "max_gib"))
TAKES |= {
    "example": ("arrays",),
    "Python": ("variable",),
    "images": ("image_size", "encoded", "accept_loss", "allow_external", "max_gib"),
    "tar": ("arrays", "variable", "image_size", "encoded", "accept_loss", "allow_external", "max_gib"),
}
EXPECTED = (
    "give `digits`, `topics`, a file that ends in .npy, .npz, .csv, .parquet, .tar or .h5 (several: a pattern in"
    " quotes), a folder of images, or Python: MODULE:FUNCTION, FILE.py:FUNCTION"
)


def load_source(source: str) -> Columns:
    """Arrays of `digits`, `topics` or a .npz file, all with the same number of samples on axis 0.

    Raises:
        UsageError: no such source. DataError: its arrays are no samples.
    """
    if source in EXAMPLES:
        return EXAMPLES[source]()
    if source.endswith(".npz"):
        arrays: Columns = {**load_npz(_there(source)[0])}
        check_columns(arrays, source)
        return arrays
    raise UsageError(f"unknown source {source!r}: give `digits`, `topics` or the path of a .npz file")


def open_source(text: str, options: SourceOptions | None = None) -> Source | Stream:
    """The source that a name, a path or a pattern means.

    Raises:
        UsageError: no such source, or options it does not take; a package that it needs is not here.
        DataError: what is there holds no samples.
    """
    options = options or SourceOptions()
    kind, paths = _kind(text, options.allow_external)
    for name in options.given():
        if name not in TAKES[kind]:
            raise UsageError(
                f"--{name.replace('_', '-')}: a source such as {text!r} ({kind}) does not take it"
            )
    source = _open(kind, text, paths, options)
    source.chosen = options.recipe()
    return source


def _kind(text: str, allow_external: bool) -> tuple[str, list[Path]]:
    """What `text` means, one of `TAKES`, and its files."""
    if text in EXAMPLES:
        return "example", []
    if looks_like_python(text) and not os.path.exists(text):
        return "Python", []
    paths = _there(text, allow_external)
    if len(paths) == 1 and paths[0].is_dir():
        return "images", paths
    endings = {next((kind for kind in KINDS if path.name.lower().endswith(kind)), "") for path in paths}
    if len(endings) != 1:
        raise UsageError(f"{text!r} matches files of several kinds ({', '.join(sorted(endings))}); narrow it")
    kind = KINDS.get(endings.pop(), "")
    if not kind or (kind == "npz" and len(paths) > 1):
        raise UsageError(f"unknown source {text!r}: {EXPECTED}")
    return kind, paths


def _open(kind: str, text: str, paths: list[Path], options: SourceOptions) -> Source | Stream:
    """Modules that need an optional package are imported only for its files."""
    if kind == "example":
        return ArraySource(Selection(options.arrays).of(EXAMPLES[text]()), text)
    if kind == "Python":
        return python_source(text, options.variable)
    if kind == "npy":
        return npy_source(paths, text, options)
    if kind == "npz":
        return npz_source(paths[0], text, options)
    if kind == "images":
        from mpitrain.data.sources.images import ImageFolder

        return ImageFolder(paths[0], text, options)
    if kind == "tar":
        from mpitrain.data.sources.tar import TarSource

        return TarSource(paths, text, options)
    if kind == "HDF5":
        from mpitrain.data.sources.hdf5 import Hdf5Source

        return Hdf5Source(text, text, options)
    from mpitrain.data.sources.tables import ParquetSource, csv_source

    return csv_source(paths, text, options) if kind == "CSV" else ParquetSource(paths, text, options)


def _there(text: str, allow_external: bool = False) -> list[Path]:
    """The files of a path or pattern, by name.

    Raises:
        UsageError: there are none. DataError: one that a pattern matches is a link out of the pattern's folder.
    """
    files = find_files(text)
    if not files.paths:
        known = text.lower().endswith(tuple(KINDS)) or os.sep in text
        why = f"no such file (looked in {Path.cwd()})" if known else f"unknown source: {EXPECTED}"
        raise UsageError(f"{text}: {why}")
    files.check_inside(allow_external)
    return [Path(path) for path in files.paths]


__all__ = [
    "Source",
    "SourceOptions",
    "Stream",
    "as_source",
    "load_source",
    "open_source",
]
