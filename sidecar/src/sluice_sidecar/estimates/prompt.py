"""One prompt: its size as it was sent, and the tokens that this comes to, by a ratio that is learned.

Must not know bodies, nor what a length is for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sluice_sidecar.estimates.media import Media
from sluice_sidecar.estimates.upper import UpperQuantile

# Until learned: one token for three bytes of ASCII; real text has four or more. Other scripts split finer.
START_TOKENS_PER_BYTE = 1 / 3
NON_ASCII_WEIGHT = 1.5
# No tokenizer in use packs running text into fewer tokens than this many bytes each: what is too long by this measure
# is too long for certain, and is not worth the engine's time to count.
MOST_BYTES_PER_TOKEN = 16


@dataclass(frozen=True, slots=True)
class PromptSize:
    """One prompt: its exact length where the caller sent token ids, else its text in bytes."""

    text_bytes: int = 0
    """Bytes of UTF-8, those outside ASCII weighted."""
    overhead_tokens: int = 0
    tokens: int | None = None
    media: Media = ()
    """What it has beside text: its tokens are priced apart."""
    text: bytes = b""
    """What the model is told, as far as two prompts that begin alike in it begin alike in their tokens."""


class TokenRatio:
    """Tokens per byte, learned from prompts whose length the engine has told; an upper quantile, to err safely."""

    def __init__(self, window: int = 128, least_samples: int = 8) -> None:
        self._upper = UpperQuantile(START_TOKENS_PER_BYTE, window=window, least_samples=least_samples)

    @property
    def tokens_per_byte(self) -> float:
        """As learned."""
        return self._upper.value

    def learn(self, text_bytes: int, tokens: int) -> None:
        """Take in one prompt's real length, the template's part left out."""
        if text_bytes < 64:
            return
        self._upper.learn(min(1.5, max(1 / MOST_BYTES_PER_TOKEN, tokens / text_bytes)))

    def tokens(self, prompt: PromptSize) -> int:
        """The length of its text to expect, exact where it is known."""
        if prompt.tokens is not None:
            return max(1, prompt.tokens)
        return max(1, prompt.overhead_tokens + math.ceil(prompt.text_bytes * self.tokens_per_byte))
