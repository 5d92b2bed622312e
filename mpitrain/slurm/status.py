"""What became of a run: from the files in its run directory, and from Slurm where it still knows the job.

Invariants: it only reads, and every file may be missing, or be half-written by a run that is going on.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import UsageError
from mpitrain.slurm.job_log import JobEvent, read_events
from mpitrain.slurm.requeue import MARKER, restarts
from mpitrain.system.files.run_directory import progress, read_json
from mpitrain.system.sizes import significant

_QUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "STAGE_OUT")
_STARTING = {
    "submitted": "the batch script has not begun",
    "started": "the batch script has begun",
    "preflight": "its nodes are looked at",
    "staging": "staging in",
    "requeued": "the batch script has not begun",
}


class _Known(NamedTuple):
    """What is known of one run: its directory, the batch script's last line and its newest start, result.json, the
    job, and Slurm's facts of it."""

    run_dir: Path
    last: JobEvent | None
    result: dict[str, Any]
    job: str
    slurm: dict[str, str]

    @property
    def state(self) -> str:
        """Slurm's word, without what follows it; "" for a job that Slurm does not know."""
        return self.slurm.get("JobState", "").partition("+")[0]

    @property
    def num_restarts(self) -> int:
        """However the job was started again: by its script, which may have been allowed to and then was cancelled, by
        Slurm itself, or by hand."""
        events = read_events(self.run_dir)
        again = sum(event.name == "started" for event in events) - 1
        counts = [again if events else len(restarts(self.run_dir)), self.last.restarts if self.last else 0]
        text = self.slurm.get("Restarts", "")
        return max(*counts, int(text) if re.fullmatch(r"\d{1,9}", text) else 0)


def describe(run_dir: Path) -> str:
    """The state in a line, then what is known; of a sweep's directory a line for every run.

    Raises:
        UsageError: there is no such directory, and no job that would make it.
    """
    if not run_dir.is_dir():
        return _describe_absent(run_dir)
    if runs := _runs_of_sweep(run_dir):
        return _describe_sweep(run_dir, runs)
    known = _look(run_dir)
    if "ArrayTaskId" in known.slurm and not known.result and known.last and known.last.name == "submitted":
        return _describe_sweep(run_dir, [])
    lines = [f"{run_dir}: {_state(known)}"]
    if known.job:
        lines.append(f"job         {known.job}: {_by_slurm(known.slurm)}")
    if (samples := progress(run_dir).samples) >= 0:
        lines.append(f"checkpoint  at {samples} samples")
    again = restarts(run_dir)
    if count := known.num_restarts:
        why = again[-1]["reason"] if again else "by Slurm itself, or by hand"
        lines.append(f"restarts    {count}; the last: {why}")
    failing = _lines(run_dir / "failing_nodes.txt")
    if failing:
        lines.append(f"unfit       {' '.join(failing)}")
    for key in ("failure", "model"):
        if known.result.get(key):
            lines.append(f"{key:<12}{known.result[key]}")
    return "\n".join(lines)


def _look(run_dir: Path, slurm: dict[str, str] | None = None) -> _Known:
    """With Slurm's facts, if they are not known yet."""
    events = read_events(run_dir)
    begun = [event for event in events if event.name != "submitted"]
    last = (begun or events)[-1] if events else None
    job = last.job if last else _job_of(read_json(run_dir / "env.json") or {})
    if slurm is None:
        slurm = ask_slurm(job) if job else {}
    return _Known(run_dir, last, read_json(run_dir / "result.json") or {}, job, slurm)


def _describe_absent(run_dir: Path) -> str:
    """A job that waits has no directory yet, but its number is in the name that it will have."""
    found = re.fullmatch(r".+-(\d{1,20})", run_dir.name)
    slurm = ask_slurm(found[1]) if found else {}
    if not found or slurm.get("JobName") != run_dir.name.rpartition("-")[0]:
        raise UsageError(f"no run directory {run_dir}")
    known = _Known(run_dir, None, {}, found[1], slurm)
    return f"{run_dir}: {_state(known)}\njob         {found[1]}: {_by_slurm(slurm)}"


def _by_slurm(slurm: dict[str, str]) -> str:
    if not slurm:
        return "Slurm does not know it any more"
    return ", ".join(word for word in (slurm.get("JobState"), slurm.get("Reason")) if word and word != "None")


def _state(known: _Known) -> str:
    marked = (known.run_dir / MARKER).exists()
    last = known.last.name if known.last else ""
    if known.state in _QUEUED:
        return _queued(known, marked)
    if known.state in (
        "RUNNING",
        "CONFIGURING",
        "SUSPENDED",
        "COMPLETING",
        "STOPPED",
        "SIGNALING",
        "RESIZING",
    ):
        return _alive(known, last, marked)
    if marked:
        return "checkpointed, start it again with --resume auto"
    if known.result and last in ("", "ranks", "ended"):
        return _ended(known.result)
    if known.last and last == "ended":
        return _ended_before_ranks(known.run_dir, known.last.words)
    if known.state:
        code = known.slurm.get("ExitCode", "").partition(":")[0]
        where = f" while {_STARTING[last]}" if last in ("preflight", "staging") else ""
        return f"no result: Slurm says {known.state}, exit code {code or '?'}{where}; see the job's log"
    return "no result: the run has not come to its end"


def _queued(known: _Known, marked: bool) -> str:
    if marked:
        return "checkpointed, it will go on"
    if known.num_restarts or (known.last and known.last.name == "requeued"):
        why = known.last.words if known.last and known.last.name == "requeued" else ""
        return f"requeued{' ' * bool(why)}{why}, waiting in the queue"
    return "waiting in the queue"


def _alive(known: _Known, last: str, marked: bool) -> str:
    if known.state in ("SUSPENDED", "STOPPED"):
        return f"{known.state.lower()} by Slurm: it goes on when it is resumed (scontrol resume {known.job})"
    if known.state == "COMPLETING":
        return "requeued, it will start again" if last == "requeued" or marked else "ending"
    host = known.slurm.get("BatchHost", "")
    if known.state == "RUNNING" and host and "DOWN" in ask_slurm(host, "node").get("State", ""):
        return (
            f"dead: its first node {host} is down, and the batch script was on it; other nodes of a tolerant job have "
            f"it requeued, else do: scontrol requeue {known.job}"
        )
    count = int(known.slurm.get("Restarts", "0") or 0) if known.slurm.get("Restarts", "0").isdecimal() else 0
    if last in _STARTING and (last != "requeued" or count):
        words = f" {known.last.words}" if known.last and last == "staging" else ""
        return f"starting: {_STARTING[last]}{words}"
    return "running"


def _ended(result: dict[str, Any]) -> str:
    metrics = result.get("metrics")
    figures = "".join(
        f" {name}={significant(value)}"
        for name, value in (metrics if isinstance(metrics, dict) else {}).items()
        if isinstance(value, int | float)
    )
    return f"ended with status={result.get('status')}, exit code {result.get('exit_code')}{figures}"


def _ended_before_ranks(run_dir: Path, code: str) -> str:
    failing = _lines(run_dir / "failing_nodes.txt")
    if code == "4" and not failing:
        return (
            "preflight failed, exit code 4, and no node is to blame; no ranks were started; see the job's log"
        )
    if code == "4":
        return f"preflight failed, exit code 4: {len(failing)} unfit node(s); no ranks were started"
    if code == "75":
        return "asked to end before its ranks had begun, exit code 75; submit it again"
    return f"no result: the batch script ended with exit code {code}; see the job's log"


def _runs_of_sweep(run_dir: Path) -> list[Path]:
    """The runs of an array job, by index; none where this is a run itself."""
    if (run_dir / "metrics.jsonl").exists() or (run_dir / "result.json").exists():
        return []
    found = [path for path in run_dir.iterdir() if re.fullmatch(r"\d{1,9}", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name))


def _describe_sweep(run_dir: Path, runs: list[Path]) -> str:
    events = read_events(run_dir)
    job = events[-1].job if events else (re.findall(r"-(\d{1,20})$", run_dir.resolve().name) or [""])[0]
    states = _ask_array(job) if job else {}
    told = {}
    for path in runs:
        index = int(path.name)
        told[index] = _state(_look(path, states.get(index, {})))
    told |= {
        index: _state(_look(run_dir / str(index), facts))
        for index, facts in states.items()
        if index not in told
    }
    kinds = Counter(_kind_of(text) for text in told.values())
    head = (
        f"{run_dir}: {len(told)} runs: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}"
    )
    lines = [f"{index:>5}  {told[index]}" for index in sorted(told)]
    return "\n".join([head, *([f"job         {job}"] if job else []), *lines])


def _kind_of(state: str) -> str:
    if found := re.match(r"ended with status=(\w+)", state):
        return found[1]
    return re.split("[,:]", state)[0]


def _ask_array(job: str) -> dict[int, dict[str, str]]:
    """What of an array job is still in the queue: index to the facts that `ask_slurm` gives, as far as known."""
    if shutil.which("squeue") is None:
        return {}
    command = ["squeue", "--array", "--noheader", f"--jobs={job}", "--states=all", "--format=%K %T %r"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return {}
    found = re.findall(r"^(\d{1,9}) (\w+) (.*)$", run.stdout, re.MULTILINE)
    return {int(index): {"JobState": state, "Reason": reason} for index, state, reason in found}


def ask_slurm(name: str, what: str = "job") -> dict[str, str]:
    """`scontrol show job` (or `node`) as a dictionary; empty where Slurm is absent or has forgotten it."""
    if shutil.which("scontrol") is None:
        return {}
    try:
        run = subprocess.run(
            ["scontrol", "--oneliner", "show", what, name], capture_output=True, text=True, timeout=30
        )
    except subprocess.TimeoutExpired:
        return {}
    first = run.stdout.partition("\n")[0]
    return dict(re.findall(r"(\w+)=(\S*)", first)) if run.returncode == 0 else {}


def _job_of(environment: dict[str, Any]) -> str:
    """The job's number, which scontrol is asked about; "" for what is none."""
    variables = environment.get("slurm")
    job = variables.get("SLURM_JOB_ID") if isinstance(variables, dict) else None
    return job if isinstance(job, str) and re.fullmatch("[0-9]{1,20}", job) else ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return []
