"""What each floor of the package imports, as `tests/test_walls.py` reads it from the source."""

from __future__ import annotations

import ast

from tests.test_walls import FLOORS, PACKAGE, _imports, _place


def imports_of(*places: str) -> list[str]:
    """The places of the package that files of these places import, themselves left out."""
    known = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE).as_posix()
        if _place(relative) in places:
            for name, _, _ in _imports(relative, ast.parse(path.read_text(encoding="utf-8"))):
                if name.startswith("mpitrain.") and name != "mpitrain.__version__":
                    known.add(name.split(".")[1])
    return sorted(known - set(places))


def listed() -> str:
    """A command for each floor, the highest first."""
    lines = ["```sh"]
    for floor in reversed(FLOORS[:-1]):
        words = ", ".join(repr(place) for place in floor)
        lines.append(f'python -c "from docs.floors import imports_of; print(*imports_of({words}))"')
    return "\n".join([*lines, "```"])


SECTIONS = {"floors": listed}
