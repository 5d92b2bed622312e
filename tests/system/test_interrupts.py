"""The stop button is KeyboardInterrupt, whatever was under way when it was pressed."""

import signal

import pytest
import torch

from mpitrain.errors import EXIT_INTERRUPTED
from mpitrain.system import interrupts
from mpitrain.system.error_record import exit_code
from mpitrain.system.interrupts import interruptible


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
