"""Ends with an exit code that is a signal's number, and is sent that signal by C's exit handlers, which run after the
interpreter has gone. Arguments: the number; "over" where the run has ended in order before."""

import ctypes
import sys

from mpitrain.training import signals

libc = ctypes.CDLL(None)
libc.on_exit(libc["raise"], None)
signals.install_early()
if sys.argv[2:] == ["over"]:
    signals.ignore()
sys.exit(int(sys.argv[1]))
