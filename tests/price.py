"""What a feature costs here: how many files, questions, parameters and lines the package is made of, by counting.

`make price` prints each measure and keeps them in `tests/price.txt`, which is committed; `--since COMMIT` counts what a
change touched: package files, and lines of code in and out. Invariants: only `mpitrain/` is counted, and only by
its syntax, so that nothing is imported; line length and formatter stay those of `setup.cfg` and `pyproject.toml`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mpitrain"
# A feature of a job, and the words by which the package speaks of it.
FEATURES = {
    "gradient_noise": r"gradient_noise|GradientNoise",
    "clipping": r"clip",
    "ema": r"\bema|_ema|\bEMA|ModelAverage|Averaged",
    "accumulate": r"accumulat",
    "schedules": r"schedule(?!r_|d\b)",
}
_MOST_PARAMETERS, _MOST_FILES, _MOST_ATTRIBUTES = 8, 20, 15
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> set[int]:
    """The numbers of the lines that hold code: no blank line, no comment alone, no docstring."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *_DEFINITIONS))
            and ast.get_docstring(node, clean=False) is not None
        ):
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstrings


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All of them, methods and those within others, too."""
    return (node for node in ast.walk(tree) if isinstance(node, _DEFINITIONS))


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without `self` and `cls`; `*` and `**` count as one each."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return (
        len([name for name in names if name not in ("self", "cls")]) + bool(given.vararg) + bool(given.kwarg)
    )


def attributes(owner: ast.ClassDef) -> set[str]:
    """What its methods assign to `self`, and its fields with a type."""
    found = {
        one.target.id
        for one in owner.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    for node in ast.walk(owner):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            found.add(node.attr)
    return found


def strategy_classes(trees: dict[Path, ast.Module]) -> set[str]:
    """`Strategy`, and the classes of `strategies/` that come from it, whatever the number of steps."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"Strategy"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def asks_which_strategy(node: ast.AST, classes: set[str]) -> bool:
    """`isinstance`, `issubclass`, `type(x) is`, a `case`, or a comparison of a family or a strategy's name."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
    ):
        return len(node.args) == 2 and bool(_names(node.args[1]) & classes)
    if isinstance(node, ast.MatchClass):
        return bool(_names(node.cls) & classes)
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        if any(_is_name_of_strategy(side) for side in sides):
            return True
        by_type = any(
            isinstance(side, ast.Call) and isinstance(side.func, ast.Name) and side.func.id == "type"
            for side in sides
        )
        return by_type and bool(set().union(*map(_names, sides)) & classes)
    return False


def _is_name_of_strategy(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr not in ("family", "name", "__name__"):
        return False
    text = ast.unparse(node.value)
    return node.attr == "family" or "strategy" in text.lower()


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} | {
        one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)
    }


def _outside_asserts(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.Assert):
            yield child
            yield from _outside_asserts(child)


def measure() -> dict[str, int]:
    """Each measure by its name."""
    texts = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    every = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = strategy_classes(trees)
    defined = [function for tree in trees.values() for function in functions(tree)]
    folders = Counter(path.parent for path in texts)
    lazy = {
        id(node): node
        for function in defined
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }
    found = {
        f"files that speak of {name}": sum(bool(re.search(words, text)) for text in texts.values())
        for name, words in FEATURES.items()
    }
    return found | {
        "places that ask whether a validation is due": sum(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "is_due"
            and "validations" in ast.unparse(node.func.value)
            for node in every
        ),
        "functions why_not_*": sum(function.name.startswith("why_not_") for function in defined),
        "places outside asserts that ask for a strategy's class, family or name": sum(
            asks_which_strategy(node, classes) for tree in trees.values() for node in _outside_asserts(tree)
        ),
        "getattr(strategy, ...)": sum(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
            and "strategy" in ast.unparse(node.args[0]).lower()
            for node in every
        ),
        f"functions above {_MOST_PARAMETERS} parameters": sum(
            num_parameters(function) > _MOST_PARAMETERS for function in defined
        ),
        f"classes above {_MOST_ATTRIBUTES} attributes": sum(
            len(attributes(node)) > _MOST_ATTRIBUTES for node in every if isinstance(node, ast.ClassDef)
        ),
        f"folders above {_MOST_FILES} files": sum(number > _MOST_FILES for number in folders.values()),
        "lazy imports inside functions": len(lazy),
        "Any": sum(isinstance(node, ast.Name) and node.id == "Any" for node in every),
        "files": len(texts),
        "lines of code": sum(len(code_lines(text)) for text in texts.values()),
    }  # fmt: skip


def since(commit: str) -> str:
    """What has changed since a commit: package files, and lines of code in and out of each."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True
        ).stdout

    rows, total = [], [0, 0]
    for name in git("diff", "--name-only", "--no-renames", commit, "--", "mpitrain").split():
        if name.endswith(".py"):
            old = git("show", f"{commit}:{name}") if git("ls-tree", commit, name) else ""
            new = (ROOT / name).read_text() if (ROOT / name).exists() else ""
            counts = [
                Counter(text.splitlines()[number - 1].strip() for number in code_lines(text))
                for text in (old, new)
            ]
            gone, come = (sum((counts[one] - counts[1 - one]).values()) for one in (0, 1))
            if gone or come:
                rows.append(f"{come:+6} {-gone:6}  {name}")
                total = [total[0] + come, total[1] + gone]
    return "\n".join([*rows, f"{total[0]:+6} {-total[1]:6}  lines of code in {len(rows)} package files"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--since", metavar="COMMIT", help="count what has changed since this commit instead")
    arguments = parser.parse_args()
    if arguments.since:
        print(since(arguments.since))
    else:
        table = "".join(f"{number:6}  {what}\n" for what, number in measure().items())
        print(table, end="")
        (ROOT / "tests" / "price.txt").write_text(table)


if __name__ == "__main__":
    main()
