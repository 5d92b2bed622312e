"""Prints the `--help` of Python programs, one after another in one process, which imports torch and starts MPI once.

python tests/show_helps.py PROGRAM.py ...
"""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    helps = {}
    for program in sys.argv[1:]:
        sys.argv = [program, "--help"]
        sys.path[0] = str(Path(program).parent)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            runpy.run_path(program, run_name="__main__")
        helps[Path(program).stem] = out.getvalue()
    print(json.dumps(helps))
