"""Kinds of values: how each is read from text and from TOML. Every failure is a ValueError that completes "must be …"."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class Kind(Struct, frozen=True):
    """``metavar`` stands for the value in help; ``parse`` reads text (flags, environment); ``accept`` reads a TOML value.

    ``repeated``: the value is a tuple; a flag may be given many times, the environment separates by commas, TOML has an array.
    ``choices``: the only values there are, when they can be listed. ``switch``: a flag without a value.
    """

    metavar: str
    parse: Callable[[str], Any]
    accept: Callable[[object], Any]
    repeated: bool = False
    choices: tuple[str, ...] = ()
    switch: bool = False


def integer(low: int, high: int | None = None) -> Kind:
    """A decimal integer from ``low`` to ``high``, both included."""
    wanted = f"a whole number from {low} to {high}" if high is not None else f"a whole number of at least {low}"

    def accept(value: object) -> int:
        # bool is an int in Python; ``port = true`` is still a mistake.
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            raise ValueError(wanted)
        return value

    def parse(text: str) -> int:
        if re.fullmatch(r"[+-]?[0-9]{1,18}", text) is None:
            raise ValueError(wanted)
        return accept(int(text))

    return Kind("N", parse, accept)


def number(low: float, high: float) -> Kind:
    """A decimal number from ``low`` to ``high``, both included."""
    return _decimal("X", f"a number from {low:g} to {high:g}", lambda value: low <= value <= high)


def seconds() -> Kind:
    """A duration in seconds, zero or more, finite."""
    return _decimal("SECONDS", "a number of seconds, zero or more", lambda value: 0 <= value < math.inf)


def _decimal(name: str, wanted: str, fits: Callable[[float], bool]) -> Kind:
    def accept(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not fits(value):
            raise ValueError(wanted)
        return float(value)

    def parse(text: str) -> float:
        if re.fullmatch(r"[+-]?[0-9]{1,12}(\.[0-9]{1,9})?", text) is None:
            raise ValueError(wanted)
        return accept(float(text))

    return Kind(name, parse, accept)


def size() -> Kind:
    """A number of bytes above zero: an integer, or text with a unit (kB MB GB TB are powers of 1000, KiB MiB GiB TiB of 1024)."""
    wanted = "a size above zero, such as 4GiB, 500MB or a number of bytes"

    def parse(text: str) -> int:
        found = re.fullmatch(r"([0-9]{1,15})(?:\.([0-9]{1,3}))? ?(?:([kmgt]i?)?b)?", text.strip().lower())
        if found is None or (found[2] and not found[3]):
            raise ValueError(wanted)
        digits = found[2] or ""
        value: int = int(found[1] + digits) * _UNITS[found[3] or ""] // 10 ** len(digits)
        if value <= 0:
            raise ValueError(wanted)
        return value

    def accept(value: object) -> int:
        if isinstance(value, str):
            return parse(value)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(wanted)
        return value

    return Kind("SIZE", parse, accept)


_FILLING = re.compile(r"([1-9][0-9]{0,6})(?::([1-9][0-9]{0,6}))?")


def filling() -> Kind:
    """``TOKENS`` or ``TOKENS:COST``, whole numbers above zero; it stays text, see read_filling."""

    def accept(value: object) -> str:
        if not isinstance(value, str) or _FILLING.fullmatch(value) is None:
            raise ValueError("TOKENS or TOKENS:COST, such as 256:320")
        return value

    return Kind("TOKENS:COST", accept, accept)


def read_filling(value: str) -> tuple[int, int]:
    """(tokens, cost) of what ``filling`` takes."""
    tokens, _, cost = value.partition(":")
    return int(tokens), int(cost or tokens)


def text(metavar: str = "TEXT") -> Kind:
    """Any text but the empty one: an empty value is nearly always a variable that was not set."""

    def accept(value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError("text that is not empty")
        return value

    return Kind(metavar, accept, accept)


def origin() -> Kind:
    """An origin as browsers send it, ``https://host`` or ``https://host:port``, or ``*`` for all of them."""
    wanted = "an origin such as https://example.org or http://localhost:3000, without a path, or *"

    def accept(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#@]+", value):
            raise ValueError(wanted)
        return value

    return Kind("ORIGIN", accept, accept)


def url() -> Kind:
    """An ``http`` or ``https`` URL with a host, without query and fragment, nor a password, since settings are shown."""
    wanted = "a URL such as http://localhost:4318, without a password"

    def accept(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", value):
            raise ValueError(wanted)
        return value

    return Kind("URL", accept, accept)


def choice(*names: str) -> Kind:
    """One of ``names``, spelt exactly."""
    wanted = f"one of {', '.join(names)}"

    def accept(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError(wanted)
        return value

    return Kind(f"[{'|'.join(names)}]", accept, accept, choices=names)


def switch() -> Kind:
    """On or off: a flag that is given or not; ``true`` or ``false`` in text."""

    def accept(value: object) -> bool:
        if value is True or value is False:
            return value
        raise ValueError("true or false")

    def parse(text: str) -> bool:
        if text not in ("true", "false"):
            raise ValueError("true or false")
        return text == "true"

    return Kind("true|false", parse, accept, choices=("true", "false"), switch=True)


def many(kind: Kind) -> Kind:
    """A tuple of values of ``kind``, none twice."""

    def distinct(values: Sequence[Any]) -> tuple[Any, ...]:
        if len(set(values)) != len(values):
            raise ValueError("without repetitions")
        return tuple(values)

    def parse(text: str) -> tuple[Any, ...]:
        return distinct([kind.parse(part.strip()) for part in text.split(",")])

    def accept(value: object) -> tuple[Any, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence) or not value:
            raise ValueError("an array that is not empty")
        return distinct([kind.accept(part) for part in value])

    return Kind(kind.metavar, parse, accept, repeated=True, choices=kind.choices)
