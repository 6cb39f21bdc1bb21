"""The few bits of Markdown that generated pages are made of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import yaml

_MATCHES = re.compile(r"(?:type\(self\) == int \|\| )?self\.matches\('(.*)'\)")


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def flat(text: str) -> str:
    """Text that fits a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


def ms(microseconds: float) -> str:
    """A duration in whole milliseconds."""
    return f"{microseconds / 1000:,.0f} ms"


def pattern(field: dict[str, Any]) -> str:
    """The pattern that a field's text has to match: its own, or that of a rule, whose message is a sentence."""
    rules = field.get("x-kubernetes-validations", ())
    found = (_MATCHES.fullmatch(rule["rule"]) for rule in rules)
    return str(field.get("pattern") or next((match[1] for match in found if match), ""))


def code(value: object) -> str:
    """A value as YAML would have it, in a code span that a table can hold."""
    plain = isinstance(value, str) and yaml.safe_load(value) == value
    text = value if plain else json.dumps(value, ensure_ascii=False)
    return f"`{text}`".replace("|", "\\|")
