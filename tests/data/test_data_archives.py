"""Members of archives under the names that people give them: each is packed, refused by name, or counted."""

import io
import tarfile
import warnings
import zipfile

import numpy as np
import pytest

from mpitrain.data.sources import open_source
from mpitrain.errors import DataError, UsageError


def npy(value):
    stream = io.BytesIO()
    np.save(stream, np.full(3, value, "f4"))
    return stream.getvalue()


def tar_of(path, members):
    """Members are (name, bytes); None is a folder, text the target of a hard link."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
                continue
            member.type = tarfile.DIRTYPE if content is None else tarfile.LNKTYPE
            member.linkname = content or ""
            archive.addfile(member)
    return str(path)


def pair(key, value, ending="x.npy", label="cls"):
    return [(f"{key}.{ending}", npy(value)), (f"{key}.{label}", str(value).encode())]


LONG = "d" * 150
GOOD = {
    "plain": [*pair("000", 0), *pair("001", 1)],
    "the same names in two folders": [*pair("a/000", 0), *pair("b/000", 1)],
    "a folder with a dot": [*pair("train.v1/000", 0), *pair("train.v1/001", 1)],
    "a folder of here": [("./", None), *pair("./000", 0), *pair("./001", 1)],
    "long": [*pair(f"{LONG}/000", 0), *pair(f"{LONG}/001", 1)],
    "large letters": [*pair("000", 0, "X.NPY", "CLS"), *pair("001", 1, "x.Npy", "Cls")],
    "letters of both sizes": [*pair("000", 0, "x.NPY"), *pair("001", 1, label="CLS")],
    "macOS": [
        ("._000.x.npy", b"\0\5\x16\7"),
        *pair("000", 0),
        ("__MACOSX/._001.cls", b"\0"),
        *pair("001", 1),
    ],
    "no samples between": [("README", b"read"), *pair("000", 0), (".DS_Store", b"\0"), *pair("001", 1)],
}


@pytest.mark.parametrize("case", GOOD)
def test_samples_are_found_under_the_names_of_their_members(tmp_path, case):
    source = open_source(tar_of(tmp_path / "a.tar", GOOD[case]))
    back = source.take(np.arange(source.num_samples))
    assert back["cls"].tolist() == [0, 1] and back["x_npy"][:, 0].tolist() == [0, 1]
    left_out = 2 if case in ("macOS", "no samples between") else 0
    assert [line.split()[0] for line in source.remarks()] == [str(left_out)] * bool(left_out)


BAD = {
    "twice": ([*pair("000", 0), ("000.x.npy", npy(9)), *pair("001", 1)], r"'000\.x\.npy' stands twice"),
    "twice later": ([*pair("000", 0), *pair("001", 1), *pair("000", 9)], r"'000\.x\.npy' belongs to '000', .*twice"),
    "twice in other letters": ([*pair("000", 0), ("000.CLS", b"1")], r"'000\.CLS' stands twice"),
    "not sorted": ([("0.x.npy", npy(0)), ("1.x.npy", npy(1)), ("0.cls", b"0"), ("1.cls", b"1")], "is not sorted"),
    "dots": ([*pair("1.5", 0), *pair("1.7", 1)], r"ending of '1\.5\.x\.npy' is '5\.x\.npy', which is no array's name"),
    "one more": ([*pair("000", 0), *pair("001", 1), ("001.seg.npy", npy(1))], r"001\.seg\.npy: is not in the first"),
    "one less": ([*pair("000", 0), ("001.x.npy", npy(1))], r"001\.cls: is not in the archive"),
    "a link": ([*pair("000", 0), ("001.x.npy", "000.x.npy"), ("001.cls", b"1")], r"'001\.x\.npy' is a link"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_members_that_would_be_dropped_are_refused_by_name(tmp_path, case):
    members, message = BAD[case]
    with pytest.raises(DataError, match=message):
        open_source(tar_of(tmp_path / "a.tar", members))


def test_a_name_that_stands_twice_in_an_npz_or_a_pattern(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile's own, of whoever writes such a file
        archive.writestr("x.npy", npy(0))
        archive.writestr("x.npy", npy(9))
    with pytest.raises(DataError, match=r"'x\.npy' stands twice"):
        open_source(str(tmp_path / "a.npz"))
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.npy").write_bytes(npy(0))
    with pytest.raises(UsageError, match=r"two/x\.npy: another file that .* matches is called so"):
        open_source(str(tmp_path / "*" / "x.npy"))
