"""What the parts of `chaos.py` that kill ranks at random share: jobs of every size over every transport until enough
ranks were killed, what came of them as a row of results, and the table.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from measuring.common import table, write_row
from measuring.launching import TRANSPORTS

HEAD = ("message", "transport", "kills", "survived", "relaunched", "hanging", "wrong", "p50", "p99", "pause")
Job = Callable[[Path, int, str, random.Random], dict[str, Any]]


def campaign(part: str, sizes: Iterable[int], one_job: Job, num_kills: int, seed: int) -> None:
    """Run `one_job(folder, message bytes, launcher's arguments, draw)` until `num_kills` ranks in all were killed. Its
    row has `kills`, `ended`, `restarts`, `wrong` (true if anything is) and, where nothing was relaunched, `detected_s`
    of each kill, `pause_s` (the survivors' longest) and `recoveries`."""
    shown = [HEAD]
    for num_bytes in sizes:
        for transport, host_args in TRANSPORTS.items():
            rows: list[dict[str, Any]] = []
            while sum(row["kills"] for row in rows) < num_kills / 4 and len(rows) < num_kills:
                draw = random.Random(f"{seed}/{part}/{num_bytes}/{transport}/{len(rows)}")
                with tempfile.TemporaryDirectory() as scratch:
                    rows.append(one_job(Path(scratch) / "run", num_bytes, host_args, draw))
                print(num_bytes, transport, rows[-1], flush=True)
            found = summary(rows)
            told = {"part": part, "message_bytes": num_bytes, "transport": transport}
            write_row("chaos", {**told, **found, "rows": rows})
            shown.append((
                f"{num_bytes / 1e6:g} MB", transport, *(str(found[key]) for key in (
                    "kills", "kills_in_jobs_that_survived", "jobs_relaunched", "jobs_hanging", "wrong")),
                *(f"{found[key]:.3f} s" for key in ("detected_p50_s", "detected_p99_s", "longest_pause_s")),
            ))  # fmt: skip
    print(table(shown))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is told of the jobs of one size and transport."""
    detected = sorted(one for row in rows for one in row.get("detected_s", ())) or [0.0]
    return {
        "jobs": len(rows),
        "kills": sum(row["kills"] for row in rows),
        "kills_in_jobs_that_survived": sum(
            row["kills"] for row in rows if row["ended"] and not row["restarts"]
        ),
        "jobs_relaunched": sum(row["ended"] and row["restarts"] > 0 for row in rows),
        "jobs_hanging": sum(not row["ended"] for row in rows),
        "wrong": sum(bool(row["wrong"]) for row in rows),
        "detected_p50_s": detected[len(detected) // 2],
        "detected_p99_s": detected[min(len(detected) - 1, int(0.99 * len(detected)))],
        "recovery_longest_s": max(
            (one["pause_s"] for row in rows for one in row.get("recoveries", ())), default=0.0
        ),
        "given_up_as_silent": sum(how == "silent" for row in rows for how in row.get("lost", {}).values()),
        "longest_pause_s": max((row.get("pause_s", 0.0) for row in rows), default=0.0),
    }
