"""The few bits of Markdown that generated pages are made of."""

from __future__ import annotations

import json
from collections.abc import Iterable

import yaml


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


def code(value: object) -> str:
    """A value as YAML would have it, in a code span that a table can hold."""
    plain = isinstance(value, str) and yaml.safe_load(value) == value
    text = value if plain else json.dumps(value, ensure_ascii=False)
    return f"`{text}`".replace("|", "\\|")
