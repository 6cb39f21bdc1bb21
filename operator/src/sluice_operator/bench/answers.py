"""What clients saw of their requests, and the figures of a run. Pure: integer microseconds in, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice_sidecar.telemetry.measure import percentile

_OK = 200
_REFUSED = (429, 503)


@dataclass(slots=True)
class Answer:
    """One request to its end."""

    status: int = 0
    """HTTP status of the last attempt; 0: nobody answered."""
    code: str = ""
    """Why it failed or was refused: the error's code, or what happened to the connection."""
    attempts: int = 1
    ttft_us: int | None = None
    """From the attempt that was answered to its first text."""
    gaps_us: list[int] = field(default_factory=list)
    """Between two events with text. An event may hold several tokens, as where a character is made of them."""
    latency_us: int = 0
    """From the attempt that was answered to the end of the answer."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    is_counted: bool = False
    """Whether the server told its tokens; else each event with text is taken for one, and the prompt for none."""

    @property
    def is_whole(self) -> bool:
        """Answered to its end."""
        return self.status == _OK and not self.code

    @property
    def is_refused(self) -> bool:
        """The server had no room for it, or nobody to answer."""
        return self.status in _REFUSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What an answer is held against. `percent` of its own gaps must be within `itl_us`."""

    ttft_us: int
    itl_us: int
    percent: float = 99.0

    def kept_by(self, answer: Answer) -> bool:
        """Whether an answer is good. One of a single event has no gap to miss."""
        if not answer.is_whole or answer.ttft_us is None or answer.ttft_us > self.ttft_us:
            return False
        return not answer.gaps_us or percentile(answer.gaps_us, self.percent) <= self.itl_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How values lie, in ms."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run gave."""

    seconds: float
    requests: int
    whole: int
    attempts: int
    refused: dict[str, int]
    """Requests that were refused at their last attempt, by code."""
    failed: dict[str, int]
    """Requests that ended otherwise than whole or refused, by what happened."""
    uncounted: int
    """Whole answers whose server told no tokens: theirs are events, of which each may hold several."""
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_ms: Spread | None
    gap_ms: Spread | None
    """All gaps of all answers."""
    itl_ms: Spread | None
    """Each answer's mean time between two tokens after the first."""
    latency_ms: Spread | None
    good: int | None
    """Answers that kept the promise; None: none was given."""


def figures(answers: Sequence[Answer], seconds: float, promise: Promise | None = None) -> Figures:
    """The figures of a run of `seconds`; rates count whole answers only."""
    whole = [answer for answer in answers if answer.is_whole]
    broken = [answer for answer in answers if not answer.is_whole]
    per_s = 1 / seconds if seconds > 0 else 0.0
    return Figures(
        seconds=round(seconds, 3),
        requests=len(answers),
        whole=len(whole),
        attempts=sum(answer.attempts for answer in answers),
        refused=dict(Counter(answer.code for answer in broken if answer.is_refused)),
        failed=dict(Counter(answer.code for answer in broken if not answer.is_refused)),
        uncounted=sum(not answer.is_counted for answer in whole),
        requests_per_s=round(len(whole) * per_s, 3),
        output_tokens_per_s=round(sum(answer.output_tokens for answer in whole) * per_s, 1),
        prompt_tokens_per_s=round(sum(answer.prompt_tokens for answer in whole) * per_s, 1),
        ttft_ms=_spread([answer.ttft_us for answer in whole if answer.ttft_us is not None]),
        gap_ms=_spread([gap_us for answer in whole for gap_us in answer.gaps_us]),
        itl_ms=_spread([itl_us for answer in whole if (itl_us := _itl_us(answer)) is not None]),
        latency_ms=_spread([answer.latency_us for answer in whole]),
        good=None if promise is None else sum(promise.kept_by(answer) for answer in answers),
    )


def _itl_us(answer: Answer) -> int | None:
    if answer.output_tokens < 2 or not answer.gaps_us:  # one token has nothing after it
        return None
    return sum(answer.gaps_us) // (answer.output_tokens - 1)


def _spread(values_us: Sequence[int]) -> Spread | None:
    if not values_us:
        return None
    p50, p90, p99, largest = (round(percentile(values_us, percent) / 1000, 2) for percent in (50, 90, 99, 100))
    return Spread(mean=round(sum(values_us) / len(values_us) / 1000, 2), p50=p50, p90=p90, p99=p99, max=largest)
