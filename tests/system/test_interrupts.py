"""The stop button is KeyboardInterrupt, whatever was under way when it was pressed."""

import importlib
import signal
import sys

import pytest
import torch

from mpitrain.errors import EXIT_INTERRUPTED
from mpitrain.system import interrupts
from mpitrain.system.files.error_record import exit_code
from mpitrain.system.interrupts import interruptible, whole


def press():
    signal.raise_signal(signal.SIGINT)


class Gone:
    """Its destructor is where the signal comes, and where Python loses it."""

    def __del__(self):
        press()


def backward():
    """Through a function of Python's that torch calls: torch makes another error of the interrupt."""
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: press())
    x.sum().backward()


def renamed():
    try:
        press()
    except KeyboardInterrupt:
        raise RuntimeError("error in a callback") from None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("work", [press, backward, renamed, Gone], ids=["plain", "backward", "other", "lost"])
def test_whatever_becomes_of_the_signal_the_caller_gets_keyboard_interrupt(work):
    for _ in range(2):  # a second press ends nothing else
        with pytest.raises(KeyboardInterrupt), interruptible():
            work()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_that_has_lost_the_signal_is_ended_where_it_looks_and_the_next_is_not():
    with pytest.raises(KeyboardInterrupt), interruptible():
        with pytest.raises(KeyboardInterrupt):
            press()
        interrupts.check()
        raise AssertionError
    assert exit_code(ValueError("what came of it")) == EXIT_INTERRUPTED
    with interruptible():
        interrupts.check()
    assert exit_code(ValueError("an error")) == 1


def test_an_error_without_a_signal_and_a_callers_own_handler_stay():
    with pytest.raises(ValueError, match="mine"), interruptible():
        raise ValueError("mine")
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        with interruptible():
            press()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [1]


@pytest.fixture
def half_done(tmp_path, monkeypatch):
    """A module that is interrupted in the middle of its import, and a later one in a module of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    inner, outer = (tmp_path / f"{name}_pressed_{tmp_path.name[-4:]}.py" for name in ("inner", "outer"))
    inner.write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nwhole = True\n")
    outer.write_text(f"import {inner.stem}\nwhole = {inner.stem}.whole\n")
    yield outer.stem
    for one in (inner, outer):
        sys.modules.pop(one.stem, None)


def test_an_import_is_not_left_half_done_and_a_second_press_waits_for_nothing(half_done):
    with pytest.raises(KeyboardInterrupt), interruptible():
        assert importlib.import_module(half_done).whole
        with pytest.raises(KeyboardInterrupt):
            press()
        del sys.modules[half_done], sys.modules[half_done.replace("outer", "inner")]
        with pytest.raises(KeyboardInterrupt):
            importlib.import_module(half_done)
        assert half_done not in sys.modules


def test_what_is_made_whole_is_so_when_the_signal_is_raised():
    made = []
    with pytest.raises(KeyboardInterrupt), interruptible():
        with pytest.raises(KeyboardInterrupt), whole():
            with whole():
                press()
                made.append(1)
            made.append(2)
        assert made == [1, 2]
        with whole():  # on the way out
            made.append(3)
    assert made == [1, 2, 3]
    with pytest.raises(KeyboardInterrupt), whole():  # a command ends, so it waits for nothing
        interrupts.interrupt(signal.SIGINT, None)
