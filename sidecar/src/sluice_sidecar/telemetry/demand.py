"""What was asked of this pod, let in or not: the signal to size by, since work that was shed is work all the same.

Owns the sums, and the rates of the last half minute. Repeated attempts are counted apart: whoever adds up the first
ones counts each piece of work once, however often it was sent. What is shed unread in a storm counts as those did that
were shed and read. Pure. Must not know why something was shed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sluice_engine.core.fit import blocks_for
from sluice_sidecar.capacity.ledger import Cost
from sluice_sidecar.capacity.limits import Limits

Verdict = Literal["admitted", "shed"]
AttemptKind = Literal["first", "retry"]
VERDICTS: tuple[Verdict, ...] = ("admitted", "shed")
ATTEMPTS: tuple[AttemptKind, ...] = ("first", "retry")

# Long against the gap between two requests, short against the minutes that a new pod takes to load.
HORIZON_US = 30_000_000
_SLOTS = 10
_SLOT_US = HORIZON_US // _SLOTS
# A storm's unread are taken for what about so many before them were, which is a second of those that are still read.
_TYPICAL = 250


@dataclass(slots=True)
class Work:
    """An amount of work."""

    requests: int = 0
    prefill_tokens: int = 0
    """Prompt tokens to compute."""
    output_tokens: int = 0
    """Output tokens expected."""
    block_us: int = 0
    """KV blocks, times how long a full pod would hold them."""

    @property
    def tokens(self) -> int:
        """All tokens to compute."""
        return self.prefill_tokens + self.output_tokens

    def add(self, other: Work) -> None:
        """Count more."""
        self.requests += other.requests
        self.prefill_tokens += other.prefill_tokens
        self.output_tokens += other.output_tokens
        self.block_us += other.block_us


@dataclass(slots=True)
class _Mean:
    """What one that was shed asked for of late, on average."""

    requests: float = 0.0
    prefill_tokens: float = 0.0
    output_tokens: float = 0.0
    block_us: float = 0.0

    def follow(self, work: Work, weight: float) -> None:
        """One more was shed."""
        self.requests += (work.requests - self.requests) * weight
        self.prefill_tokens += (work.prefill_tokens - self.prefill_tokens) * weight
        self.output_tokens += (work.output_tokens - self.output_tokens) * weight
        self.block_us += (work.block_us - self.block_us) * weight

    def times(self, count: int) -> Work:
        """So many of it."""
        tokens = round(self.prefill_tokens * count), round(self.output_tokens * count)
        return Work(round(self.requests * count), *tokens, round(self.block_us * count))


@dataclass(slots=True)
class _Slot:
    """Three seconds of the half minute."""

    index: int
    works: dict[Verdict, Work]
    unread: int = 0


def work_of(cost: Cost, limits: Limits) -> Work:
    """What a call would take of a pod that is full."""
    step_us = limits.decode_step_us(limits.max_sequences)
    work = Work(1, cost.prefill_tokens, cost.decode_tokens)
    for choice in cost.choices:
        prefill_us = (choice.prompt_tokens - choice.cached_tokens) * limits.per_prefill_token_ns // 1000
        # It grows by a token a step: half of its output on average.
        blocks = blocks_for(choice.prompt_tokens + choice.output_tokens // 2, limits.block_tokens)
        work.block_us += blocks * (prefill_us + choice.output_tokens * step_us)
    return work


class Demand:
    """The work asked for."""

    def __init__(self) -> None:
        self.tokens_total: Counter[tuple[Verdict, AttemptKind]] = Counter()
        self.block_us_total: Counter[tuple[Verdict, AttemptKind]] = Counter()
        self._slots: deque[_Slot] = deque()
        """First attempts of the last half minute."""
        self._since_us: int | None = None
        self._typical: dict[AttemptKind, _Mean] = {kind: _Mean() for kind in ATTEMPTS}
        """Of what is shed and read, for each: the part that is a first attempt, and the part that is not."""
        self._read = 0

    def count(self, verdict: Verdict, work: Work, now_us: int, *, retry: bool) -> None:
        """A call was let in, or shed."""
        kind: AttemptKind = "retry" if retry else "first"
        self.tokens_total[verdict, kind] += work.tokens
        self.block_us_total[verdict, kind] += work.block_us
        # What is let in counts, whichever attempt that was; of what is shed each piece once.
        if verdict == "admitted" or not retry:
            self._slot(now_us).works[verdict].add(work)
        if verdict == "shed":
            self._read = min(_TYPICAL, self._read + 1)
            for one, mean in self._typical.items():
                mean.follow(work if one == kind else Work(), 1 / self._read)

    def count_unread(self, now_us: int) -> None:
        """One was shed in a storm, and nobody knows what it asked for: it counts as those before it did."""
        for kind, mean in self._typical.items():
            self.tokens_total["shed", kind] += round(mean.prefill_tokens + mean.output_tokens)
            self.block_us_total["shed", kind] += round(mean.block_us)
        self._slot(now_us).unread += 1

    def lately(self, now_us: int) -> tuple[dict[Verdict, Work], int]:
        """(the work of the last half minute, or since the first call where that is shorter; that time)."""
        self._forget(now_us // _SLOT_US)
        sums: dict[Verdict, Work] = {verdict: Work() for verdict in VERDICTS}
        for slot in self._slots:
            for verdict, work in slot.works.items():
                sums[verdict].add(work)
            sums["shed"].add(self._typical["first"].times(slot.unread))
        since_us = now_us if self._since_us is None else self._since_us
        return sums, max(_SLOT_US, min(HORIZON_US, now_us - since_us))

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


def total(works: Iterable[Work]) -> Work:
    """All of it."""
    whole = Work()
    for work in works:
        whole.add(work)
    return whole
