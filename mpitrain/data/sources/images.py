"""Image files: a folder with one subfolder per class, through Pillow.

Decoded images are channels first: RGB, uint8, or one channel of 16 bits, 32 bits or floats as the file has them
(`pixels.py`); encoded ones stay the bytes of their file, and a transform decodes them while training. What is left out
of a folder is said.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.format.columns import Array, Column, Columns, Ragged, sample_bytes
from mpitrain.data.read.order import IntArray
from mpitrain.data.sources.base import Source, SourceOptions, file_fingerprint
from mpitrain.data.sources.noted import Noted
from mpitrain.data.sources.pixels import decode, look_at_headers
from mpitrain.errors import DataError, UsageError
from mpitrain.system.files.outside import check_inside, check_regular, open_regular

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
OTHERS = (
    "__MACOSX",
    "@eaDir",
    "lost+found",
)  # folders that systems make; those with a dot in front are none either
VERSION = 2  # of how files become samples: 1 took files as they lay, and everything to RGB


def is_image(name: str) -> bool:
    """Whether a file's name ends like an image's."""
    return name.lower().endswith(ENDINGS)


def is_apple_double(name: str) -> bool:
    """Whether a file is what macOS lays beside another one of that name where a disk has no place for it."""
    return name.startswith("._")


def _is_no_class(name: str) -> bool:
    return name.startswith(".") or name in OTHERS


class ImageFolder(Source):
    """`x`, and `y`: int64, the class: the number of the image's subfolder in alphabetical order."""

    def __init__(self, folder: Path, name: str, options: SourceOptions):
        self.name, self._options = name, options
        self.classes = self._find_classes(folder)
        self._files: list[tuple[Path, int]] = []
        for label, entry in enumerate(self.classes):
            found = self._images_in(folder, folder / entry)
            self._files += [(path, label) for path in found]
            if not found:
                self.left_out.add("classes have no images and keep their number", str(folder / entry))
        self.num_samples = len(self._files)
        if not self._files:
            raise UsageError(
                f"{folder}: holds no images; expected one subfolder per class, with images in it"
            )
        self.sample_bytes = sample_bytes(self.probe())

    def _find_classes(self, folder: Path) -> list[str]:
        classes = []
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if not entry.is_dir():
                if is_image(entry.name):
                    self.left_out.add("images lie beside the classes' folders and are left out", entry.path)
            elif _is_no_class(entry.name):
                self.left_out.add("folders are no classes by their names and are left out", entry.path)
            else:
                classes.append(entry.name)
        return classes

    def look_ahead(self, until: float) -> list[str]:
        images = [(str(path), functools.partial(open_regular, path)) for path, _ in self._files]
        return look_at_headers(images, self._options, until)

    def take(self, rows: IntArray) -> Columns:
        chosen = [self._files[row] for row in rows.tolist()]
        images = [_read(path) for path, _ in chosen]
        labels = np.array([label for _, label in chosen], dtype=np.int64)
        names = [str(path) for path, _ in chosen]
        return {"x": images_column(images, names, self._options, self.noted), "y": labels}

    def _images_in(self, root: Path, folder: Path) -> list[Path]:
        """The images below a class's folder; folders that are links below it are not entered.

        Raises:
            DataError: one leads out of `root`, which is not allowed, or nowhere.
        """
        external = self._options.allow_external
        check_inside(root, [folder] if folder.is_symlink() else [], external)
        found = []
        for place, folders, names in os.walk(folder):
            for name in filter(_is_no_class, folders):
                self.left_out.add(
                    "folders within classes are left out by their names", os.path.join(place, name)
                )
            folders[:] = [name for name in folders if not _is_no_class(name)]
            for name in names:
                path = Path(place, name)
                if is_apple_double(name) or not is_image(name):
                    self.left_out.add("files are no images by their names and are left out", str(path))
                    continue
                if path.is_symlink():
                    check_inside(root, [path], external)
                    if not path.exists():
                        raise DataError(f"{path}: is a link that leads nowhere; remove it")
                check_regular(path)
                if not path.is_dir():
                    found.append(path)
        return sorted(found)

    def fingerprint(self) -> str:
        return file_fingerprint([path for path, _ in self._files])

    def facts(self) -> dict[str, Any]:
        return {"classes": self.classes} | ({} if self._options.encoded else {"decoding": VERSION})


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def images_column(files: list[bytes], names: list[str], options: SourceOptions, noted: Noted) -> Column:
    """Images as one column: (samples, channels, height, width), or each file's bytes.

    Raises:
        DataError: one cannot be decoded, would lose something, or has another size or type than the first; names it.
    """
    if options.encoded:
        return Ragged.of([np.frombuffer(content, dtype=np.uint8) for content in files])
    images: list[Array] = []
    for content, name in zip(files, names):
        images.append(decode(content, name, options, len(files), noted))
        _check_alike(images[-1], name, images[0], names[0])
    return np.stack(images)


def _check_alike(image: Array, name: str, first: Array, first_name: str) -> None:
    if image.shape[1:] != first.shape[1:]:
        raise DataError(
            f"{name}: is {image.shape[1]} x {image.shape[2]} pixels, {first_name} is {first.shape[1]} x"
            f" {first.shape[2]}; give --image-size HEIGHTxWIDTH, or keep the files' bytes with --encoded"
        )
    if (image.shape[0], image.dtype) != (first.shape[0], first.dtype):
        raise DataError(
            f"{name}: is {image.dtype} in {image.shape[0]} channel(s), {first_name} is {first.dtype} in "
            f"{first.shape[0]}; convert one of them, or keep the files' bytes with --encoded"
        )
