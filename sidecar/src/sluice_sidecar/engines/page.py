"""A Prometheus page, as far as it is read: the samples of some families, by name.

Owns the reading of the text (by `prometheus_client`'s own parser). A page has ten times the lines that are wanted, and
is read several times a second: the others are left out before they are parsed. A value that is no number is no sample.
Must not know what the numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

# A counter has its suffix or not, by the age of the client that wrote it; of a histogram the sums are enough.
_SUFFIXES = ("", "_total", "_sum", "_count")


class UnreadablePage(ValueError):
    """The text is no Prometheus page."""


class Page:
    """The samples of the families in `wanted`."""

    def __init__(self, text: bytes, wanted: Iterable[str]) -> None:
        """Read them.

        Raises:
            UnreadablePage: a line that is wanted cannot be read.
        """
        names = {(name + suffix).encode() for name in wanted for suffix in _SUFFIXES}
        lines = [line for line in text.splitlines() if line.split(b"{", 1)[0].split(b" ", 1)[0] in names]
        self._samples: dict[str, list[Sample]] = {}
        self.no_numbers: set[str] = set()
        """Names that had a value which is no number, and so is not here."""
        try:
            families = list(text_string_to_metric_families(b"\n".join((*lines, b"")).decode()))
        except (ValueError, KeyError, IndexError) as error:
            raise UnreadablePage(str(error)) from error
        for family in families:
            for sample in family.samples:
                if math.isfinite(sample.value):
                    self._samples.setdefault(sample.name, []).append(sample)
                else:
                    self.no_numbers.add(sample.name)

    def samples(self, *names: str) -> list[Sample]:
        """Those of the first of the names that has any; a name stands for itself with `_total`, too."""
        for name in names:
            if found := self._samples.get(name) or self._samples.get(f"{name}_total"):
                return found
        return []

    def total(self, *names: str, key: Callable[[Sample], str] | None = None) -> float | None:
        """Their sum over ranks; None where there are none. Of samples with one `key` the largest stands for all."""
        samples = self.samples(*names)
        if not samples:
            return None
        if key is None:
            return sum(sample.value for sample in samples)
        largest: dict[str, float] = {}
        for sample in samples:
            largest[key(sample)] = max(sample.value, largest.get(key(sample), -math.inf))
        return sum(largest.values())

    def count(self, *names: str, key: Callable[[Sample], str] | None = None) -> int | None:
        """The same as a whole number."""
        total = self.total(*names, key=key)
        return None if total is None else round(total)
