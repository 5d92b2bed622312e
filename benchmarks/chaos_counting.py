"""Part `counting` of `chaos.py`: ranks are killed from outside at any moment, and every sample is counted.

Every launch trains `counting_job.py` by one of the strategies, with one to three servers where it has servers, with and
without ULFM, under `mpitrain launch`, which may start it again. One to three ranks, servers included, get SIGKILL at
drawn instants, half of them within an undisturbed launch's length, start-up included, and half after the first step. A
launch that ends with an error, as those do that lose a rank before there is a checkpoint, is launched again by hand
with `--resume auto`. What must come out of it is known: weights that count every sample once an epoch, or, where a
model is split or peers mix parameters, the bits of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from chaos_launch import HERE, finish, launch
from common import table, write_row
from safetensors.torch import load_file

JOB = HERE / "counting_job.py"
NUM_SAMPLES, EPOCHS = 240, 3  # counting_job.py's
MOST_KILLS = 3
MARK = "COUNTING_FOLDER"


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
            ours = f"{MARK}={folder}".encode() in environment and b"OMPI_COMM_WORLD_RANK=" in environment
            if ours and stat[0] != "Z" and b"python" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def start(folder: Path, setting: Setting, num_servers: int, level: str, resume: bool) -> Any:
    """Launch the job in a session of its own."""
    strategy, ranks = setting.launched(num_servers)
    env = {MARK: str(folder), "COUNTING_KIND": setting.kind, "OMP_NUM_THREADS": "1"}
    words = ["--strategy", strategy, "--watchdog-s", "60", *(["--resume", "auto"] if resume else [])]
    return launch(folder, ranks, JOB, words, "", env, level)


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


def run_counting(num_launches: int, seed: int) -> None:
    """The campaign: settings in turn, levels in turn, servers and kills drawn; one row of results, of the launches so
    far where it is interrupted."""
    rows: list[dict[str, Any]] = []
    try:
        _launch_all(num_launches, seed, rows)
    except KeyboardInterrupt:
        print(f"interrupted after {len(rows)} of {num_launches} launches")
    _sum_up(rows)


def _launch_all(num_launches: int, seed: int, rows: list[dict[str, Any]]) -> None:
    undisturbed: dict[str, tuple[float, dict[str, torch.Tensor]]] = {}
    for number in range(num_launches):
        draw = random.Random(f"{seed}/{number}")
        setting, level = SETTINGS[number % len(SETTINGS)], ("ulfm", "none")[number // len(SETTINGS) % 2]
        with tempfile.TemporaryDirectory() as scratch:
            if setting.strategy not in undisturbed:
                calm = one_launch(Path(scratch) / "calm", setting, 1, "none", [], draw)
                assert calm["code"] == 0 and not wrong_rows(setting, calm, load_file(calm["result"]["model"]))
                undisturbed[setting.strategy] = calm["seconds"], load_file(calm["result"]["model"])
            seconds, model = undisturbed[setting.strategy]
            num_servers = draw.randint(1, 3)
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


def _sum_up(rows: list[dict[str, Any]]) -> None:
    found = {
        "launches": len(rows),
        "kills": sum(len(row["kills"]) for row in rows),
        "of them starting": sum(row["kills"].count("starting") for row in rows),
        "relaunched": sum(row["restarts"] > 0 for row in rows),
        "by hand": sum(row["by_hand"] > 0 for row in rows),
        "hanging": sum(not row["ended"] for row in rows),
        "wrong": sum(bool(row["wrong"]) for row in rows),
    }
    write_row(
        "chaos",
        {
            "part": "counting",
            **found,
            "rows": [{key: value for key, value in row.items() if key != "output"} for row in rows],
        },
    )
    print(table([tuple(found), tuple(map(str, found.values()))]))
