"""How a client behaves: how long it waits, until when an answer is of use, and when it tries again.

The defaults are those of the `openai` clients: two retries, 0.5 s doubled up to 8 s less up to a quarter, the server's
own delay where it names one of at most two minutes, and `x-should-retry` obeyed.
Source: `openai-python`, `_base_client.py`: `_should_retry`, `_calculate_retry_timeout`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Protocol

from sluice_engine.core.terms import Terms

# Beyond this a client does not wait for the server: it gives up. Source: openai-python, MAX_RETRY_AFTER_DELAY.
MOST_RETRY_AFTER_US = 120_000_000
# Attempts whose retries a budget remembers, whatever the rate.
BUDGET_LEAST_RETRIES = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """When a refused or abandoned attempt is made again."""

    most: int = 2
    initial_us: int = 500_000
    longest_us: int = 8_000_000
    jitter_percent: float = 25.0
    """The pause is shortened by up to this much."""
    factor: float = 2.0
    honour_retry_after: bool = True
    """Whether the server's delay and its `x-should-retry` are obeyed."""
    tells_attempt: bool = True
    """Whether it says which attempt it is, as `x-stainless-retry-count`; else the gate goes by the body."""
    after_patience: bool = True
    """Whether an attempt that the client itself gave up is made again: SDKs do after a timeout."""
    budget_percent: float | None = None
    """Retries of all clients of the load are at most this share of their first attempts; None: no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """One kind of client."""

    patience_us: int | None = None
    """It leaves when no first token has come by then; None: it waits."""
    timeout_us: int | None = None
    """It leaves when the whole answer has not come by then: one that does not stream. It tells nobody."""
    terms: Terms = field(default_factory=Terms)
    """Class, tenant and bounds, as its headers tell them; after the second bound it leaves by itself."""
    retries: Retries = field(default_factory=Retries)


class Answer(Protocol):
    """What a refusal tells its client: the gate's `Refusal` is one."""

    @property
    def retry_after_us(self) -> int | None:
        """The header `retry-after-ms`; None where it is left out."""
        ...

    @property
    def should_retry(self) -> bool:
        """The header `x-should-retry`."""
        ...


class RetryBudget:
    """A token bucket that first attempts fill: what a service mesh calls a retry budget."""

    def __init__(self, percent: float | None) -> None:
        self._share = None if percent is None else percent / 100
        self._tokens = BUDGET_LEAST_RETRIES

    def first_attempt(self) -> None:
        """A new request was sent."""
        if self._share is not None:
            self._tokens = min(self._tokens + self._share, 10 * BUDGET_LEAST_RETRIES)

    def take(self) -> bool:
        """Whether one more retry may be sent; it is counted."""
        if self._share is None:
            return True
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def retry_delay_us(retries: Retries, attempt: int, refusal: Answer | None, source: random.Random) -> int | None:
    """How long a client pauses before its next attempt; None when it makes none.

    `attempt` counts from 0; `refusal` is None where the client itself gave up.
    """
    if attempt >= retries.most or (refusal is None and not retries.after_patience):
        return None
    if refusal is not None and retries.honour_retry_after:
        if not refusal.should_retry:
            return None
        # Rounded up to the header's milliseconds.
        asked_us = None if refusal.retry_after_us is None else -(-refusal.retry_after_us // 1000) * 1000
        if asked_us is not None and asked_us > MOST_RETRY_AFTER_US:
            return None
        if asked_us:
            return asked_us
    pause_us = min(retries.initial_us * retries.factor**attempt, retries.longest_us)
    return round(pause_us * (1 - source.random() * retries.jitter_percent / 100))
