"""Record the order in which servers took their messages, and repeat it in virtual time.

Invariants: it stands at the effect seam and changes no role. Everything that an asynchronous run leaves
to chance is the order in which each server receives; who read which version, which batch went to whom and
every bit of the parameters follow from it. Messages of one worker keep their order by themselves, so the list
of their senders is all there is to record. What changes nothing (notes, signs of life) is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from mpitrain.effects import Effect, Recv, Role, replaced, watched
from mpitrain.errors import UsageError
from mpitrain.messages import Alive, Announced, AskAverage, Away, Claim, Divide, Message, Note, Over, PullRows
from mpitrain.system.files.run_directory import RUN_FILE
from mpitrain.system.optional import optional

UNRECORDED = (Note, Alive, Announced, Away)
VALIDATING = (Divide, Claim, Over, AskAverage)  # answered as they come: they change no parameter


def _is_validating(message: Message) -> bool:
    return isinstance(message, VALIDATING) or (isinstance(message, PullRows) and not message.trains)


class Order(Protocol):
    """What takes the senders one after the other, such as a list."""

    def append(self, sender: int, /) -> object: ...


def record(role: Role, order: Order) -> Role:
    """`role`, with the sender of every message it receives appended to `order`."""

    def after(effect: Effect, answer: Any) -> None:
        if (
            isinstance(effect, Recv)
            and answer is not None
            and not isinstance(answer[1], UNRECORDED)
            and not _is_validating(answer[1])
        ):
            order.append(answer[0])

    return watched(role, after=after)


def repeat(role: Role, order: Sequence[int]) -> Role:
    """`role`, receiving from the senders of `order` in that order, whenever their messages arrive."""
    early: dict[int, deque[tuple[int, Message]]] = {}
    due = deque(order)

    def answer_to(effect: Effect) -> Role:
        if not isinstance(effect, Recv):
            return (yield effect)
        while not (due and early.get(due[0])):
            arrived = yield effect
            if arrived is not None and _is_validating(arrived[1]):
                return arrived
            if not due:
                raise UsageError(
                    f"the recorded run ended after {len(order)} messages, this one wants more: other "
                    "options or code?"
                )
            if arrived is not None and not isinstance(arrived[1], UNRECORDED):
                early.setdefault(arrived[0], deque()).append(arrived)
        return early[due.popleft()].popleft()

    return replaced(role, answer_to)


class OrderFile:
    """The order of one shard's server, written beside the run's results while the run goes on.

    Invariants: memory holds `NUM_HELD` senders at most, however long the run is. The file bears its name only when it
    is whole. A run can do without it: where it cannot be written, there is none.
    """

    NUM_HELD = 4096

    def __init__(self, path: Path):
        self._path, self._temporary = path, path.with_name(f".{path.name}.tmp")
        self._held, self._separator = list[int](), "["
        self._file: TextIO | None = None
        with optional(path):
            self._file = open(self._temporary, "w")  # noqa: SIM115 - it stays open as long as the run

    def append(self, sender: int, /) -> None:
        """One more message, from this rank."""
        self._held.append(sender)
        if len(self._held) >= self.NUM_HELD:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            self._write(self._separator + ", ".join(map(str, self._held)))
            self._held, self._separator = [], ", "

    def _write(self, text: str) -> None:
        file, self._file = self._file, None  # a record with a gap is none
        if file is None:
            return
        try:
            with optional(self._path):
                file.write(text)
                self._file = file
        finally:
            if self._file is None:
                _give_back(file)

    def finish(self) -> None:
        """Write the end."""
        self._flush()
        self._write("[]\n" if self._separator == "[" else "]\n")
        file, self._file = self._file, None
        if file is not None:
            with optional(self._path):
                file.close()
                os.replace(self._temporary, self._path)

    def close(self) -> None:
        """Also where the run has failed."""
        if self._file is not None:
            _give_back(self._file)
        with contextlib.suppress(OSError):
            self._temporary.unlink(missing_ok=True)


def _give_back(file: TextIO) -> None:
    with contextlib.suppress(OSError):
        file.close()


@contextlib.contextmanager
def recording(run_dir: Path, shard: int) -> Iterator[OrderFile]:
    """The file of one shard's server, which is there when the block ends well and it could be written."""
    order = OrderFile(run_dir / f"arrivals-{shard}.json")
    with contextlib.closing(order):
        yield order
        order.finish()


def load_order(run_dir: Path, shard: int) -> list[int]:
    """What was recorded.

    Raises:
        UsageError: the run has no such record.
    """
    return list(_load(run_dir / f"arrivals-{shard}.json"))


def load_run(run_dir: Path) -> dict[str, Any]:
    """What the run was started with.

    Raises:
        UsageError: not the directory of a run.
    """
    return dict(_load(run_dir / RUN_FILE))


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UsageError(
            f"cannot replay {path.parent}: no {path.name} ({error.strerror}); only runs over "
            "parameter servers record it"
        ) from error
    except ValueError as error:
        raise UsageError(f"cannot replay {path.parent}: {path.name} is damaged: {error}") from error
