"""What goes wrong in a thread beside a run, and who hears of it."""

import threading

import pytest

from mpitrain.system import background


def fail(text):
    raise ValueError(text)


def test_a_failure_goes_to_whom_the_starting_thread_answers_also_from_a_thread_of_a_thread():
    heard = []
    with background.failures_to(heard.append):
        background.start("one", fail, "one").join()
        background.start("two", lambda: background.start("inner", fail, "inner").join()).join()
        later = background.thread("three", fail, "three")
    later.start()
    later.join()
    assert [str(error) for error in heard] == ["one", "inner", "three"] and later.name == "mpitrain-three"


def test_a_block_raises_what_has_failed_in_it_before_what_followed_from_that():
    with pytest.raises(ValueError, match="first"), background.failures_raised():
        background.start("one", fail, "first").join()
    with pytest.raises(ValueError, match="first") as raised, background.failures_raised():
        background.start("one", fail, "first").join()
        raise KeyError("second")
    assert isinstance(raised.value.__cause__, KeyError)


def test_where_nobody_would_hear_of_it_the_main_thread_is_interrupted(monkeypatch, capsys):
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    with pytest.raises(KeyboardInterrupt):
        background.start("one", fail, "nobody hears")
        threading.Event().wait(60)
    assert "ValueError: nobody hears" in capsys.readouterr().err


def test_a_hook_of_the_process_hears_of_it(monkeypatch):
    heard = []
    monkeypatch.setattr(threading, "excepthook", lambda args: heard.append(args.exc_value))
    background.start("one", fail, "to the hook").join()
    assert [str(error) for error in heard] == ["to the hook"]
