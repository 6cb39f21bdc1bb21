"""A record's requests as a load."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from sluice_engine.core.request import Outcome
from sluice_simulator.record import Record
from sluice_simulator.workload import Arrival

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
            ended = one.outcome in GOOD_ENDS
            yield Arrival(
                time_us,
                one.prompt_tokens,
                one.output_tokens if ended else one.max_tokens,
                one.max_tokens,
                key=one.request_id,
                waited_us=one.queued_us - one.arrival_us,
                priority=one.priority,
                tenant=one.tenant,
                leaves_us=None if ended else one.ended_us - start_us,
            )

    @property
    def start_us(self) -> int:
        """When virtual time begins, on the engine's clock."""
        return min(one.queued_us for one in self.record.requests)

    @property
    def last_us(self) -> int:
        """When the last request comes."""
        return max(one.queued_us for one in self.record.requests) - self.start_us
