"""ReFrame as a person starts it, and what it reports."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT

SUITES = ROOT / "benchmarks" / "suites"
PROGRAM = Path(sys.executable).parent / "reframe"
needs_reframe = pytest.mark.skipif(not PROGRAM.exists(), reason="no ReFrame: pip install ReFrame-HPC")


def reframe(report: Path, system: str, *words: str) -> list[str]:
    """The command line; `words`: further options. Everything that it leaves lies beside `report`."""
    files = ["-C", str(SUITES / "reframe_settings.py"), "-c", str(SUITES / "reframe_checks.py")]
    places = ["--prefix", str(report.parent / "reframe"), "--report-file", str(report)]
    return [str(PROGRAM), *files, "--system", system, "-r", "-S", "steps=20", *places, *words]


def figures(report: Path) -> dict[str, dict[str, Any]]:
    """The figures of every check that has passed, by strategy."""
    found = {}
    for check in json.loads(report.read_text())["runs"][0]["testcases"]:
        assert check["result"] == "pass", check["fail_reason"]
        found[check["setting"].rpartition("-")[0]] = {
            name.rpartition(":")[2]: values[0] for name, values in check["perfvalues"].items()
        }
    return found
