"""A run that is under way, for its page: whether it lives, how far it is, who is in, and where its last checkpoint is.

Invariants: it only reads, and from any host that sees the run directory. No two hosts' clocks are compared: what has
not changed for a while by this host's clock is silent. What the ranks of `mpitrain launch` report says more; without it
(mpirun, srun) what the run has put on record has to do.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.reporting.pages.answers import choice_of, seconds_text
from mpitrain.reporting.pages.figures import count_text
from mpitrain.reporting.pages.html_page import head, paragraphs, tiles
from mpitrain.reporting.pages.one_run import about, numbers_of, status_of
from mpitrain.reporting.rows import METRICS_FILE, Row
from mpitrain.reporting.run_files import RunFiles
from mpitrain.system.files.run_directory import position_of
from mpitrain.system.files.run_lock import LAUNCH_LOCK_FILE, LOCK_FILE, QUIET_S, holder_lives
from mpitrain.system.launched import rank_status
from mpitrain.system.launched.rank_status import ENDED, READY, RankStatus

RESULT_FILE = "result.json"
SILENT_S = 2 * QUIET_S
_RECENT_S = 60.0  # that the rate is taken from, where a step does not take longer


@dataclass
class Life:
    """What is known of whether the run in a directory lives, from one look to the next."""

    run_dir: Path
    clock: Callable[[], float] = time.monotonic
    _seen: dict[str, tuple[Hashable, float]] = field(default_factory=dict)

    def quiet_s(self, name: str, value: Hashable) -> float:
        """For how long `value` has been what it is."""
        now_s = self.clock()
        if name not in self._seen or self._seen[name][0] != value:
            self._seen[name] = value, now_s
        return now_s - self._seen[name][1]

    def lives(self) -> bool:
        """Whether some process works on the run: it holds one of the locks, or they are touched from another host, or,
        where there is neither a lock nor a result, rows are written."""
        locks = [name for name in (LAUNCH_LOCK_FILE, LOCK_FILE) if (self.run_dir / name).exists()]
        for name in locks:
            lives = holder_lives(self.run_dir, name=name)
            if lives or (lives is None and self.quiet_s(name, _touched(self.run_dir / name)) < SILENT_S):
                return True
        if locks or (self.run_dir / RESULT_FILE).exists():
            return False
        touched = _touched(self.run_dir / METRICS_FILE)
        return self.quiet_s(METRICS_FILE, touched) < SILENT_S and bool(touched)

    def ranks(self) -> dict[int, RankStatus]:
        """What the ranks of the newest launch have reported; empty where there is none."""
        with contextlib.suppress(OSError):
            folders = sorted(self.run_dir.glob(f"{rank_status.FOLDER}*"), key=_touched)
            return rank_status.read_all(folders[-1]) if folders else {}
        return {}


def _touched(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def of_this_start(run: RunFiles) -> list[Row]:
    """The rows since the run was started last."""
    begun = [at for at, row in enumerate(run.rows) if row["event"] == "start"]
    return list(run.rows[begun[-1] if begun else 0 :])


@dataclass(frozen=True)
class Pace:
    """How far a run is: samples so far and planned, samples per second lately, seconds left; None what is not known."""

    samples: int
    planned: int | None
    rate: float | None
    left_s: float | None

    @property
    def share(self) -> float | None:
        return min(1.0, self.samples / self.planned) if self.planned else None


def pace_of(run: RunFiles) -> Pace:
    """Of the start under way."""
    rows = of_this_start(run)
    steps = [
        row
        for row in rows
        if row["event"] in ("training", "progress") and isinstance(row.get("samples"), int)
    ]
    planned = next((row["total_samples"] for row in rows if isinstance(row.get("total_samples"), int)), None)
    if not steps:
        return Pace(0, planned, None, None)
    *earlier, last = steps
    recent = [row for row in earlier if row["trained_s"] >= last["trained_s"] - _RECENT_S]
    before = (recent or earlier[-1:] or steps)[0]
    spent_s, done = last["trained_s"] - before["trained_s"], last["samples"] - before["samples"]
    rate = done / spent_s if spent_s > 0 and done > 0 else None
    left_s = max(0, planned - last["samples"]) / rate if planned and rate else None
    return Pace(last["samples"], planned, rate, left_s)


def live_head(run: RunFiles, life: Life, lives: bool) -> Iterable[str]:
    """The first lines of its page."""
    pace, ranks = pace_of(run), life.ranks()
    is_training = any(row["event"] in ("training", "progress") for row in of_this_start(run))
    if run.result:
        status, kind = status_of(run)
    elif lives:
        status, kind = ("running" if is_training else "starting"), "info"
    else:
        status, kind = "gone without a result", "bad"
    yield head(run.name, status, kind, about(run))
    if pace.share is not None and not run.is_finished:
        percent = f"{100 * pace.share:.0f}"
        yield f'<div class="bar" role="img" aria-label="{percent} percent done"><i style="width: {percent}%"></i></div>'
    yield tiles(numbers_of(run, choice_of([run])) if run.is_finished else list(_numbers(run, pace))[:4])
    yield from paragraphs(_who_is_in(run, ranks, life, lives))
    yield from paragraphs(_last_checkpoint(run))
    quiet_s = life.quiet_s("rows", len(run.rows))
    if lives and not run.result and quiet_s > 30:
        yield from paragraphs(
            [f"No row for {seconds_text(quiet_s)}, and it lives: a long step or a validation."], "note"
        )
    if not lives and not run.result:
        yield from paragraphs([_why_gone(run)], "fail")


def _numbers(run: RunFiles, pace: Pace) -> Iterable[tuple[str, str, str]]:
    rows = of_this_start(run)
    epoch = next(
        (row["epoch"] for row in reversed(rows) if row["event"] == "progress" and "epoch" in row), None
    )
    epochs = next((row["epochs"] for row in rows if row["event"] == "training" and row.get("epochs")), None)
    of = f"epoch {epoch}" + (f" of {epochs}" if epochs else "") if epoch else "before the first step"
    yield "done", "-" if pace.share is None else f"{100 * pace.share:.0f} %", of
    yield (
        "left",
        "-" if pace.left_s is None else seconds_text(pace.left_s),
        f"{pace.samples:,} samples so far",
    )
    yield "samples/s", "-" if pace.rate is None else count_text(pace.rate), "lately"
    yield from (one for one in numbers_of(run, choice_of([run])) if one[0] not in ("samples", "samples/s"))


def _who_is_in(run: RunFiles, ranks: dict[int, RankStatus], life: Life, lives: bool) -> Iterable[str]:
    """Which workers and servers are there, as far as is known."""
    if run.result or not lives:
        return
    roles = {what: _list(run.started.get(what)) for what in ("workers", "servers")}
    lost = {row.get("rank"): row for row in of_this_start(run) if row["event"] == "worker lost"}
    silent = {
        rank: quiet_s
        for rank, one in ranks.items()
        if (quiet_s := life.quiet_s(f"rank {rank}", one.beat)) > SILENT_S and one.state != ENDED
    }
    said = []
    for what, those in roles.items():
        here = [rank for rank in those if rank not in lost and rank not in silent]
        if those:
            word = what if len(those) > 1 else what[:-1]
            said.append(
                f"{len(here)} of {len(those)} {word}" if len(here) < len(those) else f"{len(those)} {word}"
            )
    if said:
        yield f"In: {' and '.join(said)}{_hosts(ranks)}."
    if lost:
        yield (
            "Lost: "
            + ", ".join(
                f"rank {rank} ({row.get('how', 'gone')}, at {row['at_s']:.0f} s)"
                for rank, row in lost.items()
            )
            + "."
        )
    if silent:
        yield (
            "Silent: "
            + ", ".join(f"rank {rank} for {seconds_text(quiet_s)}" for rank, quiet_s in silent.items())
            + "."
        )
    states = Counter(one.state for one in ranks.values())
    if states and set(states) != {READY}:
        yield "Ranks: " + ", ".join(f"{number} {state}" for state, number in states.items()) + "."


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _hosts(ranks: dict[int, RankStatus]) -> str:
    hosts = list(dict.fromkeys(one.host for one in ranks.values()))
    if not hosts:
        return ""
    return f", on {hosts[0]}" if len(hosts) == 1 else f", on {len(hosts)} hosts"


def _last_checkpoint(run: RunFiles) -> Iterable[str]:
    rows = [row for row in run.rows if row["event"] == "checkpoint"]
    if not rows:
        yield "No checkpoint yet."
        return
    last = rows[-1]
    age_s = max(0.0, run.rows[-1]["at_s"] - last["at_s"])
    name = Path(str(last.get("folder", ""))).name
    where = f" (checkpoints/{name})" if position_of(Path(name)) is not None else ""
    yield f"Last checkpoint: of {last.get('samples', 0):,} samples{where}, {seconds_text(age_s)} before the newest row."


def _why_gone(run: RunFiles) -> str:
    rows = [row for row in run.rows if row["event"] == "checkpoint"]
    way_out = (
        "--resume auto goes on from its last checkpoint"
        if rows
        else "it has left no checkpoint, and begins anew"
    )
    return (
        "No process works on this run any more, and it has written no result: it was killed, or its node was lost. "
        f"Start it again with the same command: {way_out}."
    )
