"""Image files: a folder with one subfolder per class, through Pillow.

Decoded images are RGB, uint8, channels first; encoded ones stay the bytes of their file, and a transform decodes
them while training.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.format.columns import Array, Column, Columns, Ragged, sample_bytes
from mpitrain.data.read.order import IntArray
from mpitrain.data.sources.base import Source, SourceOptions, file_fingerprint
from mpitrain.errors import DataError, UsageError
from mpitrain.system.outside import check_inside, check_regular, check_size, open_regular, reading

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")  # Pillow would start Ghostscript for an EPS
PROBES = 64


def is_image(name: str) -> bool:
    """Whether a file's name ends like an image's."""
    return name.lower().endswith(ENDINGS)


class ImageFolder(Source):
    """`x`, and `y`: int64, the class: the number of the image's subfolder in alphabetical order."""

    def __init__(self, folder: Path, name: str, options: SourceOptions):
        self.name, self._options = name, options
        self.classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        self._files = [
            (path, label)
            for label, entry in enumerate(self.classes)
            for path in _images_in(folder, folder / entry, options.allow_external)
        ]
        self.num_samples = len(self._files)
        if not self._files:
            raise UsageError(
                f"{folder}: holds no images; expected one subfolder per class, with images in it"
            )
        probe = self.take(np.unique(np.linspace(0, self.num_samples - 1, PROBES).astype(np.int64)))
        self.sample_bytes = sample_bytes(probe)

    def take(self, rows: IntArray) -> Columns:
        chosen = [self._files[row] for row in rows.tolist()]
        images = [_read(path) for path, _ in chosen]
        labels = np.array([label for _, label in chosen], dtype=np.int64)
        return {"x": images_column(images, [str(path) for path, _ in chosen], self._options), "y": labels}

    def fingerprint(self) -> str:
        return file_fingerprint([path for path, _ in self._files])

    def facts(self) -> dict[str, Any]:
        return {"classes": self.classes}


def _images_in(root: Path, folder: Path, allow_external: bool) -> list[Path]:
    """The images below a class's folder; folders that are links below it are not entered.

    Raises:
        DataError: one leads out of `root`, which is not allowed, or nowhere.
    """
    check_inside(root, [folder] if folder.is_symlink() else [], allow_external)
    found = []
    for place, _, names in os.walk(folder):
        for name in filter(is_image, names):
            path = Path(place, name)
            if path.is_symlink():
                check_inside(root, [path], allow_external)
                if not path.exists():
                    raise DataError(f"{path}: is a link that leads nowhere; remove it")
            check_regular(path)
            if not path.is_dir():
                found.append(path)
    return sorted(found)


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def images_column(files: list[bytes], names: list[str], options: SourceOptions) -> Column:
    """Images as one column: uint8 (samples, 3, height, width), or each file's bytes.

    Raises:
        DataError: one cannot be decoded, or has another size than the first; names it.
    """
    if options.encoded:
        return Ragged.of([np.frombuffer(content, dtype=np.uint8) for content in files])
    images: list[Array] = []
    for content, name in zip(files, names):
        images.append(_decode(content, name, options, len(files)))
        if images[-1].shape != images[0].shape:
            raise DataError(
                f"{name}: is {images[-1].shape[1]} x {images[-1].shape[2]} pixels, {names[0]} is {images[0].shape[1]} x"
                f" {images[0].shape[2]}; give --image-size HEIGHTxWIDTH, or keep the files' bytes with --encoded"
            )
    return np.stack(images)


def _decode(content: bytes, name: str, options: SourceOptions, together: int) -> Array:
    """One image as an array; `together`: how many will be held at once."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise UsageError(
            f"decoding images needs Pillow, which is not here ({error}): pip install 'mpitrain[images]'"
        ) from error
    size = options.image_size
    with reading(name, "decoded as an image", "remove or replace it"):
        with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
            held, one = opened.width * opened.height * 3, 1 if size else together
            check_size(
                f"{name}: {one} image(s) of {opened.height} x {opened.width} pixels",
                one * held,
                options.max_gib,
            )
            image = opened.convert("RGB")
        if size:
            image = ImageOps.fit(image, (size[1], size[0]), Image.Resampling.BILINEAR)
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
