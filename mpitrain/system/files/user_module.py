"""A user's Python file as a module that other processes find, too.

What is defined in it, and in the modules beside it, is sent by name to processes that do not share our memory: those
that `spawn` and `forkserver` start, joblib's, whoever loads a model that `torch.save` has written whole. So the file is
a module under the name that a plain `import` beside it would use, and its folder stays on the path that such processes
are given, in front, as that of a script does.

Invariants: no other module is replaced: a file that is called as one of Python's or as one that is there already has no
such name, and its folder hides nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError

UNNAMED = "mpitrain_job"  # of a file that no import finds under its own name
_ours: set[str] = set()


def run_file(file: Path) -> dict[str, Any]:
    """Run a file anew; returns what it defines.

    Raises:
        Exception: what it raises; the modules are as they were then.
    """
    folder, name = str(file.resolve().parent), _name_of(file)
    loader = _Anew(name, str(file))
    module = types.ModuleType(name)
    module.__file__, module.__loader__ = str(file), loader
    module.__spec__ = ModuleSpec(name, loader, origin=str(file.resolve()))
    before = sys.modules.get(name)
    sys.modules[name] = module
    sys.path.insert(0, folder)
    try:
        loader.exec_module(module)
    except BaseException:
        sys.path.remove(folder)
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    _ours.add(name)
    sys.path.remove(folder)
    if name == UNNAMED:
        if folder not in sys.path:
            sys.path.append(folder)
    else:
        sys.path[:] = [folder, *(place for place in sys.path if place != folder)]
    return module.__dict__


def import_anew(name: str, root: Path) -> dict[str, Any]:
    """Import a module that lies below `root`, which comes first from here on unless Python imports from there anyway;
    what the module was before is forgotten. Returns what it defines.

    Raises:
        UsageError: a package of this name was imported from elsewhere.
    """
    if os.path.realpath(root) not in map(os.path.realpath, sys.path):
        sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    before = sys.modules.pop(name, None)
    try:
        module = importlib.import_module(name)
        found = module.__file__
        if found is None or not Path(os.path.realpath(found)).is_relative_to(os.path.realpath(root)):
            raise UsageError(
                f"{name} is {found} in this process, and not the module below {root}: rename one of them"
            )
        return module.__dict__
    except BaseException:
        if before is not None:
            sys.modules[name] = before
        raise


class _Anew(SourceFileLoader):
    """Reads the file itself, never a translation of an earlier one that lies beside it."""

    def get_code(self, fullname: str) -> types.CodeType:
        code: types.CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def _name_of(file: Path) -> str:
    name = file.stem
    taken = name in sys.stdlib_module_names or (name in sys.modules and name not in _ours)
    return UNNAMED if taken or file.suffix != ".py" or "." in name or not name else name
