"""What a process and its children hold by the kernel's own account, and whether a figure grows: medians of slopes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

_KIB = 1024


@dataclass(frozen=True, slots=True)
class Held:
    """One sample of a process and all of its descendants."""

    rss_bytes: int
    pss_bytes: int
    anonymous_bytes: int
    """What is the process's own: no file lies behind it."""
    threads: int
    processes: int
    descriptors: dict[str, int] = field(default_factory=dict)
    """Open ones by kind: socket, pipe, file, and the kernel's own (`eventpoll`, `eventfd`)."""

    @property
    def num_descriptors(self) -> int:
        return sum(self.descriptors.values())


def held_by(pid: int) -> Held:
    """A sample now.

    Raises:
        ProcessLookupError: the process has ended.
    """
    sums: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    threads = processes = 0
    for one in _with_descendants(pid):
        try:
            rollup = Path(f"/proc/{one}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
            status = Path(f"/proc/{one}/status").read_text(encoding="utf-8")
            kinds.update(_kind(link) for link in Path(f"/proc/{one}/fd").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            if one == pid:
                raise ProcessLookupError(pid) from None
            continue  # a child that has ended meanwhile
        for line in rollup:
            name, value, _ = line.split()
            sums[name] += int(value) * _KIB
        threads += int(status.partition("\nThreads:")[2].split(maxsplit=1)[0])
        processes += 1
    return Held(sums["Rss:"], sums["Pss:"], sums["Anonymous:"], threads, processes, dict(kinds))


def _with_descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, children.read_text(encoding="ascii").split())
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def _kind(link: Path) -> str:
    try:
        target = str(link.readlink())
    except (FileNotFoundError, ProcessLookupError):
        return "closing"
    if target.startswith("/"):
        return "file"
    kind, _, name = target.partition(":")
    return name.strip("[]") if kind == "anon_inode" else kind


@dataclass(frozen=True, slots=True)
class Slope:
    """How fast a figure grows, and between which bounds all pairs of its sixths say that it does."""

    per_hour: float
    low: float
    high: float


def slope(times_s: Sequence[float], values: Sequence[float]) -> Slope:
    """Theil-Sen: the median of the slopes of all pairs, which a few odd samples do not move.

    Neighbouring samples repeat one another, so that an interval that takes them for independent is far too narrow: here
    it holds all slopes between the medians of six stretches.
    """
    pairs = list(combinations(zip(times_s, values, strict=True), 2))
    per_hour = 3600 * statistics.median((b - a) / (t - s) for (s, a), (t, b) in pairs)
    stretch = max(1, len(values) // 6)
    starts = range(0, stretch * (len(values) // stretch), stretch)
    middles = [
        (statistics.median(times_s[at : at + stretch]), statistics.median(values[at : at + stretch])) for at in starts
    ]
    coarse = sorted(3600 * (b - a) / (t - s) for (s, a), (t, b) in combinations(middles, 2))
    return Slope(per_hour, coarse[0], coarse[-1])
