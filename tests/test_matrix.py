"""The table of versions that were tried (`make test-matrix` writes it), and what makes its rows."""

import re

import pytest

from mpitrain import torch_versions
from tests import matrix
from tests.matrix import Setting
from tests.ranks import ROOT

REPORT = """<testsuites><testsuite>
<testcase classname="tests.mpi.test_a" name="test_one"/>
<testcase classname="tests.mpi.test_a" name="test_two[x]"><failure message="no"/></testcase>
<testcase classname="tests.mpi.test_b" name="test_three"><error message="no"/></testcase>
<testcase classname="tests.mpi.test_b" name="test_four"><skipped message="no MPICH"/></testcase>
</testsuite></testsuites>"""


def test_the_table_has_every_version_from_the_bound_to_the_newest():
    text = matrix.TABLE.read_text(encoding="utf-8")
    rows = matrix.read_table(text)
    for factor, values in matrix.WANTED.items():
        for value in values:
            assert f"\n{factor} {value}: " in text, (factor, value)
    assert any("passed" in told for told, _ in rows.values())
    for setting, (told, failed) in rows.items():
        assert sum(map(int, re.findall(r"(\d+) failed", told))) == len(failed), setting
    known = {torch_versions.version(one.value) for one in rows if one.factor == "torch"}
    assert {torch_versions.OLDEST_TRIED, torch_versions.NEWEST_TRIED} <= known
    (bound,) = re.findall(r"(?m)^ +torch>=(\S+)$", (ROOT / "setup.cfg").read_text())
    assert torch_versions.version(bound) == torch_versions.OLDEST_TRIED


def test_a_row_counts_what_pytest_says_and_is_read_again(tmp_path, monkeypatch):
    found = matrix.read_report(REPORT)
    assert matrix.in_words(found) == "1 passed, 2 failed, 1 skipped"
    assert found["failed"] == ["tests/mpi/test_a.py::test_two[x]", "tests/mpi/test_b.py::test_three"]
    monkeypatch.setattr(matrix, "TABLE", tmp_path / "matrix.txt")
    setting = Setting("torch", "2.15.0")
    rows = matrix.read_table("") | {setting: (f"small jobs {matrix.in_words(found)}", found["failed"])}
    matrix.write_table(rows)
    again = matrix.read_table(matrix.TABLE.read_text())
    assert again == rows and again[Setting("mpi", "mpich")] == (matrix.NOT_RUN, [])
    torches = [one.value for one in again if one.factor == "torch"]
    assert torches == ["2.8.0", "2.9.1", "2.13.0", "2.14.1", "2.15.0"]
    assert matrix.read_table("numpy 9.9: not run yet\n") == matrix.read_table("")


def test_what_cannot_be_had_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "BUILD", tmp_path)
    row, failed = matrix.run(Setting("python", "2.99"), keeps=False, sections=["compile"])
    assert (row, failed) == ("not installed: no Python 2.99 on this machine", [])
    assert list(tmp_path.iterdir()) == []


def test_a_piece_that_is_done_is_not_done_again(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "BUILD", tmp_path)
    environment = matrix.Environment(Setting("torch", "2.8.0"))
    environment.setting.folder.mkdir()
    count = tmp_path / "count"
    for _ in range(2):
        environment._piece("counted", ["sh", "-c", f"echo >> {count}"])
    try:
        environment._piece("broken", ["sh", "-c", "echo ERROR: no such thing >&2; exit 1"])
    except matrix.CannotInstall as error:
        assert str(error) == "no such thing"
    assert count.read_text() == "\n" and not (environment.setting.folder / ".broken-is-there").exists()


APT = """#!/bin/sh
case $1 in
install) test $4 = alone || printf 'Inst libfabric1 (1.17)\\nInst %s (4.0)\\nConf %s (4.0)\\n' $4 $4 ;;
download) shift; for name; do touch $name.deb; done ;;
esac
"""
DPKG = """#!/bin/sh
name=$(basename $2 .deb)
mkdir -p $3/usr/lib/deep $3/usr/bin
touch $3/usr/lib/deep/$name.so.12 $3/usr/bin/$name
"""


def test_an_mpi_of_debian_lies_in_the_folder_of_its_row(tmp_path, monkeypatch):
    """With what it needs, its libraries in one folder, and nothing told to other processes."""
    monkeypatch.setattr(matrix, "BUILD", tmp_path)
    (programs := tmp_path / "programs").mkdir()
    for name, text in (("apt-get", APT), ("dpkg", DPKG), ("ldconfig", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    environment = matrix.Environment(Setting("mpi", "debian-mpich"))
    assert "OPAL_PREFIX" not in environment.variables()
    environment.setting.folder.mkdir()
    monkeypatch.setitem(matrix.DEBIAN, "debian-mpich", "libmpich")
    monkeypatch.setattr(environment, "_pip", lambda *words: None)
    monkeypatch.setattr("sys.executable", "true")
    environment.make()
    assert sorted(path.name for path in (environment.debian / "lib").iterdir()) == [
        "libfabric1.so.12", "libmpi.so.12", "libmpich.so.12"
    ]  # fmt: skip
    assert (environment.debian / "lib" / "libmpi.so.12").resolve().name == "libmpich.so.12"
    given = environment.variables()
    assert given["PATH"].startswith(f"{environment.debian}/root/usr/bin:")
    assert given["LD_LIBRARY_PATH"] == f"{environment.debian}/lib" and "OPAL_PREFIX" in given
    with pytest.raises(matrix.CannotInstall, match="alone is installed on this machine"):
        matrix.Environment(Setting("mpi", "other")).unpack("alone")
