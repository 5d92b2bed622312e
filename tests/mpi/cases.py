"""How tests run the programs of `programs/`.

Many cases in one launch: a program of `case_*` functions, run by every rank together, in order of definition.

A launch costs a second, a case milliseconds. Every rank prints `ok <case>` after each; the tests ask for these lines,
so a case that a rank never reached fails by name. An exception ends the whole job, as in any run, and the cases behind
the one that failed are run in a launch of their own.
"""

import ast
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.ranks import OWN, RanksHung, Result, find_mpi, run_ranks

PROGRAMS = Path(__file__).parent / "programs"
# Not over the network of emulated hosts, which another test may take down meanwhile.
TCP = ("--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo")
Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # function, arguments, options; all of it fit for JSON
MOST_LAUNCHES = 5  # of one program: where MPI itself is broken, every case fails


def starts(case: Callable[..., None]) -> Callable[..., None]:
    """Marks a case that the others of its program need: it runs in every launch, whichever cases are asked for."""
    case.starts = True  # type: ignore[attr-defined]
    return case


def run_cases(namespace: Mapping[str, Any]) -> None:
    """Called at the end of a program: runs its cases (those that the command line names) between barriers, then the
    ordered end."""
    from mpitrain.mpi import runtime

    rt = runtime.start()
    chosen = sys.argv[1:]
    for name, function in list(namespace.items()):
        if not name.startswith("case_"):
            continue
        if not chosen or name in chosen or getattr(function, "starts", False):
            rt.role = name
            function(rt)
            rt.barrier()
            print(f"ok {name}", flush=True)
    rt.finish()


def raises(error: type[BaseException], text: str, function: Callable[[], Any]) -> None:
    """In a case: `function()` raises `error`, whose message has `text`."""
    try:
        function()
    except error as failure:
        assert text in str(failure), failure
    else:
        raise AssertionError(f"accepted, wanted {error.__name__}: {text}")


def case_names(program: str) -> list[str]:
    """The cases of programs/<program>.py, without importing it (it belongs under mpirun)."""
    tree = ast.parse((PROGRAMS / f"{program}.py").read_text())
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("case_")]


def call(function: str, *arguments: Any, **options: Any) -> Call:
    """What `run_calls` is to call in a program."""
    return function, arguments, options


def run_calls(namespace: Mapping[str, Any]) -> Any:
    """Called at the end of a program: calls its functions as `launch_calls` says; returns what the last call did."""
    returned = None
    for function, arguments, options in json.loads(sys.argv[2]):
        returned = namespace[function](*arguments, **options)
    return returned


def launch_calls(n: int, program: str, path: Path, calls: Sequence[Call], **options: Any) -> Result:
    """Run programs/<program>.py, which is given a folder and what to call, on n ranks."""
    return launch_program(n, program, str(path), json.dumps(calls), **options)


def launch_program(n: int, program: str, *arguments: str, **options: Any) -> Result:
    """Run programs/<program>.py with these arguments on n ranks."""
    python = str(find_mpi(options.get("mpi", OWN))[0])
    return run_ranks(n, [python, str(PROGRAMS / f"{program}.py"), *arguments], **options)


def launch(n: int, program: str, cases: Sequence[str] = (), **options: Any) -> Result:
    """Run the cases of programs/<program>.py on n ranks, all of them if none are named."""
    left, whole = list(cases or case_names(program)), None
    for _ in range(MOST_LAUNCHES):
        try:
            result = launch_program(n, program, *left, **options)
        except RanksHung as hung:
            result = hung.result
        whole = result if whole is None else _join(whole, result)
        while left and is_passed(result, left[0]):
            del left[0]
        del left[:1]  # the one that failed
        if not left:
            break
    assert whole is not None
    return whole


def _join(one: Result, other: Result) -> Result:
    return dataclasses.replace(
        one,
        code=one.code or other.code,
        stdout=one.stdout + other.stdout,
        stderr=one.stderr + other.stderr,
        ranks_out=tuple(a + b for a, b in zip(one.ranks_out, other.ranks_out, strict=True)),
        ranks_err=tuple(a + b for a, b in zip(one.ranks_err, other.ranks_err, strict=True)),
        seconds=one.seconds + other.seconds,
    )


def is_passed(result: Result, case: str) -> bool:
    return all(f"ok {case}\n" in out for out in result.ranks_out)


def assert_passed(result: Result, case: str) -> None:
    """Every rank finished the case."""
    missing = [rank for rank, out in enumerate(result.ranks_out) if f"ok {case}\n" not in out]
    assert not missing, f"{case} not finished on ranks {missing}\n{result}"
