"""Threads that work beside a run: this file starts all of them, and hands what goes wrong in one to the run.

Invariants: no failure of a thread is lost. It goes to whom the thread that has started it answers to (`failures_to`): a
run whose ranks are threads, or one in virtual time. Where nobody has asked for it, it goes to the hook of the process,
which ends the job where this process is a rank under MPI; and where there is no such hook, the main thread is
interrupted. A thread is a daemon: it never holds up the end of a process.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from mpitrain.one_at_a_time import parse_in_turn

Take = Callable[[BaseException], None]
_take: ContextVar[Take | None] = ContextVar("take", default=None)


def thread(name: str, work: Callable[..., object], *arguments: object) -> threading.Thread:
    """A thread that is yet to be started; it is called `mpitrain-<name>`."""
    parse_in_turn()
    return threading.Thread(
        target=_run, args=(work, arguments, _take.get()), name=f"mpitrain-{name}", daemon=True
    )


def start(name: str, work: Callable[..., object], *arguments: object) -> threading.Thread:
    """A thread that does this from now on."""
    started = thread(name, work, *arguments)
    started.start()
    return started


def _run(work: Callable[..., object], arguments: tuple[object, ...], take: Take | None) -> None:
    _take.set(take)
    try:
        work(*arguments)
    except BaseException as error:
        if take is not None:
            take(error)
            return
        if threading.excepthook is not threading.__excepthook__:
            raise
        threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))
        _interrupt_main()


def _interrupt_main() -> None:
    """Nobody else will hear of it."""
    main = threading.main_thread()
    if main.is_alive() and main.ident is not None:
        with contextlib.suppress(OSError):
            signal.pthread_kill(main.ident, signal.SIGINT)


@contextlib.contextmanager
def failures_to(take: Take) -> Iterator[None]:
    """What goes wrong in threads that this thread, or one of them, starts in this block goes to `take`, which
    is called by the thread that fails."""
    token = _take.set(take)
    try:
        yield
    finally:
        _take.reset(token)


@contextlib.contextmanager
def failures_raised() -> Iterator[None]:
    """Raise at the end of this block what has gone wrong first in threads that were started in it."""
    failures: list[BaseException] = []
    try:
        with failures_to(failures.append):
            yield
    except Exception as error:
        if failures:
            raise failures[0] from error
        raise
    if failures:
        raise failures[0]
