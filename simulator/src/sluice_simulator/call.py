"""One request from its client's side: attempts, patience, deadlines, and how it ended.

Owns an attempt from the router to its end, and the client's next move. What it measures is what the gate measures
(`StreamTimes`). Must not know why the gate or the engine decided as they did.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from sluice_engine.core.request import Outcome, Request
from sluice_engine.live_config import SLOConfig
from sluice_sidecar.admission import Ticket
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.errors import Refusal
from sluice_sidecar.refusals import MISSED
from sluice_sidecar.telemetry.measure import StreamTimes
from sluice_simulator.clients import ClientConfig, RetryBudget, retry_delay_us
from sluice_simulator.events import Events, Timer
from sluice_simulator.tally import LoadTally, Tally
from sluice_simulator.workload import Arrival

# Ends beside the engine's own outcomes.
REFUSED, LEFT, LATE = "refused", "left", "late"
# It left, and does not come back: told as LEFT.
WALKED_AWAY = "walked away"


class Door(Protocol):
    """A replica, from outside."""

    def enter(self, call: Call) -> None:
        """Take an attempt: it is told what became of it."""
        ...

    def leave(self, call: Call) -> None:
        """Its client has gone."""
        ...


class Router(Protocol):
    """What chooses the replica of an attempt."""

    def choose(self, call: Call) -> Door:
        """The replica to ask."""
        ...


class Watch:
    """Told of every refused attempt and of every end. This one, a plain run's, takes no notice."""

    def refused(self, call: Call, refusal: Refusal) -> None:
        """The gate turned an attempt away."""

    def over(self, call: Call, outcome: str, *, good: bool) -> None:
        """A request came to its end, after all its attempts."""


@dataclass(slots=True)
class Sender:
    """What the clients of one load have in common."""

    name: str
    config: ClientConfig
    slo: SLOConfig
    events: Events
    router: Router
    tally: Tally
    source: random.Random
    budget: RetryBudget
    watch: Watch


class Call:
    """One request, over all its attempts."""

    __slots__ = (
        "_deadline", "_patience", "_timeout", "arrival", "attempt", "door", "first_us", "number", "permit", "request",
        "request_id", "sender", "tally", "then", "ticket", "times",
    )  # fmt: skip

    def __init__(self, number: int, arrival: Arrival, sender: Sender) -> None:
        self.number = number
        self.arrival = arrival
        self.sender = sender
        self.attempt = 0
        self.first_us = sender.events.now_us - arrival.waited_us
        """When the first attempt was made."""
        self.request_id = ""
        """The gate's, of this attempt."""
        self.times = StreamTimes(self.first_us, arrival.prompt_tokens)
        self.door: Door | None = None
        self.ticket: Ticket | None = None
        self.permit: Permit | None = None
        self.request: Request | None = None
        self.tally: LoadTally | None = None
        self.then: Callback | None = None
        """Told once it is over: a closed loop's next move."""
        self._patience: Timer | None = None
        self._deadline: Timer | None = None
        self._timeout: Timer | None = None

    def start(self) -> None:
        """The first attempt."""
        sender = self.sender
        self.tally = sender.tally.arrived(sender.name, sender.events.now_us)
        sender.budget.first_attempt()
        self._send()

    def _send(self) -> None:
        sender = self.sender
        now_us = sender.events.now_us
        self.request_id = f"r{self.number}" if not self.attempt else f"r{self.number}.{self.attempt}"
        waited_us = 0 if self.attempt else self.arrival.waited_us
        self.times = StreamTimes(now_us - waited_us, self.arrival.prompt_tokens)
        if self.tally is not None:
            self.tally.attempts += 1
        config = sender.config
        if config.patience_us is not None:
            self._patience = sender.events.at(now_us + config.patience_us, self._impatient)
        if config.timeout_us is not None:
            self._timeout = sender.events.at(now_us + config.timeout_us, self._timed_out)
        if config.terms.finish_us is not None:
            self._deadline = sender.events.at(now_us + config.terms.finish_us, self._late)
        elif self.arrival.leaves_us is not None:
            self._deadline = sender.events.at(max(now_us, self.arrival.leaves_us), self._walk_away)
        self.door = sender.router.choose(self)
        self.door.enter(self)

    # What the replica tells.

    def first_token(self, now_us: int) -> None:
        """The answer begins."""
        self.times.token(now_us, self.sender.slo.inter_token_latency_us)
        if self._patience is not None:
            self._patience.cancel()

    def refused(self, refusal: Refusal) -> None:
        """The gate said no."""
        self._settle_attempt()
        if self.tally is not None:
            self.tally.refusals[refusal.reason.value] += 1
        self.sender.tally.timeline.at(self.sender.events.now_us).refused += 1
        self.sender.watch.refused(self, refusal)
        # Too late for its own bound: no load is to blame, and trying again is of no use.
        self._again(refusal, Outcome.EXPIRED.value if refusal is MISSED else REFUSED)

    def ended(self, outcome: Outcome, now_us: int) -> None:
        """The engine's answer came to its end."""
        self._settle_attempt()
        if not outcome.is_answer:
            self._over(outcome.value, good=False)
            return
        first, gaps = self.times.kept(self.sender.slo, now_us, None, streamed=True)
        self.times.promise = "kept" if first and gaps else "itl_missed" if first else "ttft_missed"
        if self.tally is not None:
            self._count(now_us, first_kept=first, gaps_kept=gaps)
        self._over("finished", good=first and gaps)

    def _count(self, now_us: int, *, first_kept: bool, gaps_kept: bool) -> None:
        tally, times = self.tally, self.times
        assert tally is not None, "asked for what is counted only"
        # An answer that ends with its very first token has no text.
        first_us = times.first_us if times.first_us is not None else now_us
        tally.ttft.add(first_us - times.arrived_us)
        tally.ttft_with_retries.add(first_us - self.first_us)
        tally.latency.add(now_us - self.first_us)
        tally.prompt_tokens += self.arrival.prompt_tokens
        tally.output_tokens += self.arrival.output_tokens
        tally.missed_ttft += not first_kept
        tally.missed_itl += not gaps_kept

    # What the client does.

    def _impatient(self) -> None:
        if self.times.first_us is None:
            self._leave(LEFT)

    def _timed_out(self) -> None:
        self._leave(LEFT)

    def _late(self) -> None:
        if self.tally is not None:
            self.tally.missed_deadline += 1
        self._leave(LATE)

    def _walk_away(self) -> None:
        self._leave(WALKED_AWAY)

    def _leave(self, outcome: str) -> None:
        assert self.door is not None, "an attempt is somewhere"
        self._settle_attempt()
        self.door.leave(self)
        if outcome == LEFT:
            self._again(None, outcome)
        else:
            self._over(LEFT if outcome == WALKED_AWAY else outcome, good=False)

    def _again(self, refusal: Refusal | None, outcome: str) -> None:
        sender = self.sender
        delay_us = retry_delay_us(sender.config.retries, self.attempt, refusal, sender.source)
        if delay_us is None or not sender.budget.take():
            self._over(outcome, good=False)
            return
        self.attempt += 1
        self.ticket = self.permit = self.request = None
        sender.events.after(delay_us, self._send)

    def _over(self, outcome: str, *, good: bool) -> None:
        self.sender.tally.ended(self.tally, outcome, self.sender.events.now_us, good=good)
        self.sender.watch.over(self, outcome, good=good)
        if self.then is not None:
            self.then(self)

    def _settle_attempt(self) -> None:
        for timer in (self._patience, self._timeout, self._deadline):
            if timer is not None:
                timer.cancel()
        self._patience = self._timeout = self._deadline = None


class Callback(Protocol):
    """Told of a request that is over."""

    def __call__(self, call: Call) -> None:
        """What happens next."""
        ...
