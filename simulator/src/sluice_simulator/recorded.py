"""A record's requests as a load."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from sluice_engine.core.ended import EndedRequest
from sluice_engine.core.request import Outcome
from sluice_simulator.record import Record
from sluice_simulator.workload import Arrival, Content

GOOD_ENDS = frozenset(outcome.value for outcome in Outcome if outcome.is_answer)
"""Ends that are the answer's own; in every other case the client, or a deadline, ended it."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A record's requests as an open stream: they come when the engine took them in."""

    record: Record

    def arrivals(self, source: random.Random, until_us: int | None) -> Iterator[Arrival]:
        """Requests in order of time."""
        del source
        start_us = self.start_us
        for one in sorted(self.record.requests, key=lambda one: one.queued_us):
            time_us = one.queued_us - start_us
            if until_us is not None and time_us >= until_us:
                return
            yield arrival_of(one, start_us, self.record.block_tokens)

    @property
    def start_us(self) -> int:
        """When virtual time begins, on the engine's clock."""
        return min(one.queued_us for one in self.record.requests)

    @property
    def last_us(self) -> int:
        """When the last request comes."""
        return max(one.queued_us for one in self.record.requests) - self.start_us


def arrival_of(one: EndedRequest, start_us: int, block_tokens: int) -> Arrival:
    """A recorded request, as its client would send it again; `start_us` is when virtual time begins."""
    has_ended = one.outcome in GOOD_ENDS
    heads = tuple(int(key, 16) for key in one.prompt_keys)
    return Arrival(
        one.queued_us - start_us,
        one.prompt_tokens,
        one.output_tokens if has_ended else one.max_tokens,
        one.max_tokens,
        Content(heads, block_tokens) if heads else Content(),
        key=one.request_id,
        waited_us=one.queued_us - one.arrival_us,
        priority=one.priority,
        tenant=one.tenant,
        leaves_us=None if has_ended else one.ended_us - start_us,
    )
