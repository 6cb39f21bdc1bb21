"""docs/metrics.md as data: each series with its type, its labels and their values; and a page, as the same."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.metrics_core import Metric

DOCS = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
_LINE = re.compile(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \|(.*)$", re.MULTILINE)
_LABEL = re.compile(r"(\w+)(?: \(([^)]*)\))?")


@dataclass(frozen=True)
class Line:
    """One series, as it is described."""

    kind: str
    labels: dict[str, frozenset[str] | None]
    """Values by label; None: they are listed elsewhere."""
    may_be_absent: bool


def documented(section: str) -> dict[str, Line]:
    """The lines of one section, by name."""
    text = DOCS.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines: dict[str, Line] = {}
    for name, kind, labels, rest in _LINE.findall(text):
        assert name not in lines, f"{name} has two lines"
        found = {} if labels.strip() == "–" else dict(_LABEL.findall(labels))
        values = {label: frozenset(given.split(", ")) if given else None for label, given in found.items()}
        lines[name] = Line(kind, values, "absent" in rest)
    return lines


def check(section: str, prefix: str, families: Iterable[Metric], others: dict[str, frozenset[str]]) -> None:
    """Every series of a page has its line, every line its series; types, labels and their values are those described.

    `others` has the values of labels that the docs list elsewhere.
    """
    lines = documented(section)
    exposed = {f"{one.name}_total" if one.type == "counter" else one.name: one for one in families}
    exposed = {name: one for name, one in exposed.items() if name.startswith(prefix)}
    assert sorted(exposed.keys() - lines.keys()) == [], "series without a line in docs/metrics.md"
    stale = {name for name in lines.keys() - exposed.keys() if not lines[name].may_be_absent}
    assert sorted(stale) == [], "lines in docs/metrics.md without a series"
    for name, family in exposed.items():
        line = lines[name]
        assert family.documentation, f"{name} has no HELP text"
        assert family.type == line.kind, name
        for sample in family.samples:
            labels = {label: value for label, value in sample.labels.items() if label != "le"}
            assert labels.keys() == line.labels.keys(), name
            for label, value in labels.items():
                known = line.labels[label] or others[label]
                assert value in known, f"{name} has the undocumented {label} {value!r}"
