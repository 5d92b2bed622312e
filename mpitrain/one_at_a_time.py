"""What threads of one process do in turn: reading Python's syntax, and filling a table at its first use.

Python before 3.12.1 counts the depth of a syntax tree once for all threads, so an `ast.parse` in one of them makes
another's fail (`SystemError: AST constructor recursion depth mismatch`) whenever the second gets its turn in the middle
of the first. NumPy's files, signatures of built-in functions and tracebacks are read by it, too.

Invariants: nothing of ours waits while it holds one of these locks, but for an import; a forked process finds them
free, whoever held them.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
import threading
from typing import Any

AFFECTED = sys.version_info < (3, 12, 1)
FILLING = threading.RLock()  # a table that is filled at its first use
_PARSING = threading.RLock()
_original = ast.parse


def parse_in_turn() -> None:
    """From here on one thread at a time calls `ast.parse`, whoever calls it; where Python's own can do that, nothing
    changes. Before this process starts a thread."""
    if AFFECTED and ast.parse is _original:
        ast.parse = _parse_alone


def parse_expression(text: str) -> ast.expr:
    """The syntax of one expression.

    Raises:
        SyntaxError, ValueError: it is none.
    """
    tree = _parse_alone(text, mode="eval")
    assert isinstance(tree, ast.Expression)
    return tree.body


@functools.wraps(_original)
def _parse_alone(*arguments: Any, **options: Any) -> Any:
    with _PARSING:
        return _original(*arguments, **options)


def _forget_owners() -> None:
    for lock in (FILLING, _PARSING):
        lock._at_fork_reinit()  # type: ignore[attr-defined] # as the standard library's own modules do


os.register_at_fork(after_in_child=_forget_owners)
