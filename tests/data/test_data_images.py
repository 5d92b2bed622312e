"""Images keep their numbers or are refused by name; what is left out, turned or lost is said."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps, TiffImagePlugin

from mpitrain.cli.main import main
from mpitrain.data import Shards
from mpitrain.data.sources import open_source
from mpitrain.data.write.pack import pack
from mpitrain.errors import DataError, UsageError

WIDE = (np.arange(12, dtype=np.uint16) * 5461).reshape(3, 4)
GREY = (WIDE >> 8).astype(np.uint8)
COLOR = np.stack([GREY, 255 - GREY, GREY // 2], axis=-1)


def folder_of(path, *images, name="{}.png", **options):
    for number, image in enumerate(images):
        file = path / f"class{number % 2}" / name.format(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        if callable(image):
            image(file)
        else:
            image.save(file, **options)
    return str(path)


def packed(source, directory, **options):
    """(the array x, what was said)."""
    said = []
    pack(source, directory, validate=0, say=said.append, **options)
    (batch,) = Shards(str(directory / "train-*.h5")).batches(99, seed=0)
    said = [line for line in said if not line.startswith("only")]
    return batch["x"].numpy()[np.argsort(batch["y"].numpy(), kind="stable")], said


def tiff(array, path):
    """A TIFF of one strip, written by hand where Pillow writes no such thing."""
    array = np.ascontiguousarray(array)
    channels = 1 if array.ndim == 2 else array.shape[2]
    tags = {256: array.shape[1], 257: array.shape[0], 258: (8 * array.itemsize,) * channels, 259: 1}
    tags |= {
        262: 2 if channels >= 3 else 1,
        273: 0,  # Pillow adds where the strip begins
        277: channels,
        278: array.shape[0],
        279: array.nbytes,
    }
    tags |= {339: ({"u": 1, "i": 2, "f": 3}[array.dtype.kind],) * channels}
    tags |= {338: (0,) * (channels - 3)} if channels > 3 else {}
    directory = TiffImagePlugin.ImageFileDirectory_v2()
    for tag, value in tags.items():
        directory[tag] = value
    Path(path).write_bytes(b"II*\0\b\0\0\0" + directory.tobytes(8) + array.tobytes())


@pytest.mark.parametrize(
    ("save", "expected"),
    [
        (lambda path: Image.fromarray(WIDE).save(path), WIDE),
        (lambda path: Image.fromarray(WIDE).save(path, "TIFF"), WIDE),
        (lambda path: tiff(WIDE.astype(">u2").astype("<u2"), path), WIDE),
        (lambda path: tiff((WIDE.astype(np.int32) - 30000).astype(np.int16), path), WIDE.astype(np.int32) - 30000),
        (lambda path: Image.fromarray(WIDE / np.float32(7)).save(path, "TIFF"), WIDE / np.float32(7)),
        (lambda path: tiff(WIDE.astype(np.int32) * -32000, path), WIDE.astype(np.int32) * -32000),
        (lambda path: tiff(WIDE.astype(np.uint32) << 16, path), WIDE.astype(np.uint32) << 16),
        (lambda path: tiff(GREY.view(np.int8), path), GREY.view(np.int8)),
        (lambda path: path.write_bytes(b"P5 4 3 65535 " + WIDE.astype(">u2").tobytes()), WIDE.astype(np.int32)),
        (lambda path: path.write_bytes(b"Pf 4 3 -1 " + np.float32(WIDE)[::-1].tobytes()), WIDE.astype(np.float32)),
    ],
    ids=["png16", "tiff16", "tiff16b", "tiffi16", "float", "tiffi32", "tiffu32", "tiffi8", "pgm16", "pfm"],
)  # fmt: skip
def test_wide_numbers_keep_their_type(tmp_path, save, expected):
    found, said = packed(folder_of(tmp_path / "in", save, save), tmp_path / "out")
    assert found.shape == (2, 1, 3, 4) and found.dtype == expected.dtype and not said
    assert np.array_equal(found[0, 0], expected) and np.array_equal(found[1, 0], expected)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "PA"])
def test_eight_bits_become_rgb_which_loses_nothing(tmp_path, mode):
    """Of an alpha channel that is opaque everywhere, too."""
    image = Image.fromarray(COLOR).convert("P" if mode == "PA" else mode).convert(mode)
    ending = "tiff" if mode == "PA" else "png"
    found, said = packed(folder_of(tmp_path / "in", image, name="{}." + ending), tmp_path / "out")
    assert found.dtype == np.uint8 and not said
    assert np.array_equal(found[0], np.asarray(image.convert("RGB")).transpose(2, 0, 1))


def _frames(path, **options):
    other = Image.fromarray(255 - COLOR)
    Image.fromarray(COLOR).save(path, save_all=True, append_images=[other], **options)


def _alpha(value):
    image = Image.fromarray(COLOR).convert("RGBA")
    image.putpixel((0, 0), (1, 2, 3, value))
    return image


def _color_key(path, image, key):
    image.save(path, transparency=key)


LOSSY = {
    "gif": ("frames", lambda path: _frames(path, format="GIF")),
    "apng": ("frames", lambda path: _frames(path, format="PNG")),
    "webp": ("frames", lambda path: _frames(path, format="WEBP", lossless=True)),
    "pages": ("frames", lambda path: _frames(path, format="TIFF")),
    "mpo": ("frames", lambda path: _frames(path, format="MPO")),
    "rgba": ("transparency", lambda path: _alpha(254).save(path)),
    "la": ("transparency", lambda path: _alpha(0).convert("LA").save(path)),
    "palette": ("transparency", lambda path: _color_key(path, Image.fromarray(COLOR).quantize(8), 0)),
    "key of grey": ("transparency", lambda path: _color_key(path, Image.fromarray(GREY), int(GREY[0, 0]))),
    "key of 16 bits": ("transparency", lambda path: _color_key(path, Image.fromarray(WIDE), 0)),
    "rgb16": ("depth", lambda path: tiff(np.stack([WIDE] * 3, -1), path)),
    "ppm16": ("depth", lambda path: path.write_bytes(b"P6 4 3 65535 " + WIDE.repeat(3).astype(">u2").tobytes())),
    "infrared": ("channels", lambda path: tiff(np.concatenate([COLOR, COLOR[..., :1]], -1), path)),
    "cmyk": ("colors", lambda path: Image.fromarray(COLOR).convert("CMYK").save(path, "JPEG")),
    "lab": ("colors", lambda path: Image.merge("LAB", Image.fromarray(COLOR).split()).save(path, "TIFF")),
}  # fmt: skip


@pytest.mark.parametrize("case", LOSSY)
def test_what_would_be_lost_is_refused_by_name_or_accepted_and_said(tmp_path, case):
    kind, save = LOSSY[case]
    source = folder_of(tmp_path / "in", save)
    with pytest.raises(DataError, match=rf"0\.png: .*--accept-loss {kind}"):
        packed(source, tmp_path / "out")
    found, said = packed(source, tmp_path / "out", accept_loss=(kind,))
    assert found.shape == ((1, 1, 3, 4) if case == "key of 16 bits" else (1, 3, 3, 4))
    assert len(said) == 1 and f"--accept-loss {kind}" in said[0] and "0.png" in said[0]
    assert packed(source, tmp_path / "bytes", encoded=True)[0].nbytes > 0


def test_a_png_of_48_bits_is_not_cut_to_24(tmp_path):
    import struct
    import zlib

    def chunk(kind, body):
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in np.stack([WIDE] * 3, -1))
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 3, 16, 2, 0, 0, 0))
    png += chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    source = folder_of(tmp_path / "in", lambda path: path.write_bytes(png))
    with pytest.raises(DataError, match="has 16 bits a channel.*--accept-loss depth"):
        packed(source, tmp_path / "out")


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("ending", ["png", "tiff", "jpg"])
def test_an_orientation_tag_is_heeded_and_said(tmp_path, turn, ending):
    exif = Image.Exif()
    exif[274] = turn
    image = Image.fromarray(np.repeat(np.repeat(COLOR, 8, 0), 8, 1))
    source = folder_of(tmp_path / "in", image, name="{}." + ending, exif=exif)
    found, said = packed(source, tmp_path / "out")
    flips = {2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1]}
    flips |= {5: lambda a: a.swapaxes(0, 1), 6: lambda a: a.swapaxes(0, 1)[:, ::-1]}
    flips |= {7: lambda a: a.swapaxes(0, 1)[::-1, ::-1], 8: lambda a: a.swapaxes(0, 1)[::-1]}
    expected = flips.get(turn, lambda a: a)(np.asarray(image))
    assert found.shape[2:] == expected.shape[:2]
    assert np.abs(found[0].transpose(1, 2, 0).astype(int) - expected).max() <= (0 if ending != "jpg" else 40)
    assert said == [] if turn == 1 else "1 images were turned as their orientation tag says" in said[0]


def test_wide_numbers_are_scaled_as_floats_are_or_refused(tmp_path):
    for number, pixels in enumerate([WIDE, WIDE / np.float32(7)]):
        source = folder_of(tmp_path / f"in{number}", Image.fromarray(pixels), name="{}.tiff")
        found, _ = packed(source, tmp_path / f"out{number}", image_size=(2, 2))
        expected = ImageOps.fit(Image.fromarray(np.float32(pixels)), (2, 2), Image.Resampling.BILINEAR)
        assert found.dtype == pixels.dtype and found.shape == (1, 1, 2, 2)
        assert np.abs(found[0, 0].astype(np.float32) - np.asarray(expected)).max() <= 1
    with pytest.raises(DataError, match="is int8, which is not scaled"):
        packed(
            folder_of(tmp_path / "in", lambda path: tiff(GREY.view(np.int8), path)),
            tmp_path,
            image_size=(1, 1),
        )


def test_images_of_several_types_are_not_mixed(tmp_path):
    source = folder_of(tmp_path / "in", Image.fromarray(GREY), Image.fromarray(WIDE))
    with pytest.raises(DataError, match=r"1\.png: is uint16 in 1 channel\(s\), .*0\.png is uint8 in 3"):
        open_source(source)


def test_what_a_folder_holds_besides_is_left_out_and_said(tmp_path):
    source = folder_of(tmp_path / "in", *[Image.fromarray(COLOR)] * 4)
    root = Path(source)
    for name in ("class0/._0.png", "class0/notes.txt", "__MACOSX/._class0", ".ipynb_checkpoints/0.png",
                 "class1/.ipynb_checkpoints/1.png", "beside.png"):  # fmt: skip
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"\0\5\x16\7")
    (root / "empty").mkdir()
    found, said = packed(source, tmp_path / "out")
    assert len(found) == 4 and open_source(source).facts()["classes"] == ["class0", "class1", "empty"]
    assert sorted(line.split(", first")[0] for line in said) == [
        "1 classes have no images and keep their number",
        "1 folders within classes are left out by their names",
        "1 images lie beside the classes' folders and are left out",
        "2 files are no images by their names and are left out",
        "2 folders are no classes by their names and are left out",
    ]


def test_the_command_prints_what_was_lost_and_python_warns(tmp_path, capsys):
    source = folder_of(tmp_path / "in", _alpha(3), _alpha(255), _alpha(9))
    assert main(["data", "pack", source, str(tmp_path / "a")]) == 2
    assert "0.png: has pixels that are transparent" in capsys.readouterr().err
    assert main(["data", "pack", source, str(tmp_path / "a"), "--accept-loss", "transparency"]) == 0
    assert "note: 2 images have lost which pixels are transparent" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="2 images have lost"):
        pack(source, tmp_path / "b", accept_loss=("transparency",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "only 3 samples")
        assert not pack(source, tmp_path / "b", accept_loss=("transparency",))[1]
    with pytest.raises(UsageError, match="'alpha': is none of frames, transparency"):
        pack(source, tmp_path / "b", accept_loss=("alpha",))


def test_an_image_that_would_end_packing_late_is_told_before_the_first_shard(tmp_path):
    """Of more images than are decoded to see what they are like; a header of 70 bytes stands for gigabytes."""
    source = folder_of(tmp_path / "in", *[Image.fromarray(COLOR)] * 200)
    odd = Path(source) / "class1" / "103.png"
    for size, options, message in [
        ((5, 5), {}, r"103\.png: is 5 x 5 pixels, .*0\.png has sides of 3 and 4; give --image-size"),
        (
            (9000, 9000),
            {"image_size": (3, 4), "max_gib": 0.5},
            r"103\.png: 1 image\(s\) of 9000 x 9000 pixels would take",
        ),
    ]:
        Image.new("1", size).save(odd)
        with pytest.raises(DataError, match=message):
            packed(source, tmp_path / "out", **options)
        assert not list((tmp_path).glob("out/*.h5"))
    with pytest.warns(UserWarning, match=r"decompress to up to 1\.13 GiB .*103\.png, 9000 x 9000 pixels"):
        pack(source, tmp_path / "bytes", encoded=True)
