"""Part `allreduce` of `chaos.py`: ranks of a synchronous run die in the middle of its collectives, and the rest goes
on.

Every job runs `counted_job.py` on five ranks under `mpitrain launch --ft ulfm`, of which three, often rank 0 among
them, kill themselves at random instants of their first steps. What must come out of it is known: survivors with the
same bits, and weights that count every sample of both epochs once, in the round it was in.
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

JOB = Path(__file__).resolve().parent / "counted_job.py"
RANKS, VICTIMS, NUM_SAMPLES, EPOCHS = 5, 3, 160, 2
STEP_S = {1_000_000: 0.02, 20_000_000: 0.2}  # of a step, about: when a kill ordered in it is carried out


def draw_orders(num_bytes: int, draw: random.Random) -> list[str]:
    """Whom to kill after which step, and how long after."""
    return [
        f"kill(worker={one},at_step={draw.randrange(1, 8)},after_s={draw.uniform(1e-5, STEP_S[num_bytes]):.6f})"
        for one in draw.sample(range(RANKS), VICTIMS)
    ]


def account(folder: Path) -> list[str]:
    """What is wrong with a run that has ended, by its notes in `folder` and its result; empty if nothing is."""
    result = json.loads((folder / "result.json").read_text())
    killed = {one["rank"] for one in notes(folder, "killed")}
    alive = set(range(RANKS)) - killed
    steps: dict[int, dict[int, dict[str, Any]]] = {}  # what each rank computed on last in each step
    for one in notes(folder, "step"):
        steps.setdefault(one["step"], {})[one["rank"]] = one
    expected, taken = torch.zeros(NUM_SAMPLES, dtype=torch.float64), []
    for step in range(result["steps"]):
        # a dead one's share is in the weights unless those that were left have done the step again without it
        world = steps[step][min(alive)]["world"]
        ids = [number for one in steps[step].values() if one["world"] == world for number in one["ids"]]
        taken += ids
        expected[ids] += 1.0 / len(ids)
    wrong = []
    if {int(rank) for rank in result["lost"]} != killed:
        wrong.append(f"killed {killed}, lost {result['lost']}")
    ends = {one["rank"]: one["bits"] for one in notes(folder, "end")}
    if len({ends.get(rank) for rank in alive}) != 1:
        wrong.append(f"survivors ended with different bits: {ends}")
    if sorted(taken) != sorted([*range(NUM_SAMPLES)] * EPOCHS):
        wrong.append("a sample was lost or taken twice")
    for name, weights in load_file(result["model"]).items():
        head, rest = weights[:NUM_SAMPLES].double(), weights[NUM_SAMPLES:]
        if not torch.allclose(head, expected, rtol=1e-6, atol=0) or bool(rest.any()):
            wrong.append(f"{name} is not the sum of the gradients")
    return wrong


def one_job(folder: Path, num_bytes: int, host_args: str, orders: list[str]) -> dict[str, Any]:
    """Kill ranks as ordered; what came of it."""
    words = ["--strategy", "allreduce()", "--watchdog-s", "30", "--checkpoint-every", str(NUM_SAMPLES // 2)]
    words += [word for order in orders for word in ("--inject", order)]
    env = {"CHAOS_BYTES": str(num_bytes), "CHAOS_DIR": str(folder), "CHAOS_SAMPLES": str(NUM_SAMPLES)}
    began_s = time.monotonic()
    ended = finish(launch(folder, RANKS, JOB, words, host_args, env))
    row: dict[str, Any] = {"ended": ended and (folder / "result.json").exists(), "wrong": []}
    row["restarts"] = (folder / "out").read_text().count("; restart ")
    row["seconds"] = time.monotonic() - began_s
    killed = {one["rank"]: one["at_s"] for one in notes(folder, "killed")}
    row["kills"] = len(killed)
    if row["ended"] and not row["restarts"]:
        row["wrong"] = account(folder)
        result = json.loads((folder / "result.json").read_text())
        row["recoveries"] = result["recoveries"]
        heard = [(one["at_s"], one["rank"]) for one in notes(folder, "heard")]
        row["detected_s"] = [
            min(s - at_s for s, rank in heard if s >= at_s and rank != victim)
            for victim, at_s in killed.items()
            if any(s >= at_s and rank != victim for s, rank in heard)
        ]
        row["pause_s"] = max(one["seconds"] for one in notes(folder, "pause") if one["rank"] not in killed)
    return row


def run_allreduce(num_kills: int, seed: int) -> None:
    """Rows for every size and transport."""

    def job(folder: Path, num_bytes: int, host_args: str, draw: random.Random) -> dict[str, Any]:
        return one_job(folder, num_bytes, host_args, draw_orders(num_bytes, draw))

    campaign("allreduce", STEP_S, job, num_kills, seed)
