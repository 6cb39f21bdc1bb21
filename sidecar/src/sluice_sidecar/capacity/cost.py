"""What a call asks of the engine, as far as anybody knows before it has run: prefill, decode, blocks over time, slots.

Frozen: what becomes of it is `progress`'s. Must not know how it was estimated, nor who is let in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice_sidecar.capacity.prefixes import Match
from sluice_sidecar.estimates.media import Media


@dataclass(frozen=True, slots=True, init=False)
class ChoiceCost:
    """One choice of a call: its own prefill, its own blocks."""

    prompt_tokens: int
    max_tokens: int
    output_tokens: int
    """Predicted output, 1 to `max_tokens`: what it will add to the KV cache, and how long it stays."""
    cached_tokens: int
    """Of the prompt, what the engine is credited with having computed already: never all of it."""
    prefix_key: bytes
    """Names what is credited: choices of equal keys share the KV blocks of that beginning. Empty: nothing is."""

    def __init__(
        self,
        prompt_tokens: int,
        max_tokens: int,
        output_tokens: int | None = None,
        cached_tokens: int = 0,
        prefix_key: bytes = b"",
    ) -> None:
        """Without a prediction it is taken to use all of `max_tokens`."""
        output_tokens = max_tokens if output_tokens is None else output_tokens
        assert 1 <= output_tokens <= max_tokens, "a prediction lies within what is asked for"
        assert 0 <= cached_tokens < prompt_tokens, "the last token of a prompt is always computed"
        for name, value in (
            ("prompt_tokens", prompt_tokens),
            ("max_tokens", max_tokens),
            ("output_tokens", output_tokens),
            ("cached_tokens", cached_tokens),
            ("prefix_key", prefix_key),
        ):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a call asks for: prefill tokens, decode tokens, blocks over time and slots. Never a request count."""

    choices: tuple[ChoiceCost, ...]
    text_bytes: int = 0
    """Weighted bytes the prompt estimate was made from; 0 where nothing can be learned from it."""
    overhead_tokens: int = 0
    """Part of the estimate that does not come from text: the chat template around each message."""
    media: Media = ()
    """What the prompt has beside text, and how many of each."""
    tenant: str = ""
    matches: tuple[Match, ...] = ()
    """By choice: what was known of its prompt's beginning, where the price was made from a body."""

    # Sums over all choices, made once: a decision reads them twenty times.
    prompt_tokens: int = field(init=False, repr=False, compare=False)
    """Prompt tokens, whether computed already or not."""
    max_tokens: int = field(init=False, repr=False, compare=False)
    """Output tokens asked for."""
    prefill_tokens: int = field(init=False, repr=False, compare=False)
    """Prompt tokens to compute."""
    decode_tokens: int = field(init=False, repr=False, compare=False)
    """Output tokens to expect."""

    def __post_init__(self) -> None:
        """Sum up."""
        prompt_tokens = sum([choice.prompt_tokens for choice in self.choices])
        for name, tokens in (
            ("prompt_tokens", prompt_tokens),
            ("max_tokens", sum([choice.max_tokens for choice in self.choices])),
            ("prefill_tokens", prompt_tokens - sum([choice.cached_tokens for choice in self.choices])),
            ("decode_tokens", sum([choice.output_tokens for choice in self.choices])),
        ):
            object.__setattr__(self, name, tokens)

    @property
    def expected_output_tokens(self) -> int | None:
        """The longest answer expected of a choice; None where nothing is known but what was asked for."""
        longest = max(self.choices, key=lambda choice: choice.output_tokens)
        return None if longest.output_tokens == longest.max_tokens else longest.output_tokens

    @property
    def longest_prompt_tokens(self) -> int:
        """The prompt that the promise of a first token is read from."""
        return max(choice.prompt_tokens for choice in self.choices)
