"""The table of hostile inputs: what is made, and which command reads it.

`OUTSIDE` stands for a folder beside, whose files no case may open.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pyarrow
import torch
from PIL import Image
from pyarrow import csv, parquet

from mpitrain.checkpoint import write_part
from mpitrain.checkpoint.parts import folder_of
from mpitrain.data.format.manifest import NAME
from mpitrain.data.write.pack import pack
from mpitrain.system.files.run_directory import Identity

X, Y = np.arange(96, dtype=np.float32).reshape(24, 4), np.arange(24)
CAREFUL = ("--max-gib", "0.25")
HUGE = (10**12, 10**15, 2**31 - 1, 2**63 - 1, -1)


class Case(NamedTuple):
    """One input and how it is read: `act` is "command" (words of mpitrain), "read" or "checkpoint" (a path)."""

    name: str
    act: str
    words: list[str]


def make_outside(scratch: Path) -> Path:
    """The folder that no case may touch, with a good file of every kind that links can lead to."""
    outside = scratch / "outside"
    outside.mkdir()
    with h5py.File(outside / "secret.h5", "w") as file:
        file["z"] = X
    (outside / "raw.bin").write_bytes(X.tobytes())
    (outside / "victim-00000.h5").write_bytes((outside / "secret.h5").read_bytes())
    Image.new("RGB", (4, 4)).save(outside / "secret.png")
    (outside / "secret.csv").write_text("x\n1\n")
    (outside / NAME).write_text(json.dumps({"recipe": {}, "files": {}, "complete": True}))
    return outside


def packing(name: str, source: Path | str, *words: str) -> Case:
    return Case(name, "command", ["data", "pack", str(source), f"{source}.out", *CAREFUL, *words])


def looking(name: str, path: Path) -> Iterator[Case]:
    """Everything that reads shards."""
    yield Case(f"{name}: info", "command", ["data", "info", str(path), *CAREFUL])
    yield Case(f"{name}: check", "command", ["data", "check", str(path), *CAREFUL])
    yield Case(f"{name}: read", "read", [str(path / "*.h5" if path.is_dir() else path)])
    if not path.is_dir():
        yield packing(f"{name}: pack", path)


def fixed(scratch: Path, outside: Path) -> list[Case]:
    """Cases that are made by hand."""
    folder = scratch / "fixed"
    folder.mkdir()
    makers = (indexes, shards, arrays, archives, images, tables, checkpoints, texts)
    return [case for maker in makers for case in maker(made(folder / maker.__name__), outside)]


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ---- the table


def indexes(folder: Path, outside: Path) -> Iterator[Case]:
    """Names and fields of `mpitrain-pack.json`."""
    good = folder / "good"
    pack({"x": X}, good, validate=0, shard_samples=12)
    fields = json.loads((good / NAME).read_text())
    names = [
        str(outside / "victim-00000.h5"),
        "../../../outside/victim-00000.h5",
        "/etc/passwd",
        "..",
        "a\0b-00000.h5",
    ]
    changes: list[Any] = [{"files": {name: 1}, "sha256": {}} for name in names]
    changes += [{**change, "complete": False} for change in changes]
    changes += [{"files": {"train-00000.h5": count}} for count in (*HUGE, "1", None, [], 1e400)]
    changes += [{key: value} for key in fields for value in (None, 7, "x\x1b[2J", [[]], {"a": {"b": 1}})]
    texts = [json.dumps({**fields, **change}) for change in changes]
    texts += [
        "",
        "[",
        "[" * 10**6,
        "{" * 9999,
        '{"a":' * 10**5,
        "1" * 10**6,
        "nul",
        "\x00",
        '"\\ud800"',
        "[1e999]",
    ]
    for number, text in enumerate(texts):
        here = folder / f"index-{number}"
        shutil.copytree(good, here)
        (here / NAME).write_text(text)
        yield Case(f"index {number}: stage", "command", ["data", "stage", str(here), str(folder / "staged")])
        yield Case(f"index {number}: check", "command", ["data", "check", str(here)])
        if number < 2 * len(names):
            yield Case(
                f"index {number}: pack", "command", ["data", "pack", str(outside / "none.npz"), str(here)]
            )
            yield Case(f"index {number}: again", "command", ["data", "pack", "topics", str(here)])
    for name in (NAME, "train-00000.h5"):
        here = folder / f"link-{name}"
        shutil.copytree(good, here)
        (here / name).unlink()
        (here / name).symlink_to(outside / (NAME if name == NAME else "secret.h5"))
        yield Case(f"link {name}: stage", "command", ["data", "stage", str(here), str(folder / "staged")])
        yield Case(f"link {name}: check", "command", ["data", "check", str(here)])
        yield Case(f"link {name}: read", "read", [str(here / "*.h5")])
        (here / name).unlink()
        os.mkfifo(here / name)
        yield Case(f"pipe {name}: stage", "command", ["data", "stage", str(here), str(folder / "staged")])


def shards(folder: Path, outside: Path) -> Iterator[Case]:
    """HDF5 files that reach out, declare too much, or hold too little."""

    def write(name: str, fill: Callable[[h5py.File], object]) -> Path:
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["y"] = Y
            fill(file)
        return folder / f"{name}.h5"

    far = str(outside / "secret.h5")
    layout = h5py.VirtualLayout(X.shape, X.dtype)
    layout[:] = h5py.VirtualSource(far, "z", X.shape)
    raw = [(str(outside / "raw.bin"), 0, X.nbytes)]
    fills: dict[str, Callable[[h5py.File], object]] = {
        "external link": lambda file: (
            file.update({"x": h5py.ExternalLink(far, "/z")}) or set_link(file, "x", far)
        ),
        "link by links": lambda file: (set_link(file, "g", far, "/"), set_soft(file, "x", "/g/z")),
        "external storage": lambda file: file.create_dataset("x", X.shape, X.dtype, external=raw),
        "virtual": lambda file: file.create_virtual_dataset("x", layout),
        "circle": lambda file: set_soft(file, "x", "/x"),
        "offsets": lambda file: variable(file, [[0, 2**62], [2**62, -(2**63)]]),
        "entries": lambda file: variable(file, [[0, 2]] * 24, 10**15),
        "schema": lambda file: file.attrs.update(mpitrain_schema=np.zeros(1000), chunk_samples="x"),
        "chunk_samples": lambda file: file.attrs.update(mpitrain_schema=1, chunk_samples=10**15),
        "control": lambda file: file.create_dataset("x\x1b]0;a\x07\u202e\n", data=Y[:3]),
        "compound": lambda file: file.create_dataset(
            "x", (24,), np.dtype([("a", "i4"), ("b", "O")]).fields["a"][0]
        ),
        "null": lambda file: file.create_dataset("x", dtype="f4", data=h5py.Empty("f4")),
    }
    for size in (10**12, 10**15, 2**62):
        fills[f"rows {size}"] = lambda file, size=size: file.create_dataset(
            "x", (size,), "u1", chunks=(1024,)
        )
        fills[f"flat {size}"] = lambda file, size=size: file.create_dataset("x", (size,), "u1")
        fills[f"wide {size}"] = lambda file, size=size: file.create_dataset(
            "x", (24, size), "u1", chunks=(1, 1 << 20)
        )
    for name, options in {
        "gzip": {"compression": "gzip"},
        "lzf": {"compression": "lzf"},
        "plain": {},
    }.items():
        for length in (1, 8 << 20):
            fills[f"{name} {length}"] = lambda file, options=options, length=length: bomb(
                file, length, options
            )
    for name, fill in fills.items():
        yield from looking(f"shard {name}", write(name, fill))
    os.mkfifo(folder / "pipe.h5")
    yield from looking("shard pipe", folder / "pipe.h5")
    (folder / "links").mkdir()
    (folder / "links" / "a.h5").symlink_to(far)
    yield from looking("shard links", folder / "links")


def set_link(file: h5py.File, name: str, far: str, inside: str = "/z") -> None:
    if name in file:
        del file[name]
    file[name] = h5py.ExternalLink(far, inside)


def set_soft(file: h5py.File, name: str, to: str) -> None:
    file[name] = h5py.SoftLink(to)


def variable(file: h5py.File, spans: list[list[int]], most: int = 50) -> None:
    """A variable array with offsets and a largest chunk as told."""
    del file["y"]
    file.attrs.update(mpitrain_schema=2, chunk_samples=8)
    file["x"], file["x_offsets"] = np.arange(50, dtype="u1"), np.array(spans, np.int64)
    file["x"].attrs["max_chunk_entries"] = most


def bomb(file: h5py.File, length: int, options: dict[str, Any]) -> None:
    """One chunk of 24 bytes that decodes to another length."""
    encode = {"gzip": zlib.compress, "lzf": lambda data: b"\0\0" + b"\xe0\xff\0" * (len(data) // 264)}
    data = encode.get(options.get("compression", ""), bytes)(bytes(min(length, 8 << 20)))
    dataset = file.create_dataset("x", (24,), "u1", chunks=(24,), **options)
    dataset.id.write_direct_chunk((0,), data[: 1 << 20])


def npy(shape: Sequence[int], descr: Any = "<f8", data: bytes = bytes(64)) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": descr, "fortran_order": False, "shape": tuple(shape)}
    )
    return header.getvalue() + data


def npys() -> list[bytes]:
    """.npy files that lie."""
    shapes = [(size,) for size in HUGE] + [(2**40, 2**40), (0, 2**62), (3, -5)]
    found = [npy(shape) for shape in shapes] + [
        npy((8,), "|O"),
        npy((8,), "|V1000000000"),
        npy((8,), [("a", "<f8")]),
    ]
    long = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1)
    found += [long, long + b" " * 10**5, b"\x93NUMPY\x09\x00", b"\x93NUMPY", npy((8,))[:9]]
    nested = b"{'descr': " + b"(" * 9000 + b"}"
    found += [b"\x93NUMPY\x01\x00" + struct.pack("<H", len(nested)) + nested]
    return found


def arrays(folder: Path, outside: Path) -> Iterator[Case]:
    """.npy and .npz."""
    for number, content in enumerate(npys()):
        (folder / f"{number}.npy").write_bytes(content)
        yield packing(f"npy {number}", folder / f"{number}.npy")
        for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            with zipfile.ZipFile(folder / f"{number}-{method}.npz", "w", method) as archive:
                archive.writestr("x.npy", content)
            yield packing(f"npz {number} {method}", folder / f"{number}-{method}.npz")
    with zipfile.ZipFile(folder / "bomb.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("x.npy", npy((35_000_000,), data=bytes(280_000_000)))
    yield packing("npz bomb", folder / "bomb.npz")
    for name in ("../x.npy", "/x.npy", "x\x1b[2J.npy", "x.txt", ".npy"):
        with zipfile.ZipFile(folder / f"{len(name)}-name.npz", "w") as archive:
            archive.writestr(name, npy((8,)))
        yield packing(f"npz name {name!r}", folder / f"{len(name)}-name.npz")
    os.mkfifo(folder / "pipe.npz")
    yield packing("npz pipe", folder / "pipe.npz")


def archives(folder: Path, outside: Path) -> Iterator[Case]:
    """WebDataset."""
    contents = {f"npy {number}": ("npy", content) for number, content in enumerate(npys())}
    contents |= {
        "number": ("cls", b"9" * 10**5),
        "text": ("cls", b"\x1b[2J"),
        "pickle": ("pkl", b"cos\nsystem\n(S'x'\n"),
    }
    for name, (ending, content) in contents.items():
        member = tarfile.TarInfo(f"a.{ending}")
        member.size = len(content)
        with tarfile.open(folder / f"{name}.tar", "w") as archive:
            archive.addfile(member, io.BytesIO(content))
        yield packing(f"tar {name}", folder / f"{name}.tar")
    kinds = (
        tarfile.REGTYPE,
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_SPARSE,
    )
    for kind in kinds:
        for size in (10**12, 10**15, 2**62, -(10**6)):
            member = tarfile.TarInfo("a.txt")
            member.size, member.type = size, kind
            path = folder / f"{kind.decode()}{size}.tar"
            path.write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
            yield packing(f"tar type {kind!r} of {size}", path)
    for kind, name in ((tarfile.SYMTYPE, "link"), (tarfile.LNKTYPE, "hard")):
        member = tarfile.TarInfo("a.csv")
        member.type, member.linkname = kind, str(outside / "secret.csv")
        with tarfile.open(folder / f"{name}.tar", "w") as archive:
            archive.addfile(member)
        yield packing(f"tar {name}", folder / f"{name}.tar")
    with tarfile.open(folder / "names.tar", "w") as archive:
        for name in ("../../a.txt", "/etc/a.txt", "b.x\x1b[2J"):
            archive.addfile(tarfile.TarInfo(name))
    yield packing("tar names", folder / "names.tar")


def images(folder: Path, outside: Path) -> Iterator[Case]:
    """Folders of images."""
    contents = {"eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) run\n%%EOF\n"}
    contents |= {"empty": b"", "wide": declared(2**31 - 1, 2**31 - 1), "big": declared(9000, 11000)}
    contents |= {
        "svg": b"<svg xmlns:xlink='http://www.w3.org/1999/xlink'><image xlink:href='file:///etc/passwd'/></svg>"
    }
    for name, content in contents.items():
        here = made(folder / name / "a")
        (here / "x.png").write_bytes(content)
        yield packing(f"image {name}", folder / name)
        yield packing(f"image {name} scaled", folder / name, "--image-size", "8x8")
    for name, to in {"file": "secret.png", "folder": "", "up": "../../../../outside/secret.png"}.items():
        here = made(folder / f"link-{name}")
        link = here / "a" if name == "folder" else made(here / "a") / "x.png"
        link.symlink_to(to if name == "up" else outside / to)
        yield packing(f"image link {name}", here)
    here = made(folder / "name" / "a")
    for name in (b"\xff\x1b[2J.png", b"\n.png", "\u202e.png".encode()):
        Path(os.fsdecode(os.path.join(os.fsencode(here), name))).write_bytes(encoded("PNG"))
    yield packing("image names", folder / "name")
    (here / "z.png").write_bytes(b"")
    yield packing("image names of no images", folder / "name")
    os.mkfifo(made(folder / "pipe" / "a") / "x.png")
    yield packing("image pipe", folder / "pipe")


def declared(width: int, height: int) -> bytes:
    """A small PNG that declares another size, with a checksum that holds."""
    content = bytearray(encoded("PNG"))
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


def encoded(kind: str, size: tuple[int, int] = (8, 8)) -> bytes:
    """A small image's file."""
    file = io.BytesIO()
    Image.new("RGB", size, (1, 2, 3)).save(file, kind)
    return file.getvalue()


def tables(folder: Path, outside: Path) -> Iterator[Case]:
    """CSV and Parquet."""
    texts = {
        "twice": "x,x\n1,2\n",
        "ragged": "x,y\n1\n\x1b[2J,2,3\n",
        "control": "x\x1b[2J\n1\n",
        "nothing": "",
        "nul": "x\n\0\n",
    }
    texts |= {
        "wide": ",".join(f"c{i}" for i in range(5000)) + "\n",
        "quote": 'x\n"' + "a" * 10**6,
        "header": "x\n",
        "huge": "x\n1e999999\n",
    }
    for name, text in texts.items():
        (folder / f"{name}.csv").write_text(text)
        yield packing(f"csv {name}", folder / f"{name}.csv")
    with gzip.open(folder / "bomb.csv.gz", "wb", 1) as file:
        file.write(b"x\n")
        for _ in range(140):
            file.write(b"1\n" * (1 << 19))
    yield packing("csv bomb", folder / "bomb.csv.gz")
    (folder / "torn.csv.gz").write_bytes(gzip.compress(b"x\n1\n" * 999)[:-9])
    yield packing("csv torn", folder / "torn.csv.gz")
    columns: dict[str, Any] = {
        "dictionary": pyarrow.DictionaryArray.from_arrays(
            pyarrow.array([0] * 3000), pyarrow.array(["a" * 10**6])
        ),
        "runs": pyarrow.array(np.zeros(35_000_000, np.int64)),
        "lists": pyarrow.array([[["a"]]] * 3),
        "map": pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int32())),
        "nothing": pyarrow.array([], pyarrow.int32()),
        "null": pyarrow.nulls(3),
    }
    for name, column in columns.items():
        parquet.write_table(
            pyarrow.table({"x": column}), folder / f"{name}.parquet", row_group_size=35_000_000
        )
        yield packing(f"parquet {name}", folder / f"{name}.parquet")
    parquet.write_table(
        pyarrow.Table.from_arrays([pyarrow.array([1])] * 2, ["x", "x"]), folder / "twice.parquet"
    )
    yield packing("parquet twice", folder / "twice.parquet")
    (folder / "far.csv").symlink_to(outside / "secret.csv")
    yield packing("csv link", folder / "fa[r].csv")


def checkpoints(folder: Path, outside: Path) -> Iterator[Case]:
    """Run directories with parts that name others, nest for ever, or are none."""
    good = folder / "good"
    checkpoint_at(good, 5)
    place = folder_of(good, 5)
    record = json.loads((place / "shard-0.json").read_text())
    changes = [
        {"needs": needs}
        for needs in (["../../../../../outside/secret"], [str(outside / "secret")], [1], "x", None)
    ]
    changes += [
        {"state": value} for value in (None, 7, {"__tensor__": "x"}, {"__tensor__": [1]}, {"__pairs__": 3})
    ]
    changes += [{"num_bytes": size} for size in HUGE] + [
        {"schema": "x"},
        {"schema": [1]},
        {"sha256": 3},
        {"self": 7},
    ]
    changes += [{key: value} for key in record if key != "self" for value in (None, 7, "x", [[]], {"a": 1})]
    changes += [{"part": "../x"}, {"about": "[" * 9999}, {"about": 7}]
    texts = [signed({**record, **change}) for change in changes]
    texts += [
        "",
        "[",
        "[" * 10**6,
        '{"a":' * 10**5,
        "7",
        "[]",
        "null",
        "1" * 10**6,
        "\x00",
        "{}",
        '{"self": "x"}',
    ]
    for number, text in enumerate(texts):
        here = folder / f"part-{number}"
        shutil.copytree(good, here)
        (folder_of(here, 5) / "shard-0.json").write_text(text)
        yield Case(f"checkpoint {number}", "checkpoint", [str(here)])
    for name in ("shard-0.json", "shard-0.safetensors", "worker-0.json"):
        here = folder / f"pipe-{name}"
        shutil.copytree(good, here)
        (folder_of(here, 5) / name).unlink()
        os.mkfifo(folder_of(here, 5) / name)
        yield Case(f"checkpoint pipe {name}", "checkpoint", [str(here)])
        (folder_of(here, 5) / name).unlink()
        (folder_of(here, 5) / name).mkdir()
        yield Case(f"checkpoint folder {name}", "checkpoint", [str(here)])
    here = folder / "sparse"
    shutil.copytree(good, here)
    os.truncate(folder_of(here, 5) / "shard-0.safetensors", 1 << 40)
    os.truncate(folder_of(here, 5) / "worker-0.json", 1 << 40)
    yield Case("checkpoint sparse", "checkpoint", [str(here)])
    for number, name in enumerate(("notes", "9" * 12, "000000000099", "٣" * 12)):
        here = folder / f"names-{number}"
        shutil.copytree(good, here)
        (here / "checkpoints" / name).write_text("x")
        yield Case(f"checkpoint beside {name}", "checkpoint", [str(here)])


def signed(record: dict[str, Any]) -> str:
    """A part's record with a checksum of its own that holds, if it is not what was changed."""
    import hashlib

    said = record.pop("self", None)
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    return json.dumps({**record, "self": said if said == 7 else digest})


def checkpoint_at(run_dir: Path, mark: int) -> None:
    """A good checkpoint of two parts."""
    place, identity = folder_of(run_dir, mark), Identity("20260101-000000-0a0b0c0d", "0123456789abcdef")
    parts = ("shard-0", "worker-0")
    write_part(place, "worker-0", {"role": {"w": torch.arange(6.0), "n": 3}}, identity)
    write_part(place, "shard-0", {"role": {"w": torch.arange(6.0)}}, identity, parts, {"of": "a test"})


def texts(folder: Path, outside: Path) -> Iterator[Case]:
    """What `slurm status` and `slurm may-requeue` read in a run directory."""
    contents = [
        "",
        "[",
        "[" * 10**6,
        "7",
        "null",
        "[]",
        '{"slurm": 7}',
        '{"metrics": 7}',
        '{"metrics": {"a": "x"}}',
        "\x00",
    ]
    contents += [
        '{"status": "\\u001b[2J", "failure": "\\u001b[2J", "metrics": {"\\u001b[2J": 1.0}}',
        "1" * 10**6,
        '{"again": 1}',
    ]
    contents += [
        '{"again": true, "samples": "x"}',
        '{"again": true, "samples": [], "reason": "\\u001b[2J"}\n{"aga',
    ]
    for number, text in enumerate(contents):
        for name in ("result.json", "env.json", "failing_nodes.txt", "restarts.jsonl", "job.log"):
            here = made(folder / f"{number}-{name}")
            (here / name).write_text(text)
            yield Case(f"run {number} {name}", "command", ["slurm", "status", str(here)])
            if name == "restarts.jsonl":
                (here / "REQUEUE").touch()
                yield Case(f"restarts {number}", "command", ["slurm", "may-requeue", str(here)])


# ---- random damage of good files


def templates() -> dict[str, bytes | dict[str, bytes]]:
    """Good files of every kind by name; a folder is a dict of its files."""
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        found: dict[str, bytes | dict[str, bytes]] = {}
        pack({"x": X, "y": Y}, folder / "pack", validate=0, shard_samples=12, compression="gzip")
        found["pack"] = contents_of(folder / "pack")
        for name, libver in (("old.h5", "earliest"), ("new.h5", "latest")):
            with h5py.File(folder / name, "w", libver=libver) as file:
                file.create_dataset("x", data=X, chunks=(8, 4), compression="gzip")
                file.create_dataset("y", data=Y, maxshape=(None,), compression="lzf")
                file.create_dataset("z", data=Y.astype("f4"))
        np.savez(folder / "a.npz", x=X, y=Y)
        np.savez_compressed(folder / "b.npz", x=X, y=Y)
        np.save(folder / "a.npy", X)
        table = pyarrow.table({"x": Y, "t": ["ab", "c"] * 12, "l": [[1.0, 2.0]] * 24})
        csv.write_csv(table.select(["x", "t"]), folder / "a.csv")
        (folder / "b.csv.gz").write_bytes(gzip.compress((folder / "a.csv").read_bytes()))
        parquet.write_table(table, folder / "a.parquet")
        with tarfile.open(folder / "a.tar", "w") as archive:
            for number in range(4):
                for ending, content in (
                    ("npy", npy((4,), data=bytes(32))),
                    ("cls", b"3"),
                    ("png", encoded("PNG")),
                ):
                    member = tarfile.TarInfo(f"{number}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        found |= {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        for kind in ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP"):
            found[f"images {kind}"] = {"a/0.png": encoded(kind), "a/1.png": encoded(kind)}
        checkpoint_at(folder / "run", 5)
        checkpoint_at(folder / "run", 9)
        found["run"] = contents_of(folder / "run")
        return found


def contents_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


_TEMPLATES: dict[str, bytes | dict[str, bytes]] = {}


def damaged(scratch: Path, seeds: Sequence[int]) -> list[Case]:
    """One damage of every kind of good file for each seed."""
    if not _TEMPLATES:
        _TEMPLATES.update(templates())
    found: list[Case] = []
    for seed in seeds:
        for name, content in _TEMPLATES.items():
            draw = random.Random(f"{seed} {name}")
            here = made(scratch / "damaged" / f"{seed}")
            files = content if isinstance(content, dict) else {name: content}
            victim = draw.choice(sorted(files))
            root = here / name if isinstance(content, dict) else here
            for each, data in files.items():
                made((root / each).parent)
                (root / each).write_bytes(damage(data, draw) if each == victim else data)
            found += list(reading(f"seed {seed}, {name}: {victim}", name, here / name, draw))
    return found


def reading(told: str, name: str, path: Path, draw: random.Random) -> Iterator[Case]:
    """How a damaged file of this kind is read; one of several ways, by lot."""
    if name == "run":
        yield Case(told, "checkpoint", [str(path)])
    elif name == "pack":
        yield draw.choice(
            [*looking(told, path), Case(told, "command", ["data", "stage", str(path), f"{path}.staged"])]
        )
    elif name.endswith(".h5"):
        yield draw.choice([*looking(told, path)])
    else:
        yield packing(told, path)


def damage(data: bytes, draw: random.Random) -> bytes:
    """Some bytes flipped, overwritten, cut out, doubled, or a number in them replaced by a large one."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(changed) + 1)
        kind = draw.randrange(7)
        if kind == 0 and changed:
            changed[min(at, len(changed) - 1)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            size = draw.choice((1, 2, 4, 8, 64))
            changed[at : at + size] = draw.choice((b"\x00", b"\xff", b"\x7f", b"\x80")) * size
        elif kind == 2:
            del changed[at : at + draw.choice((1, 4, 100, 10**6))]
        elif kind == 3:
            piece = changed[at : at + draw.choice((1, 8, 512))]
            changed[at:at] = piece
        elif kind == 4:
            value = draw.choice((2**31 - 1, 2**32 - 1, 2**16, 10**9, 0, 1))
            changed[at : at + 4] = value.to_bytes(4, draw.choice(("little", "big")))
        elif kind == 5:
            value = draw.choice((2**63 - 1, 2**64 - 1, 10**15, 2**40, 0))
            changed[at : at + 8] = value.to_bytes(8, draw.choice(("little", "big")))
        else:
            changed[at:at] = draw.choice((b"\x1b[2J", b"[" * 5000, b"../", b'"', b"9" * 50, b"\n"))
    return bytes(changed)
