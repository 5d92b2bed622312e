"""Part `kills` of `chaos.py`: workers of an asynchronous run die around their pushes.

Every job runs `chaos_job.py` on six workers and a server under `mpitrain launch --ft ulfm`, and five of the six kill
themselves at random instants. The weights that must come out are known.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from chaos_launch import HERE, TRANSPORTS, finish, launch, notes
from common import table, write_row
from safetensors.torch import load_file

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
    shown = [
        ("message", "transport", "kills", "survived", "relaunched", "hanging", "wrong", "p50", "p99", "pause")
    ]
    for num_bytes in SIZES:
        for transport, host_args in TRANSPORTS.items():
            rows, wanted = [], num_kills / 4
            while sum(row["kills"] for row in rows) < wanted and len(rows) < 2 * wanted / VICTIMS + 1:
                with tempfile.TemporaryDirectory() as scratch:
                    draw = random.Random(f"{seed}/{num_bytes}/{transport}/{len(rows)}")
                    rows.append(one_job(Path(scratch) / "run", num_bytes, host_args, draw))
                print(num_bytes, transport, rows[-1], flush=True)
            detected = sorted(one for row in rows for one in row.get("detected_s", ()))
            found = {
                "message_bytes": num_bytes,
                "transport": transport,
                "jobs": len(rows),
                "kills": sum(row["kills"] for row in rows),
                "kills_in_jobs_that_survived": sum(
                    row["kills"] for row in rows if row["ended"] and not row["restarts"]
                ),
                "jobs_relaunched": sum(row["ended"] and row["restarts"] > 0 for row in rows),
                "jobs_hanging": sum(not row["ended"] for row in rows),
                "phantom_or_torn": sum(row["wrong"] for row in rows),
                "detected_p50_s": detected[len(detected) // 2] if detected else None,
                "detected_p99_s": detected[min(len(detected) - 1, int(0.99 * len(detected)))]
                if detected
                else None,
                "given_up_as_silent": sum(
                    how == "silent" for row in rows for how in row.get("lost", {}).values()
                ),
                "longest_pause_s": max(row["pause_s"] for row in rows),
            }
            write_row("chaos", {"part": "kills", **found, "rows": rows})
            shown.append((
                f"{num_bytes / 1e6:g} MB", transport, *(str(found[key]) for key in (
                    "kills", "kills_in_jobs_that_survived", "jobs_relaunched", "jobs_hanging", "phantom_or_torn")),
                *(f"{found[key] or 0:.3f} s" for key in ("detected_p50_s", "detected_p99_s", "longest_pause_s")),
            ))  # fmt: skip
    print(table(shown))
