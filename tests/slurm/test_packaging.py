"""What a centre installs mpitrain with: versions and lower bounds are those of setup.cfg, every file is what its tool
reads, as far as the tool can be had here, and the module file is loaded by Lmod itself."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from mpitrain import __version__

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "slurm" / "packaging"
DEFINITION = FOLDER / "mpitrain.def"
SPACK = FOLDER / "spack_repo" / "mpitrain"
MODULE = FOLDER / "modules" / "mpitrain" / f"{__version__}.lua"
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
BOUNDS = dict(line.split(">=") for line in SETUP["options"]["install_requires"].split("\n") if ">=" in line)
PYTHON = SETUP["options"]["python_requires"].removeprefix(">=")
EXTRAS = {
    name: dict(line.split(">=") for line in text.split("\n") if ">=" in line)
    for name, text in SETUP["options.extras_require"].items()
}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def test_an_apptainer_definition_of_known_sections() -> None:
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in DEFINITION.read_text().splitlines():
        if line.startswith("%"):
            current = line.split()[0]
            assert current not in sections, f"{current} twice"
            sections[current] = []
        else:
            sections[current].append(line)
    known = {"arguments", "files", "post", "environment", "runscript", "test", "labels", "help"}
    assert set(sections) - {""} == {f"%{name}" for name in known}
    assert sections[""][:2] == ["Bootstrap: docker", "From: python:{{ python }}-slim"]
    text = DEFINITION.read_text()
    declared = {line.split("=")[0].strip() for line in sections["%arguments"] if "=" in line}
    assert set(re.findall(r"\{\{ (\w+) \}\}", text)) == declared
    defaults = dict(line.strip().split("=", 1) for line in sections["%arguments"] if "=" in line)
    assert numbers(defaults["python"]) >= numbers(PYTHON)
    assert defaults["mpi"] in EXTRAS
    assert f"torch>={BOUNDS['torch']}'" in text and f"Version {__version__}" in text
    for line in filter(None, sections["%files"]):
        assert (ROOT / line.split()[0]).exists(), line
    for name in ("%post", "%environment", "%runscript", "%test"):
        run = subprocess.run(["bash", "-n"], input="\n".join(sections[name]), text=True, capture_output=True)
        assert run.returncode == 0, (name, run.stderr)


def test_a_spack_package_with_the_bounds_of_setup_cfg(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with stand-ins that write down each directive and refuse a word that Spack's does not take."""
    wanted: dict[str, dict[str, Any]] = {}
    variants, versions = [], []

    def depends_on(spec: str, *, type: Any = ("build", "link"), when: str = "") -> None:
        wanted[spec] = {"type": type, "when": when}

    def variant(name: str, *, default: bool, description: str) -> None:
        variants.append(name)

    def version(name: str, *, branch: str = "", tag: str = "", preferred: bool = False) -> None:
        versions.append(name)

    directives = types.ModuleType("spack.package")
    vars(directives).update(depends_on=depends_on, variant=variant, version=version)
    python = types.ModuleType("spack_repo.builtin.build_systems.python")
    vars(python)["PythonPackage"] = object
    for module in (directives, python):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    path = SPACK / "packages" / "py_mpitrain" / "package.py"
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    assert isinstance(names["PyMpitrain"], type) and versions == ["main", __version__]
    for package, bound in BOUNDS.items():
        assert wanted.pop(f"py-{package}@{bound}:") == {"type": ("build", "run"), "when": ""}
    assert wanted.pop(f"python@{PYTHON}:")["type"] == ("build", "run")
    assert wanted.pop("mpi")["type"] == ("build", "run") and wanted.pop("py-setuptools")["type"] == "build"
    extras = {package: bound for extra in EXTRAS.values() for package, bound in extra.items()}
    for spec, words in wanted.items():  # and those of its variants
        package, bound = re.fullmatch(r"py-([\w-]+)@([\d.]+):", spec).groups()
        assert extras[package] == bound and words["when"].removeprefix("+") in variants, spec
    assert len(wanted) == len(variants)
    repository = (SPACK / "repo.yaml").read_text()
    assert re.fullmatch(r"repo:\n  namespace: mpitrain\n  api: v\d\.\d\n", repository)


def test_an_easyconfig_whose_versions_are_new_enough() -> None:
    path = next(FOLDER.glob("*.eb"))
    known: dict[str, Any] = {"SOURCE_TAR_GZ": "%(name)s-%(version)s.tar.gz"}
    exec(compile(path.read_text(), str(path), "exec"), known)
    chain = known["toolchain"]
    assert path.name == f"{known['name']}-{known['version']}-{chain['name']}-{chain['version']}.eb"
    assert (known["name"], known["version"]) == ("mpitrain", __version__)
    for field in ("easyblock", "homepage", "description", "sources", "sanity_check_paths", "moduleclass"):
        assert known[field]
    found = dict(known["dependencies"])
    assert numbers(found.pop("Python")) >= numbers(PYTHON)
    numpy = re.search(r"'SciPy-bundle', .*# numpy ([\d.]+)", path.read_text())
    found["numpy"] = numpy[1] if numpy else ""
    del found["SciPy-bundle"]
    versions = {
        {"PyTorch": "torch", "Safetensors": "safetensors"}.get(name, name): v for name, v in found.items()
    }
    assert set(versions) == set(BOUNDS)
    for package, bound in BOUNDS.items():
        assert numbers(versions[package]) >= numbers(bound), package


def test_a_module_file_of_this_version_that_lua_reads() -> None:
    assert f'whatis("Version: {__version__}")' in MODULE.read_text()
    luac = next((path for name in ("luac", "luac5.4", "luac5.3") if (path := shutil.which(name))), None)
    if luac is None:
        pytest.skip("no luac: apt-get install lua5.4")
    run = subprocess.run([luac, "-p", str(MODULE)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_lmod_loads_the_module_file(tmp_path: Path) -> None:
    lmod = next(iter(sorted(Path("/usr/share/lmod").glob("*/libexec/lmod"))), None)
    if lmod is None:
        pytest.skip("no Lmod: apt-get install lmod")

    def load(root: Path, **env: str) -> str:
        clean = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "MODULEPATH": str(MODULE.parents[1])}
        run = subprocess.run(
            [str(lmod), "bash", "load", f"mpitrain/{__version__}"],
            env={**clean, "MPITRAIN_ROOT": str(root), **env},
            capture_output=True,
            text=True,
        )
        return run.stdout + run.stderr

    assert f"there is no environment {tmp_path}/absent" in " ".join(load(tmp_path / "absent").split())
    root = tmp_path / "env"
    (root / "lib").mkdir(parents=True)
    text = load(root)
    assert re.search(rf'^PATH="?{root}/bin:', text, re.MULTILINE), text
    assert "HDF5_USE_FILE_LOCKING=" in text and "OPAL_PREFIX" not in text
    (root / "lib" / "libmpi.so.40").touch()
    assert re.search(rf'^OPAL_PREFIX="?{root}"?;', load(root), re.MULTILINE)
