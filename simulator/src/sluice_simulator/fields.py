"""Reading one mapping of a scenario strictly: every key known, every value in its range, every refusal one line.

Owns the words of a refusal (`file: key: problem`). Knows no key by name.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from sluice_operator.errors import InvalidSpec
from sluice_operator.resource.units import parse_duration_us
from sluice_simulator.errors import InvalidInput

T = TypeVar("T")

# Above any trace that is replayed, and far below where integer microseconds or a day of steps would hurt.
MOST_DURATION_US = 366 * 24 * 3_600_000_000
MOST_TOKENS = 1 << 31


class Fields:
    """One mapping while it is read: what is taken is known, and `end` refuses the rest."""

    def __init__(self, value: object, file: str, path: str = "") -> None:
        """Take in a mapping; None is an empty one.

        Raises:
            InvalidInput: it is none.
        """
        self.file = file
        self.path = path
        if not isinstance(value, dict | None):
            raise self.problem("", f"must be a mapping, not {kind_of(value)}")
        self._left: dict[str, object] = dict(value or {})
        self._known: list[str] = []

    def problem(self, key: str, problem: str) -> InvalidInput:
        """The refusal of one key, to be raised."""
        return InvalidInput(self.file, self.place(key), problem)

    def place(self, key: str) -> str:
        """The key with all that it lies in."""
        return ".".join(part for part in (self.path, key) if part)

    def has(self, key: str) -> bool:
        """Whether the key is there, and not null."""
        return self._left.get(key) is not None

    def take(self, key: str) -> object:
        """The value of a key, None where it is absent."""
        self._known.append(key)
        return self._left.pop(key, None)

    def section(self, key: str) -> Fields:
        """The mapping below a key; an empty one where it is absent."""
        return Fields(self.take(key), self.file, self.place(key))

    def sections(self, key: str) -> list[Fields]:
        """The mappings of a list, at least one."""
        value = self.take(key)
        if not isinstance(value, list) or not value:
            raise self.problem(key, "must be a list of at least one")
        return [Fields(item, self.file, f"{self.place(key)}[{index}]") for index, item in enumerate(value)]

    def text(self, key: str, default: str | None = None) -> str:
        """A text that is not empty."""
        value = self._required(key, default)
        if not isinstance(value, str) or not value:
            raise self.problem(key, f"must be a text, not {shown(value)}")
        return value

    def choice(self, key: str, choices: Iterable[str], default: str | None = None) -> str:
        """One of a few words."""
        value = self._required(key, default)
        known = list(choices)
        if value not in known:
            raise self.problem(key, f"must be one of {', '.join(known)}, not {shown(value)}")
        return str(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.problem(key, f"must be true or false, not {shown(value)}")
        return value

    def whole(self, key: str, least: int, most: int, default: int | None = None) -> int:
        """A whole number within bounds."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.problem(key, f"must be a whole number, not {shown(value)}")
        return self._bounded(key, value, least, most)

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        """A finite number within bounds."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.problem(key, f"must be a number, not {shown(value)}")
        return float(self._bounded(key, value, least, most))

    def duration_us(
        self, key: str, default: int | None = None, *, least_us: int = 0, most_us: int = MOST_DURATION_US
    ) -> int:
        """A duration such as 150ms or 1m30s, in microseconds."""
        if default is not None and not self.has(key):
            self.take(key)
            return default
        value = self._required(key, None)
        if not isinstance(value, str):
            raise self.problem(key, f"must be a duration such as 150ms, not {shown(value)}")
        try:
            duration_us = parse_duration_us(value, key)
        except InvalidSpec as error:
            raise self.problem(key, str(error).partition(": ")[2]) from error
        if not least_us <= duration_us <= most_us:
            bound = "must be positive" if duration_us < least_us else f"must be at most {most_us // 1_000_000} s"
            raise self.problem(key, f"{bound}, not {value}")
        return duration_us

    def optional(self, key: str, read: Callable[[str], T]) -> T | None:
        """What `read` makes of a key, None where it is absent or null."""
        if self.has(key):
            return read(key)
        self.take(key)
        return None

    def end(self) -> None:
        """Refuse what nobody took.

        Raises:
            InvalidInput: a key is unknown.
        """
        if self._left:
            key = min(self._left)
            raise self.problem(key, f"is not a known key; known are {', '.join(sorted(set(self._known)))}")

    def _required(self, key: str, default: object) -> object:
        value = self.take(key)
        if value is None:
            value = default
        if value is None:
            alike = difflib.get_close_matches(key, [one for one in self._left if one not in self._known], 1)
            raise self.problem(key, f"is missing; there is {alike[0]}, which is not known" if alike else "is missing")
        return value

    def _bounded(self, key: str, value: float, least: float, most: float) -> int:
        if not least <= value <= most:
            raise self.problem(key, f"must be {_plain(least)} to {_plain(most)}, not {value:,}")
        return value  # type: ignore[return-value]  # as it came: whole where whole numbers are asked for


def kind_of(value: object) -> str:
    """What a value is, in YAML's words."""
    names = {
        dict: "a mapping",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")


def shown(value: object) -> str:
    """A value as a message quotes it."""
    if isinstance(value, (dict, list)) or value is None:
        return kind_of(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(number: float) -> str:
    """A bound without an exponent: 0.000001, 100,000."""
    return f"{number:,}" if number >= 1 or not number else f"{number:f}".rstrip("0")
