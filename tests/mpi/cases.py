"""Many cases in one launch: a program of `case_*` functions, run by every rank together, in order of definition.

A launch costs seconds, a case milliseconds. Every rank prints `ok <case>` after each; the tests ask for these lines,
so a case that a rank never reached fails by name. The first exception ends the whole job, as in any run.
"""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.ranks import Result, run_ranks

PROGRAMS = Path(__file__).parent / "programs"
TCP = ("--mca", "pml", "ob1", "--mca", "btl", "self,tcp")


def run_cases(namespace: Mapping[str, Any]) -> None:
    """Called at the end of a program: runs its cases between barriers, then the ordered end."""
    from mpitrain.mpi import runtime

    rt = runtime.start()
    for name, function in list(namespace.items()):
        if name.startswith("case_"):
            rt.role = name
            function(rt)
            rt.barrier()
            print(f"ok {name}", flush=True)
    rt.finish()


def case_names(program: str) -> list[str]:
    """The cases of programs/<program>.py, without importing it (it belongs under mpirun)."""
    tree = ast.parse((PROGRAMS / f"{program}.py").read_text())
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("case_")]


def launch(n: int, program: str, **options: Any) -> Result:
    """Run programs/<program>.py on n ranks."""
    return run_ranks(n, PROGRAMS / f"{program}.py", **options)


def assert_passed(result: Result, case: str) -> None:
    """Every rank finished the case."""
    missing = [rank for rank, out in enumerate(result.ranks_out) if f"ok {case}\n" not in out]
    assert not missing, f"{case} not finished on ranks {missing}\n{result}"
