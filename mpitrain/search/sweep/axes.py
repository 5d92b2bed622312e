"""What a sweep varies: names of options or of a job file's parameters, each with values to try or a law to draw from.

Invariants: standard library only. A value is the text that stands on the command line of `train`. A draw is a function
of seed, configuration and name alone, so a sweep that is started again draws the same configurations.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mpitrain.errors import UsageError
from mpitrain.values import Value, names, nearest, parse, register, registered

KIND = "distribution"
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\(")
_OPENING, _CLOSING = "([{", ")]}"


class Distribution(Value):
    """A law from which the values of one option are drawn."""

    low: float
    high: float

    def check(self) -> None:
        if not self.low < self.high or not all(map(math.isfinite, (self.low, self.high))):
            raise UsageError(
                f"{self.name}: low must be below high, and both finite, got {self.low} and {self.high}"
            )

    def draw(self, unit: float) -> str:
        """The text of the value at `unit`, from 0 up to 1, of the law's cumulative distribution."""
        raise NotImplementedError


@register(KIND, "uniform")
class Uniform(Distribution):
    """A number between `low` and `high`, all equally likely."""

    low: float
    high: float

    def draw(self, unit: float) -> str:
        return _number(self.low + unit * (self.high - self.low))


@register(KIND, "log_uniform")
class LogUniform(Distribution):
    """A number between `low` and `high` whose logarithm is uniform: as many between 0.001 and 0.01 as between 0.01 and
    0.1."""

    low: float
    high: float

    def check(self) -> None:
        super().check()
        self.hold("low", self.low > 0, "must be greater than 0")

    def draw(self, unit: float) -> str:
        return _number(self.low * (self.high / self.low) ** unit)


@register(KIND, "integers")
class Integers(Distribution):
    """A whole number from `low` to `high`, both included; with `log`, small ones are as likely as in `log_uniform`."""

    low: int
    high: int
    log: bool = False

    def check(self) -> None:
        super().check()
        if self.log and self.low < 1:
            raise UsageError(f"integers: with log, low must be at least 1, got {self.low}")

    def draw(self, unit: float) -> str:
        below, above = self.low - 0.5, self.high + 0.5
        value = below * (above / below) ** unit if self.log else below + unit * (above - below)
        return str(min(self.high, max(self.low, round(value))))


def _number(value: float) -> str:
    return f"{value:.6g}"


@dataclass(frozen=True)
class Axis:
    """One thing that is varied.

    Attributes:
        name: of an option of `train` ("batch_size") or of a parameter of the job file ("model.hidden").
        values: to try, in this order; empty where there is a `law` to draw from.
        law: as text, such as "log_uniform(low=0.001,high=0.1)".
    """

    name: str
    values: tuple[str, ...] = ()
    law: str = ""

    @property
    def distribution(self) -> Distribution | None:
        """The law as a value."""
        found = parse(self.law, KIND) if self.law else None
        assert found is None or isinstance(found, Distribution)
        return found

    def draw(self, seed: int, index: int) -> str:
        """The value of this axis in the drawn configuration of that number."""
        chance = random.Random(f"{seed}/{index}/{self.name}")
        law = self.distribution
        return chance.choice(self.values) if law is None else law.draw(chance.random())


def read_axis(text: str) -> Axis:
    """The axis of a `--vary` text: "lr=0.001,0.01", "strategy=allreduce(),async(servers=2)", "lr=log_uniform(1e-4, 1)"
    or, as JSON, 'model.sizes=[[64, 64], [128]]'.

    Raises:
        UsageError: there is no value, one stands twice, or the law is not known or makes no sense.
    """
    name, sign, given = text.partition("=")
    name, given = name.strip().removeprefix("--"), given.strip()
    name = name if "." in name else name.replace("-", "_")
    if not (sign and name and given):
        raise UsageError(
            f'--vary {text!r}: say NAME=VALUE,VALUE,... or NAME=LAW, such as "lr=0.001,0.01" or '
            '"lr=log_uniform(1e-4, 1e-1)"'
        )
    if (call := _CALL.match(given)) and given.endswith(")"):
        known = names(KIND)
        if call[1] in known and len(_split(given)) == 1:
            return Axis(name, law=str(parse(given, KIND)))
        if call[1] not in known and difflib.get_close_matches(call[1], known, n=1, cutoff=0.75):
            raise UsageError(f"--vary {text!r}: there is no law {call[1]!r}{nearest(call[1], known)}")
    values = tuple(_listed(text, given))
    if twice := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
        raise UsageError(f"--vary {text!r}: the value {twice[0]} stands there twice")
    return Axis(name, values)


def _listed(text: str, given: str) -> Iterator[str]:
    if given.startswith("["):
        from mpitrain.options import show

        try:
            found = json.loads(given)
        except ValueError as error:
            raise UsageError(f"--vary {text!r}: this is no list in JSON: {error}") from None
        yield from map(show, found)
        return
    for value in _split(given):
        if not value:
            raise UsageError(f"--vary {text!r}: there is nothing between two commas")
        yield value


def _split(given: str) -> list[str]:
    """At the commas that stand outside all brackets and quotes."""
    found, depth, quote = [""], 0, ""
    for letter in given:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += (letter in _OPENING) - (letter in _CLOSING) if not quote else 0
        if letter == "," and depth == 0 and not quote:
            found.append("")
        else:
            found[-1] += letter
    return [one.strip() for one in found]


def rows() -> list[tuple[str, str]]:
    """How each law is written, and what it does, for help texts."""
    found = []
    for cls in registered(KIND):
        parts = [
            f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default!r}"
            for f in dataclasses.fields(cls)
        ]
        summary = " ".join((cls.__doc__ or "").split())
        found.append((f"{cls.name}({', '.join(parts)})", summary))
    return found
