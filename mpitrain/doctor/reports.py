"""What each node has reported, and the verdict on all of them.

Invariants: a report is one JSON file a node, which a reader sees whole or not at all; a node without a readable one is
unfit. The nodes are judged here and in `judge.py` alone: batch scripts print what this says.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.doctor.checks import Check
from mpitrain.doctor.judge import SLOW, common_faults, slow_nodes
from mpitrain.system.files.atomic import write_whole
from mpitrain.system.launched.launch_variables import batch_system

SILENT = "did not report"
# Faults that a site's environment, file systems and limits make as well as a node.
_MAY_BE_SITES = frozenset({SILENT, "imports", "hdf5", "locking", "quota", "limits", "disk", "devices"})
_WAYS_OUT = {
    "slurm": "sbatch --exclude={names}",
    "lsf": "bsub -R 'select[{conditions}]'",
    "flux": "flux batch --requires='-host:{names}'",
}


class Verdict(NamedTuple):
    """What is wrong with each unfit node, and what most nodes fail alike (by check, how many). `blamed`: nodes to leave
    out; `none_reported`: the launcher has started nothing on any of them."""

    wrong: dict[str, list[str]]
    common: dict[str, int]
    own: list[str]  # unfit nodes with a fault that most nodes do not have
    blamed: list[str]
    none_reported: bool = False


def write_report(folder: Path, name: str, checks: list[Check], kind: str) -> None:
    """Write this node's report, with its kind (`node_kind`)."""
    rows = [check._asdict() | {"figures": dict(check.figures)} for check in checks]
    write_whole(folder / f"{name}.json", json.dumps({"node": name, "kind": kind, "checks": rows}))


def node_kind(num_gpus: int) -> str:
    """What nodes have in common that should be equally fast: processor, cores and GPUs."""
    model = platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{len(os.sched_getaffinity(0))} x {model}, {num_gpus} GPUs"


def collect(folder: Path, hosts: Sequence[str], slow: float = SLOW) -> Verdict:
    """Read the reports of these nodes and judge them."""
    reports = {host: _report(_path(folder, host)) for host in hosts}
    wrong: dict[str, list[str]] = {}
    failed: dict[str, set[str]] = {}
    for host, report in reports.items():
        if report is None:
            wrong[host], failed[host] = [SILENT], {SILENT}
        elif faults := [check for check in report["checks"] if not check["ok"]]:
            wrong[host] = [f"{check['name']}: {check['detail']}" for check in faults]
            failed[host] = {check["name"] for check in faults}
    measured = {
        host: (report.get("kind", ""), _figures(report))
        for host, report in reports.items()
        if report is not None
    }
    for host, words in slow_nodes(measured, slow).items():
        wrong.setdefault(host, []).extend(f"slow: {text}" for text in words)
        failed.setdefault(host, set()).add("slow")
    silent = {host: names for host, names in failed.items() if reports[host] is None}
    spoken = {host: names for host, names in failed.items() if reports[host] is not None}
    common = common_faults(spoken, len(measured)) | common_faults(silent, len(hosts))
    excused = set(common) | (_MAY_BE_SITES if len(hosts) == 1 else set())
    own = [host for host in wrong if failed[host] - excused]
    none_reported = len(silent) == len(hosts)
    return Verdict(
        wrong, common, own, own if none_reported or len(hosts) == 1 else list(wrong), none_reported
    )


def _path(folder: Path, host: str) -> Path:
    """Some batch systems name a node with its domain, which the node itself may leave out."""
    whole = folder / f"{host}.json"
    return whole if whole.exists() else folder / f"{host.partition('.')[0]}.json"


def _report(path: Path) -> dict[str, Any] | None:
    """`None`: there is none that can be read."""
    try:
        report = json.loads(path.read_text())
        for check in report["checks"]:
            _ = check["name"], check["ok"], check["detail"]
        return dict(report)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _figures(report: Mapping[str, Any]) -> dict[str, float]:
    return {
        str(name): float(value)
        for check in report["checks"]
        for name, value in check.get("figures", {}).items()
        if isinstance(value, int | float)
    }


def summary(verdict: Verdict, num_nodes: int) -> list[str]:
    """The verdict in lines: each unfit node, what most of them fail alike, and how to go on."""
    if verdict.none_reported:
        return [
            f"none of {num_nodes} node(s) reported: the launcher did not start the check there, or not",
            "in the site's environment (its own words are above); no node is to blame",
        ]
    lines = [f"unfit: {host}: {'; '.join(faults)}" for host, faults in verdict.wrong.items()]
    if num_nodes == 1 and verdict.wrong and not verdict.own:
        lines.append(
            "the job's only node, so this may be the site's or the site file's as well; no other node was asked"
        )
    for name, count in verdict.common.items():
        lines.append(
            f"most nodes fail alike ({count} of {num_nodes}: {name}): a problem of the site, the\n"
            "site file or the job, and not of these nodes; leaving them out does not help"
        )
    if verdict.own and (way_out := _WAYS_OUT.get(batch_system() or "")):
        names = ",".join(verdict.own)
        conditions = " && ".join(f"hname!={name}" for name in verdict.own)
        lines.append(f"again without them: {way_out.format(names=names, conditions=conditions)} ...")
    return [*lines, f"{num_nodes - len(verdict.wrong)} of {num_nodes} node(s) fit"]
