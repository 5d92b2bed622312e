"""What a run directory holds, which run it belongs to, and how a new run makes room for itself.

    RUN_DIR/run.json  metrics.jsonl  result.json ...  checkpoints/run-id  checkpoints/000000012800/...  earlier-RUN/...

Invariants: standard library only, so that the launcher and batch scripts may use it without torch. A file that is read
may be torn, hostile or no file of ours: it is skipped, never an error. A run reads and removes no other run's
checkpoints: a new one moves what an earlier one has left to `earlier-RUN/`, itself a run directory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.system.files.atomic import write_whole
from mpitrain.system.files.folders import make_private, unused
from mpitrain.system.files.part_places import is_there

CHECKPOINTS = "checkpoints"
RUN_ID_FILE = "run-id"
RUN_FILE = "run.json"
RUN_SCHEMA = 1
FIRST_PART = "shard-0"
PART_NAME = re.compile(r"(shard|own|worker)-(0|[1-9]\d{0,8})")
_PIECE_BYTES = 2**20
MAX_RECORD_BYTES = 2**26  # of a part's JSON
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_FOLDER_NAME = re.compile(r"\d{12,15}")
_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)
# Files and folders that a run leaves beside its checkpoints.
_LEFT = (
    RUN_FILE, "env.json", "env-*.json", "legs.jsonl", "spent.txt", "metrics.jsonl", "result.json", "result-*.json",
    "model.safetensors", "arrivals-*.json", ".arrivals-*.json.tmp",
    "model-best.safetensors", "model-ema.safetensors", "tables-*.safetensors", "best.json", "errors", "stacks",
    "REQUEUE", "restarts.jsonl", "metrics.csv", "metrics-*.csv", "mllog.txt", "tensorboard", "mlflow", "wandb",
    "trace-rank-*.json",
)  # fmt: skip


class Identity(NamedTuple):
    """Whose checkpoint this is.

    Attributes:
        run: its id; resuming in the same directory goes on with the same run.
        attempt: id of one start of it, the same on all ranks.
        resumed_from: {"run", "attempt", "checkpoint_at", "samples"} of the checkpoint it began from; None from the
            beginning.
    """

    run: str
    attempt: str
    resumed_from: dict[str, Any] | None = None

    def after_losing(self, num_ranks: int) -> Identity:
        """Of the same start, after it has lost so many ranks: what these wrote does not go together with what is
        written now."""
        return self._replace(attempt=f"{self.attempt.partition('.')[0]}.{num_ranks}") if num_ranks else self

    def is_same_start(self, attempt: str) -> bool:
        """Whether `attempt` is of this start, whatever it has lost."""
        return is_same_start(attempt, self.attempt)


def is_same_start(attempt: object, other: str) -> bool:
    """Whether both are of one start, whatever it has lost."""
    return isinstance(attempt, str) and attempt.partition(".")[0] == other.partition(".")[0]


def new_run_id() -> str:
    """For a run that begins: sorted by date, unique."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def new_attempt_id() -> str:
    """For one start of a run."""
    return secrets.token_hex(8)


def is_id(text: object) -> bool:
    """Whether it may be the id of a run or a start, and part of a file's name."""
    return isinstance(text, str) and bool(_ID.fullmatch(text)) and set(text) != {"."}


def folder_of(run_dir: Path, checkpoint_at: int) -> Path:
    """The folder of the checkpoint at so many accepted samples, or steps in a loop of the user's own."""
    return run_dir / CHECKPOINTS / f"{checkpoint_at:012d}"


def position_of(folder: Path) -> int | None:
    """The samples or steps in the name of a checkpoint's folder; None for any other folder."""
    return int(folder.name) if _FOLDER_NAME.fullmatch(folder.name) else None


def listed(run_dir: Path) -> list[Path]:
    """Every checkpoint folder, complete or not, the newest first; names that are not ours are left out."""
    with contextlib.suppress(OSError):
        entries = list(os.scandir(run_dir / CHECKPOINTS))
        found = [Path(entry.path) for entry in entries if _is_folder(entry)]
        return sorted((path for path in found if position_of(path) is not None), key=_number, reverse=True)
    return []


def _number(folder: Path) -> int:
    return int(folder.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """All of a regular file.

    Raises:
        OSError: it cannot be read; ValueError: it is no regular file, or larger than `max_bytes`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"{size} bytes, at most {max_bytes}")
        data = bytearray()
        while piece := file.read(_PIECE_BYTES):  # memory for all that is asked for is taken beforehand
            data += piece
            if len(data) > max_bytes:
                raise ValueError(f"more than {max_bytes} bytes")
    return bytes(data)


def open_regular(path: Path) -> Any:
    """Open for reading in binary; a pipe or device in its place is refused, and not waited for.

    Raises:
        OSError: it cannot be opened; ValueError: it is no regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("it is no regular file")
    return os.fdopen(handle, "rb")


def read_json(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none, whatever the reason."""
    try:
        found = json.loads(read_bounded(path, max_bytes))
    except (OSError, ValueError, RecursionError, MemoryError):
        return None
    return found if isinstance(found, dict) else None


class Progress(NamedTuple):
    """The newest checkpoint whose parts are all there, as far as their names show; NO_PROGRESS without one.

    Attributes:
        samples: accepted ones that it holds; since: those of the checkpoint from which the start that wrote it began.
    """

    samples: int = -1
    run: str = ""
    attempt: str = ""
    since: int = 0

    @property
    def gets_on(self) -> bool:
        """Whether the start that wrote it has come further than it began."""
        return self.samples > self.since


NO_PROGRESS = Progress()


def progress(run_dir: Path) -> Progress:
    """How far the run in this directory has come. It has made progress between two looks if these differ, and the
    newer one gets on: a name may differ, too, where nothing was accepted since."""
    for folder in listed(run_dir):
        if (first := _complete(folder)) is not None:
            run, attempt = str(first.get("run", "")), str(first.get("attempt", ""))
            return Progress(_accepted(first, _number(folder)), run, attempt, _begun_at(first))
    return NO_PROGRESS


def samples_of(folder: Path) -> int:
    """Accepted samples that a checkpoint holds, without a look at its other parts."""
    return _accepted(read_json(folder / f"{FIRST_PART}.json") or {}, _number(folder))


def _accepted(first: dict[str, Any], checkpoint_at: int) -> int:
    """What the dealing server had counted; ranks that take the same steps write at the samples in the name."""
    found: Any = first
    for key in ("state", "role", "ledger", "samples_accepted"):
        found = found.get(key) if isinstance(found, dict) else None
    return _count(found, checkpoint_at)


def _begun_at(first: dict[str, Any]) -> int:
    source = first.get("resumed_from")
    source = source if isinstance(source, dict) else {}
    return _count(source.get("samples"), _count(source.get("checkpoint_at"), 0))


def _count(found: object, otherwise: int) -> int:
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else otherwise


def _complete(folder: Path) -> dict[str, Any] | None:
    first = read_json(folder / f"{FIRST_PART}.json")
    parts = first.get("parts") if first else None
    if first is None or not isinstance(parts, list) or not parts:
        return None
    named = all(isinstance(part, str) and PART_NAME.fullmatch(part) for part in parts)
    return first if named and all(is_there(folder, part) for part in parts) else None


def run_of(run_dir: Path) -> str:
    """Id of the run whose checkpoints, or other files, lie here; "" where that is not known."""
    for found_id in _ids(run_dir):
        if is_id(found_id):
            return str(found_id)
    return ""


def _ids(run_dir: Path) -> Iterator[Any]:
    yield _marked(run_dir / CHECKPOINTS)
    yield progress(run_dir).run
    yield (read_json(run_dir / RUN_FILE) or {}).get("run")


def _marked(checkpoints: Path) -> str | None:
    try:
        return read_bounded(checkpoints / RUN_ID_FILE, 100).decode().strip()
    except (OSError, ValueError):
        return None


def adopt(run_dir: Path, run: str) -> None:
    """From now on the checkpoints that lie here are `run`'s, which goes on with them.

    Raises:
        OSError: the disk is full or not writable.
    """
    folder = make_private(run_dir, CHECKPOINTS)
    if _marked(folder) != run:
        write_whole(folder / RUN_ID_FILE, f"{run}\n", tag=secrets.token_hex(4))


def _date_of(run_dir: Path) -> str:
    for path in (run_dir / RUN_FILE, run_dir / CHECKPOINTS):
        with contextlib.suppress(OSError):
            return time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
    return time.strftime("%Y%m%d-%H%M%S")


def make_room(run_dir: Path, run: str, beside: bool = True) -> Path | None:
    """For a new run: move what an earlier one has left here to `earlier-RUN/` and return that folder; None where
    nothing was left. Files that are not a run's stay. Only the process that holds the directory's lock may call it.

    Args:
        beside: whether files beside the checkpoints are a run's too; a loop of one's own has written none.

    Raises:
        OSError: it cannot be moved, or the disk is full.
    """
    used = bool(listed(run_dir)) or (beside and (run_dir / RUN_FILE).exists())
    if not used or run_of(run_dir) == run:
        adopt(run_dir, run)
        return None
    target = unused(run_dir / f"earlier-{run_of(run_dir) or _date_of(run_dir)}")
    target.mkdir(mode=0o700)
    if listed(run_dir):
        os.rename(run_dir / CHECKPOINTS, target / CHECKPOINTS)
    for path in (path for pattern in _LEFT if beside for path in sorted(run_dir.glob(pattern))):
        os.rename(path, target / path.name)
    adopt(run_dir, run)
    return target


def wait_for_room(run_dir: Path, run: str, timeout_s: float) -> bool:
    """On the other ranks: whether the one that holds the lock has made room for this run in time."""
    deadline_s, pause_s = time.monotonic() + timeout_s, 0.01
    while _marked(run_dir / CHECKPOINTS) != run:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(pause_s)
        pause_s = min(1.0, 2 * pause_s)  # all ranks look
    return True


def why_no_room(run_dir: Path) -> str:
    """Why another checkpoint like the newest cannot be written here; "" where it can, as far as can be known."""
    newest = next(iter(listed(run_dir)), None)
    num_bytes, probe = 2**20, run_dir / f".room-{secrets.token_hex(4)}"
    try:
        num_bytes += sum(path.stat().st_size for path in newest.rglob("*")) if newest else 0
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, min(num_bytes, 2**30))
        finally:
            os.close(handle)
    except OSError as error:
        return str(error.strerror) if error.errno in _FULL else ""
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return ""
