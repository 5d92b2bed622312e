"""`mpitrain report --follow`: the page of a run, written anew while it goes on.

Invariants: the file is whole whenever it is read. A page that will be written again loads itself again, and the last
one does not, however this ends. Writing takes no more than a twentieth of one core's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from mpitrain.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError
from mpitrain.reporting.pages.figures import check_drawing
from mpitrain.reporting.pages.html_page import document, head, paragraphs
from mpitrain.reporting.pages.live import Life, live_head
from mpitrain.reporting.pages.page import body_of
from mpitrain.reporting.run_files import RunFiles, holds_run, read_runs
from mpitrain.system.files.atomic import check_output, write_whole
from mpitrain.system.files.folders import check_readable
from mpitrain.system.saying import tell

LEAST_S = 5.0  # between two pages
_SHARE = 20  # of the time that a page takes


def follow(
    run_dir: Path, out: Path, wait: Callable[[float], None] = time.sleep, life: Life | None = None
) -> int:
    """Write the page of the run in `run_dir` to `out` until the run has ended; returns the exit code.

    Raises:
        UsageError: no file can be made at `out`, matplotlib is missing, or there are several runs.
    """
    check_output(out, "--out")
    check_drawing()
    life, every_s, said = life or Life(run_dir), LEAST_S, ""
    try:
        while True:
            began_s = time.process_time()
            run, lives = _look(run_dir, life)
            how = how_it_stands(run, lives)
            if how != said:
                text = f"{_WORDS[how]}; {out} " + ("is written" if how in OVER else "follows it")
                if how in OVER and not said:  # it was before anybody followed it
                    text += "; to follow another run there, start it first"
                tell(f"mpitrain: {run_dir}: {text}")
                said = how
            write_whole(out, _page(run_dir, run, lives, life, 0 if how in OVER else every_s))
            if how in OVER:
                return EXIT_OK
            every_s = max(LEAST_S, _SHARE * (time.process_time() - began_s))
            wait(every_s)
    except KeyboardInterrupt:
        note = "Nobody follows the run any more: this shows how it stood."
        write_whole(out, _page(run_dir, *_look(run_dir, life), life, 0, note))
        tell(f"mpitrain: {out} shows how {run_dir} stood; the run goes on without it")
        return EXIT_INTERRUPTED


WAITING, UNDER_WAY, PAUSED, ENDED, GONE = "waiting", "under way", "paused", "ended", "gone"
OVER = (ENDED, GONE)
_WORDS = {
    WAITING: "waiting for the run to begin", UNDER_WAY: "under way", PAUSED: "ended on request, to be run again",
    ENDED: "ended", GONE: "gone without a result",
}  # fmt: skip


def how_it_stands(run: RunFiles | None, lives: bool) -> str:
    """One of the words above. A result whose processes still live may be followed by another start."""
    if lives:
        return UNDER_WAY if run else WAITING
    if run is None:
        return WAITING
    if not run.result:
        return GONE
    return PAUSED if run.result.get("status") == "requeue" else ENDED


def _look(run_dir: Path, life: Life) -> tuple[RunFiles | None, bool]:
    """What the run has left so far, and whether it lives: which it did before what was read, as a result is written
    before its lock is given back, or does after it, as a lock is taken before the first row."""
    check_readable(run_dir)
    lived = life.lives()
    return read(run_dir), lived or life.lives()


def read(run_dir: Path) -> RunFiles | None:
    """What the run has left so far; None before it has left anything.

    Raises:
        UsageError: the directory holds several runs.
    """
    if holds_run(run_dir):
        return read_runs([run_dir])[0]
    if run_dir.is_dir() and (several := sorted(one.name for one in run_dir.iterdir() if holds_run(one))):
        raise UsageError(
            f"--follow {run_dir}: the directory holds {len(several)} runs; name one, such as {run_dir / several[0]}"
        )
    return None


def _page(
    run_dir: Path, run: RunFiles | None, lives: bool, life: Life, reload_s: float, note: str = ""
) -> str:
    """`reload_s`: 0 for the last one."""
    again = f"Written {time.strftime('%H:%M:%S')}; the page loads itself again every {reload_s:.0f} s."
    first = (
        list(paragraphs([again if reload_s else note], "note live" if reload_s else "fail"))
        if reload_s or note
        else []
    )
    if run is None:
        return document(run_dir.name, [*_nothing_yet(run_dir, lives), *first], reload_s)
    over = bool(run.result) and not lives and not reload_s and not note
    live = [] if over else [*live_head(run, life, lives), *first]
    return document(run.name, body_of([run], live), reload_s)


def _nothing_yet(run_dir: Path, lives: bool) -> Iterable[str]:
    yield head(run_dir.resolve().name, "starting" if lives else "not started", "info")
    what = "holds no run yet" if run_dir.is_dir() else "does not exist yet"
    yield from paragraphs([f"A launch prepares the run in {run_dir}." if lives else f"{run_dir} {what}."])
