"""Part `kills` of `chaos.py`: workers of an asynchronous run die around their pushes.

Every job runs `chaos_job.py` on six workers and a server under `mpitrain launch --ft ulfm`, and five of the six kill
themselves at random instants. The weights that must come out are known.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from chaos_campaign import campaign
from measuring.launching import finish, launch, notes
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
SIZES = {1_000_000: (240, 0.004), 20_000_000: (80, 0.06)}  # bytes: samples, seconds that a message may take
WORKERS, VICTIMS = 6, 5


def one_job(folder: Path, num_bytes: int, host_args: str, draw: random.Random) -> dict[str, Any]:
    """Kill five of six workers; what came of it."""
    samples, message_s = SIZES[num_bytes]
    victims = draw.sample(range(WORKERS), VICTIMS)
    orders = [
        f"kill(worker={one},at_step={draw.randrange(2, 9)},after_s={draw.uniform(1e-5, message_s):.6f})"
        for one in victims
    ]
    words = ["--strategy", "async()", "--watchdog-s", "30", "--checkpoint-every", str(samples // 3)]
    words += [word for order in orders for word in ("--inject", order)]
    env = {"CHAOS_BYTES": str(num_bytes), "CHAOS_DIR": str(folder), "CHAOS_SAMPLES": str(samples)}
    began_s = time.monotonic()
    ended = finish(launch(folder, 1 + WORKERS, HERE / "chaos_job.py", words, host_args, env))
    told = folder / "result.json"
    row: dict[str, Any] = {
        "kills": len(notes(folder, "killed")),
        "ended": ended and told.exists(),
        "wrong": 0,
    }
    row["restarts"] = (folder / "out").read_text().count("; restart ")
    row["seconds"] = time.monotonic() - began_s
    if row["ended"]:
        result = json.loads(told.read_text())
        weight = load_file(result["model"])["weight"].double()
        pattern = torch.arange(weight.numel()).remainder(7).add(1).double() / 8
        wanted = -(2.0**-10) * result["steps"] * pattern
        left, right = result["staleness_identity"]
        whole = result["samples"] == samples == result["accepted"] and left == right
        row["wrong"] = int((weight != wanted).any()) + (not whole)
        row["lost"] = result["lost"]
    killed = {one["rank"]: one["at_s"] for one in notes(folder, "killed")}
    lost = {one["lost"]: one for one in notes(folder, "lost")}
    if not row["restarts"]:
        row["detected_s"] = [lost[rank]["at_s"] - at_s for rank, at_s in killed.items() if rank in lost]
    pauses = [one["seconds"] for one in notes(folder, "pause") if one["rank"] not in killed]
    row["pause_s"] = max(pauses, default=0.0)
    return row


def run_kills(num_kills: int, seed: int) -> None:
    """Rows for every size and transport."""
    campaign("kills", SIZES, one_job, num_kills, seed)
