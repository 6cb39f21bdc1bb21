"""The ledger: what the gate let in and has not seen leave, corrected by the engine's own state.

Owns every admitted request from its reservation to the end of its stream. A `Permit` is the right to one entry and is
closed exactly once by the stream that holds it; a lease is the safety net. Must not know why something was admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sluice_engine.core.state import EngineState, FinishedState, RequestState
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.inside import Inside
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.capacity.progress import Progress

# A stream that neither ends nor moves for this long has lost its owner: far beyond any gap between two tokens.
LEASE_US = 900_000_000
# The engine lists a request as soon as it is tokenized; one it never listed after this long holds nothing there.
UNSEEN_GRACE_US = 5_000_000
# State is polled five times a second: a finished request is gone from it well within this.
_COMPLETED_MEMORY_US = 3_000_000


@dataclass(slots=True, eq=False)
class Entry:
    """One admitted call."""

    id: str
    cost: Cost
    admitted_us: int
    touched_us: int
    choices: list[Progress]
    forwarded_us: int | None = None
    learned: bool = False
    told_tokens: int | None = None
    """Prompt and output together, as the answer counted them."""


@dataclass(slots=True)
class Ledger:
    """Entries by request id, and strangers: requests in the engine that no entry explains."""

    on_release: Callable[[Entry, bool, int], None] | None = None
    """Told of each release: the entry, whether its stream completed, and when."""
    expect: Callable[[str, int, int], int] = lambda _tenant, max_tokens, _produced: max_tokens
    """Output tokens to expect of a tenant's answer that may have so many and has produced so many."""
    lists_requests: bool = True
    """Whether the engine's state lists its requests; else their tokens are counted as they go by."""
    entries: dict[str, Entry] = field(default_factory=dict)
    strangers: list[Progress] = field(default_factory=list)
    inside: Inside = field(default_factory=Inside)
    """The sums over all that is live."""
    admitted_sum_us: int = 0
    """Of the times at which the entries were admitted."""
    decoded: tuple[int, int] = (0, 0)
    """(tokens, choices that decoded all the time) between the last two states."""
    releases_total: int = 0
    double_closes_total: int = 0
    leases_expired_total: int = 0
    _completed: dict[str, int] = field(default_factory=dict)

    def reserve(self, request_id: str, cost: Cost, now_us: int) -> Permit:
        """Enter a call; the caller closes the permit when its stream ends, however it ends."""
        choices = [progress_of(choice) for choice in cost.choices]
        entry = Entry(request_id, cost, now_us, now_us, choices)
        assert request_id not in self.entries, "request ids are minted by the gate and unique"
        self.entries[request_id] = entry
        self.admitted_sum_us += now_us
        self.inside.enter(choices)
        return Permit(self, entry)

    def release(self, entry: Entry, *, completed: bool, now_us: int) -> bool:
        """Forget an entry; False when it was released before."""
        if self.entries.get(entry.id) is not entry:
            self.double_closes_total += 1
            return False
        del self.entries[entry.id]
        for choice in entry.choices:
            if choice.passed_tokens > choice.output_tokens:
                choice.finish(choice.prompt_tokens, choice.passed_tokens)
        self.admitted_sum_us -= entry.admitted_us
        self.releases_total += 1
        if completed:
            # The last state may still list it; the engine has ended it all the same.
            self._completed[entry.id] = now_us
        for choice in entry.choices:
            if not completed and choice.seen and not choice.gone:
                # The engine frees it with its next step: until a state says so, its blocks are taken.
                self.strangers.append(choice)
            else:
                self.inside.leave(choice)
        if self.on_release is not None:
            self.on_release(entry, completed, now_us)
        return True

    def mean_age_us(self, now_us: int) -> int:
        """How long those that are in have been in, on average."""
        count = len(self.entries)
        return (now_us * count - self.admitted_sum_us) // count if count else 0

    def expire(self, now_us: int) -> list[Entry]:
        """Release what has not moved for a whole lease."""
        expired = [entry for entry in self.entries.values() if now_us - entry.touched_us > LEASE_US]
        for entry in expired:
            self.leases_expired_total += 1
            self.release(entry, completed=False, now_us=now_us)
        return expired

    def apply(self, state: EngineState, limits: Limits, now_us: int, *, length_bias: float = 1.0) -> list[Entry]:
        """Correct every size by the engine's state; returns the entries whose real prompt length is new."""
        listed = {(request.id, request.choice): request for request in state.requests}
        finished = {(ended.id, ended.choice): ended for ended in state.finished}
        learned = []
        tokens = decodes = 0
        for entry in self.entries.values():
            for index, choice in enumerate(entry.choices):
                if (request := listed.pop((entry.id, index), None)) is not None:
                    # An answer that is not streamed moves nothing here until it is whole.
                    if choice.correct(request):
                        entry.touched_us = max(entry.touched_us, now_us)
                        self.expect_more(entry, choice)
                elif self.lists_requests:
                    _not_listed(entry, choice, finished.get((entry.id, index)), now_us)
                    if choice.gone:
                        choice.part = None  # the sums begin anew below, without it
                if (new := choice.settle()) is not None:
                    tokens, decodes = tokens + new, decodes + 1
            if not entry.learned and all(choice.seen for choice in entry.choices):
                entry.learned = True
                learned.append(entry)
        self.decoded = tokens, decodes
        self._completed = {k: v for k, v in self._completed.items() if now_us - v < _COMPLETED_MEMORY_US}
        self.strangers = [_progress(request) for (key, _), request in listed.items() if key not in self._completed]
        self.inside.refill(self.live(), limits, length_bias)
        return learned

    def expect_more(self, entry: Entry, choice: Progress) -> None:
        """One that reached what was expected of it, and goes on, is expected anew."""
        if choice.expected_tokens <= choice.output_tokens < choice.max_tokens:
            choice.expected_tokens = self.expect(entry.cost.tenant, choice.max_tokens, choice.output_tokens)

    def forget_engine(self) -> None:
        """The engine is gone: nothing it listed holds anything any more."""
        self.forget_strangers()
        for entry in self.entries.values():
            for choice in entry.choices:
                if choice.seen:
                    choice.gone = True
                    self.inside.leave(choice)

    def forget_strangers(self) -> None:
        """What was listed beside the entries is so long ago that it says nothing about now."""
        for choice in self.strangers:
            self.inside.leave(choice)
        self.strangers = []

    def renew(self, now_us: int) -> None:
        """Nobody watched for a while: what did not move in that time may have."""
        for entry in self.entries.values():
            entry.touched_us = now_us

    def outgrown(self) -> Iterator[tuple[int, int]]:
        """(predicted, produced) tokens of those inside whose answers are longer than was predicted."""
        for entry in self.entries.values():
            for choice in entry.choices:
                if choice.output_tokens > choice.predicted_tokens:
                    yield choice.predicted_tokens, choice.output_tokens

    def live(self) -> Iterator[Progress]:
        """Every choice that holds, or will hold, blocks and a slot in the engine."""
        for entry in self.entries.values():
            for choice in entry.choices:
                if not choice.gone:
                    yield choice
        yield from self.strangers


def progress_of(choice: ChoiceCost) -> Progress:
    """A choice that has not begun."""
    return Progress(
        choice.prompt_tokens, choice.max_tokens, choice.output_tokens, choice.output_tokens,
        computed_tokens=choice.cached_tokens, cached_tokens=choice.cached_tokens, prefix_key=choice.prefix_key,
    )  # fmt: skip


def _not_listed(entry: Entry, choice: Progress, ended: FinishedState | None, now_us: int) -> None:
    if ended is not None:
        choice.ended(ended)
    elif choice.seen:
        choice.gone = True
    elif entry.forwarded_us is not None:
        choice.gone = now_us - entry.forwarded_us > UNSEEN_GRACE_US


def _progress(request: RequestState) -> Progress:
    progress = Progress(request.prompt_tokens, request.max_tokens, request.max_tokens, request.max_tokens)
    progress.correct(request)
    return progress


class Permit:
    """The right to one ledger entry. Closing it twice is harmless and counted."""

    __slots__ = ("_ledger", "completed", "entry")

    def __init__(self, ledger: Ledger, entry: Entry) -> None:
        self._ledger = ledger
        self.entry = entry
        self.completed = False
        """Set by the stream once the engine's answer came to its end."""

    def forwarded(self, now_us: int) -> None:
        """The request is on its way to the engine."""
        self.entry.forwarded_us = now_us
        self.entry.touched_us = now_us

    def touch(self, now_us: int) -> None:
        """The stream moved: renew the lease."""
        self.entry.touched_us = now_us

    @property
    def counts_tokens(self) -> bool:
        """Whether what goes by tells how far it is, since the engine does not list its requests."""
        return not self._ledger.lists_requests

    def tokens(self, choice: int, count: int) -> None:
        """So many tokens of a choice went by. One that was not priced, since the engine read more into a body: none."""
        if choice >= len(self.entry.choices):
            return
        progress = self.entry.choices[choice]
        progress.passed_tokens += count
        if self.counts_tokens:
            progress.count_tokens(count)
            self._ledger.expect_more(self.entry, progress)

    def told(self, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """The answer came to its end, and said how long its prompts and all its choices were: the last word on both."""
        choices = self.entry.choices
        if prompt_tokens is not None and output_tokens is not None:
            self.entry.told_tokens = prompt_tokens + output_tokens
        if len(choices) == 1:
            (choice,) = choices
            choice.passed_tokens = choice.produced_tokens if output_tokens is None else output_tokens
            choice.finish(choice.prompt_tokens if prompt_tokens is None else prompt_tokens, choice.passed_tokens)
        elif output_tokens is not None:
            # Of what was not seen of any of them each has its part.
            unseen = output_tokens - sum(choice.produced_tokens for choice in choices)
            for left, choice in zip(range(len(choices), 0, -1), choices, strict=True):
                part = max(0, unseen) // left
                unseen -= part
                choice.finish(choice.prompt_tokens, choice.produced_tokens + part)

    def close(self, now_us: int) -> bool:
        """Give the entry back; False when that had happened before."""
        return self._ledger.release(self.entry, completed=self.completed, now_us=now_us)

    @property
    def open(self) -> bool:
        """Whether the entry is still held."""
        return self._ledger.entries.get(self.entry.id) is self.entry

    @contextmanager
    def held(self, clock: Callable[[], int]) -> Iterator[Permit]:
        """`with permit.held(clock):` closes the permit on the way out, whatever happens inside."""
        try:
            yield self
        finally:
            self.close(clock())
