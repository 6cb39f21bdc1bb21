"""One choice of a call as far as the gate knows it: what it holds, what is left to compute, what is still expected.

Owns how one choice is corrected by what the engine says of it. Must not know entries, permits or the engine's document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sluice_engine.core.state import FinishedState, RequestState
from sluice_sidecar.capacity.peak import Growth


class Part(NamedTuple):
    """What one choice adds to the sums of what is inside."""

    growth: Growth
    blocks: int
    """Of its whole known input."""
    queue_tokens: int
    """Prefill that others wait for; 0 of one that decodes."""
    prior_pairs: int
    """Pairs of those tokens with the ones before them, which make them dearer."""


@dataclass(slots=True)
class Progress:
    """One choice as far as the gate knows it."""

    prompt_tokens: int
    max_tokens: int
    expected_tokens: int
    """Output to expect, as its tenant's answers were, at most `max_tokens`."""
    predicted_tokens: int
    """What was expected when it entered."""
    computed_tokens: int = 0
    """Until the engine has begun with it: what it is credited with having computed for others."""
    output_tokens: int = 0
    passed_tokens: int = 0
    """Of the output, what went by at the gate: of the last tokens an engine that is asked now and then tells late."""
    settled_tokens: int = 0
    """Of the output, what was known when a state was last taken in."""
    cached_tokens: int = 0
    prefix_key: bytes = b""
    """Choices of equal keys share the blocks of their first `cached_tokens`."""
    seen: bool = False
    """The engine has listed it."""
    gone: bool = False
    """The engine holds nothing for it any more; its stream may still be on its way."""
    part: Part | None = None
    """What it adds to the sums; None while it is in none."""

    @property
    def known_tokens(self) -> int:
        """Its whole known input: what it holds once prefilled."""
        return self.prompt_tokens + self.output_tokens

    @property
    def produced_tokens(self) -> int:
        """Output as far as the engine has told or the gate has seen it, whichever is more."""
        return max(self.output_tokens, self.passed_tokens)

    @property
    def remaining_tokens(self) -> int:
        """Tokens to compute before its next token: 1 while it decodes."""
        left = self.prompt_tokens + self.output_tokens - self.computed_tokens
        return left if left > 1 else 1  # noqa: FURB136  # asked of every request inside, at every decision

    @property
    def prefilling(self) -> bool:
        """Whether more than the next decode is left to compute."""
        return self.prompt_tokens + self.output_tokens - self.computed_tokens > 1

    def likely_tokens(self, length_bias: float) -> int:
        """Output in all, where answers are so much longer than was predicted; longer again of one that outlived that.

        What is expected of those that have outlived it comes from the same history, and is too short as well.
        """
        likely = max(1, int(self.predicted_tokens * length_bias))
        while likely <= self.output_tokens:
            likely = likely * 3 // 2 + 1
        return min(self.max_tokens, likely)

    def settle(self) -> int | None:
        """Tokens that came since this was last asked; None of one that did not decode all the time."""
        new, was_decoding = self.output_tokens - self.settled_tokens, self.settled_tokens > 0
        self.settled_tokens = self.output_tokens
        return new if was_decoding and not self.prefilling and not self.gone else None

    def count_tokens(self, count: int) -> None:
        """So many more tokens came out of it."""
        self.output_tokens += count
        self.computed_tokens = self.prompt_tokens + self.output_tokens - 1

    def finish(self, prompt_tokens: int, output_tokens: int) -> None:
        """It came to its end, and was so long."""
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens
        self.computed_tokens = max(self.computed_tokens, self.prompt_tokens + self.output_tokens - 1)

    def correct(self, state: RequestState) -> bool:
        """Take over what the engine says; whether it got on since."""
        computed_tokens = state.computed_tokens
        if state.status == "running" or state.preemptions:
            self.cached_tokens = min(self.cached_tokens, state.cached_tokens)
        else:
            # What it will find computed is known once it enters: until then the credit stands.
            self.cached_tokens = min(self.cached_tokens, state.prompt_tokens - 1)
            computed_tokens = max(computed_tokens, self.cached_tokens)
        moved = (self.computed_tokens, self.output_tokens) != (computed_tokens, state.output_tokens)
        self.prompt_tokens = state.prompt_tokens
        self.max_tokens = state.max_tokens
        self.expected_tokens = min(self.expected_tokens, state.max_tokens)
        self.computed_tokens = computed_tokens
        self.output_tokens = state.output_tokens
        self.seen, self.gone = True, False
        return moved

    def ended(self, state: FinishedState) -> None:
        """The engine has ended it."""
        self.prompt_tokens, self.output_tokens = state.prompt_tokens, state.output_tokens
        self.seen = self.gone = True
