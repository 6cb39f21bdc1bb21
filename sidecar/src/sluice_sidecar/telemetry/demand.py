"""What was asked of this pod, let in or not: the signal to size by, since work that was shed is work all the same.

Owns the sums, and the rates of the last half minute. Repeated attempts are counted apart: whoever adds up the first
ones counts each piece of work once, however often it was sent. What is shed unread in a storm counts as those did that
were shed and read. Pure. Must not know why something was shed.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Literal

from sluice_sidecar.estimates.work import Work

Verdict = Literal["admitted", "shed"]
AttemptKind = Literal["first", "retry"]
VERDICTS: tuple[Verdict, ...] = ("admitted", "shed")
ATTEMPTS: tuple[AttemptKind, ...] = ("first", "retry")

# Long against the gap between two requests, short against the minutes that a new pod takes to load.
HORIZON_US = 30_000_000
_SLOTS = 10
_SLOT_US = HORIZON_US // _SLOTS
# A storm's unread are taken for what so many before them were, which is a second of those that are still read.
_TYPICAL = 250


@dataclass(slots=True)
class _Slot:
    """Three seconds of the half minute."""

    index: int
    works: dict[Verdict, Work]
    unread: int = 0


class Demand:
    """The work asked for."""

    def __init__(self) -> None:
        self.tokens_total: Counter[tuple[Verdict, AttemptKind]] = Counter()
        self.block_us_total: Counter[tuple[Verdict, AttemptKind]] = Counter()
        self._slots: deque[_Slot] = deque()
        """First attempts of the last half minute."""
        self._since_us: int | None = None
        self._read: deque[tuple[AttemptKind, Work]] = deque()
        """What was shed and read last."""
        self._typical: dict[AttemptKind, Work] = {kind: Work() for kind in ATTEMPTS}
        """The sums of that: the part that is a first attempt, and the part that is not."""

    def count(self, verdict: Verdict, work: Work, now_us: int, *, retry: bool) -> None:
        """A call was let in, or shed."""
        kind: AttemptKind = "retry" if retry else "first"
        self.tokens_total[verdict, kind] += work.tokens
        self.block_us_total[verdict, kind] += work.block_us
        # What is let in counts, whichever attempt that was; of what is shed each piece once.
        if verdict == "admitted" or not retry:
            self._slot(now_us).works[verdict].add(work)
        if verdict == "shed":
            self._read.append((kind, work))
            self._typical[kind].add(work)
            if len(self._read) > _TYPICAL:
                oldest, was = self._read.popleft()
                self._typical[oldest].add(was, -1)

    def count_unread(self, now_us: int) -> None:
        """One was shed in a storm, and nobody knows what it asked for: it counts as those before it did."""
        for kind in ATTEMPTS:
            one = self._unread(kind, 1)
            self.tokens_total["shed", kind] += one.tokens
            self.block_us_total["shed", kind] += one.block_us
        self._slot(now_us).unread += 1

    def lately(self, now_us: int) -> tuple[dict[Verdict, Work], int]:
        """(the work of the last half minute, or since the first call where that is shorter; that time)."""
        self._forget(now_us // _SLOT_US)
        sums: dict[Verdict, Work] = {verdict: Work() for verdict in VERDICTS}
        for slot in self._slots:
            for verdict, work in slot.works.items():
                sums[verdict].add(work)
            sums["shed"].add(self._unread("first", slot.unread))
        since_us = now_us if self._since_us is None else self._since_us
        return sums, max(_SLOT_US, min(HORIZON_US, now_us - since_us))

    def _unread(self, kind: AttemptKind, count: int) -> Work:
        """What so many that were shed unread are taken for."""
        return self._typical[kind].part(count, max(1, len(self._read)))

    def _slot(self, now_us: int) -> _Slot:
        index = now_us // _SLOT_US
        if self._since_us is None:
            self._since_us = now_us
        if not self._slots or self._slots[-1].index != index:
            self._slots.append(_Slot(index, {verdict: Work() for verdict in VERDICTS}))
            self._forget(index)
        return self._slots[-1]

    def _forget(self, index: int) -> None:
        while self._slots and self._slots[0].index <= index - _SLOTS:
            self._slots.popleft()
