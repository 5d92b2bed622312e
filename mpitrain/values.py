"""Values that print as the text that makes them, and the parser that reads that text back.

Invariants: text is parsed into registered frozen dataclasses and literals; nothing is ever evaluated.
`str(value)` is command-line text without blanks (`async(servers=2)`), `repr(value)` the Python that makes it
(`Async(servers=2)`); both round-trip, and both leave out fields that have their default. A name or argument
that does not exist is answered with the nearest one and the list. Threads may read texts, and look names up, at once.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import io
import tokenize
from collections.abc import Callable, Collection
from typing import Any, ClassVar, TypeVar, dataclass_transform

from mpitrain.errors import UsageError
from mpitrain.one_at_a_time import FILLING, parse_expression

_TABLE = "mpitrain.strategies"  # it provides the values of the package's table
_registry: dict[tuple[str, str], type[Value]] = {}  # by kind and name
_providers: list[Callable[[], None]] = []  # what is yet to be called before the first look-up


@dataclasses.dataclass(frozen=True)
class Value:
    """Base of everything that can stand in a strategy text. Subclasses are frozen dataclasses whose fields
    are literals or other values.
    """

    name: ClassVar[str] = ""
    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(self, field)
        self.check()

    def check(self) -> None:
        """Raise `UsageError` when the values of the fields make no sense together. Subclasses override it."""

    def hold(self, key: str, holds: bool, otherwise: str) -> None:
        """Raise `UsageError` for the field `key` unless `holds`; `otherwise` says what it must be."""
        if not holds:
            raise UsageError(f"{self.name}: {key} {otherwise}, got {getattr(self, key)!r}")

    def hold_known(self, key: str, known: Collection[str]) -> None:
        """Raise `UsageError` for the field `key` unless its word is among those that are known."""
        word = getattr(self, key)
        if word not in known:
            raise UsageError(f"{self.name}: unknown {key} {word!r}{nearest(word, list(known))}")

    def _changed(self) -> list[tuple[str, Any]]:
        pairs = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [(field.name, value) for field, value in pairs if value != field.default]

    def __str__(self) -> str:
        return f"{self.name}({','.join(f'{key}={_plain(value)}' for key, value in self._changed())})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self._changed())})"


V = TypeVar("V", bound=type[Value])


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def register(kind: str, name: str) -> Callable[[V], V]:
    """Class decorator: make a frozen dataclass of a `Value` with fields, which keeps the short `repr`, and make it
    known to the parser as `name`, usable where a `kind` is expected."""

    def enter(cls: V) -> V:
        assert (kind, name) not in _registry, f"the {kind} {name} is registered twice"
        dataclasses.dataclass(frozen=True, repr=False)(cls)
        cls.name, cls.kind = name, kind
        _registry[kind, name] = cls
        return cls

    return enter


def provide(load: Callable[[], None]) -> None:
    """`load` registers values, and is called once, before the first look-up."""
    _providers.append(load)


def _registered() -> dict[tuple[str, str], type[Value]]:
    importlib.import_module(_TABLE)
    if _providers:
        with FILLING:  # a provider is on the list until it has done its part
            while _providers:
                _providers[0]()
                _providers.pop(0)
    return dict(_registry)  # another thread may register more meanwhile


def names(kind: str) -> list[str]:
    """Names registered for `kind`, sorted."""
    return sorted(name for of, name in _registered() if of == kind)


def registered(kind: str) -> list[type[Value]]:
    """Classes registered for `kind`, by name."""
    known = _registered()
    return [known[kind, name] for name in names(kind)]


def nearest(word: str, choices: list[str]) -> str:
    """`; did you mean 'x'?` or nothing, then the list: the tail of every 'unknown name' message."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} Known: {', '.join(choices) or 'none'}"


_KEYWORDS = ("async", "raise")  # Python's, and names of ours


def parse(text: str, kind: str) -> Value:
    """Read `name(argument=literal or value, ...)`, or a bare `name`, into the value registered under that
    name.

    Raises:
        UsageError: the text does not parse, or names something that is not registered as a `kind`.
    """
    try:
        tree = parse_expression(_free_keywords(text.strip()))
    except (SyntaxError, ValueError, tokenize.TokenError) as error:
        example = f"{names(kind)[0]}(...)" if names(kind) else "name(...)"
        raise UsageError(f"cannot read {kind} text {text!r}: expected something like {example}") from error
    value = _build(tree, text, kind)
    if not isinstance(value, Value) or value.kind != kind:
        raise UsageError(f"{text!r} is not a {kind}{nearest(getattr(value, 'name', ''), names(kind))}")
    return value


def _free_keywords(text: str) -> str:
    """Python's keywords `async` and `raise` become `async_` and `raise_` for `ast`; string literals stay."""
    tokens = [
        (
            token.type,
            f"{token.string}_" if token.type == tokenize.NAME and token.string in _KEYWORDS else token.string,
        )
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    ]
    return tokenize.untokenize(tokens).strip()


def _build(node: ast.expr, text: str, kind: str, field: dataclasses.Field[Any] | None = None) -> Any:
    """What stands at `node`: a value of `kind`, or, in a `field`, what that holds."""
    if isinstance(node, ast.Name) or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        bare = isinstance(node, ast.Name)
        name = node.id if isinstance(node, ast.Name) else node.func.id  # type: ignore[attr-defined]
        cls = _find(kind, name[:-1] if name[:-1] in _KEYWORDS else name)
        if field is not None and (cls is None or not kind):
            raise UsageError(_not_for(field, kind, name, bare, text))
        if cls is None:
            raise UsageError(f"unknown name {name!r} in {text!r}{nearest(name, names(kind))}")
        return _make(cls, [], [], text) if bare else _make(cls, node.args, node.keywords, text)  # type: ignore
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise UsageError(
            f"cannot read {ast.unparse(node)!r} in {text!r}: arguments are literals or registered values"
        ) from error


def _find(kind: str, name: str) -> type[Value] | None:
    """The class of this name and kind, or else one of another kind, which is refused by its kind."""
    known = _registered()
    return known.get((kind, name)) or next((cls for (_, other), cls in known.items() if other == name), None)


def _not_for(field: dataclasses.Field[Any], kind: str, name: str, bare: bool, text: str) -> str:
    """Why a name cannot stand in a field: mostly its quotes are missing."""
    options = str(field.type).replace(" ", "").split("|")
    unknown = f"unknown name {name!r} in {text!r}"
    quoted = f'{field.name}="{name}"'
    if kind:
        words = f". A word is written in quotes: {quoted}" if bare and field.metadata.get("words") else ""
        return unknown + nearest(name, names(kind)) + words
    if bare and "str" in options:
        return f"{unknown}: {field.name} is a word, which is written in quotes: {quoted}"
    if bare and "bool" in options and name.lower() in ("true", "false"):
        return f"{unknown}: write {field.name}={name.capitalize()}"
    return f"{unknown}: {field.name} must be {' or '.join(options)}"


def _make(cls: type[Value], positional: list[ast.expr], keywords: list[ast.keyword], text: str) -> Value:
    if any(keyword.arg is None for keyword in keywords):
        raise UsageError(f"cannot read {text!r}: ** is not allowed")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if len(positional) > len(fields):
        raise UsageError(
            f"{cls.name} takes at most {len(fields)} arguments ({', '.join(fields)}), got {len(positional)}"
        )
    arguments: dict[str, Any] = {}
    for key, node in [*zip(fields, positional), *((str(keyword.arg), keyword.value) for keyword in keywords)]:
        if key not in fields:
            raise UsageError(f"{cls.name} has no argument {key!r}{nearest(key, list(fields))}")
        if key in arguments:
            raise UsageError(f"{cls.name}: argument {key!r} is given twice")
        arguments[key] = _build(node, text, fields[key].metadata.get("kind", ""), fields[key])
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.name not in arguments
    ]
    if missing:
        raise UsageError(f"{cls.name} needs {', '.join(missing)}: write {cls.name}({missing[0]}=...)")
    return cls(**arguments)


_LITERALS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "tuple[float,...]": (tuple, list),  # its elements are the class's to check
}


def _check_type(value: Value, field: dataclasses.Field[Any]) -> None:
    """Hold a field to its annotation: a literal's type, or the `kind` of a value named in the field's
    metadata (`words`: a plain string will do as well).
    """
    given = getattr(value, field.name)
    label = f"{value.name or type(value).__name__}: {field.name}"
    if kind := field.metadata.get("kind"):
        if isinstance(given, str) and field.metadata.get(
            "words"
        ):  # or one of some words: `check` knows which
            return
        if not (isinstance(given, Value) and given.kind == kind):
            raise UsageError(f"{label} must be a {kind}, got {given!r}. Known: {', '.join(names(kind))}")
        return
    options = str(field.type).replace(" ", "").split("|")
    if given is None and "None" in options:
        return
    allowed = tuple(t for option in options for t in _LITERALS.get(option, ()))
    assert allowed, f"{label} has a type that no text can spell: {field.type}"
    if not isinstance(given, allowed) or (isinstance(given, bool) and bool not in allowed):
        raise UsageError(f"{label} must be {' or '.join(options)}, got {given!r}")


def _plain(value: object) -> str:
    return str(value) if isinstance(value, Value) else repr(value).replace(" ", "")
