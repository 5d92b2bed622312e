"""Parts `writing`, `server` and `signal` of `chaos.py`: a job that ends with a rank is started again from a checkpoint.

Every job runs `relaunch_job.py` under `mpitrain launch`: one rank is killed at a drawn instant after the writing of a
part of a checkpoint has begun, so the launch ends and the launcher resumes it. What must come out of it is known: in
lockstep the bits of a run that nobody disturbed, elsewhere weights that count every sample once an epoch.
"""

from __future__ import annotations

import json
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring.common import table, write_row
from measuring.launching import finish, launch, notes
from safetensors.torch import load_file

JOB = Path(__file__).resolve().parent / "relaunch_job.py"
NUM_SAMPLES, EPOCHS, BATCH_SIZE, RATE = 512, 4, 8, 2.0**-10  # relaunch_job.py's
LONG_EPOCHS = 40  # so that there is a middle to be asked to end in
RANKS = {"allreduce()": 2, "async(servers=1)": 3}
WRITERS = {"allreduce()": {"shard-0": 0}, "async(servers=1)": {"shard-0": 0, "worker-0": 1}}
LONGEST_WRITE_S = 0.06  # of the job's 4 MB, about


def draw_orders(strategy: str, draw: random.Random) -> dict[str, str]:
    """Whom to kill at which write, and when; the writer itself half of the time: its part stays half-written."""
    part = draw.choice(sorted(WRITERS[strategy]))
    writer = WRITERS[strategy][part]
    victim = writer if draw.random() < 0.5 else draw.randrange(RANKS[strategy])
    after_s = draw.uniform(0, LONGEST_WRITE_S)
    return {
        "CHAOS_PART": part, "CHAOS_VICTIM": str(victim), "CHAOS_WRITE": str(draw.randrange(1, 6)),
        "CHAOS_AFTER_S": f"{after_s:.4f}",
    }  # fmt: skip


def train(folder: Path, strategy: str, orders: dict[str, str], level: str = "none") -> dict[str, Any]:
    """Run the job to its end; `gone_s` is how long after the kill the last rank of the killed launch was there."""
    env = {"CHAOS_DIR": str(folder), "OMP_NUM_THREADS": "1", **orders}
    if strategy == "allreduce()":
        env["CHAOS_MOMENTUM"] = "0.5"
    process = launch(folder, RANKS[strategy], JOB, ["--strategy", strategy], "", env, level)
    gone_s = _watch_them_go(folder, process) if orders else None
    ended = finish(process)
    told = folder / "result.json"
    return {
        "ended": ended and process.returncode == 0,
        "result": json.loads(told.read_text()) if told.exists() else {},
        "restarts": (folder / "out").read_text().count("; restart "),
        "killed": len(killed := notes(folder, "killed")),
        "resumed_after_s": min(
            (one["at_s"] - killed[0]["at_s"] for one in notes(folder, "resumed")), default=None
        ),
        "being_written": int((folder / "fired").read_text()) if killed else None,
        "gone_s": gone_s,
        "orphans": sum(is_alive(one["pid"]) for one in notes(folder, "started")),
    }


def _watch_them_go(folder: Path, process: Any) -> float | None:
    """Seconds from the kill to the end of the last rank that was there then."""
    while not (folder / "killed").exists():
        if process.poll() is not None:
            return None
        time.sleep(0.005)
    at_s = notes(folder, "killed")[0]["at_s"]
    pids = [one["pid"] for one in notes(folder, "started")]
    while any(is_alive(pid) for pid in pids) and process.poll() is None:
        time.sleep(0.01)
    return time.monotonic() - at_s


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def judge(
    folder: Path, strategy: str, ran: dict[str, Any], undisturbed: torch.Tensor | None
) -> dict[str, Any]:
    """What one disturbed run came to; `undisturbed`: the weights of one in lockstep that nothing happened to."""
    result = ran["result"]
    row = {
        key: ran[key]
        for key in ("ended", "restarts", "killed", "gone_s", "orphans", "resumed_after_s", "being_written")
    }
    row["resumed_from"] = result.get("resumed_from")
    row["finished"] = ran["ended"] and result.get("status") == "ok"
    events = (
        (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    )
    row["half_written"] = sum("checkpoint passed over" in line for line in events)
    row["right"] = False
    if row["finished"]:
        weight = load_file(result["model"])["weight"]
        if undisturbed is None:  # every sample has moved its own weight once an epoch
            wanted = torch.zeros_like(weight)
            wanted[:NUM_SAMPLES] = -RATE * EPOCHS
        else:
            wanted = undisturbed
        row["right"] = bool(torch.equal(weight, wanted)) and result["samples"] == NUM_SAMPLES * EPOCHS
    return row


def undisturbed_weights(folder: Path) -> torch.Tensor:
    """What `allreduce()` ends with when nobody is killed."""
    return load_file(train(folder, "allreduce()", {})["result"]["model"])["weight"]


def one_job(
    folder: Path, strategy: str, orders: dict[str, str], level: str, undisturbed: torch.Tensor | None
) -> dict[str, Any]:
    """Kill, relaunch, judge."""
    ran = train(folder, strategy, orders, level)
    return judge(folder, strategy, ran, undisturbed) | {
        "strategy": strategy,
        "level": level,
        "orders": orders,
    }


def run_writing(num_jobs: int, seed: int) -> None:
    """`num_jobs` jobs killed while they write a checkpoint, strategies in turn, without ULFM."""
    draw = random.Random(f"{seed}/writing")
    strategies = sorted(RANKS)
    with tempfile.TemporaryDirectory() as scratch:
        lockstep = undisturbed_weights(Path(scratch) / "undisturbed")
        rows = []
        for number in range(num_jobs):
            strategy = strategies[number % len(strategies)]
            wanted = lockstep if strategy == "allreduce()" else None
            orders = draw_orders(strategy, draw)
            rows.append(one_job(Path(scratch) / str(number), strategy, orders, "none", wanted))
            print("writing", rows[-1], flush=True)
    _tell("writing", "jobs killed while a checkpoint is written", rows)


def run_server(num_jobs: int, seed: int) -> None:
    """`num_jobs` jobs whose only server is killed while workers train, with and without ULFM in turn."""
    draw = random.Random(f"{seed}/server")
    strategy, rows = "async(servers=1)", []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(num_jobs):
            orders = draw_orders(strategy, draw) | {"CHAOS_VICTIM": "0"}
            rows.append(
                one_job(Path(scratch) / str(number), strategy, orders, ("ulfm", "none")[number % 2], None)
            )
            print("server", rows[-1], flush=True)
    _tell("server", "jobs whose server is killed", rows)


def one_signal(folder: Path, strategy: str) -> dict[str, Any]:
    """SIGUSR1 to the launcher in the middle of a run: how soon all has ended, and what the next launch makes of it."""
    words = ["--strategy", strategy, "--epochs", str(LONG_EPOCHS)]
    env = {"CHAOS_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    process = launch(folder, RANKS[strategy], JOB, words, "", env, "none")
    while not list(folder.glob("checkpoints/*/shard-0.json")) and process.poll() is None:
        time.sleep(0.01)
    at_s = time.monotonic()
    process.send_signal(signal.SIGUSR1)
    finish(process)
    row = {"strategy": strategy, "code": process.returncode, "ended_after_s": time.monotonic() - at_s}
    stopped = json.loads((folder / "result.json").read_text())
    again = launch(folder, RANKS[strategy], JOB, [*words, "--resume", "auto"], "", env, "none")
    row["finished"] = finish(again) and again.returncode == 0
    result = json.loads((folder / "result.json").read_text())
    weight = load_file(result["model"])["weight"]
    wanted = torch.zeros_like(weight)
    wanted[:NUM_SAMPLES] = (
        -RATE * LONG_EPOCHS / (2 if strategy == "allreduce()" else 1)
    )  # the mean of two ranks
    # a server names the mark before the update that reaches it, and takes what is under way from the others after it
    most_under_way = BATCH_SIZE * RANKS[strategy]
    going_on = stopped["samples"] - most_under_way < result["resumed_from"] <= stopped["samples"]
    whole = result["samples"] == NUM_SAMPLES * LONG_EPOCHS and going_on
    row |= {"resumed_from": result["resumed_from"], "stopped_at": stopped["samples"]}
    return row | {"right": whole and bool(torch.equal(weight, wanted))}


def run_signal(num_jobs: int) -> None:
    """`num_jobs` jobs asked to end by SIGUSR1, strategies in turn."""
    strategies, rows = sorted(RANKS), []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(num_jobs):
            rows.append(one_signal(Path(scratch) / str(number), strategies[number % len(strategies)]))
            print("signal", rows[-1], flush=True)
    counts = {
        "jobs": len(rows),
        "code_75": sum(row["code"] == 75 for row in rows),
        "finished": sum(row["finished"] for row in rows),
        "right": sum(row["right"] for row in rows),
        "longest_to_end_s": max(row["ended_after_s"] for row in rows),
    }
    print("asked to end by SIGUSR1:\n" + table([tuple(counts), tuple(map(str, counts.values()))]), flush=True)
    write_row("chaos", {"part": "signal", **counts, "rows": rows})


def _tell(part: str, what: str, rows: list[dict[str, Any]]) -> None:
    counts = {
        "jobs": len(rows),
        "killed": sum(row["killed"] for row in rows),
        "relaunched_from_a_complete_checkpoint": sum(
            row["restarts"] == 1 and bool(row["resumed_from"]) for row in rows
        ),
        "half_written_left": sum(row["half_written"] > 0 for row in rows),
        "finished": sum(row["finished"] for row in rows),
        "right": sum(row["right"] for row in rows),
        "orphans": sum(row["orphans"] for row in rows),
        "longest_to_resume_s": max(
            (row["resumed_after_s"] for row in rows if row["resumed_after_s"]), default=None
        ),
        "longest_gone_s": max((row["gone_s"] for row in rows if row["gone_s"] is not None), default=None),
    }
    print(f"{what}:\n" + table([tuple(counts), tuple(str(value) for value in counts.values())]), flush=True)
    write_row("chaos", {"part": part, **counts, "rows": rows})
