"""Files from elsewhere: they lead nowhere else, take no more memory than allowed, and steer no terminal."""

import gzip
import io
import json
import os
import tarfile
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from mpitrain.cli.main import main
from mpitrain.data import Shards
from mpitrain.data.format.chunk_lengths import ChunkLengths
from mpitrain.data.format.manifest import NAME, Manifest
from mpitrain.data.read.stage import stage
from mpitrain.data.sources import SourceOptions, open_source
from mpitrain.data.tools.check import check
from mpitrain.data.write.pack import pack
from mpitrain.errors import DataError, UsageError, printable
from mpitrain.system.files.outside import Trust, expanded

X = np.arange(48, dtype=np.float32).reshape(12, 4)


@pytest.fixture
def packed(tmp_path):
    pack({"x": X}, tmp_path / "a", validate=0, shard_samples=6)
    return tmp_path / "a"


def index_with(packed: Path, **fields: object) -> None:
    path = packed / NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# ---- the index of a pack


@pytest.mark.parametrize("absolute", [True, False])
def test_no_index_leads_out_of_its_folder(packed, tmp_path, absolute):
    """Staging wrote through such a name, packing removed what it named."""
    victim = tmp_path / "victim-00000.h5"
    victim.write_bytes(b"precious")
    name = str(victim) if absolute else "../victim-00000.h5"
    for complete in (True, False):
        index_with(packed, files={name: 1}, sha256={}, complete=complete)
        for act in (
            lambda: stage(packed, tmp_path / "local"),
            lambda: check(str(packed)),
            lambda: Shards(str(packed / "*.h5")).scan(),
            lambda: pack({"x": X}, packed),
        ):
            with pytest.raises(DataError, match="is no plain name of a shard, such as train-00000.h5"):
                act()
    assert victim.read_bytes() == b"precious" and not (tmp_path / "local").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"files": {"train-00000.h5\n": 1}},
        {"files": {"a/train-00000.h5": 1}},
        {"files": {"notes.txt": 1}},
        {"files": {"train-00000.h5": -1}},
        {"files": {"train-00000.h5": True}},
        {"files": ["train-00000.h5"]},
        {"sha256": {"train-00000.h5": "../x"}},
        {"splits": ["../train"]},
        {"splits": 3},
        {"recipe": None},
        {"complete": "yes"},
        {"unknown": 1},
    ],
)
def test_an_index_that_packing_never_writes_is_refused(packed, fields):
    index_with(packed, **fields)
    with pytest.raises(DataError, match="is not a manifest of `mpitrain data pack`"):
        Manifest.read(packed)


def test_an_index_that_never_ends_is_not_waited_for(packed):
    (packed / NAME).write_text("[" * 100_000)
    with pytest.raises(DataError, match="nested too deeply"):
        Manifest.read(packed)
    os.truncate(packed / NAME, 1 << 30)
    with pytest.raises(DataError, match="larger than 32 MiB"):
        Manifest.read(packed)
    (packed / NAME).unlink()
    os.mkfifo(packed / NAME)
    with pytest.raises(DataError, match="is a pipe"):
        Manifest.read(packed)


def test_a_copy_is_compared_with_the_packs_own_sums(packed, tmp_path):
    """Also where the index keeps none: then with the sums of the shards themselves."""
    index_with(packed, sha256={})
    target, copied = stage(packed, tmp_path / "local")
    assert copied and stage(packed, tmp_path / "local")[1] == 0
    shard = target / "train-00001.h5"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert stage(packed, tmp_path / "local")[1] > 0
    assert shard.read_bytes() == (packed / shard.name).read_bytes()


def test_nothing_is_written_through_links_that_lie_in_the_way(packed, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (packed / "train-00001.h5").unlink()
    for hidden in (".train-00001.h5.partial", f".{NAME}.partial", ".train-00001.h5.done"):
        (packed / hidden).unlink(missing_ok=True)
        (packed / hidden).symlink_to(victim)
    pack({"x": X}, packed, validate=0, shard_samples=6)
    assert victim.read_bytes() == b"precious" and not check(str(packed)).problems


def test_shards_that_are_links_out_of_the_folder_are_refused_or_allowed(packed, tmp_path):
    shard = packed / "train-00000.h5"
    shard.rename(tmp_path / "elsewhere.h5")
    shard.symlink_to(tmp_path / "elsewhere.h5")
    for act in (
        lambda **allow: Shards(str(packed / "*.h5"), **allow).scan(),
        lambda **allow: stage(packed, tmp_path / "local", **allow),
        lambda **allow: check(str(packed), trust=Trust(**allow)),
        lambda **allow: open_source(str(packed / "*.h5"), SourceOptions(**allow)),
    ):
        with pytest.raises(
            DataError, match=r"train-00000\.h5: is a link to .*elsewhere\.h5.*--allow-external"
        ):
            act()
        act(allow_external=True)
    assert Shards(str(shard)).scan().num_samples == 6  # named by the user


# ---- shards


def external(folder: Path, kind: str) -> Path:
    """A shard with an array of its own, and one whose bytes lie elsewhere."""
    with h5py.File(folder / "other.h5", "w") as other:
        other["z"] = X
    (folder / "raw.bin").write_bytes(X.tobytes())
    with h5py.File(folder / "shard.h5", "w") as file:
        file["y"] = np.arange(12)
        if kind == "storage":
            file.create_dataset("x", X.shape, X.dtype, external=[(str(folder / "raw.bin"), 0, X.nbytes)])
        elif kind == "virtual":
            layout = h5py.VirtualLayout(X.shape, X.dtype)
            layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "z", X.shape)
            file.create_virtual_dataset("x", layout)
        else:
            file["g/far"] = h5py.ExternalLink("other.h5", "/")
            file["x"] = h5py.ExternalLink("other.h5", "/z") if kind == "link" else h5py.SoftLink("/g/far/z")
    return folder / "shard.h5"


@pytest.mark.parametrize("kind", ["storage", "virtual", "link", "link by a link"])
def test_datasets_that_lie_elsewhere_are_refused_or_allowed_and_never_missing(tmp_path, kind):
    """A missing file read as fill values, and a missing link was passed over: y alone was packed."""
    path = external(tmp_path, kind)
    with pytest.raises(DataError, match=r"shard\.h5: .*'(x|far)'.*--allow-external"):
        Shards(str(path)).scan()
    with pytest.raises(DataError, match="--allow-external"):
        open_source(str(path))
    assert main(["data", "pack", str(path), str(tmp_path / "out"), "--allow-external"]) == 0
    allowed = Shards(str(path), allow_external=True)
    with allowed.reader(allowed.scan(), 0) as reader:
        batch = reader.batch(0, 0, 12)
    assert np.array_equal(batch["x"].numpy(), X[batch["y"].numpy()])
    for gone in ("other.h5", "raw.bin"):
        (tmp_path / gone).unlink()
    with pytest.raises(DataError, match="there"):
        allowed.scan()


def test_a_virtual_dataset_with_a_hole_is_refused(tmp_path):
    external(tmp_path, "link")
    layout = h5py.VirtualLayout((24, 4), X.dtype)
    layout[:12] = h5py.VirtualSource(str(tmp_path / "other.h5"), "z", X.shape)
    with h5py.File(tmp_path / "hole.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    with pytest.raises(DataError, match="48 of its 96 values come from nowhere"):
        Shards(str(tmp_path / "hole.h5"), allow_external=True).scan()


def test_a_link_in_a_circle_ends(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = h5py.SoftLink("/x")
    with pytest.raises(DataError, match="link in a circle"):
        Shards(str(tmp_path / "a.h5")).scan()


@pytest.mark.parametrize(
    "options", [{}, {"fletcher32": True}, {"compression": "gzip", "shuffle": True}, {"compression": "lzf"}]
)
@pytest.mark.parametrize("length", [10, 64, 5000])
def test_a_chunk_decodes_to_what_it_declares(tmp_path, options, length):
    """A shorter one handed out what lay in memory behind it, a longer one was inflated to its end."""
    path = tmp_path / "a.h5"
    data = bytes(range(256)) * 32
    encoded = {"gzip": zlib.compress, "lzf": literal_runs}.get(options.get("compression"), bytes)(
        data[:length]
    )
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", (64,), np.uint8, chunks=(64,), **options)
        dataset.id.write_direct_chunk((0,), encoded + b"\0\0\0\0" * ("fletcher32" in options))
    with h5py.File(path) as file:
        problem = ChunkLengths(file["x"]).check(0, 64)
    assert (problem == "") == (length == 64), problem
    if length != 64:
        source = Shards(str(path))
        with (
            source.reader(source.scan(), 0) as reader,
            pytest.raises(DataError, match="decodes to .* expected 64"),
        ):
            reader.batch(0, 0, 64)


def literal_runs(data: bytes) -> bytes:
    """LZF without a single copy."""
    pieces = [data[at : at + 32] for at in range(0, len(data), 32)]
    return b"".join(bytes([len(piece) - 1]) + piece for piece in pieces)


@pytest.mark.parametrize(
    "options", [{"compression": "gzip"}, {"compression": "lzf"}, {"compression": "szip"}, {"scaleoffset": 2}]
)
@pytest.mark.parametrize("plugin", [None, "Zstd", "Blosc", "Blosc2", "LZ4", "Bitshuffle"])
def test_every_compressor_is_read_as_before(tmp_path, options, plugin):
    hdf5plugin = pytest.importorskip("hdf5plugin")
    options = dict(getattr(hdf5plugin, plugin)()) if plugin else options
    for values in (np.ones((100, 7)), np.random.default_rng(0).integers(0, 9, (100, 7)).astype("f8")):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file.create_dataset("x", data=values, chunks=(16, 4), **options)
        with h5py.File(tmp_path / "a.h5") as file:
            assert ChunkLengths(file["x"]).check(0, 100) == ""


@pytest.mark.parametrize("shape", [(10**12,), (10**15,), (4, 10**12), (10**9, 2)])
@pytest.mark.parametrize("chunks", [None, True])
def test_sizes_that_are_only_declared_are_not_believed(tmp_path, shape, chunks):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", shape, np.uint8, chunks=chunks)
    with pytest.raises(DataError, match=r"a\.h5.*(declares .* its file holds|would take .* --max-gib)"):
        Shards(str(tmp_path / "a.h5")).scan()


def test_the_bound_is_an_option(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((4, 1 << 20), np.uint8), chunks=(4, 1 << 20))
    with pytest.raises(
        DataError, match="would take 0.0039.* GiB of memory by what the file declares, and 0.001 GiB"
    ):
        Shards(str(tmp_path / "a.h5"), max_gib=0.001).scan()
    assert Shards(str(tmp_path / "a.h5"), max_gib=0.1).scan().num_samples == 4
    assert main(["data", "info", str(tmp_path / "a.h5"), "--max-gib", "0.001"]) == 2
    with pytest.raises(UsageError, match="max_gib must be above 0"):
        Shards("a", max_gib=0)
    with pytest.raises(
        UsageError, match=r"--max-gib: a source such as 'digits' \(example\) does not take it"
    ):
        open_source("digits", SourceOptions(max_gib=1))


# ---- images


def test_images_that_are_links_out_of_the_folder_are_refused_or_allowed(tmp_path):
    (tmp_path / "secret").mkdir()
    Image.new("RGB", (3, 3)).save(tmp_path / "secret" / "a.png")
    folder = tmp_path / "images"
    (folder / "cats").mkdir(parents=True)
    (folder / "cats" / "a.png").symlink_to(tmp_path / "secret" / "a.png")
    (folder / "dogs").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match="cats/a.png: is a link to .*secret/a.png"):
        open_source(str(folder))
    assert open_source(str(folder), SourceOptions(allow_external=True)).num_samples == 2
    (folder / "cats" / "a.png").unlink()
    with pytest.raises(DataError, match="dogs: is a link to .*secret"):
        open_source(str(folder))
    (folder / "dogs").unlink()
    (folder / "cats" / "b.png").symlink_to("gone.png")
    with pytest.raises(DataError, match="b.png: is a link that leads nowhere"):
        open_source(str(folder))


def test_an_eps_under_another_name_starts_no_interpreter(tmp_path, monkeypatch):
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("Ghostscript was started"))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with pytest.raises(DataError, match=r"x\.png: cannot be decoded as an image"):
        open_source(str(tmp_path))


# ---- archives and tables


def test_archives_that_declare_too_much(tmp_path):
    for size, kind in (
        (10**15, tarfile.REGTYPE),
        (10**15, tarfile.XHDTYPE),
        (1 << 40, tarfile.GNUTYPE_LONGNAME),
    ):
        member = tarfile.TarInfo("a.npy")
        member.size, member.type = size, kind
        (tmp_path / "a.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
        with pytest.raises(DataError, match=r"a\.tar: .*(declares|truncated)"):
            open_source(str(tmp_path / "a.tar"))


@pytest.mark.parametrize("shape", [(10**15,), (10**12,), (2**62, 4), (-1,)])
def test_arrays_that_declare_too_much(tmp_path, shape):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    content = header.getvalue() + bytes(64)
    (tmp_path / "a.npy").write_bytes(content)
    import zipfile

    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / f"{method}.npz", "w", method) as archive:
            archive.writestr("x.npy", content)
    member = tarfile.TarInfo("a.npy")
    member.size = len(content)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.addfile(member, io.BytesIO(content))
    for name in ("a.npy", "0.npz", "8.npz", "a.tar"):
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            open_source(str(tmp_path / name))


def test_a_packed_table_is_unpacked_as_far_as_allowed(tmp_path):
    with gzip.open(tmp_path / "a.csv.gz", "wb") as file:
        file.write(b"x\n" + b"1\n" * (4 << 20))
    with pytest.raises(DataError, match=r"a\.csv\.gz: unpacks to more than 0.002 GiB; .*--max-gib"):
        open_source(str(tmp_path / "a.csv.gz"), SourceOptions(max_gib=0.004))
    assert open_source(str(tmp_path / "a.csv.gz")).num_samples == 4 << 20


def test_text_in_a_dictionary_is_counted_before_it_is_written_out(tmp_path):
    from pyarrow import parquet, table

    parquet.write_table(table({"t": ["a" * 1_000_000] * 30}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 20
    with pytest.raises(DataError, match=r"column 't' would take 0.0279 GiB"):
        open_source(str(tmp_path / "a.parquet"), SourceOptions(max_gib=0.025))
    parquet.write_table(table({"t": ["ab", "c", "ab"]}), tmp_path / "a.parquet")
    assert open_source(str(tmp_path / "a.parquet")).take(np.arange(3))["t"].flat.tobytes() == b"abcab"


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_of_one_name_are_told(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "csv":
        path.write_text("x,y,x\n1,2,3\n")
    else:
        import pyarrow
        from pyarrow import parquet

        columns = [pyarrow.array([1]), pyarrow.array([2])]
        parquet.write_table(pyarrow.Table.from_arrays(columns, ["x", "x"]), path)
    with pytest.raises(DataError, match="has 2 columns 'x'; give each a name of its own"):
        open_source(str(path))


# ---- names and places


def test_names_steer_no_terminal(tmp_path, capsys):
    path = tmp_path / "a\x1b]0;owned\x07\nb.h5"
    with h5py.File(path, "w") as file:
        file["x\x1b[2J"] = np.zeros(3)
        file["y\u202e\u0085"] = np.zeros(4)
    assert main(["data", "info", str(path)]) == 2
    told = capsys.readouterr().err
    assert "\\x1b[2J" in told and "\\u202e" in told and "\\x85" in told and told.count("\n") == 1
    assert all(each.isprintable() for each in told.rstrip("\n"))
    with h5py.File(path, "a") as file:
        del file["y\u202e\u0085"]
    assert main(["data", "info", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "array x\\x1b[2J" in shown and "\x1b" not in shown and "\x07" not in shown
    assert printable("plain – text\n") == "plain – text\n" and printable("\ud800\t") == "\\ud800\\t"


@pytest.mark.parametrize("name", ["a.h5", "a.npz", "a.npy", "a.csv", "a.csv.gz", "a.parquet", "a.tar"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="is a pipe, a device or a socket"):
        open_source(str(tmp_path / name))


def test_a_place_that_this_node_does_not_know_is_refused(packed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TMPDIR", raising=False)
    for unknown in ("$TMPDIR/mpitrain", "${TMPDIR}/mpitrain"):
        assert main(["data", "stage", str(packed), unknown]) == 2
        assert "TMPDIR" in (told := capsys.readouterr().err) and "is not set on" in told
    assert main(["data", "stage", str(packed), "~no_such_user/a"]) == 2
    assert main(["data", "pack", str(packed / "*.h5"), "~no_such_user/a"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    assert expanded("$TMPDIR/x") == tmp_path / "t" / "x"
