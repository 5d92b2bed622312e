"""Part `counting` of `chaos.py`: ranks are killed from outside at any moment, and every sample is counted.

Every launch trains `counting_job.py` by one of the strategies, with one to three servers where it has servers, with and
without ULFM, under `mpitrain launch`, which may start it again. One to three ranks, servers included, get SIGKILL at
drawn instants, half of them within an undisturbed launch's length, start-up included, and half after the first step. A
launch that ends with an error, as those do that lose a rank before there is a checkpoint, is launched again by hand
with `--resume auto`. What must come out of it is known: weights that count every sample once an epoch, or, where a
model is split or peers mix parameters, the bits of an undisturbed run.

`--levels` takes the strategies with servers alone, and in turn the ways to start them that are named: `ulfm`, `none`
(a death ends the launch's job, which is started again), `heartbeat` (MPICH under srun, on the tests' own Slurm) and
`threads` (the one process is killed, and started again by hand).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from measuring.common import table, write_row
from measuring.launching import finish, launch, search_path
from measuring.measurement import ROOT
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
JOB = HERE / "counting_job.py"
NUM_SAMPLES, EPOCHS = 240, 3  # counting_job.py's
MOST_KILLS = 3
MARK = "COUNTING_FOLDER"
ANY_LEVEL = ("ulfm", "none")  # of all strategies
LEVELS = ("ulfm", "none", "heartbeat", "threads")  # of those with servers
RANKED = (b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=", b"COUNTING_ALONE=")
HEARTBEAT_S = 10
DOCUMENTED = {0, 1, 2, 3, 4, 75, 130, 143}


class Setting(NamedTuple):
    """One way to train: `workers` ranks beside the servers; `check`: what must come out ("rows": every sample in as
    many updates as there were epochs; "at most": in no more, since the rule drops some; "means": rows are means over
    workers; "account": the result's own counts; "bits": an undisturbed run's)."""

    strategy: str
    workers: int
    check: str = "rows"
    kind: str = "rows"

    def launched(self, num_servers: int) -> tuple[str, int]:
        """The strategy's text and the number of ranks."""
        if "{servers}" not in self.strategy:
            return self.strategy, self.workers
        return self.strategy.format(servers=f"servers={num_servers}"), self.workers + num_servers


SETTINGS = (
    Setting("async({servers})", 3),
    Setting("async(inflight=2,{servers})", 3),
    Setting("sync({servers})", 3),
    Setting("backup(spare=1,{servers})", 3, "at most"),
    Setting("softsync(updates=2,{servers})", 3),
    Setting("softsync(updates=3,blocking=True,{servers})", 3),
    Setting("ssp(bound=1,{servers})", 3),
    Setting("bounded(staleness=1,{servers})", 3),
    Setting("elastic(push_every=2,{servers})", 3, "account"),
    Setting("allreduce()", 4),
    Setting("localsgd(period=3)", 4, "means"),
    Setting("decentralized()", 3, "bits", "layers"),
    Setting("sharded()", 2),
    Setting("pipeline(stages=2)", 2, "bits", "layers"),
    Setting("tensor(parallel=2)", 2, "bits", "layers"),
)


class Kill(NamedTuple):
    """A kill, this long after the launch, or after the first step and the kill before."""

    after: Literal["launch", "training"]
    seconds: float


def ranks_of(folder: Path) -> list[int]:
    """Processes of the job's ranks that are alive, from the moment on that they are Python."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            environment = (path / "environ").read_bytes()
            stat = (path / "stat").read_text().rsplit(")", 1)[1].split()
            ours = f"{MARK}={folder}".encode() in environment and any(mark in environment for mark in RANKED)
            if ours and stat[0] != "Z" and b"python" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def start(folder: Path, setting: Setting, num_servers: int, level: str, resume: bool) -> Any:
    """Launch the job in a session of its own."""
    strategy, ranks = setting.launched(num_servers)
    env = {MARK: str(folder), "COUNTING_KIND": setting.kind, "OMP_NUM_THREADS": "1"}
    words = ["--strategy", strategy, "--watchdog-s", "60", *(["--resume", "auto"] if resume else [])]
    if level in ("threads", "heartbeat"):
        return start_otherwise(folder, ranks, setting.workers, level, words, env)
    return launch(folder, ranks, JOB, words, "", env, level)


def start_otherwise(
    folder: Path, ranks: int, workers: int, level: str, words: list[str], env: dict[str, str]
) -> Any:
    """In one process, or under srun with MPICH."""
    train = ["train", str(JOB), "--quiet", "--run-dir", str(folder), *words]
    if level == "threads":
        command = [sys.executable, "-m", "mpitrain", *train, "--threads", str(workers)]
        env |= {"COUNTING_ALONE": "1"}
    else:
        python = Path(os.environ["MPITRAIN_MPICH_VENV"]) / "bin" / "python"
        command = [
            "salloc",
            "--quiet",
            "--nodes=1",
            f"--ntasks={ranks}",
            str(python),
            "-m",
            "mpitrain",
            "launch",
        ]
        command += ["--ft", level, "-n", str(ranks), *train, "--heartbeat-s", str(HEARTBEAT_S)]
        env |= {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "out", "w") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": search_path(HERE), **env},
            start_new_session=True,
        )  # fmt: skip


@contextlib.contextmanager
def slurm() -> Iterator[None]:
    """The tests' own Slurm, of one node, for as long as it is needed."""
    sys.path.insert(0, str(ROOT))
    from tests.slurm.cluster import Cluster, why_not

    if reason := why_not():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(prefix="mini-slurm-") as scratch:
        cluster = Cluster(Path(scratch, "cluster"), num_nodes=1)
        cluster.root.mkdir()
        cluster.up()
        os.environ |= cluster.env
        try:
            yield
        finally:
            cluster.down()


def has_begun(folder: Path) -> bool:
    """Whether the run has taken a step."""
    with contextlib.suppress(OSError):
        return '"event": "progress"' in (folder / "metrics.jsonl").read_text()
    return False


def one_launch(
    folder: Path, setting: Setting, num_servers: int, level: str, kills: list[Kill], draw: random.Random,
    resume: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Kill a random rank at each of these times; what came of it."""
    began_s = time.monotonic()
    process = start(folder, setting, num_servers, level, resume)
    killed: list[str] = []
    for kill in sorted(kills):
        while kill.after == "training" and not has_begun(folder) and process.poll() is None:
            time.sleep(0.02)
        since_s = began_s if kill.after == "launch" else time.monotonic()
        while time.monotonic() - since_s < kill.seconds and process.poll() is None:
            time.sleep(0.002)
        if process.poll() is None and (ranks := ranks_of(folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(ranks), signal.SIGKILL)
                killed.append("training" if has_begun(folder) else "starting")
    ended = finish(process)
    seconds = time.monotonic() - began_s
    for pid in ranks_of(folder):
        os.kill(pid, signal.SIGKILL)
    told = folder / "result.json"
    return {
        "ended": ended,
        "code": process.returncode,
        "result": json.loads(told.read_text()) if told.exists() else {},
        "restarts": (folder / "out").read_text().count("; restart "),
        "kills": killed,
        "seconds": seconds,
    }


def wrong_rows(setting: Setting, row: dict[str, Any], undisturbed: dict[str, torch.Tensor]) -> list[str]:
    """What is wrong with a launch that ended well by its own account; empty if nothing is."""
    model = load_file(row["result"]["model"])
    if setting.check == "bits":
        same = all(torch.equal(tensor, undisturbed[name]) for name, tensor in model.items())
        return [] if same else ["not the bits of an undisturbed run"]
    if setting.check == "account":
        return account(row["result"])
    counts = model["rows"].sum(1)
    if setting.check == "means":
        possible = {
            round(sum(1 / one for one in taken), 4)
            for taken in itertools.combinations_with_replacement(range(1, setting.workers + 1), EPOCHS)
        }
        bad = [float(count) for count in counts if round(float(count), 4) not in possible]
    else:
        most = setting.check == "at most"
        bad = [float(count) for count in counts if count > EPOCHS or (count != EPOCHS and not most)]
    told = [f"{number} rows of {count:g}" for count, number in sorted(Counter(bad).items())]
    return told + account(row["result"], dropped=setting.check == "at most")


def account(result: dict[str, Any], dropped: bool = False) -> list[str]:
    """Whether every shard has judged every sample once an epoch."""
    wrong, whole = [], NUM_SAMPLES * EPOCHS
    servers = [detail for detail in result["ranks"] if detail.get("role") == "server"]
    for shard, counts in enumerate(servers):
        judged = counts["samples_accepted"] + counts["samples_dropped"]
        if judged != whole or (not dropped and counts["samples_dropped"]):
            told = f"accepted {counts['samples_accepted']}, dropped {counts['samples_dropped']}"
            wrong.append(f"shard {shard}: {told} of {whole}")
    return wrong


def run_counting(num_launches: int, seed: int, levels: Sequence[str] = ()) -> None:
    """The campaign: settings in turn, levels in turn, servers and kills drawn; one row of results, of the launches so
    far where it is interrupted. `levels`: of the settings with servers, of which there are two or three then."""
    rows: list[dict[str, Any]] = []
    try:
        with slurm() if "heartbeat" in levels else contextlib.nullcontext():
            _launch_all(num_launches, seed, rows, levels)
    except KeyboardInterrupt:
        print(f"interrupted after {len(rows)} of {num_launches} launches")
    _sum_up(rows, "counting by level" if levels else "counting", seed)


def drawn(number: int, levels: Sequence[str]) -> tuple[Setting, str]:
    """What launch number `number` trains by, and how it is started."""
    if not levels:
        return SETTINGS[number % len(SETTINGS)], ANY_LEVEL[number // len(SETTINGS) % 2]
    served = [one for one in SETTINGS if "{servers}" in one.strategy]
    return served[number // len(levels) % len(served)], levels[number % len(levels)]


def _launch_all(num_launches: int, seed: int, rows: list[dict[str, Any]], levels: Sequence[str]) -> None:
    undisturbed: dict[str, tuple[float, dict[str, torch.Tensor]]] = {}
    for number in range(num_launches):
        draw = random.Random(f"{seed}/{number}")
        setting, level = drawn(number, levels)
        with tempfile.TemporaryDirectory() as scratch:
            known = (
                setting.strategy if setting.check == "bits" else ""
            )  # of the others it is the seconds that count
            if known not in undisturbed:
                calm = one_launch(Path(scratch) / "calm", setting, 1, "none", [], draw)
                assert calm["code"] == 0 and not wrong_rows(setting, calm, load_file(calm["result"]["model"]))
                undisturbed[known] = calm["seconds"], load_file(calm["result"]["model"])
            seconds, model = undisturbed[known]
            if (
                level == "threads"
            ):  # one process starts as fast as the slowest of many does where it has a core
                seconds /= 3
            num_servers = draw.randint(2 if levels else 1, 3)
            kills = [
                Kill("launch", draw.uniform(0, seconds))
                if draw.random() < 0.5
                else Kill("training", draw.uniform(0, 4))
                for _ in range(draw.randint(1, MOST_KILLS))
            ]
            row = one_launch(Path(scratch) / "run", setting, num_servers, level, kills, draw)
            output = "" if row["code"] == 0 else (Path(scratch) / "run" / "out").read_text()[-2000:]
            last, by_hand = row, 0
            while last["ended"] and last["code"] != 0 and by_hand < MOST_KILLS:
                by_hand += 1
                last = one_launch(Path(scratch) / "run", setting, num_servers, level, [], draw, resume=True)
            if last["code"] != 0:
                output += (Path(scratch) / "run" / "out").read_text()[-2000:]
            row["wrong"] = wrong_rows(setting, last, model) if last["code"] == 0 else ["did not end well"]
        told = {"strategy": setting.launched(num_servers)[0], "level": level, "drawn": kills}
        row |= told | {"by_hand": by_hand, "ended": row["ended"] and last["ended"], "output": output}
        rows.append({key: value for key, value in row.items() if key != "result"})
        print(json.dumps(rows[-1]), flush=True)


def is_documented(row: dict[str, Any]) -> bool:
    """Whether a launch has ended with a code that users are told of: where a rank was killed, a shell's for that, too;
    a process that was killed itself has none of its own."""
    killed = -signal.SIGKILL if row["level"] == "threads" else 128 + signal.SIGKILL
    return row["code"] in DOCUMENTED or (bool(row["kills"]) and row["code"] == killed)


def _sum_up(rows: list[dict[str, Any]], part: str, seed: int) -> None:
    found = {
        "launches": len(rows),
        "kills": sum(len(row["kills"]) for row in rows),
        "of them starting": sum(row["kills"].count("starting") for row in rows),
        "relaunched": sum(row["restarts"] > 0 for row in rows),
        "by hand": sum(row["by_hand"] > 0 for row in rows),
        "hanging": sum(not row["ended"] for row in rows),
        "wrong": sum(bool(row["wrong"]) for row in rows),
        "undocumented codes": sum(not is_documented(row) for row in rows),
    }
    write_row(
        "chaos",
        {
            "part": part,
            "drawn by": f"seed {seed}",
            **found,
            "rows": [{key: value for key, value in row.items() if key != "output"} for row in rows],
        },
    )
    print(table([tuple(found), tuple(map(str, found.values()))]))
