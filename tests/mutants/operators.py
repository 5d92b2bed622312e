"""Small faults that somebody might have made: where in a source each of a fixed list of them can stand.

Invariants: standard library only; a mutant differs from its source in one expression or statement, and is valid Python.
Left alone is what no test can see: docstrings, annotations, `assert`, the text and arguments of what is raised, and
imports for type checkers.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Break: ast.Continue, ast.Continue: ast.Break,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
_NAMES |= {"add_": "sub_", "sub_": "add_", "mul_": "div_", "div_": "mul_"}
_PLAIN = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.NamedExpr)
_HIDDEN = ("_from", "annotation", "returns", "exc", "decorator_list")


@dataclass(frozen=True)
class Mutant:
    """One fault in one file.

    Attributes:
        path: of the file, below the repository; line: where it stands; function: in which it stands, dotted.
        operator: of the list above; before, after: what stood there and what stands there now, as Python.
        start, end: the bytes of the source that `after` replaces; key: names it whatever else changes in the file.
    """

    path: str
    line: int
    function: str
    operator: str
    before: str
    after: str
    start: int
    end: int
    key: str

    def apply(self, source: bytes) -> bytes:
        """The file with the fault."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """All of them, in the order of the file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    seen: dict[str, int] = {}
    for function, node, operator, after in _changes(ast.parse(source), ""):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = source[start:end].decode()
        text = f"{path} {function} {operator} {' '.join(before.split())} {after}"
        seen[text] = seen.get(text, 0) + 1
        key = hashlib.sha256(f"{text} {seen[text]}".encode()).hexdigest()[:16]
        found.append(Mutant(path, node.lineno, function, operator, before, after, start, end, key))
    return found


def _changes(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST, str, str]]:
    """The function, the node that is replaced, the operator, and what stands in its place."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".removeprefix(".")
    for operator, changed in _of(node):
        text = ast.unparse(changed)
        yield function, node, operator, f"({text})" if isinstance(node, ast.expr) else text
    if isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(node.test, _PLAIN):
        yield function, node.test, "condition", f"(not ({ast.unparse(node.test)}))"
    for child in _children(node):
        yield from _changes(child, function)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
        return
    if isinstance(node, ast.Raise):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    for name, value in ast.iter_fields(node):
        if name in _HIDDEN:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context):
                yield child


def _of(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPS:
        yield "operator", _with(node, op=_SWAPS[type(node.op)]())
    if isinstance(node, ast.AugAssign) and type(node.op) in _SWAPS:
        yield "operator", _with(node, op=_SWAPS[type(node.op)]())
    if isinstance(node, ast.Compare):
        for place, op in enumerate(node.ops):
            if type(op) in _SWAPS:
                ops = [_SWAPS[type(op)]() if i == place else one for i, one in enumerate(node.ops)]
                yield "comparison", _with(node, ops=ops)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "sign", node.operand
    if isinstance(node, ast.Constant):
        yield from _constants(node)
    if isinstance(node, ast.Name) and node.id in _NAMES:
        yield "name", ast.Name(_NAMES[node.id])
    if isinstance(node, ast.Attribute) and node.attr in _NAMES:
        yield "name", _with(node, attr=_NAMES[node.attr])
    if isinstance(node, ast.IfExp):
        yield "condition", _with(node, body=node.orelse, orelse=node.body)
    if isinstance(node, ast.Break | ast.Continue):
        yield "loop", _SWAPS[type(node)]()
    if isinstance(node, ast.Return) and not _is_nothing(node.value):
        yield "return", ast.Return(ast.Constant(None))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "left out", ast.Pass()
    if isinstance(node, ast.Assign) and all(
        isinstance(one, ast.Attribute | ast.Subscript) for one in node.targets
    ):
        yield "left out", ast.Pass()


def _constants(node: ast.Constant) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node.value, bool):
        yield "constant", ast.Constant(not node.value)
    elif isinstance(node.value, int | float):
        yield "constant", ast.Constant(node.value + 1)


def _is_nothing(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value in (None, False))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
