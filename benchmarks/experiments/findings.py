"""What an experiment found: its bars and its figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from report import Bar


@dataclass(slots=True)
class Findings:
    """What an experiment found."""

    bars: list[Bar] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def bar(self, name: str, value: float, unit: str, least: float) -> None:
        """A figure that must reach something."""
        self.bars.append(Bar(name, value, unit, least, "higher"))

    def most(self, name: str, value: float, unit: str, most: float) -> None:
        """A figure that must not go beyond something; a control's must stay so low."""
        self.bars.append(Bar(name, value, unit, most, "lower"))
