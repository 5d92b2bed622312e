"""Batch scripts for PBS Pro, LSF and Flux, from the same `Script` and the same parts as those for Slurm.

Invariants: a pure function of the `Script`; the defaults give the templates in `slurm/other/`, to the byte. What a
system cannot do is refused by name, and no field of a `Script` is left out in silence.
"""

from __future__ import annotations

import shlex
from typing import NamedTuple

from mpitrain.errors import UsageError
from mpitrain.slurm import other_parts, script, script_parts
from mpitrain.slurm.limits import seconds_of
from mpitrain.slurm.script import KINDS, Script

OTHER_KINDS = ("single-node", "multi-node", "benchmark")
# Fields that only `sbatch` has a word for.
_OF_SLURM = ("qos", "constraint", "switches", "array", "sweep", "sbatch")


class _System(NamedTuple):
    """`usage`: the line that hands a template in, before its path; `launchers`: what fits the site file."""

    called: str
    usage: str
    launchers: str


_SYSTEMS = {
    "pbs": _System("PBS", "TRAIN={words} qsub -v TRAIN {path}", "mpirun (or mpiexec, pals)"),
    "lsf": _System("LSF", "TRAIN={words} bsub < {path}", "mpirun (or mpiexec)"),
    "flux": _System("Flux", "flux batch {path} {words}", "flux"),
}
_EXPORT = next(line for line in script_parts.START.splitlines(keepends=True) if "SLURM_EXPORT_ENV" in line)
# A timer of the script's own, or LSF, sends the signal when it should come.
_SENT_IN_TIME = (
    ("    if put_off; then return 0; fi\n", ""),
    ("    trap on_signal USR1\n    trap 'now=1; on_signal' TERM\n", "    trap on_signal USR1 TERM\n"),
    (
        "    if ((signals)); then\n        if put_off; then signals=0; else nothing_runs; fi\n    fi\n",
        "    if ((signals)); then nothing_runs; fi\n",
    ),
)
# Neither PBS nor LSF hands arguments to a batch script.
_WORDS_FROM_VARIABLE = """\
: "${{TRAIN:?usage: {usage}}}"
mapfile -t words < <(xargs printf '%s\\n' <<<"$TRAIN") # quoted as in a shell
set -- "${{words[@]}}"
"""


def render(of: Script) -> str:
    """The batch script's whole text, for any system.

    Raises:
        UsageError: the system has no such kind of script, or a field of it no word there.
    """
    if of.system == "slurm":
        return script.render(of)
    if of.kind not in OTHER_KINDS:
        raise UsageError(
            f"{of.kind} is for Slurm; for {of.system} there are {', '.join(OTHER_KINDS)} (several runs: "
            "mpitrain sweep)"
        )
    for name in _OF_SLURM:
        if value := getattr(of, name):
            raise UsageError(f"{name}={value!r}: there is no such option for {of.system}")
    known = {
        "@name@": of.name,
        "@time@": _clock(of.time),
        "@signal_s@": str(of.lead_s),
        "@system@": _SYSTEMS[of.system].called,
        "@launchers@": _SYSTEMS[of.system].launchers,
        # LSF starts a job again that ends with 75: one that may not run again ends otherwise
        "@finished@": '"$(($1 == 75 ? 1 : $1))"' if of.system == "lsf" else '"$1"',
        "@refused@": "1" if of.system == "lsf" else "75",
    }
    text = "\n".join(part.rstrip("\n") + "\n" for part in _parts(of))
    for name, value in known.items():
        text = text.replace(name, value)
    return text


def _parts(of: Script) -> list[str]:
    is_training, signals = of.kind != "benchmark", script_parts.SIGNALS
    for before, after in _SENT_IN_TIME:
        signals = signals.replace(before, after)
    parts = [_header(of), _directives(of), _neutral(script_parts.START, of), other_parts.LAUNCHER]
    parts += [_arguments(of), _neutral(script_parts.RUN_DIR, of)]
    parts += [
        other_parts.HOSTS[of.system]
        + f"WORKERS=${{WORKERS_PER_NODE:-{of.gpus_per_node or 1}}} # one a GPU\n",
        # LSF signals each process of the job: one that the others ignore
        signals.replace("USR1 TERM\n", "USR1 TERM URG\n") if of.system == "lsf" else signals,
    ]
    if is_training and of.system in other_parts.LEFT:
        parts += [other_parts.LEFT[of.system] + other_parts.TIMER]
    parts += [
        other_parts.EACH,
        _neutral(script_parts.CHECK_NODES, of),
        script_parts.PLACE,
        other_parts.LAUNCH,
        script_parts.ALL_FIT,
    ]
    if not is_training:
        return [*parts, _neutral(script_parts.BENCHMARK_BODY, of)]
    if of.system != "lsf":
        parts.append(other_parts.KEEP_SCRIPT)
    parts += [_neutral(script_parts.STAGE, of), other_parts.FINISH + other_parts.AGAIN[of.system]]
    return [*parts, script_parts.SIMPLE_BODY + script_parts.DEAF + script_parts.TRAIN]


def _neutral(part: str, of: Script) -> str:
    """A part of a Slurm script with the variables that all systems have here."""
    for before, after in (
        ('cd "${SLURM_SUBMIT_DIR:-.}"\n', other_parts.HERE[of.system]),
        ("signals=0 now=0", "signals=0"),
        ("USR1 # heard", "USR1 TERM # heard"),
        ("trap 'signals=$((signals + 1)) now=1' TERM\n", ""),
        ("${SLURMD_NODENAME:-this node}", "this node"),
        ("$SLURM_JOB_NAME-$SLURM_JOB_ID", "$JOB_NAME-$JOB_ID"),
        ("$SLURM_JOB_ID", "$JOB_ID"),
        ("${SLURM_RESTART_COUNT:-0}", "0"),
        ('note started "$SLURM_JOB_NODELIST"', "note started"),
        ("extra=(--no-kill --time=5)", "extra=(timeout 300)"),
        ("extra=(--time=2)", "extra=(timeout 120)"),
        ("! -e $reports/$host.json ]]", "! -e $reports/$host.json && ! -e $reports/${host%%.*}.json ]]"),
        ('rm -f "$reports/$host.json"', 'rm -f "$reports/$host.json" "$reports/${host%%.*}.json"'),
        (_EXPORT, ""),
        (" # the same after a requeue, which keeps the job id", ""),
    ):
        part = part.replace(before, after)
    return part


def _header(of: Script) -> str:
    kind, system = KINDS[of.kind], _SYSTEMS[of.system]
    lines = ["#!/bin/bash", f"# {kind.purpose}", "#"]
    if not of.job:
        words = kind.example if of.system == "flux" else f'"{kind.example}"'
        lines += [
            f"#   {system.usage.format(words=words, path=_path(of))}",
            "#",
            "# Your site's ways are in slurm/site.sh; options of the command before the script replace those below.",
        ]
    lines += [
        f"# Written by `mpitrain slurm render --set system={of.system}`, which also fills in job, nodes and limits.",
        f"# It has not run under {system.called} so far, but with stand-ins for its commands.",
    ]
    return "\n".join(lines) + "\n"


def _path(of: Script) -> str:
    return f"slurm/other/{of.kind}.{of.system}"


def _arguments(of: Script) -> str:
    kind, system = KINDS[of.kind], _SYSTEMS[of.system]
    if of.job:
        text = f"set -- {shlex.join([of.job, *of.options])}\n"
    elif of.system == "flux":
        text = f""": "${{1:?usage: flux batch {_path(of)} {kind.arguments}}}"\n"""
    else:
        text = _WORDS_FROM_VARIABLE.format(usage=system.usage.format(words="'JOB.py ...'", path=_path(of)))
    return text + ('ARGUMENTS=("$@")\n' if of.system == "flux" and of.kind != "benchmark" else "")


def _directives(of: Script) -> str:
    nodes = of.nodes or KINDS[of.kind].nodes
    seconds = seconds_of(of.time)
    warned = of.kind != "benchmark"
    if of.system == "pbs":
        gpus = f":ngpus={of.gpus_per_node}" if of.gpus_per_node else ""
        lines = [f"-N {of.name} -l walltime={_clock(of.time)}", "-j oe -r y"]
        lines += [f"-A {of.account}"] * bool(of.account) + [f"-q {of.partition}"] * bool(of.partition)
        lines += [f"-l select={nodes}{gpus} -l place=scatter:excl"]
        return _lines("#PBS", lines) + f"##PBS -l select={nodes}:ncpus=64{gpus}\n"
    if of.system == "lsf":
        minutes = -(-seconds // 60)
        lines = [f"-J {of.name} -W {minutes // 60}:{minutes % 60:02d}", "-o %J.out"]
        lines += [f"-wa URG -wt {-(-of.lead_s // 60)}", '-r -Q "75"'] if warned else []
        lines += [f"-P {of.account}"] * bool(of.account) + [f"-q {of.partition}"] * bool(of.partition)
        lines += [f'-n {nodes} -R "span[ptile=1]" -x']
        lines += [f'-gpu "num={of.gpus_per_node}"'] * bool(of.gpus_per_node)
        return _lines("#BSUB", lines) + f'##BSUB -n {64 * nodes} -R "span[ptile=64]"\n'
    lines = [f"--job-name={of.name} --time-limit={-(-seconds // 60)}m", f"--output={of.name}-{{{{id}}}}.out"]
    lines += [f"--bank={of.account}"] * bool(of.account) + [f"--queue={of.partition}"] * bool(of.partition)
    return _lines("# flux:", [*lines, f"--nodes={nodes} --exclusive"])


def _lines(sentinel: str, lines: list[str]) -> str:
    return "".join(f"{sentinel} {line}\n" for line in lines)


def _clock(time: str) -> str:
    minutes, seconds = divmod(seconds_of(time), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"
