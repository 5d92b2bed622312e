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

from mpitrain.data.columns import Array, Column, Columns, Ragged, sample_bytes
from mpitrain.data.order import IntArray
from mpitrain.data.sources.base import Source, SourceOptions, file_fingerprint
from mpitrain.errors import DataError, UsageError

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
PROBES = 64


def is_image(name: str) -> bool:
    """Whether a file's name ends like an image's."""
    return name.lower().endswith(ENDINGS)


class ImageFolder(Source):
    """`x`, and `y`: int64, the class: the number of the image's subfolder in alphabetical order."""

    def __init__(self, folder: Path, name: str, options: SourceOptions):
        self.name, self._options = name, options
        self._folder, self.classes = (
            folder,
            sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()),
        )
        self._files = [
            (path, label) for label, entry in enumerate(self.classes) for path in _images_in(folder / entry)
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


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if is_image(path.name) and path.is_file())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def images_column(files: list[bytes], names: list[str], options: SourceOptions) -> Column:
    """Images as one column: uint8 (samples, 3, height, width), or each file's bytes.

    Raises:
        DataError: one cannot be decoded, or has another size than the first; names it.
    """
    if options.encoded:
        return Ragged.of([np.frombuffer(content, dtype=np.uint8) for content in files])
    images = [_decode(content, name, options.image_size) for content, name in zip(files, names)]
    for image, name in zip(images, names):
        if image.shape != images[0].shape:
            raise DataError(
                f"{name}: is {image.shape[1]} x {image.shape[2]} pixels, {names[0]} is {images[0].shape[1]} x"
                f" {images[0].shape[2]}; give --image-size HEIGHTxWIDTH, or keep the files' bytes with --encoded"
            )
    return np.stack(images)


def _decode(content: bytes, name: str, size: tuple[int, int] | None) -> Array:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise UsageError(
            f"decoding images needs Pillow, which is not here ({error}): pip install 'mpitrain[images]'"
        ) from error
    try:
        with Image.open(io.BytesIO(content)) as opened:
            image = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{name}: cannot be decoded as an image ({error}); remove or replace it") from error
    if size:
        image = ImageOps.fit(image, (size[1], size[0]), Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
