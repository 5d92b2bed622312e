"""One image file's bytes as an array, through Pillow: what is kept as it is, and what would be lost.

Invariants: no number changes unsaid. 8-bit images become RGB, which loses nothing of grey, palettes and two colours;
images of 16 and 32 bits and of floats keep their type, in one channel. What cannot be kept is refused by name unless
somebody has accepted that loss, and is then counted, so that it can be printed.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np

from mpitrain.data.format.columns import Array
from mpitrain.data.sources.base import LOSSES, SourceOptions, needing
from mpitrain.data.sources.noted import Noted
from mpitrain.errors import DataError
from mpitrain.system.files.outside import check_size, gib, reading

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")  # Pillow would start Ghostscript for an EPS
NUMBERS = {
    "I": 4,
    "F": 4,
    "I;16": 2,
    "I;16L": 2,
    "I;16B": 2,
    "I;16N": 2,
}  # bytes of a value that keeps its type
TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")
AS_RGB = ("RGB", "RGBX", "L", "P", "1", *TRANSPARENT)  # Pillow's modes that RGB holds without rounding
STRIDE = 64  # images of which one is looked at before the next to it is
LARGE_BYTES = 1 << 30
DECODING_BYTES = 12  # of a pixel, while it becomes RGB: Pillow holds 4, its conversions 4 each
ORIENTATION, BITS, PER_PIXEL, SAMPLE_FORMAT = 274, 258, 277, 339  # tags of EXIF and TIFF
SIGNED = 2


def open_image(content: IO[bytes], name: str) -> Any:
    """Pillow's image, of which only the header has been read; use it as a context manager.

    Raises:
        UsageError: Pillow is not here. DataError: it has more pixels than Pillow decodes.
    """
    with needing("decoding images needs Pillow", "images"):
        from PIL import Image
    try:
        return Image.open(content, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{name}: has more pixels than Pillow decodes ({error}); cut it into tiles, or raise "
            "PIL.Image.MAX_IMAGE_PIXELS in a Python source"
        ) from error


def look_at_headers(
    images: Sequence[tuple[str, Callable[[], IO[bytes]]]], options: SourceOptions, until: float
) -> list[str]:
    """Open images, and read no more than their headers, as far apart as they can be and as many as the time allows;
    what is large about those that stay encoded.

    Args:
        images: each one's name and what opens it.
    Raises:
        DataError: one would take more memory than allowed, or is of another size than the first; names it.
    """
    largest, largest_name, first = 0, "", None
    for name, open_file in (image for start in range(STRIDE) for image in images[start::STRIDE]):
        if time.monotonic() > until:
            break
        try:
            with open_file() as file:
                opened = open_image(file, name)
        except DataError:
            raise
        except (OSError, ValueError, SyntaxError):
            continue  # decoding it says what is wrong
        pixels, sides = opened.width * opened.height, sorted(opened.size)
        if options.encoded:
            if pixels > largest:
                largest, largest_name = pixels, f"{name}, {opened.height} x {opened.width} pixels"
            continue
        check_pixels(opened, name, 1, options.max_gib)
        first = first or (name, sides)
        if sides != first[1] and not options.image_size:
            raise DataError(
                f"{name}: is {opened.height} x {opened.width} pixels, {first[0]} has sides of {first[1][0]} and "
                f"{first[1][1]}; give --image-size HEIGHTxWIDTH, or keep the files' bytes with --encoded"
            )
    num_bytes = largest * (3 + DECODING_BYTES)
    if num_bytes <= LARGE_BYTES:
        return []
    return [f"images decompress to up to {gib(num_bytes)} while they are decoded: {largest_name}"]


def check_pixels(opened: Any, name: str, together: int, max_gib: float) -> None:
    """Refuse an image whose pixels would take more memory than allowed, by its header.

    Args:
        together: how many such images will be held at once.
    Raises:
        DataError: names it.
    """
    pixels = opened.width * opened.height
    held = NUMBERS.get(opened.mode, 3)
    what = f"{name}: {together} image(s) of {opened.height} x {opened.width} pixels"
    check_size(what, pixels * (held * together + DECODING_BYTES), max_gib)


def decode(content: bytes, name: str, options: SourceOptions, together: int, noted: Noted) -> Array:
    """The pixels, channels first: uint8 (3, height, width), or (1, height, width) in the file's own type.

    Args:
        together: how many images will be held at once.
        noted: is told what was lost, and what was turned upright.
    Raises:
        DataError: it cannot be decoded, would take too much memory, or would lose something that nobody accepted.
    """
    size = options.image_size
    with (
        reading(name, "decoded as an image", "remove or replace it"),
        open_image(io.BytesIO(content), name) as opened,
    ):
        check_pixels(opened, name, 1 if size else together, options.max_gib)
        _check_losses(opened, name, options, noted)
        array_of = _type_of(opened)
        image = _upright(opened, name, noted)
        if image.mode not in NUMBERS and array_of is None:
            if _is_transparent(image):
                _lose("transparency", "has pixels that are transparent", name, options, noted)
            image = image.convert("RGB")
        elif "transparency" in image.info:
            _lose("transparency", "has a value that stands for transparent", name, options, noted)
        if size and array_of is not None:
            raise DataError(
                f"{name}: is {array_of}, which is not scaled; convert it or leave out --image-size"
            )
        if size:
            image = _fitted(image, size)
        array: Array = np.asarray(image)
    if array.ndim == 3:
        return np.ascontiguousarray(array.transpose(2, 0, 1))
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return array[None] if array_of is None else array[None].view(array_of)


def _fitted(image: Any, size: tuple[int, int]) -> Any:
    from PIL import Image, ImageOps

    return ImageOps.fit(image, (size[1], size[0]), Image.Resampling.BILINEAR)


def _lose(kind: str, what: str, name: str, options: SourceOptions, noted: Noted) -> None:
    """Note a loss that was accepted.

    Raises:
        DataError: it was not.
    """
    if kind not in options.accept_loss:
        raise DataError(
            f"{name}: {what}, which packing would lose: {LOSSES[kind]}; keep the files' bytes with --encoded, convert "
            f"the image, or accept it: --accept-loss {kind}"
        )
    noted.add(f"images have lost {LOSSES[kind]} (--accept-loss {kind})", name)


def _check_losses(opened: Any, name: str, options: SourceOptions, noted: Noted) -> None:
    """What is lost by the header alone, most of it by Pillow when it opens the file."""
    mode, bits, num_samples = opened.mode, _bits(opened), _samples_per_pixel(opened)
    if getattr(opened, "is_animated", False):
        _lose("frames", f"has {getattr(opened, 'n_frames', 'several')} frames or pages", name, options, noted)
    if bits > (8 if mode not in NUMBERS else 8 * NUMBERS[mode]):
        _lose("depth", f"has {bits} bits a channel (Pillow's mode {mode})", name, options, noted)
    if num_samples > len(opened.getbands()):
        _lose("channels", f"has {num_samples} channels (Pillow's mode {mode})", name, options, noted)
    if opened.format == "PPM" and (most := _greatest(opened)) not in (None, 255, 65535):
        noted.add(
            f"images had their values of 0 to {most} scaled to the whole range, as PPM means them", name
        )
    if mode not in AS_RGB and mode not in NUMBERS:
        _lose("colors", f"has colours of another kind than RGB (Pillow's mode {mode})", name, options, noted)


def _bits(opened: Any) -> int:
    """Of a channel in the file."""
    if opened.format == "TIFF":
        return int(max(opened.tag_v2.get(BITS, (1,))))
    if opened.format == "PNG":
        return 16 if opened.tile and str(opened.tile[0][3]).endswith(";16B") else 8
    return max(8, (_greatest(opened) or 0).bit_length()) if opened.format == "PPM" else 8


def _greatest(opened: Any) -> int | None:
    """The value that a PPM calls the greatest, if Pillow decodes by it; floats have none."""
    encoding = opened.tile[0][3] if opened.tile and opened.mode != "F" else ""
    return encoding[-1] if isinstance(encoding, tuple) and isinstance(encoding[-1], int) else None


def _samples_per_pixel(opened: Any) -> int:
    return int(opened.tag_v2.get(PER_PIXEL, 1)) if opened.format == "TIFF" else 0


def _type_of(opened: Any) -> str | None:
    """The type that a TIFF's numbers have where Pillow gives them another."""
    if opened.format != "TIFF":
        return None
    signed = SIGNED in opened.tag_v2.get(SAMPLE_FORMAT, (1,))
    bits = _bits(opened)
    if opened.mode == "L" and bits == 8 and signed:
        return "int8"
    return "uint32" if opened.mode == "I" and bits == 32 and not signed else None


def _upright(opened: Any, name: str, noted: Noted) -> Any:
    """The image as its orientation tag says that it is to be seen."""
    from PIL import ImageOps

    try:
        turn = opened.getexif().get(ORIENTATION, 1)
    except Exception:
        noted.add("images have an orientation tag that cannot be read", name)
        return opened
    if turn not in range(2, 9):
        return opened
    noted.add("images were turned as their orientation tag says", name)
    if opened.format == "TIFF":
        opened.load()  # which turns it
        return opened
    return ImageOps.exif_transpose(opened)


def _is_transparent(image: Any) -> bool:
    """Whether any pixel is."""
    if image.mode not in TRANSPARENT and "transparency" not in image.info:
        return False
    return bool(image.convert("RGBA").getchannel("A").getextrema()[0] < 255)
